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
    """‖dequantized − baseline's‖ / ‖baseline's‖, Frobenius; null where it is not finite."""
    recorded: float | None
    """The same as the manifest says it was when the artifact was made; null where nothing is recorded."""


@dataclass(frozen=True)
class KindErrors:
    """The quantized modules of one kind and format, such as all layers' `down_proj`."""

    __pydantic_config__ = DOCUMENTED

    kind: str
    """The modules' name, `*` where their layers and experts are numbered."""
    format: str
    modules: int
    median: float | None
    """Of their relative errors; null where most are not finite."""
    spread: float
    """Median absolute deviation of the errors' logarithms."""
    furthest: tuple[ModuleError, ...]
    """The modules furthest from the manifest's record, if there is one, and those with the largest errors."""


@dataclass(frozen=True)
class ChangedTensor:
    """An unquantized tensor that differs from the baseline's."""

    __pydantic_config__ = DOCUMENTED

    name: str
    rows: int
    """Rows that differ."""
    of: int


@dataclass(frozen=True)
class WeightFigures:
    """The artifact's tensors against its baseline's. Lists of names hold the first few only."""

    __pydantic_config__ = DOCUMENTED

    is_ours: bool
    """It has a manifest, which records the error of every module."""
    is_baseline: bool
    """Its bytes are the baseline's own, to test the gate."""
    is_other_quantized: bool
    """Keys and values are stored quantized, so the weights need not be."""
    quantized: int
    """Modules that are stored quantized."""
    recorded: int
    """Modules that the manifest lists as quantized."""
    compared: int
    """Quantized modules whose baseline was found and read."""
    kept: int
    """Unquantized tensors that were compared with the baseline's, bit for bit."""
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
    """In a few words: `token 'the' is 264, the baseline's 265 (and 3 more)`."""


PARTS = (
    "vocabulary", "merges", "normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens",
    "tokenizer", "special_tokens", "chat_template", "token_ids", "generation_config", "config",
)  # fmt: skip
"""What a recipe can declare to be changed on purpose; `tokenizer` is whatever else is in its files."""


@dataclass(frozen=True)
class TextFigures:
    """Tokenizer, chat template, end-of-sequence tokens and generation settings against the baseline's."""

    __pydantic_config__ = DOCUMENTED

    differences: tuple[TextDifference, ...] = ()
    declared: tuple[str, ...] = ()
    """Parts that the artifact's recipe says it changes."""


@dataclass(frozen=True)
class ReadElsewhere:
    """The artifact in another reader: its predictions compared with ours on the same tokens."""

    __pydantic_config__ = DOCUMENTED

    reader: str
    """With its version and those of the libraries that it reads quantized weights with."""
    tokens: int
    mean_kl: float | None
    """Of its predictions from ours, nats a token; null where there are none, or none that is finite."""
    top1_agreement: float | None
    refused: str | None
    """Its own words where it could not load the artifact here."""


@dataclass(frozen=True)
class ReaderFigures:
    """How readers other than ours interpret the artifact's files."""

    __pydantic_config__ = DOCUMENTED

    misreadings: tuple[str, ...] = ()
    """What they refuse, skip or read otherwise, each with its file and field."""
    elsewhere: tuple[ReadElsewhere, ...] = ()
