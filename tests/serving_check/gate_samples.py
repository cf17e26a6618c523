"""Load results and verdicts made of plain numbers, for tests of the gate that need no server."""

import copy
import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.evidence.answer_figures import AnswerFigures
from scalegate.serving_check.evidence.artifact_figures import (
    KindErrors,
    ModuleError,
    TextFigures,
    WeightFigures,
)
from scalegate.serving_check.evidence.at_rest import AtRestFigures, BurstPart, Rest
from scalegate.serving_check.evidence.emulation import EmulatedProducts
from scalegate.serving_check.evidence.environment import Environment, describe_environment
from scalegate.serving_check.evidence.evidence import Evidence, ModelFigures, ScoredText, TextScore
from scalegate.serving_check.evidence.in_use import (
    AnswerInUse,
    BlockInUse,
    FiguresInUse,
    PartsInUse,
    ProfileFigures,
    SideInUse,
)
from scalegate.serving_check.evidence.measurement import Block, MeasuredM, Repeat
from scalegate.serving_check.evidence.quality_figures import Comparison
from scalegate.serving_check.evidence.verdict import Subject, Verdict
from scalegate.serving_check.gate.record import judged_again
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.workload import MetricsSample, RequestRecord, WorkloadResult, WorkloadSpec

# Ports that refuse at once: a name that no server knows is looked for during seconds.
ARTIFACT = Endpoint("http://127.0.0.1:1", "artifact")
BASELINE = Endpoint("http://127.0.0.1:2", "baseline")
RIVAL = Endpoint("http://127.0.0.1:3", "rival")
_UP = tuple(
    ModuleError(f"model.layers.{i}.mlp.up_proj", 0.095 + 0.001 * i, 0.095 + 0.001 * i) for i in range(4)
)
SOUND_WEIGHTS = WeightFigures(
    is_ours=True,
    is_baseline=False,
    is_other_quantized=False,
    quantized=4,
    recorded=4,
    compared=4,
    kept=18,
    kinds=(KindErrors("model.layers.*.mlp.up_proj", "INT4 g128, zero points", 4, 0.096, 0.01, _UP),),
)

_SIDE = SideInUse(
    0.0, 4.0, 4000, (0.05,) * 60, (0.01,) * 60, dict.fromkeys(range(1, 9), (99, 0.01)), itl_p99=0.03
)
IN_USE = FiguresInUse(
    blocks=(BlockInUse(60, _SIDE, _SIDE),) * 3,
    answers=tuple(AnswerInUse("greedy", 64, 48, 4.0, 0, 0, 4, "text") for _ in range(40)),
)
_PARTS = PartsInUse(1.0, {4: (100, 0.01)})
_READING = replace(_SIDE, ttfts=(0.1,) * 12, tpots=(0.01,) * 12, parts=_PARTS)
_FASTER = replace(_READING, parts=PartsInUse(0.8, {4: (100, 0.005)}))
CHAT = ProfileFigures(
    "chat", 1.0, ((200,) * 12,) * 4, ((50,) * 12,) * 4, (BlockInUse(12, _FASTER, _READING),) * 4
)
"""A profile under which prompts are read 1.25 times as fast, and decoding is twice as fast."""
_REST = Rest(running=0.0, waiting=0.0, kv_cache_usage=0.0, memory_bytes=1 << 30)
_BURST = (BurstPart(requests=500, seconds=1.0, memory_bytes=1 << 30),) * 6
AT_REST = AtRestFigures(
    3200, _REST, _REST, _BURST, 1, (100.0,) * 6, (100.0,) * 6, _BURST, (100.0,) * 6, (100.0,) * 6
)


