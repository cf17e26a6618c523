"""The result of a gate run: its checks, its curve and its verdict, bound to exact bytes, to and from JSON.

Data only, and the documented form of `serving_check.json`; `judge.py` decides, and `record.py` reads it back.
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
"""A check is unknown if the engine cannot report its figures; it then does not affect the verdict."""

SCHEMA_VERSION = 3
EXIT_STATUS: dict[Status, int] = {"pass": 0, "fail": 1, "inconclusive": 2}


@dataclass(frozen=True)
class CheckResult:
    """One check: its measured value, its bound, and the reason for its result."""

    __pydantic_config__ = DOCUMENTED

    name: str
    status: CheckStatus
    """`unknown` if the engine cannot report its figures; such a check does not affect the verdict."""
    measured: str
    """The measured value in a few words, with units."""
    bound: str
    """The bound, in the same terms."""
    reason: str
    """Why, in terms the reader can act on: for a failed check the cause, and what would have passed."""
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    """The numbers behind `measured`."""


@dataclass(frozen=True)
class ServingFigures:
    """One side at one M, over all its measured repeats."""

    __pydantic_config__ = DOCUMENTED

    output_throughput: float
    """Output tokens per second, median over repeats."""
    repeats: tuple[float, ...]
    """Output tokens per second of each repeat, in the order they ran."""
    ttft_p50_ms: float | None
    """Time to first token."""
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    """Time per output token after the first."""
    tpot_p99_ms: float | None
    running_mean: float | None
    """Requests decoding together, mean over decode steps; null where the server does not say."""
    waiting_max: float | None
    """Most requests seen queued."""
    kv_usage_max: float | None
    """Largest share of the KV cache seen in use, 0 to 1."""
    preemptions: int | None
    """Requests thrown out of the KV cache and computed again."""
    requests: int
    failed_requests: int
    waiting_mean: float | None = None
    """Requests queued, mean over engine steps; null where the server does not say."""
    step_ms: float | None = None
    """Time of an engine step, mean; null where the server does not say."""
    host_ms: float | None = None
    """Of it, time on the host: not waiting for the GPU, nor (on a CPU) in the model."""
    device_idle_share: float | None = None
    """Share of the time that the GPU had nothing to do between two launches, 0 to 1; null without a GPU."""
    streamed_share: float | None = None
    """Of a request's time, the part after its first chunk, 0 to 1, median; null for requests of one token."""
    itl_p999_ms: float | None = None
    """Time between two chunks of one stream: of each repeat the 99.9th percentile, median over repeats."""
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
    """Of its 95% interval."""
    status: Status | None
    """`pass` where the artifact is surely faster; null at an M that has no vote."""
    decision_low: float | None = None
    decision_high: float | None = None
    """The limits the decision was made with."""


@dataclass(frozen=True)
class PartPoint:
    """Decoding alone at one M, from the parts of the same repeats outside prefill; or prompts alone, from the
    times in which some request had no token yet."""

    __pydantic_config__ = DOCUMENTED

    artifact: float | None
    """Output tokens per second, or prompt tokens per second, median over repeats; null if none tells."""
    baseline: float | None
    ratio: float | None
    """Artifact over baseline: trimmed geometric mean over blocks."""
    ratio_low: float | None
    ratio_high: float | None
    """Of its 95% interval."""
    status: Status
    decision_low: float | None = None
    decision_high: float | None = None
    """The limits the decision was made with."""


@dataclass(frozen=True)
class CurvePoint:
    """Artifact over baseline at one M."""

    __pydantic_config__ = DOCUMENTED

    m: int
    artifact: ServingFigures
    baseline: ServingFigures
    ratio: float | None
    """Output throughput, artifact over baseline: trimmed geometric mean over blocks."""
    ratio_low: float | None
    """Lower limit of the 95% interval, as wide as correlation makes it; null where there is none."""
    ratio_high: float | None
    """Its upper limit."""
    status: Status
    log_ratios: tuple[float, ...]
    """The log ratio of each block of two repeats, one of either side, in the order they ran."""
    correlation: float = 0.0
    """Between a block and the next, at most: all limits are as wide as it makes them."""
    decision_low: float | None = None
    """The lower limit that the decision was made with, corrected for repeated looks as well."""
    decision_high: float | None = None
    """The upper one, corrected for those and for the number of Ms."""
    drawn: bool = False
    """Whether M was drawn between those given. It is sent shorter requests, and passes by its estimate."""
    rival: RivalPoint | None = None
    """Null where no rival was served."""
    steady: PartPoint | None = None
    """Decoding by itself; null if it is not judged by itself at this M."""
    prompts: PartPoint | None = None
    """Prompts by themselves; null if they take too little of the time to be judged by themselves."""
    prompt_share: float | None = None
    """Of the baseline's time, 0 to 1, the part in which some request had no token yet."""

    @property
    def is_slow(self) -> bool:
        """Whether whole requests, decoding or prompts by themselves surely miss the floor."""
        parts = [part.status for part in (self.steady, self.prompts) if part is not None]
        return "fail" in (self.status, *parts)


