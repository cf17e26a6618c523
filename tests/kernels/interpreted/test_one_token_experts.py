"""INT4 experts of one decoding token, against the reference; see conftest.py.

Interpreted products are in fp32, so both types of activations are compared here.
"""

from dataclasses import replace

import pytest
import torch
from scalegate.kernels.experts import int4
from scalegate.kernels.experts.one_token import (
    MOST_STEPS,
    Int4Operand,
    Tuning,
    experts,
    experts_reference,
    serves,
    steps_and_rounds,
)
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.rounding_bounds import rounded, summed

pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = 5


def operand(n: int, k: int, dtype: torch.dtype, group_size=128, fractional=False) -> Int4Operand:
    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(EXPERTS, n, k // group_size, device=DEVICE) * 0.02 + 0.001
    zero = torch.rand(EXPERTS, n, k // group_size, device=DEVICE) * 15
    zero = zero if fractional else zero.to(torch.uint8)
    words = int4.pack(codes, scale, zero, group_size, dtype)
    return Int4Operand(*words, n, k, group_size, fractional)


def pair(hidden: int, inner: int, dtype: torch.dtype, **form) -> tuple[Int4Operand, Int4Operand]:
    return operand(2 * inner, hidden, dtype, **form), operand(hidden, inner, dtype, **form)


def narrow_pair() -> tuple[Int4Operand, Int4Operand]:
    """Of 16 activations and 16 numbers of y, which one program computes: cheap with many experts."""
    gate_up, down = operand(32, 128, torch.float16), operand(16, 128, torch.float16)
    return gate_up, replace(down, k=16)


def token(hidden: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    expert = torch.arange(top_k, device=DEVICE)[None] * 3 % EXPERTS
    # Of a mean far from zero, as after SiLU: what is added to codes and taken off again is large then.
    x = (torch.randn(1, hidden, device=DEVICE) + 0.5).to(dtype)
    return x, expert, torch.rand(1, top_k, device=DEVICE).to(dtype)


def error(answer: torch.Tensor, expected: torch.Tensor) -> float:
    assert answer.shape == expected.shape
    return float((answer.double() - expected.double()).norm() / expected.double().norm())


def bound(dtype: torch.dtype) -> float:
    """Activations and y are rounded. Sums of a group, 128 products with 1024 + q in fp16 and 128 + q in bf16,
    are as many eighths as large as what is left of them when 1024 or 128 of each are taken off."""
    code = 1024 if dtype == torch.float16 else 128
    # The interpreter cuts off what bf16 cannot hold, which may be twice as much as is rounded.
    cut_off = 2 if dtype == torch.bfloat16 and DEVICE == "cpu" else 1
    return cut_off * rounded(dtype, times=2) + code / 8 * summed(128)


# The tests after it are of float16.
@pytest.mark.parametrize("dtype", exhaustive_but([torch.bfloat16, torch.float16], torch.bfloat16), ids=str)
@pytest.mark.parametrize("fractional", exhaustive_but([False, True], False))
@pytest.mark.parametrize(
    ("hidden", "inner", "group_size"),
    exhaustive_but(
        [
            (384, 128, 128),  # an odd number of tiles, which splits do not divide
            (256, 256, 256),
        ],
        (384, 128, 128),
    ),
)
def test_experts_are_those_of_the_reference(hidden, inner, group_size, fractional, dtype):
    torch.manual_seed(1)
    gate_up, down = pair(hidden, inner, dtype, group_size=group_size, fractional=fractional)
    given = token(hidden, 2, dtype)
    expected = experts_reference(*given, gate_up, down)
    assert error(experts(*given, gate_up, down), expected) < bound(dtype)
    x, expert, weight = given
    mistaken = experts(x, (expert + 1) % EXPERTS, weight, gate_up, down)
    assert error(mistaken, expected) > 0.3, "the check does not see an expert mistaken for another"


@pytest.mark.parametrize("top_k", exhaustive_but(range(1, 9), 8))
def test_any_number_of_experts_may_be_taken_and_one_of_them_twice(top_k):
    """There are five: from the sixth on the first ones are taken again."""
    torch.manual_seed(2)
    gate_up, down = narrow_pair()
    given = token(128, top_k, torch.float16)
    assert error(experts(*given, gate_up, down), experts_reference(*given, gate_up, down)) < bound(
        torch.float16
    )


def test_every_expert_is_weighed_by_its_own_share():
    torch.manual_seed(3)
    gate_up, down = narrow_pair()
    x, expert, _ = token(128, 3, torch.float16)
    for index in range(3):
        weight = torch.zeros(1, 3, device=DEVICE)
        weight[0, index] = 2.0
        chosen = expert[:, index : index + 1], weight[:, index : index + 1]
        alone = experts_reference(x, *chosen, gate_up, down)
        assert error(experts(x, expert, weight, gate_up, down), alone) < bound(torch.float16)


def test_an_expert_that_is_not_there_adds_nothing():
    torch.manual_seed(4)
    gate_up, down = narrow_pair()
    x, expert, weight = token(128, 3, torch.float16)
    expected = experts_reference(x, expert[:, :1], weight[:, :1], gate_up, down)
    for nowhere in ([EXPERTS, -1], [-1, 1 << 20]):
        expert[0, 1:] = torch.tensor(nowhere, device=DEVICE)
        answer = experts(x, expert, weight, gate_up, down)
        assert error(answer, expected) < bound(torch.float16)
        assert error(experts_reference(x, expert, weight, gate_up, down), expected) == 0


@pytest.mark.parametrize(("hidden", "inner"), exhaustive_but([(328, 128), (256, 72), (296, 200)], (296, 200)))
def test_rows_and_columns_need_not_fill_tiles(hidden, inner):
    """Columns beyond K are zeros in x; their codes and scales may be anything."""
    torch.manual_seed(5)
    dtype = torch.float16
    wide, inner_wide = -(-hidden // 128) * 128, -(-inner // 128) * 128
    gate_up, down = operand(2 * inner, wide, dtype), operand(hidden, inner_wide, dtype)
    gate_up, down = replace(gate_up, k=hidden), replace(down, k=inner)
    given = token(hidden, 2, dtype)
    assert error(experts(*given, gate_up, down), experts_reference(*given, gate_up, down)) < bound(
        torch.float16
    )


@pytest.mark.parametrize(
    "tuning",
    exhaustive_but(
        [Tuning(1, 1, False), Tuning(2, 2, False), Tuning(4, 1, False), Tuning(8, 4, True)],
        Tuning(8, 4, True),
    ),
    ids=str,
)
def test_every_way_of_sharing_k_among_warps_gives_the_same(tuning):
    """One warp holds no more than 8 of these 10 tiles at once."""
    torch.manual_seed(6)
    gate_up, down = operand(2 * 384, 1280, torch.float16), operand(64, 384, torch.float16)
    given = token(1280, 1, torch.float16)
    expected = experts_reference(*given, gate_up, down)
    assert error(experts(*given, gate_up, down, tuning), expected) < bound(torch.float16)


def test_shares_of_any_type_are_taken_and_experts_of_any_integer_type():
    torch.manual_seed(7)
    gate_up, down = pair(128, 128, torch.bfloat16)
    x, expert, weight = token(128, 2, torch.bfloat16)
    expected = experts(x, expert, weight, gate_up, down)
    assert torch.equal(experts(x, expert.int(), weight.float(), gate_up, down), expected)


def test_no_tile_is_left_out_and_no_round_holds_more_than_a_product_has_columns():
    for splits in (1, 2, 4, 8):
        for k_tiles in range(1, 120):
            steps, rounds = steps_and_rounds(k_tiles, splits)
            assert steps <= MOST_STEPS and splits * steps * rounds >= k_tiles
            assert splits * MOST_STEPS * (rounds - 1) < k_tiles


def test_what_the_kernels_do_not_take_is_refused():
    gate_up, down = pair(256, 128, torch.float16)
    assert serves(gate_up, down)
    assert not serves(operand(256, 256, torch.float16, group_size=64), down)
    assert not serves(gate_up, operand(256, 128, torch.float16, fractional=True))
    assert not serves(gate_up, operand(256, 256, torch.float16))
    x, expert, weight = token(256, 2, torch.float16)
    with pytest.raises(ValueError, match="2 tokens"):
        experts(x.repeat(2, 1), expert.repeat(2, 1), weight.repeat(2, 1), gate_up, down)
    with pytest.raises(ValueError, match="17 experts"):
        experts(*token(256, 17, torch.float16), gate_up, down)
