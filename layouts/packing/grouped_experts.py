"""Layouts of experts on a GPU: one launch for all experts of a layer.

The host never needs to know how many rows an expert gets, so the layouts of this file run inside CUDA graphs
(`kernels/experts/`). The CPU's layout of experts is in `per_expert.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES
from ...kernels.experts import fp8, gated, int4, mxfp4, nvfp4, one_token, unquantized
from ...kernels.experts import packed as packed_experts
from ...kernels.fp8.round_rows import round_rows
from ...kernels.nvfp4.packing import FACTOR
from ..formats.fp8 import FP8, FP8Weight
from ..formats.input_format import dynamic_input
from ..formats.int4 import Int4, Int4Weight, unpack_nibbles
from ..formats.mxfp4 import MXFP4, MXFP4Weight
from ..formats.nvfp4 import NVFP4, NVFP4Weight
from ..formats.unquantized import Unquantized
from ..formats.weight_format import Weight, weight_of
from .int4_affine import int4_of, require_int4
from .layout import IS_FOR, PackedWeight, Problem, Serves
from .routing import Routing
from .swap_ab import refuses_groups
from .trial import trial_refusal

DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)
RUN_ON = ((9, 0),)
TRANSLATED_FOR = ((8, 0), (8, 9))
E4M3_CAPABILITY = (8, 9)


def _serves(formats: tuple[type, ...] | None, dtypes: tuple[torch.dtype, ...]) -> Serves:
    """Batch invariance depends on the rows of a block, which the routing sets (`kernels/experts/tile.py`)."""
    return Serves(
        formats,
        "cuda",
        dtypes,
        experts=True,
        invariance_modes=INVARIANCE_MODES,
        capability=CAPABILITY,
    )


class GroupedUnquantized:
    """Weights are [E, N, K] with any strides, so that [E, K, N] works too, in bfloat16, float16 or
    float32.
    """

    name = "grouped_unquantized"
    kernel = "grouped_kernel"
    run_on = RUN_ON
    translated_for = TRANSLATED_FOR

    def refuses(self, problem: Problem) -> str | None:
        dtypes = (*DTYPES, torch.float32)
        return _serves((Unquantized,), dtypes).refuses(problem) or trial_refusal(self, problem)

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        return self.of(torch.stack([weight.dequantize(dtype) for weight in weights]))

    def of(self, weight: Tensor) -> PackedWeight:
        """Pack a model's own parameter, [E, N, K] with any strides, without copying it."""
        n, k = weight.shape[1:]
        return PackedWeight(self.name, Unquantized(), (len(weight), n, k), weight.dtype, {"weight": weight})

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        return unquantized.grouped_matmul(x, packed.tensors["weight"], routing.blocks)


