"""The share of a GPU for each server of a validation, and whether all fit there at the same time.

Shares and fit are computed from the sizes of the weights and of the load; nothing is started here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...base.errors import UserError
from ...base.log import logger
from ...layouts.kv.format import KV_FORMATS
from ...layouts.kv.layer import KVShape
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.adapters.engine import MemoryGrant
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import AUTO, UNQUANTIZED, EngineOptions
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.decoded_tensors import DecodedTensor
from ..conventions.declared import stored_weights
from ..conventions.kv_cache import kv_cache_of
from ..machine.device import resolve_dtype

if TYPE_CHECKING:
    from ...serving_check.engine.attention import ServedLayers

SHARE_OF_FREE = 0.92
"""The share of a GPU's free memory for all servers on it together."""
WEIGHTS_FACTOR = 1.1
"""Memory for weights as a multiple of their files' size: a weight is in memory twice while it is packed."""
KV_FACTOR = 1.2
"""Memory for keys and values as a multiple of the load's, in an engine that sizes its own pool: some pages
are partly empty. Our engine allocates exactly the tokens it is told, and requests are counted in whole
pages."""
BESIDE = 6 << 30
"""Bytes for a CUDA context, activations, CUDA graphs and an allocator's slack."""
GIB = 1 << 30
KV_BESIDE = GIB
"""The part of these bytes for blocks of keys and values that an engine reserves for itself."""

MemInfo = Callable[[int], tuple[int, int]]
"""Free and total bytes of a GPU."""


@dataclass(frozen=True)
class Side:
    """One server to start, and its place."""

    name: str
    """`artifact`, `baseline` or `rival`."""
    engine: str
    checkpoint: Checkpoint
    options: EngineOptions
    devices: tuple[int, ...] = ()
    """The GPUs of the server; empty on a CPU, and if we do not choose the GPUs."""


@dataclass(frozen=True)
class MemoryPlan:
    grants: Mapping[str, MemoryGrant | None]
    """The memory of each side's server; None if the user has set it, or if there is no GPU."""
    together: bool
    """Whether all servers can be up at the same time; otherwise they take turns."""
    in_turns_because: str = ""
    """Why the servers take turns: the memory they need, the memory there is, and a remedy; empty if they do
    not."""


def plan_memory(
    sides: Sequence[Side], placement: Placement, mem_info: MemInfo = torch.cuda.mem_get_info
) -> MemoryPlan:
    """Plan the servers' memory; raise UserError if a server would not fit even by itself."""
    least, asked, taken = {}, {}, dict[int, float]()
    grants: dict[str, MemoryGrant | None] = {}
    memory = {device: mem_info(device) for side in sides for device in side.devices}
    stored = {side.name: kv_cache_bytes(side, placement) for side in sides if side.devices}
    for side in sides:
        asked[side.name] = _asked(side, placement)
        for device in side.devices:
            free, total = memory[device]
            share = asked[side.name]
            needs = needed_bytes(side, placement, stored[side.name])
            least[side.name] = needs if share is None else share * total
            if least[side.name] > SHARE_OF_FREE * free and share is None:
                needed = f"{least[side.name] / GIB:.0f} GiB of GPU {device}"
                raise UserError(
                    f"the server of {side.checkpoint.source} needs about {needed}, but only "
                    f"{free / GIB:.0f} GiB are free; end other programs there, or use a smaller --m or "
                    "--input-len, or an engine that takes --tensor-parallel-size"
                )
            taken[device] = taken.get(device, 0.0) + least[side.name]
    fit = all(taken[device] <= SHARE_OF_FREE * memory[device][0] for device in taken)
    # A cluster's memory is not seen from here, and each server has all of its GPUs.
    together = fit and not placement.on_a_cluster
    for side in sides:
        if not side.devices or asked[side.name] is not None:
            grants[side.name] = None
            continue
        free, total = min(memory[device] for device in side.devices)
        if together:
            kv_cache = int(stored[side.name]) + KV_BESIDE
            grants[side.name] = MemoryGrant(least[side.name] / total, kv_cache)
        else:
            grants[side.name] = MemoryGrant(SHARE_OF_FREE * free / total)
    return MemoryPlan(grants, together, "" if together else _shortage(sides, stored, least, memory))


def _shortage(
    sides: Sequence[Side],
    stored: Mapping[str, float],
    least: Mapping[str, float],
    memory: Mapping[int, tuple[int, int]],
) -> str:
    """Return the memory that the servers need of the first GPU if they do not fit, and what to change."""
    for device, (free, _) in memory.items():
        there = [side for side in sides if device in side.devices]
        wanted, offered = math.fsum(least[side.name] for side in there), SHARE_OF_FREE * free
        if wanted <= offered:
            continue
        needs = ", ".join(f"the {side.name}'s {least[side.name] / GIB:.0f} GiB" for side in there)
        pools = math.fsum(stored[side.name] for side in there)
        share = 1 - (wanted - offered) / pools if pools else 0.0
        # A pool holds one request more than are served at once: the longest of a load as in use.
        requests = int(share * (1 + min(side.options.max_num_seqs for side in there))) - 1
        fewer = f" or fewer requests at once (--m up to {requests}, or shorter with --input-len)"
        return (
            f"of GPU {device} {needs} are needed, {offered / GIB:.0f} GiB are there for servers; "
            f"a GPU for each (--devices){fewer if requests > 0 else ''} would measure them side by side"
        )
    return "all GPUs of the cluster are for one server at a time"


