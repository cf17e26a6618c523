"""Log-probabilities of prompts: the model's own, however a prompt is cut, batched, preempted or stored."""

import copy

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.serving_check.engine import scheduler
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from transformers import AutoModelForCausalLM, Qwen3Config

pytestmark = pytest.mark.numeric

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.3,
)
LENGTHS = [1, 2, 30, 97, 160]
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=3)


def make_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=torch.float32).eval()


def make_engine(**options) -> Engine:
    settings = {"max_num_seqs": 8, "prefill_chunk": 48, "max_model_len": 256, **options}
    return Engine(make_model(), EngineOptions(**settings), frozenset())


def prompt(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.fixture(scope="module")
def expected():
    """By length: log-softmax at every position, [length - 1, V]."""
    model = make_model()
    with torch.no_grad():
        return {n: model(torch.tensor([prompt(n)])).logits[0, :-1].log_softmax(-1) for n in LENGTHS}


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk": 7}, {"prefill_chunk": 512}, {"kv_cache_tokens": 288, "max_model_len": 256}],
    ids=["chunks", "small chunks", "one chunk", "a small pool"],
)
@pytest.mark.parametrize("most_scored", [256, 20])
def test_logprobs_of_every_prompt_token_are_the_models_own(expected, options, most_scored, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_SCORED", most_scored)
    engine = make_engine(**options)
    prompts = [prompt(n) for n in LENGTHS]
    others = [SamplingParams(max_tokens=60, ignore_eos=True)] * 3
    answers = engine.generate([*prompts, [1] * 20, [2], [3] * 60], [SCORED] * len(LENGTHS) + others)
    for n, tokens, answer in zip(LENGTHS, prompts, answers, strict=False):
        assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ((), (), "length")
        assert len(answer.prompt_logprobs) == n - 1
        for row, token, found in zip(expected[n], tokens[1:], answer.prompt_logprobs, strict=True):
            assert abs(found.logprob - row[token].item()) < 1e-3
            assert [value for _, value in found.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
            assert abs(found.rank - 1 - (row > row[token]).sum().item()) <= 1
    assert answers[-1].prompt_logprobs is None and len(answers[-1].token_ids) == 60
    assert engine.pool.usage == 0 and engine.stats().generation_tokens == 180


def test_scored_prompts_are_computed_in_steps_of_few_logits(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_SCORED", 20)
    engine = make_engine()
    seen = []
    run = engine.runner.run

    def watched(batch):
        result = run(batch)
        seen.append(sum(len(logits) for _, logits in result.scored))
        return result

    monkeypatch.setattr(engine.runner, "run", watched)
    engine.generate([prompt(n) for n in LENGTHS], SCORED)
    assert max(seen) == 20 and sum(seen) == sum(LENGTHS) - len(LENGTHS)


def test_tokens_after_a_scored_prompt_are_those_after_a_plain_one():
    engine = make_engine()
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    scored = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    prompts = [prompt(n) for n in LENGTHS]
    together = engine.generate(prompts * 2, [plain] * 5 + [scored] * 5)
    for answer, other in zip(together[:5], together[5:], strict=True):
        assert answer.token_ids == other.token_ids and len(answer.logprobs) == len(other.logprobs) == 12
    assert all(found.top == () for found in together[9].prompt_logprobs)


def test_prompts_are_scored_with_keys_and_values_as_they_are_stored(expected):
    """Scored together, tokens are as likely as they were when they were drawn over the same kind of pages."""
    stored, plain = make_engine(kv_cache_dtype="int8_per_token_head"), make_engine()
    params = SamplingParams(max_tokens=60, temperature=1, seed=1, ignore_eos=True, logprobs=0)
    start = prompt(97)
    [drawn] = stored.generate([start], params)
    whole = [*start, *drawn.token_ids]
    as_drawn = torch.tensor([logprobs.logprob for logprobs in drawn.logprobs])
    [scored], [unquantized] = stored.generate([whole], SCORED), plain.generate([whole], SCORED)
    found = torch.tensor([logprobs.logprob for logprobs in scored.prompt_logprobs[96:]])
    other = torch.tensor([logprobs.logprob for logprobs in unquantized.prompt_logprobs[96:]])
    assert (found - as_drawn).abs().max() < 1e-3 < (other - as_drawn).abs().max() / 3


def test_a_prompt_may_fill_the_context_where_nothing_is_drawn():
    engine = make_engine()
    [answer] = engine.generate([prompt(256)], SCORED)
    assert len(answer.prompt_logprobs) == 255
    for length, params in ((257, SCORED), (256, SamplingParams(max_tokens=1))):
        with pytest.raises(UserError, match="it may have at most"):
            engine.add_request("x", prompt(length), params)
