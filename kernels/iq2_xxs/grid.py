"""IQ2_XXS's codebook: 256 vectors of 8 magnitudes from {8, 25, 43}, as llama.cpp defined them.

The table is the format's (ggml's `iq2xxs_grid`, MIT licence); a test compares it with the `gguf` package's.
Signs are stored separately: seven of eight are stored, and the eighth makes the number of minus signs even.
"""

import functools

import torch
from torch import Tensor

MAGNITUDES = (8, 25, 43)
ENTRIES, LENGTH = 256, 8
SIGN_PATTERNS = 128
GRID = bytes.fromhex(
    "00000200050008000a00110014002000220028002a0041004400500058006100"
    "6400800082008a00a20001010401100115014001840198010002020222028202"
    "010404041004210424044004420448046004810484049004a404000502050805"
    "200546056905800591050906100640068406a406000805080808140828084108"
    "440850085208880804094009020a140a01100410101021104010601084109010"
    "951000110811201150115a118011241245120014081420142514491480141815"
    "6215001616160118041810184018811800190519a019511a002002200a204420"
    "6120802082202921482100220222012404241024402456240025412564259026"
    "082820289428442a014004401040184021402440404048405640604081408440"
    "9040004120416141804185410142104248425642684200440844204480449944"
    "124524450046014804481048404845480049584961498249454a904a00500850"
    "1150195020508050885004514251a4519152905492540a550156545600581158"
    "195864584059085a046010604060686000615561186260620064056410651265"
    "84654268008002800a8041808280048118814081118201840484108415844084"
    "608400854685948509864086608602880489118a0490109024904090a1901691"
    "8091459200942294449451958198209902a050a085a009a100a218a450a804a9"
)
"""The codebook: two bytes per entry, two bits per magnitude, the first magnitude in the lowest bits."""


@functools.cache
def grid(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the codebook [256, 8] in `dtype`, copied to `device` once: a CUDA graph can hold no copy from
    the host."""
    packed = torch.frombuffer(bytearray(GRID), dtype=torch.uint8).view(ENTRIES, 2, 1)
    levels = (packed >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    return torch.tensor(MAGNITUDES, dtype=dtype)[levels.view(ENTRIES, LENGTH).long()].to(device)


@functools.cache
def signs(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the eight signs, 1 or -1 [128, 8], of each pattern of seven stored signs."""
    patterns = torch.arange(SIGN_PATTERNS).unsqueeze(1) >> torch.arange(LENGTH - 1) & 1
    negative = torch.cat((patterns, patterns.sum(1, keepdim=True) & 1), dim=1)
    return (1 - 2 * negative).to(device, dtype)
