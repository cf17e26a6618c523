"""Drawn tokens follow each request's own settings, whoever shares its batch; logprobs are the model's."""

import math

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.sampling.sampler import (
    SamplingBatch,
    filter_scores,
    first_argmax,
    sample,
    token_logprobs,
    uniform,
)
from scalegate.serving_check.engine.sequence import Sequence
from transformers import AutoModelForCausalLM, LlamaConfig

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def sequences_of(*params: SamplingParams, seeds: list[int] | None = None) -> list[Sequence]:
    return [
        Sequence(str(row), [0], 1, settings, seeds[row] if seeds else row, 9)
        for row, settings in enumerate(params)
    ]


def batch_of(*params: SamplingParams, seeds: list[int] | None = None) -> SamplingBatch:
    return SamplingBatch.of(sequences_of(*params, seeds=seeds), CPU)


def draws(params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """How often each token of LOGITS is drawn, over `count` positions of one request."""
    batch = batch_of(*[params] * count, seeds=[1] * count)
    tokens = sample(LOGITS.expand(count, -1).clone(), batch, torch.arange(count))
    return torch.bincount(tokens, minlength=len(LOGITS)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float):
    expected = (LOGITS / temperature).softmax(-1)
    assert (draws(SamplingParams(temperature=temperature)) - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 100}, 6),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.75}, 2),
        ({"min_p": 0.3}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 2, "top_p": 0.99}, 2),
        ({"top_k": 2, "top_p": 0.7}, 1),
    ],
)
def test_filters_keep_the_most_likely_tokens_and_their_proportions(settings: dict, kept: int):
    expected = LOGITS.softmax(-1)
    expected[kept:] = 0
    expected /= expected.sum()
    seen = draws(SamplingParams(**settings))
    assert seen[kept:].sum() == 0
    assert (seen - expected).abs().max() < 0.03


def test_a_row_is_drawn_alike_whatever_the_other_rows_want():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 2
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8, temperature=1.5),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=200, top_p=0.9, min_p=0.01),
    ]
    seeds = [11, 22, 33, 44, 55, 66]
    for position in range(50):
        positions = position + 100 * torch.arange(6)
        together = sample(logits.clone(), batch_of(*params, seeds=seeds), positions)
        for row, settings in enumerate(params):
            alone = sample(
                logits[row : row + 1].clone(),
                batch_of(settings, seeds=[seeds[row]]),
                positions[row : row + 1],
            )
            assert alone[0] == together[row]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_tokens_that_have_so_much_and_their_equals(top_p: float):
    # In bfloat16 many logits are equal. Flat rows keep thousands of tokens, the others a few.
    scales = torch.tensor([[0.1], [6.0], [1.0], [3.0]])
    logits = (torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * scales).bfloat16().float()
    probabilities = logits.double().softmax(-1)
    params = SamplingParams(top_p=top_p)
    together = filter_scores(logits, batch_of(*[params] * 4)).isfinite()
    for row, kept in enumerate(together):
        own = probabilities[row]
        least = own[kept].min()
        assert torch.equal(kept, own >= least)
        # Sums of 5,000 probabilities in float32.
        rounding = 5000 * 2.0**-24
        assert own[kept].sum() >= top_p - rounding
        assert own[own > least].sum() < top_p + rounding
        assert torch.equal(filter_scores(logits[row : row + 1], batch_of(params)).isfinite()[0], kept)


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert sample(logits, batch_of(SamplingParams(temperature=0.0)), torch.tensor([0])).tolist() == [1]


@pytest.mark.parametrize("vocabulary", [256, 300, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0, 40), (-40, 40), (-40, 0), (-3, 1)])
def test_the_first_argmax_is_the_first_maximum(vocabulary: int, dtype: torch.dtype, low: int, high: int):
    logits = torch.randint(low, high, (64, vocabulary), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1], logits[2, 7] = -math.inf, math.inf
    # Equal numbers of different bits.
    logits[3] = logits[3].clamp(max=0)
    logits[3, ::2] *= -0.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert first_argmax(logits).tolist() == expected
    assert first_argmax(logits[4:]).tolist() == expected[4:]


def test_uniform_numbers_are_uniform_and_unrelated_from_seed_to_seed():
    positions = torch.arange(20000)
    first, second = uniform(torch.tensor(1), positions), uniform(torch.tensor(2), positions)
    for numbers in (first, second):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert (torch.histc(numbers, 20, 0, 1) / 1000 - 1).abs().max() < 0.15
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.03
    assert abs(torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1]) < 0.03


def test_logprobs_are_of_the_distribution_before_any_setting():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.1, top_k=1, logprobs=3),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]
    tokens = torch.tensor([4, 5, 6])
    found = token_logprobs(logits, tokens, sequences_of(*params))
    expected = logits.log_softmax(-1)
    assert set(found) == {0, 2}
    assert math.isclose(found[0].logprob, expected[0, 4].item(), rel_tol=1e-6)
    assert [token for token, _ in found[0].top] == expected[0].topk(3).indices.tolist()
    assert found[2].top == ()


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Engine(model, EngineOptions(max_num_seqs=8, prefill_chunk=16), frozenset())


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(engine: Engine):
    params = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, seed=42)
    other = SamplingParams(max_tokens=17, temperature=1.3, top_k=20)
    alone = engine.generate([[1, 2, 3]], params)[0]
    together = engine.generate([[9] * 20, [1, 2, 3], [5], [6, 7]], [other, params, other, other])[1]
    assert together.token_ids == alone.token_ids
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30, seed=43))[0] != alone


def test_requests_without_a_seed_differ(engine: Engine):
    answers = engine.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=20))
    assert len({answer.token_ids for answer in answers}) == 8


def test_served_logprobs_equal_the_models_own(engine: Engine):
    prompt = [5, 6, 7, 8]
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=1, logprobs=4)
    [answer] = engine.generate([prompt], params)
    model = engine.runner.model
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    model.set_attn_implementation("scalegate_paged")
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    for row, token, found in zip(expected, answer.token_ids, answer.logprobs, strict=True):
        assert abs(found.logprob - row[token].item()) < 1e-4
        best = row.topk(4)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert torch.allclose(torch.tensor([value for _, value in found.top]), best.values, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": -1},
        {"prompt_logprobs": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"logprobs": -1},
        {"max_tokens": 2**31},
        {"temperature": 1e308},
        {"temperature": "hot"},
        {"top_p": 1e-320},
        {"top_k": 2**63},
        {"top_k": 7.5},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"stop_token_ids": (2**63,)},
        {"stop_token_ids": (1,) * 1025},
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(settings: dict):
    with pytest.raises(UserError, match=f"{next(iter(settings))} (is|has)"):
        SamplingParams(**settings)


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 9.9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float):
    logits = torch.tensor([[0.5, 2.0, 1.0]])
    assert sample(logits, batch_of(SamplingParams(temperature=temperature)), torch.tensor([0])).tolist() == [
        1
    ]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4])
def test_at_the_least_temperature_the_best_token_is_drawn(temperature: float):
    batch = batch_of(SamplingParams(temperature=temperature))
    assert batch.sampled
    assert sample(torch.tensor([[0.5, 2.0, 1.0]]), batch, torch.tensor([0])).tolist() == [1]


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
def test_seeds_of_64_bits_draw(engine, seed: int):
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=seed, ignore_eos=True))
    assert len(answer.token_ids) == 4
