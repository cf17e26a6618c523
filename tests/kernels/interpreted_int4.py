"""Run with TRITON_INTERPRET=1: the portable INT4 kernels against their torch reference; not a test by itself.

The interpreter has no bf16 product and truncates to bf16, so the product is compared in fp16 and the weight
alone in bf16, to a unit in the last place.
"""

import torch
from scalegate.kernels import int4_dequantize, int4_swap_ab

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
    words = int4_swap_ab.pack_words(codes)
    for dtype, bound in ((torch.float16, 0.0), (torch.bfloat16, 2.0**-6)):
        meta = int4_swap_ab.pack_meta(scale, zero, group_size, dtype)
        group = min(group_size, int4_swap_ab.MAX_GROUP)
        weight = int4_swap_ab.reference_weight(words, meta, group, fractional, dtype)[:n, :k]
        padded = len(words) * int4_swap_ab.TILE
        out = torch.full((padded, k), float("nan"), dtype=dtype)
        int4_dequantize.dequantize(words, meta, out, 0, group, fractional)
        error = (out[:n].float() - weight.float()).norm() / weight.float().norm()
        if not error <= bound or out[n:].any():
            raise SystemExit(f"dequantize {n}x{k} g{group_size} {dtype}: {error:.2e}")
        lower = torch.full((padded - 64, k), float("nan"), dtype=dtype)
        if len(lower):
            int4_dequantize.dequantize(words, meta, lower, 64, group, fractional)
            if not torch.equal(lower, out[64:]):
                raise SystemExit(f"dequantize from row 64 of {n}x{k}")
        if dtype is torch.float16:
            for m in (1, 19):
                x = torch.randn(m, k).to(dtype)
                expected = int4_swap_ab.reference_matmul(x, words, meta, n, group, fractional).float()
                fused = int4_swap_ab.matmul(x, words, meta, n, group, fractional)
                y = fused.new_full((m, n), float("nan"))
                int4_dequantize.matmul(x, words, meta, y, 0, group, fractional)
                rest = y.new_full((m, n), 7.0)
                if n > 64:
                    int4_dequantize.matmul(x, words, meta, rest, 64, group, fractional)
                if not torch.equal(rest[:, 64:], y[:, 64:]) or (rest[:, :64] != 7).any():
                    raise SystemExit(f"matmul M={m} from row 64 of {n}x{k}")
                for answer in (fused, y):
                    error = (answer.float() - expected).norm() / expected.norm()
                    if not error < 5e-4:
                        raise SystemExit(f"matmul M={m} {n}x{k} g{group_size}: {error:.2e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    int4_dequantize.PIECE_BYTES = 64 * 416 * 2  # several pieces, the last of them short
    int4_dequantize.PIECE_ROWS = 64
    for shape in SHAPES:
        compare(*shape)
    print(f"compared {len(SHAPES)} shapes")
