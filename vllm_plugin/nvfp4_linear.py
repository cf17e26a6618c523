"""Layers of NVFP4 weights in vLLM whose inputs stay in 16 bits: vLLM gives them to Marlin on Hopper."""

from typing import Any

from torch import Tensor

from ..layouts.formats.nvfp4 import NVFP4
from .interface import AUTO, MarlinNvFp4LinearKernel, envs, linear_backend
from .product import empty, multiply
from .serving import choice_for, serve
from .stored import nvfp4_weight


class ScalegateNvFp4LinearKernel(MarlinNvFp4LinearKernel):
    """One layer of NVFP4 weights in vLLM: our kernel serves it if it is faster, otherwise Marlin does.

    vLLM tells a kernel a layer's shape only when its weights are loaded, when a kernel can no longer refuse.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        wanted = linear_backend() == AUTO and type(self).__name__ not in envs.VLLM_DISABLED_KERNELS
        self.ours = wanted and choice_for(NVFP4(), n, k, layer.params_dtype).layout is not None
        if not self.ours:
            super().process_weights_after_loading(layer)
            return
        weight = nvfp4_weight(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        serve(layer, weight, layer.params_dtype)
        empty(layer.weight, layer.weight_scale)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.ours:
            return multiply(layer, x, bias)
        return super().apply_weights(layer, x, bias)
