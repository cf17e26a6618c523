"""vLLM, or SGLang, with its own kernels and with the plugin: speed, answers, start-up; a short table last.

    python -P tests/bench/vllm_plugin/engine.py --out OUT --formats int4-sym nvfp4 --n 1 8 32 128
    python -P tests/bench/vllm_plugin/engine.py --out OUT --formats gptq awq int8 --layers 4 --n 1
    python -P tests/bench/vllm_plugin/engine.py --out OUT --server sglang --n 1 16 64
    python -P tests/bench/vllm_plugin/engine.py --out OUT --sides plugin fp8-kv int4-kv --lengths 2048x128
    python -P tests/bench/vllm_plugin/engine.py --out OUT --sides plugin int4-kv --model DIR --texts IDS

For an environment with that server and the wheel `scalegate-kernels`. Each engine is a process of its own,
offline, on a random checkpoint (`checkpoints.py`) or on that of `--model`. As many formats start at once as
fit. All sides share vLLM's compile cache, so graphs of one must not reach another. They measure in turns:
alone, plugin, plugin, alone; of several formats that started at once, each has its first turn before any has
its second. The table compares every side with the first one.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalegate.tests.bench.random_qwen3 import SHAPES
from scalegate.tests.bench.vllm_plugin import step_times
from scalegate.tests.bench.vllm_plugin.checkpoints import CONVENTIONS, float32_model, write_checkpoint
from scalegate.tests.bench.vllm_plugin.engine_table import Row, print_rest, print_speeds


@dataclass(frozen=True)
class Side:
    """kernels: the value of SCALEGATE_KERNELS; arguments: vLLM's; kv: bytes of a token, bf16's are 1."""

    kernels: str
    arguments: dict[str, Any] = field(default_factory=dict)
    kv: float = 1


INT4_KV = {"kv_cache_dtype": "int4_per_token_head"}
SIDES = {
    "alone": Side("0"),
    "plugin": Side("1"),
    "no-pdl": Side("1", {"inductor": {"triton.enable_pdl": False}}),
    "fp8-kv": Side("1", {"kv_cache_dtype": "fp8"}, 0.5),
    "int4-kv": Side("1", {**INT4_KV, "attention_backend": "CUSTOM"}, 0.27),
    "vllm-int4-kv": Side("1", {**INT4_KV, "attention_backend": "TRITON_ATTN"}, 0.27),
    "float32": Side("0"),
}
"""`float32` is transformers with the weights that the format stands for, and only scores texts."""
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
"""Of the random prompts whose log-probabilities are compared, as many as are scored at once."""
PROFILED = 24
"""Tokens of the answers whose steps are profiled."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random ones")
    parser.add_argument("--texts", type=Path, help="a list of lists of token ids to score, in JSON")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["alone", "plugin"])
    parser.add_argument("--formats", nargs="+", choices=CONVENTIONS, default=["int4-sym"])
    parser.add_argument("--dtype", default="bfloat16")
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
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="numbers of requests")
    parser.add_argument("--random-texts", type=int, default=TEXTS, help="how many are scored")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.model:
        options.formats = [options.model.name]
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
    random_one = f"{options.shape}-{options.layers or 'all'}-{convention}-{options.dtype}"
    return options.model or options.models / random_one


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    if options.model:
        return json.loads((options.model / "config.json").read_text())
    return SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})


def random_prompts(options: argparse.Namespace, n: int, length: int, seed: int) -> list[list[int]]:
    import torch

    generator, most = torch.Generator().manual_seed(seed), fields_of(options)["vocab_size"]
    return torch.randint(0, most, (n, length), generator=generator).tolist()


