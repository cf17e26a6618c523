"""The release policy: the minimum that a verdict must rest on to be published, and the parts that a recipe
may lower.

A run that is weaker than this is exploratory: its verdict is shown and kept, and `push` refuses it. A recipe
may lower a bound openly; card and verdict then say so in their first lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from ..adapters.all_engines import find_engine
from ..engine.options import ARTIFACT_ONLY
from ..evidence.coded_load import uncoded
from ..evidence.verdict import Environment, Verdict
from ..settings import Bounds, WorkloadSettings, checked_bound
from ..statistics.ms_between import STEP, draw_between


@dataclass(frozen=True)
class ReleasePolicy:
    """The settings that a published verdict may not fall short of; the bounds' own defaults belong to it."""

    least_largest_m: int = 32
    """The largest M is at least this; the smallest is 1."""
    most_m_step: int = STEP
    """Each M is at most this many times the one before it, given and drawn Ms together."""
    least_input_len: int = 64
    """The least number of prompt tokens per request."""
    least_output_len: int = 64
    """The least number of output tokens per request."""
    least_blocks: int = 6
    """The least number of blocks, of two repeats each, that were measured at every M."""
    least_warmups: int = 1
    """The least number of unmeasured repeats of each side at each M."""
    least_quality_tokens: int = 4096
    """The least number of held-out tokens on which quality was measured."""


POLICY = ReleasePolicy()
WORDS, BASELINE_WORDS = "engine_args", "baseline_engine_args"
"""Further words of an engine's command; the second option, if given, is the first one of the baseline."""
Declared = Mapping[str, float]
"""The bounds and the policy's settings that a recipe sets, by name."""


def declarable() -> list[str]:
    """Return the names that a recipe may set."""
    return [field.name for kind in (Bounds, ReleasePolicy) for field in fields(kind)]