def load_result(
    m: int, tokens_per_second: float, *, ttft: float = 0.01, running: int | None = None, output_len: int = 64
) -> WorkloadResult:
    """What a server gives that decodes `running` requests (all M unless told) together at this throughput."""
    running = running or m
    duration = m * output_len / tokens_per_second
    waves = math.ceil(m / running)
    requests = tuple(
        RequestRecord(
            start=0.0,
            ttft=ttft + (index // running) * duration / waves,
            itls=(),
            e2el=(index // running + 1) * duration / waves,
            output_tokens=output_len,
            prompt_tokens=8,
        )
        for index in range(m)
    )
    return WorkloadResult(
        spec=WorkloadSpec(m=m, num_requests=m, input_len=8, output_len=output_len),
        duration=duration,
        requests=requests,
        samples=(MetricsSample(duration / 2, running, m - running, 0.03),),
        steps_by_running={running: output_len * waves},
        preemptions=0,
    )


def simulated_run(
    ratio: Callable[[int], float],
    noise: float = 0.03,
    seed: int = 0,
    rival: Callable[[int], float] = lambda m: 1.0,
) -> Callable[[Endpoint, WorkloadSpec], WorkloadResult]:
    """Stands for `run_workload`: a baseline of 100·M^0.7 tok/s, artifact and rival at their ratios to it."""
    generator = random.Random(seed)

    def run(endpoint: Endpoint, spec: WorkloadSpec) -> WorkloadResult:
        of_baseline = {ARTIFACT.model: ratio, RIVAL.model: rival}.get(endpoint.model, lambda m: 1.0)
        speed = 100 * spec.m**0.7 * of_baseline(spec.m)
        speed *= math.exp(generator.gauss(0, noise))
        return load_result(spec.m, speed, ttft=0.01 + 0.001 * spec.m, output_len=spec.output_len)

    return run


def measured_m(m: int, ratio: float, blocks: int = 12, output_len: int = 64, **options: float) -> MeasuredM:
    """Blocks at one M whose log ratios scatter a little around `ratio`."""
    level = MeasuredM(m)
    for index in range(blocks):
        wobble = 1 + 0.004 * (index % 3 - 1)
        ours = sound_repeat(m, 100 * m * ratio * wobble, output_len=output_len, **options)
        theirs = sound_repeat(m, 100 * m, output_len=output_len)
        level.blocks.append(Block([ours], [theirs]))
    return level


@functools.cache
def sound_repeat(m: int, tokens_per_second: float, **options: float) -> Repeat:
    """Made once: verdicts of samples hold many that are the same, and nothing changes them."""
    return answered(load_result(m, tokens_per_second, **options))


def answered(result: WorkloadResult) -> Repeat:
    """The repeat, as if its streams had held all tokens that are claimed, half of them distinct."""
    answers, tokens = len(result.requests), result.output_tokens
    figures = AnswerFigures(answers, True, tokens, tokens, tokens, 0, 0, 0, 0, answers / 2)
    return replace(Repeat.of(result), answers=figures)


EMULATED = (
    EmulatedProducts("artifact", "FP8", "NVIDIA GPUs of compute capability 8.9 or higher", products=28),
)
SHAPES = {"layers.0.up": (768, 256), "layers.0.down": (256, 768)}


def sample_evidence(
    ratios: Mapping[int, float], blocks: int = 12, load: WorkloadSettings | None = None, **changes: Any
) -> Evidence:
    """What a sound artifact shows with these throughput ratios by M; `changes` replace fields.

    load: whose requests were sent; a drawn M has the ratio of the M before it, unless it is given one
    """
    load = load or WorkloadSettings(tuple(ratios))
    levels = {m: ratios[max(given for given in ratios if given <= m)] for m in (*ratios, *load.measured_ms)}
    text = ScoredText((1, 2, 3, 4), "the text", 0.5)
    sound = Evidence(
        loaded=ModelFigures(SHAPES, 8192, {"layers.0.up": "tiles", "layers.0.down": "tiles"}),
        baseline_loaded=ModelFigures(SHAPES, 8192),
        quality=Comparison(8192, 1.52, 1.5, 0.01, 0.1, 0.2, 0.4, 0.97),
        weights=SOUND_WEIGHTS,
        texts=TextFigures(),
        canary=(text,),
        baseline_canary=(text,),
        measured=tuple(
            measured_m(m, ratio, blocks, load.at(m).output_len) for m, ratio in sorted(levels.items())
        ),
        capacity=1 << 20,
        answers=(TextScore(max(ratios), 64, 0, 3, "the text"),),
        in_use=IN_USE,
        at_rest=AT_REST,
    )
    return replace(sound, **changes)


def sample_verdict(ratios: Mapping[int, float], **changes: Any) -> Verdict:
    """A whole verdict, as the gate gives it on these throughput ratios by M; `changes` replace fields."""
    load = changes.get("workload", WorkloadSettings(tuple(ratios)))
    subject = Subject(
        "base-int4",
        None,
        "a" * 64,
        "b" * 64,
        "compressed-tensors, INT4 g128, zero points",
        {"tiles": 28},
        weights_sha256="d" * 64,
        made_from_sha256="e" * 64,
    )
    base = replace(
        subject, name="base", quantization="none", layouts={}, weights_sha256="e" * 64, made_from_sha256=None
    )
    verdict = Verdict(
        status="inconclusive",
        artifact=subject,
        baseline=base,
        checks=(),
        curve=(),
        evidence=sample_evidence(ratios, load=load),
        environment=copy.deepcopy(environment_here()),
        workload=load,
        bounds=Bounds(),
        quality_tokens=8192,
        quality_text_sha256="c" * 64,
        quality_text=None,
        quality_tokens_asked=8192,
        declared={},
        exploratory=(),
        report={},
        command="pipeline validate base-int4",
        created="2026-01-01T00:00:00+00:00",
        duration_seconds=61.0,
    )
    kept = {name: value for name, value in changes.items() if name not in FOLLOWS}
    return replace(judged_again(replace(verdict, **kept)), **changes)


@functools.cache
def environment_here() -> Environment:
    """Looked for once: to read the versions of all packages takes long."""
    return describe_environment("cpu", "bfloat16", "embedded", "embedded")


FOLLOWS = ("status", "checks", "curve", "exploratory")
"""What follows from the rest; in `changes` it contradicts it."""