def texts_of(options: argparse.Namespace) -> list[list[int]]:
    """Return what is scored; the first random texts are the same for any number of them."""
    if options.texts:
        return json.loads(options.texts.read_text())
    seeds = range(TEXTS, TEXTS - options.random_texts // -TEXTS)
    return [text for seed in seeds for text in random_prompts(options, TEXTS, TEXT_TOKENS, seed)]


def compare(options: argparse.Namespace) -> None:
    """Start all engines, have them measure in turns, and tell."""
    ends = time.monotonic() + options.seconds
    for convention in options.formats:
        started = time.monotonic()
        folder = folder_of(options, convention)
        if not options.model:
            write_checkpoint(folder, options.shape, convention, options.dtype, options.layers)
        print(f"{folder.name}: written in {time.monotonic() - started:.0f} s", flush=True)
    engines: dict[tuple[str, str], Engine] = {}
    # An engine that hangs is ended in time for the table.
    ending = threading.Timer(ends - time.monotonic(), lambda: [engine.kill() for engine in engines.values()])
    ending.daemon = True
    ending.start()
    for first in range(0, len(options.formats), options.together):
        some = options.formats[first : first + options.together]
        group = {(each, side): Engine(options, each, side) for each in some for side in options.sides}
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
    for convention in options.formats:
        first, *others = (engines[convention, side] for side in options.sides)
        for other in others:
            starts = [row["start_s"] for engine in (first, other) for row in engine.rows if "start_s" in row]
            told = " -> ".join(f"{seconds:.0f}" for seconds in starts)
            print(f"# {first.name} -> {other.name}, {options.dtype}: start-up {told} s")
            for length in options.lengths:
                print_speeds(length, workload(length, options.n), first.rows, other.rows)
            print_rest(other.name, other.compiled_in_traffic, first.rows, other.rows)


def measure_turn(
    options: argparse.Namespace,
    group: "dict[tuple[str, str], Engine]",
    convention: str,
    turn: int,
    ends: float,
) -> None:
    for length in options.lengths:
        for side in options.sides if turn % 2 == 0 else reversed(options.sides):
            group[convention, side].ask(f"measure {length}", ends)
    if turn == 0:
        for side in options.sides:
            group[convention, side].ask(f"score {options.scores}", ends)
    if turn == options.turns - 1:
        for n in options.profile:
            for side in options.sides:
                group[convention, side].ask(f"profile {n}", ends)
        if options.traffic:
            group[convention, options.sides[1]].ask_for_traffic(options.traffic, ends)


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
        environment = {**os.environ, "SCALEGATE_KERNELS": SIDES[side].kernels, "PYTHONUNBUFFERED": "1"}
        child = [sys.executable, "-P", __file__, *sys.argv[1:], "--child", convention, side]
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
                        print(self.name, json.dumps(row)[:600], flush=True)
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
    kinds = {"vllm": VllmEngine, "sglang": SglangEngine}
    kind = Float32Engine if options.child[1] == "float32" else kinds[options.server]
    engine = kind(options)
    answer_to = {name: getattr(engine, name) for name in ("measure", "score", "profile", "traffic")}
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
        self.start(folder_of(options, options.child[0]), most, tokens)

    def start(self, folder: Path, most: int, tokens: int) -> None:
        """Load the model for `most` requests at once, and `tokens` of theirs."""
        from vllm import LLM

        options, side = self.options, SIDES[self.options.child[1]]
        sizes = sorted({*SIZES, 256, 512, *options.n})
        arguments = {**side.arguments}
        inductor = {"inductor_compile_config": arguments.pop("inductor", {})}
        self.traces = options.out.absolute() / f"traces-{'-'.join(options.child)}"
        if options.profile:
            arguments["profiler_config"] = {
                "profiler": "torch", "torch_profiler_dir": str(self.traces),
                "torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False,
            }  # fmt: skip
        self.llm = LLM(
            model=str(folder), skip_tokenizer_init=True, dtype=options.dtype,
            max_model_len=max(1024, self.longest + 8), max_num_seqs=most, max_num_batched_tokens=8192,
            enable_prefix_caching=False, seed=0, gpu_memory_utilization=0.1,
            # Told, and not found by looking at what is free: other engines start at the same time.
            kv_cache_memory_bytes=int(1.05 * side.kv * bytes_a_token(options) * tokens) + 2**28,
            tensor_parallel_size=options.tensor_parallel_size, **arguments,
            compilation_config={
                "cudagraph_capture_sizes": [n for n in sizes if n <= max(most, 512)],
                **{name: value for name, value in inductor.items() if value},
            },
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
        prompts = random_prompts(self.options, n, prompt, n)
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
        texts = texts_of(self.options)
        batches = [texts[first : first + TEXTS] for first in range(0, len(texts), TEXTS)]
        found = [[each for batch in batches for each in self.logprobs(batch)] for _ in range(int(times))]
        largest = [max(abs(a - b) for a, b in zip(found[0], each, strict=True)) for each in found[1:]]
        return [{"logprobs": found[0], "largest_when_scored_again": largest}]

    def profile(self, n: str) -> list[dict[str, Any]]:
        """Where the time of a step goes that decodes for n requests."""
        self.seconds_of(int(n), 32, PROFILED)
        self.llm.start_profile()
        self.seconds_of(int(n), 32, PROFILED)
        self.llm.stop_profile()
        return [{"profiled": int(n), **step_times.of_newest(self.traces, PROFILED)}]

    def traffic(self, count: str) -> list[dict[str, Any]]:
        """Requests all at once, more than run together, of prompts and answers of many lengths."""
        drawn = random.Random(0)
        most = math.log2(self.longest - TRAFFIC_ANSWER)
        lengths = [int(2 ** drawn.uniform(0, most)) for _ in range(int(count))]
        tokens = [drawn.randint(1, TRAFFIC_ANSWER) for _ in lengths]
        text = random_prompts(self.options, 1, self.longest, 1)[0]
        begun = time.perf_counter()
        given = self.given([text[:length] for length in lengths], tokens)
        whole = sum(map(int.__eq__, given, tokens))
        return [{"requests": len(lengths), "whole": whole, "seconds": time.perf_counter() - begun}]


class SglangEngine(VllmEngine):
    """The same with an SGLang engine, whose scheduler is a process of its own."""

    def start(self, folder: Path, most: int, tokens: int) -> None:
        from sglang import Engine as Sglang

        options = self.options
        self.llm = Sglang(
            model_path=str(folder), skip_tokenizer_init=True, dtype=options.dtype, random_seed=0,
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


class Float32Engine(VllmEngine):
    """transformers in float32, with the weights that the checkpoint stands for; it measures no speed."""

    def start(self, folder: Path, most: int, tokens: int) -> None:
        self.model = float32_model(folder)

    def seconds_of(self, n: int, prompt: int, answer: int) -> float:
        return 0.0

    def measure(self, length: str) -> list[dict[str, Any]]:
        return []

    def profile(self, n: str) -> list[dict[str, Any]]:
        return []

    def logprobs(self, texts: list[list[int]]) -> list[float]:
        import torch

        with torch.no_grad():
            ids = torch.tensor(texts, device="cuda")
            scores = self.model(ids).logits[:, :-1].log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None]).flatten().tolist()


def bytes_a_token(options: argparse.Namespace) -> int:
    """Return the bytes of a token's keys and values in 16 bits, on each GPU."""
    fields = fields_of(options)
    heads = fields["num_key_value_heads"] // options.tensor_parallel_size
    return 2 * 2 * heads * fields["head_dim"] * fields["num_hidden_layers"]


if __name__ == "__main__":
    main()
