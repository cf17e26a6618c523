"""Layers of INT4 and INT8 weights in vLLM: compressed-tensors, AWQ, and GPTQ whose columns are in order."""

from torch import Tensor, nn

from ..layouts.formats.int4 import Int4
from ..layouts.formats.int8 import WHOLE_ROW, Int8
from ..layouts.formats.weight_format import Weight
from .interface import MPLinearKernel, MPLinearLayerConfig, permute_param_layout_, scalar_types
from .product import empty, multiply
from .serving import choice_for, log_refusal, serve
from .stored import int4_weight, int8_weight

INT4_TYPES = {scalar_types.uint4b8: True, scalar_types.uint4: False}
"""vLLM's types of 4-bit weights, and whether each is symmetric."""
N_FIRST = {"input_dim": 1, "output_dim": 0}


def spec_of(config: MPLinearLayerConfig) -> Int4 | Int8 | str:
    """Return the layer's format, or the reason why the plugin has none for it."""
    n = config.partition_weight_shape[1]
    whole_row = config.group_size in (WHOLE_ROW, config.full_weight_shape[0])
    if config.has_g_idx:
        return "columns in another order (g_idx)"
    try:
        if config.weight_type in INT4_TYPES:
            symmetric = INT4_TYPES[config.weight_type]
            if symmetric == config.zero_points:
                return f"{config.weight_type} with zero points"
            if config.zero_points and n % 8:
                return f"zero points of {n} rows"
            return Int4(config.partition_weight_shape[0] if whole_row else config.group_size, symmetric)
        if config.weight_type == scalar_types.uint8b128 and not config.zero_points:
            return Int8(WHOLE_ROW if whole_row else config.group_size)
    except ValueError as error:
        return str(error)
    return f"weights of type {config.weight_type}"


class ScalegateLinearKernel(MPLinearKernel):
    """Our kernel for one of vLLM's linear layers. `VLLM_DISABLED_KERNELS` knows the class by this name."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def can_implement(cls, config: MPLinearLayerConfig) -> tuple[bool, str | None]:
        spec = spec_of(config)
        k, n = config.partition_weight_shape
        out_type = getattr(config, "out_type", None)
        if isinstance(spec, str):
            return False, log_refusal(f"{config.weight_type} {n}x{k}", spec)
        if out_type not in (None, config.act_type):
            return False, log_refusal(f"{spec.key} {n}x{k}", f"gives {out_type}")
        choice = choice_for(spec, n, k, config.act_type)
        return choice.layout is not None, choice.reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = self.weight_of(layer)
        serve(layer, weight, self.config.act_type)
        empty(*(getattr(layer, name or "", None) for name in (self.w_q_name, self.w_s_name, self.w_zp_name)))

    def weight_of(self, layer: nn.Module) -> Weight:
        """Return the layer's weight from the parameters that vLLM has loaded, in whichever order they lie."""
        words, scale, zeros, _ = self._get_weight_params(layer)
        permute_param_layout_(words, packed_dim=1, **N_FIRST)
        permute_param_layout_(scale, **N_FIRST)
        spec = spec_of(self.config)
        if isinstance(spec, Int8):
            return int8_weight(spec, words.data, scale.data)
        if isinstance(spec, Int4):
            if spec.symmetric:
                return int4_weight(spec, words.data, scale.data, None)
            permute_param_layout_(zeros, packed_dim=0, **N_FIRST)
            return int4_weight(spec, words.data, scale.data, zeros.data)
        raise TypeError(f"a layer that was refused: {spec}")

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply(layer, x, bias)
