"""Why an artifact is slow at some M: from its layout plan or a plan measured now, and from its KV format."""

import functools
from collections.abc import Callable, Mapping

import torch

from ...layouts.choosing.choose import choose
from ...layouts.choosing.plan import KVMeasurement, LayoutPlan
from ...serving_check.checks.diagnosis import diagnose, kv_sentence
from ...serving_check.engine.offline.kv_timing import time_kv_formats
from ...serving_check.engine.options import UNQUANTIZED
from ..conventions.kv_cache import kv_cache_of
from ..machine.device import resolve_dtype
from ..model_loader.attention_shapes import attention_layers_of
from ..model_loader.load_model import problems
from .run import Run


def explainer(run: Run, used: Mapping[str, str]) -> Callable[[int], str]:
    """Explains a slow M from the artifact's plan, or from a plan measured now if the artifact's does not
    cover M.
    """
    recorded = run.manifest.layout_plan if run.manifest else None
    kv_format = kv_cache_of(run.artifact, run.options.kv_cache_dtype).kv_format

    @functools.cache
    def plan() -> LayoutPlan:
        to_serve = problems(run.artifact, resolve_dtype(run.options.dtype), run.options.device)
        if recorded and (found := LayoutPlan.from_json(recorded)).covers(to_serve, used):
            return found
        return choose(to_serve, ms=run.workload.ms, progress=run.progress)

    def explain(m: int) -> str:
        kv = "" if kv_format == UNQUANTIZED else kv_sentence(_time_kv(run, kv_format, m))
        if not used:
            layers = "No layer ran in one of Scalegate's layouts, so none of them is to blame."
            return kv or layers
        found = diagnose(plan(), used, m, run.bounds.throughput_floor)
        return f"{found} {kv}".strip()

    return explain


def _time_kv(run: Run, kv_format: str, m: int) -> KVMeasurement | None:
    """Return the artifact's KV format at M and at the workload's contexts; None if memory does not hold
    that.
    """
    device = torch.device(run.options.device)
    layers = attention_layers_of(run.artifact, resolve_dtype(run.options.dtype), device)
    context = run.workload.input_len + run.workload.output_len
    timed = time_kv_formats(layers, [kv_format], [context], [m], device, progress=False)
    return timed[0] if timed else None
