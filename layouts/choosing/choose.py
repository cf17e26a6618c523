"""Which layout serves a layer: chosen by timing, or by the order of preference if nothing was timed.

For each distinct layer shape, speed is measured relative to the unquantized product, at every M of the gate.
Layouts that are slower than the unquantized product by more than LOSS_BOUND at some M are excluded; of the
others, the one with the highest geometric mean is chosen. If every layout is excluded, the layout that is
least slow at its worst M is chosen, since the gate would decide by that M. Layouts within TIE_MARGIN of the
best count as equal, and the first of them in the order of preference is taken, so that noise does not change
the choice.

On a GPU a layout may take SHAPE_SECONDS for one shape, and PREPARATION_SECONDS for all shapes together, to
pack, compile and tune its kernels. A layout that takes longer is refused from that shape on, and the plan
says so. The default layout and a forced one have no limit.

One layout serves a shape at every M: two would need both packings in memory. A layout may switch kernels by
bucket of M inside its own `matmul`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...base.errors import UserError
from ...base.installed import kernel_versions
from ...base.log import logger
from ...base.progress import progress_bar
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import ExpertsLayout, Problem
from ..packing.trial import DOES_NOT_RUN
from .explain import lowest_ratio, mean_ratio
from .measure import ShapeMeasurements, measure
from .measurement_cache import cached, store
from .plan import LayoutPlan, ShapeChoice, device_name
from .tried import remark

LOSS_BOUND = 0.05
"""How much slower than the unquantized product a layout may be at any M and still be chosen by its mean."""
TIE_MARGIN = 0.03
SHAPE_SECONDS, PREPARATION_SECONDS = 10.0, 20.0
"""With one layout that uses all of it, one that fails at once, and the timing, choosing for an 8B model takes
less than a minute."""

DEFAULT_MS = (1, 2, 4, 8, 16, 32)
CUDA_MS = (*DEFAULT_MS, 64, 128)


def default_ms(device: torch.device) -> tuple[int, ...]:
    """Return the Ms at which layouts are timed if the user names none: the gate's own Ms."""
    return CUDA_MS if device.type == "cuda" else DEFAULT_MS


def ms_to_measure(asked: Sequence[int] | None, device: torch.device) -> tuple[int, ...]:
    """Return the Ms asked for, or the device's defaults, ascending. An M less than 1 raises UserError."""
    ms = tuple(sorted(set(asked or default_ms(device))))
    if ms[0] < 1:
        raise UserError(f"M={ms[0]}: M is a number of requests; give 1 or more")
    return ms


def default_layout(problem: Problem) -> str:
    """Return the first layout, in the order of preference, that serves the problem. Nothing is timed.

    UserError is raised if no layout serves it, for example if a format has no batch-invariant kernel.
    """
    broken = []
    for name, layout in LAYOUTS.items():
        refusal = layout.refuses(problem)
        if refusal is None:
            return name
        if refusal.startswith(DOES_NOT_RUN):
            broken.append(f"; {name} {refusal}")
    advice = "" if problem.batch_invariance == "tuned" else "; leave --batch-invariance out"
    raise UserError(f"no layout serves {problem!s} on {problem.device.type}{''.join(broken)}{advice}")


def forced_for(force: str | None, problem: Problem) -> str | None:
    """Return `force` if it applies to the problem, else None: layouts are for dense layers or for experts."""
    if force is None or isinstance(LAYOUTS[force], ExpertsLayout) != (problem.experts is not None):
        return None
    return force


def refuse_impossible(force: str, problems: Mapping[str, Problem]) -> None:
    """UserError is raised if `force` refuses a problem that it applies to, or applies to none of the
    problems.
    """
    layout = LAYOUTS[force]
    meant = {
        module: problem for module, problem in problems.items() if forced_for(force, problem) is not None
    }
    for module, problem in (meant or problems).items():
        reason = layout.refuses(problem)
        if reason is not None:
            raise UserError(f"layout {force!r} does not serve {module} ({problem!s}): {reason}")


