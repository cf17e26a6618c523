"""vLLM, or SGLang, with its own kernels and with the plugin: speed, answers, start-up; a short table last.

    python -P tests/bench/vllm_plugin/engine.py --out OUT --formats int4-sym nvfp4 --n 1 8 32 128
    python -P tests/bench/vllm_plugin/engine.py --out OUT --formats gptq awq int8 --layers 4 --n 1
    python -P tests/bench/vllm_plugin/engine.py --out OUT --server sglang --n 1 16 64

For an environment with that server and the wheel `scalegate-kernels`. Each engine is a process of its own,
offline, on a random checkpoint (`checkpoints.py`). As many formats start at once as fit. Both sides share
vLLM's compile cache, so graphs of one must not reach the other. They measure in turns: alone, plugin, plugin,
alone; of several formats that started at once, each has its first turn before any has its second.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalegate.tests.bench.random_qwen3 import SHAPES, random_prompts
from scalegate.tests.bench.vllm_plugin.checkpoints import CONVENTIONS, write_checkpoint

SIDES = {"alone": "0", "plugin": "1"}
"""Values of SCALEGATE_KERNELS."""
Row = dict[str, Any]
TOLD = (
    "scalegate-kernels",
    "LinearKernel",
    "attention backend",
    "jit_monitor",
    "compilation during inference",
    "cache",
    "took",
)
TRAFFIC_ANSWER = 64
"""The most tokens of an answer in mixed traffic; prompts take the rest of the longest length."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of requests for which CUDA graphs are captured."""
SGLANG = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
}
"""How SGLang runs without FlashAttention 3 and FlashInfer."""
TEXTS, TEXT_TOKENS = 8, 256
"""Of the random prompts whose log-probabilities are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--formats", nargs="+", choices=CONVENTIONS, default=["int4-sym"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--lengths", nargs="+", default=["32x512"],
        help="prompt x answer, in tokens; 2048x32:1,16,64 for numbers of requests other than --n",
    )  # fmt: skip
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--together", type=int, default=1, help="formats that fit into the GPU at once")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--scores", type=int, default=1, help="how often texts are scored, to see whether an answer changes"
    )
    parser.add_argument(
        "--lock", type=Path, help="a file that benches which start together share, to measure one by one"
    )
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument(
        "--traffic", type=int, default=0, help="requests of mixed lengths for each engine with the plugin"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        run_engine(options)
    else:
        compare(options)


def workload(length: str, numbers: list[int]) -> tuple[int, int, list[int]]:
    """Return tokens of a prompt and of an answer, and the numbers of requests, of one of `--lengths`."""
    tokens, _, own = length.partition(":")
    prompt, answer = map(int, tokens.split("x"))
    return prompt, answer, [*map(int, own.split(","))] if own else numbers


def folder_of(options: argparse.Namespace, convention: str) -> Path:
    return options.models / f"{options.shape}-{options.layers or 'all'}-{convention}-{options.dtype}"


def compare(options: argparse.Namespace) -> None:
    """Start all engines, have them measure in turns, and tell."""
    ends = time.monotonic() + options.seconds
    for convention in options.formats:
        started = time.monotonic()
        folder = folder_of(options, convention)
        write_checkpoint(folder, options.shape, convention, options.dtype, options.layers)
        print(f"{folder.name}: written in {time.monotonic() - started:.0f} s", flush=True)
    engines: dict[tuple[str, str], Engine] = {}
    # An engine that hangs is ended in time for the table.
    ending = threading.Timer(ends - time.monotonic(), lambda: [engine.kill() for engine in engines.values()])
    ending.daemon = True
    ending.start()
    for first in range(0, len(options.formats), options.together):
        some = options.formats[first : first + options.together]
        group = {(each, side): Engine(options, each, side) for each in some for side in SIDES}
        engines |= group
        for engine in group.values():
            engine.answer(ends)
        with alone_with(options.lock):
            for turn in range(options.turns):
                for convention in some:
                    measure_turn(options, group, convention, turn, ends)
        for engine in group.values():
            engine.stop()
    for engine in engines.values():
        print(f"## {engine.name}")
        for line in dict.fromkeys(engine.told()):
            print(f"   {line}")
    table(options, engines)


def measure_turn(
    options: argparse.Namespace,
    group: "dict[tuple[str, str], Engine]",
    convention: str,
    turn: int,
    ends: float,
) -> None:
    for length in options.lengths:
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            group[convention, side].ask(f"measure {length}", ends)
    if turn == 0:
        for side in SIDES:
            group[convention, side].ask(f"score {options.scores}", ends)
        if options.traffic:
            group[convention, "plugin"].ask_for_traffic(options.traffic, ends)


@contextlib.contextmanager
def alone_with(lock: Path | None) -> Iterator[None]:
    """Hold the lock within the block, if there is one."""
    if lock is None:
        yield
        return
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


class Engine:
    """A child that holds an engine; it answers each line of its input with one of its output."""

    def __init__(self, options: argparse.Namespace, convention: str, side: str):
        self.name = f"{convention} {side}"
        self.log = options.out / f"{convention}-{side}.log"
        self.results = options.out / f"{options.shape}-{convention}-{side}.jsonl"
        self.rows: list[Row] = []
        self.compiled_in_traffic: list[str] = []
        environment = {**os.environ, "SCALEGATE_KERNELS": SIDES[side], "PYTHONUNBUFFERED": "1"}
        child = [sys.executable, "-P", __file__, *sys.argv[1:], "--child", convention]
        self.process = subprocess.Popen(
            child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            stderr=self.log.open("w"), start_new_session=True,
        )  # fmt: skip

    def ask(self, line: str, ends: float) -> None:
        if self.process.poll() is None and time.monotonic() < ends:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            self.answer(ends)

    def ask_for_traffic(self, requests: int, ends: float) -> None:
        before = len(self.compiled())
        self.ask(f"traffic {requests}", ends)
        self.compiled_in_traffic = self.compiled()[before:]

    def answer(self, ends: float) -> None:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                rows = json.loads(line.removeprefix("ANSWER "))
                self.rows += [{"engine": self.name, **row} for row in rows]
                with self.results.open("a") as results:
                    results.writelines(json.dumps(row) + "\n" for row in self.rows[-len(rows) :])
                for row in rows:
                    if "logprobs" not in row:
                        print(self.name, json.dumps(row), flush=True)
                return
            with self.log.open("a") as log:
                log.write(line)
        print(f"{self.name} ended: {self.log.read_text(errors='replace')[-3000:]}", flush=True)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        """Kill the child and all processes that vLLM started for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def compiled(self) -> list[str]:
        """What vLLM's monitor says was compiled since the start, in order."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line.split("] ", 1)[-1][:160] for line in lines if "during inference: " in line]

    def told(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        chosen = [line for line in lines if any(word in line for word in TOLD)]
        return [line.split("] ", 1)[-1][:160] for line in chosen]


def run_engine(options: argparse.Namespace) -> None:
    """The child: load an engine, then answer each line of the input."""
    started = time.perf_counter()
    engine = SglangEngine(options) if options.server == "sglang" else VllmEngine(options)
    answer_to = {"measure": engine.measure, "score": engine.score, "traffic": engine.traffic}
    engine.seconds_of(2, 64, 8)
    print("ANSWER", json.dumps([{"start_s": time.perf_counter() - started}]), flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        print("ANSWER", json.dumps(answer_to[word](*rest)), flush=True)


class VllmEngine:
    """A vLLM engine in this process, and what it measures."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        workloads = [workload(length, options.n) for length in options.lengths]
        self.longest = max(prompt + answer for prompt, answer, _ in workloads)
        self.warm: set[tuple[str, int]] = set()
        most = max(n for *_, numbers in workloads for n in numbers)
        tokens = max((prompt + answer + 32) * max(numbers) for prompt, answer, numbers in workloads)
        self.start(str(folder_of(options, options.child)), most, tokens)

    def start(self, folder: str, most: int, tokens: int) -> None:
        """Load the model for `most` requests at once, and `tokens` of theirs."""
        from vllm import LLM

        options = self.options
        sizes = sorted({*SIZES, 256, 512, *options.n})
        self.llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype=options.dtype,
            max_model_len=max(1024, self.longest + 8), max_num_seqs=most, max_num_batched_tokens=8192,
            enable_prefix_caching=False, seed=0, gpu_memory_utilization=0.1,
            kv_cache_dtype=options.kv_cache_dtype,
            # Told, and not found by looking at what is free: other engines start at the same time.
            kv_cache_memory_bytes=int(1.05 * bytes_a_token(options) * tokens) + 2**28,
            tensor_parallel_size=options.tensor_parallel_size,
            compilation_config={"cudagraph_capture_sizes": [n for n in sizes if n <= max(most, 512)]},
        )  # fmt: skip

    def given(self, prompts: list[list[int]], tokens: list[int]) -> list[int]:
        """Answer prompts with so many greedy tokens each, all at once; return how many each was given."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=0.0, max_tokens=each, ignore_eos=True, detokenize=False)
            for each in tokens
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        answers = self.llm.generate(requests, sampling, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    def logprobs(self, texts: list[list[int]]) -> list[float]:
        """Return the log-probability of each token of the texts but their first ones."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in texts], sampling, use_tqdm=False)
        return [
            each[token].logprob
            for ids, answer in zip(texts, answers, strict=True)
            for token, each in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
        ]

    def seconds_of(self, n: int, prompt: int, answer: int) -> float:
        prompts = random_prompts(n, prompt, self.options.shape)
        begun = time.perf_counter()
        given = self.given(prompts, [answer] * n)
        seconds = time.perf_counter() - begun
        if given != [answer] * n:
            raise RuntimeError("tokens are missing")
        return seconds

    def measure(self, length: str) -> list[dict[str, Any]]:
        prompt, answer, numbers = workload(length, self.options.n)
        found = []
        for n in numbers:
            if (length, n) not in self.warm:
                self.seconds_of(n, prompt, min(answer, 8))
                self.warm.add((length, n))
            first, whole = self.seconds_of(n, prompt, 1), self.seconds_of(n, prompt, answer)
            found.append({"length": length, "n": n, "tok_s": n * answer / whole, "first_s": first})
        return found

    def score(self, times: str) -> list[dict[str, Any]]:
        texts = random_prompts(TEXTS, TEXT_TOKENS, self.options.shape)
        found = [self.logprobs(texts) for _ in range(int(times))]
        largest = [max(abs(a - b) for a, b in zip(found[0], each, strict=True)) for each in found[1:]]
        return [{"logprobs": found[0], "largest_when_scored_again": largest}]

    def traffic(self, count: str) -> list[dict[str, Any]]:
        """Requests all at once, more than run together, of prompts and answers of many lengths."""
        drawn = random.Random(0)
        most = math.log2(self.longest - TRAFFIC_ANSWER)
        lengths = [int(2 ** drawn.uniform(0, most)) for _ in range(int(count))]
        tokens = [drawn.randint(1, TRAFFIC_ANSWER) for _ in lengths]
        text = random_prompts(1, self.longest, self.options.shape)[0]
        begun = time.perf_counter()
        given = self.given([text[:length] for length in lengths], tokens)
        whole = sum(map(int.__eq__, given, tokens))
        return [{"requests": len(lengths), "whole": whole, "seconds": time.perf_counter() - begun}]


