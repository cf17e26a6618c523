"""A weight format from outside: one file registers it and every command works with it; without it, none.

Every command runs in a process of its own, as a user's does: what it knows, it has from the environment.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from scalegate.tests.forked_command import run_pipeline
from scalegate.tests.rounding_bounds import rounded

pytestmark = pytest.mark.long

TOY = Path(__file__).with_name("toy_format.py")
COMMAND = [sys.executable, "-P", "-m", "scalegate.pipeline"]
FORMAT, LAYOUT, LABEL = "int8-row", "toy_int8", "INT8, a scale a row"
INT4_LABEL = "INT4 g64, zero points"
MIXED = """
format: int4
group_size: 64
rules:
  - modules: '*.down_proj'
    format: int8-row
  - modules: '*.layers.1.*.o_proj'
    format: unquantized
throughput_floor: 0.01
max_tpot_ratio: 1000
max_itl_ratio: 1000
max_ttft_ratio: 1000
min_reached: 0.01
min_top1_agreement: 0.5
least_largest_m: 4
least_input_len: 16
least_output_len: 16
least_quality_tokens: 1000
"""
KEPT = "model.layers.1.self_attn.o_proj"


def run(folder: Path, *arguments: object, plugin: bool = True) -> subprocess.CompletedProcess[str]:
    """`pipeline ARGUMENTS` in `folder`."""
    return run_pipeline(*arguments, environment=environment(folder, plugin), folder=folder)


def environment(folder: Path, plugin: bool = True) -> dict[str, str]:
    own = {"SCALEGATE_PLUGINS": str(TOY) if plugin else "", "SCALEGATE_CACHE": str(folder / "cache")}
    return os.environ | own


def succeed(folder: Path, *arguments: object) -> str:
    result = run(folder, *arguments)
    assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def refusal(folder: Path, *arguments: object) -> str:
    """What a command says that must refuse, the plugin not being there."""
    result = run(folder, *arguments, plugin=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled checkpoint's recipe in it; commands leave what they make there."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "mixed.yaml").write_text(MIXED)
    return folder


@pytest.fixture(scope="module")
def artifact(work: Path, example_checkpoint: Path) -> Path:
    out = work / "artifact"
    succeed(work, "quantize", example_checkpoint, "--recipe", "mixed.yaml", "--out", out)
    return out


def test_a_recipe_may_mix_it_with_int4_and_unquantized(artifact: Path) -> None:
    manifest = json.loads((artifact / "scalegate.json").read_text())["quantization"]
    modules = {name: value["format"] for name, value in manifest["modules"].items()}
    assert len(modules) == 27 and KEPT not in modules
    assert KEPT in manifest["kept"]["ignored by the recipe"]
    for name, spec in modules.items():
        assert spec["format"] == (FORMAT if name.endswith("down_proj") else "int4")
    assert {entry["label"]: entry["modules"] for entry in manifest["formats"]} == {INT4_LABEL: 23, LABEL: 4}
    errors = {name: value["relative_error"] for name, value in manifest["modules"].items()}
    assert max(error for name, error in errors.items() if name.endswith("down_proj")) < 0.02
    assert 4.3 < manifest["bits_per_weight"] < 8


def test_each_format_is_a_config_group_and_the_checkpoint_is_mixed(artifact: Path) -> None:
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    groups = {group["format"]: group for group in config["config_groups"].values()}
    assert groups["int-quantized"]["targets"] == [r"re:model\.layers\.\d+\.mlp\.down_proj$"]
    assert groups["int-quantized"]["weights"]["num_bits"] == 8
    assert groups["pack-quantized"]["weights"]["group_size"] == 64
    assert KEPT in config["ignore"]
    tensors = load_file(artifact / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (256, 1)
    assert tensors[f"{KEPT}.weight"].dtype == torch.bfloat16


def test_inspect_and_doctor_speak_of_it(artifact: Path, work: Path) -> None:
    shown = json.loads(succeed(work, "inspect", artifact, "--json"))
    formats = {entry["format"]: entry for entry in shown["formats"]}
    assert set(formats) == {INT4_LABEL, LABEL}
    assert formats[LABEL]["modules"] == 4
    # K is 768: a scale of 16 bits for each row.
    assert formats[LABEL]["bits_per_weight"] == 8 + 16 / 768
    states = json.loads(succeed(work, "doctor", "--json"))["layouts"]
    served = {state["problem"] for state in states if state["layout"] == LAYOUT and state["refusal"] is None}
    assert served == {"int8 row"}


LOADS = """
import sys, torch
from scalegate.pipeline.model_loader.load_model import load_model

