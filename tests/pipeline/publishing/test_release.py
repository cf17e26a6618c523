"""`pipeline release` does each stage once, takes up at the one it was interrupted in, and obeys the gate."""

import json

import pytest
import torch
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.release import command
from scalegate.pipeline.commands import release as release_module
from scalegate.pipeline.commands import release_request
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.release import release
from scalegate.pipeline.conventions.compressed_tensors.convention import CONVENTION as compressed_tensors
from scalegate.pipeline.records.artifact import Artifact
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.pipeline.publishing.fake_hub import Drop, Refuse, Request
from scalegate.tests.pipeline.publishing.passed_artifact import edit_json
from scalegate.tests.pipeline.publishing.stand_in_gate import StandInGate
from scalegate.tests.pipeline.publishing.test_push_hub import failing
from scalegate.tests.serving_check.gate_samples import EMULATED
from scalegate.tests.verdict_files import read_verdict
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.long

PATIENT = """
format: nvfp4
throughput_floor: 0.02
max_tpot_ratio: 1000
max_ttft_ratio: 1000
min_reached: 0.01
min_top1_agreement: 0.5
least_largest_m: 2
least_input_len: 16
least_output_len: 8
least_quality_tokens: 1000
"""

OPTIONS = {"m": (1, 4, 32), "device": "cpu"}
NO_NEW_SERVERS = ["--max-blocks", 60]
"""Too few blocks for servers to be started anew for groups of them, which takes minutes on a busy machine."""


@pytest.fixture
def gate(monkeypatch):
    """The gate's place taken by one that answers at once; every other stage is real."""

    gate = StandInGate()
    monkeypatch.setattr(release_module, "validate", gate)
    return gate


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    """One random layer: quantizing and laying it out takes no time worth mentioning."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def shared_measurements(tmp_path_factory):
    """Layouts are measured once for the module, and not into the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALEGATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def run(tmp_path, tiny_checkpoint):
    def run(recipe="int4-hqq", to=f"folder:{tmp_path / 'release'}", **changes):
        options = {"work": tmp_path / "work", "progress": False, **OPTIONS, **changes}
        return release(tiny_checkpoint, recipe, to, **options)

    return run


def skipped(result):
    return [stage.name for stage in result.stages if stage.skipped]


def test_all_stages_run_once_and_are_skipped_when_run_again(run, gate, tmp_path):
    first = run()
    assert [stage.name for stage in first.stages] == ["quantize", "layout", "validate", "push"]
    assert skipped(first) == []
    published = inspect(tmp_path / "release")
    assert published.quantized_modules == 7
    assert published.verdict is not None and published.verdict_problem is None
    assert skipped(run()) == ["quantize", "layout", "validate", "push"]
    assert gate.runs == 1


@pytest.mark.exhaustive
def test_keys_and_values_alone_are_a_release_whose_card_says_how_to_serve_it(run, gate, tmp_path):
    result = run("kvarn-k4v2")
    assert [stage.name for stage in result.stages] == ["quantize", "layout", "validate", "push"]
    manifest = Artifact.read(tmp_path / "release")
    assert manifest.kv_cache == "kvarn_k4v2_g128" and manifest.quantization["modules"] == {}
    assert inspect(tmp_path / "release").kv_cache == manifest.kv_cache
    plan = manifest.layout_plan
    timed = {
        (measurement["context"], measurement["m"])
        for measurement in plan["kv"]
        if measurement["kv_format"] == manifest.kv_cache
    }
    # 352 tokens in, so that codes are read, and 64 out.
    assert timed == {(416, m) for m in OPTIONS["m"]}
    card = (tmp_path / "release" / "README.md").read_text()
    assert "keys and values stored as `kvarn_k4v2_g128`" in card and "with its weights unchanged" in card
    for said in (
        "pipeline serve release\n",
        "vllm serve release --kv-cache-dtype kvarn_k4v2_g128\n",
        "SGLang, which has no kvarn_k4v2_g128 and keeps keys and values as they are:",
        "vLLM, which has no kvarn_k4v2_g128 and keeps keys and values as they are:",
        "pipeline release tiny --recipe kvarn-k4v2 --m",
    ):
        assert said in card, card
    assert skipped(run("kvarn-k4v2")) == ["quantize", "layout", "validate", "push"]


