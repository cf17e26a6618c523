"""ModelOpt's own runtime of a model that it quantized to NVFP4, on any device.

The weights are compressed by `mtq.compress`. The activations are rounded where the scheme rounds them: by
default ModelOpt does that in a kernel that needs CUDA, so here they go through a quantization backend, the
place ModelOpt has for other kernels, which calls ModelOpt's NVFP4 arithmetic in torch (`NVFP4QTensor`).
"""

import copy

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import TensorQuantizer, register_quant_backend
from modelopt.torch.quantization.qtensor import NVFP4QTensor

BACKEND = "nvfp4_in_torch"


def as_it_runs(quantized):
    """A copy of the model that `mtq.quantize` made, and how many of its layers round their activations."""
    register_quant_backend(BACKEND, _round_to_nvfp4)
    model = copy.deepcopy(quantized)
    mtq.compress(model)
    inputs = [module for name, module in model.named_modules() if name.endswith("input_quantizer")]
    enabled = [quantizer for quantizer in inputs if quantizer.is_enabled]
    for quantizer in enabled:
        quantizer.backend = BACKEND
    return model, len(enabled)


def _round_to_nvfp4(x: torch.Tensor, quantizer: TensorQuantizer) -> torch.Tensor:
    block_size = quantizer.block_sizes[-1]
    global_scale = NVFP4QTensor.get_activation_scaling_factor(quantizer)
    codes, scale, _ = NVFP4QTensor.quantize(x, block_size, weights_scaling_factor_2=global_scale)
    return codes.dequantize(scale=scale, double_scale=global_scale, block_sizes={-1: block_size})
