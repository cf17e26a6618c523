"""A quantize job: all decisions are made before the first weight is read, and impossible jobs are refused."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ...base.errors import UserError
from ...layouts.formats.weight_format import WeightFormat
from ...layouts.kv.format import KV_FORMATS, largest_of
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype
from ..conventions.all_conventions import EXPORTS
from ..conventions.convention import ExportConvention, StackingConvention, kv_declaration
from ..conventions.declared import stored_weights
from ..conventions.plain import NAME as PLAIN
from ..records.recipe import Recipe, matches
from .calibration.calibration_needs import CalibrationNeeds, calibration_needs
from .calibration.calibration_text import CalibrationText, read_calibration_text
from .calibration.text_source import text_source
from .quantizers.all_quantizers import QUANTIZERS
from .shards.tasks import QuantizationTasks, make_tasks, with_whole_biases
from .shards.weight_tensors import WeightQuantizer

DEFAULT_EXPORT, OWN_EXPORT, MODELOPT_EXPORT = "compressed-tensors", "scalegate", "modelopt"
BLOCKS_EXPORT, EXPERTS_EXPORT = "fp8", "mxfp4"
SCALE_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class QuantizeJob:
    """Everything decided before the first weight is read."""

    checkpoint: Checkpoint
    recipe: Recipe
    tasks: QuantizationTasks
    export: str
    convention: ExportConvention
    quantization_config: dict[str, Any]
    file_metadata: dict[str, str]
    quantizer: WeightQuantizer
    needs: CalibrationNeeds
    text: CalibrationText | None


def without_left_out(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return `checkpoint` without the tensors that the recipe leaves out. Raise UserError for a pattern that
    matches nothing.
    """
    names = set[str]()
    for pattern in recipe.leave_out:
        found = [name for name in checkpoint.tensors if matches(pattern, name)]
        if not found:
            raise UserError(
                f"the recipe's `leave_out` pattern {pattern!r} matches no tensor of {checkpoint.source}"
            )
        names.update(found)
    return checkpoint.without(names) if names else checkpoint


