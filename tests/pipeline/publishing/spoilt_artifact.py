"""Ways to spoil an artifact that has passed, each a function of its folder: what must never be published."""

import json
import shutil
from dataclasses import replace

from scalegate.base.atomic_files import write_json
from scalegate.pipeline.records.artifact import MANIFEST_NAME, SIGNATURE_NAME, VERDICT_NAME, Artifact
from scalegate.pipeline.records.file_digests import sha256_of
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.tests.pipeline.publishing.passed_artifact import (
    INT4,
    PLOT,
    RATIOS,
    SHARDS,
    WORKLOAD,
    edit_json,
    give_verdict,
    make_artifact,
    passing_verdict,
)
from scalegate.tests.serving_check.gate_samples import EMULATED, SOUND_WEIGHTS, sample_evidence


def emulate(artifact):
    manifest = Artifact.read(artifact)
    evidence = sample_evidence(RATIOS, load=WORKLOAD, emulated=EMULATED)
    give_verdict(artifact, manifest, passing_verdict(manifest, evidence=evidence))


def emulate_and_deny_it(artifact):
    manifest = Artifact.read(artifact)
    evidence = sample_evidence(RATIOS, load=WORKLOAD, emulated=EMULATED)
    verdict = passing_verdict(manifest, evidence=evidence)
    give_verdict(artifact, manifest, replace(verdict, speed_not_judged=None))


def remove_verdict(artifact):
    (artifact / VERDICT_NAME).unlink()


def flip_one_bit(artifact):
    path = artifact / SHARDS[1]
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


def truncate_a_shard(artifact):
    path = artifact / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])


def remove_a_shard(artifact):
    (artifact / SHARDS[1]).unlink()


def add_a_file(artifact):
    (artifact / "extra.safetensors").write_bytes(b"not validated")


def edit_the_config(artifact):
    edit_json(artifact / "config.json", hidden_size=1)


def take_another_artifacts_verdict(artifact):
    other = make_artifact(artifact.parent / "other", seed=1)
    shutil.copy(other / VERDICT_NAME, artifact / VERDICT_NAME)


def take_another_artifacts_verdict_and_say_so_in_the_manifest(artifact):
    other = make_artifact(artifact.parent / "other", seed=1)
    manifest = Artifact.read(artifact)
    give_verdict(artifact, manifest, passing_verdict(Artifact.read(other)))


def put_a_verdict_there_by_hand(artifact):
    edit_json(artifact / MANIFEST_NAME, verdict_sha256=None)


def say_another_duration(artifact):
    edit_json(artifact / VERDICT_NAME, duration_seconds=1.0)


def fail(artifact):
    give(artifact, evidence=sample_evidence({1: 1.0, 4: 0.4, 32: 1.0}, load=WORKLOAD))


def fail_and_edit_it_to_a_pass(artifact):
    fail(artifact)
    edit_json(artifact / VERDICT_NAME, status="pass")


def leave_undecided(artifact):
    give(artifact, evidence=sample_evidence(RATIOS, load=WORKLOAD, capacity=None, baseline_canary=()))


def lay_out_again(artifact):
    edit_json(artifact / MANIFEST_NAME, layout_plan={"device": "cpu", "versions": {}, "choices": []})


def break_the_verdict(artifact):
    (artifact / VERDICT_NAME).write_text("{")


def give(artifact, **changes):
    """A verdict with `changes`, its digest in the manifest."""
    manifest = Artifact.read(artifact)
    give_verdict(artifact, manifest, passing_verdict(manifest, **changes))


def rewritten(artifact, edit):
    """Edit the verdict's JSON and make its digest again, as somebody would who knows the form."""
    value = json.loads((artifact / VERDICT_NAME).read_text())
    edit(value)
    write_json(artifact / VERDICT_NAME, value)
    manifest = Artifact.read(artifact)
    manifest.verdict_sha256 = sha256_of(artifact / VERDICT_NAME)
    manifest.write(artifact)


def fail_and_edit_it_to_a_pass_with_its_digest(artifact):
    fail(artifact)

    def say_pass(value):
        value["status"] = "pass"
        for part in (*value["checks"], *value["curve"]):
            part["status"] = "pass"

    rewritten(artifact, say_pass)


