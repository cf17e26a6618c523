"""Every layout, registered in the order of preference; import `LAYOUTS` from here.

Without measurements, the first layout that does not refuse is chosen; of equally fast layouts, the first one
is chosen. A new layout is one file, and one line in this module.
"""

from .cpu_int4 import CPU_INT4, CPU_INT4_CAST, CPU_INT4_FLOAT32
from .cpu_tiles import CPU_AMX, CPU_TILES
from .dequantize import Dequantize
from .dequantize_once import CPU_DEQUANTIZED, GPU_DEQUANTIZED, CpuOneDnn
from .emulated import CPU_EMULATED, EMULATED
from .fixed_rows import FixedRows
from .fp8_scaled import FP8_SCALED, FP8_SCALED_INVARIANT, INT8_INPUTS
from .grouped_experts import (
    GroupedDequantize,
    GroupedFP8,
    GroupedInt4,
    GroupedMXFP4,
    GroupedNVFP4,
    GroupedUnquantized,
)
from .int4_fp8 import INT4_FP8
from .int8_swap_ab import INT8_SWAP_AB, INT8_SWAP_AB_INVARIANT
from .invariant_linear import InvariantLinear
from .iq2_xxs import IQ2_XXS
from .layout import LAYOUTS, AnyLayout, Layout
from .nvfp4_scaled import NVFP4_SCALED
from .nvfp4_swap_ab import NVFP4_SWAP_AB, NVFP4_SWAP_AB_INVARIANT
from .peers.gemlite import GemLite
from .peers.humming import Humming
from .peers.int_mm import CPU_INT8_INPUTS
from .peers.tinygemm import Tinygemm
from .per_expert import PerExpert
from .portable import (
    FP8_PORTABLE,
    INT4_PORTABLE,
    INT8_PORTABLE,
    IQ2_XXS_PORTABLE,
    MXFP4_PORTABLE,
    NVFP4_PORTABLE,
)
from .swap_ab import SWAP_AB, SWAP_AB_INVARIANT
from .torch_linear import TorchLinear

FOR_A_CPU: tuple[Layout, ...] = (
    TorchLinear(),
    CPU_INT4,
    CPU_DEQUANTIZED,
    CPU_EMULATED,
    Dequantize(),
    CPU_INT4_FLOAT32,
    EMULATED,
)

IN_ORDER: tuple[AnyLayout, ...] = (
    TorchLinear(),
    INT4_FP8,
    SWAP_AB,
    NVFP4_SWAP_AB,
    INT8_SWAP_AB,
    INT8_INPUTS,
    FP8_SCALED,
    SWAP_AB_INVARIANT,
    NVFP4_SWAP_AB_INVARIANT,
    INT8_SWAP_AB_INVARIANT,
    FP8_SCALED_INVARIANT,
    INT4_PORTABLE,
    NVFP4_PORTABLE,
    MXFP4_PORTABLE,
    Tinygemm(),
    IQ2_XXS,
    IQ2_XXS_PORTABLE,
    CPU_INT4,
    CPU_INT8_INPUTS,
    CPU_DEQUANTIZED,
    CPU_EMULATED,
    GPU_DEQUANTIZED,
    # Layouts below the exact product are chosen only by a measurement or by the user: they round what should
    # be float32, or are slower still with some number of rows, or were never run by us, or use third-party
    # kernels, which are checked before they are used.
    Dequantize(),
    EMULATED,
    INT8_PORTABLE,
    FP8_PORTABLE,
    NVFP4_SCALED,
    CpuOneDnn(),
    CPU_INT4_CAST,
    CPU_INT4_FLOAT32,
    Humming(),
    GemLite(),
    # Batch-invariant: on a CPU the same kernels, in the same order of preference.
    *map(FixedRows, FOR_A_CPU),
    # For every mode, and last of a CPU's: numba compiles it, so it is not taken without a measurement.
    *CPU_TILES,
    *CPU_AMX,
    InvariantLinear(),
    # Experts: nothing below serves a dense layer, and nothing above serves experts.
    GroupedUnquantized(),
    GroupedInt4(),
    GroupedNVFP4(),
    GroupedFP8(),
    GroupedMXFP4(),
    PerExpert(TorchLinear()),
    PerExpert(CPU_INT4),
    PerExpert(CPU_INT8_INPUTS),
    PerExpert(CPU_DEQUANTIZED),
    PerExpert(CPU_EMULATED),
    PerExpert(Dequantize()),
    PerExpert(EMULATED),
    PerExpert(CPU_INT4_CAST),
    PerExpert(CPU_INT4_FLOAT32),
    GroupedDequantize(),
    *(PerExpert(FixedRows(layout)) for layout in FOR_A_CPU),
    *map(PerExpert, CPU_TILES),
)

for layout in IN_ORDER:
    LAYOUTS.add(layout.name, layout)

__all__ = ["LAYOUTS"]
