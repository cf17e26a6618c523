"""Draws `report.svg`, the README's picture: one checkpoint in two memory layouts, one verdict each.

    python -P docs/pictures/make_report_picture.py --measure WORK    measures first, some ten minutes
    python -P docs/pictures/make_report_picture.py                   draws the recorded verdicts again

Measuring quantizes the bundled checkpoint into the folder WORK and validates it twice: in the layout that was
chosen for it, and with every layer forced into `--slow-layout` (on a GPU: tinygemm). Both verdicts are kept
beside the picture.
"""

import argparse
import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

from scalegate.pipeline.report.curve_picture import Scale, asked_ms, curve_in_words, curve_marks, ratio_span
from scalegate.pipeline.report.headline import headline_of
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.record import judged_again, parse_verdict

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "qwen3-pycode-5m"
RECIPE = HERE.parents[1] / "examples" / "int4-example.yaml"
PICTURE = HERE / "report.svg"
SLOW, CHOSEN = HERE / "report-slow-layout.json", HERE / "report-chosen-layout.json"
SEED = "36"
SLOW_LAYOUT = "cpu_int4"

CARD_WIDTH, CARD_HEIGHT, GAP, MARGIN = 540, 536, 20, 8
CURVE_TOP, CURVE_HEIGHT = 112, 270
LINE, SENTENCE_WIDTH, REASON_WIDTH, REASON_LINES = 22, 47, 72, 6
"""A line's height in pixels, how many letters fit into one, and how many lines a reason gets."""

STYLE = HERE / "report.css"


@dataclass(frozen=True)
class Card:
    """One verdict in the picture."""

    verdict: Verdict
    title: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, metavar="WORK")
    parser.add_argument("--slow-layout", default=SLOW_LAYOUT)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure, arguments.slow_layout)
    slow, chosen = (judged_again(parse_verdict(path)) for path in (SLOW, CHOSEN))
    PICTURE.write_text(draw(slow, chosen), encoding="utf-8")


def measure(work: Path, slow_layout: str) -> None:
    artifact = work / f"{EXAMPLE.name}-int4"
    run("quantize", EXAMPLE, "--recipe", RECIPE, "--out", artifact)
    run("layout", artifact, "--no-kv")
    for record, options in ((CHOSEN, []), (SLOW, ["--layout", slow_layout])):
        report = work / record.stem
        run("validate", artifact, "--seed", SEED, "--report", report, *options, may_fail=True)
        verdict = json.loads((report / "serving_check.json").read_text(encoding="utf-8"))
        record.write_text(json.dumps(verdict, separators=(",", ":")) + "\n", encoding="utf-8")


def run(command: str, *words: object, may_fail: bool = False) -> None:
    status = subprocess.run(
        [sys.executable, "-m", "scalegate.pipeline", command, *map(str, words)]
    ).returncode
    if status != 0 and not (may_fail and status == 1):
        sys.exit(f"pipeline {command} ended with {status}; nothing was drawn")


def draw(slow: Verdict, chosen: Verdict) -> str:
    span = ratio_span([slow, chosen])
    cards = (
        Card(slow, _title(slow, "forced")),
        Card(chosen, _title(chosen, "chosen")),
    )
    width = 2 * CARD_WIDTH + GAP + 2 * MARGIN
    height = CARD_HEIGHT + 2 * MARGIN
    words = " ".join(curve_in_words(card.verdict) for card in cards)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(words)}">\n<style>{STYLE.read_text(encoding="utf-8")}</style>\n'
    ]
    for index, card in enumerate(cards):
        x = MARGIN + index * (CARD_WIDTH + GAP)
        parts.append(f'<g transform="translate({x} {MARGIN})">{_card(card, span)}</g>\n')
    return "".join([*parts, "</svg>\n"])


def _card(card: Card, span: tuple[float, float]) -> str:
    verdict, headline = card.verdict, headline_of(card.verdict)
    mark = {"pass": "✓", "fail": "✕"}.get(verdict.status, "?")
    scale = Scale(CARD_WIDTH - 24, CURVE_HEIGHT, asked_ms(verdict), *span)
    parts = [
        f'<rect class="card" width="{CARD_WIDTH}" height="{CARD_HEIGHT}" rx="10"/>',
        f'<rect class="top {verdict.status}" width="{CARD_WIDTH}" height="5" rx="2"/>',
        f'<text class="status {verdict.status}" x="18" y="34">{mark} {verdict.status.upper()}</text>',
        f'<text class="quiet" x="{CARD_WIDTH - 18}" y="34" text-anchor="end">{escape(card.title)}</text>',
        *_lines("sentence", 62, textwrap.wrap(headline.sentence, SENTENCE_WIDTH)),
        f'<g transform="translate(12 {CURVE_TOP})">{curve_marks(verdict, scale)}</g>',
        *_lines("quiet", CURVE_TOP + CURVE_HEIGHT + 24, _shortened(_reason(verdict))),
    ]
    return "".join(parts)


def _lines(kind: str, top: int, lines: list[str]) -> list[str]:
    return [
        f'<text class="{kind}" x="18" y="{top + index * LINE}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    ]


def _shortened(text: str) -> list[str]:
    return textwrap.wrap(text, REASON_WIDTH, max_lines=REASON_LINES, placeholder=" …")


def _reason(verdict: Verdict) -> str:
    headline = headline_of(verdict)
    if headline.first_failure is not None:
        measured = {point.m for point in verdict.curve}
        stopped = " The gate stopped there." if set(asked_ms(verdict)) - measured else ""
        reason = _sentence_case(headline.first_failure.reason)
        return f"Failed first: {headline.first_failure.name}.{stopped} {reason}"
    quality = next(check for check in verdict.checks if check.name == "quality")
    return f"{headline.score}. Quality: {quality.measured}."


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _title(verdict: Verdict, why: str) -> str:
    """`cpu_int4 (chosen) · AMD EPYC, 2 CPUs · 2026-11-26`."""
    environment, layouts = verdict.environment, " + ".join(verdict.artifact.layouts)
    where = f"{environment.device}, {environment.cpu_count} CPUs"
    return f"{layouts} ({why}) · {where} · {verdict.created[:10]}"


if __name__ == "__main__":
    main()
