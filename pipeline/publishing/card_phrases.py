"""Phrases of the card: the quantized model, the method, the baseline, engine and versions."""

from pathlib import Path
from typing import Any

from ...serving_check.adapters.all_engines import find_engine
from ...serving_check.evidence.verdict import Verdict
from ..quantization.calibration.calibration_names import SCARCE
from ..records.artifact import Artifact
from .markdown import code

UNKNOWN = "not known"
PLUGIN = "scalegate-kernels"
MEMORY_GB = 10
"""Of which the card says how many requests it holds."""


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


def kernels_phrase(verdict: Verdict) -> str:
    """Return the kernels that the log of the artifact's server names, without the plugin's lines."""
    return ", ".join(line for line in verdict.artifact.kernels if not line.startswith(PLUGIN))


def is_served_by_plugin(verdict: Verdict) -> bool:
    """Say whether the artifact's server multiplied with our kernels inside another engine."""
    return any(line.startswith(f"{PLUGIN} serves ") for line in verdict.artifact.kernels)


def size_phrase(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def versions_phrase(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN


def states_phrase(verdict: Verdict) -> str | None:
    """Return the memory that a request takes in a model with recurrent layers; None if the server kept no
    states.
    """
    memory = verdict.evidence.request_memory
    if memory is None or not memory.states:
        return None
    tokens = verdict.workload.input_len + verdict.workload.output_len
    fit = int(MEMORY_GB * 1e9) // memory.of_request(tokens)
    kinds = ", ".join(f"{name.replace(' ', ' in ')}" for name in memory.states)
    beside = ""
    if memory.page_bytes:
        beside = (
            f", beside {size_phrase(memory.page_bytes // memory.page_size)} of keys and values for a token"
        )
    return (
        f"Its recurrent layers keep {size_phrase(memory.state_bytes)} of state for each request, however "
        f"long it is ({kinds}){beside}. In {MEMORY_GB} GB of memory beside the weights, {fit:,} requests of "
        f"{tokens} tokens fit. The measured server had room for {_most_at_once(verdict, tokens)} of them."
    )


def _most_at_once(verdict: Verdict, tokens: int) -> str:
    """Return how many requests of that many tokens the measured server held, by its rows and by its pages."""
    evidence = verdict.evidence
    bounds = [] if evidence.limit is None else [evidence.limit]
    if evidence.capacity is not None and evidence.request_memory and evidence.request_memory.page_bytes:
        bounds.append(evidence.capacity // tokens)
    return f"{min(bounds):,}" if bounds else UNKNOWN


def quantization_phrase(artifact: Artifact, method: str | None) -> str:
    """Return `INT4 g128, zero points, stored as compressed-tensors`; several formats have their layers
    counted.
    """
    formats = artifact.quantization["formats"]
    if not formats:
        return ""
    what = formats[0]["label"]
    if len(formats) > 1:
        what = " and ".join(f"{each['label']} ({each['modules']} layers)" for each in formats)
    return what + (f", stored as {method}" if method else "")


def calibration_phrase(read: dict[str, Any] | None) -> str | None:
    """Return the sequences that the weights were calibrated on, and any warnings about them."""
    if read is None:
        return None
    kinds = [f"{read['text']} sequences of a text"] if read["text"] else []
    kinds += [f"{read['own']} that the model wrote itself"] if read["own"] else []
    strange = "" if read.get("fits", True) else "; the text is of a kind that the model does not know"
    few = len(read.get(SCARCE, ()))
    unreached = f"; {few} experts got fewer tokens of it than they have inputs" if few else ""
    return " and ".join(kinds) + strange + unreached