for layout in (None, "dequantize"):
    loaded = load_model(sys.argv[1], progress=False, layout=layout)
    print(*sorted(set(loaded.layouts.values())))
    torch.save(loaded.model(torch.arange(3, 40).view(1, -1)).logits.float(), f"{sys.argv[2]}-{layout}.pt")
"""


def logits(work: Path, artifact: Path) -> list[tuple[torch.Tensor, set[str]]]:
    """The loaded model's, and the layouts in it: as it chooses, and dequantized."""
    out = work / "logits"
    command = [sys.executable, "-P", "-c", LOADS, str(artifact), str(out)]
    result = subprocess.run(command, env=environment(work), cwd=work, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    layouts = [set(line.split()) for line in result.stdout.splitlines()]
    found = [torch.load(f"{out}-{name}.pt") for name in (None, "dequantize")]
    return list(zip(found, layouts, strict=True))


@pytest.mark.exhaustive
def test_it_is_measured_planned_and_loaded_in_its_own_layout(artifact: Path, work: Path) -> None:
    plan = json.loads(succeed(work, "layout", artifact, "--no-kv", "--m", "1,4", "--json"))
    (choice,) = [choice for choice in plan["choices"] if choice["shape"].startswith("int8 row ")]
    assert choice["layout"] == LAYOUT, "dequantizing takes longer at any M"
    assert len(choice["modules"]) == 4
    (found, chosen), (dequantized, plain) = logits(work, artifact)
    assert LAYOUT in chosen and plain == {"dequantize"}
    # Both in bfloat16, which four layers round to a dozen times each, and the head.
    assert float((found - dequantized).norm() / dequantized.norm()) < rounded(torch.bfloat16, times=2 * 49)


@contextmanager
def served(work: Path, artifact: Path, *options: str) -> Iterator[str]:
    """The base URL of `pipeline serve` while it serves."""
    log = work / "serve.log"
    command = [*COMMAND, "serve", str(artifact), "--port", "0", *options]
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment(work), cwd=work, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + 120
            while (
                ready := re.search(r"^Serving .* on (https?://\S+)$", log.read_text(), re.MULTILINE)
            ) is None:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield ready[1]
        finally:
            process.terminate()
            process.wait(60)


def test_it_is_served(artifact: Path, work: Path) -> None:
    request = {"prompt": "def main(", "max_tokens": 8, "temperature": 0, "model": "toy"}
    with served(work, artifact, "--served-model-name", "toy") as url:
        answer = httpx.post(f"{url}/v1/completions", json=request, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.alone
@pytest.mark.exhaustive
def test_it_passes_the_gate_and_is_pushed_to_a_folder(artifact: Path, work: Path) -> None:
    small = ["--input-len", "16", "--output-len", "16", "--quality-tokens", "1024", "--max-blocks", "60"]
    succeed(work, "validate", artifact, "--m", "1,4", *small)
    target = work / "release"
    succeed(work, "push", artifact, "--to", f"folder:{target}")
    card = (target / "README.md").read_text()
    assert f"{INT4_LABEL} (23 layers) and {LABEL} (4 layers), stored as compressed-tensors" in card
    assert re.search(rf"^- {FORMAT}$", card, re.MULTILINE), "it is among the tags"
    assert (target / "model.safetensors").read_bytes() == (artifact / "model.safetensors").read_bytes()


def test_without_the_plugin_a_recipe_that_names_it_is_refused_with_what_there_is(
    work: Path, example_checkpoint: Path
) -> None:
    said = refusal(work, "quantize", example_checkpoint, "--recipe", "mixed.yaml", "--out", work / "other")
    assert (
        "mixed.yaml, line 6: `format` is one of fp8, int4, int8, iq2-xxs, mxfp4, mxfp8, nvfp4, unquantized; "
        "not 'int8-row'" in said
    )
    assert not (work / "other").exists()


def test_without_the_plugin_its_artifact_is_refused_by_what_is_read(artifact: Path, work: Path) -> None:
    said = refusal(work, "inspect", artifact)
    assert "model.layers.0.mlp.down_proj is stored as 'int-quantized', 8-bit int weights" in said
    assert "Scalegate reads compressed-tensors" in said and "INT4 pack-quantized" in said
