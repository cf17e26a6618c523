"""The raw figures of a gate run, from which every check is made; the verdict keeps them.

`judge.py` can repeat every check from the evidence alone, so an edited result contradicts its own evidence. A
new check adds its figures here, as plain data, and a line in `judge`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..settings import DOCUMENTED
from .artifact_figures import ReaderFigures, TextFigures, WeightFigures
from .at_rest import AtRestFigures
from .company import CompanyFigures
from .emulation import EmulatedProducts
from .in_use import FiguresInUse
from .measurement import MeasuredM
from .quality_figures import Comparison
from .request_memory import RequestMemory
from .undisturbed import AloneFigures

PackedLayers = Mapping[str, int] | None
"""How many layers are packed in each layout and shape, such as `swap_ab 4096x4096`; None if a server does not
report it, as engines other than ours."""


@dataclass(frozen=True)
class ModelFigures:
    """One side's model as the loader made it."""

    __pydantic_config__ = DOCUMENTED

    linear_shapes: Mapping[str, tuple[int, ...]]
    """[N, K] of every linear layer, [E, N, K] of a layer's experts, by module name."""
    vocab_size: int
    layouts: Mapping[str, str] = field(default_factory=dict)
    """The layout of every packed product by the product's name; merged layers are one product."""
    packed: PackedLayers = None
    packed_weights: int | None = None
    """How many weights are packed, if a server on another machine may use other layouts; else None."""
    weight_bytes: int = 0
    """The size of all parameters in memory, in bytes; 0 if it is not known."""


@dataclass(frozen=True)
class ScoredText:
    """A server's continuation of one prompt, and its likelihood under the baseline."""

    __pydantic_config__ = DOCUMENTED

    tokens: tuple[int, ...]
    text: str
    nats_per_token: float | None
    """Mean negative log-likelihood of `tokens` under the baseline; null if nothing was written."""


@dataclass(frozen=True)
class TextScore:
    """One answer of the artifact's server under load, compared with logits computed in process."""

    __pydantic_config__ = DOCUMENTED

    m: int
    tokens: int
    off: int
    """Number of tokens whose logit in the artifact is too far below the best one to be explained by
    rounding."""
    baseline_off: int | None
    """The same number for the baseline's logits; null if, over all answers, so few tokens are off that the
    baseline's logits were not computed."""
    beginning: str
    """The first characters of the text."""


@dataclass(frozen=True)
class RepeatedPrompts:
    """The artifact's TPOT, median over requests, on the prompts of one repeat that were sent twice."""

    __pydantic_config__ = DOCUMENTED

    m: int
    first_tpot: float
    """The median TPOT of the first time, in seconds."""
    second_tpot: float


@dataclass(frozen=True)
class Evidence:
    """Everything that `judge` reads besides the workload and the bounds."""

    __pydantic_config__ = DOCUMENTED

    loaded: ModelFigures
    baseline_loaded: ModelFigures
    quality: Comparison
    """The comparison of artifact and baseline on held-out text, computed in process."""
    canary: tuple[ScoredText, ...]
    """Greedy texts of the artifact's server."""
    baseline_canary: tuple[ScoredText, ...]
    measured: tuple[MeasuredM, ...]
    """Every repeat at every M."""
    weights: WeightFigures | None
    """The stored weights compared with the baseline's; null if the baseline is quantized itself."""
    texts: TextFigures
    """Tokenizer, templates and generation settings compared with the baseline's."""
    readers: ReaderFigures | None = None
    """How other readers interpret the artifact's files; null if this was not examined."""
    capacity: int | None = None
    """How many tokens the artifact's KV cache holds; null if its server does not say."""
    limit: int | None = None
    """The most requests that the artifact's server runs together; null if it does not say."""
    request_memory: RequestMemory | None = None
    """What the artifact's server keeps in memory of each request; null if it does not say."""
    compiled: tuple[Mapping[str, int] | None, Mapping[str, int] | None] = (None, None)
    """The artifact's server's compilations after warm-up: before the first request, and after the last."""
    packed: tuple[PackedLayers, PackedLayers] = (None, None)
    """The layers packed by the artifact's server, and by the baseline's."""
    answers: tuple[TextScore, ...] = ()
    """Answers of the artifact's server under load, most of them at the largest M."""
    repeated: RepeatedPrompts | None = None
    """The TPOT of prompts that were sent twice; null if nothing was measured completely."""
    together: MeasuredM | None = None
    """Blocks whose repeats ran on both servers at the same time; null if stalls left no doubt."""
    company: CompanyFigures | None = None
    """Answers alone and in a batch; null if the artifact's server does not claim batch invariance."""
    in_use: FiguresInUse | None = None
    """The figures of a load as in use; null if none was sent, as in exploratory runs."""
    at_rest: AtRestFigures | None = None
    """The figures of both servers after all load had ended; null if they were not examined."""
    quality_by_domain: Mapping[str, Comparison] = field(default_factory=dict)
    """The same comparison on the text of each domain, such as `code`; empty if there is only one domain."""
    foreign_domains: Mapping[str, float] = field(default_factory=dict)
    """Domains that were left out since the baseline cannot predict them, with the bits per byte that it
    needs."""
    quality_of_given: Comparison | None = None
    """The same comparison on the user's own text; null if the user gave none."""
    alone: AloneFigures | None = None
    """Both servers measured with the other one stopped; null if they were not started here, or took turns."""
    by_layers: bool = False
    """Whether quality and answers were computed a decoder layer at a time because the models did not fit in
    memory together: with dequantized weights, and unquantized keys and values."""
    has_rival: bool = False
    """Whether a rival was served as well: its repeats are among `measured`."""
    diagnoses: Mapping[int, str] = field(default_factory=dict)
    """For each M that failed, which layer is to blame."""
    emulated: tuple[EmulatedProducts, ...] = ()
    """Products that servers emulate; speed is judged only if there are none."""
