"""Finds the tensors of a checkpoint that are weights of linear layers, including single and fused experts.

The transformers model that is built from the config decides; nothing is guessed from names. No data is read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, Interleave, MergeModulelist, Transpose

from ...base.errors import UserError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.float_source import is_scale
from .prediction_heads import is_prediction_head
from .reader_names import ReaderModel, is_experts_parameter, reader_model
from .skeleton import build_skeleton, other_models
from .weight_map import (
    GATE,
    GATE_UP,
    INTERLEAVED,
    OUTSIDE,
    UP,
    Assignment,
    foreign_roots,
    gate_up_order,
    map_weights,
)
from .weights_read import multiplies, reads_weight

WEIGHT = ".weight"
BIAS = "_bias"
"""The suffix of the tensor with all experts' biases, after the name of the tensor with their weights."""
ROUTER_PARTS = re.compile(r"(^|\.)(gate|router|\w*expert_gate)(\.|$)")

LINEAR, LM_HEAD, EMBEDDING, ROUTER, UNKNOWN = "linear", "lm_head", "embedding", "router", "unknown"
NOT_LINEAR = "weight, not a Linear"
PREDICTION_HEAD = "multi-token prediction head"
OUTSIDE_DECODER = "outside the text decoder"
"""The reason for not quantizing the weights of a tower or a projector."""
READ_OTHERWISE = "weight that the model reads for more than a product"
EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")


@dataclass(frozen=True)
class LinearWeight:
    """One linear layer's weight [N, K] inside a tensor of the checkpoint.

    module:     its name in the artifact
    tensor:     the checkpoint tensor it is read from
    place:      its place in the model: a linear layer, or an expert's slice of a stacked parameter. Weights
                that are merged along N have the same place
    role:       LINEAR, LM_HEAD, EMBEDDING, ROUTER, or UNKNOWN for fused experts in an order not known here
    expert:     the index of its slice in a fused [E, ...] tensor; None for a tensor of its own
    rows:       its rows in that slice: the first, and one past the last
    step:       the distance between two of its rows: 2 if the rows of gate and up alternate
    transposed: whether the slice is stored as [K, N]
    is_expert:  whether it belongs to one of several experts
    """

    module: str
    tensor: str
    place: str
    role: str
    n: int
    k: int
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    step: int = 1
    is_expert: bool = False

    @property
    def row_slice(self) -> slice:
        """Return the rows of this weight in its tensor, or in the expert's slice of the tensor."""
        first, stop = self.rows or (0, self.n)
        return slice(first, stop, self.step)


WRAPPERS = {
    "_orig_mod.": "it was saved from a compiled model; save `model._orig_mod`",
    "module.": "it was saved from a wrapped model; save `model.module`",
    "base_model.model.": "it was saved with a LoRA adapter around it; peft: `merge_and_unload`, then save it",
}
"""What training programs put before every name, each with the remedy."""
NO_LANGUAGE_MODEL = re.compile(r"For(Sequence|Token)Classification$|ForQuestionAnswering$|RewardModel$")


@dataclass(frozen=True)
class ExpertBias:
    """The place of one expert's bias in a tensor [E, N] that holds the biases of all experts.

    name: the bias' name in the form of the expert's own weight
    rows: its range of rows among the N
    """

    name: str
    tensor: str
    expert: int
    rows: slice


@dataclass(frozen=True)
class ModelWeights:
    """The checkpoint's tensors, sorted into linear weights and everything else."""

    linears: dict[str, list[LinearWeight]]
    """The linear weights in each checkpoint tensor; a fused tensor has one for each expert and projection."""
    others: dict[str, str]
    """Tensors that hold no linear weight, each with what it is."""
    tied_lm_head: LinearWeight | None
    """The output projection, if it has no tensor of its own but shares the embeddings' tensor."""
    biases: dict[str, list[ExpertBias]]
    """For each tensor of all experts' biases, the biases of single experts that replace it with their
    weights."""
    readers: list[ReaderModel]
    """How each transformers class that loads this checkpoint reads it; the class that we use comes first."""


