"""Has what compiles for each shape or M compiled before anything is timed, in many processes at once.

Some layouts' kernels are generated at the first call, tens of them; their packages keep the machine code on
disk, where the process that measures finds it. What a package tunes by timing is called once here, and tuned
in that process, alone on the GPU. What is not ready in the seconds allowed is told by name.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from scalegate.layouts.formats.weight_format import WeightFormat


@dataclass(frozen=True)
class Job:
    """One layout at one shape and M, in bfloat16."""

    layout: str
    n: int
    k: int
    m: int
    spec: WeightFormat

    def __str__(self) -> str:
        return f"{self.layout} {self.n}x{self.k} M={self.m}"


def compile_ahead(jobs: Iterable[Job], seconds: float) -> dict[Job, str]:
    """Call each job's product once; the jobs that are not ready after so many seconds, and why."""
    started = time.perf_counter()
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))
    pending: dict[Future[float], Job] = {pool.submit(call_once, job): job for job in jobs}
    late: dict[Job, str] = {}
    count = len(pending)
    while pending and time.perf_counter() - started < seconds:
        done, _ = wait(pending, timeout=1.0, return_when="FIRST_COMPLETED")
        for future in done:
            job = pending.pop(future)
            error = future.exception()
            if error is not None:
                late[job] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            told = late.get(job) or f"compiled in {future.result():.0f} s"
            print(
                f"{job.layout} {job.n}x{job.k} M={job.m}: {told} ({count - len(pending)}/{count})", flush=True
            )
    for future, job in pending.items():
        future.cancel()
        late[job] = f"not compiled within {seconds:.0f} s"
        print(f"{job}: {late[job]}", flush=True)
    if pending:
        for process in multiprocessing.active_children():
            process.terminate()
    pool.shutdown(wait=not pending, cancel_futures=True)
    return late


def call_once(job: Job) -> float:
    """Seconds until the product was there."""
    import torch
    from scalegate.layouts.packing.all_layouts import LAYOUTS
    from scalegate.tests.bench.kernels.linear import random_weight

    started = time.perf_counter()
    device = torch.device("cuda")
    tune_with(called_once)
    weight = random_weight(job.spec, job.n, job.k, device)
    packed = LAYOUTS[job.layout].pack(weight, torch.bfloat16)
    x = torch.randn(job.m, job.k, device=device, dtype=torch.bfloat16)
    LAYOUTS[job.layout].matmul(x, packed)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def tune_with(benchmark: Callable[..., list[float]]) -> None:
    """Have Triton's autotuners time what they choose from by this, as by `triton.testing.do_bench`."""
    import triton

    triton.runtime.driver.active.get_benchmarker = lambda: benchmark


def tune_for(milliseconds: float) -> None:
    """Have them time each of their kernels for about so long; Triton's own is 125 ms."""
    import triton

    tune_with(partial(triton.testing.do_bench, warmup=milliseconds / 5, rep=milliseconds))


def called_once(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Takes no time, so that all are called and none is found better."""
    call()
    return [0.0] * len(quantiles)
