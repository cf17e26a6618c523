"""The report page in a real Chromium: what is seen before scrolling, colours, clicks, keys, print."""

import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from scalegate.pipeline.report.write import render_report
from scalegate.serving_check.evidence.evidence import ScoredText
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.tests.exhaustive import exhaustive_but

from ...serving_check.gate_samples import sample_evidence, sample_verdict
from .chromium import Page, find_chromium

BROWSER = find_chromium()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed; on Debian: apt-get install chromium"
)

PASSING = {1: 1.42, 2: 1.35, 4: 1.2, 8: 1.08, 16: 1.0, 32: 0.96}
FAILING = {1: 1.4, 2: 1.3, 4: 1.02, 8: 0.6, 16: 0.45, 32: 0.4}
MARKUP = (
    "<script>window.intruded = 1</script><img src=x onerror='window.intruded = 1'>\"'>\u202e</style></script>"
)
SCREENS = [(1300, 900), (400, 850)]
SCHEMES = ["light", "dark"]
LEAST_CONTRAST = 4.5
"""WCAG 2.1, level AA, of text."""
SHOTS = os.environ.get("SCALEGATE_SCREENSHOTS")
"""A folder for pictures of what the tests see."""

CONTRASTS = """
(() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const own = element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const silent = ["SCRIPT", "STYLE", "NOSCRIPT", "title"];
  return [...document.querySelectorAll("body *")].filter(own)
    .filter(element => element.checkVisibility() && !silent.includes(element.tagName))
    .map(element => {
      const style = getComputedStyle(element), drawn = element instanceof SVGElement;
      const [one, other] = [light(channels(drawn ? style.fill : style.color)), light(behind(element))];
      return [(Math.max(one, other) + .05) / (Math.min(one, other) + .05), element.textContent.slice(0, 40)];
    });
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert BROWSER is not None
    opened = Page(BROWSER, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a pass, of a fail, and of a checkpoint that says hostile things."""
    passed = sample_verdict(PASSING)
    hostile = replace(
        sample_verdict(
            FAILING,
            evidence=sample_evidence(FAILING, canary=(ScoredText((1,), MARKUP, 0.5),)),
            artifact=replace(passed.artifact, name=MARKUP, quantization=MARKUP),
        ),
        command=MARKUP,
    )
    verdicts = {"pass": passed, "fail": sample_verdict(FAILING), "hostile": hostile}
    folder = tmp_path_factory.mktemp("pages")
    return {name: _write(verdict, folder / f"{name}.html") for name, verdict in verdicts.items()}


def _write(verdict: Verdict, path: Path) -> Path:
    path.write_bytes(render_report(verdict)["report.html"])
    return path


def bottom(page: Page, selector: str) -> float:
    found = json.dumps(selector)
    shown = f"[...document.querySelectorAll({found})].find(each => each.checkVisibility())"
    return page.evaluate(f"{shown}.getBoundingClientRect().bottom")


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    exhaustive_but(
        ((name, *size, scheme) for name in ("pass", "fail") for size in SCREENS for scheme in SCHEMES),
        ("pass", 1300, 900, "light"),
        ("fail", 400, 850, "dark"),
    ),
)
def test_verdict_and_curve_are_seen_before_scrolling_and_everything_can_be_read(
    page: Page, written: dict[str, Path], name: str, width: int, height: int, scheme: str
):
    page.open(written[name], width, height, scheme)
    shot = page.screenshot()
    if SHOTS:
        (Path(SHOTS) / f"{name}-{width}-{scheme}.png").write_bytes(shot)
    first = "h1", "svg.curve", *([".decided"] if width > 700 else [".decided h2"])
    assert all(bottom(page, selector) <= height for selector in first)
    words = page.evaluate("document.querySelector('h1').innerText")
    assert ("keeps up with" in words) == (name == "pass") and ("falls behind" in words) == (name == "fail")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    faint = [found for found in page.evaluate(CONTRASTS) if found[0] < LEAST_CONTRAST]
    assert not faint
    brightness = sum(Image.open(io.BytesIO(shot)).convert("L").resize((1, 1)).tobytes())
    assert (brightness < 80) if scheme == "dark" else (brightness > 200)
    assert page.requested() == [] and page.complaints() == []


