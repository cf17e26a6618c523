"""The workload generator: a closed loop at concurrency M, an open loop as in use, and the clients'
records.
"""

from .generator import run_workload
from .spec import MetricsSample, RequestRecord, WorkloadResult, WorkloadSpec, percentile

__all__ = ["MetricsSample", "RequestRecord", "WorkloadResult", "WorkloadSpec", "percentile", "run_workload"]
