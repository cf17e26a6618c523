"""The work of a dense model's step, from embedded tokens to the last norm, as a list of compiled calls.

What no compiled call computes, such as oneDNN's products and attention over coded pages, is called from
Python between two lists. Parts find each other's tensors by their place in the step's numbers: compiled calls
write into those that are there, calls from Python make new ones.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ....kernels.attention.options import AttentionOptions
from ....kernels.attention.paged.cpu_decode import MergedHeads
from ....kernels.cpu.call_list import CallList
from ....kernels.cpu.calls import Call, StepNumber
from ....kernels.cpu.gather_rows import gather_call, serves
from ....kernels.cpu.run_calls import run_calls
from ....kernels.norms import gated_cpu
from ....kernels.norms.rms_norm_cpu import NOTHING, norm_call
from ....kernels.norms.rotate_heads_cpu import HeadNorm, Heads, rotate_call
from ....layouts.kv.cpu import CpuLayerKV
from ....layouts.kv.layer import LayerKV
from ....layouts.modules.linear import QuantizedLinear
from ....layouts.packing.layout import MANY_ROWS
from ..cpu_norms import CpuRMSNorm
from .parts import DenseLayer, DenseModel


class LayerAttention(Protocol):
    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend for query [B, H, D], key and value [B, H_kv, D]; return [B, H, D]."""


class Held(enum.IntEnum):
    """The tensors of a step, [rows, ...], by the place of their address in the step's numbers."""

    HIDDEN = len(StepNumber)
    NORMED = enum.auto()
    QKV = enum.auto()
    ATTENDED = enum.auto()
    ADDED = enum.auto()
    """What is added to the hidden states next."""
    GATE_UP = enum.auto()
    GATED = enum.auto()


Tensors = dict[Held, Tensor]
Part = Callable[[Tensors, LayerAttention | None], None]


class Program:
    """The parts of a model's step. `head` maps the last norm to logits."""

    def __init__(
        self,
        model: DenseModel,
        dtype: torch.dtype,
        numbers: np.ndarray,
        options: Mapping[int, AttentionOptions],
        storage: Mapping[int, LayerKV],
    ):
        """numbers: the step's. options, storage: as those of `DenseStep`"""
        self._numbers = numbers
        self._dtype = dtype
        self._tables: dict[nn.Module, Tensor | None] = {}
        self.head = _product(model.head)
        gather = _gather_call(model)
        # Without hooks, `forward` is all that a module's call does.
        self._embed = model.embed.forward if gather is None else None
        first = [] if gather is None else [gather]
        attention = [_attention_call(layer, dtype, options, storage) for layer in model.layers]
        no_calls = [None] * len(attention)
        self._parts = self._all_parts(model, first, no_calls)
        self._parts_of_many_rows = self._all_parts(model, first, no_calls, are_many_rows=True)
        self._decoding = [] if None in attention else self._all_parts(model, first, attention)

    @property
    def decodes(self) -> bool:
        return bool(self._decoding)

    def embed(self, held: Tensors, token_ids: Tensor) -> None:
        """Make the hidden states of tokens, int64 [T], unless the first call does."""
        if self._embed is not None:
            self._hold(held, Held.HIDDEN, self._embed(token_ids))

    def run(self, held: Tensors, attention: LayerAttention) -> None:
        are_many = len(held[Held.HIDDEN]) >= MANY_ROWS
        for part in self._parts_of_many_rows if are_many else self._parts:
            part(held, attention)

    def decode(self, held: Tensors) -> None:
        """Do the same for a step of decoding requests, whose keys and values are stored in plain pages."""
        for part in self._decoding:
            part(held, None)

    def _all_parts(
        self,
        model: DenseModel,
        first: Iterable[Call],
        attention: Iterable[Call | None],
        are_many_rows: bool = False,
    ) -> list[Part]:
        product = self._product_of_many_rows if are_many_rows else self._product_part
        parts: list[Call | Part] = [*first]
        added: int = NOTHING
        for layer, call in zip(model.layers, attention, strict=True):
            parts.append(_norm_call(layer.attention_norm, added))
            parts.append(product(layer.qkv, Held.NORMED, Held.QKV))
            parts.append(self._rotate_call(layer))
            parts.append(self._attention_part(layer) if call is None else call)
            parts.append(product(layer.output, Held.ATTENDED, Held.ADDED))
            parts.append(_norm_call(layer.mlp_norm, Held.ADDED))
            parts.append(product(layer.gate_up, Held.NORMED, Held.GATE_UP))
            parts.append(self._activation_part(layer))
            parts.append(product(layer.down, Held.GATED, Held.ADDED))
            added = Held.ADDED
        parts.append(_norm_call(model.norm, added))
        return self._joined(parts)

    def _joined(self, parts: Iterable[Call | Part]) -> list[Part]:
        """Make one part of calls that follow one another."""
        joined: list[Part] = []
        calls: list[Call] = []
        for part in parts:
            if isinstance(part, Call):
                calls.append(part)
                continue
            joined += [self._calls_part(calls), part] if calls else [part]
            calls = []
        return [*joined, self._calls_part(calls)]

    def _calls_part(self, calls: list[Call]) -> Part:
        run, in_memory = run_calls(), CallList(calls, self._numbers)
        return lambda held, attention: run(in_memory.address, in_memory.count)

    def _product_part(self, module: nn.Module, x: Held, y: Held) -> Call | Part:
        call = module.call_of_rows(x, y) if isinstance(module, QuantizedLinear) else None
        return self._product_of_many_rows(module, x, y) if call is None else call

    def _product_of_many_rows(self, module: nn.Module, x: Held, y: Held) -> Part:
        product = _product(module)
        return lambda held, attention: self._hold(held, y, product(held[x]))

    def _rotate_call(self, layer: DenseLayer) -> Call:
        heads = Heads(_rows_of(layer.qkv), layer.q_heads, layer.kv_heads, layer.head_dim)
        return rotate_call(Held.QKV, heads, _head_norm(layer.q_norm), _head_norm(layer.k_norm), self._dtype)

    def _attention_part(self, layer: DenseLayer) -> Part:
        sizes = layer.q_heads, layer.kv_heads, layer.kv_heads

        def attend(held: Tensors, attention: LayerAttention | None) -> None:
            assert attention is not None
            qkv = held[Held.QKV]
            heads = qkv.view(len(qkv), -1, layer.head_dim)
            query, key, value = heads.split_with_sizes(sizes, dim=1)
            output = attention.layer(layer.index, query, key, value, None)
            self._hold(held, Held.ATTENDED, output.reshape(len(qkv), -1).contiguous())

        return attend

    def _activation_part(self, layer: DenseLayer) -> Call | Part:
        activation, dim = layer.activation, _rows_of(layer.gate_up) // 2
        if gated_cpu.serves(self._dtype, dim):
            if activation not in self._tables:
                self._tables[activation] = gated_cpu.table_of(activation.forward, self._dtype)
            table = self._tables[activation]
            if table is not None:
                return gated_cpu.gated_call(Held.GATE_UP, table, Held.GATED, dim)

        def activate(held: Tensors, attention: LayerAttention | None) -> None:
            gate, up = held[Held.GATE_UP].chunk(2, dim=-1)
            self._hold(held, Held.GATED, activation.forward(gate).mul_(up))

        return activate

    def _hold(self, held: Tensors, place: Held, tensor: Tensor) -> None:
        held[place] = tensor
        self._numbers[place] = tensor.data_ptr()


