"""The engine's speed on one GPU: offline API, Qwen3-4B and 8B shapes with random weights, beside vLLM's.

    python tests/bench/engine/serving.py --out OUT/serving.json

A wave is N requests from beginning to end; in the closed loop each of N clients sends its next request when
the last is answered, three apiece, in chunks as for serving. Speed does not depend on the weights' values.
vLLM's figures were taken earlier on another H200 and are copied here, not measured: vLLM 0.26, offline API,
the same shapes, prompts and outputs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import CUDA_CHUNK_WHILE_DECODING, EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.bench.random_qwen3 import random_model, random_prompts
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MODELS = ["qwen3-4b", "qwen3-8b"]
VOCABULARY_OF = "qwen3-8b"
"""And of the 4B."""
WORKLOADS = {"32/512": (32, 512), "512/128": (512, 128)}
VLLM = {
    ("qwen3-8b", "32/512"): {1: 199, 8: 1508, 16: 3047, 32: 5708, 64: 10199, 128: 16215},
    ("qwen3-8b", "512/128"): {1: 195, 8: 1304, 16: 2349, 32: 3623, 64: 5090, 128: 6222},
    ("qwen3-4b", "32/512"): {1: 294, 8: 2250, 16: 4346, 32: 7961, 64: 13817, 128: 22003},
    ("qwen3-4b", "512/128"): {1: 286, 8: 1983, 16: 3429, 32: 5388, 64: 7565, 128: 9517},
}
VLLM_SOURCE = "vLLM 0.26, offline API, one H200, random weights; an earlier run, not this one"
PROFILED_STEPS, SETTLING_STEPS = 20, 60
"""Of decoding alone: after computing so many prompts a GPU is slower for some tenths of a second."""
CLOSED_LOOP, ROUNDS = "512/128", 3
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
"""The settings that cost most: a bound for each."""
WORKLOAD_OF_TPOT, TPOT_BAR = "32/512", 2.5
"""The p99 at the largest N over that at N=1."""
DECODING, ARRIVALS, ARRIVAL_TOKENS = 64, 5, 4000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--offline-chunk", type=int, default=8192, help="prompt tokens in a step, offline")
    parser.add_argument(
        "--serving-chunks",
        type=int,
        nargs="+",
        default=[CUDA_CHUNK_WHILE_DECODING],
        help="prompt tokens in a step while streams decode",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "engine" / "serving.json"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vllm_source": VLLM_SOURCE,
        "offline_chunk": options.offline_chunk,
        "models": {name: measure(name, options) for name in options.models},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)


def measure(name: str, options: argparse.Namespace) -> dict:
    model = random_model(name)
    started = time.perf_counter()
    engine = Engine(
        model,
        EngineOptions(
            max_num_seqs=128,
            max_model_len=4096,
            kv_cache_tokens=200_000,
            prefill_chunk=options.offline_chunk,
        ),
        frozenset(),
    )
    engine.warm_up(progress=False)
    torch.cuda.synchronize()
    ready = time.perf_counter() - started
    cells = []
    for workload in options.workloads:
        input_len, output_len = WORKLOADS[workload]
        for n in options.n:
            seconds, p99_tpot = wave(engine, n, input_len, greedy(output_len))
            ours, theirs = n * output_len / seconds, VLLM[name, workload].get(n)
            cells.append(
                {
                    "workload": workload,
                    "n": n,
                    "tok_s": ours,
                    "vllm_tok_s": theirs,
                    "ratio": theirs and ours / theirs,
                    "p99_tpot_ms": p99_tpot * 1e3,
                }
            )
    input_len, output_len = WORKLOADS[WORKLOAD_OF_TPOT]
    most = max(options.n)
    sampled = replace(greedy(output_len), **SAMPLED, seed=0)
    sampled_tok_s = most * output_len / wave(engine, most, input_len, sampled)[0]
    steps = [decode_step(engine, n) for n in options.n if n in (1, 64, 128)]
    arrivals = [arrivals_while_decoding(engine, chunk) for chunk in options.serving_chunks]
    engine.scheduler.chunk_while_decoding = options.serving_chunks[0]
    closed = [closed_loop(engine, n, *WORKLOADS[CLOSED_LOOP]) for n in options.n]
    return {
        "construct_and_warm_up_s": ready,
        "offline": cells,
        "sampled": {"workload": WORKLOAD_OF_TPOT, "n": most, "tok_s": sampled_tok_s, **SAMPLED},
        "closed_loop": closed,
        "decode_steps": steps,
        "arrivals": arrivals,
        "compilations": [str(event) for event in engine.stats().compilations],
    }


def prompts(n: int, length: int) -> list[list[int]]:
    return random_prompts(n, length, VOCABULARY_OF)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def wave(engine: Engine, n: int, input_len: int, asked: SamplingParams) -> tuple[float, float]:
    """Seconds that n requests take together, and the p99 of their times per output token after the first."""
    engine.generate(prompts(n, input_len), greedy(4))
    return timed_wave(engine, n, input_len, asked)


def timed_wave(engine: Engine, n: int, input_len: int, asked: SamplingParams) -> tuple[float, float]:
    """The figures of `wave`, without the requests that it answers first."""
    output_len = asked.max_tokens
    arrivals: dict[str, list[float]] = {}

    def serve() -> None:
        for index, prompt in enumerate(prompts(n, input_len)):
            engine.add_request(str(index), prompt, asked)
        while engine.has_work:
            outputs, now = engine.step(), time.perf_counter()
            for output in outputs:
                arrivals.setdefault(output.request_id, []).append(now)

    seconds = timed(serve)
    if [len(times) for times in arrivals.values()] != [output_len] * n:
        raise RuntimeError("tokens are missing")
    per_token = sorted((times[-1] - times[0]) / (output_len - 1) for times in arrivals.values())
    return seconds, per_token[max(0, -(-99 * n // 100) - 1)]


def closed_loop(engine: Engine, n: int, input_len: int, output_len: int) -> dict:
    """Output tokens a second of n clients, and how long they wait for a token while others' prompts come."""
    waiting = iter(prompts(n * ROUNDS, input_len))
    itls, last = [], {}

    def send(client: int) -> None:
        prompt = next(waiting, None)
        if prompt is not None:
            engine.add_request(str(client), prompt, greedy(output_len))
            last.pop(str(client), None)

    def serve() -> None:
        for client in range(n):
            send(client)
        while engine.has_work:
            outputs, now = engine.step(), time.perf_counter()
            for output in outputs:
                if output.request_id in last:
                    itls.append(now - last[output.request_id])
                last[output.request_id] = now
                if output.finish_reason is not None:
                    send(int(output.request_id))

    seconds = timed(serve)
    if len(itls) != n * ROUNDS * (output_len - 1):
        raise RuntimeError("tokens are missing")
    itls.sort()
    return {
        "workload": CLOSED_LOOP,
        "n": n,
        "tok_s": n * ROUNDS * output_len / seconds,
        "median_itl_ms": itls[len(itls) // 2] * 1e3,
        "p99_itl_ms": itls[-(len(itls) // 100) - 1] * 1e3,
    }


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def start_decoding(engine: Engine, n: int, input_len: int, output_len: int) -> None:
    for index, prompt in enumerate(prompts(n, input_len)):
        engine.add_request(f"stream-{index}", prompt, greedy(output_len))
    while engine.scheduler.waiting or any(sequence.is_prefilling for sequence in engine.scheduler.running):
        engine.step()
    for _ in range(4):
        engine.step()


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def decode_step(engine: Engine, n: int) -> dict:
    """One step's time, against the sum of its kernels' times."""
    wall, kernels = profiled_steps(engine, n)
    busy = covered([(start, end) for _, start, end in kernels]) * 1e-6 / PROFILED_STEPS
    return {"n": n, "step_ms": wall * 1e3, "kernels_ms": busy * 1e3, "idle_share": 1 - busy / wall}


def profiled_steps(engine: Engine, n: int) -> tuple[float, list[tuple[str, float, float]]]:
    """Seconds that a decode step of n requests takes; and of all that the GPU does in PROFILED_STEPS of them
    its name, start and end in microseconds."""

    def steps() -> None:
        for _ in range(PROFILED_STEPS):
            engine.step()

    start_decoding(engine, n, 256, SETTLING_STEPS + 5 * PROFILED_STEPS)
    for _ in range(SETTLING_STEPS):
        engine.step()
    before = timed(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(steps)
    # Contexts grow: the profiled steps lie between the timed ones.
    wall = (before + timed(steps)) / 2 / PROFILED_STEPS
    finish(engine)
    return wall, [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]


def covered(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one runs: a kernel may be launched into the end of the one before it."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def arrivals_while_decoding(engine: Engine, chunk: int) -> dict:
    """Inter-token latencies of streams that decode, alone and while a long prompt arrives every second."""
    engine.scheduler.chunk_while_decoding = chunk
    start_decoding(engine, DECODING, 64, 1500)
    alone = [timed_step(engine) for _ in range(200)]
    disturbed, started, arrived = [], time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < ARRIVALS:
        if elapsed >= arrived:
            engine.add_request(f"long-{arrived}", prompts(1, ARRIVAL_TOKENS)[0], greedy(1))
            arrived += 1
        disturbed.append(timed_step(engine))
    for index in range(DECODING):
        engine.abort(f"stream-{index}")
    finish(engine)
    median, p99 = statistics.median(alone), statistics.quantiles(disturbed, n=100)[98]
    return {
        "prefill_chunk": chunk,
        "median_itl_alone_ms": median * 1e3,
        "median_itl_ms": statistics.median(disturbed) * 1e3,
        "p99_itl_ms": p99 * 1e3,
        "ratio": p99 / median,
    }


def timed_step(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def show(results: dict) -> None:
    print(f"vLLM's figures: {results['vllm_source']}")
    for name, model in results["models"].items():
        print(f"\n{name}: constructed and warmed up in {model['construct_and_warm_up_s']:.1f} s")
        print(f"{'in/out':>8} {'N':>4} {'tok/s':>7} {'TPOT':>6} {'vLLM':>7} {'ratio':>6}")
        for cell in model["offline"]:
            ours = f"{cell['tok_s']:>7.0f} {cell['p99_tpot_ms']:>6.2f}"
            vllm = f"{cell['vllm_tok_s']:>7} {cell['ratio']:>6.3f}" if cell["vllm_tok_s"] else ""
            print(f"{cell['workload']:>8} {cell['n']:>4} {ours} {vllm}")
        cell = model["sampled"]
        print(f"{cell['workload']:>8} {cell['n']:>4} {cell['tok_s']:>7.0f} with {SAMPLED}")
        for cell in model["closed_loop"]:
            print(
                f"{cell['workload']:>8} {cell['n']:>4} {cell['tok_s']:>7.0f} in a closed loop; ITL "
                f"{cell['median_itl_ms']:.1f} ms, p99 {cell['p99_itl_ms']:.1f}"
            )
        tpot = {c["n"]: c["p99_tpot_ms"] for c in model["offline"] if c["workload"] == WORKLOAD_OF_TPOT}
        if tpot:
            slower = tpot[max(tpot)] / tpot[min(tpot)]
            print(f"p99 TPOT at N={max(tpot)}: {slower:.2f} times that at N={min(tpot)} (bar {TPOT_BAR})")
        for step in model["decode_steps"]:
            print(
                f"N={step['n']}: a step {step['step_ms']:.3f} ms, its kernels {step['kernels_ms']:.3f}; "
                f"idle {step['idle_share']:.1%}"
            )
        for stall in model["arrivals"]:
            print(
                f"{DECODING} streams, a {ARRIVAL_TOKENS}-token prompt every second in chunks of "
                f"{stall['prefill_chunk']}: p99 ITL {stall['p99_itl_ms']:.1f} ms, "
                f"{stall['ratio']:.2f} times the median of {stall['median_itl_alone_ms']:.1f} ms without"
            )
        print(f"compiled after warm-up: {', '.join(model['compilations']) or 'nothing'}")


if __name__ == "__main__":
    main()
