"""Run with TRITON_INTERPRET=1: the portable INT4 kernel against its torch reference; not a test by itself.

The interpreter has no bf16 product, so it is compared in fp16.
"""

import torch
from scalegate.kernels.int4 import packing, portable
from scalegate.tests.rounding_bounds import rounded, summed

SHAPES = [
    (64, 128, 128, False),
    (130, 320, 64, True),
    (200, 416, 32, False),
    (72, 256, 256, False),
    (64, 96, 32, True),
]


def compare(n: int, k: int, group_size: int, fractional: bool) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = torch.rand(n, k // group_size) * 0.02 + 0.001
    zero = torch.rand(n, k // group_size) * 15
    zero = zero if fractional else zero.to(torch.uint8)
    words = packing.pack_words(codes)
    scale_words = packing.pack_scales(scale, zero, group_size, torch.float16)
    group = min(group_size, packing.MAX_GROUP)
    for m in (1, 19):
        x = torch.randn(m, k).to(torch.float16)
        expected = packing.reference_matmul(x, words, scale_words, n, group, fractional)
        answer = portable.matmul(x, words, scale_words, n, group, fractional)
        error = (answer.double() - expected).norm() / expected.norm()
        if not error < rounded(torch.float16) + summed(k):
            raise SystemExit(f"matmul M={m} {n}x{k} g{group_size}: {error:.2e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    for shape in SHAPES:
        compare(*shape)
    print(f"compared {len(SHAPES)} shapes")
