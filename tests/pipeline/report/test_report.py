"""The report: a page that needs nothing but itself, readable plots, a table that fits a terminal."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from py_mini_racer import MiniRacer
from scalegate.pipeline.report.badge import badge_words
from scalegate.pipeline.report.curve_picture import MOST_TICKS, draw_curve
from scalegate.pipeline.report.headline import headline_of
from scalegate.pipeline.report.plots import draw_plots
from scalegate.pipeline.report.table import verdict_table
from scalegate.pipeline.report.write import render_report, write_files
from scalegate.serving_check.evidence.measurement import output_throughput
from scalegate.serving_check.evidence.verdict import CheckResult, Verdict
from scalegate.serving_check.settings import WorkloadSettings

from ...serving_check.gate_samples import CHAT, EMULATED, sample_evidence, sample_verdict

FAILED = CheckResult(
    "throughput", "fail", "lowest 0.400 [0.390, 0.410] at M=8", "at least 0.93", "kernel <slow> at M=8"
)


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return sample_verdict({1: 1.4, 2: 1.3, 4: 1.2, 8: 0.4, 16: 1.0, 32: 0.95}, checks=(FAILED,))


def test_the_page_needs_nothing_but_itself(verdict: Verdict, tmp_path: Path):
    write_files(tmp_path, render_report(verdict))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 3, "the ratio's curve is drawn in the page itself"
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<link|@import|url\(|import\(|fetch", page)
    assert "default-src 'none'" in page, "and the browser holds it to that"
    assert len(page) < 600_000


def test_the_page_links_to_what_was_measured_and_names_the_text(verdict: Verdict):
    on_hub = replace(verdict, artifact=replace(verdict.artifact, name="org/it", revision="abc"))
    page = render_report(on_hub)["report.html"].decode()
    assert 'href="https://huggingface.co/org/it/tree/abc"' in page
    assert "code, prose, chat and other languages that Scalegate brings, for quality and prompts" in page


BROWSER = """
class Element {
  constructor(name) { Object.assign(this, { name, attributes: {}, children: [], on: {}, textContent: "" }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  appendChild(child) { this.children.push(child); return child; }
  replaceChildren(...children) { this.children = children; }
  addEventListener(event, call) { this.on[event] = call; }
  get classes() { return (this.attributes.class ?? "").split(" "); }
  all() { return this.children.flatMap(child => [child, ...child.all()]); }
}
const places = {};
const document = {
  getElementById: id => places[id] ??= new Element(id),
  createElement: name => new Element(name),
  createElementNS: (_, name) => new Element(name),
};
const all = kind => places["curves-chart"].all().filter(each => each.classes.includes(kind));
const addEventListener = () => {};
const push = text => places["curves-controls"].all().find(each => each.textContent === text).on.click();
"""


@pytest.fixture
def browser(verdict: Verdict) -> MiniRacer:
    """The page's own script, run on the page's own figures."""
    page = render_report(verdict)["report.html"].decode()
    figures = re.search(r'id="curves-data">(.*?)</script>', page, re.DOTALL)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert figures and script
    engine = MiniRacer()
    engine.eval(f"{BROWSER} document.getElementById('curves-data').textContent = {json.dumps(figures[1])};")
    engine.eval(script[1])
    return engine


def test_every_block_is_a_dot_and_tells_its_figures(verdict: Verdict, browser: MiniRacer):
    blocks = {measured.m: len(measured.blocks) for measured in verdict.evidence.measured}
    assert browser.eval("all('block').length") == sum(blocks.values())
    browser.eval("all('block')[0].on.mouseenter()")
    words = browser.eval("places['curves-words'].textContent")
    assert words.startswith(f"M=1, block 1 of {blocks[1]}, at 0 s: artifact ÷ baseline 1.")
    browser.eval("push('output tokens per second')")
    assert browser.eval("all('block').length") == 2 * sum(blocks.values())
    browser.eval("push('baseline')")
    assert browser.eval("all('block').length") == sum(blocks.values()), "one side is hidden"
    browser.eval("push('M = 4')")
    assert browser.eval("all('block').length") == blocks[4], "one M is seen alone"


def test_dots_lie_where_their_values_are(verdict: Verdict, browser: MiniRacer):
    heights = json.loads(browser.eval("JSON.stringify(all('block').map(each => Number(each.attributes.cy)))"))
    floor = float(browser.eval("all('floor')[0].attributes.y1"))
    ratios = [
        math.exp(value)
        for measured in verdict.evidence.measured
        for value in measured.log_ratios(output_throughput)
    ]
    below = [height > floor for height in heights]
    assert below == [ratio < verdict.bounds.throughput_floor for ratio in ratios]
    assert any(below) and not all(below)


def test_the_badge_says_the_verdict_and_its_lowest_ratio(verdict: Verdict):
    badge = render_report(verdict)["badge.svg"].decode()
    assert ElementTree.fromstring(badge).tag.endswith("svg")
    assert f"{verdict.status}, ≥ 0.40× to M=32" in badge


def test_the_page_says_what_failed_and_escapes_it(verdict: Verdict, tmp_path: Path):
    write_files(tmp_path, render_report(verdict))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "kernel &lt;slow&gt; at M=8" in page
    assert verdict.command in page


def test_every_plot_is_a_picture_and_the_same_verdict_gives_the_same_bytes(verdict: Verdict, tmp_path: Path):
    write_files(tmp_path, render_report(verdict))
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == ["ratio.png", "throughput.png", "tpot.png", "ttft.png"]
    for name, content in draw_plots(verdict).items():
        assert imread(tmp_path / name).std() > 0.01
        assert (tmp_path / name).read_bytes() == content


def test_a_verdict_with_nothing_measured_still_has_a_page(verdict: Verdict, tmp_path: Path):
    write_files(tmp_path, render_report(replace(verdict, curve=())))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["badge.svg", "report.html"]


def test_the_table_fits_a_terminal_and_explains_only_what_did_not_pass(verdict: Verdict):
    passed = CheckResult("quality", "pass", "mean KL 0.01", "KL at most 0.1", "exact")
    table = verdict_table(replace(verdict, checks=(passed, FAILED)))
    assert max(map(len, table.splitlines())) <= 120
    assert "kernel <slow> at M=8" in table
    assert "exact" not in table
    assert table.splitlines()[-1].startswith("FAIL")


def test_a_queue_beside_an_empty_kv_cache_is_seen_at_a_glance(verdict: Verdict, tmp_path: Path):
    point = sample_verdict({82: 1.0}).curve[0]
    capped = replace(
        point.artifact,
        running_mean=22.0,
        waiting_max=60,
        kv_usage_max=0.04,
        step_ms=7.41,
        host_ms=3.21,
        device_idle_share=0.043,
    )
    shown = replace(verdict, curve=(replace(point, artifact=capped),))
    row = next(line for line in verdict_table(shown).splitlines() if "22.0 / 82.0" in line)
    assert " ".join(row.split()) == "82 22.0 / 82.0 60 / 0 4 / 3 0 / 0 7.4 / ? 3.21 / ? 4.3 / ?"
    write_files(tmp_path, render_report(shown))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("What the servers did<") :])
    assert cells[:10] == ["82", "artifact", "22.0", "?", "60", "4.0", "0", "7.41", "3.21", "4.3"]


def test_the_first_sentence_says_verdict_and_reason(verdict: Verdict):
    passed = sample_verdict({1: 1.4, 32: 0.96})
    assert headline_of(passed).sentence == (
        "base-int4 keeps up with base: at least 0.96× the throughput with 1 to 32 requests at once "
        "(floor 0.93×)."
    )
    assert headline_of(passed).first_failure is None
    assert headline_of(verdict).sentence == (
        "base-int4 falls behind base: 0.40× the throughput with 8 requests at once (floor 0.93×)."
    )
    undecided = replace(FAILED, name="quality", status="inconclusive")
    other = replace(FAILED, name="latency", measured="TPOT 2.5× at M=8")
    both = headline_of(replace(verdict, checks=(undecided, other)))
    assert both.sentence == "base-int4 fails the check “latency”: TPOT 2.5× at M=8."
    assert (both.first_failure, both.other_failures) == (other, [undecided])
    assert both.score == "0 of 2 checks passed"
    open_only = headline_of(replace(verdict, status="inconclusive", checks=(undecided,)))
    assert "the check “quality” could not be decided" in open_only.sentence


def test_a_pass_without_speed_says_so_before_anything_else():
    verdict = sample_verdict(
        {1: 0.4, 32: 0.5}, evidence=sample_evidence({1: 0.4, 32: 0.5}, emulated=EMULATED)
    )
    assert headline_of(verdict).sentence == (
        "base-int4 passes every check beside base but those of speed, which was not judged."
    )
    lines = verdict_table(verdict).splitlines()
    assert lines[0].startswith("Speed was not judged: here 28 products of the artifact emulate FP8 inputs")
    assert lines[-1].startswith("PASS (exploratory, speed not judged) after")
    assert "keeps up" not in lines[-1]
    assert not any(word in line for line in lines for word in ("FAIL", "open"))
    assert badge_words(verdict) == "pass, speed not judged"
    page = render_report(verdict)["report.html"].decode()
    assert "<strong>speed not judged</strong>" in page
    assert "Speed was not judged" in page and "keeps up" not in page
    assert "compute capability 8.9" in verdict.to_json()["speed_not_judged"]


def _texts(svg: str, kind: str) -> list[str]:
    return [
        each.text or ""
        for each in ElementTree.fromstring(svg).iter()
        if kind in each.get("class", "").split()
    ]


def test_the_curve_has_every_m_its_ratio_and_a_cross_where_it_failed():
    ratios = {1: 1.4, 8: 0.4, 32: 0.96}
    verdict = sample_verdict(ratios)
    svg = draw_curve(verdict, 700, 300)
    assert _texts(svg, "m") == ["1", "8", "32"]
    assert _texts(svg, "value") == ["1.40", "0.40", "0.96"]
    crosses = [
        each for each in ElementTree.fromstring(svg).iter() if each.get("class") == "mark artifact fail"
    ]
    assert [each.tag.split("}")[1] for each in crosses] == ["path"], "of the M that failed, and no dot"
    assert "M=8: 0.40, fail" in ElementTree.fromstring(svg).get("aria-label", "")


def test_ms_that_were_drawn_are_marked_in_curve_page_and_table():
    verdict = sample_verdict({1: 1.4, 4: 1.2}, workload=WorkloadSettings((1, 4), draws_between=True))
    assert [point.m for point in verdict.curve if point.drawn] == [2, 3]
    svg = draw_curve(verdict, 700, 300)
    assert _texts(svg, "m") == ["1", "2", "3", "4"] and _texts(svg, "value") == ["1.40", "1.20"]
    radii = [each.get("r") for each in ElementTree.fromstring(svg).iter() if each.get("r")]
    assert radii == ["5", "3", "3", "5"]
    page = render_report(verdict)["report.html"].decode()
    assert page.count("</span> drawn</td>") == 2 and "drawn between the given ones, from the seed 0" in page
    table = verdict_table(verdict)
    assert table.count("pass, drawn") == 2 and "M=2, 3 were drawn between the given Ms" in table
    assert "pass, drawn" not in verdict_table(sample_verdict({1: 1.4, 4: 1.2})), "the control"


def test_an_m_that_was_not_measured_keeps_its_place_in_the_curve():
    verdict = sample_verdict({1: 1.4, 8: 0.4})
    cut_short = replace(verdict, workload=replace(verdict.workload, ms=(1, 8, 32)))
    assert _texts(draw_curve(cut_short, 700, 300), "unmeasured") == ["32"]
    assert "No ratio was measured at M = 32." in render_report(cut_short)["report.html"].decode()
    assert "No ratio was measured" not in render_report(verdict)["report.html"].decode()


def test_a_ratio_of_too_few_blocks_for_an_interval_has_no_bar():
    verdict = sample_verdict({1: 1.4, 8: 0.9})
    unbounded = replace(verdict.curve[1], ratio_low=0.0, ratio_high=None)
    svg = draw_curve(replace(verdict, curve=(verdict.curve[0], unbounded)), 700, 300)
    assert len(_texts(svg, "interval")) == 1 and len(_texts(svg, "mark")) == 2


@pytest.mark.parametrize("high", [3e52, 2.0])
def test_a_limit_of_any_size_leaves_the_ratios_apart(high: float):
    verdict = sample_verdict({1: 1.4, 8: 1.0})
    wide = replace(verdict.curve[1], ratio_low=0.0, ratio_high=high)
    svg = draw_curve(replace(verdict, curve=(verdict.curve[0], wide)), 700, 300)
    first, second = [float(each.get("cy")) for each in ElementTree.fromstring(svg).iter() if each.get("cy")]
    assert second - first > 15 and len(_texts(svg, "grid")) <= MOST_TICKS + 2


def test_ratios_of_any_size_have_a_few_ticks():
    svg = draw_curve(sample_verdict({1: 4000.0, 8: 0.9}), 700, 300)
    assert 2 <= len(_texts(svg, "grid")) <= MOST_TICKS + 2


def test_page_and_table_show_prompts_and_decoding_of_a_profile_apart(verdict: Verdict):
    assert "Under the load of a service" not in render_report(verdict)["report.html"].decode(), "the control"
    in_use = replace(verdict.evidence.in_use, profile=CHAT)
    shown = replace(verdict, evidence=replace(verdict.evidence, in_use=in_use))
    page = render_report(shown)["report.html"].decode()
    assert "Under the load of a service: chat" in page and "Azure LLM inference trace 2023" in page
    assert re.search(r'>prompts</th><td class="number">1.25</td>', page)
    assert re.search(r'>decoding</th><td class="number">2.00</td>', page)
    lines = [line.split() for line in verdict_table(shown).splitlines()]
    assert ["prompts", "1.25", "1.25", "to", "1.25"] in lines
    assert ["decoding", "2.00", "2.00", "to", "2.00"] in lines