@dataclass(frozen=True)
class Subject:
    """Which bytes were served."""

    __pydantic_config__ = DOCUMENTED

    name: str
    """Hub id or folder name."""
    revision: str | None
    """Hub commit, where it came from there."""
    bytes_digest: str
    """sha256 over the names and sha256s of every published file."""
    layout_plan_sha256: str | None
    """sha256 of the layout plan's JSON; null where there is none."""
    quantization: str
    """The checkpoint's convention and format in a few words, or `none`."""
    layouts: dict[str, int]
    """Linear layers in each layout; empty if nothing is quantized or the engine is not ours."""
    weights_sha256: str | None = None
    """sha256 over the names and sha256s of config.json and the safetensors files."""
    made_from_sha256: str | None = None
    """The same of the checkpoint that it was made from, as its manifest records it; null for a baseline."""
    manifest_sha256: str | None = None
    """sha256 of all of `scalegate.json`, recipe included, but the verdict's digest; null without one."""
    kv_cache_dtype: str | None = None
    """How keys and values were stored while it served; null where the engine is not ours."""
    other_inputs: tuple[str, ...] = ()
    """What it takes besides text, such as `images`: none of it was sent, so nothing of it was judged."""
    stored_as: str | None = None
    """What a baseline's 16-bit weights were read from, such as `FP8, one scale`; null if they lie as such."""


@dataclass(frozen=True)
class Environment:
    """Where it was measured."""

    __pydantic_config__ = DOCUMENTED

    device: str
    engine: str
    baseline_engine: str
    dtype: str
    versions: dict[str, str]
    platform: str
    cpu_count: int
    engine_options: dict[str, OptionValue] | None = None
    """What the artifact's server was started with, defaults spelled out; null in it leaves the choice to the
    engine, null for all of it stands for a server that was running already."""
    baseline_engine_options: dict[str, OptionValue] | None = None
    """The same of the baseline's."""


@dataclass(frozen=True)
class Verdict:
    """The content of `serving_check.json`."""

    __pydantic_config__ = DOCUMENTED

    status: Status
    """`pass` only where every check passed; `fail` where any failed."""
    artifact: Subject
    baseline: Subject
    checks: tuple[CheckResult, ...]
    curve: tuple[CurvePoint, ...]
    evidence: Evidence
    """The raw figures that checks and curve were made from, and are made from again when this is read."""
    environment: Environment
    workload: WorkloadSettings
    bounds: Bounds
    quality_tokens: int
    """Held-out tokens that quality was measured on."""
    quality_text_sha256: str
    """sha256 of the held-out text file that Scalegate brings."""
    quality_text: str | None
    """The name of the file that was given besides; null where none was."""
    quality_tokens_asked: int
    """The most tokens of either text that were asked for."""
    declared: Mapping[str, float]
    """The bounds and the settings of the release policy that the artifact's recipe sets."""
    exploratory: tuple[str, ...]
    """In what this run is weaker than the release policy; such a verdict is not published."""
    report: Mapping[str, str]
    """sha256 of each file of the report, by its name in `serving_check/`."""
    command: str
    """Run again with this."""
    created: str
    """UTC, ISO 8601."""
    duration_seconds: float
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """What each part of it took; parts may run at the same time."""
    rival: Subject | None = None
    """The checkpoint that the artifact had to be faster than; null where there was none."""
    tasks: str | None = None
    """lm-eval's tasks that both servers were asked, separated by commas; null for none."""
    scores: tuple[TaskScore, ...] = ()
    """Of those tasks; no check judges them."""
    given_text_sha256: str | None = None
    """sha256 of the file that was given besides; null where none was."""
    schema_version: int = SCHEMA_VERSION

    @property
    def rivals(self) -> list[tuple[CurvePoint, RivalPoint]]:
        """The points of the curve at which a rival was served as well."""
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
        """Raises pydantic's ValidationError if `value` does not match the schema."""
        return _ADAPTER.validate_python(value)

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())


def overall_status(checks: Iterable[CheckResult]) -> Status:
    """Fail if any check failed, else inconclusive if any is, or if nothing was checked."""
    statuses = {check.status for check in checks} - {"unknown"}
    if "fail" in statuses:
        return "fail"
    return "pass" if statuses == {"pass"} else "inconclusive"


def finite(value: float) -> float | None:
    """`value` as JSON can hold it: null if it is infinite or not a number."""
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: raw figures that are not finite as `nan`, `inf` and `-inf`."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_ADAPTER: TypeAdapter[Verdict] = TypeAdapter(Verdict)
