"""Replaces a model's RMSNorm modules on a CPU by one compiled kernel each.

A module is replaced if the kernel gives the same result, which is tested: names and formulas differ from
model to model. Batch-invariant serving keeps transformers' own norms.
"""

import torch
from torch import Tensor, nn

from ...kernels.norms.rms_norm_cpu import rms_norm, serves

NAME = "RMSNorm"
EPS_NAMES = ("variance_epsilon", "eps")
TRIED_ROWS = 8
LARGEST_ON_ONE_THREAD = 1 << 17
"""How many numbers the kernel handles: about 50 µs of work for its one thread. For more numbers, torch's
several threads are faster."""


class CpuRMSNorm(nn.Module):
    """Computes `norm` by the compiled kernel."""

    def __init__(self, norm: nn.Module, eps: float):
        super().__init__()
        self.norm = norm
        self.eps = eps
        self._dtype = self.weight.dtype
        self.contiguous_weight = self.weight.detach().contiguous()
        self._dim = len(self.contiguous_weight)

    @property
    def weight(self) -> Tensor:
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        # The kernel gets addresses, so nothing else would notice another dtype.
        is_long = x.numel() > LARGEST_ON_ONE_THREAD and torch.get_num_threads() > 1
        if is_long or x.dtype is not self._dtype:
            return self.norm(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        compiled, weight = rms_norm(self._dtype), self.contiguous_weight
        rows = x.numel() // self._dim
        compiled(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), rows, self._dim, self.eps)
        return out


@torch.inference_mode()
def compile_norms(model: nn.Module) -> int:
    """Replace suitable modules in place; return how many were replaced."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(parent, CpuRMSNorm) or not type(child).__name__.endswith(NAME):
                continue
            compiled = _compiled(child)
            if compiled is not None:
                parent.add_module(name, compiled)
                replaced += 1
    return replaced


def _compiled(norm: nn.Module) -> CpuRMSNorm | None:
    """Return the compiled form of a norm; None if the kernel does not compute the same as this module."""
    weight, eps = getattr(norm, "weight", None), _eps(norm)
    has_more = len(list(norm.parameters())) != 1 or norm._forward_hooks or norm._forward_pre_hooks
    if not isinstance(weight, Tensor) or weight.ndim != 1 or eps is None or has_more:
        return None
    if isinstance(norm, CpuRMSNorm) or not serves(weight.dtype, len(weight)):
        return None
    compiled = CpuRMSNorm(norm, eps)
    # From far below eps to far above it.
    sizes = torch.logspace(-4, 2, TRIED_ROWS)[:, None]
    x = (torch.randn(TRIED_ROWS, len(weight)) * sizes).to(weight.dtype)
    found, expected = compiled(x), norm(x)
    bound = torch.finfo(weight.dtype).eps * (1 if weight.dtype.itemsize == 2 else 8)
    agrees = found.dtype == expected.dtype and (found - expected).abs().le(bound * expected.abs()).all()
    return compiled if agrees else None


def _eps(norm: nn.Module) -> float | None:
    found = next((getattr(norm, name) for name in EPS_NAMES if hasattr(norm, name)), None)
    return found if isinstance(found, float) else None
