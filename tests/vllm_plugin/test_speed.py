"""A layer is ours if its class of shapes was measured on this kind of GPU and is faster there at every M."""

import json

import pytest
import torch
from scalegate.vllm_plugin.speed import MEASURED, Gpu, decide, measured, shape_class

H100 = Gpu((9, 0), 132)
FORMAT = "int4 g128 sym"
ROWS = (1, 128, 512, 2048)


@pytest.fixture
def rows(tmp_path):
    """A table with a row for [4096, 4096], and ways to change it."""

    def written(*ratios: tuple[float, ...], n: int = 4096, k: int = 4096):
        made = [
            {
                "format": FORMAT, "dtype": "bfloat16", "n": n, "k": k, "m": list(ROWS),
                "ours_us": [10.0] * len(ROWS), "vllm_us": [10.0 * ratio for ratio in each],
                "vllm_kernel": "Theirs",
            }
            for each in ratios
        ]  # fmt: skip
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        gpu = {"gpu": "H100", "capability": [9, 0], "sms": 132, "versions": {}}
        path.write_text(json.dumps({"measurements": [{**gpu, "rows": made}]}))
        return measured(path)

    return written


def ours(rows, n=4096, k=4096, gpu=H100, weight_format=FORMAT, dtype=torch.bfloat16) -> bool:
    return decide(gpu, weight_format, dtype, n, k, rows).ours


def test_faster_at_every_m_is_ours(rows):
    decision = decide(H100, FORMAT, torch.bfloat16, 4096, 4096, rows((1.2, 1.2, 1.1, 0.95)))
    assert decision.ours
    assert "1.20 times as fast as Theirs" in decision.reason


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ((1.5, 0.99, 1.5, 1.1), "0.99 times as fast as Theirs at M=128"),
        ((1.04, 1.04, 1.04, 1.1), "1.04 times as fast as Theirs up to M=128"),
        ((1.5, 1.5, 1.5, 0.89), "0.89 times as fast as Theirs at M=2048"),
        ((1.5, 1.5, 0.97, 0.95), "0.96 times as fast as Theirs beyond M=128"),
    ],
)
def test_slower_at_one_m_is_left_to_vllm(rows, ratios, told):
    decision = decide(H100, FORMAT, torch.bfloat16, 4096, 4096, rows(ratios))
    assert not decision.ours
    assert told in decision.reason


def test_the_slowest_shape_of_a_class_decides(rows):
    assert not ours(rows((1.5,) * 4, (0.9,) * 4), n=4352)
    assert ours(rows((1.5,) * 4, (1.2,) * 4), n=4352)


def test_a_shape_that_was_measured_itself_counts_alone(rows):
    table = {**rows((1.5,) * 4)}
    slower = rows((0.9,) * 4, n=4608)
    for key, found in slower.items():
        table[key] = table[key] + found
    assert ours(table)
    assert not ours(table, n=4608)
    assert not ours(table, n=4352)


def test_what_was_not_measured_is_left_to_vllm(rows):
    table = rows((1.5,) * 4)
    assert ours(table)
    assert ours(table, n=5120, k=3584), "of the same class of shapes"
    assert not ours(table, n=8192)
    assert not ours(table, k=1024)
    assert not ours(table, weight_format="int4 g32 sym")
    assert not ours(table, dtype=torch.float16)
    assert not ours(table, gpu=Gpu((9, 0), 114))
    assert not ours(table, gpu=Gpu((10, 0), 132))


def test_a_class_is_the_nearest_powers_of_two():
    assert shape_class(4096, 12288) == (12, 14)
    assert shape_class(6144, 2560) == (13, 11)


def test_the_table_of_the_wheel_can_be_read():
    for row in (row for found in measured(MEASURED).values() for row in found):
        assert len(row.m) == len(row.ours_us) == len(row.vllm_us)
        assert min(row.ours_us + row.vllm_us) > 0
