"""MXFP4 (gpt-oss): E2M1 codes, two in a byte, with an E8M0 scale for every 32 along the inputs.

`<name>_blocks` uint8 [E, N, K/32, 16] and `<name>_scales` uint8 [E, N, K/32] represent `<name>` [E, K, N],
the shape in which the model multiplies it. Every value is exact in bf16.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from .decoded_tensors import DecodedTensor, decoded
from .safetensors_file import TensorInfo

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP, BYTES = 32, 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
"""The bias of the scales' exponents."""


def decoded_mxfp4(
    source: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, tuple[DecodedTensor, tuple[str, ...]]]:
    """Map the name of each tensor's blocks to the decoded tensor and to its blocks and scales."""
    made: dict[str, tuple[DecodedTensor, tuple[str, ...]]] = {}
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        stem = name.removesuffix(BLOCKS)
        scales = tensors.get(stem + SCALES)
        shape = blocks.shape
        fits = blocks.dtype == torch.uint8 and len(shape) == 4 and shape[3] == BYTES
        if scales is None or not fits or scales.shape != shape[:3] or scales.dtype != torch.uint8:
            raise UserError(
                f"{source}: {name} {list(shape)} is not MXFP4; codes have to be uint8 [E, N, K/32, "
                f"16], and {stem}{SCALES} uint8 [E, N, K/32]; download or copy the checkpoint again"
            )
        experts, n, groups, _ = shape
        decode = _Decoder(blocks, scales, groups * GROUP)
        whole = (experts, groups * GROUP, n)
        made[name] = (
            decoded(stem, [blocks, scales], torch.bfloat16, whole, decode, "MXFP4"),
            (name, stem + SCALES),
        )
    return made


class _Decoder:
    """Decodes rows of a tensor [E * K, N], all rows of an expert together."""

    def __init__(self, blocks: TensorInfo, scales: TensorInfo, k: int):
        self.blocks, self.scales, self.k = blocks, scales, k

    def __call__(self, start: int, stop: int) -> Tensor:
        parts = []
        for expert in range(start // self.k, -(-stop // self.k)):
            first = expert * self.k
            parts.append(self._expert(expert)[max(start - first, 0) : stop - first])
        return torch.cat(parts)

    def _expert(self, expert: int) -> Tensor:
        """Return the decoded weight of one expert, [K, N] in bf16."""
        blocks = self.blocks.read_rows(expert, expert + 1)[0]
        scales = self.scales.read_rows(expert, expert + 1)[0]
        codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
        values = torch.tensor([*VALUES, *(-value for value in VALUES)])[codes.int()]
        exponents = scales.int().unsqueeze(-1) - BIAS
        return torch.ldexp(values, exponents).flatten(-2).T.to(torch.bfloat16)