def test_a_rival_named_by_its_recipe_is_made_too_and_given_to_the_gate(run, gate, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        release_module,
        "validate",
        lambda *folders, **asked: (given.append(asked["rival"]), gate(*folders, **asked))[1],
    )
    result = run(rival="int4-hqq-g32")
    assert [stage.name for stage in result.stages] == [
        "quantize",
        "layout",
        "rival",
        "layout",
        "validate",
        "push",
    ]
    assert given == [str(tmp_path / "work" / "tiny-int4-hqq-g32")]
    assert inspect(given[0]).quantized_modules == 7


def test_what_asks_another_question_is_validated_again(run, gate):
    run()
    for changes in ({"floor": 0.95}, {"m": (1, 2, 8, 32)}, {"output_len": 128}):
        assert "validate" not in skipped(run(**changes))
    assert gate.runs == 4


def test_a_verdict_given_with_other_engine_options_does_not_stand(run, gate):
    run()
    assert "validate" not in skipped(run(prefill_chunk=64))
    assert "validate" in skipped(run(prefill_chunk=64))
    assert "validate" not in skipped(run())
    assert gate.runs == 3


def test_a_kv_format_cannot_be_released_by_trying_it(run, gate, tmp_path):
    with pytest.raises(UserError, match="--kv-cache-dtype tries a KV format out"):
        run(kv_cache_dtype="fp8")
    assert not (tmp_path / "work").exists()


def test_servers_too_short_for_the_load_are_refused_before_anything_is_quantized(run, gate, tmp_path):
    with pytest.raises(UserError, match="--max-model-len 100 is too short for requests of 64"):
        run(max_model_len=100)
    # The load of its KV format, whose codes are not read sooner.
    with pytest.raises(UserError, match="--max-model-len 200 is too short for requests of 352"):
        run("kvarn-k4v2", max_model_len=200)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("spoil", ["the verdict", "the plan"])
def test_a_verdict_on_something_else_does_not_stand(run, gate, spoil):
    folder = run().artifact
    if spoil == "the verdict":
        edit_json(folder / "serving_check.json", duration_seconds=1.0)
    else:
        # With a plan that was not measured here, layout measures again, and the verdict goes with the plan.
        plan = Artifact.read(folder).layout_plan
        edit_json(folder / "scalegate.json", layout_plan=plan | {"device": "another"})
    result = run()
    assert "quantize" in skipped(result) and "validate" not in skipped(result)
    assert gate.runs == 2


@pytest.mark.parametrize(
    ("status", "exit_code"), exhaustive_but([("fail", 1), ("inconclusive", 2)], ("fail", 1))
)
def test_nothing_is_published_unless_the_gate_passes(gate, tmp_path, tiny_checkpoint, status, exit_code):
    gate.status = status
    arguments = [str(tiny_checkpoint), "--to", f"folder:{tmp_path / 'release'}", "--device", "cpu"]
    arguments += ["--m", "1,4,32", "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == exit_code
    assert f"Not published: the gate says {status}" in result.output
    assert not (tmp_path / "release").exists()
    gate.status = "pass"
    again = CliRunner().invoke(command, [*arguments, "--json"])
    assert again.exit_code == 0
    stages = json.loads(again.stdout)["stages"]
    assert [stage["name"] for stage in stages if stage["skipped"]] == ["quantize", "layout"]
    assert (tmp_path / "release" / "README.md").is_file()


def test_quality_without_speed_is_released_only_on_request(gate, tmp_path, tiny_checkpoint):
    gate.emulated = EMULATED
    arguments = [str(tiny_checkpoint), "--to", f"folder:{tmp_path / 'release'}", "--device", "cpu"]
    arguments += ["--m", "1,4,32", "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert "Not published: speed was not judged" in result.output
    assert not (tmp_path / "release").exists()
    again = CliRunner().invoke(command, arguments)
    assert (again.exit_code, gate.runs) == (2, 2), "another machine may judge it, so it is asked again"
    asked = CliRunner().invoke(command, [*arguments, "--allow-unjudged-speed", "--json"])
    assert (asked.exit_code, gate.runs) == (0, 2)
    assert "compute capability 8.9" in json.loads(asked.stdout)["verdict"]["speed_not_judged"]
    assert "**Speed was not judged: " in (tmp_path / "release" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"m": (1, 4)}, "the largest M is 4"),
        ({"floor": 0.5}, "throughput floor 0.5"),
        ({"quality_tokens": 1024}, "1024 held-out tokens"),
        ({"output_len": 16}, "16 output tokens a request"),
    ],
)
def test_an_exploratory_release_is_refused_before_anything_is_quantized(run, gate, tmp_path, changes, words):
    with pytest.raises(UserError, match=f"exploratory(.|\n)*{words}"):
        run(**changes)
    assert not (tmp_path / "work").exists()


