"""The load generator: a closed loop at concurrency M, and what its clients saw."""

from .generator import run_load
from .spec import LoadResult, LoadSpec, MetricsSample, RequestRecord, percentile

__all__ = ["LoadResult", "LoadSpec", "MetricsSample", "RequestRecord", "percentile", "run_load"]
