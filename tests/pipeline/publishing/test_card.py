"""The model card: measured figures, the base's own metadata, and nothing unfilled or made up."""

import json
import re
import shlex
from dataclasses import replace
from unittest.mock import Mock

import pytest
import yaml
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.base_metadata import read_base_metadata
from scalegate.pipeline.cli.release import command as release_command
from scalegate.pipeline.publishing import card, reproduce
from scalegate.pipeline.publishing.card import write_card
from scalegate.pipeline.quantization import job
from scalegate.pipeline.records.artifact import SIGNATURE_NAME, Artifact, record_files
from scalegate.pipeline.records.comparison import ComparedModel, Comparison
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.pipeline.validation.servers import effective_options, sized_options
from scalegate.serving_check.evidence.request_memory import RequestMemory
from scalegate.serving_check.evidence.task_scores import TaskScore
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.tests.pipeline.publishing.passed_artifact import (
    INT4,
    curve_point,
    edit_json,
    make_artifact,
    passing_verdict,
)
from scalegate.tests.serving_check.gate_samples import CHAT

NAME = "org/base-INT4"


def card_of(folder, name=NAME, to=NAME, verdict=None, **changes):
    """The text with fields of the manifest and of the verdict changed."""
    manifest = replace(Artifact.read(folder), **changes)
    given = replace(passing_verdict(manifest), **(verdict or {}))
    return write_card(folder, manifest, given, name, to)


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"base_metadata": {}},
        {"source": "somewhere/else/base", "source_revision": None},
        {"versions": {}},
        {"quantization": {"formats": [INT4], "bits_per_weight": 4.1563, "relative_error": 0.0872}},
        {"quantization": {"formats": [INT4], "export": "torchao"}},
        {"recipe": {"name": "mine", "format": "int4", "group_size": 64, "throughput_floor": 0.8}},
    ],
)
def test_no_field_is_left_unfilled(artifact, changes):
    slow = curve_point(8, 1.0, 2.0)
    unknown = replace(
        slow,
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        artifact=replace(slow.artifact, tpot_p50_ms=None, ttft_p50_ms=None),
    )
    text = card_of(artifact, verdict={"curve": (curve_point(1, 100.0, 96.0), unknown)}, **changes)
    for hole in ("None", "nan", "inf ", "{{", "{%", "To be filled", "More Information Needed", "undefined"):
        assert hole not in text
    assert not re.search(r"\| *\|", text), "an empty cell"
    assert "\n\n\n" not in text


@pytest.mark.parametrize(("base", "task"), [({}, "text-generation"), ({"pipeline_tag": "x-to-y"}, "x-to-y")])
def test_the_hub_is_told_the_task_whether_the_base_says_it_or_not(artifact, base, task):
    assert front_matter(card_of(artifact, base_metadata=base))["pipeline_tag"] == task


def test_the_table_holds_the_measured_figures(artifact):
    check = CheckResult("throughput", "pass", "1.02 at M=4", ">= 0.93", "every M is decided")
    measured = {"curve": (curve_point(32, 1234.4, 1000.0),), "checks": (check,), "quality_tokens": 1234}
    text = card_of(artifact, verdict=measured)
    assert "| 32 | 1,234 | 1,000 | 1.23 | 1.21 to 1.26 | 9.5 | 9.5 | 12 | 12 |" in text
    assert "| throughput | 1.02 at M=4 | >= 0.93 | pass |" in text
    assert "1,234 tokens of held-out text" in text


def test_ms_that_were_drawn_are_marked(artifact):
    text = card_of(artifact)
    assert "| 1 | " in text and "| 2 (drawn) | " in text and "| 32 | " in text
    assert "Ms marked as drawn were drawn between the others" in text