def test_a_target_that_cannot_work_is_refused_before_anything_is_quantized(run, gate, tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not a release of ours"):
        run()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.exhaustive), ["--dry-run"]])
def test_a_card_that_the_hub_refuses_is_named_before_anything_is_made(
    hub, pipeline, example_checkpoint, tmp_path, more
):
    hub.before = failing("POST validate_yaml", Refuse(400, '"license" must be one of apache-2.0, mit'))
    words = [
        "release",
        example_checkpoint,
        "--to",
        "org/model",
        "--work",
        tmp_path / "work",
        "--device",
        "cpu",
    ]
    result = pipeline(*words, *more, **hub.environment())
    assert result.returncode == 2, result.stderr
    assert "refuses the front matter of README.md" in result.stderr and "must be one of" in result.stderr
    assert not (tmp_path / "work").exists() and not hub.repos


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_our_engine_cannot_serve_is_said_before_anything_is_made(tmp_path, dry_run):
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model("rwkv", **sizes, context_length=4096)
    output = refused(config, tmp_path, dry_run)
    assert "the embedded engine cannot serve RwkvForCausalLM" in output


@pytest.mark.parametrize("dry_run", [True, False])
def test_that_alibi_is_not_served_on_a_gpu_is_said_before_anything_is_made(tmp_path, dry_run, monkeypatch):
    monkeypatch.setattr(release_request, "resolve_device", lambda device: "cuda")
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 2, "seq_length": 4096}
    output = refused(AutoConfig.for_model("bloom", **sizes), tmp_path, dry_run)
    assert "BloomForCausalLM: attention with ALiBi is served on a CPU only" in output


@pytest.mark.parametrize("dry_run", [True, False])
def test_that_a_kv_format_would_round_alibi_is_said_before_anything_is_made(tmp_path, dry_run):
    sizes = {"vocab_size": 64, "hidden_size": 128, "n_layer": 2, "n_head": 2, "seq_length": 4096}
    output = refused(AutoConfig.for_model("bloom", **sizes), tmp_path, dry_run, "--recipe", "kvarn-k4v2")
    # The option of the engine is none of `release`.
    assert "which kvarn_k4v2_g128 would round (`kv_cache: unquantized` in the recipe keeps them)" in output


def refused(config, folder, dry_run, *more):
    """What `release` says of a random model with this config."""
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "source")
    words = [folder / "source", "--to", f"folder:{folder / 'target'}", "--work", folder / "work", *more]
    found = CliRunner().invoke(command, [*map(str, words), *(["--dry-run"] if dry_run else [])])
    assert found.exit_code == 2, found.output
    assert not (folder / "work").exists() and not (folder / "target").exists()
    return found.output