def find_linear_weights(checkpoint: Checkpoint) -> ModelWeights:
    """Sort the checkpoint's tensors. Raise UserError if the tensors do not fit the architecture in the
    config.
    """
    model = build_skeleton(checkpoint, torch.bfloat16)
    names = [name for name in checkpoint.tensors if not is_scale(checkpoint, name)]
    mapped = map_weights(model, names)
    if mapped.unexpected:
        roots = foreign_roots(model, mapped.unexpected)
        advice = "the config does not describe these files"
        missing = _missing(model, mapped.assignments)
        if missing:
            advice = f"nor has the checkpoint {missing[0]}, which it needs; {_why_unlike(checkpoint, names)}"
        elif all(name.endswith(".bias") for name in mapped.unexpected):
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in mapped.unexpected)
            patterns = ", ".join(f"'{kind}'" for kind in kinds)
            advice = f"if they are zeros, as AutoGPTQ wrote them, give a recipe `leave_out: [{patterns}]`"
        elif roots is not None:
            patterns = ", ".join(f"'{root}.*'" for root in roots)
            advice = f"a recipe with `leave_out: [{patterns}]` makes an artifact without it"
        raise UserError(
            f"{checkpoint.source}: the checkpoint has {mapped.unexpected[0]}, and "
            f"{type(model).__name__} has no place for it; {advice}"
        )
    _refuse_missing(checkpoint, model, mapped.assignments)
    _refuse_other_counts(checkpoint, model, mapped.assignments)
    linears: dict[str, list[LinearWeight]] = {}
    others: dict[str, str] = {}
    head, decoder = model.get_output_embeddings(), _decoder_prefix(model)
    for assignment in mapped.assignments:
        slices = {name: parts[0] for parts in assignment.expert_parts() or [] for name in parts}
        for name in assignment.names:
            found = _linear_weights(checkpoint, model, assignment, name, slices, head, decoder)
            if isinstance(found, str):
                others[name] = found
            else:
                linears[name] = found
    text = checkpoint.config.get("text_config") or checkpoint.config
    for name in names:
        if name not in linears and name not in others:
            others[name] = PREDICTION_HEAD if is_prediction_head(name, text) else "not used by the model"
    readers = [reader_model(model, mapped.assignments)]
    for other in other_models(checkpoint, model):
        readers.append(reader_model(other, map_weights(other, names).assignments))
    return ModelWeights(
        linears, others, _tied_head(checkpoint, model, linears), _expert_biases(checkpoint, linears), readers
    )


def _decoder_prefix(model: PreTrainedModel) -> str:
    """Return the prefix of the language model's module names in a model that has other parts; else empty."""
    text = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    if text is model.config or getattr(decoder, "config", None) is not text:
        return ""
    return next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)


def _linear_weights(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    assignment: Assignment,
    name: str,
    slices: dict[str, str],
    head: nn.Module | None,
    decoder: str,
) -> list[LinearWeight] | str:
    """Return the linear weights in one tensor, or the kind of tensor that it is otherwise.

    slices: the first of the weights that are stacked in an expert's slice, by the name of each of them
    """
    owner_name, _, leaf = assignment.target.rpartition(".")
    owner = model.get_submodule(owner_name)
    shape = checkpoint.tensors[name].shape
    target = owner._parameters.get(leaf)
    if target is None:
        return "buffer"
    outside = owner is not head and (OUTSIDE.search(owner_name) or not owner_name.startswith(decoder))
    if outside and is_experts_parameter(owner, leaf):
        return OUTSIDE_DECODER
    if is_experts_parameter(owner, leaf):
        if len(shape) == 2 and name.endswith(WEIGHT):
            place = slices.get(name, name)
            return [LinearWeight(name.removesuffix(WEIGHT), name, place, LINEAR, *shape, is_expert=True)]
        return _fused_experts(checkpoint, model, assignment, name, owner)
    if assignment.converter is None and not assignment.is_stacked and shape != tuple(target.shape):
        raise UserError(
            f"{checkpoint.source}: {name} has shape {list(shape)}; by config.json it has to be "
            f"{list(target.shape)}"
        )
    if outside:
        return OUTSIDE_DECODER
    if len(shape) != 2 or not name.endswith(WEIGHT):
        return "bias" if leaf.endswith("bias") else "norm, bias or other small tensor"
    module = name.removesuffix(WEIGHT)
    if isinstance(owner, nn.Embedding):
        return [LinearWeight(module, name, owner_name, EMBEDDING, *shape)]
    if owner is head:
        return [LinearWeight(module, name, owner_name, LM_HEAD, *shape)]
    if "router" in type(owner).__name__.lower() or ROUTER_PARTS.search(owner_name):
        return [LinearWeight(module, name, owner_name, ROUTER, *shape)]
    if isinstance(owner, nn.Linear):
        parent, _, child = owner_name.rpartition(".")
        if reads_weight(model.get_submodule(parent), child) or not multiplies(owner):
            return READ_OTHERWISE
        return [LinearWeight(module, name, owner_name, LINEAR, *shape)]
    return f"{type(owner).__name__} {NOT_LINEAR}"


