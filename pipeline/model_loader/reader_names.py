"""The names by which other readers know the linear layers of a checkpoint.

transformers calls a linear layer by its place in the model, vLLM by the checkpoint's tensor; a quantization
config that names layers has to hold for both. Our own loader uses the tensors instead. No data is read.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.checkpoint import Checkpoint
from .weight_map import Assignment

WEIGHT = ".weight"
EXPERT_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""For each tensor of all experts' weights, the names that engines use for a single expert's weights."""
ANY_PROJECTION = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ReaderModel:
    """How one transformers class reads a checkpoint's tensors.

    linears:    its linear layers by name, each with the tensors that fill it; none if the layer is tied
    embeddings: the tensors that fill embeddings
    experts:    the tensors of experts, which it stacks
    """

    linears: Mapping[str, tuple[str, ...]]
    embeddings: frozenset[str]
    experts: frozenset[str]


def reader_model(model: PreTrainedModel, assignments: Sequence[Assignment]) -> ReaderModel:
    """Return the linear layers of `model`, with the tensors that `assignments` fill them with."""
    modules = dict(model.named_modules())
    filled: dict[str, list[str]] = {}
    embeddings, experts = set[str](), set[str]()
    for assignment in assignments:
        for target in assignment.targets:
            owner, _, leaf = target.rpartition(".")
            module = modules.get(owner)
            if leaf == "weight" and isinstance(module, nn.Embedding):
                embeddings.update(assignment.names)
            elif leaf == "weight" and isinstance(module, nn.Linear):
                filled.setdefault(owner, []).extend(assignment.names)
            elif module is not None and is_experts_parameter(module, leaf):
                experts.update(assignment.names)
    names = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return ReaderModel(
        {name: tuple(filled.get(name, ())) for name in names}, frozenset(embeddings), frozenset(experts)
    )


def is_experts_parameter(owner: nn.Module, leaf: str) -> bool:
    """Say whether a module's parameter holds the stacked weights of experts."""
    parameter = owner._parameters.get(leaf)
    return parameter is not None and parameter.dim() == 3 and "expert" in type(owner).__name__.lower()


def names_of_unquantized(
    checkpoint: Checkpoint,
    readers: Sequence[ReaderModel],
    quantized: Collection[str],
    modules: Collection[str],
) -> list[str]:
    """Return every name under which a reader may ask whether an unquantized weight is a quantized linear
    layer.

    quantized: the tensors with quantized weights
    modules:   the quantized modules
    """
    embeddings = frozenset().union(*(reader.embeddings for reader in readers))
    names: dict[str, None] = {}
    for tensor, info in checkpoint.tensors.items():
        if tensor in quantized or tensor in embeddings:
            continue
        if len(info.shape) == 2 and tensor.endswith(WEIGHT):
            names[tensor.removesuffix(WEIGHT)] = None
        elif len(info.shape) == 3 and any(tensor in reader.experts for reader in readers):
            names |= dict.fromkeys(_single_experts(tensor, info.shape[0]))
    for reader in readers:
        for name, tensors in reader.linears.items():
            if not any(tensor in quantized for tensor in tensors):
                names[name] = None
    return [name for name in names if name not in modules]


def other_names(readers: Sequence[ReaderModel], modules: Mapping[str, str]) -> dict[str, str]:
    """Return, for modules that readers know by another name than the checkpoint, the reader's name and the
    checkpoint's.

    modules: the module of each tensor
    """
    found = {}
    for reader in readers:
        for name, tensors in reader.linears.items():
            if len(tensors) == 1 and tensors[0] in modules and modules[tensors[0]] != name:
                found[name] = modules[tensors[0]]
    return found


def _single_experts(tensor: str, experts: int) -> list[str]:
    """Return the names of the experts that are stacked in `tensor`."""
    owner, _, leaf = tensor.removesuffix(WEIGHT).rpartition(".")
    projections = EXPERT_PROJECTIONS.get(leaf, ANY_PROJECTION)
    return [f"{owner}.{expert}.{name}" for expert in range(experts) for name in projections]
