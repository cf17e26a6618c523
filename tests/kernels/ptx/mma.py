"""PTX's products of matrices, on all warps at once; not a test by itself.

Fragments are those of the PTX ISA's tables for `mma.m16n8k16` and `mma.m16n8k32`.
"""

import numpy as np
from scalegate.tests.kernels.ptx.registers import WARP, Array, Registers, Step

ROW, PLACE = np.arange(WARP) // 4, np.arange(WARP) % 4
"""Of a lane in fragments: groupID and threadID_in_group."""


class MatrixUnits(Registers):
    """Integers exactly, floats in fp64."""

    def _mma(self, parts: list[str], operands: list[str]) -> Step:
        kinds, shape = parts[-4:], parts[3]
        if parts[1:3] != ["sync", "aligned"] or parts[4:6] != ["row", "col"]:
            raise ValueError(parts)
        to = self._several(operands[0], kinds[0])
        acc = self._several(operands[3], kinds[3])
        a, b = self._several(operands[1], "b32"), self._several(operands[2], "b32")
        if shape == "m16n8k32" and kinds == ["s32", "s8", "s8", "s32"]:
            depth, saturates = 32, parts[6] == "satfinite"
        elif shape == "m16n8k16" and kinds[0] == kinds[3] == "f32" and kinds[1] == kinds[2]:
            depth, saturates = 16, False
        else:
            raise ValueError(parts)
        if (len(to), len(a), len(b), len(acc)) != (4, 4, 2, 4):
            raise ValueError(operands)
        each = 32 // depth
        """Bytes of an element: a register has 4 // each of them."""
        count = 4 // each

        def widened(registers: list[Array]) -> Array:
            """[warps, registers, lanes, elements]"""
            bits = np.stack([register.reshape(-1, WARP) for register in registers], 1)
            shape = (*bits.shape, count)
            if depth == 32:
                return bits.view(np.int8).reshape(shape).astype(np.float64)
            halves = bits.view(np.uint16).reshape(shape)
            if kinds[1] == "f16":
                return halves.view(np.float16).astype(np.float64)
            return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

        element = np.arange(count)
        warps = self._lanes // WARP
        left, right, out = (np.zeros((warps, *shape)) for shape in ((16, depth), (depth, 8), (16, 8)))
        a_rows = np.stack([ROW, ROW + 8, ROW, ROW + 8])[:, :, None]
        near = (PLACE * count)[:, None] + element
        a_columns = np.stack([near, near, near + depth // 2, near + depth // 2])
        b_rows = np.stack([near, near + depth // 2])
        rows, columns = np.stack([ROW, ROW, ROW + 8, ROW + 8]), np.stack([2 * PLACE, 2 * PLACE + 1] * 2)
        limit = np.iinfo(np.int32)

        def multiply() -> None:
            left[:, a_rows, a_columns] = widened(a)
            right[:, b_rows, ROW[None, :, None]] = widened(b)
            out[:, rows, columns] = np.stack([register.reshape(-1, WARP) for register in acc], 1)
            # Exact for integers: all sums are below 2^53.
            result = (left @ right + out)[:, rows, columns]
            if depth == 32:
                whole = result.astype(np.int64)
                fits = np.clip(whole, limit.min, limit.max)
                result = fits if saturates else whole.astype(np.int32)
            for i, register in enumerate(to):
                register[:] = result[:, i].reshape(-1)

        return multiply
