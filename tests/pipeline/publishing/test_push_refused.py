"""What is never published: anything but exactly the bytes that a passing verdict names."""

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.push import push
from scalegate.pipeline.commands.verify import verify
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.report.table import verdict_table
from scalegate.serving_check.settings import WorkloadSettings
from scalegate.tests.pipeline.publishing.passed_artifact import SHARDS, give_verdict, passing_verdict
from scalegate.tests.pipeline.publishing.spoilt_artifact import (
    add_a_file,
    add_a_page,
    add_a_page_in_a_folder,
    baseline,
    baseline_on_another_engine,
    break_the_verdict,
    declare_a_bound_afterwards,
    draw_another_plot,
    edit_a_figure_with_its_digest,
    edit_the_config,
    edit_the_recipe,
    edit_the_words_with_their_digest,
    edit_what_is_said_of_the_layers,
    emulate,
    emulate_and_deny_it,
    fail,
    fail_and_edit_it_to_a_pass,
    fail_and_edit_it_to_a_pass_with_its_digest,
    flip_one_bit,
    forget_the_source,
    lay_out_again,
    leave_undecided,
    loosen_a_bound_of_quality,
    lower_the_floor,
    measure,
    measure_quality_on_little,
    put_a_file_in_a_folder_of_its_own,
    put_a_signature_there,
    put_a_verdict_there_by_hand,
    quantize_nothing,
    quantize_other_layers,
    remove_a_plot,
    remove_a_shard,
    remove_verdict,
    say_another_duration,
    take_another_artifacts_verdict,
    take_another_artifacts_verdict_and_say_so_in_the_manifest,
    take_another_artifacts_verdict_with_its_digest,
    truncate_a_shard,
    workload,
)
from scalegate.tests.serving_check.gate_samples import sample_evidence


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_verdict, "has no verdict"),
        (flip_one_bit, f"{SHARDS[1]}: sha256 differs"),
        (truncate_a_shard, f"{SHARDS[1]}: 299999 bytes"),
        (remove_a_shard, f"{SHARDS[1]}: missing"),
        (add_a_file, "extra.safetensors: not recorded"),
        (edit_the_config, "config.json"),
        (take_another_artifacts_verdict, "a verdict on other bytes"),
        (take_another_artifacts_verdict_and_say_so_in_the_manifest, "a verdict on other bytes"),
        (put_a_verdict_there_by_hand, "names no verdict"),
        (say_another_duration, "was edited after it was given"),
        (fail, "throughput: lowest 0.400 ["),
        (fail_and_edit_it_to_a_pass, "was edited after it was given"),
        (leave_undecided, "inconclusive"),
        (fail_and_edit_it_to_a_pass_with_its_digest, "throughput says pass, its figures say fail"),
        (edit_a_figure_with_its_digest, "the curve at M=1 is not the one of its repeats"),
        (edit_the_words_with_their_digest, "the words of quality are not those of its figures"),
        (take_another_artifacts_verdict_with_its_digest, "a verdict on other bytes"),
        (edit_the_recipe, "manifest was edited"),
        (declare_a_bound_afterwards, "under other bounds than the recipe"),
        (edit_what_is_said_of_the_layers, "manifest was edited"),
        (add_a_page, "'serving_check/praise.html' was added"),
        (add_a_page_in_a_folder, "'serving_check/more/ratio.png' was added"),
        (draw_another_plot, "'serving_check/ratio.png' was changed"),
        (remove_a_plot, "'serving_check/ratio.png': No such file"),
        (put_a_file_in_a_folder_of_its_own, "more/LICENSE: not recorded"),
        (put_a_signature_there, "does not fit serving_check.json"),
        (measure((1, 4)), "the largest M is 4, the policy wants 32"),
        (measure((4, 32)), "the smallest M is 4, not 1"),
        (workload(draws_between=False), "M=4 is more than 2 times M=1"),
        (workload(draws_between=False), "no M was drawn between the given ones"),
        (measure((1, 4, 32), blocks=5), "5 blocks of repeats at M=1, the policy wants 6"),
        (workload(output_len=64, input_len=1), "1 prompt tokens a request, the policy wants 64"),
        (workload(warmups=0), "0 warm-ups, the policy wants 1"),
        (lower_the_floor, "throughput floor 0.01, the policy wants 0.93"),
        (loosen_a_bound_of_quality, "max mean kl 5, the policy wants 0.1"),
        (measure_quality_on_little, "1000 held-out tokens, the policy wants 4096"),
        (baseline(quantization="compressed-tensors, INT4 g128"), "is itself quantized"),
        (baseline(weights_sha256="6" * 64), "is not the checkpoint that the artifact was made from"),
        (baseline_on_another_engine, "served by embedded, the baseline by vllm"),
        (forget_the_source, "quantize it again"),
        (quantize_nothing, "unquantized weights"),
        (quantize_other_layers, "says that model.layers.3.mlp.up_proj are quantized, but they are not"),
        (lay_out_again, "laid out again"),
        (break_the_verdict, "not valid JSON"),
        (emulate, "--allow-unjudged-speed"),
        (emulate_and_deny_it, "contradict each other on whether speed was judged"),
    ],
)
def test_refused_and_nothing_published(artifact, tmp_path, spoil, words):
    spoil(artifact)
    for dry_run in (True, False):
        with pytest.raises(UserError) as refusal:
            push(artifact, f"folder:{tmp_path / 'release'}", dry_run=dry_run)
        assert words in refusal.value.message
        assert refusal.value.exit_code == 2
        assert not (tmp_path / "release").exists()