def test_a_dry_run_says_what_is_made_measured_and_published_and_does_nothing(tiny_checkpoint, tmp_path):
    target = tmp_path / "release"
    words = [tiny_checkpoint, "--to", f"folder:{target}", "--work", tmp_path / "work", "--dry-run"]
    result = CliRunner().invoke(command, [*map(str, words), "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["quantize"]["formats"] == {"INT4 g128, symmetric": 7} and not found["done_before"]
    assert found["validate"]["ms"] == [1, 2, 4, 8, 16, 32] and found["validate"]["floor"] == 0.93
    assert found["validate"]["requests"] == 63 * 6 and 0 < found["validate"]["seconds"] < 60
    assert found["validate"]["most_seconds"] == pytest.approx(16 * found["validate"]["seconds"])
    report = {"serving_check.json", "serving_check/report.html", "serving_check/ratio.png"}
    assert {"README.md", "scalegate.json", *report} < set(found["files"])
    said = CliRunner().invoke(command, [*map(str, words), "--tasks", "arc_easy"]).stdout
    assert "at least 378 requests" in said and "scores of arc_easy" in said and str(target) in said
    assert not (tmp_path / "work").exists() and not target.exists()
    weak = CliRunner().invoke(command, [*map(str, words), "--m", "1,2"])
    assert weak.exit_code == 2 and "exploratory" in weak.output


def test_another_recipe_of_the_same_name_is_not_taken_for_the_finished_one(run, gate, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("format: int4\ngroup_size: 128\n")
    run(recipe)
    recipe.write_text("format: int4\ngroup_size: 64\n")
    with pytest.raises(UserError, match="another recipe"):
        run(recipe)
    assert "quantize" not in skipped(run(recipe, overwrite=True))


@pytest.mark.exhaustive
@pytest.mark.alone
def test_from_one_hub_repository_to_another_killed_while_it_uploads(
    hub, pipeline, tmp_path, example_checkpoint
):
    """The whole command with its real gate, in NVFP4, under bounds that any machine reaches."""
    files = {path.name: path.read_bytes() for path in example_checkpoint.iterdir()}
    files["README.md"] = b"---\nlicense: psf-2.0\nlanguage: [code]\ntags: [tiny]\n---\n# base\n"
    base = hub.add_repo("maker/base", files)
    recipe = tmp_path / "patient.yaml"
    recipe.write_text(PATIENT)
    arguments = ["release", "maker/base", "--recipe", recipe, "--to", "org/base-NVFP4", "--device", "cpu"]
    arguments += ["--work", tmp_path / "work", "--m", "1,2", "--input-len", 16, "--output-len", 8]
    arguments += ["--quality-tokens", 1024, *NO_NEW_SERVERS]
    process = pipeline.start(*arguments, **hub.environment())

    def kill(request: Request) -> None:
        process.kill()
        process.wait()
        raise Drop

    hub.half_way = kill
    _, stderr = process.communicate()
    assert process.returncode == -9, stderr
    assert hub.visible_files("org/base-NVFP4") == []

    hub.half_way = lambda request: None
    result = pipeline(*arguments, "--json", **hub.environment())
    assert result.returncode == 0, result.stderr
    stages = json.loads(result.stdout)["stages"]
    assert [stage["name"] for stage in stages if stage["skipped"]] == ["quantize", "layout", "validate"]
    released = hub.repos["org/base-NVFP4"].history()[0].files
    assert {"model.safetensors", "tokenizer.json", "serving_check/throughput.png"} <= set(released)
    card = released["README.md"].content.decode()
    assert "license: psf-2.0" in card and "base_model: maker/base" in card
    assert f"--revision {base.history()[0].oid} --recipe patient.yaml --m 1,2" in card
    assert "zp" not in card, "NVFP4 has no zero points"
    assert "throughput floor: 0.02" in card and "max ttft ratio: 1000" in card
    assert "least largest m 2 (the policy says 32)" in card
    verified = pipeline("verify", "org/base-NVFP4", "--json", **hub.environment())
    assert verified.returncode == 0, verified.stdout + verified.stderr
    found = json.loads(verified.stdout)
    assert {finding["name"] for finding in found["findings"] if finding["holds"] != "yes"} == {"signature"}

    artifact = tmp_path / "work" / "base-patient"
    verdict = read_verdict(artifact / "serving_check.json")
    assert next(check for check in verdict.checks if check.name == "loads").measured.startswith(
        "28 of 29 linear layers quantized"
    )
    stored = compressed_tensors.modules(open_checkpoint(artifact))
    assert {module.spec.name for module in stored.values()} == {"nvfp4"}
