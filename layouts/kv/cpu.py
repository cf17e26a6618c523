"""KV pages on the CPU: decoding by a compiled kernel if there is one, all else by the torch reference.

The kernel is `kernels/attention/paged/cpu_decode.py`, the reference `kernels/attention/reference.py`.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.attention import reference
from ...kernels.attention.options import AttentionOptions
from ...kernels.attention.reference import GatheredPages, TokenGroup
from ...kernels.cpu.calls import Call
from .attention_metadata import AttentionMetadata, HostMetadata
from .layer import StoredPages, Workspaces, by_token
from .threads import Threads

if TYPE_CHECKING:
    from ...kernels.attention.paged.cpu_decode import MergedHeads

WORTH_A_THREAD = 512
"""Keys of all requests and heads together for which one more thread is worth waking: about 40 µs of work."""
DECODED = (torch.bfloat16, torch.float16, torch.float32)


class TokenGroups:
    """A step's tokens in groups that attend together, made once for each size of sliding window."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._groups: dict[tuple[int | None, bool], list[TokenGroup]] = {}

    def of(
        self, metadata: AttentionMetadata, window: int | None, like: Tensor, prompts_only: bool = False
    ) -> list[TokenGroup]:
        """like: a tensor with the dtype and device of queries, which are the same in every layer."""
        if metadata is not self._metadata:
            self._metadata, self._groups = metadata, {}
        key = window, prompts_only
        if key not in self._groups:
            host = on_host(metadata)
            if metadata.batch_invariance == "tuned":
                decoding = [] if prompts_only else _decoding(host, window, like)
                self._groups[key] = [*decoding, *_prompts(host, window, like)]
            else:
                self._groups[key] = _one_by_one(host, window, like)
        return self._groups[key]


def _decoding(host: HostMetadata, window: int | None, like: Tensor) -> list[TokenGroup]:
    if not host.num_decodes:
        return []
    table, seq_lens = host.block_table[: host.num_decodes], host.seq_lens[: host.num_decodes]
    return reference.decode_groups(table, seq_lens, host.page_size, window, like)


def _prompts(host: HostMetadata, window: int | None, like: Tensor) -> list[TokenGroup]:
    return [
        reference.prefill_group(
            chunk.first_token, chunk.start, chunk.count, chunk.pages, host.page_size, window, like
        )
        for chunk in host.requests(host.num_decodes)
    ]


def _one_by_one(host: HostMetadata, window: int | None, like: Tensor) -> list[TokenGroup]:
    """Return a group for each token: the shape of torch's product then depends only on the length of the
    token's context, not on whether the token belongs to a prompt or was decoded."""
    return [
        reference.prefill_group(
            request.first_token + index,
            request.start + index,
            1,
            request.pages,
            host.page_size,
            window,
            like,
        )
        for request in host.requests()
        for index in range(request.count)
    ]


class CpuLayerKV:
    """One layer's pages, [pages, P, H_kv, D]."""

    def __init__(self, stored: StoredPages, workspaces: Workspaces):
        self.stored = stored
        self._groups = workspaces.get(TokenGroups, TokenGroups)
        self._gathered = workspaces.get(GatheredPages, lambda: (GatheredPages(), GatheredPages()))
        self._decoder = _decoder(stored, workspaces)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        host, padded = on_host(metadata), query.shape[0]
        if sinks is not options.sinks:
            options = replace(options, sinks=sinks)
        decodes = host.num_decodes if self._decoder and metadata.batch_invariance == "tuned" else 0
        if not decodes:
            output = self._by_reference(query, key, value, metadata, options, slice(0, host.num_tokens))
            return with_padding(output, padded)
        assert self._decoder is not None
        if decodes == padded:
            return self._decoder.attend(query, key, value, host, options)
        first = slice(0, decodes)
        output = query.new_zeros(padded, query.shape[1], value.shape[2])
        output[first] = self._decoder.attend(query[first], key[first], value[first], host, options)
        if decodes < host.num_tokens:
            prompts = slice(decodes, host.num_tokens)
            output[prompts] = self._by_reference(query, key, value, metadata, options, prompts)
        return output

    def decode_call(self, heads: "MergedHeads", options: AttentionOptions) -> Call | None:
        """Return the compiled call that does the same for steps in which all requests decode; None if there
        is none.
        """
        if self._decoder is None or options.sinks is not None:
            return None
        return self._decoder.call(heads, options)

    def _by_reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        tokens: slice,
    ) -> Tensor:
        """Return the output of `tokens`, which are all tokens without padding, or prompt tokens only."""
        stored, slots = self.stored, metadata.slot_mapping[tokens]
        reference.append(stored.key_pages, key[tokens], slots, stored.key_scale)
        reference.append(stored.value_pages, value[tokens], slots, stored.value_scale)
        groups = self._groups.of(metadata, options.sliding_window, query, prompts_only=tokens.start > 0)
        options = replace(options, key_scale=stored.key_scale, value_scale=stored.value_scale)
        pages = stored.key_pages, stored.value_pages
        output = reference.attend(query[: tokens.stop], *pages, groups, options, self._gathered)
        return output[tokens]


