"""A layer of experts from packed weights: both products, SiLU between them, and the weighted sum.

vLLM calls the product inside an op of its own (`vllm::moe_forward`), so it is captured in CUDA graphs with
that op. All scratch memory is vLLM's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.experts import gated, one_token, packed
from ..kernels.experts.int4 import Int4Experts, kernel_group
from ..kernels.experts.nvfp4 import NVFP4Experts
from ..kernels.experts.packed import ExpertsDecoder
from ..kernels.experts.routing import route
from ..kernels.experts.tile import bucket_of
from ..layouts.formats.int4 import Int4
from ..layouts.formats.nvfp4 import NVFP4
from ..layouts.packing.layout import PackedWeight


@dataclass(frozen=True)
class Products:
    """The packed weights of a layer's experts.

    words, scale_words, factor   as in `kernels/experts/packed.py`; of gate_up, then of down
    hidden, inner                columns of the layer's input, and of what lies between the products
    """

    spec: Int4 | NVFP4
    words: tuple[Tensor, Tensor]
    scale_words: tuple[Tensor, Tensor]
    factor: tuple[Tensor | None, Tensor | None]
    hidden: int
    inner: int

    def multiply(
        self, x: Tensor, expert: Tensor, weight: Tensor, scratch: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        """Put sum_j weight[t, j] * down_j(silu(gate_j(x[t])) * up_j(x[t])) into out [T, hidden].

        expert:  int [T, top_k]
        weight:  [T, top_k]
        scratch: at least T * top_k * inner numbers, which may overlap with `out`, and T * top_k times the
                 larger of hidden and 2 * inner, which may not
        """
        if self.serves_one_token(x, expert):
            one_token.experts(x, expert, weight, self.operand(0), self.operand(1), out=out)
            return
        routing = route(expert, len(self.words[0]))
        activation, rows = scratch
        gate_up = view(rows, routing.count, 2 * self.inner)
        self._product(0, x, routing, gate_up)
        activation = gated.silu_and_multiply(gate_up, view(activation, routing.count, self.inner))
        rows = view(rows, routing.count, self.hidden)
        self._product(1, activation, routing, rows)
        gated.weighted_sum(rows, weight, out)

    def _product(self, which: int, x: Tensor, routing: Any, out: Tensor) -> None:
        words, scale_words, decoder = self.words[which], self.scale_words[which], self.decoder(x.dtype)
        n, factor = out.shape[1], self.factor[which]
        packed.grouped_matmul(x, words, scale_words, factor, routing, n, decoder, out=out)

    def decoder(self, dtype: torch.dtype) -> ExpertsDecoder:
        half = dtype == torch.float16
        if isinstance(self.spec, NVFP4):
            return NVFP4Experts(half)
        return Int4Experts(half, kernel_group(self.spec.group_size), not self.spec.has_integer_zero)

    def serves_one_token(self, x: Tensor, expert: Tensor) -> bool:
        few = len(x) == 1 and expert.shape[1] <= one_token.MOST_TAKEN
        return few and isinstance(self.spec, Int4) and one_token.serves(self.operand(0), self.operand(1))

    def operand(self, which: int) -> one_token.Int4Operand:
        """Return an INT4 weight for the kernels of a single token."""
        spec = self.spec
        if not isinstance(spec, Int4):
            raise TypeError(f"{spec.key} has no kernels for a single token")
        n, k = ((2 * self.inner, self.hidden), (self.hidden, self.inner))[which]
        words, scale_words = self.words[which], self.scale_words[which]
        return one_token.Int4Operand(words, scale_words, n, k, spec.group_size, not spec.has_integer_zero)


def products_of(spec: Int4 | NVFP4, gate_up: PackedWeight, down: PackedWeight) -> Products:
    first, second = gate_up.tensors, down.tensors
    words, scale_words = ((first[name], second[name]) for name in ("words", "scale_words"))
    factor = first.get("factor"), second.get("factor")
    _, hidden, inner = down.shape
    return Products(spec, words, scale_words, factor, hidden, inner)


def view(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory.reshape(-1)[: rows * columns].view(rows, columns)


def tokens_to_compile(experts: int, top_k: int, most: int) -> tuple[int, ...]:
    """Return, for each form of the kernels, the smallest number of tokens up to `most` that uses it."""
    first: dict[object, int] = {}
    for tokens in range(1, most + 1):
        first.setdefault((tokens == 1, bucket_of(tokens * top_k, experts)), tokens)
    return tuple(first.values())


def zeros_for(products: Products, top_k: int, dtype: torch.dtype, tokens: int) -> tuple[Any, ...]:
    """Return arguments of `Products.multiply` for so many tokens."""
    words = products.words[0]
    widest = max(products.hidden, 2 * products.inner)
    expert = torch.arange(tokens * top_k, dtype=torch.int32, device=words.device) % len(words)
    weight = torch.zeros(tokens, top_k, device=words.device)
    x, scratch, other, out = (
        torch.zeros(rows, columns, dtype=dtype, device=words.device)
        for rows, columns in (
            (tokens, products.hidden),
            (tokens * top_k, products.inner),
            (tokens * top_k, widest),
            (tokens, products.hidden),
        )
    )
    return x, expert.view(tokens, top_k), weight, (scratch, other), out


def warm_up(products: Products, top_k: int, dtype: torch.dtype, most: int) -> None:
    """Multiply zeros, once for each form of the kernels that steps of up to `most` tokens use."""
    for tokens in tokens_to_compile(len(products.words[0]), top_k, most):
        products.multiply(*zeros_for(products, top_k, dtype, tokens))