def edit_a_figure_with_its_digest(artifact):
    rewritten(artifact, lambda value: value["curve"][0].update(ratio=9.0))


def edit_the_words_with_their_digest(artifact):
    def praise(value):
        next(check for check in value["checks"] if check["name"] == "quality")["measured"] = "mean KL 0.0000"

    rewritten(artifact, praise)


def take_another_artifacts_verdict_with_its_digest(artifact):
    other = make_artifact(artifact.parent / "other", seed=1)
    shutil.copy(other / VERDICT_NAME, artifact / VERDICT_NAME)
    rewritten(artifact, lambda value: None)


def edit_the_recipe(artifact):
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    edit_json(artifact / MANIFEST_NAME, recipe=manifest["recipe"] | {"description": "better than it is"})


def declare_a_bound_afterwards(artifact):
    """The recipe has the bound, and the verdict that manifest's digest, but was not given under it."""
    manifest = Artifact.read(artifact)
    manifest.recipe = manifest.recipe | {"throughput_floor": 0.5}
    give_verdict(artifact, manifest, passing_verdict(manifest, declared={}, bounds=Bounds()))


def edit_what_is_said_of_the_layers(artifact):
    edit_json(artifact / MANIFEST_NAME, quantization={"formats": [INT4], "bits_per_weight": 2.0})


def add_a_page(artifact):
    (artifact / "serving_check" / "praise.html").write_text("the best")


def add_a_page_in_a_folder(artifact):
    (artifact / "serving_check" / "more").mkdir()
    (artifact / "serving_check" / "more" / "ratio.png").write_bytes(PLOT)


def draw_another_plot(artifact):
    (artifact / "serving_check" / "ratio.png").write_bytes(PLOT)


def remove_a_plot(artifact):
    (artifact / "serving_check" / "ratio.png").unlink()


def put_a_file_in_a_folder_of_its_own(artifact):
    (artifact / "more").mkdir()
    (artifact / "more" / "LICENSE").write_text("terms")


def put_a_signature_there(artifact):
    (artifact / SIGNATURE_NAME).write_text(
        "-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n-----END SSH SIGNATURE-----\n"
    )


def workload(**changes):
    return lambda artifact: give(artifact, workload=replace(WORKLOAD, **changes))


def measure(ms, blocks=12):
    load = WorkloadSettings(tuple(ms), max_blocks=blocks, draws_between=True)
    evidence = sample_evidence(dict.fromkeys(ms, 1.1), blocks, load)
    return lambda artifact: give(artifact, evidence=evidence, workload=load)


def lower_the_floor(artifact):
    give(artifact, bounds=Bounds(throughput_floor=0.01))


def loosen_a_bound_of_quality(artifact):
    give(artifact, bounds=Bounds(max_mean_kl=5.0))


def measure_quality_on_little(artifact):
    quality = replace(sample_evidence(RATIOS).quality, tokens=1000)
    give(artifact, evidence=sample_evidence(RATIOS, load=WORKLOAD, quality=quality), quality_tokens=1000)


def baseline(**changes):
    def spoil(artifact):
        own = passing_verdict(Artifact.read(artifact)).baseline
        give(artifact, baseline=replace(own, **changes))

    return spoil


def baseline_on_another_engine(artifact):
    own = passing_verdict(Artifact.read(artifact)).environment
    give(artifact, environment=replace(own, baseline_engine="vllm"))


def forget_the_source(artifact):
    manifest = Artifact.read(artifact)
    manifest.source_sha256 = None
    give_verdict(artifact, manifest, passing_verdict(manifest))


def quantize_nothing(artifact):
    weights = replace(SOUND_WEIGHTS, quantized=0, kinds=())
    give(artifact, evidence=sample_evidence(RATIOS, load=WORKLOAD, weights=weights))


def quantize_other_layers(artifact):
    weights = replace(SOUND_WEIGHTS, not_quantized=("model.layers.3.mlp.up_proj",))
    give(artifact, evidence=sample_evidence(RATIOS, load=WORKLOAD, weights=weights))