def _fused_experts(
    checkpoint: Checkpoint, model: PreTrainedModel, assignment: Assignment, name: str, owner: nn.Module
) -> list[LinearWeight]:
    """Return one linear weight for each expert and projection of a fused 3-D tensor.

    The weights get the names that transformers uses for single experts of this architecture, or else the
    names of other engines (`experts.0.gate_proj`).
    """
    owner_name, _, leaf = assignment.target.rpartition(".")
    experts, first, second = checkpoint.tensors[name].shape
    operations = list(assignment.converter.operations) if assignment.converter else []
    stored, parameter = list(checkpoint.tensors[name].shape), owner._parameters[leaf]
    transposed = _is_transposed(owner) ^ (len(_turns(operations, stored, parameter)) % 2 == 1)
    known = len(checkpoint.tensors[name].shape) == 3 and leaf in EXPERT_PARAMETERS
    _refuse_fused_shape(checkpoint, name, parameter, operations)
    turns = any(isinstance(op, Interleave) and op.dim == 1 and not op.inverse for op in operations)
    alone = _stacked_alone(assignment, name)
    if not known or not (alone or turns or all(isinstance(op, Transpose) for op in operations)):
        return [LinearWeight(name, name, name, UNKNOWN, first, second)]
    n, k = (second, first) if transposed else (first, second)
    prefix = name.removesuffix(leaf) if name.endswith(f".{leaf}") else f"{_as_stored(owner_name, name)}."
    single = [alone] if alone else _single_expert_names(model, assignment.target)
    interleaved = False
    if leaf == GATE_UP and (turns or alone or not single):
        order = gate_up_order(owner)
        if order is None or (turns and (order == INTERLEAVED or len(operations) > 1)):
            return [LinearWeight(name, name, name, UNKNOWN, first, second)]
        single, interleaved = single or [GATE, UP], not alone and (turns or order == INTERLEAVED)
    single = single or [leaf]
    if n % len(single):
        raise UserError(
            f"{checkpoint.source}: {name} has {n} rows, which {len(single)} projections cannot share evenly"
        )
    size, step = n // len(single), len(single) if interleaved else 1
    rows = [(i, n) if interleaved else (i * size, (i + 1) * size) for i in range(len(single))]
    return [
        LinearWeight(
            f"{prefix}{expert}.{projection}", name, f"{name}[{expert}]", LINEAR, size, k,
            expert=expert, rows=its_rows, transposed=transposed, step=step, is_expert=True,
        )
        for expert in range(experts)
        for projection, its_rows in zip(single, rows, strict=True)
    ]  # fmt: skip


def _stacked_alone(assignment: Assignment, name: str) -> str | None:
    """Return the projection of all experts in the tensor `name`, if gate and up have separate tensors; else
    None.
    """
    converter = assignment.converter
    if converter is None or len(converter.operations) != 1:
        return None
    [operation] = converter.operations
    if not isinstance(operation, Concatenate) or operation.dim != 1:
        return None
    return next((part for part in (GATE, UP) if part in name.split(".")), None)


def _as_stored(module: str, tensor: str) -> str:
    """Return a module's name in the model, with the prefix that `tensor` has before the layer's number."""
    ours, stored = module.split("."), tensor.split(".")
    here, there = ([i for i, part in enumerate(parts) if part.isdigit()] for parts in (ours, stored))
    if not here or not there:
        return module
    return ".".join([*stored[: there[0] + 1], *ours[here[0] + 1 :]])


def _expert_biases(
    checkpoint: Checkpoint, linears: dict[str, list[LinearWeight]]
) -> dict[str, list[ExpertBias]]:
    """Return the biases stored beside fused experts, under the names that go with their weights' names."""
    return {
        f"{tensor}{BIAS}": [
            ExpertBias(f"{weight.module}.bias", f"{tensor}{BIAS}", weight.expert, weight.row_slice)
            for weight in weights
            if weight.expert is not None
        ]
        for tensor, weights in linears.items()
        if f"{tensor}{BIAS}" in checkpoint.tensors
    }


def _refuse_fused_shape(
    checkpoint: Checkpoint, name: str, parameter: nn.Parameter | None, operations: Sequence[ConversionOps]
) -> None:
    """Raise UserError if a tensor of all experts has neither the model's shape nor the shape that loading
    transposes.
    """
    if parameter is None or not all(isinstance(operation, Transpose) for operation in operations):
        return
    expected, shape = list(parameter.shape), list(checkpoint.tensors[name].shape)
    for turn in _turns(operations, shape, parameter):
        expected[turn.dim0], expected[turn.dim1] = expected[turn.dim1], expected[turn.dim0]
    if shape != expected:
        raise UserError(f"{checkpoint.source}: {name} has shape {shape}; config.json makes it {expected}")


