"""Phrases of the card: the quantized model, the method, the baseline, engine and versions."""

from pathlib import Path
from typing import Any

from ...serving_check.adapters.all_engines import find_engine
from ...serving_check.evidence.verdict import Verdict
from ..quantization.calibration.calibration_names import SCARCE
from ..records.artifact import Artifact
from .markdown import code

UNKNOWN = "not known"


def baseline_phrase(verdict: Verdict) -> str:
    revision = verdict.baseline.revision
    name = verdict.baseline.name if revision is not None else Path(verdict.baseline.name).name
    is_plain = verdict.baseline.quantization == "none" and verdict.baseline.stored_as is None
    unquantized = "unquantized " if is_plain else ""
    return f"the {unquantized}`{code(name)}`"


def engine_phrase(verdict: Verdict) -> str:
    ours, theirs = (
        engine.title if (engine := find_engine(name)) else name
        for name in (verdict.environment.engine, verdict.environment.baseline_engine)
    )
    return ours if ours == theirs else f"{ours}, the baseline's on {theirs}"


def size_phrase(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def versions_phrase(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN


def quantization_phrase(artifact: Artifact, method: str | None) -> str:
    """`INT4 g128, zero points, stored as compressed-tensors`; several formats have their layers counted."""
    formats = artifact.quantization["formats"]
    if not formats:
        return ""
    what = formats[0]["label"]
    if len(formats) > 1:
        what = " and ".join(f"{each['label']} ({each['modules']} layers)" for each in formats)
    return what + (f", stored as {method}" if method else "")


def calibration_phrase(read: dict[str, Any] | None) -> str | None:
    """The sequences that the weights were calibrated on, and any warnings about them."""
    if read is None:
        return None
    kinds = [f"{read['text']} sequences of a text"] if read["text"] else []
    kinds += [f"{read['own']} that the model wrote itself"] if read["own"] else []
    strange = "" if read.get("fits", True) else "; the text is of a kind that the model does not know"
    few = len(read.get(SCARCE, ()))
    unreached = f"; {few} experts got fewer tokens of it than they have inputs" if few else ""
    return " and ".join(kinds) + strange + unreached
