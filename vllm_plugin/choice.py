"""Which of our layouts serves one of vLLM's layers, if any."""

from dataclasses import dataclass

from ..layouts.formats.int4 import Int4
from ..layouts.formats.int8 import Int8
from ..layouts.formats.nvfp4 import NVFP4
from ..layouts.packing.grouped_experts import GroupedInt4, GroupedNVFP4
from ..layouts.packing.hopper import HopperLayout
from ..layouts.packing.int8_swap_ab import INT8_SWAP_AB, INT8_SWAP_AB_INVARIANT
from ..layouts.packing.layout import ExpertsLayout, Problem
from ..layouts.packing.nvfp4_swap_ab import NVFP4_SWAP_AB, NVFP4_SWAP_AB_INVARIANT
from ..layouts.packing.swap_ab import SWAP_AB, SWAP_AB_INVARIANT
from .speed import Decision, Gpu, Rows, decide

TUNED: dict[type, HopperLayout] = {Int4: SWAP_AB, Int8: INT8_SWAP_AB, NVFP4: NVFP4_SWAP_AB}
INVARIANT: dict[type, HopperLayout] = {
    Int4: SWAP_AB_INVARIANT,
    Int8: INT8_SWAP_AB_INVARIANT,
    NVFP4: NVFP4_SWAP_AB_INVARIANT,
}
EXPERTS: dict[type, ExpertsLayout] = {Int4: GroupedInt4(), NVFP4: GroupedNVFP4()}
LAYOUTS = {layout.name: layout for layouts in (TUNED, INVARIANT) for layout in layouts.values()}


@dataclass(frozen=True)
class Choice:
    """The choice for one layer: `layout` is None if the layer is left to vLLM, and `reason` is for vLLM's
    log.
    """

    layout: HopperLayout | None
    reason: str


def choose(problem: Problem, rows: Rows) -> Choice:
    """Return the layout for a layer, if it serves the problem and is faster than vLLM's own kernel on this
    GPU.

    If batch invariance is requested, speed does not count: vLLM's own kernels for the plugin's formats are
    not batch-invariant.
    """
    invariant = problem.batch_invariance != "tuned"
    layout = (INVARIANT if invariant else TUNED)[type(problem.spec)]
    reason = "batch-invariant"
    if not invariant:
        gpu = Gpu.of(problem.device)
        decision = decide(gpu, problem.spec.key, problem.dtype, problem.n, problem.k, rows)
        if not decision.ours:
            return Choice(None, decision.reason)
        reason = decision.reason
    # Last, since it may compile a kernel to see whether it runs.
    refusal = problem.spec.refuses(problem.n, problem.k) or layout.refuses(problem)
    return Choice(layout, reason) if refusal is None else Choice(None, refusal)


def choose_experts(problem: Problem, rows: Rows) -> Decision:
    """Decide whether our products serve a layer of experts and are faster than vLLM's own, by measurements
    with as many experts and as many experts per token.
    """
    kind = f"{problem.spec.key} ({problem.experts})"
    decision = decide(Gpu.of(problem.device), kind, problem.dtype, problem.n, problem.k, rows)
    if not decision.ours:
        return decision
    refusal = problem.spec.refuses(problem.n, problem.k) or EXPERTS[type(problem.spec)].refuses(problem)
    return decision if refusal is None else Decision(False, refusal)
