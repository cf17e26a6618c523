"""vLLM's log: stages of a start, causes of its end, compilations. Lines as vLLM 0.26 writes them."""

from pathlib import Path

import pytest
from scalegate.serving_check.adapters.vllm import VLLM
from scalegate.serving_check.adapters.vllm_log import (
    COMPILATIONS,
    compilations_in,
    failure_of,
    kernels_in,
    stage_of,
)
from scalegate.serving_check.checks.compilations import check_compilations, compilations

PREFIX = "(EngineCore pid=1) "
TRACEBACK = PREFIX + "Traceback (most recent call last):\n" + PREFIX + '  File "core.py", line 1, in run\n'
LAST = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"

FAILURES = {
    "ValueError: Free memory on device cuda:0 (70.1/139.8 GiB) on startup is less than desired GPU memory "
    "utilization (0.92, 128.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes.": ("desired GPU memory utilization (0.92, 128.6 GiB); end what", "--devices"),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "139.8 GiB": ("Tried to allocate 2.00 GiB", "--tensor-parallel-size"),
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
    "initializing the engine": ("No available memory", "take turns"),
    "ValueError: To serve at least one request with the model's max seq len (40960), (5.63 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (2.1 GiB). Based on": (
        "max seq len (40960)",
        "--max-model-len",
    ),
    "ValueError: Unknown quantization method: int2. Must be one of ['awq', 'gptq'].": (
        "Unknown quantization method: int2;",
        "--engine embedded",
    ),
    "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: "
    "dict_keys([])": ("['FooForCausalLM'] are not supported", "--engine embedded"),
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, "
    "Unknown quantization method: gguf. Must be one of ['awq']. [type=value_error, input_value=ArgsKwargs": (
        "Unknown quantization method: gguf;",
        "--engine embedded",
    ),
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, "
    "User-specified max_model_len (99) is greater than the derived max_model_len. [type=value_error, in": (
        "User-specified max_model_len (99) is greater than the derived max_model_len.; check",
        "--engine-args",
    ),
    "usage: vllm [-h] [-v] {chat,serve,bench} ...\nvllm: error: unrecognized arguments: --no-such-word 1": (
        "vllm: error: unrecognized arguments: --no-such-word 1;",
        "--engine-args",
    ),
    "usage: main.py [-h] [-v] {chat,serve,bench} ...\nmain.py: error: unrecognized arguments: --no-such": (
        "error: unrecognized arguments: --no-such;",
        "--engine-args",
    ),
    "OSError: [Errno 98] Address already in use": ("Address already in use", "run it again"),
    "ModuleNotFoundError: No module named 'vllm._C'": ("vllm._C", "without a kernel"),
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_is_one_line_with_its_cause_and_what_to_do(line: str):
    cause, remedy = FAILURES[line]
    found = failure_of(TRACEBACK + PREFIX + line + "\n" + LAST)
    assert found is not None and "\n" not in found
    assert cause in found and remedy in found


def test_what_is_not_known_is_told_by_its_error_and_nothing_by_none():
    assert failure_of(TRACEBACK + "ValueError: a new one\n") == "ValueError: a new one; see the log"
    assert failure_of("INFO all is well\n") is None


def test_stages_follow_the_log():
    log = "INFO Starting to load model /m...\n"
    assert stage_of("INFO nothing yet\n") is None
    assert stage_of(log) == "loading weights"
    log += "Loading safetensors checkpoint shards:  50% Completed | 1/2\n"
    assert stage_of(log) == "loading weights, 50%"
    log += "Capturing CUDA graphs (decode, FULL):  20%|██\r"
    assert stage_of(log) == "capturing graphs, 20%"


def test_compilations_are_counted_from_the_log_and_fail_the_check(tmp_path: Path):
    log = tmp_path / "log.txt"
    activated = "INFO jit_monitor.py:91] Kernel JIT monitor activated; monitored JIT compilations\n"
    line = "WARNING jit_monitor.py:138] Triton kernel JIT compilation during inference: _topk_kernel. This\n"
    assert compilations_in(log) == {}
    log.write_text("INFO old version without a monitor\n")
    assert compilations_in(log) == {}, "nobody counts"
    log.write_text(activated)
    before = compilations(dict(compilations_in(log)), VLLM.series)
    log.write_text(activated + line)
    after = compilations(dict(compilations_in(log)), VLLM.series)
    assert VLLM.series.compilations == COMPILATIONS
    assert before == {}
    check = check_compilations(before, after)
    assert check.status == "fail" and "_topk_kernel" in check.reason
    assert check_compilations(before, before).status == "pass"
    tuned = "Triton autotuning for function _scan_kernel,\nwith key as (64, 'bf16'),\nfinished after 0.41s,\n"
    log.write_text(activated + tuned)
    tuning = compilations(dict(compilations_in(log)), VLLM.series)
    assert "_scan_kernel" in check_compilations(before, tuning).reason


def test_a_refusal_of_a_layer_is_quoted_with_all_its_reasons():
    stamp = "(EngineCore_DP0 pid=12) ERROR 11-28 12:00:00 [core.py:1064] "
    error = (
        "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons: ",
        "ScalegateLinearKernel requires capability 90, current compute  capability is 80",
        " MacheteLinearKernel cannot implement due to: Machete only supported on Hopper",
        " MarlinLinearKernel disabled by environment variable",
        "and no reason",
    )
    found = failure_of(TRACEBACK + "".join(f"{stamp}{line}\n" for line in error) + LAST)
    assert found is not None
    assert all(line.strip().replace("  ", " ") in found for line in error[1:4])
    assert "EngineCore" not in found and "no reason" not in found and "--export" in found


def test_kernels_and_the_plugins_lines_are_read_once_each(tmp_path: Path):
    log = tmp_path / "log.txt"
    assert kernels_in(log) == ()
    served = "scalegate-kernels serves int4 g128 sym 24576x4096 bfloat16: 1.53 times as fast as Machete"
    log.write_text(
        "INFO [a.py:1] Using ScalegateLinearKernel for CompressedTensorsWNA16\n"
        f"INFO [serving.py:32] {served}\n"
        "INFO [a.py:1] Using ScalegateLinearKernel for CompressedTensorsWNA16\n"
        "INFO [b.py:1] Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod\n"
        "INFO [cuda.py:483] Using FLASH_ATTN attention backend out of potential backends: ('FLASH_ATTN',).\n"
        "INFO [c.py:1] Using cache directory /root/.cache\n"
    )
    assert kernels_in(log) == (
        "ScalegateLinearKernel",
        served,
        "CutlassFP8ScaledMMLinearKernel",
        "FLASH_ATTN attention backend",
    )
