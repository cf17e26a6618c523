"""The raw figures of a gate run, from which every check is made; the verdict keeps them.

`judge.py` can repeat every check from these alone, so an edited result contradicts its own evidence. A new
check adds its figures here, as plain data, and a line in `judge`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..settings import DOCUMENTED
from .artifact_figures import ReaderFigures, TextFigures, WeightFigures
from .at_rest import AtRestFigures
from .company import CompanyFigures
from .in_use import FiguresInUse
from .measurement import MeasuredM
from .quality_figures import Comparison
from .undisturbed import AloneFigures

PackedLayers = Mapping[str, int] | None
"""How many layers are packed in each layout and shape, as `swap_ab 4096x4096`; None if a server does not
say, or is no loader of ours."""


@dataclass(frozen=True)
class ModelFigures:
    """One side's model as the loader made it."""

    __pydantic_config__ = DOCUMENTED

    linear_shapes: Mapping[str, tuple[int, ...]]
    """[N, K] of every linear layer, [E, N, K] of a layer's experts, by module name."""
    vocab_size: int
    layouts: Mapping[str, str] = field(default_factory=dict)
    """The layout of every packed product, by its name, in which merged layers are one."""
    packed: PackedLayers = None
    packed_weights: int | None = None
    """How many weights are packed, where a server elsewhere may pack them in other layouts; else None."""
    weight_bytes: int = 0
    """Of all parameters as they lie in memory; 0 if that is not known."""


@dataclass(frozen=True)
class ScoredText:
    """A server's continuation of one prompt, and its likelihood under the baseline."""

    __pydantic_config__ = DOCUMENTED

    tokens: tuple[int, ...]
    text: str
    nats_per_token: float | None
    """Mean over `tokens` under the baseline; null where nothing was written."""


@dataclass(frozen=True)
class TextScore:
    """One answer of the artifact's server under load, compared with logits computed in process."""

    __pydantic_config__ = DOCUMENTED

    m: int
    tokens: int
    off: int
    """Tokens whose logit under the artifact is too far below the best one to be explained by rounding."""
    baseline_off: int
    """The same under the baseline's logits."""
    beginning: str
    """The first characters of the text."""


@dataclass(frozen=True)
class RepeatedPrompts:
    """The artifact's TPOT, median over requests, on the prompts of one repeat that were sent twice."""

    __pydantic_config__ = DOCUMENTED

    m: int
    first_tpot: float
    """Seconds."""
    second_tpot: float


@dataclass(frozen=True)
class Evidence:
    """Everything that `judge` reads besides the workload and the bounds."""

    __pydantic_config__ = DOCUMENTED

    loaded: ModelFigures
    baseline_loaded: ModelFigures
    quality: Comparison
    """On held-out text, in process."""
    canary: tuple[ScoredText, ...]
    """Greedy text of the artifact's server."""
    baseline_canary: tuple[ScoredText, ...]
    measured: tuple[MeasuredM, ...]
    """Every repeat at every M."""
    weights: WeightFigures | None
    """The stored weights against the baseline's; null where that is quantized itself."""
    texts: TextFigures
    """Tokenizer, templates and generation settings against the baseline's."""
    readers: ReaderFigures | None = None
    """What other readers take the artifact's files for; null if that was not looked at."""
    capacity: int | None = None
    """Tokens that the artifact's KV cache holds; null if its server does not say."""
    limit: int | None = None
    """The most requests that the artifact's server runs together; null if it does not say."""
    compiled: tuple[Mapping[str, int] | None, Mapping[str, int] | None] = (None, None)
    """What the artifact's server compiled after warm-up: before the first request, and after the last."""
    packed: tuple[PackedLayers, PackedLayers] = (None, None)
    """The layers packed by the artifact's server, and by the baseline's."""
    answers: tuple[TextScore, ...] = ()
    """Answers under load of the artifact's server, most of them at the largest M."""
    repeated: RepeatedPrompts | None = None
    """Null if nothing was measured completely."""
    together: MeasuredM | None = None
    """Blocks whose repeats ran on both servers at the same time; null if stalls left no doubt."""
    company: CompanyFigures | None = None
    """Prompts alone and in a batch; null if the artifact's server does not claim batch invariance."""
    in_use: FiguresInUse | None = None
    """Of a load as in use; null if none was sent, as in exploratory runs."""
    at_rest: AtRestFigures | None = None
    """Of both servers when all load had ended; null if nobody looked."""
    quality_by_domain: Mapping[str, Comparison] = field(default_factory=dict)
    """The same on the text of each domain, such as `code`; empty if all of it is of one domain."""
    foreign_domains: Mapping[str, float] = field(default_factory=dict)
    """Domains that the baseline cannot predict, which were left out: the bits that it needs for a byte."""
    quality_of_given: Comparison | None = None
    """The same on the text that was given besides the one that Scalegate brings; null where none was."""
    alone: AloneFigures | None = None
    """Both servers measured with the other one stopped; null if they were not started here, or took turns."""
    by_layers: bool = False
    """Whether quality and answers were computed a decoder layer at a time because the models did not fit in
    memory together: with dequantized weights, and unquantized keys and values."""
    has_rival: bool = False
    """Whether a rival was served as well: its repeats are among `measured`."""
    diagnoses: Mapping[int, str] = field(default_factory=dict)
    """For each M that failed, which layer is to blame."""
