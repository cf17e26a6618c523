"""What a server calls its figures is said by its engine, and everything that reads them asks there."""

from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scalegate.serving_check.adapters.prometheus_text import labels_of, parse_metrics
from scalegate.serving_check.adapters.series import SCALEGATE_SERIES, VLLM_SERIES, Series
from scalegate.serving_check.checks.compilations import compilations
from scalegate.serving_check.checks.kv_capacity import kv_cache_tokens, request_memory
from scalegate.serving_check.checks.loads import packed_layers, packed_on
from scalegate.serving_check.checks.reached import most_running
from scalegate.serving_check.engine.request import EngineCapacity, EngineStats, StepTimes
from scalegate.serving_check.evidence.request_memory import RequestMemory
from scalegate.serving_check.server.metrics import Metrics
from scalegate.serving_check.workload.engine_work import EngineWork

STATES = {"mamba2 float32": 8192, "short_convolution bfloat16": 256}
NAMED = [field.name for field in fields(Series) if field.default is None]
"""The figures that have a series."""
THEIRS = Series(**{figure: f"toy_{figure}" for figure in NAMED})


@pytest.fixture
def text() -> str:
    """Our server's `/metrics` after three steps on a GPU."""
    metrics = Metrics()
    metrics.jit_monitor = "warn"
    metrics.capacity = EngineCapacity(8, 100, 16, "fp8", {"swap_ab 64x64": 2}, "H200", 4096, 512, STATES)
    times = StepTimes(0.3, 0.1, 0.2, 0.05)
    metrics.observe_stats(EngineStats(2, 1, 0.5, 4, 70, 30, 3, times, 6, running_by_step=(2, 2, 1)))
    return metrics.text().decode()


def renamed(text: str) -> dict[str, float]:
    for figure in NAMED:
        text = text.replace(f"\n{getattr(SCALEGATE_SERIES, figure)}{{", f"\ntoy_{figure}{{")
    return parse_metrics(text)


def test_our_server_has_every_series_that_our_engine_names(text: str):
    there = {sample.partition("{")[0] for sample in parse_metrics(text)}
    assert {getattr(SCALEGATE_SERIES, figure) for figure in NAMED} <= there


def test_every_reader_goes_by_the_names_it_is_given(text: str):
    ours, theirs = parse_metrics(text), renamed(text)
    assert packed_on(ours) == "H200"
    assert request_memory(ours) == RequestMemory(16, 4096, 512, STATES)
    for read in (compilations, kv_cache_tokens, request_memory, packed_layers, packed_on, most_running):
        assert read(theirs, THEIRS) == read(ours) is not None
        assert read(theirs) is None, "the names were still ours"
    work = EngineWork.between({}, theirs, THEIRS)
    assert work == EngineWork.between({}, ours)
    assert (work.steps, work.waiting_mean, work.device_idle_share) == (3, 2, pytest.approx(0.2))


def test_what_an_engine_has_no_name_for_is_not_known(text: str):
    samples = parse_metrics(text)
    for read in (compilations, request_memory, packed_layers, packed_on, most_running):
        assert read(samples, VLLM_SERIES) is None
    assert kv_cache_tokens(samples, VLLM_SERIES) == 1600
    assert EngineWork.between({}, samples, Series()) == EngineWork()


def test_our_reader_agrees_with_prometheus_own(text: str):
    theirs = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    ours = {
        (name.partition("{")[0], tuple(sorted(labels_of(name).items()))): value
        for name, value in parse_metrics(text).items()
    }
    assert ours == theirs and len(ours) > 50
