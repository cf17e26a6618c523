"""A step that fails takes down the request to blame, and no other: the rest get the tokens they would get."""

import pytest
import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from transformers import AutoModelForCausalLM, Qwen3Config

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
POISON = 200


def make_engine() -> Engine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    return Engine(model, EngineOptions(max_num_seqs=8, prefill_chunk=16), frozenset())


class PoisonedRunner:
    """A runner whose steps fail while a sequence that begins with POISON is among them."""

    def __init__(self, runner, after_the_model: bool):
        self.runner = runner
        self.after_the_model = after_the_model
        self.failures = 0

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def run(self, batch):
        sequences = [*batch.decode, *(chunk.sequence for chunk in batch.prefill)]
        poisoned = any(sequence.tokens[0] == POISON for sequence in sequences)
        result = self.runner.run(batch) if self.after_the_model or not poisoned else None
        if poisoned:
            self.failures += 1
            raise RuntimeError("poison")
        return result


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, POISON, (length,), generator=generator).tolist()


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=10 + seed, temperature=0.9, seed=seed)


def serve(engine: Engine, arrivals: dict[int, list[tuple[str, list[int], SamplingParams]]]):
    """Every request's tokens, and the ids that failed; arrivals by the step before which they come."""
    tokens: dict[str, list[int]] = {}
    failed: list[str] = []
    for step in range(400):
        for name, tokens_in, settings in arrivals.get(step, []):
            tokens[name] = []
            engine.add_request(name, tokens_in, settings)
        if not engine.has_work:
            if step > max(arrivals):
                break
            continue
        try:
            outputs = engine.step()
        except RuntimeError:
            failed += engine.recover()
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert not engine.has_work
    return tokens, failed


def good_ones(count: int):
    return [(f"good-{seed}", prompt(5 + 7 * seed, seed), params(seed)) for seed in range(count)]


@pytest.mark.parametrize("after_the_model", [True, False])
@pytest.mark.parametrize("when", [0, 4])
def test_only_the_request_to_blame_fails_whoever_came_with_it(when, after_the_model):
    expected, none = serve(make_engine(), {0: good_ones(5)})
    assert none == []
    engine = make_engine()
    engine.runner = poisoned = PoisonedRunner(engine.runner, after_the_model)
    good = good_ones(5)
    bad = [(f"bad-{i}", [POISON, i, 1], SamplingParams()) for i in range(2)]
    tokens, failed = serve(engine, {0: good[:3], when: good[:3] * (when == 0) + [bad[0], *good[3:], bad[1]]})
    assert sorted(failed) == ["bad-0", "bad-1"]
    assert poisoned.failures >= 2
    assert {name: tokens[name] for name in expected} == expected
    assert engine.pool.usage == 0.0
    assert engine.stats().running == engine.stats().waiting == 0


def test_when_nobody_is_new_all_that_ran_fail_and_the_engine_goes_on():
    engine = make_engine()
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    for name, tokens, settings in good_ones(3):
        engine.add_request(name, tokens, settings)
    while not all(sequence.is_proven for sequence in engine._sequences.values()):
        engine.step()
    run = engine.runner.run
    engine.runner.run = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert sorted(engine.recover()) == ["good-0", "good-1", "good-2"]
    engine.runner.run = run
    assert not engine.has_work and engine.pool.usage == 0.0
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids) == 2