def test_a_comparison_beside_the_artifact_is_shown(artifact):
    assert "## Beside others" not in card_of(artifact)
    digest = Artifact.read(artifact).bytes_digest()
    sizes = {"bits_per_weight": 4.156, "weight_bytes": 3_210_000, "nats_per_token": 1.25}
    figures = {"mean_kl": 0.0123, "p99_kl": 0.1, "p999_kl": 0.5, "max_kl": 1.5, "top1_agreement": 0.9512}
    models = [
        ComparedModel(
            name, "INT4", **sizes, extra_nats_per_token=0.0115, extra_nats_limits=None, **figures,
            module_errors={"a": 0.08}, unlike_baseline=unlike,
        )
        for name, unlike in (("out", None), ("b/out", "made from *another* model"))
    ]  # fmt: skip
    found = Comparison("maker/base", 1.2385, 4321, "0" * 64, "bfloat16", digest, tuple(models))
    found.write(artifact)
    text = card_of(artifact)
    assert "## Beside others" in text and "Quality on 4,321 tokens of held-out text" in text
    assert "| model | bits | MB | extra nats | mean KL | p99 | p99.9 | top-1 | weights' error |" in text
    row = "| 4.16 | 3.2 | +0.0115 | 0.01230 | 0.1000 | 0.500 | 95.12% | 0.0800 |"
    assert f"| out {row}\n| b/out (!) {row}\n\n(!) b/out: made from \\*another\\* model\n" in text
    replace(found, bytes_digest="of other bytes").write(artifact)
    assert "## Beside others" not in card_of(artifact)


def test_the_plots_are_shown_from_where_they_are_pushed_to(artifact):
    text = card_of(artifact)
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert shown == ["serving_check/ratio.png", "serving_check/throughput.png"]
    assert all((artifact / path).is_file() for path in shown)


def test_the_badge_is_shown_where_the_report_has_one_and_the_text_is_named(artifact):
    text = card_of(artifact, verdict={"report": {"badge.svg": "0" * 64}, "quality_text": "mine.txt"})
    assert "](serving_check/badge.svg)" in text and "that Scalegate brings; besides, mine.txt)" in text
    assert "badge.svg" not in card_of(artifact)


def test_licence_languages_and_tags_are_the_bases(artifact):
    metadata = front_matter(card_of(artifact))
    assert metadata["license"] == "apache-2.0"
    assert metadata["language"] == ["en", "no"], "Norwegian is not the boolean"
    assert metadata["base_model"] == "maker/base"
    assert metadata["base_model_relation"] == "quantized"
    assert metadata["tags"] == ["code", "scalegate", "int4", "compressed-tensors"]


def test_every_format_is_named_and_tagged(artifact):
    assert "quantized to INT4 g128, zero points, stored as compressed-tensors:" in card_of(artifact)
    other = {"label": "INT8 per row", "modules": 4, "spec": {"format": "int8-row"}}
    text = card_of(artifact, quantization={"formats": [INT4, other]})
    assert "to INT4 g128, zero points (28 layers) and INT8 per row (4 layers), stored as" in text
    assert front_matter(text)["tags"][-3:] == ["int4", "int8-row", "compressed-tensors"]


def test_a_licence_of_its_own_keeps_its_name_and_link(artifact):
    base = {"license": "other", "license_name": "maker-terms", "license_link": "LICENSE"}
    text = card_of(artifact, base_metadata=base)
    metadata = front_matter(text)
    assert metadata["license"] == "other" and metadata["license_name"] == "maker-terms"
    revision = Artifact.read(artifact).source_revision
    assert metadata["license_link"] == f"https://huggingface.co/maker/base/blob/{revision}/LICENSE"
    assert "Licence: maker-terms" in text


def test_a_licence_file_among_ours_is_linked_as_it_is(artifact):
    (artifact / "LICENSE").write_text("the terms")
    base = {"license": "other", "license_name": "maker-terms", "license_link": "LICENSE"}
    text = card_of(artifact, base_metadata=base, files=record_files(artifact))
    assert front_matter(text)["license_link"] == "LICENSE"


def test_an_unknown_licence_is_left_out_and_said(artifact):
    text = card_of(artifact, base_metadata={})
    assert "license" not in front_matter(text)
    assert "names none" in text
    (artifact / "LICENSE.txt").write_text("the terms")
    assert "LICENSE.txt is among the files" in card_of(
        artifact, base_metadata={}, files=record_files(artifact)
    )


def test_a_floor_of_its_own_is_said_openly(artifact):
    assert "its own bounds" not in card_of(artifact)
    text = card_of(artifact, verdict={"bounds": Bounds(throughput_floor=0.8)})
    assert "its own bounds" in text
    assert "throughput floor: 0.8 (the default is 0.93)" in text


