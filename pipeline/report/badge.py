"""The verdict as a badge: a small self-contained SVG for cards and pages."""

from html import escape

from ...serving_check.evidence.verdict import Verdict

COLOURS = {"pass": "#1b6e3c", "fail": "#b3261e", "inconclusive": "#8a5a00"}
LEFT = "scalegate"
HEIGHT, CHARACTER, PADDING = 20, 6.6, 7
"""Sizes in pixels. Text is stretched to the width that is computed from these, whatever the font is."""


def badge_words(verdict: Verdict) -> str:
    """Return `pass, ≥ 0.98× to M=32`: the status, and the lowest ratio if one was measured."""
    if verdict.speed_not_judged:
        return f"{verdict.status}, speed not judged"
    ratios = [point.ratio for point in verdict.curve if point.ratio is not None]
    if not ratios:
        return verdict.status
    return f"{verdict.status}, ≥ {min(ratios):.2f}× to M={max(point.m for point in verdict.curve)}"


def draw_badge(verdict: Verdict) -> str:
    right = badge_words(verdict)
    label = escape(f"{LEFT}: {right}")
    left_width, right_width = _width(LEFT), _width(right)
    width, colour = left_width + right_width, COLOURS[verdict.status]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{HEIGHT}" role="img" '
        f'aria-label="{label}"><title>{label}</title>'
        f'<rect width="{left_width:g}" height="{HEIGHT}" fill="#555"/>'
        f'<rect x="{left_width:g}" width="{right_width:g}" height="{HEIGHT}" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{_text(LEFT, 0)}{_text(right, left_width)}</g></svg>\n"
    )


def _width(text: str) -> float:
    return round(len(text) * CHARACTER + 2 * PADDING, 1)


def _text(text: str, start: float) -> str:
    length = len(text) * CHARACTER
    return f'<text x="{start + PADDING:g}" y="14" textLength="{length:g}">{escape(text)}</text>'