def declared_by(recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return the bounds and policy settings that a recipe sets. A value that is no number raises
    UserError.
    """
    return {name: checked_bound(name, recipe[name]) for name in declarable() if recipe.get(name) is not None}


def lowered(declared: Declared) -> list[str]:
    """Return the settings that a recipe lowers, one line each: `throughput floor 0.8 (the policy says
    0.93)`.
    """
    return [
        f"{_words(name)} {value:g} (the policy says {_default(name):g})"
        for name, value in declared.items()
        if is_weaker(name, value, _default(name))
    ]


def is_weaker(name: str, value: float, than: float) -> bool:
    """Say whether a bound is easier to meet at `value`: `max_…` and `most_…` when higher, others when
    lower.
    """
    return value > than if name.startswith(("max_", "most_")) else value < than


def weaker_settings(
    workload: WorkloadSettings,
    bounds: Bounds,
    quality_tokens: int,
    declared: Declared,
    kv_cache_dtype: str | None,
) -> list[str]:
    """Return the settings that are weaker than the policy, as the recipe lowers it, known before anything is
    measured.

    kv_cache_dtype: how the artifact's keys and values are stored; None if that is not known
    """
    policy = _policy(declared)
    ms = sorted(workload.ms)
    found = []
    if ms[0] > 1:
        found.append(f"the smallest M is {ms[0]}, not 1")
    if ms[-1] < policy.least_largest_m:
        found.append(f"the largest M is {ms[-1]}, the policy wants {policy.least_largest_m}")
    found += [
        f"M={after} is more than {policy.most_m_step} times M={before}, the one before it"
        for before, after in pairwise(workload.measured_ms)
        if after > policy.most_m_step * before
    ]
    if not workload.draws_between and draw_between(ms, workload.seed):
        found.append("no M was drawn between the given ones")
    for what, value, least in (
        ("prompt tokens a request", workload.input_len, policy.least_input_len),
        ("output tokens a request", workload.output_len, policy.least_output_len),
        ("warm-ups", workload.warmups, policy.least_warmups),
        ("held-out tokens", quality_tokens, policy.least_quality_tokens),
    ):
        if value < least:
            found.append(f"{value} {what}, the policy wants {least}")
    if (why := uncoded(workload, kv_cache_dtype)) is not None:
        found.append(why)
    for field in fields(Bounds):
        value, allowed = getattr(bounds, field.name), declared.get(field.name, _default(field.name))
        if is_weaker(field.name, value, allowed):
            found.append(f"{_words(field.name)} {value:g}, the policy wants {allowed:g}")
    return found


def weaker(verdict: Verdict) -> list[str]:
    """Return everything in which a verdict is weaker than the policy; empty if the verdict may be
    published.
    """
    declared = verdict.declared
    kv_cache_dtype = verdict.artifact.kv_cache_dtype
    found = weaker_settings(
        verdict.workload, verdict.bounds, verdict.quality_tokens, declared, kv_cache_dtype
    )
    least = _policy(declared).least_blocks
    found += [
        f"{len(level.blocks)} blocks of repeats at M={level.m}, the policy wants {least}"
        for level in verdict.evidence.measured
        if len(level.blocks) < least
    ]
    if verdict.evidence.in_use is None and verdict.status != "fail":
        found.append("no load as in use was sent")
    if any(
        repeat.prefill_seconds is None for level in verdict.evidence.measured for repeat in level.baseline
    ):
        found.append("the time that prompts take is not recorded, so no part is judged by itself")
    return found + _of_the_baseline(verdict)


def _of_the_baseline(verdict: Verdict) -> list[str]:
    baseline, environment = verdict.baseline, verdict.environment
    found = []
    if baseline.quantization != "none":
        found.append(f"the baseline, {baseline.name}, is itself quantized ({baseline.quantization})")
    if verdict.artifact.made_from_sha256 is None:
        found.append("nothing records by digest what the artifact was made from; quantize it again")
    elif baseline.weights_sha256 != verdict.artifact.made_from_sha256:
        found.append(f"the baseline, {baseline.name}, is not the checkpoint that the artifact was made from")
    if _kind(environment.engine) != _kind(environment.baseline_engine):
        found.append(
            f"the artifact was served by {_kind(environment.engine)}, the baseline by "
            f"{_kind(environment.baseline_engine)}"
        )
    return found


def _kind(engine: str) -> str:
    known = find_engine(engine)
    return engine if known is not None and known.starts else "a running server"


def _policy(declared: Declared) -> ReleasePolicy:
    names = {field.name for field in fields(ReleasePolicy)}
    return replace(POLICY, **{name: int(value) for name, value in declared.items() if name in names})


def _default(name: str) -> float:
    return float(getattr(POLICY, name, None) or getattr(Bounds(), name))


def _words(name: str) -> str:
    return name.replace("_", " ")


def unlike_options(environment: Environment) -> list[str]:
    """Return the options in which the starts of the two servers differ, except those that apply to an
    artifact only.

    The result is empty for two kinds of engine, and if a server was running already: its options are not
    known.
    """
    if environment.engine_options is None or environment.baseline_engine_options is None:
        return []
    if _kind(environment.engine) != _kind(environment.baseline_engine):
        return []
    ours, theirs = dict(environment.engine_options), dict(environment.baseline_engine_options)
    words = theirs.pop(BASELINE_WORDS, None)
    ours.pop(BASELINE_WORDS, None)
    if words is not None:
        theirs[WORDS] = words
    return [
        f"{_words(name)} {ours.get(name)} (the baseline's: {theirs.get(name)})"
        for name in sorted((ours.keys() | theirs.keys()) - set(ARTIFACT_ONLY))
        if ours.get(name) != theirs.get(name)
    ]


def first_lines_of(verdict: Verdict) -> list[str]:
    """The first lines of a verdict and its card; empty if there is nothing to say first."""
    return first_lines(
        verdict.exploratory,
        verdict.declared,
        verdict.artifact.other_inputs,
        unlike_options(verdict.environment),
        verdict.baseline.stored_as,
        verdict.speed_not_judged,
    )


def first_lines(
    exploratory: Sequence[str],
    declared: Declared,
    other_inputs: Sequence[str] = (),
    unlike: Sequence[str] = (),
    stored_as: str | None = None,
    speed_not_judged: str | None = None,
) -> list[str]:
    """Return the first lines of a verdict and a card; empty if everything was judged by the unchanged policy.

    other_inputs: what the model takes besides text
    unlike: the options that the servers do not share, as `unlike_options` finds them
    stored_as: the form of the baseline's weights, where it is smaller than 16 bits
    speed_not_judged: the reason why speed was not judged; None if it was
    """
    lines = []
    if speed_not_judged:
        lines.append(f"Speed was not judged: {speed_not_judged}.")
    if exploratory:
        lines.append(f"Exploratory, not to be published: {'; '.join(exploratory)}.")
    if changes := lowered(declared):
        lines.append(f"The recipe lowers the release policy: {'; '.join(changes)}.")
    if other_inputs:
        lines.append(f"Text only was judged: it takes {' and '.join(other_inputs)} too, which nobody sent.")
    if unlike:
        lines.append(f"The servers were started with different options: {'; '.join(unlike)}.")
    if stored_as:
        lines.append(f"The baseline is stored as {stored_as}; it was compared as the 16-bit weights in it.")
    return lines
