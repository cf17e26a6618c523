"""Scores of lm-eval's tasks: asked of the right server, read from what it writes, shown with their errors.

lm-eval itself has an environment of its own; `tests/bench/gate/lm_eval_scores.py` runs it.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.report.table import verdict_table
from scalegate.pipeline.report.write import render_report
from scalegate.pipeline.validation import task_scores
from scalegate.pipeline.validation.task_scores import evaluate, paired_scores, public_tasks
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.evidence.task_scores import TaskScore

from ...serving_check.gate_samples import sample_verdict

RESULTS = {
    "results": {
        "next_line": {
            "alias": "next_line",
            "acc,none": 0.64,
            "acc_stderr,none": 0.0277,
            "acc_norm,none": 0.72,
            "acc_norm_stderr,none": 0.0259,
        },
        "whole_files": {
            "alias": "whole_files",
            "bits_per_byte,none": 0.7317,
            "bits_per_byte_stderr,none": "N/A",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.1,
        },
    },
    "versions": {"next_line": 1.0, "whole_files": 2},
    "n-shot": {"next_line": 5, "whole_files": 0},
    "higher_is_better": {
        "next_line": {"acc": True, "acc_norm": True},
        "whole_files": {"bits_per_byte": False},
    },
    "n-samples": {"next_line": {"original": 300, "effective": 300}},
}
"""As lm-eval 0.4.13 writes them."""
LM_EVAL = """
import json, os, pathlib, sys
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(words.pop("--output_path")) / "model"
folder.mkdir()
said = {"results": {}, "words": words, "key": os.environ["OPENAI_API_KEY"]}
(folder / "results_2026.json").write_text(json.dumps(said))
"""
ENDPOINT = Endpoint("http://127.0.0.1:1", "name, with a comma", api_key="secret")


def lowered(results: dict) -> dict:
    """A baseline's results: everything a little less, and one metric that the artifact lacks."""
    copied = json.loads(json.dumps(results))
    copied["results"]["next_line"]["acc,none"] = 0.6
    copied["results"]["next_line"]["f1,none"] = 0.1
    return copied


def test_metrics_are_paired_with_their_errors_filters_and_samples():
    first, *_, last = paired_scores(RESULTS, lowered(RESULTS))
    assert first == TaskScore("next_line", "acc", 0.64, 0.0277, 0.6, 0.0277, True, 300, 5, "1.0")
    assert last.metric == "exact_match,strict-match" and last.samples is None
    names = [score.metric for score in paired_scores(RESULTS, lowered(RESULTS))]
    assert names == ["acc", "acc_norm", "bits_per_byte", "exact_match,strict-match"]
    assert paired_scores(RESULTS, {"results": {}}) == ()


def test_lm_eval_is_asked_of_the_server_with_the_checkpoints_tokenizer(tmp_path: Path, monkeypatch):
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text(LM_EVAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = evaluate(ENDPOINT, Path("checkpoint"), "arc_easy,mine.yaml", 512, 64)
    assert said["key"] == "secret" and said["words"]["--tasks"] == "arc_easy,mine.yaml"
    arguments = json.loads(said["words"]["--model_args"])
    assert arguments["model"] == "name, with a comma" and arguments["tokenizer"] == "checkpoint"
    assert arguments["base_url"] == "http://127.0.0.1:1/v1/completions" and arguments["max_length"] == 512
    assert said["words"]["--model"] == "local-completions" and arguments["num_concurrent"] == 32


def test_a_failed_run_says_what_lm_eval_said(tmp_path: Path, monkeypatch):
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text("raise SystemExit('Tasks not found: nosuch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="could not run --tasks nosuch; it said:\n  Tasks not found: nosuch"):
        evaluate(ENDPOINT, Path("checkpoint"), "nosuch", 512, 1)


def test_without_lm_eval_a_validation_does_not_begin(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(task_scores.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lm-eval\[api\]'"):
        validate(tmp_path / "nothing", tasks="arc_easy")


def test_task_files_are_named_without_their_folders():
    assert public_tasks("arc_easy,/home/someone/mine.yaml") == "arc_easy,mine.yaml"
    assert public_tasks(None) is None


def test_the_table_and_the_page_show_scores_with_errors():
    verdict = replace(sample_verdict({1: 1.0}), scores=paired_scores(RESULTS, lowered(RESULTS)))
    lines = verdict_table(verdict).splitlines()
    [line] = [line for line in lines if line.startswith("next_line") and " acc " in line]
    assert line.split() == ["next_line", "acc", "0.64", "±", "0.028", "0.6", "±", "0.028"]
    assert "next_line" not in verdict_table(sample_verdict({1: 1.0}))
    page = render_report(verdict)["report.html"].decode()
    assert "<td>next_line</td><td>acc</td>" in page and "0.64 ± 0.028" in page
