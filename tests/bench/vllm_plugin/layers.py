"""One of vLLM's linear layers with random weights, by vLLM's own kernel or by ours; for `linear.py`."""

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from scalegate.tests.bench.vllm_plugin.checkpoints import CONVENTIONS, Tensors
from torch import Tensor, nn

OURS = "ScalegateLinearKernel,ScalegateNvFp4LinearKernel,ScalegateExperts"
DISABLED = "VLLM_DISABLED_KERNELS"
PREFIX = "model.layers.0.mlp.down_proj"


@contextmanager
def vllm_alone(most_rows: int):
    """vLLM as a process of one rank has it, with the plugin registered and every shape taken for faster."""
    from scalegate_kernels.vllm_plugin import register
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.cuda.set_device(0)
    register.register_kernels()
    from scalegate_kernels.vllm_plugin import choice, serving

    serving.most_rows = lambda: most_rows
    serving.choose = lambda problem, rows: everything(choice, problem)
    serving.choose_experts = lambda problem, rows: all_experts(choice, problem)
    with set_current_vllm_config(VllmConfig()), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield


def everything(choice: Any, problem: Any) -> Any:
    """Our layout whenever it serves at all."""
    layout = choice.TUNED[type(problem.spec)]
    refusal = problem.spec.refuses(problem.n, problem.k) or layout.refuses(problem)
    return choice.Choice(None if refusal else layout, refusal or "to be measured")


def all_experts(choice: Any, problem: Any) -> Any:
    """Our experts whenever they serve at all."""
    refusal = problem.spec.refuses(problem.n, problem.k) or choice.EXPERTS[type(problem.spec)].refuses(
        problem
    )
    return choice.Decision(refusal is None, refusal or "to be measured")


def set_disabled(disabled: bool) -> None:
    """Leave layers that are made from now on to vLLM's own kernels, or not."""
    os.environ[DISABLED] = OURS if disabled else ""


@dataclass
class Layer:
    """A layer that is ready to multiply, and the name of the kernel that does."""

    module: nn.Module
    kernel: str

    def __call__(self, x: Tensor) -> Tensor:
        return self.module.quant_method.apply(self.module, x, self.module.bias)


def layer_of(
    convention: str, tensors: Tensors, n: int, k: int, dtype: torch.dtype, ours: bool, bias: Tensor | None
) -> Layer:
    """The layer as vLLM loads it from a checkpoint with these tensors and this bias."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    section = CONVENTIONS[convention].quantization
    set_disabled(not ours)
    config = get_quantization_config(section["quant_method"]).from_config(section)
    config.packed_modules_mapping = {}
    if section["quant_method"] == "gptq":
        config.modules_in_block_to_quantize = [PREFIX]  # vLLM reads it from the checkpoint
    with torch.device("cuda"):
        module = ReplicatedLinear(
            k,
            n,
            bias=bias is not None,
            params_dtype=dtype,
            quant_config=config,
            prefix=PREFIX,
            return_bias=False,
        )
    for name, tensor in {**tensors, **({} if bias is None else {"bias": bias})}.items():
        parameter = getattr(module, name)
        parameter.data.copy_(tensor.to(parameter.dtype).reshape(parameter.shape))
    module.quant_method.process_weights_after_loading(module)
    holder = getattr(module, "scheme", module.quant_method)
    kernel = holder.kernel
    name = type(kernel).__name__
    if name == "ScalegateNvFp4LinearKernel" and not kernel.ours:
        name = "MarlinNvFp4LinearKernel"
    return Layer(module, name)
