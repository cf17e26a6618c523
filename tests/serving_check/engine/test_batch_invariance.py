"""A request's logits are the same bits alone and in every company, under `pin` and `per-token`.

Every comparison is made under `tuned` as well, where it must fail: else it would prove nothing. Whether a
CPU's own products drift is not known, so under `tuned` they are made to.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.kv.format import require_batch_invariance
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.other_products import other_products
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.scheduler import PrefillChunk, Schedule
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.serving_check.checks.drifting_products import drifting_products
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 192,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "dense": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256),
}
NEW_TOKENS = 4
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
Request = tuple[str, list[int]]
Logits = dict[tuple[str, int], Tensor]
"""By request and the number of tokens that they follow."""


def model_of(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)  # so much that a sum's last bits reach the logits
    return model


def products_of(mode: str) -> AbstractContextManager[None]:
    return drifting_products() if mode == "tuned" else nullcontext()


def engine_of(model: PreTrainedModel, mode: str, **sizes: int | str) -> Engine:
    options = {"max_model_len": 320, "max_num_seqs": 128, "kv_cache_tokens": 24000} | sizes
    return Engine(copy.deepcopy(model), EngineOptions(batch_invariance=mode, **options), frozenset())


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist()


def recorded(engine: Engine) -> Logits:
    """Filled with every row of logits that the engine draws a token from."""
    logits: Logits = {}
    run: Callable = type(engine.runner).run.__get__(engine.runner)

    def recording(batch: Schedule):
        result = run(batch)
        for sequence, row in zip(result.sequences, result.logits, strict=True):
            logits[sequence.request_id, len(sequence.tokens)] = row.clone()
        return result

    engine.runner.run = recording  # type: ignore[method-assign]
    return logits


def run(engine: Engine, first: Sequence[Request], later: Sequence[Request] = ()) -> None:
    """`first` at once, `later` when those have two tokens each: prompts then come beside decoding."""
    for name, tokens in first:
        engine.add_request(name, tokens, GREEDY)
    waiting, steps = [*later], 0
    while engine.has_work or waiting:
        engine.step()
        steps += 1
        if steps == 2:
            for name, tokens in waiting:
                engine.add_request(name, tokens, GREEDY)
            waiting = []


A = ("A", prompt(37, seed=1))


def company(count: int, shortest: int, longest: int) -> list[Request]:
    lengths = [shortest + (longest - shortest) * index // max(1, count - 1) for index in range(count)]
    return [(f"other {index}", prompt(length, seed=100 + index)) for index, length in enumerate(lengths)]


MIXES = {
    "a shorter neighbour": ([A, *company(1, 5, 5)], []),
    "a longer neighbour": ([A, *company(1, 250, 250)], []),
    "a batch of 3": ([A, *company(2, 3, 60)], []),
    "a batch of 128": ([A, *company(127, 3, 60)], []),
    "the last place of a batch": ([*company(20, 3, 60), A], []),
    "prompts beside it": ([A], company(3, 40, 150)),
    "requests ahead of it": (company(9, 3, 60), [A]),
}
"""Who comes first, who comes later."""


def alone(engine: Engine, requests: list[Request]) -> Logits:
    logits = recorded(engine)
    for request in requests:
        run(engine, [request])
    return logits


def drifted(expected: Logits, found: Logits) -> int:
    """Rows of logits that are other bits than when their request was alone."""
    both = expected.keys() & found.keys()
    assert both and {name for name, _ in both} == {name for name, _ in expected}
    return sum(not torch.equal(found[key], expected[key]) for key in both)


def drifted_in_company(engine: Engine, everyone: list[Request]) -> dict[str, int]:
    """Rows of logits that are other bits than alone, by who shared the batch."""
    expected = alone(engine, everyone)
    of_a = {key: row for key, row in expected.items() if key[0] == "A"}
    together = recorded(engine)
    run(engine, everyone)
    found = {"all of them together": drifted(expected, together)}
    for name, (first, later) in MIXES.items():
        logits = recorded(engine)
        run(engine, first, later)
        found[name] = drifted(of_a, logits)
    return found


@pytest.mark.parametrize(
    ("kind", "dtype"),
    exhaustive_but(
        [("dense", torch.float32), ("dense", torch.bfloat16), ("experts", torch.float32)],
        ("dense", torch.bfloat16),
    ),
    ids=str,
)
def test_no_company_changes_a_bit_unless_tuned(kind: str, dtype: torch.dtype):
    model = model_of(kind, dtype)
    everyone = [A, *company(12, 3, 60)]
    found = {}
    for mode in ("tuned", "pin", "per-token"):
        with products_of(mode):
            found[mode] = drifted_in_company(engine_of(model, mode), everyone)
    assert not any(found["pin"].values()), found["pin"]
    assert not any(found["per-token"].values()), found["per-token"]
    assert all(found["tuned"].values()), found["tuned"]


def test_per_token_bits_survive_preemption_and_any_cut_of_the_prompt():
    model = model_of("dense", torch.float32)
    requests = [A, *company(7, 30, 60)]
    found = {}
    for mode in ("tuned", "per-token"):
        with products_of(mode):
            expected = alone(engine_of(model, mode, page_size=1), requests)
            cut = engine_of(model, mode, page_size=1, prefill_chunk=7)
            in_pieces = recorded(cut)
            run(cut, requests)
            tight = engine_of(model, mode, max_model_len=96, kv_cache_tokens=304, page_size=1)
            again = recorded(tight)
            run(tight, requests)
        assert tight.stats().preemptions > 0
        found[mode] = drifted(expected, in_pieces), drifted(expected, again)
    assert found["per-token"] == (0, 0)
    assert all(found["tuned"]), "nothing was proved"


def test_what_was_decoded_before_a_preemption_is_decoded_again_where_that_keeps_bits():
    """As on a GPU under `pin`; here the kernels are the same, so that only the tokens can tell."""
    model = model_of("dense", torch.float32)
    engine = engine_of(model, "per-token", max_model_len=96, kv_cache_tokens=304, page_size=1)
    requests = [A, *company(7, 30, 60)]
    expected = alone(engine, requests)
    engine.scheduler.replays = True
    chunks: list[PrefillChunk] = []
    schedule = engine.scheduler.schedule

    def noted() -> Schedule:
        step = schedule()
        chunks.extend(step.prefill)
        return step

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    engine.runner.batches = lambda step: [step] if step.num_tokens else []  # type: ignore[method-assign]
    engine.runner._keeps_bits = False
    again = recorded(engine)
    run(engine, requests)
    assert engine.stats().preemptions > 0
    replayed = [chunk for chunk in chunks if chunk.is_replay]
    assert replayed and all(chunk.start >= chunk.sequence.num_prompt for chunk in replayed)
    others = [chunk for chunk in chunks if not chunk.is_replay]
    assert all(chunk.start + chunk.count <= chunk.sequence.num_prompt for chunk in others)
    assert again.keys() == expected.keys()
    assert all(torch.allclose(again[key], row, atol=1e-3) for key, row in expected.items())


def test_the_last_token_of_a_prompt_is_the_prompts_work_however_it_was_cut():
    engine = engine_of(model_of("dense", torch.float32), "pin", prefill_chunk=12)
    steps: list[Schedule] = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: steps.append(schedule()) or steps[-1]  # type: ignore[method-assign]
    run(engine, [A])
    assert [chunk.count for step in steps for chunk in step.prefill] == [12, 12, 12, 1]
    assert [len(step.decode) for step in steps] == [0] * 4 + [1] * (NEW_TOKENS - 1)


def test_seeded_requests_draw_the_same_tokens_and_logprobs_at_any_batch():
    model = model_of("dense", torch.float32)
    params = [
        SamplingParams(
            max_tokens=12, temperature=1.0, top_p=0.95, top_k=200, seed=seed, ignore_eos=True, logprobs=3
        )
        for seed in range(6)
    ]
    prompts = [tokens for _, tokens in company(6, 3, 80)]
    found = {}
    for mode in ("tuned", "pin"):
        with products_of(mode):
            engine = engine_of(model, mode)
            by_itself = [
                engine.generate([ids], settings)[0] for ids, settings in zip(prompts, params, strict=True)
            ]
            found[mode] = engine.generate(prompts, params) == by_itself
    assert found == {"tuned": False, "pin": True}


@pytest.mark.parametrize(
    "kv_format", exhaustive_but(["int4_per_token_head", "kvarn_k4v2_g64"], "kvarn_k4v2_g64")
)
def test_no_company_changes_a_bit_over_coded_keys_and_values(kv_format: str):
    model, everyone = model_of("dense", torch.float32), [A, *company(5, 60, 150)]
    found = {}
    for mode in ("tuned", "pin", "per-token"):
        with products_of(mode):
            engine = engine_of(model, mode, kv_cache_dtype=kv_format)
            expected = alone(engine, everyone)
            together = recorded(engine)
            run(engine, everyone[3:], everyone[:3])
        found[mode] = drifted(expected, together)
    assert (found["pin"], found["per-token"]) == (0, 0), found
    assert found["tuned"], "nothing was proved"


def test_a_kv_format_that_cannot_keep_bits_is_refused_by_name():
    require_batch_invariance("kvarn_k4v2_g128", "per-token", torch.device("cpu"))
    require_batch_invariance("kvarn_k4v2_g128", "pin", torch.device("cuda"))
    with pytest.raises(UserError, match=r"kvarn.* not batch-invariant under 'per-token'.* unquantized, fp8"):
        require_batch_invariance("kvarn_k4v2_g128", "per-token", torch.device("cuda"))


def test_a_product_that_no_layout_computes_is_found_by_name():
    dense, experts = (engine_of(model_of(kind, torch.float32), "pin").runner.model for kind in CONFIGS)
    assert other_products(dense) == []
    assert other_products(experts) == [f"model.layers.{index}.mlp.gate (linear)" for index in range(2)]
    assert len(other_products(model_of("dense", torch.float32))) > 10, "nothing was looked at"
