"""What a GPU does for prompts and their answers, by kernel, and how long they take without a profiler.
When it does nothing is shown too, by what came before.

    python -P tests/bench/engine/kv_profile.py unquantized kvarn_k4v2_g128 --cells 16x512x1 1x32x256

One process a format; random weights of Qwen3-4B. Printed are milliseconds, on the clock and of kernels.
"""

import argparse
import subprocess
import sys
import time

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.bench.layouts.kv_decode import engine_of
from scalegate.tests.bench.random_qwen3 import random_prompts
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MODEL = "qwen3-4b"
SHOWN, SHOWN_PAUSES = 16, 8


def milliseconds(engine: Engine, count: int, length: int, output: int) -> float:
    """Until all prompts, of one length, are computed and answered."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    prompts = random_prompts(count, length, MODEL)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1000


def show(name: str, engine: Engine, cell: tuple[int, int, int]) -> None:
    clock = min(milliseconds(engine, *cell) for _ in range(3))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        milliseconds(engine, *cell)
    kernels = sorted(trace.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels) / 1000
    print(f"{name}, {cell}: {clock:.1f} ms, kernels {total:.1f} ms")
    for event in kernels[:SHOWN]:
        print(f"  {event.self_device_time_total / 1000:8.2f} ms {event.count:>6} {event.key[:60]}")
    show_gaps(trace)
    sys.stdout.flush()


def show_gaps(trace: profile) -> None:
    """Between the first kernel and the last, when nothing ran: in all, in how many pauses, and after what."""
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA
    )
    after: dict[str, list[float]] = {}
    until, last = ran[0][1], ran[0][2]
    for start, end, name in ran[1:]:
        if start > until:
            after.setdefault(last, []).append((start - until) / 1000)
        if end > until:
            until, last = end, name
    longest = sorted(after.items(), key=lambda item: -sum(item[1]))
    pauses = [gap for gaps in after.values() for gap in gaps]
    print(f"  idle {sum(pauses):.2f} ms in {len(pauses)} pauses, after:")
    for name, gaps in longest[:SHOWN_PAUSES]:
        print(f"  {sum(gaps):8.2f} ms {len(gaps):>6} at most {max(gaps):.3f} {name[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="+")
    parser.add_argument(
        "--cells", nargs="+", default=["16x512x1", "1x32x256"], help="requests x tokens in x out"
    )
    options = parser.parse_args()
    if len(options.formats) == 1:
        cells = [tuple(map(int, cell.split("x"))) for cell in options.cells]
        sizes = [(count, length + output) for count, length, output in cells]
        engine = engine_of(options.formats[0], MODEL, "cuda", sizes)
        for cell in cells:
            show(options.formats[0], engine, cell)
        return
    for name in options.formats:
        subprocess.run([sys.executable, "-P", __file__, name, "--cells", *options.cells], check=True)


if __name__ == "__main__":
    main()
