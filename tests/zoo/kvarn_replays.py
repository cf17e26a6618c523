"""KVarN's failure in serving, replayed: three KV formats that store what KVarN does, each with a fault of it.

A plugin. KVarN's first code for vLLM (huawei-csl/KVarN, issue 15) gave 80 tokens/s from 8 to 128 requests: it
flushed pages in Python, block by block and head by head, with a host read in each; its side pool let 22
requests run; and a kernel was compiled in mid-serving.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.kvarn.kvarn import KVarN
from scalegate.serving_check.engine.kv_pool import KVPool
from torch import Tensor

FLUSHED_IN_PYTHON, SIDE_POOL, COMPILED = "kvarn_python_flush", "kvarn_side_pool", "kvarn_compiled"
SOUND = KVarN(value_bits=2, group_size=64)
SIDE_POOL_ROWS = 2
ITERATIONS, BLOCKS = 24, 16


class ReplayedStorage:
    """One layer's storage, with something done in every step beside what the sound format does."""

    def __init__(self, sound: Any, beside: Callable[[Any, Any], None]):
        self.sound, self.beside = sound, beside

    def forward(self, query, key, value, metadata, options, sinks) -> Tensor:
        # Not where one text is read alone, which is how quality is measured: it would only take time.
        if metadata.host.num_decodes > 1:
            self.beside(self.sound, metadata)
        return self.sound.forward(query, key, value, metadata, options, sinks)


class ReplayedFormat(KVarN):
    def allocate(self, *arguments: Any) -> ReplayedStorage:
        return ReplayedStorage(super().allocate(*arguments), self.beside)

    def beside(self, layer: Any, metadata: Any) -> None:
        """The fault."""


class FlushedInPython(ReplayedFormat):
    """Normalizes a page that becomes full from Python, block by block and head by head of every request."""

    def beside(self, layer: Any, metadata: Any) -> None:
        for request in metadata.host.requests():
            if (request.start + request.count) % self.group_size:
                continue
            for head in layer.storage.held[request.row, 1].float().flatten(0, 1):
                for block in head.chunk(BLOCKS):
                    spread = block
                    for _ in range(ITERATIONS):
                        rows = spread.std(1, keepdim=True).clamp(1e-3, 1e3)
                        if rows.max().item() / rows.min().item() > 0:
                            spread = spread / rows


class SidePool(ReplayedFormat):
    """Its 16-bit rows are for a few requests only, whatever number may run."""


class CompiledInTraffic(ReplayedFormat):
    """Specializes a kernel on what no two steps have in common."""

    def beside(self, layer: Any, metadata: Any) -> None:
        def _sinkhorn_log_kernel(lengths: Tensor) -> Tensor:
            return lengths * 2

        # New code each time: Dynamo stops compiling what it has compiled too often.
        code = _sinkhorn_log_kernel.__code__.replace()
        torch.compile(types.FunctionType(code, globals()), backend="eager")(torch.ones(1))


def free_rows_of_side_pool(pool: KVPool) -> int:
    free = len(pool._free_rows)
    if not any(getattr(layer, "beside", None) == SIDE.beside for layer in pool.layers.values()):
        return free
    used = len(pool.block_table) - free
    return max(0, SIDE_POOL_ROWS - used)


SIDE = SidePool(SOUND.value_bits, SOUND.group_size)

if __name__.startswith("scalegate_plugin"):
    KV_FORMATS.add(FLUSHED_IN_PYTHON, FlushedInPython(SOUND.value_bits, SOUND.group_size))
    KV_FORMATS.add(SIDE_POOL, SIDE)
    KV_FORMATS.add(COMPILED, CompiledInTraffic(SOUND.value_bits, SOUND.group_size))
    KVPool.free_rows = property(free_rows_of_side_pool)  # type: ignore[method-assign, assignment]
