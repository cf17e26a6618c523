"""How an artifact's files differ from its baseline's: raw figures, measured without model or server.

Data only. `pipeline/validation/` reads the files, `checks/weights.py` and `checks/text_files.py` judge.
"""

from dataclasses import dataclass

from ..settings import DOCUMENTED


@dataclass(frozen=True)
class ModuleError:
    """One quantized module compared with the baseline's weight."""

    __pydantic_config__ = DOCUMENTED

    module: str
    relative_error: float | None
    """‖dequantized − baseline‖ / ‖baseline‖ of the weights, Frobenius norms; null if it is not finite."""
    recorded: float | None
    """The same error as the manifest recorded it when the artifact was made; null if it is not recorded."""


@dataclass(frozen=True)
class KindErrors:
    """The quantized modules of one kind and format, such as all layers' `down_proj`."""

    __pydantic_config__ = DOCUMENTED

    kind: str
    """The modules' name, with `*` in place of the numbers of layers and experts."""
    format: str
    modules: int
    median: float | None
    """The median of the modules' relative errors; null if most are not finite."""
    spread: float
    """The median absolute deviation of the errors' logarithms."""
    furthest: tuple[ModuleError, ...]
    """The modules furthest from the manifest's record, if there is one, and those with the largest errors."""


@dataclass(frozen=True)
class ChangedTensor:
    """An unquantized tensor that differs from the baseline's."""

    __pydantic_config__ = DOCUMENTED

    name: str
    rows: int
    """Number of rows that differ."""
    of: int


@dataclass(frozen=True)
class WeightFigures:
    """The artifact's tensors against its baseline's. Lists of names hold the first few only."""

    __pydantic_config__ = DOCUMENTED

    is_ours: bool
    """Whether the artifact has a manifest, which records the error of every module."""
    is_baseline: bool
    """Whether the artifact's bytes are the baseline's own, which tests the gate."""
    is_other_quantized: bool
    """Whether keys and values are stored quantized, so that the weights need not be."""
    quantized: int
    """Number of modules that are stored quantized."""
    recorded: int
    """Number of modules that the manifest lists as quantized."""
    compared: int
    """Number of quantized modules that were compared with the baseline's weights."""
    kept: int
    """Number of unquantized tensors that were compared with the baseline's, bit for bit."""
    kinds: tuple[KindErrors, ...] = ()
    not_quantized: tuple[str, ...] = ()
    """Modules that the manifest lists as quantized but that are not."""
    not_recorded: tuple[str, ...] = ()
    """Quantized modules that the manifest does not list."""
    routers: tuple[str, ...] = ()
    """Quantized modules that choose experts in the baseline."""
    changed: tuple[ChangedTensor, ...] = ()
    changed_tensors: int = 0
    """Number of tensors that differ; `changed` names the first."""
    missing: tuple[str, ...] = ()
    """Tensors of the baseline that have no counterpart in the artifact."""
    unknown: tuple[str, ...] = ()
    """Tensors of the artifact that have no counterpart in the baseline."""


@dataclass(frozen=True)
class TextDifference:
    """One part of the conversion between text and tokens, and where it differs from the baseline's."""

    __pydantic_config__ = DOCUMENTED

    part: str
    """One of `PARTS`."""
    where: str
    """Where it differs, in a few words: `token 'the' is 264, the baseline's 265 (and 3 more)`."""


PARTS = (
    "vocabulary", "merges", "normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens",
    "tokenizer", "special_tokens", "chat_template", "token_ids", "generation_config", "config",
)  # fmt: skip
"""The parts that a recipe can declare as changed; `tokenizer` stands for everything else in its files."""


@dataclass(frozen=True)
class TextFigures:
    """Tokenizer, chat template, end-of-sequence tokens and generation settings against the baseline's."""

    __pydantic_config__ = DOCUMENTED

    differences: tuple[TextDifference, ...] = ()
    declared: tuple[str, ...] = ()
    """The parts that the artifact's recipe declares to be changed."""


@dataclass(frozen=True)
class ReadElsewhere:
    """The artifact in another reader: its predictions compared with ours on the same tokens."""

    __pydantic_config__ = DOCUMENTED

    reader: str
    """The reader with its version, and the versions of the libraries with which it reads quantized
    weights."""
    tokens: int
    mean_kl: float | None
    """The mean KL divergence of its predictions from ours, in nats per token; null if there is no finite
    figure."""
    top1_agreement: float | None
    refused: str | None
    """The reader's error message if it could not load the artifact here; else null."""


@dataclass(frozen=True)
class ReaderFigures:
    """How readers other than ours interpret the artifact's files."""

    __pydantic_config__ = DOCUMENTED

    misreadings: tuple[str, ...] = ()
    """What the readers refuse, skip or read differently, each with its file and field."""
    elsewhere: tuple[ReadElsewhere, ...] = ()