def _turns(
    operations: Sequence[ConversionOps], shape: Sequence[int], parameter: nn.Parameter | None
) -> list[Transpose]:
    """Return the operations that transpose a tensor of this shape when it is loaded. Some leave a tensor that
    has the model's shape already.
    """
    fits = parameter is not None and list(shape) == list(parameter.shape)
    return [each for each in operations if isinstance(each, Transpose) and not (each.check_dims and fits)]


def _is_transposed(owner: nn.Module) -> bool:
    """Say whether the model's slices are [K, N]."""
    transposed = getattr(owner, "is_transposed", None)
    if transposed is None:
        gate_up, down = owner._parameters.get("gate_up_proj"), owner._parameters.get("down_proj")
        if gate_up is None or down is None:
            transposed = False
        else:
            transposed = gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]
    return bool(transposed)


def _single_expert_names(model: PreTrainedModel, target: str) -> list[str]:
    """Return the projections that transformers merges into this expert parameter, in order; empty if there
    are none.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    for rule in get_model_conversion_mapping(model):
        operations = getattr(rule, "operations", [])
        merges = any(isinstance(operation, MergeModulelist) for operation in operations)
        interleaves = any(isinstance(operation, Interleave | Transpose) for operation in operations)
        if merges and not interleaves and any(target.endswith(t) for t in rule.target_patterns):
            names = [re.search(r"\*\.(\w+)\.weight\$?$", pattern) for pattern in rule.source_patterns]
            if all(names):
                return [name[1] for name in names if name]
    return []


def _tied_head(
    checkpoint: Checkpoint, model: PreTrainedModel, linears: dict[str, list[LinearWeight]]
) -> LinearWeight | None:
    if any(weight.role == LM_HEAD for weights in linears.values() for weight in weights):
        return None
    embeddings = model.get_input_embeddings()
    name = next((n for n, module in model.named_modules() if module is model.get_output_embeddings()), None)
    owner = next((n for n, module in model.named_modules() if module is embeddings), "")
    for tensor, weights in linears.items():
        for weight in weights:
            if name and weight.role == EMBEDDING and _same_module(weight.module, owner):
                return LinearWeight(name, tensor, name, LM_HEAD, weight.n, weight.k)
    return None


def _same_module(stored: str, in_model: str) -> bool:
    return stored.rpartition(".")[2] == in_model.rpartition(".")[2]


def _refuse_missing(
    checkpoint: Checkpoint, model: PreTrainedModel, assignments: Sequence[Assignment]
) -> None:
    missing = _missing(model, assignments)
    if missing:
        raise UserError(
            f"{checkpoint.source}: {missing[0]} is missing from the checkpoint, and {type(model).__name__} "
            "needs it; config.json and the weights do not belong together"
        )


def _refuse_other_counts(
    checkpoint: Checkpoint, model: PreTrainedModel, assignments: Sequence[Assignment]
) -> None:
    """Raise UserError if the checkpoint has more or fewer single experts than the model."""
    for assignment in assignments:
        operations = assignment.converter.operations if assignment.converter else []
        merges = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        owner_name, _, leaf = assignment.target.rpartition(".")
        parameter = model.get_submodule(owner_name)._parameters.get(leaf)
        if parameter is None or not (merges or assignment.is_stacked):
            continue
        for names in assignment.sources.values():
            if len(names) != len(parameter):
                raise UserError(
                    f"{checkpoint.source}: the checkpoint has {len(names)} tensors like {names[0]}; by "
                    f"config.json there are {len(parameter)} experts"
                )


def _missing(model: PreTrainedModel, assignments: Sequence[Assignment]) -> list[str]:
    """Return the parameters of the model that no tensor fills."""
    filled = {assignment.target for assignment in assignments}
    several = {t for a in assignments if a.converter for t in a.converter.target_patterns}
    tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    return [
        name
        for name, _ in model.named_parameters()
        if name not in filled and name not in tied and not any(pattern in name for pattern in several)
    ]


def _why_unlike(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """Return a possible cause for tensors whose names are not the model's, and the remedy."""
    wrapper = next((w for w in WRAPPERS if all(name.startswith(w) for name in names)), None)
    if wrapper is not None:
        return f"all names begin with `{wrapper}`: {WRAPPERS[wrapper]}"
    architecture = str((checkpoint.config.get("architectures") or [""])[0])
    if NO_LANGUAGE_MODEL.search(architecture):
        return f"it is a {architecture}, and Scalegate quantizes language models"
    return "config.json and the weights do not belong together"
