"""A transformers model made ready for the engine: paged attention, and the layouts that its options need.

Weights that a checkpoint stores quantized are packed by the loader.
"""

from transformers import PreTrainedModel

from ...base.batch_invariance import TUNED
from ...base.errors import UserError
from ...base.option_fields import flag
from ...layouts.choosing.linear_packing import pack_fastest, pack_linears
from ...layouts.kv.format import require_batch_invariance
from ...layouts.modules.experts import pack_unquantized_experts
from ...layouts.modules.merged_linear import layers_with_one_input, merge_unquantized
from .attention import ServedLayers, attention_layers, served_layers
from .compiling.compiled_layers import restore_layers
from .options import UNQUANTIZED, EngineOptions
from .other_products import other_products
from .unsupported import unsupported


def prepare_model(model: PreTrainedModel, options: EngineOptions) -> ServedLayers:
    """Change the model in place, and return what its layers keep.

    Raise UserError if the options ask for batch invariance that this model, device or KV format cannot have.
    """
    model.eval()
    restore_layers(model)
    layers = served_layers(model)
    refuse_rounded_positions(type(model).__name__, layers, options.kv_format)
    on_gpu, is_invariant = model.device.type == "cuda", options.batch_invariance != TUNED
    require_batch_invariance(options.kv_format, options.batch_invariance, model.device)
    if on_gpu and is_invariant:
        _require_invariant_layers(model, layers, options)
    if on_gpu or is_invariant:
        pack_unquantized_experts(model, options.batch_invariance)
    if on_gpu and options.compiled:
        merge_unquantized(model, layers_with_one_input(model, lambda: attention_layers(model)))
    if is_invariant:
        pack_linears(model, options.batch_invariance)
        if on_gpu:
            _require_invariant_products(model, options)
    elif not on_gpu:
        # Imported only here: it imports numba, which takes half a second.
        from .cpu_norms import compile_norms

        pack_fastest(model)
        compile_norms(model)
    return layers


def refuse_rounded_positions(
    architecture: str, layers: ServedLayers, kv_format: str, unquantized_by: str = ""
) -> None:
    """Raise UserError if keys that hold their positions would be rounded.

    unquantized_by: how a user asks for unquantized keys, if not by an option
    """
    if kv_format != UNQUANTIZED and any(layer.alibi for layer in layers.attention.values()):
        how = unquantized_by or f"{flag('kv_cache_dtype')} {UNQUANTIZED}"
        raise unsupported(
            architecture,
            f"its keys hold their positions (ALiBi), which {kv_format} would round ({how} keeps them)",
        )


def _require_invariant_layers(model: PreTrainedModel, layers: ServedLayers, options: EngineOptions) -> None:
    """Raise UserError if a GPU would compute norms or states in an order that depends on the batch."""
    asked = f"--batch-invariance {options.batch_invariance}"
    if not options.compiled:
        raise UserError(
            f"{asked} needs compiled layers, whose norms sum in one order; leave --no-compiled out"
        )
    if layers.states:
        raise unsupported(
            type(model).__name__,
            f"{asked} cannot be kept on a GPU: sums of layers with a state depend on how prompts are cut",
        )


def _require_invariant_products(model: PreTrainedModel, options: EngineOptions) -> None:
    """Raise UserError if a GPU would sum a product in an order that depends on the batch."""
    others = ", ".join(other_products(model)[:3])
    if others:
        raise unsupported(
            type(model).__name__,
            f"--batch-invariance {options.batch_invariance} has no product that keeps bits for {others}",
        )
