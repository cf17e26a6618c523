"""KV pages on the CPU, stored and read by the torch reference in `kernels/attention/reference.py`."""

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.attention import reference
from ...kernels.attention.options import AttentionOptions
from ...kernels.attention.reference import GatheredPages, TokenGroup
from .attention_metadata import AttentionMetadata, HostMetadata
from .layer import StoredPages, Workspaces


class TokenGroups:
    """A step's tokens in groups that attend together, made once for each size of sliding window."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._groups: dict[int | None, list[TokenGroup]] = {}

    def of(self, metadata: AttentionMetadata, window: int | None, like: Tensor) -> list[TokenGroup]:
        """like: a tensor with the dtype and device of queries, which are the same in every layer."""
        if metadata is not self._metadata:
            self._metadata, self._groups = metadata, {}
        if window not in self._groups:
            host = on_host(metadata)
            if metadata.batch_invariance == "tuned":
                self._groups[window] = [*_decoding(host, window, like), *_prompts(host, window, like)]
            else:
                self._groups[window] = _one_by_one(host, window, like)
        return self._groups[window]


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
    """A group for each token, so that the shape of torch's product depends only on the token's context, and
    not on whether the token is of a prompt or was decoded."""
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        stored, slots = self.stored, metadata.slot_mapping
        count, padded = on_host(metadata).num_tokens, query.shape[0]
        if count < padded:
            query, key, value, slots = query[:count], key[:count], value[:count], slots[:count]
        reference.append(stored.key_pages, key, slots, stored.key_scale)
        reference.append(stored.value_pages, value, slots, stored.value_scale)
        groups = self._groups.of(metadata, options.sliding_window, query)
        options = replace(options, sinks=sinks, key_scale=stored.key_scale, value_scale=stored.value_scale)
        pages = stored.key_pages, stored.value_pages
        output = reference.attend(query, *pages, groups, options, self._gathered)
        return with_padding(output, padded) if count < padded else output


def with_padding(output: Tensor, padded: int) -> Tensor:
    """output [T, H, D], padded with rows of zeros to `padded` tokens."""
    padding = padded - len(output)
    return torch.cat([output, output.new_zeros(padding, *output.shape[1:])]) if padding else output


def on_host(metadata: AttentionMetadata) -> HostMetadata:
    """The metadata in host memory, which every step on the CPU has."""
    if metadata.host is None:
        raise TypeError("pages on the CPU take metadata in host memory")
    return metadata.host
