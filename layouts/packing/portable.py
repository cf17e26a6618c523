"""Our own layouts for GPUs from compute capability 8.0 on, of all packed formats; one Triton kernel.

The bytes are the same as for experts (`grouped_experts.py`), except for IQ2_XXS; the kernel is
`kernels/portable/packed_matmul.py`. The kernel's sums have one order at any number of rows, so one layout
serves every mode of batch invariance, except where Triton uses another matrix instruction for larger tiles,
which sums in another order. Not for the CPU.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES, TUNED
from ...kernels.device import compute_capability, keeps_sums_in_registers
from ...kernels.experts import int4, mxfp4, nvfp4
from ...kernels.experts.packed import ExpertsDecoder
from ...kernels.iq2_xxs.grid import grid
from ...kernels.nvfp4.packing import FACTOR
from ...kernels.portable import e4m3, int8, iq2_xxs
from ...kernels.portable.packed_matmul import PortableOperand, matmul
from ...kernels.portable.tiles import semaphores_of
from ...kernels.triton_imports import FOUR_IN_A_ROW
from ..formats.fp8 import FP8, FP8Weight
from ..formats.int4 import Int4, unpack_nibbles
from ..formats.int8 import Int8, Int8Weight
from ..formats.iq2_xxs import IQ2XXS, IQ2XXSWeight
from ..formats.mxfp4 import MXFP4, MXFP4Weight
from ..formats.nvfp4 import NVFP4, NVFP4Weight
from ..formats.weight_format import Weight
from .int4_affine import int4_of, require_int4
from .layout import PackedWeight, Problem, Serves
from .swap_ab import refuses_groups
from .trial import trial_refusal

CAPABILITY = (8, 0)


class Packing(Protocol):
    """How a format's weights become operands of the portable kernel."""

    @property
    def format(self) -> type:
        """The spec's class."""
        ...

    @property
    def name(self) -> str:
        """The layout's."""
        ...

    @property
    def kernel_prefix(self) -> str:
        """The name of the format's decoder."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of activations that the format's decoder supports."""
        ...

    @property
    def planes(self) -> int:
        """The number of planes: packed weights that lie one after another and are added up."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """Return None if the format's parameters are served, otherwise the reason in a few words."""
        ...

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[Mapping[str, Tensor], Mapping[str, int]]:
        """Return tensors `words`, `scale_words`, maybe `factor` and `table`, and the decoder's attributes."""
        ...

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder: ...


class PortableLayout:
    """Multiplies by the portable kernel on one format's packed bytes."""

    def __init__(
        self,
        packing: Packing,
        run_on: Sequence[tuple[int, int]] = ((9, 0),),
        translated_for: Sequence[tuple[int, int]] = ((8, 0), (8, 9)),
    ):
        self.packing = packing
        self.run_on, self.translated_for = tuple(run_on), tuple(translated_for)
        self.name = packing.name
        self.kernel = f"{packing.kernel_prefix}_portable_kernel"

    def refuses(self, problem: Problem) -> str | None:
        packing = self.packing
        serves = Serves(
            (packing.format,),
            "cuda",
            packing.dtypes,
            invariance_modes=INVARIANCE_MODES,
            capability=CAPABILITY,
        )
        refusal = serves.refuses(problem) or packing.refuses(problem)
        tuned = problem.batch_invariance == TUNED
        if refusal is None and not tuned and not keeps_sums_in_registers(compute_capability(problem.device)):
            return "is not batch-invariant on this GPU, whose matrix instructions differ by the rows"
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        tensors, attributes = self.packing.pack(weight, dtype)
        device, n = tensors["words"].device, weight.shape[0]
        semaphores = torch.zeros(semaphores_of(n), dtype=torch.int32, device=device)
        tensors = {**tensors, "semaphores": semaphores}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors, attributes)

    def operand(self, packed: PackedWeight) -> PortableOperand:
        tensors = packed.tensors
        words, scale_words, semaphores = (tensors[name] for name in ("words", "scale_words", "semaphores"))
        decoder = self.packing.decoder(packed)
        return PortableOperand(
            words,
            scale_words,
            semaphores,
            decoder,
            tensors.get("factor"),
            self.packing.planes,
            tensors.get("table"),
        )

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return matmul(x.contiguous(), self.operand(packed), packed.shape[0])


class Int4Packing:
    """INT4: groups of 32, 64 and multiples of 128, with integer or fractional zeros."""

    format = Int4
    name = "int4_portable"
    kernel_prefix = int4.Int4Experts.name
    dtypes = (torch.bfloat16, torch.float16)
    planes = 1

    def refuses(self, problem: Problem) -> str | None:
        return refuses_groups(int4_of(problem).group_size)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        weight = require_int4(weight, self.name)
        group_size = weight.spec.group_size
        parts = weight.codes.unsqueeze(0), weight.scale.unsqueeze(0), weight.zero_point.unsqueeze(0)
        words, scale_words = int4.pack(*parts, group_size, dtype)
        attributes = {"group_size": int4.kernel_group(group_size)}
        attributes["fractional"] = int(not weight.spec.has_integer_zero)
        return {"words": words[0], "scale_words": scale_words[0]}, attributes

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder:
        attributes = packed.attributes
        half = packed.dtype == torch.float16
        return int4.Int4Experts(half, attributes["group_size"], bool(attributes["fractional"]))


