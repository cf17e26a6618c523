"""The time of each KV format as a table for a terminal: format × context × M, and which formats are
faster.
"""

from collections.abc import Iterable, Mapping

from ...layouts.choosing.plan import LayoutPlan
from ...layouts.choosing.tried import Tried

NAME_WIDTH, CELL_WIDTH = 24, 14


def kv_table(plan: LayoutPlan, tried: Mapping[str, Tried]) -> str:
    """Return one block of lines per context; empty if KV formats were not timed.

    tried: for each KV format, how its kernels were tried on such a GPU; empty on a CPU
    """
    if not plan.kv:
        return ""
    ms = sorted({timing.m for timing in plan.kv})
    names = list(dict.fromkeys(timing.kv_format for timing in plan.kv))
    lines = [
        f"KV formats on {plan.device}: milliseconds of storing and attending in a decode step, all layers,",
        "and speed as a multiple of the unquantized one",
    ]
    for context in sorted({timing.context for timing in plan.kv}):
        at = {(timing.kv_format, timing.m): timing for timing in plan.kv if timing.context == context}
        baseline = {timing.m: timing.baseline_microseconds for timing in at.values()}
        lines += ["", f"{context:,} tokens".ljust(NAME_WIDTH) + _row(f"M={m}" for m in ms)]
        lines.append(
            "unquantized".ljust(NAME_WIDTH)
            + _row(f"{baseline[m] / 1e3:.2f}   1.00×" if m in baseline else "" for m in ms)
        )
        lines += [
            name.ljust(NAME_WIDTH)
            + _row(
                f"{at[name, m].microseconds / 1e3:.2f} {at[name, m].ratio:6.2f}×" if (name, m) in at else ""
                for m in ms
            )
            for name in names
        ]
    left_out = ", ".join(f"{context:,} tokens at M={m}" for context, m in plan.kv_left_out)
    lines += ["", f"No memory to time {left_out}"] if left_out else []
    how = [f"  {name}: {how}" for name, how in tried.items()]
    how = ["", "How the kernels of KV formats were tried on such a GPU before:", *how] if tried else []
    return "\n".join([*lines, "", *pays(plan), *how])


def pays(plan: LayoutPlan) -> list[str]:
    """Return, for each format, the contexts from which on it is no slower than unquantized, by M."""
    said = []
    for name in dict.fromkeys(timing.kv_format for timing in plan.kv):
        from_m = {m: plan.pays_from(name, m) for m in sorted({timing.m for timing in plan.kv})}
        words = [f"{context:,} tokens on at M={m}" for m, context in from_m.items() if context is not None]
        nowhere = [f"M={m}" for m, context in from_m.items() if context is None]
        text = f"{name} pays from {', '.join(words)}" if words else f"{name} pays nowhere"
        said.append(text + (f"; not at {', '.join(nowhere)}" if words and nowhere else ""))
    return said


def _row(cells: Iterable[str]) -> str:
    return "".join(cell.rjust(CELL_WIDTH) for cell in cells)
