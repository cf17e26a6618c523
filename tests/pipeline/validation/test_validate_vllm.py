"""`pipeline validate --engine vllm`: what the command is given, and how its failures end, with a stand-in."""

import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.pipeline.cli.validate import command
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.validation import by_layers, serving
from scalegate.pipeline.validation.gpu_memory import MemoryPlan
from scalegate.pipeline.validation.servers import server_of
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.adapters.taking_turns import TakingTurns
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.gate.turns import LEAST_BLOCKS
from scalegate.serving_check.statistics.decide import LOOKS, TURN_LOOKS
from scalegate.tests.verdict_files import read_verdict

from .vllm_stand_in import OUT_OF_MEMORY

pytestmark = pytest.mark.long

STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
LOAD = ["--m", "1", "--input-len", "16", "--output-len", "8", "--quality-tokens", "1024", "--floor", "0.01"]
# The fewest blocks that decide anything: speed is not what is tested, so that a busy machine costs no more.
LOAD += ["--max-blocks", str(LOOKS[0])]


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "artifact"
    quantize(str(example_checkpoint), "int4-hqq", out=folder, progress=False)
    return folder


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `vllm` on PATH; the file in which its words are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    child = [sys.executable, "-P", str(STAND_IN)]
    start = f"import os, sys\nos.execv(sys.executable, {child} + sys.argv[1:])"
    (folder / "vllm").write_text(f"#!{sys.executable}\n{start}\n")
    (folder / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("STAND_IN_WORDS", str(tmp_path / "words.txt"))
    return tmp_path / "words.txt"


def run(artifact: Path, *options: str):
    return CliRunner().invoke(command, [str(artifact), "--engine", "vllm", *LOAD, *options])


@pytest.mark.exhaustive
def test_a_verdict_on_two_vllm_servers(
    artifact: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both models together are too large for this process, so that it looks at them a layer at a time."""
    monkeypatch.setattr(by_layers, "free_bytes", lambda device: 1 << 20)
    options = [
        "--engine-args",
        "--block-size 32",
        "--baseline-engine-args",
        "",
        "--report",
        str(tmp_path / "r"),
        # The model knows code, a quarter of them.
        "--quality-tokens",
        "4096",
    ]
    result = run(artifact, *options)
    assert (tmp_path / "r").is_dir(), result.output
    verdict = read_verdict(tmp_path / "r" / "serving_check.json")
    assert result.exit_code == verdict.exit_status
    ours, theirs = sorted(words.read_text().splitlines(), key=lambda line: str(artifact) not in line)
    assert "--block-size 32" in ours and "--block-size" not in theirs
    assert "--no-enable-prefix-caching --max-num-seqs 1" in ours and "--max-model-len 128" in ours
    assert verdict.environment.engine == "vllm"
    assert verdict.environment.engine_options["engine_args"] == "--block-size 32"
    assert "--engine-args '--block-size 32'" in verdict.command
    assert not verdict.artifact.layouts, "vLLM runs its own kernels"
    assert verdict.artifact.kernels == verdict.baseline.kernels == ("StandInLinearKernel",)
    assert verdict.environment.engine_versions["vllm"]["torch"] == metadata.version("torch")
    status = {check.name: check.status for check in verdict.checks}
    assert status["compilations in traffic"] == "pass"
    assert verdict.evidence.by_layers
    (quality,) = (check for check in verdict.checks if check.name == "quality")
    assert quality.status == "pass" and "run a layer at a time" in quality.reason
    assert status["canary text"] == "pass" and verdict.evidence.answers


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("memory", [], "Tried to allocate 2.00 GiB"),
        ("hang", ["--startup-timeout", "2"], "did not serve within 2 s"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing_running(
    artifact: Path, words: Path, monkeypatch, fault: str, options: list[str], message: str
):
    monkeypatch.setenv("STAND_IN", fault)
    result = run(artifact, *options)
    assert result.exit_code == 2
    line = result.output.splitlines()[-1]
    assert message in line
    assert OUT_OF_MEMORY not in result.output, "the cause, not the log"
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    assert not any(str(STAND_IN) in " ".join(child.cmdline()) for child in alive)


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two models do not fit on one GPU."""
    plan = MemoryPlan({"artifact": None, "baseline": None}, together=False)
    monkeypatch.setattr(serving, "plan_memory", lambda sides, placement: plan)


@pytest.mark.exhaustive
def test_servers_that_do_not_fit_together_take_turns_to_a_verdict(
    artifact: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    take_turns(monkeypatch)
    result = run(artifact, "--max-blocks", str(LEAST_BLOCKS), "--report", str(tmp_path / "r"))
    assert (tmp_path / "r").is_dir(), result.output
    verdict = read_verdict(tmp_path / "r" / "serving_check.json")
    assert result.exit_code == verdict.exit_status
    assert "they take turns" in result.output and "took turns" in result.output
    starts = words.read_text().splitlines()
    assert len(starts) == TURN_LOOKS[0] + 1, "a start a group, and canary texts cost none"
    (loads,) = (check for check in verdict.checks if check.name == "loads")
    assert "28 of 29 linear layers quantized" in loads.measured
    assert "products" not in loads.measured, "vLLM runs its own kernels"
    (measured,) = verdict.evidence.measured
    assert sorted({block.restarts for block in measured.blocks}) == list(range(1, TURN_LOOKS[0] + 1))


def test_too_few_blocks_for_turns_are_refused_before_a_server_is_started(
    artifact: Path, words: Path, monkeypatch: pytest.MonkeyPatch
):
    take_turns(monkeypatch)
    result = run(artifact)
    assert result.exit_code == 2 and f"needs --max-blocks {LEAST_BLOCKS}" in result.output
    assert not words.exists()


@pytest.mark.exhaustive
def test_a_server_killed_in_its_turn_decides_nothing(
    artifact: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor does the proof of a batch-invariance claim, which starts the other side's, hide it."""
    take_turns(monkeypatch)
    # Canary text by both, the artifact once more, then the baseline.
    kills = iter([False, False, False, True])
    take = TakingTurns.take

    def killed(self: TakingTurns, side: str):
        fresh = self.up != side
        endpoint = take(self, side)
        if fresh and next(kills, False):
            (server,) = psutil.Process(self._servers[side]._process.pid).children()
            server.kill()
        return endpoint

    monkeypatch.setattr(TakingTurns, "take", killed)
    result = run(artifact, "--max-blocks", str(LEAST_BLOCKS), "--batch-invariance", "pin")
    assert result.exit_code == 2
    assert "Nothing was decided" in result.output.splitlines()[-1], result.output


def test_options_that_do_not_reach_an_engine_are_refused(artifact: Path):
    with pytest.raises(UserError, match="its server would run on fewer GPUs"):
        validate(artifact, engine="vllm", baseline_engine="embedded", tensor_parallel_size=2, progress=False)
    with pytest.raises(UserError, match="PyTorch finds no GPU here"):
        validate(artifact, engine="vllm", devices=(0, 1), progress=False)
    with pytest.raises(UserError, match="--tensor-parallel-size does not apply to the engine 'embedded'"):
        validate(artifact, tensor_parallel_size=2, progress=False)
    with pytest.raises(UserError, match="--device cpu both name a device"):
        validate(artifact, devices=(0, 1), device="cpu", progress=False)
    with pytest.raises(UserError, match="--engine-args does not apply"):
        validate(artifact, engine_args="--x 1", progress=False)


def test_its_batch_invariant_mode_is_turned_on_and_no_more_than_it_has(artifact: Path, words: Path):
    def environment(batch_invariance: str) -> dict[str, str]:
        options = EngineOptions(batch_invariance=batch_invariance)
        return server_of(ServerJob("vllm", "artifact", artifact, options, words.parent / "artifact.log")).env

    assert environment("pin")["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment("tuned")
    with pytest.raises(UserError, match="vLLM does not serve --batch-invariance per-token"):
        environment("per-token")