class NVFP4Packing:
    """NVFP4 weights, for activations in bf16."""

    format = NVFP4
    name = "nvfp4_portable"
    kernel_prefix = nvfp4.NVFP4Experts.name
    dtypes = (torch.bfloat16,)
    planes = 1

    def refuses(self, problem: Problem) -> str | None:
        return problem.spec.refuses(problem.n, problem.k)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, NVFP4Weight):
            raise TypeError(f"layout {self.name} packs NVFP4Weight, not {type(weight).__name__}")
        words, scale_words = nvfp4.pack(unpack_nibbles(weight.codes), weight.scale)
        factor = weight.global_scale.float().reshape(1) * FACTOR
        return {"words": words, "scale_words": scale_words, "factor": factor}, {}

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder:
        return nvfp4.NVFP4Experts(half=packed.dtype == torch.float16)


class MXFP4Packing:
    """MXFP4 weights, for activations in bf16."""

    format = MXFP4
    name = "mxfp4_portable"
    kernel_prefix = mxfp4.MXFP4Experts.name
    dtypes = (torch.bfloat16,)
    planes = 1

    def refuses(self, problem: Problem) -> str | None:
        return problem.spec.refuses(problem.n, problem.k)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, MXFP4Weight):
            raise TypeError(f"layout {self.name} packs MXFP4Weight, not {type(weight).__name__}")
        words, scale_words, factor = mxfp4.pack(unpack_nibbles(weight.codes), weight.scale)
        return {"words": words, "scale_words": scale_words, "factor": factor.reshape(1)}, {}

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder:
        return mxfp4.MXFP4Experts(half=packed.dtype == torch.float16)


class Int8Packing:
    """INT8 as two planes of INT4."""

    format = Int8
    name = "int8_portable"
    kernel_prefix = int4.Int4Experts.name
    dtypes = (torch.bfloat16, torch.float16)
    planes = int8.PLANES

    def refuses(self, problem: Problem) -> str | None:
        spec = cast(Int8, problem.spec)
        return spec.refuses(problem.n, problem.k) or refuses_groups(problem.k // spec.groups(problem.k))

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, Int8Weight):
            raise TypeError(f"layout {self.name} packs Int8Weight, not {type(weight).__name__}")
        words, scale_words = int8.pack(weight.codes, weight.scale, dtype)
        group_size = weight.shape[1] // weight.scale.shape[1]
        return {"words": words, "scale_words": scale_words}, {"group_size": int4.kernel_group(group_size)}

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder:
        half = packed.dtype == torch.float16
        return int4.Int4Experts(half, packed.attributes["group_size"], fractional=False)


class IQ2XXSPacking:
    """IQ2_XXS, whose codebook lies beside the weight."""

    format = IQ2XXS
    name = "iq2_portable"
    kernel_prefix = iq2_xxs.IQ2XXSExperts.name
    dtypes = (torch.bfloat16, torch.float16)
    planes = 1

    def refuses(self, problem: Problem) -> str | None:
        return problem.spec.refuses(problem.n, problem.k)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, IQ2XXSWeight):
            raise TypeError(f"layout {self.name} packs IQ2XXSWeight, not {type(weight).__name__}")
        numbers = weight.indices(), weight.sign_patterns(), weight.scales_of_blocks()
        words, scale_words, factor = iq2_xxs.pack(*numbers, dtype)
        table = iq2_xxs.table_of(grid(words.device, dtype))
        return {"words": words, "scale_words": scale_words, "factor": factor, "table": table}, {}

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder:
        capability = compute_capability(packed.tensors["words"].device)
        wide = FOUR_IN_A_ROW and keeps_sums_in_registers(capability)
        return iq2_xxs.IQ2XXSExperts(half=packed.dtype == torch.float16, wide=wide)


class FP8Packing:
    """FP8 weights, for GPUs that do not multiply E4M3; inputs have been rounded in 16 bits."""

    format = FP8
    name = "fp8_portable"
    kernel_prefix = e4m3.E4M3Portable.name
    dtypes = (torch.bfloat16, torch.float16)
    planes = 1

    def refuses(self, problem: Problem) -> str | None:
        return problem.spec.refuses(problem.n, problem.k)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, FP8Weight):
            raise TypeError(f"layout {self.name} packs FP8Weight, not {type(weight).__name__}")
        scale = weight.scale if weight.scale.dim() else weight.scale.expand(weight.shape[0], 1)
        words, scale_words, factor = e4m3.pack(weight.codes, scale, dtype)
        return {"words": words, "scale_words": scale_words, "factor": factor}, {}

    def decoder(self, packed: PackedWeight) -> ExpertsDecoder:
        return e4m3.E4M3Portable(half=packed.dtype == torch.float16)


INT4_PORTABLE = PortableLayout(Int4Packing())
NVFP4_PORTABLE = PortableLayout(NVFP4Packing())
MXFP4_PORTABLE = PortableLayout(MXFP4Packing(), translated_for=())
INT8_PORTABLE = PortableLayout(Int8Packing())
FP8_PORTABLE = PortableLayout(FP8Packing())
IQ2_XXS_PORTABLE = PortableLayout(IQ2XXSPacking())
