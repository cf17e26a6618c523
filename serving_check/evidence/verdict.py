"""The result of a gate run: its checks, its curve and its verdict, bound to exact bytes, to and from JSON.

The module is data only, and the documented form of `serving_check.json`; `judge.py` decides, and `record.py`
reads it back.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ...base.atomic_files import write_json
from ...base.option_fields import OptionValue
from ..settings import DOCUMENTED, Bounds, WorkloadSettings
from .evidence import Evidence
from .task_scores import TaskScore

Status = Literal["pass", "fail", "inconclusive"]
CheckStatus = Literal["pass", "fail", "inconclusive", "unknown"]
"""A check is unknown if the engine cannot report its figures, or if it is of speed and speed was emulated. It
then does not affect the verdict."""

SCHEMA_VERSION = 3
EXIT_STATUS: dict[Status, int] = {"pass": 0, "fail": 1, "inconclusive": 2}


@dataclass(frozen=True)
class CheckResult:
    """One check: its measured value, its bound, and the reason for its result."""

    __pydantic_config__ = DOCUMENTED

    name: str
    status: CheckStatus
    """`unknown` if the engine cannot report its figures, or if it is of speed and speed was emulated. Such a
    check does not affect the verdict."""
    measured: str
    """The measured value in a few words, with units."""
    bound: str
    """The bound, in the same terms."""
    reason: str
    """The reason, in words that help the reader: for a failed check, the cause and what would have passed."""
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    """The numbers behind `measured`."""


@dataclass(frozen=True)
class ServingFigures:
    """The figures of one side at one M, over all its measured repeats."""

    __pydantic_config__ = DOCUMENTED

    output_throughput: float
    """Output tokens per second, median over repeats."""
    repeats: tuple[float, ...]
    """Output tokens per second of each repeat, in the order they ran."""
    ttft_p50_ms: float | None
    """Time to the first token in milliseconds, median over requests."""
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    """Time per output token after the first in milliseconds, median over requests."""
    tpot_p99_ms: float | None
    running_mean: float | None
    """Number of requests that decode together, mean over decode steps; null if the server does not say."""
    waiting_max: float | None
    """Most requests seen queued."""
    kv_usage_max: float | None
    """Largest share of the KV cache seen in use, 0 to 1."""
    preemptions: int | None
    """Number of requests that lost their KV cache and were computed again."""
    requests: int
    failed_requests: int
    waiting_mean: float | None = None
    """Number of queued requests, mean over engine steps; null if the server does not say."""
    step_ms: float | None = None
    """Mean time of an engine step in milliseconds; null if the server does not say."""
    host_ms: float | None = None
    """The host's part of `step_ms`: without waiting for the GPU or, on a CPU, without running the model."""
    device_idle_share: float | None = None
    """The share of the time in which the GPU was idle between two launches, 0 to 1; null without a GPU."""
    streamed_share: float | None = None
    """The share of a request's time after its first chunk, 0 to 1, median; null for requests of one token."""
    itl_p999_ms: float | None = None
    """Time between two chunks of one stream in milliseconds: each repeat's 99.9th percentile, median over
    repeats."""
    itl_max_ms: float | None = None


@dataclass(frozen=True)
class RivalPoint:
    """The rival at one M, from the same blocks of repeats."""

    __pydantic_config__ = DOCUMENTED

    figures: ServingFigures
    ratio: float | None
    """Output throughput, artifact over rival: trimmed geometric mean over blocks."""
    ratio_low: float | None
    ratio_high: float | None
    """The upper limit of its 95% interval."""
    status: Status | None
    """`pass` if the artifact is surely faster; null at an M that does not count."""
    decision_low: float | None = None
    decision_high: float | None = None
    """The upper limit that the decision was made with."""


