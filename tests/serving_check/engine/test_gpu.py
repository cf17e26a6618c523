"""The engine on a GPU: compiled or not, overlapped or not, its greedy tokens are those of generate()."""

import json
import random
from pathlib import Path

import pytest
import torch
from scalegate.layouts.modules.merged_linear import MergedLinear
from scalegate.serving_check.engine.compiling.compiled_layers import TUNINGS, CompiledLayers
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

pytestmark = pytest.mark.gpu

NEW_TOKENS = 48
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SIZES = {"max_model_len": 1024, "max_num_seqs": 48, "decode_buckets": (1, 8, 48), "prefill_chunk": 256}
WAYS = {
    "plain": {"compiled": False, "overlapped": False},
    "overlapped": {"compiled": False},
    "compiled": {"overlapped": False},
    "compiled and overlapped": {},
    "preempted": {"kv_cache_tokens": 2048},
}


def load(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()


@pytest.fixture(scope="module")
def prompts(example_checkpoint: Path, heldout_text: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(example_checkpoint)
    lines = heldout_text.read_text(encoding="utf-8").splitlines()[:2]
    tokens = tokenizer("".join(json.loads(line)["text"] for line in lines))["input_ids"]
    lengths = random.Random(0)
    return [tokens[start : start + lengths.randint(1, 300)] for start in range(0, 32 * 97, 97)]


@pytest.fixture(scope="module")
def generated(example_checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load(example_checkpoint)
    return [
        model.generate(
            torch.tensor([prompt], device="cuda"),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, example_checkpoint: Path) -> Engine:
    engine = Engine(load(example_checkpoint), EngineOptions(**SIZES, **WAYS[request.param]), frozenset())
    engine.warm_up(progress=False)
    return engine


def test_greedy_tokens_equal_generate(engine: Engine, prompts, generated):
    assert [list(answer.token_ids) for answer in engine.generate(prompts, GREEDY)] == generated
    assert engine.pool.usage == 0 and not engine.has_work
    assert engine.stats().compilations == ()


def test_nothing_follows_the_token_that_ends_a_request(engine: Engine, prompts, generated):
    ends = frozenset(range(0, engine.vocab_size, 7))
    cut = [next((i for i, t in enumerate(row) if t in ends), NEW_TOKENS - 1) + 1 for row in generated]
    assert min(cut) < NEW_TOKENS // 2, "no request ends early"
    engine.eos_token_ids = ends
    answers = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    engine.eos_token_ids = frozenset()
    assert [list(answer.token_ids) for answer in answers] == [
        row[:length] for row, length in zip(generated, cut, strict=True)
    ]


def test_requests_aborted_in_flight_leave_nothing_behind(engine: Engine, prompts, generated):
    for index, prompt in enumerate(prompts):
        engine.add_request(f"request-{index}", prompt, GREEDY)
    tokens: dict[str, list[int]] = {}
    for step in range(400):
        if step in (3, 9, 20):
            engine.abort(f"request-{step}")
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if not engine.has_work:
            break
    assert engine.pool.usage == 0 and not engine.has_work
    for index, row in enumerate(generated):
        answer = tokens.get(f"request-{index}", [])
        assert answer == row[: len(answer)] and (index in (3, 9, 20) or len(answer) == NEW_TOKENS)


def test_sampled_tokens_do_not_depend_on_the_loop(example_checkpoint: Path, prompts):
    params = [
        SamplingParams(
            max_tokens=24,
            temperature=0.0 if row % 5 == 0 else 0.8,
            top_p=0.9 if row % 2 else 1.0,
            top_k=40 if row % 3 == 0 else 0,
            seed=row,
            ignore_eos=True,
        )
        for row in range(len(prompts))
    ]
    answers = []
    for overlapped in (False, True):
        config = EngineOptions(**SIZES, compiled=False, overlapped=overlapped)
        engine = Engine(load(example_checkpoint), config, frozenset())
        engine.warm_up(progress=False)
        answers.append(engine.generate(prompts, params))
        assert engine.stats().compilations == ()
    assert answers[0] == answers[1]


def test_layers_that_are_alike_are_compiled_once(example_checkpoint: Path):
    torch._dynamo.utils.counters.clear()
    model = load(example_checkpoint)
    engine = Engine(model, EngineOptions(**SIZES), frozenset())
    engine.warm_up(progress=False)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    alike = ("embedding", "rotary embedding", "first norm", "layer with the norm that follows")
    beside = len(alike) - 1
    parts = model.config.num_hidden_layers + beside
    assert graphs == len(alike) * len(TUNINGS) < parts * len(TUNINGS)
    engine.generate([[1, 2, 3]] * 5 + [[4] * 77], GREEDY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert sum(isinstance(module, MergedLinear) for module in model.modules()) == 5 * len(model.model.layers)


def test_a_model_can_be_handed_to_another_engine(example_checkpoint: Path, prompts, generated):
    model = load(example_checkpoint)
    for _ in range(2):
        engine = Engine(model, EngineOptions(**SIZES), frozenset())
        assert [list(answer.token_ids) for answer in engine.generate(prompts, GREEDY)] == generated


def test_a_layer_that_cannot_be_compiled_is_named(capsys: pytest.CaptureFixture[str]):
    class Awkward(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Awkward(), Awkward()])
    x = torch.ones(37, 2, device="cuda")
    with CompiledLayers(model):
        assert torch.equal(model.layers[1](model.layers[0](x)), x + 2)
    assert "Awkward is served uncompiled" in capsys.readouterr().err
    assert torch.equal(model.layers[0](-x), -x - 1)


def test_a_bucket_that_warm_up_did_not_meet_is_noticed(example_checkpoint: Path):
    engine = Engine(load(example_checkpoint), EngineOptions(**SIZES, compiled=False), frozenset())
    engine.warm_up(progress=False)
    shape = next(
        shape for shape in engine.runner.graphs.captured if shape.decode_only and shape.num_tokens == 8
    )
    del engine.runner.graphs.captured[shape]
    engine.generate([[1]] * 8, GREEDY)
    assert [event.name for event in engine.jit_monitor.events] == ["decode step of 8"]
