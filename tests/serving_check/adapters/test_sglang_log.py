"""SGLang's log: stages of a start, causes of its end. Its metrics and spare tokens. All as in 0.5.16."""

from dataclasses import replace
from pathlib import Path

import pytest
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.adapters.prometheus_text import parse_metrics, total
from scalegate.serving_check.adapters.sglang import LONGER_CONTEXT, READER, SERIES, SGLANG
from scalegate.serving_check.adapters.subprocess_endpoint import SubprocessEndpoint
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.workload.engine_work import preemptions

AT = "[2026-11-28 12:28:19] "
TRACEBACK = AT + "Scheduler hit an exception: Traceback (most recent call last):\n"
LAST = AT + "Received sigquit from a child process. It usually means the child failed.\n"
FAILURES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": (
        "Tried to allocate 2.00 GiB",
        "--tensor-parallel-size",
    ),
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
    "mem_fraction_static=0.1": ("Not enough memory", "end what else runs"),
    "ValueError: nccl_port at 30211 is not available in 30 seconds. nccl_port at 30211 is not available": (
        "nccl_port at 30211 is not available",
        "took the port",
    ),
    "ValueError: Unknown quantization method: int2. Must be one of ['awq', 'gptq'].": (
        "Unknown quantization method: int2;",
        "--engine embedded",
    ),
    "ValueError: The quantization method w4afp8 is not supported for the current GPU. "
    "Minimum capability: 90.": (
        "The quantization method w4afp8 is not supported",
        "--engine embedded",
    ),
    "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 90. ')": (
        "Quantization scheme is not supported",
        "--engine embedded",
    ),
    "NotImplementedError: No compressed-tensors compatible scheme was found.": (
        "No compressed-tensors compatible scheme was found.",
        "--engine embedded",
    ),
    "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. "
    "Supported architectures: []": (
        "['FooForCausalLM'] are not supported",
        "--engine embedded",
    ),
    "sglang: error: unrecognized arguments: --no-such-option": ("--no-such-option", "--engine-args"),
    "NotImplementedError: a new one": ("NotImplementedError: a new one", "see the log"),
}
METRICS = """# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.25
sglang:num_retracted_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.0
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5.0
sglang:prompt_tokens_total{model_name="m"} 70.0
sglang:generation_tokens_total{model_name="m"} 30.0
"""


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_is_one_line_with_its_cause_and_what_to_do(line: str):
    cause, remedy = FAILURES[line]
    found = READER.failure(TRACEBACK + line + "\n\n" + LAST)
    assert found is not None and "\n" not in found
    assert cause in found and remedy in found


def test_a_log_without_a_failure_has_no_cause():
    assert READER.failure(AT + "Port 30000 is already in use, trying port 30001\n") is None


def test_stages_follow_the_log():
    log = AT + "Load weight begin. avail mem=138.10 GB\n"
    assert READER.stage("server_args=ServerArgs(model_path='/m')\n") is None
    assert READER.stage(log) == "loading weights"
    log += AT + "Memory pool end. avail mem=120.00 GB\n"
    assert READER.stage(log) == "the KV cache is allocated"
    for name in ("target prefill", "target decode"):
        graphs = AT + f"Capture {name} CUDA graph begin. backend=full, avail mem=119.00 GB\n"
        assert READER.stage(log + graphs) == "capturing graphs"
    assert READER.stage(log + AT + "The server is fired up and ready to roll!\n") == "serving"


def test_a_server_that_was_killed_was_ended_by_the_machine_and_one_that_aborted_was_not():
    crash = (
        AT + "Subprocess scheduler_0 (pid=77) crashed with exit code {}. Triggering SIGQUIT for cleanup...\n"
    )
    reason = READER.ending(crash.format(-9))
    assert reason is not None and "scheduler_0" in reason and "out of memory" in reason
    assert READER.ending(crash.format(-6)) is None, "an abort, which a request may cause"


def test_the_series_are_those_of_sglang():
    samples = parse_metrics(METRICS)
    found = {name: total(samples, series) for name, series in vars(SERIES).items() if isinstance(series, str)}
    assert found == {
        "running": 3,
        "waiting": 2,
        "kv_cache_usage": 0.25,
        "preemptions": 5,
        "prompt_tokens": 70,
        "generation_tokens": 30,
    }


def test_pipeline_stages_share_out_what_runs_and_repeat_what_waits():
    second = METRICS.replace('pp_rank="0"', 'pp_rank="1"').replace("} 3.0", "} 4.0")
    samples = parse_metrics(METRICS + second)
    assert total(samples, SERIES.running) == 7
    assert (total(samples, SERIES.waiting), total(samples, SERIES.kv_cache_usage)) == (2, 0.25)
    assert total(samples, SERIES.preemptions) == 5


def test_there_were_no_preemptions_before_their_counter_appears():
    lines = [line for line in METRICS.splitlines() if "retracted_requests" not in line]
    before, after = parse_metrics("\n".join(lines)), parse_metrics(METRICS)
    assert preemptions(before, before, SERIES) == 0
    assert preemptions(before, after, SERIES) == 5
    assert preemptions({}, {}, SERIES) is None, "a server that shows no metrics"
    of_others = replace(SERIES, preemptions_appear_late=False)
    assert preemptions(before, before, of_others) is None, "a server that should have shown it"


def test_the_longest_request_fits_and_all_are_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sglang").touch(0o755)
    prompt, answer, requests = 128, 127, 8
    longest = prompt + answer
    options = EngineOptions(max_num_seqs=requests, max_model_len=longest, kv_cache_tokens=requests * longest)
    server = SGLANG.server(ServerJob("sglang", "artifact", tmp_path, options, tmp_path / "log"))
    assert isinstance(server, SubprocessEndpoint)
    context, pool = (
        int(server.command[server.command.index(option) + 1])
        for option in ("--context-length", "--max-total-tokens")
    )
    # `TpModelWorker.get_worker_info`, then `Scheduler.init_req_max_new_tokens`, with pages of one token.
    most = min(context - 1, pool - 1)
    assert min(most - prompt - 1, pool - prompt - 2) >= answer
    # `PrefillAdder.add_one_req_ignore_eos` for the last of all requests, which arrive together: each of the
    # others has taken its prompt and one page, and each reserves one token.
    assert pool - (requests - 1) * (prompt + 1) - prompt - answer * requests > requests
    # SGLang refuses a context above the model's own, which here may be the longest request.
    assert server.env is not None and server.env[LONGER_CONTEXT] == "1"
