"""Batch invariance on a GPU, of Qwen3-8B's shapes with random weights: are the bits kept, and what it costs.

    python -P tests/bench/engine/batch_invariance.py bits  --format int4 --out bits_int4.json
    python -P tests/bench/engine/batch_invariance.py speed --format bf16 --out speed_bf16.json
    python -P tests/bench/engine/batch_invariance.py long  --layers 6 --out long.json
    python -P tests/bench/engine/batch_invariance.py product --out product.json
    python -P tests/bench/engine/batch_invariance.py vllm --folder /dev/shm --out vllm.json

bits: 64 requests of 1 to 4,000 prompt tokens, each alone, then in company; all logits of every token are
compared, bit for bit, under tuned, pin and per-token. tuned must differ in every kind of company. Some layers
do: what differs in one differs in all. speed: output tokens a second of the three, all layers, in turns at no
N: one engine after the other. long: a decode step over long contexts. product: our product of plain weights
beside cuBLAS's at that M, and beside cuBLAS's of 128 rows whatever M is. vllm: speed, and then vLLM's, tuned
and with VLLM_BATCH_INVARIANT=1, on a checkpoint made in --folder. Exit status 1 where bits differ that must
not.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scalegate.base.batch_invariance import INVARIANCE_MODES
from scalegate.kernels import invariant_matmul as ours
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.scheduler import Schedule
from scalegate.tests.bench import random_qwen3
from scalegate.tests.bench.engine.before_after import Worker
from scalegate.tests.bench.engine.int4_engine import merged, quantized
from scalegate.tests.bench.engine.nvfp4_engine import ask
from scalegate.tests.bench.engine.serving import greedy, wave
from scalegate.tests.bench.engine.startup import random_checkpoint
from torch import Tensor
from torch.nn import functional

MODEL = "qwen3-8b"
INT4_LAYOUTS = {"tuned": "swap_ab", "pin": "swap_ab_invariant", "per-token": "swap_ab_invariant"}
REQUESTS, NEW_TOKENS, LONGEST = 64, 32, 4000
SHORTEST_CHUNK = 192
"""Of prompts while others decode: small, so that most steps of the mixes are mixed batches."""
INPUT_LEN, OUTPUT_LEN = 32, 512
NS = (1, 8, 16, 32, 64, 128)
LENGTHS, LONG_NS, LONG_STEPS = (4096, 16384), (1, 8, 32), 48
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
MOST_NAMED = 40
ROWS = (1, 16, 32, 64, 128, 512, 2048)
PINNED_ROWS = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["bits", "speed", "long", "product", "vllm"])
    parser.add_argument("--format", choices=["bf16", "int4"], default="bf16")
    parser.add_argument("--layers", type=int, help="default 4 for bits, all for speed")
    parser.add_argument("--shuffles", type=int, default=15, help="batches of 128 for bits")
    parser.add_argument("--n", type=int, nargs="+", default=list(NS))
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN)
    parser.add_argument("--modes", nargs="+", default=list(INVARIANCE_MODES), choices=INVARIANCE_MODES)
    parser.add_argument("--folder", type=Path, help="where vLLM's checkpoint is made, best in memory: 16 GB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = {"bits": bits, "speed": speed, "long": long_contexts, "product": product, "vllm": beside_vllm}
    result, failed = parts[options.part](options)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **result}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(failed))


def engine_of(options: argparse.Namespace, mode: str, layers: int | None, **sizes: Any) -> Engine:
    """A warm engine; every call makes the same weights."""
    gc.collect()
    torch.cuda.empty_cache()
    if layers is not None:
        random_qwen3.SHAPES[MODEL]["num_hidden_layers"] = layers
    model = merged(random_qwen3.random_model(MODEL))
    if options.format == "int4":
        model = quantized(model, INT4_LAYOUTS[mode])
    engine = Engine(model, EngineOptions(batch_invariance=mode, **sizes), frozenset())
    engine.warm_up(progress=False)
    return engine


# Bits


Request = tuple[str, list[int]]
Key = tuple[str, int]
"""A request, and the number of tokens that its logits follow."""
Step = dict[str, Any]
"""The row of logits, how many decoded in that step, and its prompts' (start, count, is it a replay)."""
Compared = tuple[str, int, Step, Tensor]
"""A request, its tokens, the step that computed its logits, how many of them differ."""
Company = Callable[[Engine, list[Request]], None]


