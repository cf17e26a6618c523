"""Quality of several quantized checkpoints against one baseline, on the same text in one run.

The comparison needs no server and gives no verdict.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import torch

from ...base.errors import UserError
from ...base.progress import progress_bar
from ...serving_check.checks.weights import check_weights
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.quality_figures import Comparison as Predictions
from ...serving_check.quality import compare as compare_predictions
from ...serving_check.settings import QUALITY_TOKENS
from ..checkpoints.baseline import open_baseline
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..conventions.declared import stored_weights
from ..machine.device import resolve_device, resolve_dtype
from ..machine.tested_stack import warn_if_untested
from ..model_loader.load_model import load_model
from ..quantization.budget.allocation import PLAIN_BITS
from ..records.comparison import ComparedModel, Comparison
from ..records.sensitivity_table import plain_weights
from ..validation.held_out import read_held_out
from ..validation.known_text import read_known
from ..validation.subject import describe_quantization
from ..validation.weights import WeightComparison, compare_weights

FAR = 1.0
"""The relative error of an all-zero weight; an unrelated weight has about 1.4."""


def compare(
    models: Sequence[str | Path],
    baseline: str | Path | None = None,
    *,
    text: str | Path | None = None,
    quality_tokens: int = QUALITY_TOKENS,
    device: str = "auto",
    dtype: str = "auto",
    card: bool = False,
    progress: bool = True,
) -> Comparison:
    """Compare each of `models` (folders or Hub ids, in any convention that we read) with the baseline.

    baseline: the unquantized checkpoint; None takes the one that the first model was made from
    text:     held-out text (plain, or .jsonl with `text`); None takes the one that Scalegate brings
    dtype:    the dtype of activations, the same for all models
    card:     save the comparison in the first model's folder; its model card then shows it
    """
    warn_if_untested()
    checkpoints = [replace(open_checkpoint(str(model)), as_released=True) for model in models]
    if not checkpoints:
        raise UserError("nothing to compare; name one quantized checkpoint or more")
    if card:
        _require_artifact(checkpoints[0])
    other = open_baseline(checkpoints[0], None if baseline is None else str(baseline))
    where, kind = resolve_device(device), resolve_dtype(dtype)
    given = None if text is None else read_held_out(Path(text), checkpoints[0], other, quality_tokens)
    reference = load_model(other.folder, device=where, dtype=kind, progress=progress).model
    windows = given or read_known(reference, checkpoints[0], other, quality_tokens)
    found = []
    total = len(checkpoints) * sum(window.numel() for window in windows.windows)
    with progress_bar(total=total, desc="comparing", unit="tok", shown=progress) as bar:
        for checkpoint, name in zip(checkpoints, distinct_names(checkpoints), strict=True):
            loaded = load_model(checkpoint, device=where, dtype=kind, progress=progress).model
            if loaded.config.get_text_config().vocab_size != reference.config.get_text_config().vocab_size:
                raise UserError(
                    f"{checkpoint.source} was not made from {other.source}: their vocabularies differ in size"
                )
            figures = compare_predictions(loaded, reference, windows.windows, bar.update)
            del loaded
            _release_memory()
            weights = _compare_weights(checkpoint, other, where, progress)
            found.append(_compared(checkpoint, name, figures, weights))
    first = checkpoints[0].manifest
    comparison = Comparison(
        baseline=other.public_name,
        baseline_nats_per_token=figures.baseline_nats_per_token,
        tokens=figures.tokens,
        text_sha256=windows.sha256,
        dtype=str(reference.dtype).removeprefix("torch."),
        bytes_digest=first.bytes_digest() if first else None,
        models=tuple(found),
    )
    if card:
        comparison.write(checkpoints[0].folder)
    return comparison


def _require_artifact(first: Checkpoint) -> None:
    """Raise UserError if a comparison cannot be saved for the card of `first`."""
    if first.revision is not None or first.manifest is None:
        raise UserError(
            f"--card saves the comparison in the folder of the first model, but {first.source} is not a "
            "folder "
            "of an artifact; leave --card out, or name an artifact that `pipeline quantize` or "
            "`pipeline adopt` made"
        )


def distinct_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return the checkpoints' public names; if folders share a name, parent folders are added until the names
    differ."""
    ways = [
        (each.source,) if each.revision is not None else each.folder.resolve().parts for each in checkpoints
    ]
    return [_distinct(way, [other for other in ways if other != way]) for way in ways]


def _distinct(way: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    for parts in range(1, len(way)):
        if all(other[-parts:] != way[-parts:] for other in others):
            return str(PurePath(*way[-parts:]))
    return str(PurePath(*way))


def _compare_weights(
    checkpoint: Checkpoint, baseline: Checkpoint, device: str, progress: bool
) -> WeightComparison | None:
    manifest = checkpoint.manifest
    has_kv_format = manifest is not None and manifest.kv_cache != UNQUANTIZED
    return compare_weights(
        checkpoint, baseline, manifest, has_kv_format=has_kv_format, device=device, progress=progress
    )


def _compared(
    checkpoint: Checkpoint, name: str, figures: Predictions, weights: WeightComparison | None
) -> ComparedModel:
    kinds = weights.figures.kinds if weights is not None else ()
    errors = weights.errors if weights is not None else {}
    return ComparedModel(
        name=name,
        quantization=describe_quantization(checkpoint),
        bits_per_weight=round(bits_per_weight(checkpoint), 4),
        weight_bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        nats_per_token=figures.nats_per_token,
        extra_nats_per_token=figures.extra_nats_per_token,
        extra_nats_limits=figures.intervals.get("extra_nats_per_token"),
        mean_kl=figures.mean_kl,
        p99_kl=figures.p99_kl,
        p999_kl=figures.p999_kl,
        max_kl=figures.max_kl,
        top1_agreement=figures.top1_agreement,
        module_errors={kind.kind: kind.median for kind in kinds if kind.median is not None},
        weight_errors={module: error if math.isfinite(error) else None for module, error in errors.items()},
        unlike_baseline=None if weights is None else _unlike_baseline(weights),
    )


def _unlike_baseline(weights: WeightComparison) -> str | None:
    """Return why a model was not made from the baseline. For an artifact of ours the manifest names the
    source; for another tool's checkpoint, whose weights may have been scaled, one weight has to be near the
    baseline's.
    """
    figures, errors = weights.figures, weights.errors.values()
    if figures.is_ours:
        check = check_weights(figures)
        said = f"was not made from the baseline, or was changed since: {check.reason}"
        return said if check.status == "fail" else None
    is_near = any(error < FAR for error in errors) if errors else figures.changed_tensors < figures.kept
    return None if is_near else "no weight is near the baseline's: made from another model, or rotated"


def bits_per_weight(checkpoint: Checkpoint) -> float:
    """Return the bits per weight of the quantized weights in the files; 16 if no weight is quantized.

    If the formats were chosen under a budget, weights that the budget left unquantized are counted too.
    """
    stored = [weight for weight in stored_weights(checkpoint).values() if weight.is_quantized]
    numbers = sum(math.prod(weight.shape) for weight in stored)
    bits = sum(weight.spec.bits_per_weight(*weight.shape) * math.prod(weight.shape) for weight in stored)
    manifest = checkpoint.manifest
    plain = 0 if manifest is None else plain_weights(manifest.quantization)
    numbers, bits = numbers + plain, bits + PLAIN_BITS * plain
    return bits / numbers if numbers else PLAIN_BITS


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
