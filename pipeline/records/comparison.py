"""The record of a comparison of several quantized checkpoints with one baseline, and its table.

`compare.py` makes the record; the card of the first checkpoint shows it, as long as it is about the same
bytes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ...base.atomic_files import write_json
from ...base.errors import UserError
from ...base.untrusted_files import read_json_object

COMPARISON_NAME = ".scalegate-comparison.json"
"""The name of the record beside the manifest. The file is hidden, so it is never published by itself."""
COLUMNS = ("", "bits", "MB", "extra nats", "mean KL", "p99", "p99.9", "top-1", "weights' error")

MARK = "(!)"
"""The mark after the name of a model that is unlike the baseline."""


@dataclass(frozen=True)
class ComparedModel:
    """One quantized checkpoint beside the baseline; divergences are in nats, from the baseline."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    quantization: str
    bits_per_weight: float
    """Bits per weight, scales and zero points included, over quantized weights and those kept by a budget."""
    weight_bytes: int
    """The bytes of all tensors in the files."""
    nats_per_token: float
    extra_nats_per_token: float
    extra_nats_limits: tuple[float, float] | None
    mean_kl: float
    p99_kl: float
    p999_kl: float
    max_kl: float
    top1_agreement: float
    module_errors: dict[str, float]
    """For each kind of module, the median relative error of its weights."""
    weight_errors: dict[str, float | None] = field(default_factory=dict)
    """The relative error of each quantized module's weight; None if it is not finite."""
    unlike_baseline: str | None = None
    """Why it seems to be made from another model than the baseline; None if it does not."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the model's row of the table, with the columns in `COLUMNS`."""
        worst = max(self.module_errors.values(), default=0.0)
        return (
            self.name if self.unlike_baseline is None else f"{self.name} {MARK}",
            f"{self.bits_per_weight:.2f}",
            f"{self.weight_bytes / 1e6:,.1f}",
            f"{self.extra_nats_per_token:+.4f}",
            f"{self.mean_kl:.5f}",
            f"{self.p99_kl:.4f}",
            f"{self.p999_kl:.3f}",
            f"{self.top1_agreement:.2%}",
            f"{worst:.4f}",
        )


@dataclass(frozen=True)
class Comparison:
    """Several models beside one baseline, on the same tokens in one run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    baseline: str
    baseline_nats_per_token: float
    tokens: int
    text_sha256: str
    dtype: str
    bytes_digest: str | None
    """The digest of the first model's files, if it is an artifact of ours."""
    models: tuple[ComparedModel, ...]

    def write(self, folder: Path) -> None:
        write_json(folder / COMPARISON_NAME, asdict(self))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        rows = [COLUMNS, *(model.cells for model in self.models)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        return "\n".join(_line(row, widths) for row in rows)

    @property
    def warnings(self) -> list[str]:
        """Return a line for each model that is marked in the table."""
        return [
            f"{MARK} {model.name}: {model.unlike_baseline}"
            for model in self.models
            if model.unlike_baseline is not None
        ]

    def module_table(self) -> str:
        """Return median relative errors of weights by kind of module, a column for each model."""
        kinds = list(dict.fromkeys(kind for model in self.models for kind in model.module_errors))
        rows = [
            ("", *(model.name for model in self.models)),
            *((kind, *(_error(model.module_errors.get(kind)) for model in self.models)) for kind in kinds),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(_line(row, widths) for row in rows)


_COMPARISON: TypeAdapter[Comparison] = TypeAdapter(Comparison)


def read_comparison(folder: Path, bytes_digest: str) -> Comparison | None:
    """Return the comparison written beside the artifact in `folder`; None if there is none, or it is about
    other bytes.
    """
    path = folder / COMPARISON_NAME
    if not path.is_file():
        return None
    try:
        found = _COMPARISON.validate_python(read_json_object(path))
    except ValidationError as error:
        raise UserError(f"{path} is not a comparison of Scalegate's; delete it, or compare again") from error
    return found if found.bytes_digest == bytes_digest else None


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip()
