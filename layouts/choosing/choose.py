"""Which layout serves a layer: by measurement where there is one, else by the order of preference.

The objective, for each distinct layer shape: among the layouts that nowhere lose more than LOSS_BOUND to the
unquantized product, the one with the highest geometric mean, over the gate's Ms, of its speed as a multiple
of the unquantized product's. Where every layout loses more than that somewhere, the one that loses least at
its worst M, because that M is where a gate would decide. Layouts within TIE_MARGIN of the best count as
equal, and the first of them in the order of preference is taken, so that noise does not change the pick.

On a GPU every layout but the default and a forced one may take SHAPE_SECONDS for a shape, and
PREPARATION_SECONDS over all shapes of one choice, to pack and to compile and tune its kernels. From the shape
at which it takes longer on it is refused, and the plan says so.

One layout serves a shape at every M: two would need both packings in memory. A layout may switch kernels by
bucket of M inside its own `matmul`.
"""

from collections.abc import Mapping, Sequence

import torch

from ...base.errors import UserError
from ...base.installed import kernel_versions
from ...base.log import logger
from ...base.progress import progress_bar
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import ExpertsLayout, Problem
from .explain import lowest_ratio, mean_ratio
from .measure import ShapeMeasurements, measure
from .measurement_cache import cached, store
from .plan import LayoutPlan, ShapeChoice, device_name

LOSS_BOUND = 0.05
"""How much slower than the unquantized product a layout may be at an M and still be chosen for its mean."""
TIE_MARGIN = 0.03
SHAPE_SECONDS, PREPARATION_SECONDS = 10.0, 20.0
"""With a layout that takes all of it, one that fails at once, and the timing, a choice for an 8B model stays
below a minute."""

DEFAULT_MS = (1, 2, 4, 8, 16, 32)
CUDA_MS = (*DEFAULT_MS, 64, 128)


def default_ms(device: torch.device) -> tuple[int, ...]:
    """The Ms to measure at where the user names none: those of the gate."""
    return CUDA_MS if device.type == "cuda" else DEFAULT_MS


def ms_to_measure(asked: Sequence[int] | None, device: torch.device) -> tuple[int, ...]:
    """Those asked for, or the device's own, ascending. UserError where one is no number of requests."""
    ms = tuple(sorted(set(asked or default_ms(device))))
    if ms[0] < 1:
        raise UserError(f"M={ms[0]}: M is a number of requests, so 1 or more")
    return ms


def default_layout(problem: Problem) -> str:
    """The first layout, in the order of preference, that serves the problem; nothing is measured.

    UserError where there is none, as for formats that have no batch-invariant kernel.
    """
    for name, layout in LAYOUTS.items():
        if layout.refuses(problem) is None:
            return name
    advice = "" if problem.batch_invariance == "tuned" else "; leave --batch-invariance out"
    raise UserError(f"no layout serves {problem!s} on {problem.device.type}{advice}")


def forced_for(force: str | None, problem: Problem) -> str | None:
    """`force` where it applies to the problem, else None: a layout of dense layers is not for experts."""
    if force is None or isinstance(LAYOUTS[force], ExpertsLayout) != (problem.experts is not None):
        return None
    return force


def refuse_impossible(force: str, problems: Mapping[str, Problem]) -> None:
    """UserError where `force` refuses a problem that it applies to, or where it applies to none of them."""
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
    """A layout for every distinct problem, from measurements of all that serve it.

    problems: by module name, all on one device
    ms:       None takes `default_ms`
    force:    the layout to record for dense layers, or for experts where it is one of theirs, whatever the
              measurements say; they are taken and kept all the same
    fresh:    measure again what is in the cache
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
            logger.debug(f"{choice.shape}: {choice.layout}, {choice.reason}")
            choices.append(choice)
    return LayoutPlan(device_name(device), kernel_versions(), tuple(choices))


def pick(
    shape: str, modules: tuple[str, ...], found: ShapeMeasurements, force: str | None = None
) -> ShapeChoice:
    """The choice for one shape, by the objective above; pure arithmetic on the measurements."""
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
    """The first name, in the order of preference, whose score is within TIE_MARGIN of the best."""
    best = max(score.values())
    return next(name for name in LAYOUTS if score.get(name, 0.0) >= best * (1 - TIE_MARGIN))