def served_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the weights in our own server: as in the files, but 16 bits per weight if the
    server unpacks them.
    """
    stored = stored_weights(checkpoint).values()
    unpacked = {name for weight in stored if not weight.is_quantized for name in weight.tensors}
    unpacked |= {name for name, info in checkpoint.tensors.items() if isinstance(info, DecodedTensor)}
    numbers = sum(math.prod(weight.shape) for weight in stored if not weight.is_quantized)
    fused = unpacked - {name for weight in stored for name in weight.tensors}
    numbers += sum(math.prod(checkpoint.tensors[name].shape) for name in fused)
    return checkpoint.nbytes - sum(checkpoint.tensors[name].nbytes for name in unpacked) + 2 * numbers


def needed_bytes(side: Side, placement: Placement, stored: float) -> float:
    """Return the bytes on each of a side's GPUs for its weights, the load's keys and values, and the rest.

    stored: the bytes of the keys and values, as `kv_cache_bytes` computes them
    """
    weights = sum(path.stat().st_size for path in side.checkpoint.folder.glob("*.safetensors"))
    if engine_named(side.engine).packs_with_layouts:
        weights = max(weights, served_bytes(side.checkpoint))
    return WEIGHTS_FACTOR * weights / placement.gpus + stored + BESIDE


def kv_cache_bytes(side: Side, placement: Placement) -> float:
    """Return the bytes on each of a side's GPUs for the keys and values of the load, in the format in which
    they are stored, and for the states of recurrent layers.
    """
    if engine_named(side.engine).packs_with_layouts:
        return own_pool_bytes(side)
    tokens, config = side.options.kv_cache_tokens or 0, side.checkpoint.config
    per_token, state = kv_bytes_per_token(config), 0
    if (layers := _layers_with_states(side.checkpoint)) is not None:
        shapes = [layer.shape for layer in layers.attention.values()]
        per_token = sum(2 * shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        state = (side.options.max_num_seqs + 1) * layers.state_bytes
    parts = placement.pipeline_parallel_size * min(placement.tensor_parallel_size, kv_heads(config))
    share = _share_of_16_bits(side.options.kv_cache_dtype)
    return KV_FACTOR * (share * tokens * per_token / parts + state / placement.pipeline_parallel_size)


def _layers_with_states(checkpoint: Checkpoint) -> "ServedLayers | None":
    """Return what the checkpoint's layers keep; None if no layer is recurrent, or if that is not known."""
    # Imports transformers, which only planning needs.
    from ..model_loader.attention_shapes import layers_with_states_of

    try:
        return layers_with_states_of(checkpoint)
    except UserError as error:
        logger.debug(f"what the layers of {checkpoint.source} keep is not known: {error}")
        return None


def own_pool_bytes(side: Side) -> int:
    """Return the bytes of our own server's pool: its pages, and the states and all else that requests keep
    besides.
    """
    # They import transformers, which only planning needs.
    from ...serving_check.engine.kv_pool import stored_bytes
    from ..model_loader.attention_shapes import served_layers_of

    options = side.options
    kv_format = KV_FORMATS[kv_cache_of(side.checkpoint, options.kv_cache_dtype).kv_format]
    device = torch.device("cuda" if side.devices else "cpu")
    layers = served_layers_of(side.checkpoint, resolve_dtype(options.dtype), device)
    page_size = options.page_size or kv_format.page_size(device)
    page_bytes, row_bytes = stored_bytes(layers.attention, kv_format, page_size)
    # Page 0 and the last row are for padding.
    pages, rows = (options.kv_cache_tokens or 0) // page_size + 1, options.max_num_seqs + 1
    return pages * page_bytes + rows * (row_bytes + layers.state_bytes)


def _share_of_16_bits(kv_cache_dtype: str) -> float:
    """Return the bytes of a token in that format divided by those of an unquantized token, with heads of 128
    numbers.
    """
    if kv_cache_dtype in (AUTO, UNQUANTIZED):
        return 1.0
    shape = KVShape(heads=1, key_dim=128, value_dim=128, dtype=torch.bfloat16, query_heads=1)
    plain, stored = (
        KV_FORMATS[name].bytes_per_page(shape, page_size=16) for name in (UNQUANTIZED, kv_cache_dtype)
    )
    return stored / plain


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Return the bytes of all layers in 16 bits; multi-head latent attention stores one short row instead of
    both keys and values.
    """
    config = config.get("text_config") or config
    layers = int(config.get("num_hidden_layers") or 0)
    if config.get("kv_lora_rank"):
        return layers * 2 * (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0))
    heads = int(config.get("num_attention_heads") or 1)
    head_size = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    return layers * 2 * 2 * kv_heads(config) * head_size


def kv_heads(config: Mapping[str, Any]) -> int:
    """Return into how many parts tensor parallelism cuts keys and values at most; a latent row stays
    whole.
    """
    config = config.get("text_config") or config
    if config.get("kv_lora_rank"):
        return 1
    return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)


def _asked(side: Side, placement: Placement) -> float | None:
    """Return the share of memory that the user sets with the engine's own option."""
    option = engine_named(side.engine).memory_option
    value = None if option is None else placement.value_of(option, side.name)
    if value is None:
        return None
    try:
        return float(value)
    except ValueError as error:
        raise UserError(f"{option} is {value!r} in --engine-args; it must be a share such as 0.4") from error
