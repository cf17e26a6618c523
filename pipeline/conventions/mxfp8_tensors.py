"""The tensors of an MXFP8 weight, which compressed-tensors and ModelOpt store alike.

They are `weight` float8_e4m3fn [N, K] and `weight_scale` uint8 [N, K/32], E8M0.
"""

import torch

from ...base.errors import UserError
from ...layouts.formats.e4m3 import E4M3
from ...layouts.formats.mxfp4 import GROUP_SIZE, NAN
from ...layouts.formats.mxfp8 import MXFP8, MXFP8Weight
from ..checkpoints.checkpoint import Checkpoint
from .convention import StoredWeight
from .fp8 import SCALE, WEIGHT
from .stored import refuse_shape, require_tensor


def stored_mxfp8(checkpoint: Checkpoint, module: str) -> StoredWeight:
    """Return the released weight of `module`; its inputs are rounded to MXFP8 too."""
    name, scale, spec = module + WEIGHT, module + SCALE, MXFP8()
    n, k = require_tensor(checkpoint, name, (E4M3,)).shape
    refuse_shape(checkpoint, name, spec, n, k)
    require_tensor(checkpoint, scale, (torch.uint8,), (n, k // GROUP_SIZE))

    def read() -> MXFP8Weight:
        scales = checkpoint.read(scale)
        if bool((scales == NAN).any()):
            raise UserError(f"{checkpoint.source}: {scale} holds NaN. Download it again, or quantize again")
        return MXFP8Weight(spec, checkpoint.read(name), scales)

    return StoredWeight(module, (n, k), spec, (name, scale), read, lambda: spec.dynamic_input)
