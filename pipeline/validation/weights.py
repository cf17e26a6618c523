"""Compares an artifact's stored weights with its baseline's, a block of rows at a time, without a model.

Quantized modules are compared by their relative error, and everything else bit for bit. The comparison reads
through the conventions and `dequantize()`, so it knows no format; `checks/weights.py` judges the figures.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor

from ...base.progress import progress_bar
from ...layouts.formats.weight_format import Weight
from ...serving_check.evidence.artifact_figures import ChangedTensor, KindErrors, ModuleError, WeightFigures
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.float_source import is_scale, read_rows, scale_of
from ..checkpoints.safetensors_file import TensorInfo
from ..conventions.convention import StoredWeight
from ..conventions.declared import stored_weights
from ..conventions.kv_cache import SCALE as KV_SCALE
from ..model_loader.linear_weights import ROUTER, ExpertBias, LinearWeight, find_linear_weights
from ..quantization.shards.weight_tensors import read_bias, read_linear
from ..quantization.solvers.equalization import column_scales
from ..records.artifact import Artifact

BLOCK = 1 << 24
"""How many weights are in fp32 at once, in a few copies, which bounds memory whatever a layer's size."""
NAMED = 8
"""How many names of each list are kept, since a list may be as long as the checkpoint."""
WEIGHT = ".weight"


@dataclass(frozen=True)
class WeightComparison:
    """The comparison. errors: the relative error of each quantized module, not finite if it holds a NaN"""

    figures: WeightFigures
    errors: dict[str, float]


def compare_weights(
    artifact: Checkpoint,
    baseline: Checkpoint,
    manifest: Artifact | None,
    *,
    has_kv_format: bool = False,
    device: str = "cpu",
    progress: bool = True,
) -> WeightComparison | None:
    """Compare every stored tensor of `artifact` with `baseline`; None if the baseline is itself quantized.

    has_kv_format: keys and values are stored quantized, so the weights need not be quantized
    device:        where errors are computed
    """
    if any(weight.is_quantized for weight in stored_weights(baseline).values()):
        return None
    stored = stored_weights(artifact)
    recorded = manifest.module_errors() if manifest else {}
    comparison = _Comparison(artifact, baseline, device, manifest.scaled_modules() if manifest else {})
    total = sum(math.prod(weight.shape) for weight in stored.values()) + comparison.kept_numbers(stored)
    with progress_bar(total=total, desc="weights", unit="w", unit_scale=True, shown=progress) as bar:
        errors = {}
        for module, weight in stored.items():
            error = comparison.module_error(weight)
            if error is not None:
                errors[module] = error
            bar.update(math.prod(weight.shape))
        for name in comparison.kept_names(stored):
            comparison.compare_kept(name)
            bar.update(math.prod(artifact.tensors[name].shape))
    not_quantized = sorted(recorded.keys() - stored.keys())
    not_recorded = sorted(stored.keys() - recorded.keys()) if manifest else []
    figures = WeightFigures(
        is_ours=manifest is not None,
        is_baseline=_same_weights(artifact, baseline, comparison),
        is_other_quantized=has_kv_format,
        quantized=len(stored),
        recorded=len(recorded),
        compared=len(errors),
        kept=comparison.kept,
        kinds=_by_kind(stored, errors, recorded),
        not_quantized=tuple(not_quantized[:NAMED]),
        not_recorded=tuple(not_recorded[:NAMED]),
        routers=tuple(comparison.routers[:NAMED]),
        changed=tuple(comparison.changed[:NAMED]),
        changed_tensors=len(comparison.changed),
        missing=tuple(comparison.missing()[:NAMED]),
        unknown=tuple(comparison.unknown[:NAMED]),
    )
    return WeightComparison(figures, errors)


def squared_errors(
    artifact: Checkpoint, baseline: Checkpoint, *, device: str = "cpu", progress: bool = True
) -> dict[str, tuple[float, float]]:
    """Return, for each quantized module of `artifact`, the sums of squares of its error and of the baseline's
    weight.

    Modules that the baseline lacks, or has in another shape, are left out.
    """
    comparison = _Comparison(artifact, baseline, device, {})
    stored = stored_weights(artifact).items()
    found = {
        module: comparison.squares(weight)
        for module, weight in progress_bar(stored, desc="weights", shown=progress)
    }
    return {module: squares for module, squares in found.items() if squares is not None}