def test_one_command_makes_it_again(artifact):
    revision = Artifact.read(artifact).source_revision
    shipped = Artifact.read(artifact).recipe
    load = WorkloadSettings()
    plain = card_of(artifact, verdict={"workload": load})
    # The recipe is named like a shipped one and differs from it.
    assert f"pipeline release maker/base --revision {revision} --recipe int4-hqq.yaml --to {NAME}\n" in plain
    assert "save the recipe above as `int4-hqq.yaml`" in plain
    changed = card_of(
        artifact,
        recipe=shipped | {"name": "mine", "throughput_floor": 0.8},
        verdict={"workload": WorkloadSettings(ms=(1, 8)), "bounds": Bounds(throughput_floor=0.7)},
    )
    assert f"--recipe mine.yaml --m 1,8 --floor 0.7 --to {NAME}\n" in changed


def test_every_setting_that_is_not_the_default_is_in_the_command(artifact):
    sample = passing_verdict(Artifact.read(artifact))
    elsewhere = replace(sample.baseline, name="other/base", revision="a" * 40)
    text = card_of(
        artifact,
        verdict={
            "workload": WorkloadSettings((1, 8), 32, 48, 2, 12, 3, 7),
            "baseline": elsewhere,
            "quality_text": "mine.txt",
            "quality_tokens_asked": 4096,
        },
    )
    words = (
        f"--baseline other/base --baseline-revision {'a' * 40} --m 1,8 --input-len 32 --output-len 48 "
        f"--waves 2 --max-blocks 12 --warmups 3 --seed 7 --text mine.txt --quality-tokens 4096 --to {NAME}\n"
    )
    assert words in text
    (line,) = [line for line in text.splitlines() if line.startswith("pipeline release")]
    release_command.make_context("release", shlex.split(line)[2:])


def test_the_calibration_text_and_the_baselines_engine_are_in_the_command(artifact):
    quantization = Artifact.read(artifact).quantization
    read = {"source": "mine.jsonl", "text": 512, "own": 0}
    environment = replace(passing_verdict(Artifact.read(artifact)).environment, baseline_engine="vllm")
    text = card_of(
        artifact, quantization={**quantization, "calibration": read}, verdict={"environment": environment}
    )
    assert " --calibration mine.jsonl " in text and " --baseline-engine vllm " in text
    own = card_of(artifact, quantization={**quantization, "calibration": {**read, "source": "self"}})
    assert "--calibration" not in own and "--baseline-engine" not in own


def test_a_signature_is_said_and_so_is_its_absence(artifact):
    assert "It is not signed" in card_of(artifact) and f"pipeline verify {NAME}\n" in card_of(artifact)
    (artifact / SIGNATURE_NAME).write_text("a signature")
    assert "It is signed" in card_of(artifact)


def test_engine_options_that_were_given_are_in_the_command(artifact):
    load = WorkloadSettings(ms=(1, 4))
    for given, words in (
        ({}, "--m 1,4 --to"),
        ({"prefill_chunk": 64}, "--m 1,4 --prefill-chunk 64 --chunk-while-decoding 64 --to"),
    ):
        recorded = effective_options(sized_options({"device": "cpu"} | given, load))
        verdict = passing_verdict(Artifact.read(artifact))
        environment = replace(verdict.environment, engine_options=recorded)
        text = card_of(artifact, verdict={"environment": environment, "workload": load})
        assert words in text


def test_the_card_knows_the_defaults_of_the_command_it_shows():
    assert reproduce.DEFAULT_EXPORT == job.DEFAULT_EXPORT


def test_a_shipped_recipe_is_named_and_not_saved(artifact):
    text = card_of(artifact, recipe=load_recipe("int4-hqq").to_json())
    assert "--recipe int4-hqq --m 1,4,32 --to" in text
    assert "ships with Scalegate" in text and "save the recipe" not in text


def test_no_folder_of_this_machine_is_told(artifact, tmp_path):
    text = card_of(
        artifact,
        name="release",
        to=f"folder:{tmp_path}/release",
        source=f"{tmp_path}/models/base",
        source_revision=None,
    )
    assert str(tmp_path) not in text
    assert "pipeline release base --recipe" in text and "--to folder:release" in text
    assert "base_model" not in {k for k in front_matter(text) if k != "base_model_relation"}