@dataclass(frozen=True)
class PartPoint:
    """Decoding alone at one M, measured in the same repeats outside prefill; or prompts alone, measured while
    some request had no token yet."""

    __pydantic_config__ = DOCUMENTED

    artifact: float | None
    """Output tokens per second, or prompt tokens per second, median over repeats; null if no repeat shows
    it."""
    baseline: float | None
    ratio: float | None
    """The ratio, artifact over baseline: trimmed geometric mean over blocks."""
    ratio_low: float | None
    ratio_high: float | None
    """The upper limit of its 95% interval."""
    status: CheckStatus
    """`unknown` if speed was not judged."""
    decision_low: float | None = None
    decision_high: float | None = None
    """The upper limit that the decision was made with."""


@dataclass(frozen=True)
class CurvePoint:
    """The comparison of artifact and baseline at one M."""

    __pydantic_config__ = DOCUMENTED

    m: int
    artifact: ServingFigures
    baseline: ServingFigures
    ratio: float | None
    """Output throughput, artifact over baseline: trimmed geometric mean over blocks."""
    ratio_low: float | None
    """Lower limit of the 95% interval, widened by the correlation between blocks; null if there is none."""
    ratio_high: float | None
    """Upper limit of the 95% interval."""
    status: CheckStatus
    """`unknown` if speed was not judged."""
    log_ratios: tuple[float, ...]
    """The log ratio of each block of two repeats, one of either side, in the order they ran."""
    correlation: float = 0.0
    """An upper limit for the correlation between a block and the next, by which all limits are widened."""
    decision_low: float | None = None
    """The lower limit that the decision was made with, corrected for repeated looks as well."""
    decision_high: float | None = None
    """The upper limit that the decision was made with, corrected for repeated looks and the number of Ms."""
    drawn: bool = False
    """Whether M was drawn between the given Ms. A drawn M gets shorter requests, and passes by its
    estimate."""
    rival: RivalPoint | None = None
    """The comparison with the rival; null if no rival was served."""
    steady: PartPoint | None = None
    """Decoding alone; null if it is not judged separately at this M."""
    prompts: PartPoint | None = None
    """Prompts alone; null if they take too little of the time to be judged separately."""
    prompt_share: float | None = None
    """The share of the baseline's time, 0 to 1, in which some request had no token yet."""

    @property
    def is_slow(self) -> bool:
        """Say whether whole requests, decoding or prompts by themselves surely miss the floor."""
        parts = [part.status for part in (self.steady, self.prompts) if part is not None]
        return "fail" in (self.status, *parts)


@dataclass(frozen=True)
class Subject:
    """The identity of a served checkpoint."""

    __pydantic_config__ = DOCUMENTED

    name: str
    """The Hub id or the folder's name."""
    revision: str | None
    """The Hub commit; null if the checkpoint is not from the Hub."""
    bytes_digest: str
    """sha256 over the names and sha256s of every published file."""
    layout_plan_sha256: str | None
    """sha256 of the layout plan's JSON; null if there is no plan."""
    quantization: str
    """The checkpoint's convention and format in a few words, or `none`."""
    layouts: dict[str, int]
    """Number of linear layers in each layout; empty if nothing is quantized or the engine is not ours."""
    weights_sha256: str | None = None
    """sha256 over the names and sha256s of config.json and the safetensors files."""
    made_from_sha256: str | None = None
    """The same for the checkpoint that it was made from, as its manifest records it; null for a baseline."""
    manifest_sha256: str | None = None
    """sha256 of `scalegate.json`, recipe included, without the verdict's digest; null if there is no such
    file."""
    kv_cache_dtype: str | None = None
    """How keys and values were stored while it served; null if the engine is not ours."""
    other_inputs: tuple[str, ...] = ()
    """The inputs that the model takes besides text, such as `images`. None were sent, so they were not
    judged."""
    kernels: tuple[str, ...] = ()
    """The kernels that the engine's log names, and the lines of the plugin `scalegate-kernels` in it; empty
    for an engine whose log is not read for them."""
    stored_as: str | None = None
    """The form from which a baseline's weights were converted to 16 bits, such as `FP8, one scale`; else
    null."""


