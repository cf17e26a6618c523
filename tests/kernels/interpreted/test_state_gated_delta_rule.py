"""The gated delta rule's kernels against the recurrence in fp64; see conftest.py."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from scalegate.kernels.states import gated_delta_rule as module
from scalegate.kernels.states.batch import StateBatch
from scalegate.kernels.states.gated_delta_rule import gated_delta_rule
from scalegate.kernels.states.gated_delta_scan import EPSILON, Tiles
from scalegate.kernels.states.row_strides import with_steady_rows
from scalegate.tests.exhaustive import exhaustive_but
from torch import Tensor
from torch.nn.functional import softplus

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 12
ROUNDINGS = 8
"""How often a number is rounded on its way: the inverse, w or u, the state, what a token adds, the mix of
queries and keys, the output; and twice again in the chunks before."""
UNIT = {torch.float32: 1e-5 / ROUNDINGS, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""The greatest relative error of rounding an operand of products: of bf16, if the interpreter cuts it off; of
tf32, which GPUs cut off; and of float32's products, sums of up to 256 with errors of 2^-24 each."""


@dataclass
class Case:
    """Inputs of a step, in the order of `gated_delta_rule`, and its requests as (tokens, tokens before)."""

    inputs: list[Tensor]
    slots: Tensor
    batch: StateBatch
    requests: list[tuple[int, int]]

    def run(self) -> tuple[Tensor, Tensor]:
        """Output, which was NaN before, and slots after the step."""
        value = self.inputs[2]
        output = torch.full(value.shape, float("nan"), dtype=value.dtype, device=DEVICE)
        slots = self.slots.clone()
        gated_delta_rule(*self.inputs, slots, self.batch, output)
        return output, slots


def batch_of(requests, decode_only: bool = False, padding: int = 0) -> StateBatch:
    """Requests as (tokens, tokens before), with slots in some order, and padding behind them."""
    counts = [count for count, _ in requests] + [int(decode_only)] * padding
    starts = torch.tensor([0, *counts]).cumsum(0)
    lengths = [count + before for count, before in requests] + [0] * padding
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))[: len(requests)].tolist()
    return StateBatch(
        starts.int().to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.tensor(rows + [ROWS] * padding, device=DEVICE),
        decode_only,
    )