def bits(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    vocabulary = random_qwen3.SHAPES[MODEL]["vocab_size"]
    numbers = random.Random(5)
    lengths = [1, 2, LONGEST, *(round(LONGEST ** numbers.random()) for _ in range(REQUESTS - 3))]
    requests = [
        (str(index), [numbers.randrange(vocabulary) for _ in range(length)])
        for index, length in enumerate(lengths)
    ]
    kinds: dict[str, Company] = {
        "shorter neighbours": lambda engine, all_: beside(engine, all_[8:16], [5, 6, 7], 7),
        "a longer neighbour": lambda engine, all_: beside(engine, all_[8:16], [9] * 4040, 1),
        "batches of 4": lambda engine, all_: batches(engine, all_[:32], 4),
        "batches of 16": lambda engine, all_: batches(engine, all_, 16),
        "a batch of 64": lambda engine, all_: batches(engine, all_, 64),
        "a batch of 64, in another order": lambda engine, all_: batches(engine, all_[::-1], 64),
        "batches of 128, shuffled": lambda engine, all_: shuffled(engine, all_, options.shuffles),
        "prompts beside decoding": arriving,
        "preempted": preempted,
    }
    found: dict[str, dict[str, Any]] = {}
    for mode in options.modes:
        engine = engine_of(
            options,
            mode,
            options.layers or 4,
            max_num_seqs=128,
            max_model_len=4096,
            kv_cache_tokens=200_000,
            chunk_while_decoding=SHORTEST_CHUNK,
        )
        expected: dict[Key, Tensor] = {}
        watch(engine, lambda key, row, step, alone=expected: alone.setdefault(key, row))
        for request in requests:
            run(engine, [request])
        found[mode] = {}
        for kind, company in kinds.items():
            compared: list[Compared] = []
            watch(engine, partial(compare, expected, compared))
            company(engine, requests)
            counts = torch.stack([count for *_, count in compared]).tolist()
            rows = [
                {"request": name, "prompt": lengths[int(name)], "tokens": tokens, "logits": count, **step}
                for (name, tokens, step, _), count in zip(compared, counts, strict=True)
                if count
            ]
            found[mode][kind] = {
                "rows": len(counts),
                "logits": len(counts) * vocabulary,
                "rows_that_differ": len(rows),
                "preemptions": engine.scheduler.preemptions,
                "which": rows[:MOST_NAMED] if mode != "tuned" else [],
            }
            print(mode, kind, f"{len(rows)} of {len(counts)} rows differ", flush=True)
            for row in found[mode][kind]["which"]:
                print("   ", row)
        del engine, expected
    print(f"{options.format}, {options.layers or 4} layers: rows of {vocabulary} logits that differ")
    drift = print_drift(found)
    return {"format": options.format, "layers": options.layers or 4, "found": found}, drift


def print_drift(found: dict[str, dict[str, Any]]) -> bool:
    """Print how many rows differ in each mode and company; return whether any differ outside `tuned`."""
    print(f"{'':<34}" + "".join(f"{mode:>18}" for mode in found))
    for kind in next(iter(found.values()), {}):
        cells = [by_kind[kind] for by_kind in found.values()]
        print(f"{kind:<34}" + "".join(f"{c['rows_that_differ']:>9} /{c['rows']:>7}" for c in cells))
    drift = any(
        cell["rows_that_differ"]
        for mode, by_kind in found.items()
        for cell in by_kind.values()
        if mode != "tuned"
    )
    vacuous = not all(cell["rows_that_differ"] for cell in found.get("tuned", {}).values())
    print("FAILED" if drift else "kept", "and the control is vacuous" if vacuous else "")
    return drift


def watch(engine: Engine, seen: Callable[[Key, Tensor, Step], Any]) -> None:
    """`seen` gets the logits [V] of every token from now on."""
    run_step = type(engine.runner).run.__get__(engine.runner)

    def watched(batch: Schedule):
        result = run_step(batch)
        rows = result.logits.clone()
        prefill = [(chunk.start, chunk.count, chunk.is_replay) for chunk in batch.prefill]
        for index, sequence in enumerate(result.sequences):
            step = {"row": index, "decode": len(batch.decode), "prefill": prefill}
            seen((sequence.request_id, len(sequence.tokens)), rows[index], step)
        return result

    engine.runner.run = watched  # type: ignore[method-assign]


def compare(expected: dict[Key, Tensor], compared: list[Compared], key: Key, row: Tensor, step: Step) -> None:
    """A request's other names are turn/name."""
    name = key[0].rpartition("/")[2]
    alone = expected.get((name, key[1]))
    if alone is not None:
        compared.append((name, key[1], step, (row != alone).sum()))


GREEDY = greedy(NEW_TOKENS)


def run(engine: Engine, requests: list[Request]) -> None:
    for name, tokens in requests:
        engine.add_request(name, tokens, GREEDY)
    while engine.has_work:
        engine.step()


def batches(engine: Engine, requests: list[Request], size: int) -> None:
    for start in range(0, len(requests), size):
        run(engine, requests[start : start + size])


def shuffled(engine: Engine, requests: list[Request], times: int) -> None:
    """Each request twice in a batch, at other places each time."""
    numbers = random.Random(6)
    for turn in range(times):
        twice = [(f"{turn}{half}/{name}", tokens) for half in "ab" for name, tokens in requests]
        run(engine, numbers.sample(twice, len(twice)))


def beside(engine: Engine, requests: list[Request], other: list[int], count: int) -> None:
    for request in requests:
        run(engine, [*((f"other {index}", other) for index in range(count)), request])


def arriving(engine: Engine, requests: list[Request]) -> None:
    """Two more with every third step, so that prompts are read beside decoding, in other chunks."""
    left, step = list(requests), 0
    while engine.has_work or left:
        if step % 3 == 0:
            for name, tokens in left[:2]:
                engine.add_request(name, tokens, GREEDY)
            left = left[2:]
        engine.step()
        step += 1


def preempted(engine: Engine, requests: list[Request]) -> None:
    """Every seventh step the request admitted last gives its pages back, and is computed again."""
    overlapped, engine._overlapped = engine._overlapped, False
    for name, tokens in requests[:32]:
        engine.add_request(name, tokens, GREEDY)
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if step % 7 == 0 and len(engine.scheduler.running) > 1:
            engine.scheduler._preempt_last()
    engine._overlapped = overlapped


# Speed


def speed(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    rates: dict[str, dict[int, float]] = {}
    for mode in options.modes:
        engine = engine_of(
            options,
            mode,
            options.layers,
            max_num_seqs=128,
            max_model_len=1024,
            kv_cache_tokens=128 * (INPUT_LEN + options.output_len + 64),
            decode_buckets=tuple(options.n),
            prefill_chunk=512,
        )
        rates[mode] = {}
        for n in options.n:
            seconds, _ = wave(engine, n, INPUT_LEN, greedy(options.output_len))
            rates[mode][n] = n * options.output_len / seconds
            tuned = rates.get("tuned", {}).get(n)
            cost = "" if tuned is None else f", {tuned / rates[mode][n]:.3f} of tuned's time"
            print(f"{options.format} {mode} N={n}: {rates[mode][n]:.0f} tok/s{cost}", flush=True)
        compiled = engine.stats().compilations
        print(mode, {n: round(rate) for n, rate in rates[mode].items()}, *compiled, flush=True)
        del engine
    print(f"{options.format}, {INPUT_LEN}/{options.output_len}: time over tuned's")
    for n in options.n if "tuned" in rates else ():
        costs = [f"{rates['tuned'][n] / rate[n]:>12.3f}" for name, rate in rates.items() if name != "tuned"]
        print(f"{n:>4} {rates['tuned'][n]:>9.0f} tok/s" + "".join(costs))
    return {
        "format": options.format,
        "input_len": INPUT_LEN,
        "output_len": options.output_len,
        "tok_s": rates,
    }, False


# Long contexts


def long_contexts(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Milliseconds of a decode step, by mode, context and N."""
    steps: dict[str, dict[str, float]] = {}
    vocabulary = random_qwen3.SHAPES[MODEL]["vocab_size"]
    for mode in options.modes:
        engine = engine_of(
            options,
            mode,
            options.layers,
            max_num_seqs=max(LONG_NS),
            max_model_len=max(LENGTHS) + 4 * LONG_STEPS,
            kv_cache_tokens=max(LONG_NS) * (max(LENGTHS) + 8 * LONG_STEPS),
            decode_buckets=LONG_NS,
            prefill_chunk=8192,
        )
        steps[mode] = {}
        for length in LENGTHS:
            for n in LONG_NS:
                steps[mode][f"{length} x {n}"] = decode_step(engine, n, length, vocabulary)
        print(mode, {cell: round(ms, 3) for cell, ms in steps[mode].items()}, flush=True)
        del engine
    for cell, ms in steps.get("tuned", {}).items():
        costs = [f"{step[cell] / ms:>8.3f}" for name, step in steps.items() if name != "tuned"]
        print(f"{cell:>12} {ms:>8.3f} ms" + "".join(costs))
    return {"format": options.format, "layers": options.layers, "step_ms": steps}, False


def decode_step(engine: Engine, n: int, length: int, vocabulary: int) -> float:
    """Milliseconds, of n requests whose prompts have been read."""
    numbers = random.Random(n)
    for index in range(n):
        prompt = [numbers.randrange(vocabulary) for _ in range(length)]
        # All go on until the last one's prompt has been read.
        engine.add_request(str(index), prompt, greedy(4 * LONG_STEPS))
    while engine.scheduler.waiting or any(sequence.is_prefilling for sequence in engine.scheduler.running):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(LONG_STEPS):
        engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return 1e3 * seconds / LONG_STEPS


# vLLM's


def beside_vllm(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Ours, then vLLM's, each in a process of its own."""
    ours, _ = speed(options)
    gc.collect()
    torch.cuda.empty_cache()
    rates: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = random_checkpoint(Path(folder) / MODEL, MODEL, "cuda")
        torch.cuda.empty_cache()
        for mode, switch in (("tuned", "0"), ("pin", "1")):
            worker = vllm_worker(checkpoint, options.n, switch)
            try:
                print(mode, json.loads(worker.answer()), flush=True)
                rates[mode] = {
                    n: n * options.output_len / ask(worker, f"wave {n} {options.output_len}")
                    for n in options.n
                }
            finally:
                worker.process.kill()
                worker.process.wait()
    print("tok/s under pin, ours and vLLM's; time over one's own tuned mode, ours and vLLM's")
    for n in options.n:
        both = ours["tok_s"], rates
        cells = [f"{result['pin'][n]:>10.0f}" for result in both]
        print(f"{n:>4}", *cells, *(f"{result['tuned'][n] / result['pin'][n]:>8.3f}" for result in both))
    return {**ours, "vllm_tok_s": rates}, False


def vllm_worker(checkpoint: Path, ns: list[int], switch: str) -> Worker:
    command = [sys.executable, "-P", str(Path(__file__).with_name("nvfp4_engine.py"))]
    command += ["--worker", "vllm", str(checkpoint), MODEL, "cuda", "--n", *map(str, ns)]
    environment = {**os.environ, "VLLM_BATCH_INVARIANT": switch}
    pipe = subprocess.PIPE
    return Worker(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))


# The product alone


def product(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    cells, drift = [], 0
    for n, k in SHAPES:
        copies = max(2, 300_000_000 // (2 * n * k))  # more than the L2 cache holds
        weights = [torch.randn(n, k, device="cuda").bfloat16() * 0.02 for _ in range(copies)]
        semaphores = torch.zeros(ours.semaphores_of(n), dtype=torch.int32, device="cuda")
        x = torch.randn(max(ROWS), k, device="cuda").bfloat16()
        alone = torch.cat([ours.invariant_matmul(row, weights[0], semaphores) for row in x[:64].split(1)])
        wanted = x[:64].float() @ weights[0].float().T
        error = float((alone.float() - wanted).norm() / wanted.norm())
        for m in ROWS:
            by_tile = {}
            for tile in tiles_to_try(m, n, k):
                y = ours.invariant_matmul(x[:m], weights[0], semaphores, tile)
                drift += not torch.equal(y[:64], alone[:m])
                calls = [partial(ours.invariant_matmul, x[:m], w, semaphores, tile) for w in weights]
                by_tile[tile] = microseconds(calls)
            cublas = microseconds([partial(functional.linear, x[:m], w) for w in weights])
            pinned = microseconds([partial(functional.linear, x[: max(m, PINNED_ROWS)], w) for w in weights])
            best = min(by_tile, key=lambda tile: by_tile[tile])
            cell = {
                "n": n,
                "k": k,
                "m": m,
                "us": by_tile[ours.tile_for(m, n, k, x.dtype)],
                "cublas_us": cublas,
            }
            cell |= {"pinned_us": pinned, "by_tile": {str(tile): us for tile, us in by_tile.items()}}
            cells.append({**cell, "error": error})
            print(
                f"{n:>6}x{k:<5} M={m:<4} ours {cell['us']:>6.1f} best {by_tile[best]:>6.1f} "
                f"{(best.bm, best.bn, best.bk, best.stages, best.warps)!s:<20} "
                f"cuBLAS {cublas:>6.1f} pinned {pinned:>6.1f}",
                flush=True,
            )
        print(f"relative error {error:.1e}", flush=True)
    print(f"{drift} products whose bits follow M or the tile")
    return {"cells": cells, "drift": drift}, drift > 0


def tiles_to_try(m: int, n: int, k: int) -> list[ours.Tile]:
    """The table's, and others of as many rows."""
    tile = ours.tile_for(m, n, k, torch.bfloat16)
    more = [(64, 128, 3, 4), (64, 64, 6, 4), (128, 64, 4, 8)]
    tried = [tile, *(ours.Tile(tile.bm, *sizes) for sizes in more)]
    fits = [
        candidate
        for candidate in tried
        if (candidate.bm + candidate.bn) * candidate.bk * 2 * candidate.stages <= 220 * 1024
    ]
    return list(dict.fromkeys(fit for fit in fits if fit.bn * fit.bm <= 128 * 32 * fit.warps))


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of one call, from a graph of all of them; the median of five."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(6):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[1:])


if __name__ == "__main__":
    with torch.inference_mode():
        main()
