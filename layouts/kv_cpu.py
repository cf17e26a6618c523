"""KV pages on the CPU, stored and read by the torch reference in `kernels/paged_attention.py`."""

import torch
from torch import Tensor

from ..kernels import paged_attention
from ..kernels.paged_attention import AttentionOptions, TokenGroup
from .attention_metadata import AttentionMetadata, HostMetadata
from .kv_layer import StoredPages, Workspaces


class TokenGroups:
    """A step's tokens in groups that attend together, made by the first layer of each window."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._groups: dict[int | None, list[TokenGroup]] = {}

    def of(self, metadata: AttentionMetadata, window: int | None, like: Tensor) -> list[TokenGroup]:
        """like: a tensor of the query's dtype and device, which are those of every layer."""
        if metadata is not self._metadata:
            self._metadata, self._groups = metadata, {}
        if window not in self._groups:
            self._groups[window] = _groups(_on_host(metadata), window, like)
        return self._groups[window]


def _groups(host: HostMetadata, window: int | None, like: Tensor) -> list[TokenGroup]:
    groups: list[TokenGroup] = []
    decodes, page_size = host.num_decodes, host.page_size
    if decodes:
        table, seq_lens = host.block_table[:decodes], host.seq_lens[:decodes]
        groups += paged_attention.decode_groups(table, seq_lens, page_size, window, like)
    for chunk in host.requests(decodes):
        groups.append(
            paged_attention.prefill_group(
                chunk.first_token, chunk.start, chunk.count, chunk.pages, page_size, window, like
            )
        )
    return groups


class CpuLayerKV:
    """One layer's pages, [pages, P, H_kv, D]."""

    def __init__(self, stored: StoredPages, workspaces: Workspaces):
        self.stored = stored
        self._groups = workspaces.get(TokenGroups, TokenGroups)

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
        count, padding = _on_host(metadata).num_tokens, len(query) - _on_host(metadata).num_tokens
        if padding:
            query, key, value, slots = query[:count], key[:count], value[:count], slots[:count]
        paged_attention.append(stored.key_pages, key, slots, stored.key_scale)
        paged_attention.append(stored.value_pages, value, slots, stored.value_scale)
        output = paged_attention.attend(
            query,
            stored.key_pages,
            stored.value_pages,
            self._groups.of(metadata, options.sliding_window, query),
            options,
            sinks,
            stored.key_scale,
            stored.value_scale,
        )
        if padding:
            output = torch.cat([output, output.new_zeros(padding, *output.shape[1:])])
        return output


def _on_host(metadata: AttentionMetadata) -> HostMetadata:
    if metadata.host is None:
        raise TypeError("pages on the CPU take metadata in host memory")
    return metadata.host