@dataclass
class _Comparison:
    """Two checkpoints, and the tensors of the baseline that have been compared."""

    artifact: Checkpoint
    baseline: Checkpoint
    device: str
    scaled: Mapping[str, str]
    """The norm that has absorbed each module's scales; the recorded errors of these modules show if it is
    right."""
    kept: int = 0
    changed: list[ChangedTensor] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _sources: dict[str, LinearWeight] = field(default_factory=dict)
    _biases: dict[str, ExpertBias] = field(default_factory=dict)
    """The biases of single experts, by their names in the artifact."""

    def __post_init__(self) -> None:
        found = find_linear_weights(self.baseline)
        self._sources = {weight.module: weight for group in found.linears.values() for weight in group}
        self._biases = {bias.name: bias for group in found.biases.values() for bias in group}
        if found.tied_lm_head is not None:
            self._sources[found.tied_lm_head.module] = found.tied_lm_head

    def kept_names(self, stored: Mapping[str, StoredWeight]) -> list[str]:
        quantized = {tensor for weight in stored.values() for tensor in weight.tensors}
        return [name for name in self.artifact.tensors if name not in quantized and not KV_SCALE.search(name)]

    def kept_numbers(self, stored: Mapping[str, StoredWeight]) -> int:
        return sum(math.prod(self.artifact.tensors[name].shape) for name in self.kept_names(stored))

    def module_error(self, weight: StoredWeight) -> float | None:
        """Return the relative error of one quantized module, not finite if the module holds a NaN; None
        without a source.
        """
        squares = self.squares(weight)
        if squares is None:
            return None
        error, norm = squares
        return math.sqrt(error / norm) if norm else math.sqrt(error)

    def squares(self, weight: StoredWeight) -> tuple[float, float] | None:
        """Return the sums of squares of a module's error and of its source; None without a source."""
        source = self._sources.get(weight.module)
        if source is None or (source.n, source.k) != weight.shape:
            self.unknown.append(weight.module)
            return None
        self._seen.add(source.tensor)
        if source.role == ROUTER:
            self.routers.append(weight.module)
        value, columns = weight.read(), self._columns(weight.module)
        error = norm = 0.0
        for start, stop in _row_blocks(source.n, source.k):
            original = read_linear(self.baseline, source, start, stop).to(self.device).float()
            if columns is not None:
                original *= columns
            difference = _rows_of(value, start, stop, self.device) - original
            # Sums of squares in fp32 along rows of some thousand numbers, in fp64 over the rows.
            error += difference.square_().sum(1).double().sum().item()
            norm += original.square_().sum(1).double().sum().item()
        return error, norm

    def _columns(self, module: str) -> Tensor | None:
        """Return fp32 [K], the factors of the module's columns; None if there are none.

        If a norm was exchanged or damaged, the factors differ, and the errors of its modules differ from the
        recorded ones.
        """
        norm = self.scaled.get(module)
        if norm is None or norm not in self.artifact.tensors or norm not in self.baseline.tensors:
            return None
        old, new = (side.read(norm).to(self.device) for side in (self.baseline, self.artifact))
        return column_scales(old, new) if old.shape == new.shape else None

    def compare_kept(self, name: str) -> None:
        """Compare one unquantized tensor with the baseline's tensor of that name, or with the rows that it
        was cut from."""
        info = self.artifact.tensors[name]
        source = None
        if name in self._biases and name not in self.baseline.tensors:
            self._compare_bias(info, self._biases[name])
            return
        if name in self.baseline.tensors:
            self._seen.add(name)
            if self.baseline.tensors[name].shape != info.shape:
                self.unknown.append(name)
                return
        else:
            source = self._sources.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
            if source is None or (source.n, source.k) != info.shape:
                self.unknown.append(name)
                return
            self._seen.add(source.tensor)
        differing = total = 0
        for ours, theirs in self._kept_blocks(info, source):
            # As bits, since NaN is not equal to itself. A change of dtype alone is reported below.
            same = ours.view(torch.uint8) == theirs.to(ours.dtype).contiguous().view(torch.uint8)
            differing += int((~same).any(1).sum())
            total += len(ours)
        self.kept += 1
        if name in self.scaled.values():
            differing = 0
        dtype_changed = source is None and not self._same_dtype(name, info)
        if differing or dtype_changed:
            self.changed.append(ChangedTensor(name, differing, total))

    def _compare_bias(self, info: TensorInfo, bias: ExpertBias) -> None:
        self._seen.add(bias.tensor)
        theirs = read_bias(self.baseline, bias)
        self.kept += 1
        if theirs.dtype != info.dtype or not torch.equal(info.read(), theirs):
            self.changed.append(ChangedTensor(info.name, 1, 1))

    def missing(self) -> list[str]:
        return [
            name
            for name in self.baseline.tensors
            if name not in self._seen and not is_scale(self.baseline, name) and not KV_SCALE.search(name)
        ]

    def _same_dtype(self, name: str, info: TensorInfo) -> bool:
        return scale_of(self.baseline, name) is not None or self.baseline.tensors[name].dtype == info.dtype

    def _kept_blocks(self, info: TensorInfo, source: LinearWeight | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of rows of both tensors, [rows, columns]; a one-dimensional tensor is one row."""
        if len(info.shape) < 2:
            numbers = math.prod(info.shape)
            theirs = self.baseline.read(info.name)
            yield info.read().reshape(1, numbers), theirs.reshape(1, numbers)
            return
        n, k = info.shape[-2:]
        experts: list[int | None] = list(range(info.shape[0])) if len(info.shape) == 3 else [None]
        if len(info.shape) > 3:
            n, experts = math.prod(info.shape[:-1]), [None]
        for expert in experts:
            for start, stop in _row_blocks(n, k):
                ours = read_rows(self.artifact, info.name, start, stop, expert)
                if source is not None:
                    yield ours, read_linear(self.baseline, source, start, stop)
                else:
                    yield ours, read_rows(self.baseline, info.name, start, stop, expert)


def _row_blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK // max(1, k))
    for start in range(0, n, rows):
        yield start, min(start + rows, n)


def _rows_of(value: Weight | Tensor, start: int, stop: int, device: str) -> Tensor:
    if isinstance(value, Weight):
        return value.rows(start, stop).to(device).dequantize(torch.float32)
    return value[start:stop].to(device).float()


def _by_kind(
    stored: Mapping[str, StoredWeight], errors: Mapping[str, float], recorded: Mapping[str, float]
) -> tuple[KindErrors, ...]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in errors:
        groups[_kind(module), stored[module].spec.label].append(module)
    return tuple(
        _kind_errors(kind, label, {module: errors[module] for module in modules}, recorded)
        for (kind, label), modules in groups.items()
    )


def _kind_errors(
    kind: str, label: str, errors: Mapping[str, float], recorded: Mapping[str, float]
) -> KindErrors:
    finite = [error for error in errors.values() if math.isfinite(error)]
    median = median_low(finite) if finite else math.nan
    spread = median_low([_log_distance(error, median) for error in finite]) if finite else 0.0

    def size(module: str) -> float:
        return errors[module] if math.isfinite(errors[module]) else math.inf

    def off_record(module: str) -> float:
        known = recorded[module]
        return abs(size(module) - known) / known if known else size(module)

    off = sorted((module for module in errors if module in recorded), key=off_record, reverse=True)[:NAMED]
    largest = sorted(errors, key=size, reverse=True)[:NAMED]
    return KindErrors(
        kind=kind,
        format=label,
        modules=len(errors),
        median=median if finite else None,
        spread=spread if math.isfinite(spread) else 0.0,
        furthest=tuple(
            ModuleError(m, errors[m] if math.isfinite(errors[m]) else None, recorded.get(m))
            for m in dict.fromkeys([*off, *largest])
        ),
    )


def _log_distance(error: float, other: float) -> float:
    """Return the factor between two relative errors; an exact weight equals another exact one, and differs
    from all others.
    """
    if error == other:
        return 0.0
    return abs(math.log(error / other)) if error > 0 and other > 0 else math.inf


def _kind(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _same_weights(artifact: Checkpoint, baseline: Checkpoint, comparison: _Comparison) -> bool:
    """Say whether all the artifact's tensors are the baseline's, bit for bit and by name."""
    return artifact.tensors.keys() == baseline.tensors.keys() and not comparison.changed