class GroupedInt4:
    """INT4 in the order of the matrix unit's registers, for bfloat16 and float16."""

    name = "grouped_int4"
    kernel = "int4_grouped_kernel"
    run_on = RUN_ON
    translated_for = TRANSLATED_FOR

    def refuses(self, problem: Problem) -> str | None:
        refusal = _serves((Int4,), DTYPES).refuses(problem)
        refusal = refusal or refuses_groups(int4_of(problem).group_size)
        return refusal or trial_refusal(self, problem)

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        # One expert at a time: the codes a byte each are four times as large as the rest together.
        parts = [self._pack(require_int4(weight, self.name), dtype) for weight in weights]
        words, scales = (torch.cat(column) for column in zip(*parts, strict=True))
        spec = require_int4(weights[0], self.name).spec
        attributes = {"group_size": spec.group_size, "fractional": int(not spec.has_integer_zero)}
        shape = (len(weights), *weights[0].shape)
        return PackedWeight(
            self.name, spec, shape, dtype, {"words": words, "scale_words": scales}, attributes
        )

    def _pack(self, weight: Int4Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, scale, zero = (tensor.unsqueeze(0) for tensor in weight.tensors().values())
        return int4.pack(codes, scale, zero, weight.spec.group_size, dtype)

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        tensors, attributes = packed.tensors, packed.attributes
        rest = packed.shape[1], attributes["group_size"], bool(attributes["fractional"])
        return int4.grouped_matmul(x, tensors["words"], tensors["scale_words"], routing.blocks, *rest)

    def serves_gated(self, gate_up: PackedWeight, down: PackedWeight) -> bool:
        """Say whether there are kernels for a single token; see `gated_experts.py`."""
        return one_token.serves(_operand(gate_up), _operand(down))

    def gated_experts(
        self, x: Tensor, expert: Tensor, weight: Tensor, gate_up: PackedWeight, down: PackedWeight
    ) -> Tensor:
        return gated.gated_experts(x, expert, weight, _operand(gate_up), _operand(down))


def _operand(packed: PackedWeight) -> one_token.Int4Operand:
    return one_token.Int4Operand(
        words=packed.tensors["words"],
        scale_words=packed.tensors["scale_words"],
        n=packed.shape[1],
        k=packed.shape[2],
        group_size=packed.attributes["group_size"],
        fractional=bool(packed.attributes["fractional"]),
    )


class GroupedNVFP4:
    """NVFP4 in the order of the matrix unit's registers, for bfloat16."""

    name = "grouped_nvfp4"
    kernel = "nvfp4_grouped_kernel"
    run_on = RUN_ON
    translated_for = TRANSLATED_FOR

    def refuses(self, problem: Problem) -> str | None:
        refusal = _serves((NVFP4,), (torch.bfloat16,)).refuses(problem)
        refusal = refusal or problem.spec.refuses(problem.n, problem.k)
        return refusal or trial_refusal(self, problem)

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        # One expert at a time: the codes a byte each are four times as large as the rest together.
        parts = [self._pack(weight) for weight in weights]
        words, scales, factors = (torch.stack(column) for column in zip(*parts, strict=True))
        tensors = {"words": words, "scale_words": scales, "factor": factors}
        return PackedWeight(self.name, weights[0].spec, (len(weights), *weights[0].shape), dtype, tensors)

    def _pack(self, weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(weight, NVFP4Weight):
            raise TypeError(f"layout {self.name} packs NVFP4Weight, not {type(weight).__name__}")
        words, scales = nvfp4.pack(unpack_nibbles(weight.codes), weight.scale)
        return words, scales, weight.global_scale.float().reshape(()) * FACTOR

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        words, scales, factor = (packed.tensors[name] for name in ("words", "scale_words", "factor"))
        n, decoder = packed.shape[1], nvfp4.NVFP4Experts(half=False)
        return packed_experts.grouped_matmul(x, words, scales, factor, routing.blocks, n, decoder)


class GroupedMXFP4:
    """MXFP4 in the order of the matrix unit's registers, for bfloat16."""

    name = "grouped_mxfp4"
    kernel = "mxfp4_grouped_kernel"
    run_on = RUN_ON
    translated_for = ((8, 0),)

    def refuses(self, problem: Problem) -> str | None:
        refusal = _serves((MXFP4,), (torch.bfloat16,)).refuses(problem)
        refusal = refusal or problem.spec.refuses(problem.n, problem.k)
        return refusal or trial_refusal(self, problem)

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        # One expert at a time: the codes a byte each are four times as large as the rest together.
        parts = [self._pack(weight) for weight in weights]
        words, scales, factors = (torch.stack(column) for column in zip(*parts, strict=True))
        tensors = {"words": words, "scale_words": scales, "factor": factors}
        return PackedWeight(self.name, weights[0].spec, (len(weights), *weights[0].shape), dtype, tensors)

    def _pack(self, weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(weight, MXFP4Weight):
            raise TypeError(f"layout {self.name} packs MXFP4Weight, not {type(weight).__name__}")
        return mxfp4.pack(unpack_nibbles(weight.codes), weight.scale)

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        words, scales, factor = (packed.tensors[name] for name in ("words", "scale_words", "factor"))
        n, decoder = packed.shape[1], mxfp4.MXFP4Experts(half=False)
        return packed_experts.grouped_matmul(x, words, scales, factor, routing.blocks, n, decoder)


class GroupedFP8:
    """FP8 as the checkpoint has it, for bfloat16 and float16; inputs are rounded row by row."""

    name = "grouped_fp8"
    kernel = "fp8_grouped_kernel"
    rounds_inputs = True
    run_on = RUN_ON
    translated_for = ()
    _serves = Serves(
        (FP8,),
        "cuda",
        DTYPES,
        experts=True,
        invariance_modes=INVARIANCE_MODES,
        capability=E4M3_CAPABILITY,
        rounds_inputs=True,
    )

    def refuses(self, problem: Problem) -> str | None:
        refusal = self._serves.refuses(problem) or problem.spec.refuses(problem.n, problem.k)
        if refusal is None and dynamic_input(problem.spec) is None:
            return f"{IS_FOR} inputs with scales of their own"
        return refusal or trial_refusal(self, problem)

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        parts = [self._pack(weight) for weight in weights]
        codes, scales = (torch.stack(column) for column in zip(*parts, strict=True))
        tensors = {"codes": codes, "scale": scales}
        return PackedWeight(self.name, weights[0].spec, (len(weights), *weights[0].shape), dtype, tensors)

    def _pack(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return the codes [N, K], and fp32 scales [G, N]."""
        if not isinstance(weight, FP8Weight):
            raise TypeError(f"layout {self.name} packs FP8Weight, not {type(weight).__name__}")
        scale = weight.scale.float()
        return weight.codes, scale.t() if scale.dim() else scale.expand(1, weight.shape[0])

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        codes, scale = packed.tensors["codes"], packed.tensors["scale"]
        inputs, input_scale = round_rows(x, in_groups=scale.shape[1] > 1)
        return fp8.grouped_matmul(inputs, input_scale, codes, scale, routing.blocks, x.dtype)


class GroupedDequantize:
    """Any format: all experts are dequantized again for every product. The layout is slow, and used only if
    no other layout serves.
    """

    name = "grouped_dequantize"
    kernel = "dequantize + grouped_kernel"
    run_on = RUN_ON
    translated_for = TRANSLATED_FOR

    def refuses(self, problem: Problem) -> str | None:
        if isinstance(problem.spec, Unquantized):
            return f"{IS_FOR} quantized weights"
        dtypes = (*DTYPES, torch.float32)
        return _serves(None, dtypes).refuses(problem) or trial_refusal(self, problem)

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        parts = [weight.tensors() for weight in weights]
        tensors = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        shape = (len(weights), *weights[0].shape)
        return PackedWeight(self.name, weights[0].spec, shape, dtype, tensors)

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        experts = [
            weight_of(packed.spec, {name: tensor[index] for name, tensor in packed.tensors.items()})
            for index in range(packed.shape[0])
        ]
        dense = torch.stack([expert.dequantize(packed.dtype) for expert in experts])
        return unquantized.grouped_matmul(x, dense, routing.blocks)
