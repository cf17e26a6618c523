"""Compares a checkpoint's config with the tensors in its files, before anything is served.

The checks find layers that are declared quantized and lie plain, and tied weights that differ.
`conventions/declared.py` has the checks that do not need the architecture; `validation/` checks how other
readers read the files.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from ...base.errors import UserError
from ...base.log import logger
from ...layouts.kv.format import KV_FORMATS
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype
from ..checkpoints.safetensors_file import hold_the_same
from ..conventions.all_conventions import convention_of
from ..conventions.convention import StoredWeight
from ..conventions.declared import refuse_spoilt, stored_weights
from ..conventions.kv_cache import declared_kv_format, kv_cache_of
from .skeleton import meta_model
from .weight_loader import WEIGHT, listed, names_to_place
from .weight_map import Assignment, map_weights


def refuse_contradictions(checkpoint: Checkpoint) -> None:
    """Raise UserError if config and files contradict each other, or a scale, a norm or a bias is invalid.
    These are all read; large weights that are stored as plain numbers are not.
    """
    stored = stored_weights(checkpoint)
    refuse_spoilt(checkpoint, stored)
    if declared_kv_format(checkpoint) in KV_FORMATS:
        kv_cache_of(checkpoint)
    if not any(weight.is_quantized for weight in stored.values()):
        return
    try:
        model = meta_model(checkpoint, default_dtype(checkpoint))
    except UserError as error:
        logger.debug(f"{checkpoint.source}: its layers are not looked at: {error.message}")
        return
    assignments = map_weights(model, names_to_place(checkpoint, stored)).assignments
    refuse_misdeclared(checkpoint, stored, model, assignments)


def refuse_misdeclared(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredWeight],
    model: PreTrainedModel,
    assignments: Sequence[Assignment],
) -> None:
    """Raise UserError if a layer is declared quantized but stored plain, a tensor has another shape than the
    config's, or two tied tensors differ.

    Only quantized checkpoints are checked: a source that ties two tensors is quantized into an artifact that
    does not.
    """
    convention = convention_of(checkpoint)
    wrong = [
        name for name in _plain_linears(model, assignments, stored) if convention.claims(checkpoint, name)
    ]
    if wrong:
        raise UserError(
            f"{checkpoint.source}: {listed(wrong)} stored unquantized, but the quantization config covers "
            "it; add it to the config's ignore list, or quantize it"
        )
    if not any(weight.is_quantized for weight in stored.values()):
        return
    _refuse_other_shapes(checkpoint, stored, model, assignments)
    placed = {assignment.target: assignment.names[0] for assignment in assignments}
    for target, source in model.all_tied_weights_keys.items():
        if target in placed and source in placed:
            _refuse_different(checkpoint, stored, placed[target], placed[source])


def _plain_linears(
    model: PreTrainedModel, assignments: Sequence[Assignment], stored: Mapping[str, StoredWeight]
) -> Iterator[str]:
    """Yield the linear layers that get one unquantized tensor, by their names in the checkpoint."""
    for assignment in assignments:
        owner, _, leaf = assignment.target.rpartition(".")
        name = assignment.names[0]
        if assignment.converter is None and leaf == "weight" and name.endswith(WEIGHT):
            module = name.removesuffix(WEIGHT)
            if module not in stored and isinstance(model.get_submodule(owner), nn.Linear):
                yield module


def _refuse_other_shapes(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredWeight],
    model: PreTrainedModel,
    assignments: Sequence[Assignment],
) -> None:
    """Raise UserError if a tensor that is one parameter of the model has another shape there."""
    for assignment in assignments:
        if assignment.converter is not None or assignment.is_stacked:
            continue
        [name] = assignment.names
        owner, _, leaf = assignment.target.rpartition(".")
        weight = stored.get(name.removesuffix(WEIGHT))
        found = checkpoint.tensors[name].shape if weight is None else weight.shape
        expected = tuple(getattr(model.get_submodule(owner), leaf).shape)
        if tuple(found) != expected:
            raise UserError(
                f"{checkpoint.source}: {name} has shape {list(found)}; by the config it has to be "
                f"{list(expected)}"
            )


def _refuse_different(
    checkpoint: Checkpoint, stored: Mapping[str, StoredWeight], target: str, source: str
) -> None:
    is_packed = target.removesuffix(WEIGHT) in stored or source.removesuffix(WEIGHT) in stored
    if is_packed or not hold_the_same(checkpoint.tensors[target], checkpoint.tensors[source]):
        raise UserError(
            f"{checkpoint.source}: config.json ties {target} to {source} (tie_word_embeddings), and the "
            "files hold both, with different values: some libraries would drop one. Write "
            "`tie_word_embeddings: false` in config.json, or quantize again"
        )