def prepare(
    checkpoint: Checkpoint,
    recipe: Recipe,
    export: str | None,
    device: str | torch.device | None,
    calibration: str | None = None,
) -> QuantizeJob:
    """Decide everything about a job, and refuse impossible jobs before any time is spent."""
    _refuse_quantized(checkpoint)
    tasks = make_tasks(checkpoint, recipe)
    specs, embeddings = tasks.specs, tasks.embeddings
    export = chosen_export(checkpoint, recipe, tasks, export)
    convention = EXPORTS[export]
    if isinstance(convention, StackingConvention):
        reason = _stacking_refusal(checkpoint, export, tasks)
        if reason is not None:
            raise UserError(f"{checkpoint.source}: {reason}")
        tasks = with_whole_biases(tasks)
    for module, spec in specs.items():
        reason = _refusal(spec) or convention.refuses(spec, module, module in embeddings)
        if reason is not None:
            raise UserError(f"{module}: {reason}")
    declared = kv_declaration(convention, recipe.kv_cache)
    if not specs and declared is None and export != PLAIN:
        raise UserError(
            f"the recipe {recipe.name!r} quantizes no weights, and {export} has no place for "
            f"{recipe.kv_cache} keys and values; export {PLAIN}, or leave --export out"
        )
    named = specs
    if len(set(specs.values())) > 1:
        # A config of several formats names modules one by one, which it otherwise does not.
        named = specs | {name: specs[module] for name, module in tasks.other_names.items()}
    config = convention.quantization_config(named, tasks.ignore, embeddings) | (declared or {})
    plain = [task.written_name for task in tasks.in_order if not task.is_quantized]
    metadata = convention.file_metadata(specs, tasks.shapes, plain)
    quantizer = weight_quantizer(checkpoint, device)
    needs = calibration_needs(recipe, tasks.in_order)
    takes_scales = largest_of(KV_FORMATS[recipe.kv_cache]) is not None
    source = text_source(recipe, needs, takes_scales, calibration)
    text = None if source is None else read_calibration_text(checkpoint, source)
    return QuantizeJob(
        checkpoint, recipe, tasks, export, convention, config, metadata, quantizer, needs, text
    )


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise UserError if the source is quantized, or declares a form that is not read. FP8 sources do not
    count, since they are dequantized to 16 bits.
    """
    stored = stored_weights(checkpoint)
    labels = sorted({weight.spec.label for weight in stored.values() if weight.is_quantized})
    if labels:
        raise UserError(
            f"{checkpoint.source} is quantized already ({len(stored)} modules, {', '.join(labels)}); "
            "quantize the checkpoint that it was made from, or take this one as it is with `pipeline adopt`"
        )


def weight_quantizer(checkpoint: Checkpoint, device: str | torch.device | None) -> WeightQuantizer:
    dtype = default_dtype(checkpoint)
    return WeightQuantizer(dtype if dtype in SCALE_DTYPES else torch.bfloat16, _device(device))


def _default_export(specs: Collection[WeightFormat], kv_cache: str) -> str:
    """Return Scalegate's own convention for formats that only it stores, DeepSeek's for FP8 in blocks;
    otherwise the convention that most engines read, or ModelOpt's if only that declares the KV format."""
    if not specs:
        # vLLM refuses ModelOpt's section where no weight is quantized.
        return PLAIN if kv_declaration(EXPORTS[DEFAULT_EXPORT], kv_cache) is None else DEFAULT_EXPORT
    is_widely_read = all(EXPORTS[DEFAULT_EXPORT].refuses(spec, "") is None for spec in specs)
    if not is_widely_read and all(EXPORTS[OWN_EXPORT].refuses(spec, "") is None for spec in specs):
        return OWN_EXPORT
    is_declared = kv_declaration(EXPORTS[DEFAULT_EXPORT], kv_cache) is not None
    if not is_declared and all(EXPORTS[BLOCKS_EXPORT].refuses(spec, "") is None for spec in specs):
        return BLOCKS_EXPORT
    modelopt = EXPORTS[MODELOPT_EXPORT]
    alone = not is_declared and kv_declaration(modelopt, kv_cache)
    fits = len(set(specs)) == 1 and all(modelopt.refuses(spec, "") is None for spec in specs)
    return MODELOPT_EXPORT if alone and fits else DEFAULT_EXPORT


def chosen_export(
    checkpoint: Checkpoint, recipe: Recipe, tasks: QuantizationTasks, export: str | None
) -> str:
    """Return the convention that the user asks for, or the one that most engines read."""
    if export is not None:
        return export
    specs = set(tasks.specs.values())
    if specs and _stacking_refusal(checkpoint, EXPERTS_EXPORT, tasks) is None:
        return EXPERTS_EXPORT
    return _default_export(specs, recipe.kv_cache)


def _stacking_refusal(checkpoint: Checkpoint, export: str, tasks: QuantizationTasks) -> str | None:
    """Return why the experts of this model cannot be stored stacked; None if they can, and all of them are
    quantized.
    """
    convention = EXPORTS[export]
    of_model: str | None = f"{export} stores experts one by one"
    if isinstance(convention, StackingConvention):
        of_model = convention.refuses_model(checkpoint.model_type)
    if of_model is not None:
        return of_model
    refused = (EXPORTS[export].refuses(spec, module) for module, spec in tasks.specs.items())
    reason = next(filter(None, refused), None)
    if reason is None and any(task.linear and not task.is_quantized for task in tasks.in_order):
        return f"{export} holds all experts of a layer alike, and the recipe keeps some of them"
    return reason


def _refusal(spec: WeightFormat) -> str | None:
    """Return the reason why no quantizer makes weights of `spec`; None if one does."""
    if spec.name not in QUANTIZERS:
        return f"Scalegate reads {spec.name} and does not make it; it makes {', '.join(QUANTIZERS)}"
    return QUANTIZERS[spec.name].refuses(spec)


def _device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"{device!r} is not a device; give cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no CUDA device here; leave --device out to use the CPU")
    return chosen