def test_only_engines_that_read_the_convention_are_named(artifact):
    assert "sglang" in card_of(artifact)
    (artifact / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    text = card_of(artifact, files=record_files(artifact))
    assert "sglang" not in text and "pip install transformers torchao" in text


def test_what_readers_need_or_cannot_load_is_said(artifact, monkeypatch):
    def with_weights(symmetric):
        section = {"quant_method": "compressed-tensors"}
        section["config_groups"] = {"group_0": {"weights": {"symmetric": symmetric}}}
        (artifact / "config.json").write_text(json.dumps({"quantization_config": section}))
        return card_of(artifact, files=record_files(artifact))

    assert "(`pip install transformers compressed-tensors`)" in with_weights(symmetric=True)
    with_zero_points = with_weights(symmetric=False)
    assert "(`pip install 'transformers<5.23' 'compressed-tensors<0.20'`)" in with_zero_points
    unread = {"transformers": "it has no rule"}
    monkeypatch.setattr(card, "unread_by", lambda *_: unread)
    refused = card_of(artifact)
    assert "transformers cannot load it: it has no rule." in refused
    assert "from_pretrained" not in refused and "vllm serve" in refused
    unread["vLLM"] = "it skips experts"
    refused = card_of(artifact)
    assert "vLLM cannot load it: it skips experts." in refused and "vllm serve" not in refused


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        (None, "AutoModelForCausalLM"),
        ("qwen3", "AutoModelForCausalLM"),
        ("llava", "AutoModelForImageTextToText"),
    ],
)
def test_the_class_of_transformers_that_loads_the_model_is_named(
    artifact, monkeypatch, model_type, auto_class
):
    monkeypatch.setattr(card, "unread_by", lambda *_: {})
    edit_json(artifact / "config.json", model_type=model_type)
    text = card_of(artifact, files=record_files(artifact))
    assert f"from transformers import {auto_class}, AutoTokenizer\n\nmodel = {auto_class}.from_pre" in text


def test_a_card_is_the_same_whenever_it_is_written(artifact):
    assert card_of(artifact) == card_of(artifact)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "---\nlicense: mit\nlanguage: [en, no]\nwidget: []\n---\n# x",
            {"license": "mit", "language": ["en", "no"]},
        ),
        ("# no front matter", {}),
        ("---\nlicense: mit", {}),
        ("---\n- a list\n---\n", {}),
        ("", {}),
    ],
)
def test_base_metadata_is_read_from_front_matter_and_nothing_else(tmp_path, text, expected):
    (tmp_path / "README.md").write_text(text)
    assert read_base_metadata(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"---\nlicense: mit\ntags: a: b\n---\n", "line 3, column 8: not valid YAML: mapping values"),
        (b"---\nlicense: mit\n: [\n---\n", "not valid YAML"),
        (b"---\nlicense: m\x07it\n---\n", "not valid YAML: unacceptable character"),
        (b"---\nlicense: &a mit\ntags: [*a]\n---\n", "line 3: YAML aliases"),
        (b"---\na: " + b"[" * 9999 + b"]" * 9999 + b"\n---\n", "README.md"),
        (b"---\nlicense: caf\xe9\n---\n", "not UTF-8 text"),
    ],
)
def test_front_matter_that_cannot_be_read_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "README.md").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        read_base_metadata(tmp_path)
    said = refused.value.message
    assert said.startswith(str(tmp_path / "README.md")) and "\n" not in said and "; " in said


@pytest.mark.parametrize("error", [yaml.YAMLError("nested too deep"), RecursionError("nested too deep")])
def test_what_pyyaml_itself_finds_too_deep_is_refused_too(tmp_path, monkeypatch, error):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert read_base_metadata(tmp_path) == {"license": "mit"}
    monkeypatch.setattr(yaml, "parse", Mock(side_effect=error))
    with pytest.raises(UserError, match="not valid YAML: nested too deep; correct the front matter"):
        read_base_metadata(tmp_path)


def test_a_base_without_a_card_has_no_metadata(tmp_path):
    assert read_base_metadata(tmp_path) == {}


