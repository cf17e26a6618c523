"""Whether warm-up meets every INT4 kernel that serving launches, whatever number of rows a step has."""

import pytest
import torch
from scalegate.kernels.hopper import invariant_config, stream_k_config
from scalegate.serving_check.engine.buckets import (
    LARGEST_GRAPH,
    decode_buckets,
    mixed_buckets,
    mixed_warm_up_buckets,
)
from scalegate.tests.exhaustive import exhaustive_but

CUDA = torch.device("cuda")
SHAPES = {
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "qwen3-4b": [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)],
    "qwen3-8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    "qwen3-8b, apart": [(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)],
    "llama3-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
}
SIZES = [(128, 8192), (8, 256)]
"""Requests that decode together, and prompt tokens in a step."""


def compiled_for(m: int, n: int, k: int, batch_invariant: bool) -> tuple[object, ...]:
    """What a launch for m rows of a weight is compiled for, as far as that depends on m."""
    if batch_invariant:
        return "invariant", *invariant_config.tile_for(m, n, k)
    chosen = stream_k_config.config_for(m, n, k)
    return "tuned", chosen.tile, chosen.head_iters > 0


def launched(ms: list[int], shapes: list[tuple[int, int]], batch_invariant: bool) -> set[tuple[object, ...]]:
    return {compiled_for(m, n, k, batch_invariant) for m in ms for n, k in shapes}


def served(requests: int, chunk: int) -> list[int]:
    """Every number of rows that a step can have once the engine is warm."""
    largest = requests + chunk
    return [
        *(decode_buckets(requests, CUDA) or ()),
        *mixed_buckets(largest),
        *range(LARGEST_GRAPH + 1, largest + 1),
    ]


def met(requests: int, chunk: int) -> list[int]:
    return [
        *(decode_buckets(requests, CUDA) or ()),
        *mixed_warm_up_buckets(requests + chunk),
    ]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("requests", "chunk"), SIZES)
@pytest.mark.parametrize("model", exhaustive_but(SHAPES, "qwen3-8b, apart"))
def test_warm_up_meets_every_kernel_that_serving_launches(model, requests, chunk, batch_invariant):
    wanted = launched(served(requests, chunk), SHAPES[model], batch_invariant)
    assert wanted <= launched(met(requests, chunk), SHAPES[model], batch_invariant)


def test_steps_of_many_rows_have_kernels_that_those_of_few_have_not():
    """What the test above says is not empty."""
    small, shapes = [size for size in met(128, 8192) if size <= 128], SHAPES["qwen3-8b"][:1]
    assert not launched(served(128, 8192), shapes, False) <= launched(small, shapes, False)


@pytest.mark.parametrize(
    ("asked", "buckets"), [((1, 8), (1, 8, 48)), ((16, 64), (16, 48)), (None, (1, 2, 4, *range(8, 49, 8)))]
)
def test_the_largest_bucket_holds_all_requests_and_no_more(asked, buckets):
    assert decode_buckets(48, CUDA, asked) == buckets
