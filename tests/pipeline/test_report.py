"""The report: a page that needs nothing but itself, readable plots, a table that fits a terminal."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread
from scalegate.pipeline.report.plots import draw_plots
from scalegate.pipeline.report.table import verdict_table
from scalegate.pipeline.report.write import render_report, write_files
from scalegate.serving_check.verdict import CheckResult, Verdict

from ..serving_check.gate_samples import sample_verdict

FAILED = CheckResult(
    "throughput", "fail", "lowest 0.400 [0.390, 0.410] at M=8", "at least 0.93", "kernel <slow> at M=8"
)


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return sample_verdict({1: 1.4, 2: 1.3, 4: 1.2, 8: 0.4, 16: 1.0, 32: 0.95}, checks=(FAILED,))


def test_the_page_needs_nothing_but_itself(verdict: Verdict, tmp_path: Path):
    write_files(tmp_path, render_report(verdict))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|@import|url\(", page)


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
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


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
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("What the servers did meanwhile") :])
    assert cells[:10] == ["82", "artifact", "22.0", "?", "60", "4.0", "0", "7.41", "3.21", "4.3"]