def held_sizes(model: DenseModel) -> dict[Held, int]:
    """Return the length of a row of each tensor."""
    layer, dim = model.layers[0], len(model.norm.contiguous_weight)
    gate_up = _rows_of(layer.gate_up)
    return {
        Held.HIDDEN: dim,
        Held.NORMED: dim,
        Held.QKV: _rows_of(layer.qkv),
        Held.ATTENDED: layer.q_heads * layer.head_dim,
        Held.ADDED: dim,
        Held.GATE_UP: gate_up,
        Held.GATED: gate_up // 2,
    }


def _gather_call(model: DenseModel) -> Call | None:
    """Return the call that embeds the tokens; None if a module has to."""
    module, norm = model.embed, model.norm.contiguous_weight
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return None
    table = module.weight
    fits = table.shape[1] == len(norm) and table.dtype is norm.dtype and len(table) >= model.vocab_size
    return gather_call(table, Held.HIDDEN) if fits and serves(table) else None


def _attention_call(
    layer: DenseLayer,
    dtype: torch.dtype,
    options: Mapping[int, AttentionOptions],
    storage: Mapping[int, LayerKV],
) -> Call | None:
    pages, of_layer = storage.get(layer.index), options.get(layer.index)
    if not isinstance(pages, CpuLayerKV) or of_layer is None:
        return None
    return pages.decode_call(MergedHeads(Held.QKV, Held.ATTENDED, layer.q_heads, dtype), of_layer)


def _norm_call(norm: CpuRMSNorm, added: int) -> Call:
    return norm_call(Held.HIDDEN, added, norm.contiguous_weight, Held.NORMED, norm.eps)


def _head_norm(norm: CpuRMSNorm | None) -> HeadNorm:
    return HeadNorm() if norm is None else HeadNorm(norm.contiguous_weight.data_ptr(), norm.eps)


def _rows_of(product: nn.Module) -> int:
    """Return the number of rows of a product's weight."""
    rows = product.out_features
    assert isinstance(rows, int)
    return rows


def _product(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the product of x [T, K] as a contiguous [T, N]."""
    product = module.product_of_rows() if isinstance(module, QuantizedLinear) else None
    return product or (lambda x: module(x).contiguous())