def choose(
    problems: Mapping[str, Problem],
    ms: Sequence[int] | None = None,
    *,
    force: str | None = None,
    fresh: bool = False,
    progress: bool = True,
) -> LayoutPlan:
    """Choose a layout for every distinct problem by timing all layouts that serve it.

    problems: by module name, all on one device
    ms:       None takes `default_ms`
    force:    the layout to choose whatever the timings say, for dense layers or for experts, depending on
              the layout. Everything is timed and recorded all the same
    fresh:    time again what is in the cache
    """
    if not problems:
        raise UserError("there is no quantized linear layer to choose a layout for")
    device = next(iter(problems.values())).device
    ms = ms_to_measure(ms, device)
    if force is not None:
        refuse_impossible(force, problems)
    modules: dict[Problem, list[str]] = {}
    for module, problem in problems.items():
        modules.setdefault(problem, []).append(module)

    layouts = list(LAYOUTS)
    allowance = dict.fromkeys(layouts, PREPARATION_SECONDS) if device.type == "cuda" else {}
    allowance.pop(force or "", None)
    choices = []
    total = len(modules) * len(ms)
    with progress_bar(total=total, desc="measuring layouts", unit="M", shown=progress) as bar:
        for problem, names in modules.items():
            bar.set_postfix_str(f"{problem.n}x{problem.k}")
            found = None if fresh else cached(problem, ms, layouts)
            if found is None:
                default = default_layout(problem)
                limits = {name: seconds for name, seconds in allowance.items() if name != default}
                found = measure(
                    problem,
                    ms,
                    layouts,
                    on_measured=lambda m: bar.update(),
                    allowance=limits,
                    longest=SHAPE_SECONDS,
                )
                allowance |= limits
                store(problem, ms, layouts, found)
            else:
                bar.update(len(ms))
            choice = pick(str(problem), tuple(names), found, forced_for(force, problem))
            choice = replace(choice, reason=choice.reason + remark(LAYOUTS[choice.layout], device))
            logger.debug(f"{choice.shape}: {choice.layout}, {choice.reason}")
            choices.append(choice)
    return LayoutPlan(device_name(device), kernel_versions(), tuple(choices))


def pick(
    shape: str, modules: tuple[str, ...], found: ShapeMeasurements, force: str | None = None
) -> ShapeChoice:
    """Choose a layout for one shape from its measurements, by the rules at the head of this file."""
    measured = ShapeChoice(shape, "", modules, tuple(found.measurements), "", found.refusals)
    layouts = measured.measured_layouts
    if force is not None:
        layout, reason = force, "forced by the user"
        if force not in layouts:
            raise UserError(f"layout {force!r} cannot serve {shape}: {found.refusals.get(force, 'unknown')}")
    else:
        layout, reason = _best(measured, layouts)
    return ShapeChoice(
        shape, layout, modules, measured.measurements, reason, found.refusals, force is not None
    )


def _best(measured: ShapeChoice, layouts: Sequence[str]) -> tuple[str, str]:
    lowest = {layout: lowest_ratio(measured, layout) for layout in layouts}
    sound = [layout for layout in layouts if lowest[layout] >= 1 - LOSS_BOUND]
    if sound:
        score = {layout: mean_ratio(measured, layout) for layout in sound}
        layout = _first_of_the_best(score)
        return layout, (
            f"{score[layout]:.2f}× the unquantized product on average over M, "
            f"at least {lowest[layout]:.2f}× at every M"
        )
    layout = _first_of_the_best(lowest)
    return layout, (
        f"every layout here is more than {LOSS_BOUND:.0%} slower than the unquantized product at some M; "
        f"this one loses least, at least {lowest[layout]:.2f}×"
    )


def _first_of_the_best(score: Mapping[str, float]) -> str:
    """Return the first layout, in the order of preference, whose score is within TIE_MARGIN of the best."""
    best = max(score.values())
    return next(name for name in LAYOUTS if score.get(name, 0.0) >= best * (1 - TIE_MARGIN))