class _Decoder:
    """Decoding over one layer's pages by the compiled kernel."""

    def __init__(self, stored: StoredPages, workspaces: Workspaces):
        # Imported only where it is needed: importing numba takes half a second.
        from ...kernels.attention.paged import cpu_decode

        self._dtype = stored.key_pages.dtype
        self._kernel = cpu_decode.decode_kernel(self._dtype)
        self._call_of = cpu_decode.decode_call
        self._layer = cpu_decode.layer_numbers(stored.key_pages, stored.value_pages)
        self._layer_at = self._layer.ctypes.data
        self._heads, self._value_dim = stored.value_pages.shape[2:]
        self._threads = workspaces.get(Threads, Threads)

    def call(self, heads: "MergedHeads", options: AttentionOptions) -> Call | None:
        if heads.dtype is not self._dtype:
            return None
        scale, cap = float(options.scale), float(options.softcap or 0.0)
        return self._call_of(self._layer, heads, options.window, scale, cap, WORTH_A_THREAD)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        host: HostMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend for one token of each request: query [B, H, D], key [B, H_kv, D], value [B, H_kv, D_v]."""
        # The kernel gets addresses, so nothing else would notice another dtype.
        if not query.dtype is key.dtype is value.dtype is self._dtype:
            raise TypeError(f"pages of {self._dtype} take no {query.dtype}, {key.dtype} and {value.dtype}")
        count, units = query.shape[0], query.shape[0] * self._heads
        query, key, value = by_token(query), by_token(key), by_token(value)
        output = query.new_empty(count, query.shape[1], self._value_dim)
        table, lengths = host.block_table, host.seq_lens
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        before = (
            *(self._layer_at, query.data_ptr(), key.data_ptr(), value.data_ptr()),
            *(output.data_ptr(), query.stride(0), key.stride(0), value.stride(0)),
            query.shape[1] // self._heads,
            *(
                table.ctypes.data,
                table.strides[0] // table.itemsize,
                lengths.ctypes.data,
                count,
                options.window,
            ),
            0 if sinks is None else sinks.data_ptr(),
        )
        behind = options.scale, options.softcap or 0.0
        shares = min(units, torch.get_num_threads())
        if shares > 1:
            shares = max(1, min(shares, int(lengths[:count].sum()) * self._heads // WORTH_A_THREAD))
        if shares == 1:
            self._kernel(*before, 0, units, *behind)
            return output
        cuts = [units * share // shares for share in range(shares + 1)]
        self._threads.call(
            [partial(self._kernel, *before, *cuts[at : at + 2], *behind) for at in range(shares)]
        )
        return output


def _decoder(stored: StoredPages, workspaces: Workspaces) -> _Decoder | None:
    """Return None if the reference has to decode: numbers of eight bits, or heads that the kernel does not
    take.
    """
    key_pages, value_pages = stored.key_pages, stored.value_pages
    dims = key_pages.shape[3], value_pages.shape[3]
    if stored.key_scale is not None or key_pages.dtype not in DECODED or any(dim % 16 for dim in dims):
        return None
    return _Decoder(stored, workspaces)


def with_padding(output: Tensor, padded: int) -> Tensor:
    """Pad the output [T, H, D] with rows of zeros to `padded` tokens."""
    padding = padded - len(output)
    return torch.cat([output, output.new_zeros(padding, *output.shape[1:])]) if padding else output


def on_host(metadata: AttentionMetadata) -> HostMetadata:
    """Return the metadata in host memory, which every step on the CPU has."""
    if metadata.host is None:
        raise TypeError("pages on the CPU take metadata in host memory")
    return metadata.host