@dataclass(frozen=True)
class Environment:
    """The machine and the software of the measurement."""

    __pydantic_config__ = DOCUMENTED

    device: str
    engine: str
    baseline_engine: str
    dtype: str
    versions: dict[str, str]
    platform: str
    cpu_count: int
    engine_options: dict[str, OptionValue] | None = None
    """The options of the artifact's server, defaults included. A null value leaves the choice to the engine;
    null instead of all options stands for a server that was running already."""
    baseline_engine_options: dict[str, OptionValue] | None = None
    """The options of the baseline's server."""
    engine_versions: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each engine with an environment of its own, the versions of its packages there; `versions` are
    those of Scalegate's environment."""


@dataclass(frozen=True)
class Verdict:
    """The content of `serving_check.json`."""

    __pydantic_config__ = DOCUMENTED

    status: Status
    """`pass` only if every check passed; `fail` if any failed."""
    artifact: Subject
    baseline: Subject
    checks: tuple[CheckResult, ...]
    curve: tuple[CurvePoint, ...]
    evidence: Evidence
    """The raw figures from which the checks and the curve are made, and made again when the verdict is
    read."""
    environment: Environment
    workload: WorkloadSettings
    bounds: Bounds
    quality_tokens: int
    """Number of held-out tokens on which quality was measured."""
    quality_text_sha256: str
    """sha256 of the held-out text file that Scalegate brings."""
    quality_text: str | None
    """The name of the user's own text file; null if there was none."""
    quality_tokens_asked: int
    """The most tokens of either text that the user asked for."""
    declared: Mapping[str, float]
    """The bounds and the settings of the release policy that the artifact's recipe sets."""
    exploratory: tuple[str, ...]
    """The settings in which this run is weaker than the release policy; such a verdict is not published."""
    report: Mapping[str, str]
    """sha256 of each file of the report, by its name in `serving_check/`."""
    command: str
    """The command that repeats this run."""
    created: str
    """When the verdict was made, in UTC, ISO 8601."""
    duration_seconds: float
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """The seconds that each part of the run took; parts may run at the same time."""
    rival: Subject | None = None
    """The checkpoint that the artifact had to be faster than; null if there was none."""
    tasks: str | None = None
    """The lm-eval tasks that both servers ran, separated by commas; null if there were none."""
    scores: tuple[TaskScore, ...] = ()
    """The scores of these tasks; no check judges them."""
    given_text_sha256: str | None = None
    """sha256 of the user's own text file; null if there was none."""
    speed_not_judged: str | None = None
    """Why speed was not judged, and where it can be; null if it was. Such a pass does not say that the
    artifact keeps up, so `push` refuses it unless it is told to publish it."""
    schema_version: int = SCHEMA_VERSION

    @property
    def rivals(self) -> list[tuple[CurvePoint, RivalPoint]]:
        """Return the points of the curve at which a rival was served as well."""
        return [(point, point.rival) for point in self.curve if point.rival is not None]

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.status]

    @property
    def failures(self) -> list[CheckResult]:
        return [check for check in self.checks if check.status not in ("pass", "unknown")]

    def to_json(self) -> dict[str, Any]:
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, value: Any) -> "Verdict":
        """Return the verdict in `value`. Raises pydantic's ValidationError if `value` does not match the
        schema.
        """
        return _ADAPTER.validate_python(value)

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())


def overall_status(checks: Iterable[CheckResult]) -> Status:
    """Return fail if any check failed, else inconclusive if any is, or if nothing was checked."""
    statuses = {check.status for check in checks} - {"unknown"}
    if "fail" in statuses:
        return "fail"
    return "pass" if statuses == {"pass"} else "inconclusive"


def finite(value: float) -> float | None:
    """Return `value` as JSON can hold it: null if it is infinite or not a number."""
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: raw figures that are not finite as `nan`, `inf` and `-inf`."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_ADAPTER: TypeAdapter[Verdict] = TypeAdapter(Verdict)
