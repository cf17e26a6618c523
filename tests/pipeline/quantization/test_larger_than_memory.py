"""Quantizing what no memory holds: planning and the first shards of a sparse checkpoint of 38 GB."""

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_memory_and_records_do_not_grow_with_the_checkpoint(tmp_path: Path):
    path = Path(__file__).parents[2] / "bench" / "quantization" / "larger_than_memory.py"
    spec = importlib.util.spec_from_file_location("larger_than_memory", path)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    found = bench.measured(0.02, nbytes=60_000_000, shard_bytes=24 << 20, folder=tmp_path)
    assert found["source_bytes"] > 38e9 and found["tensors"] > 1150
    assert found["read_bytes"] >= 60_000_000
    weights = found["peak_bytes"] - found["imports_peak_bytes"]
    assert weights < 512 << 20, "it holds a block of a weight, and what the headers say"
    # Its name, its shape, the fields of its format and a few numbers, in JSON: ten lines of text.
    assert found["record_bytes_a_weight"] < 800