def test_two_artifacts_have_two_cards(tmp_path):
    first, other = (make_artifact(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert card_of(first) != card_of(other), "the digest of the bytes is in it"


def test_scores_of_tasks_stand_in_the_card_and_in_its_metadata(artifact):
    score = TaskScore("arc_easy", "acc", 0.7123, 0.0093, 0.72, None, True, 2376, 5, "1.0")
    text = card_of(artifact, verdict={"tasks": "arc_easy", "scores": (score,)})
    assert "| arc_easy | acc | 2376 | 0.7123 ± 0.0093 | 0.72 |" in text
    assert "--tasks arc_easy" in text
    [model] = front_matter(text)["model-index"]
    [result] = model["results"]
    assert model["name"] == "base-INT4" and result["dataset"]["name"] == "arc_easy"
    [metric] = result["metrics"]
    assert (metric["type"], metric["value"], metric["args"]) == ("acc", 0.7123, {"stderr": 0.0093})
    assert "model-index" not in front_matter(card_of(artifact))


def test_a_card_shows_prompts_and_decoding_of_a_profile_apart(artifact):
    assert "Under the load of a service" not in card_of(artifact), "the control"
    evidence = passing_verdict(Artifact.read(artifact)).evidence
    in_use = replace(evidence.in_use, profile=CHAT)
    text = card_of(artifact, verdict={"evidence": replace(evidence, in_use=in_use)})
    assert "Under the load of a service (`chat`)" in text
    assert "| prompts | 1.25 | 1.25 to 1.25 |" in text and "| decoding | 2.00 | 2.00 to 2.00 |" in text
    assert "48 requests with prompts of 200 to 200 tokens" in text


def test_a_card_says_what_recurrent_layers_keep_of_a_request(artifact):
    assert "recurrent layers" not in card_of(artifact), "the control"
    verdict = passing_verdict(Artifact.read(artifact))
    tokens = verdict.workload.input_len + verdict.workload.output_len
    pages = -(-tokens // 16)

    def said(page_bytes, states):
        memory = RequestMemory(16, page_bytes, 0, states)
        evidence = replace(verdict.evidence, request_memory=memory, capacity=tokens * 20, limit=32)
        return card_of(artifact, verdict={"evidence": evidence})

    hybrid = said(16 * 24_576, {"gated_delta_rule float32": 10**7, "short_convolution bfloat16": 10**6})
    assert "keep 11.00 MB of state for each request" in hybrid
    assert "(gated_delta_rule in float32, short_convolution in bfloat16), beside 24.58 kB" in hybrid
    fit = 10**10 // (11 * 10**6 + pages * 16 * 24_576)
    assert f"{fit} requests of {tokens} tokens fit" in hybrid and "had room for 20 of them" in hybrid
    alone = said(0, {"mamba2 float32": 10**7})
    assert (
        "1,000 requests of" in alone
        and "had room for 32 of them" in alone
        and "values for a token" not in alone
    )


def test_the_command_of_a_card_names_a_profile_that_its_recipe_does_not_state(artifact):
    verdict = passing_verdict(Artifact.read(artifact))
    asked = {"workload": replace(verdict.workload, profile="rag")}
    assert "--profile rag" in card_of(artifact, verdict=asked)
    stated = Artifact.read(artifact).recipe | {"profile": "rag"}
    assert "--profile" not in card_of(artifact, verdict=asked, recipe=stated)


def test_a_verdict_on_another_engine_says_its_versions_its_kernels_and_whether_the_plugin_served(artifact):
    given = passing_verdict(Artifact.read(artifact))
    versions = {"vllm": {"vllm": "0.26.0", "torch": "2.11.0", "triton": "3.6.0"}}
    environment = replace(given.environment, engine="vllm", engine_versions=versions)
    plugin_line = "scalegate-kernels serves int4 g128 sym 4096x4096 bfloat16: 2.1 times as fast as Machete"
    kernels = ("MacheteLinearKernel", "scalegate-kernels leaves int8 g128 4096x4096 to vLLM: not measured")

    def card(kernels):
        subject = replace(given.artifact, kernels=kernels)
        return card_of(artifact, verdict={"environment": environment, "artifact": subject})

    alone, served = card(kernels), card(("ScalegateLinearKernel", plugin_line))
    assert "in the environment of vllm: vllm 0.26.0, torch 2.11.0, triton 3.6.0" in alone
    assert "server names: MacheteLinearKernel." in alone and "ScalegateLinearKernel." in served
    assert "the plugin `scalegate-kernels` brings" not in alone and "leaves int8" not in alone
    assert "the plugin `scalegate-kernels` brings" in served
    assert "log of this model's server" not in card(())