class SglangEngine(VllmEngine):
    """The same with an SGLang engine, whose scheduler is a process of its own."""

    def start(self, folder: str, most: int, tokens: int) -> None:
        from sglang import Engine as Sglang

        options = self.options
        self.llm = Sglang(
            model_path=folder, skip_tokenizer_init=True, dtype=options.dtype, random_seed=0,
            context_length=max(1024, self.longest + 8), max_running_requests=most, max_total_tokens=tokens,
            # Of the memory that is free when it starts: other engines start at the same time.
            mem_fraction_static=0.5, chunked_prefill_size=8192, disable_radix_cache=True,
            cuda_graph_bs_decode=sorted({n for n in (*SIZES, *options.n) if n <= most}),
            tp_size=options.tensor_parallel_size, log_level="info", **SGLANG,
        )  # fmt: skip

    def given(self, prompts: list[list[int]], tokens: list[int]) -> list[int]:
        sampling = [{"temperature": 0, "max_new_tokens": each, "ignore_eos": True} for each in tokens]
        answers = self.llm.generate(input_ids=prompts, sampling_params=sampling)
        return [len(answer["output_ids"]) for answer in answers]

    def logprobs(self, texts: list[list[int]]) -> list[float]:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        answers = self.llm.generate(
            input_ids=texts, sampling_params=sampling, return_logprob=True, logprob_start_len=0
        )
        return [logprob for each in answers for logprob, *_ in each["meta_info"]["input_token_logprobs"][1:]]


