"""NVFP4 as conventions store it: four tensors. Each convention has its own names for them, and stores the
scalars as multipliers or as divisors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Input, NVFP4Weight
from ..checkpoints.checkpoint import Checkpoint
from .convention import StoredWeight
from .stored import positive_scalar, refuse_shape, require_tensor, scalar_shape


@dataclass(frozen=True)
class NVFP4Tensors:
    """The convention's names of a module's tensors, after the module's name.

    packed:                    uint8 [N, K/2]
    scale:                     E4M3 [N, K/16]
    global_scale, input_scale: fp32, one number each
    divides: whether global_scale and input_scale are stored as divisors; otherwise they multiply
    """

    packed: str
    scale: str
    global_scale: str
    input_scale: str
    divides: bool

    def stored(self, checkpoint: Checkpoint, module: str, quantizes_input: bool) -> StoredWeight:
        """Return the weight of `module`; raise UserError if its tensors are not valid NVFP4."""
        packed, scale = module + self.packed, module + self.scale
        global_scale, input_scale = module + self.global_scale, module + self.input_scale
        n, half = require_tensor(checkpoint, packed, (torch.uint8,)).shape
        k = half * 2
        spec = NVFP4(activations=quantizes_input)
        refuse_shape(checkpoint, packed, spec, n, k)
        require_tensor(checkpoint, scale, (torch.float8_e4m3fn,), (n, k // GROUP_SIZE))
        for scalar in (global_scale, input_scale) if quantizes_input else (global_scale,):
            require_tensor(checkpoint, scalar, (torch.float32,))
            scalar_shape(checkpoint, scalar)
        names = [packed, scale, global_scale]
        names += [input_scale] if input_scale in checkpoint.tensors else []

        def read() -> NVFP4Weight:
            if self.divides:
                multiplier = positive_scalar(checkpoint, global_scale).reciprocal()
            else:
                multiplier = checkpoint.read(global_scale).reshape(())
            return NVFP4Weight(spec, checkpoint.read(packed), checkpoint.read(scale), multiplier)

        def read_input() -> NVFP4Input:
            return NVFP4Input(positive_scalar(checkpoint, input_scale), divides=self.divides)

        inputs = read_input if quantizes_input else None
        return StoredWeight(module, (n, k), spec, tuple(names), read, inputs, (global_scale,))

    def written(self, module: str, weight: NVFP4Weight, inputs: InputFormat | None) -> dict[str, Tensor]:
        """Return the tensors of `module`, by full name; reading them back gives equal numbers if
        1/(1/global_scale) equals global_scale.

        inputs: an NVFP4Input that multiplies, if the weight's spec has `activations`
        """
        if (inputs is not None) != weight.spec.activations:
            raise ValueError(f"{module}: {weight.spec.label}, and a scale of its inputs is {inputs}")
        tensors = {
            module + self.packed: weight.codes,
            module + self.scale: weight.scale,
            module + self.global_scale: self._as_stored(weight.global_scale),
        }
        if isinstance(inputs, NVFP4Input):
            multiplier = inputs.global_scale.reciprocal() if inputs.divides else inputs.global_scale
            tensors[module + self.input_scale] = self._as_stored(multiplier)
        return tensors

    def _as_stored(self, multiplier: Tensor) -> Tensor:
        value = multiplier.float()
        return value.reciprocal().reshape(1) if self.divides else value