def make_case(
    requests,
    key_heads=1,
    heads=2,
    key_dim=16,
    value_dim=16,
    dtype=torch.float32,
    by_channel=False,
    padding=0,
    decode_only=False,
    decay=0.1,
) -> Case:
    """Keys that are alike, so that tokens depend on each other, and decays of any size."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(count for count, _ in requests) + padding
    query = normal(tokens, key_heads, key_dim)
    key = normal(tokens, key_heads, key_dim) + 2 * normal(key_heads, key_dim)
    value = normal(tokens, heads, value_dim)
    of_decay = (tokens, heads, key_dim) if by_channel else (tokens, heads)
    log_decay = -decay * softplus(3 * normal(*of_decay))
    rate = normal(tokens, heads).sigmoid().to(dtype)
    inputs = [query.to(dtype), key.to(dtype), value.to(dtype), log_decay, rate]
    return Case(
        [each.to(DEVICE) for each in inputs],
        normal(ROWS, heads, key_dim, value_dim).to(DEVICE),
        batch_of(requests, decode_only, padding),
        list(requests),
    )


def reference(case: Case) -> tuple[Tensor, Tensor]:
    """Output, with NaN for tokens of no request, and slots, in fp64."""
    query, key, value, log_decay, rate = (each.double().cpu() for each in case.inputs)
    query, key = (each * torch.rsqrt((each * each).sum(2, keepdim=True) + EPSILON) for each in (query, key))
    shared = value.shape[1] // key.shape[1]
    query, key = (each.repeat_interleave(shared, 1) for each in (query, key))
    log_decay = log_decay if log_decay.ndim == 3 else log_decay[..., None]
    slots = case.slots.double().cpu()
    output = torch.full_like(value, float("nan"))
    starts = case.batch.query_start_loc.tolist()
    for row, (first, end), (_, before) in zip(
        case.batch.request_rows.tolist(), pairwise(starts), case.requests, strict=False
    ):
        state = slots[row]
        if before == 0:
            state.zero_()
        for t in range(first, end):
            state *= log_decay[t].exp()[..., None]
            answer = (state * key[t][..., None]).sum(1)
            state += key[t][..., None] * (rate[t][:, None] * (value[t] - answer))[:, None]
            output[t] = (state * query[t][..., None]).sum(1) * key.shape[2] ** -0.5
    return output, slots


def check(case: Case) -> None:
    found, wanted = case.run(), reference(case)
    # A sum of log decays is wrong by its last bit, which is an error of as much in its exponential.
    summed = max(float(chunk.sum(0).abs().max()) for chunk in case.inputs[3].split(64))
    allowed = ROUNDINGS * UNIT[case.inputs[0].dtype] + 2.0**-24 * summed
    for one, other in zip(found, wanted, strict=True):
        one = one.double().cpu()
        assert torch.equal(one.isnan(), other.isnan())
        assert float((one - other).nan_to_num().norm() / other.nan_to_num().norm()) < allowed
    others = sorted(set(range(ROWS)) - set(case.batch.request_rows.tolist()))
    assert torch.equal(found[1][others], case.slots[others])


DECODES = [(1, 5), (1, 0), (1, 90)]
MIXED = [(1, 5), (1, 0), (70, 0), (2, 7), (1, 3), (64, 64)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
"""For prompts: the interpreter has no products of bf16."""


@pytest.mark.parametrize("dtype", exhaustive_but(DTYPES, torch.bfloat16))
@pytest.mark.parametrize("by_channel", [False, True])
def test_one_token_for_each_request(dtype, by_channel):
    check(make_case(DECODES, decode_only=True, dtype=dtype, by_channel=by_channel))


def test_padding_of_a_decode_only_step_gets_zeros():
    case = make_case(DECODES, decode_only=True, padding=2)
    output, slots = case.run()
    assert torch.equal(output[3:], torch.zeros_like(output[3:])) and not output[:3].isnan().any()
    case.inputs = [each[:3] for each in case.inputs]
    case.batch = batch_of(DECODES, decode_only=True)
    assert torch.equal(slots, case.run()[1])


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.exhaustive), BF16]
)
@pytest.mark.parametrize("by_channel", exhaustive_but([False, True], False))
def test_decodes_and_prompts_in_one_step(dtype, by_channel):
    check(make_case(MIXED, padding=5, dtype=dtype, by_channel=by_channel))


@pytest.mark.parametrize("chunk", exhaustive_but([16, 32, 64], 64))
@pytest.mark.parametrize("count", exhaustive_but([2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200], 129))
def test_any_length_of_prompt_and_chunk(count, chunk, monkeypatch):
    monkeypatch.setattr(module, "tiles_of", lambda *_: Tiles(chunk, 16, 2))
    check(make_case([(count, 0)]))


@pytest.mark.parametrize("by_channel", [False, True])
def test_prompts_token_by_token(by_channel, monkeypatch):
    monkeypatch.setattr(module, "tiles_of", lambda *_: None)
    check(make_case([(1, 5), (1, 0), (20, 0), (2, 7)], by_channel=by_channel, padding=5))


@pytest.mark.parametrize(
    "key_dim, value_dim",
    exhaustive_but([(8, 8), (24, 40), (64, 64), (128, 128), (256, 256), (96, 80)], (8, 8), (96, 80)),
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_any_size_of_state(key_dim, value_dim, dtype):
    check(make_case([(1, 4), (40, 3)], key_dim=key_dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("key_heads, heads", exhaustive_but([(1, 1), (2, 2), (2, 6)], (2, 6)))
def test_heads_of_keys_serve_consecutive_heads_of_values(key_heads, heads):
    check(make_case([(1, 4), (17, 3)], key_heads=key_heads, heads=heads))


@pytest.mark.parametrize("decay", exhaustive_but([0.0, 1e-3, 30.0], 30.0))
@pytest.mark.parametrize("by_channel", exhaustive_but([False, True], False))
def test_decays_of_any_size(decay, by_channel):
    check(make_case([(70, 3)], decay=decay, by_channel=by_channel))


@pytest.mark.parametrize("count", exhaustive_but([2, 15, 16, 17, 33], 17))
def test_any_length_of_prompt_with_a_decay_for_each_channel(count):
    check(make_case([(count, 5)], by_channel=True, key_dim=16, value_dim=48))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("by_channel", exhaustive_but([False, True], False))
def test_views_with_strides_and_at_odd_addresses(by_channel, dtype):
    case = make_case([(1, 4), (70 if dtype == torch.bfloat16 else 20, 3)], by_channel=by_channel, dtype=dtype)
    wanted = case.run()
    for index, each in enumerate(case.inputs):
        wide = each.new_full((*each.shape[:-1], each.shape[-1] + 3), 7.0)
        case.inputs[index] = wide[..., 1 : 1 + each.shape[-1]].copy_(each)
    case.inputs[2] = case.inputs[2].transpose(1, 2).contiguous().transpose(1, 2)
    case.inputs[4] = case.inputs[4].t().contiguous().t()
    assert all(torch.equal(one, other) for one, other in zip(case.run(), wanted, strict=True))


def test_only_rows_are_copied_whose_kernels_would_be_compiled_again_or_give_wrong_products():
    heads = torch.zeros(9, 2, 3 * 16)  # as many models have queries, keys and values: views of one tensor
    for view in (heads, heads[..., 16:32], heads[:5], heads[:1]):
        assert with_steady_rows(view) is view
    by_head, odd = torch.zeros(2, 9, 16).transpose(0, 1), torch.zeros(9, 2, 3 * 8)
    for view in (by_head, heads[..., ::3], heads[..., 1:17], odd[..., :16], torch.zeros(2, 9).t()):
        copied = with_steady_rows(view)
        assert copied is not view and copied.is_contiguous() and copied.shape == view.shape


def test_rows_that_are_no_multiples_of_16_bytes():
    check(make_case([(1, 4), (17, 3)], key_dim=10, value_dim=9))


@pytest.mark.parametrize("cut", exhaustive_but([1, 63, 64, 100], 100))
def test_a_prompt_cut_in_two(cut):
    """Cut where a chunk ends, the numbers are the same to the bit; elsewhere up to rounding."""
    whole = make_case([(130, 0)])
    output, slots = whole.run()
    parts = []
    for tokens, request in ((slice(0, cut), (cut, 0)), (slice(cut, 130), (130 - cut, cut))):
        part = Case([each[tokens] for each in whole.inputs], whole.slots, batch_of([request]), [request])
        found, whole.slots = part.run()
        parts.append(found)
    found = torch.cat(parts)
    if cut % 64 == 0:
        assert torch.equal(found, output) and torch.equal(whole.slots, slots)
    for one, other in ((found, output), (whole.slots, slots)):
        assert float((one - other).norm() / other.norm()) < ROUNDINGS * UNIT[torch.float32]


def test_keys_that_are_all_the_same():
    """A series in powers of the triangular system would lose every digit here."""
    case = make_case([(128, 0)], decay=0.0)
    case.inputs[1][:] = case.inputs[1][:1]
    case.inputs[4].fill_(1.0)
    check(case)


@pytest.mark.exhaustive
def test_many_requests():
    """More than are looked through at once, when a program seeks its own."""
    few = make_case([(1, 1), (70, 0), (3, 2)], heads=1)
    starts, lengths, rows = few.batch.query_start_loc, few.batch.seq_lens, few.batch.request_rows
    many = StateBatch(
        torch.cat([starts[:1], starts[1:2].expand(301), starts[2:]]),
        torch.cat([lengths[:1], lengths.new_zeros(300), lengths[1:]]),
        torch.cat([rows[:1], rows.new_full((300,), ROWS), rows[1:]]),
        False,
    )
    wanted = few.run()
    few.batch = many
    assert all(torch.equal(one, other) for one, other in zip(few.run(), wanted, strict=True))