def bytes_a_token(options: argparse.Namespace) -> int:
    """Return the bytes of a token's keys and values in 16 bits, on each GPU."""
    fields = SHAPES[options.shape]
    heads = fields["num_key_value_heads"] // options.tensor_parallel_size
    return 2 * 2 * heads * fields["head_dim"] * (options.layers or fields["num_hidden_layers"])


def table(options: argparse.Namespace, engines: dict[tuple[str, str], Engine]) -> None:
    """Print speeds and their ratios to the server alone: the better of an engine's turns."""
    for convention in options.formats:
        alone, plugin = (engines[convention, side] for side in SIDES)
        starts = [
            next((row["start_s"] for row in engine.rows if "start_s" in row), math.nan)
            for engine in (alone, plugin)
        ]
        print(f"# {convention} {options.dtype}: start-up {starts[0]:.0f} -> {starts[1]:.0f} s")
        print_speeds(options, alone.rows, plugin.rows)
        print_rest(plugin, alone.rows, plugin.rows)


def print_speeds(options: argparse.Namespace, theirs: list[Row], ours: list[Row]) -> None:
    for length in options.lengths:
        for n in workload(length, options.n)[2]:
            found = [
                [row for row in side if (row.get("length"), row.get("n")) == (length, n)]
                for side in (theirs, ours)
            ]
            if all(found):
                speed = [max(row["tok_s"] for row in side) for side in found]
                first = [min(row["first_s"] for row in side) * 1e3 for side in found]
                print(
                    f"  {length} N={n}: {speed[0]:.0f} -> {speed[1]:.0f} tok/s, {speed[1] / speed[0]:.3f}x; "
                    f"first token {first[0]:.0f} -> {first[1]:.0f} ms"
                )


def print_rest(engine: Engine, theirs: list[Row], ours: list[Row]) -> None:
    """Print what became of mixed traffic, and how far log-probabilities differ."""
    for row in ours:
        if "requests" in row:
            print(
                f"  {row['requests']} requests of mixed lengths in {row['seconds']:.0f} s: "
                f"{row['whole']} whole; compiled: {engine.compiled_in_traffic or 'nothing'}"
            )
    for name, side in (("alone", theirs), (engine.name, ours)):
        for row in side:
            if again := row.get("largest_when_scored_again"):
                told = " ".join(f"{each:.3f}" for each in again)
                print(f"  {name}: scored again, the largest difference of a log-probability: {told}")
    scores = [next((row["logprobs"] for row in side if "logprobs" in row), None) for side in (theirs, ours)]
    if all(scores):
        differences = [abs(a - b) for a, b in zip(*scores, strict=True)]
        nats = [-sum(each) / len(each) for each in scores]
        print(
            f"  log-probabilities: mean difference {sum(differences) / len(differences):.4f}, largest "
            f"{max(differences):.3f}; nats {nats[0]:.4f} and {nats[1]:.4f}"
        )


if __name__ == "__main__":
    main()