def test_faint_text_would_be_found(page: Page, written: dict[str, Path]):
    page.open(written["pass"], 1300, 900)
    page.evaluate("document.querySelector('h1').style.color = '#bbb'")
    assert any(contrast < LEAST_CONTRAST for contrast, _ in page.evaluate(CONTRASTS))


def test_what_failed_first_stands_beside_the_curve_and_leads_to_the_others(
    page: Page, written: dict[str, Path]
):
    page.open(written["fail"], 1300, 900)
    assert "throughput" in page.evaluate("document.querySelector('.decided').innerText")
    page.click(".decided a")
    assert page.evaluate("location.hash.startsWith('#check-')")
    assert page.evaluate("document.querySelector(location.hash).innerText.includes('latency')")
    page.open(written["pass"], 1300, 900)
    assert "What failed first" not in page.evaluate("document.body.innerText")


def test_buttons_and_dots_answer_to_the_mouse(page: Page, written: dict[str, Path]):
    page.open(written["fail"], 1300, 900)
    dots = "document.querySelectorAll('.block').length"
    said = "document.getElementById('curves-words').textContent"
    every = page.evaluate(dots)
    page.point_at(".block")
    assert page.evaluate(said).startswith("M=1, block 1 of 12")
    page.click("#curves-controls [aria-label=Figure] button:nth-child(2)")
    assert page.evaluate(dots) == 2 * every
    page.click("#curves-controls .side.baseline")
    assert page.evaluate(dots) == every
    page.click("#curves-controls [aria-label=M] button:nth-child(3)")
    assert page.evaluate(dots) == every / len(FAILING)
    pressed = page.evaluate(
        "[...document.querySelectorAll('[aria-pressed=true]')].map(each => each.innerText)"
    )
    assert pressed == ["output tokens per second", "artifact", "M = 2"]
    page.click("details summary")
    assert page.evaluate("document.querySelector('details').open")


def test_the_dots_can_be_read_with_the_keyboard(page: Page, written: dict[str, Path]):
    page.open(written["fail"], 1300, 900)
    page.evaluate("document.getElementById('curves-chart').focus()")
    for key, block in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.press(key)
        words = page.evaluate("document.getElementById('curves-words').textContent")
        assert words.startswith(f"M=1, block {block} of 12")


def test_without_scripts_it_still_answers(page: Page, written: dict[str, Path]):
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(written["fail"], 1300, 900)
    finally:
        page.send("Emulation.setScriptExecutionDisabled", value=False)
    assert page.evaluate("document.getElementById('curves').checkVisibility()") is False, "no dead buttons"
    assert page.evaluate("document.querySelector('svg.curve.wide').checkVisibility()") is True
    assert page.evaluate(
        "[...document.querySelectorAll('noscript img')].every(each => each.naturalWidth > 0)"
    )
    assert page.evaluate("document.querySelectorAll('noscript img').length") == 3


def test_markup_in_names_and_texts_is_shown_and_never_run(page: Page, written: dict[str, Path]):
    page.open(written["hostile"], 400, 850)
    assert page.evaluate("window.intruded") is None
    assert "<script>window.intruded" in page.evaluate("document.querySelector('h1').innerText")
    assert page.evaluate("document.querySelectorAll('script').length") == 2, "the page's own"
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.requested() == [] and page.complaints() == []


def test_a_script_that_got_in_would_not_run(page: Page, written: dict[str, Path], tmp_path: Path):
    text = written["pass"].read_text(encoding="utf-8")
    attack = "<script>window.intruded = 1</script><img src=x onerror='window.intruded = 1'>"
    path = tmp_path / "attacked.html"
    path.write_text(text.replace("<main>", f"<main>{attack}"), encoding="utf-8")
    page.open(path, 1300, 900)
    assert page.evaluate("window.intruded") is None
    assert page.evaluate("document.querySelectorAll('.block').length") > 0, "the page's own did"
    assert any("Content Security Policy" in complaint for complaint in page.complaints())


@pytest.mark.parametrize("name", exhaustive_but(["pass", "fail"], "fail"))
def test_it_prints_on_a_few_pages_black_on_white(page: Page, written: dict[str, Path], name: str):
    page.open(written[name], 1300, 900, "dark", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.getElementById('curves-controls').checkVisibility()") is False
    assert all(contrast >= LEAST_CONTRAST for contrast, _ in page.evaluate(CONTRASTS))
    paper = page.pdf()
    if SHOTS:
        (Path(SHOTS) / f"{name}.pdf").write_bytes(paper)
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 6
