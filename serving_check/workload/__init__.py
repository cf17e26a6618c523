"""The workload generator: a closed loop at concurrency M, an open one as in use, and what clients saw."""

from .generator import run_workload
from .spec import MetricsSample, RequestRecord, WorkloadResult, WorkloadSpec, percentile

__all__ = ["MetricsSample", "RequestRecord", "WorkloadResult", "WorkloadSpec", "percentile", "run_workload"]