def test_the_same_artifact_unspoilt_is_published(artifact, tmp_path):
    assert push(artifact, f"folder:{tmp_path / 'release'}").status == "pushed"


def test_a_policy_that_the_recipe_lowers_openly_is_published_and_said_first(artifact, tmp_path):
    manifest = Artifact.read(artifact)
    manifest.recipe = manifest.recipe | {"throughput_floor": 0.8, "least_largest_m": 4}
    load = WorkloadSettings((1, 4), draws_between=True)
    given = passing_verdict(manifest, evidence=sample_evidence({1: 0.85, 4: 0.9}, load=load), workload=load)
    assert given.status == "pass" and given.exploratory == ()
    give_verdict(artifact, manifest, given)
    push(artifact, f"folder:{tmp_path / 'release'}")
    card = (tmp_path / "release" / "README.md").read_text().split("---\n")[2]
    head = "\n".join(card.strip().splitlines()[:4])
    assert "throughput floor 0.8 (the policy says 0.93)" in head
    assert "least largest m 4 (the policy says 32)" in head
    assert "throughput floor 0.8" in verdict_table(given).splitlines()[0]


def test_quality_without_speed_is_published_only_on_request_and_said_first(artifact, tmp_path):
    emulate(artifact)
    result = push(artifact, f"folder:{tmp_path / 'release'}", allow_unjudged_speed=True)
    assert result.status == "pushed"
    card = (tmp_path / "release" / "README.md").read_text().split("---\n")[2]
    head = "\n".join(card.strip().splitlines()[:4])
    assert "**Speed was not judged: here 28 products of the artifact emulate FP8 inputs" in head
    assert "compute capability 8.9" in head
    assert "had to keep up" not in card and "These speeds are of an emulation" in card
    policy = next(finding for finding in verify(tmp_path / "release").findings if finding.name == "policy")
    assert (policy.holds, policy.said[:20]) == ("unknown", "speed was not judged")


def test_a_folder_that_is_no_artifact_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no scalegate\.json"):
        push(tmp_path, f"folder:{tmp_path / 'release'}")


def test_no_refused_artifact_reaches_the_hub(hub, pipeline, artifact):
    fail(artifact)
    result = pipeline("push", artifact, "--to", "org/model", **hub.environment())
    assert result.returncode == 2
    assert "throughput" in result.stderr and "Traceback" not in result.stderr
    assert hub.requests == []
