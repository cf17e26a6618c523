"""Runs the numeric tests as on several CPUs, of which this one is made into older ones: `make test-isas`.

    python -P tests/on_each_isa.py [MACHINE…]

Caps torch's own kernels, oneDNN, MKL, numpy's OpenBLAS (which multiplies for Triton's interpreter) and Numba
at the same instructions. What this CPU does not have is not tried. A table of failures comes last.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS: list[tuple[list[str], dict[str, str]]] = [
    (["-m", "numeric and not gpu and not alone"], {}),
    (
        ["tests/kernels/interpreted", "-m", "not gpu"],
        {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    ),
]
"""Pytest's arguments and environment: Triton decides as it is imported whether kernels are interpreted."""


def capped(aten: str, onednn: str, mkl: str, openblas: str, numba: str, features: str = "") -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_CBWR": mkl,
        "OPENBLAS_CORETYPE": openblas,
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": features,
    }


AVX512 = "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
WITH_BF16 = f"{AVX512},+avx512bf16"
MACHINES: dict[str, tuple[str, dict[str, str]]] = {
    "SSE4.1": ("sse4_1", capped("default", "SSE41", "COMPATIBLE", "Nehalem", "nehalem")),
    "AVX2": ("avx2", capped("avx2", "AVX2", "AVX2", "Haswell", "haswell")),
    "AVX-512": ("avx512vl", capped("avx512", "AVX512_CORE", "AVX512", "SkylakeX", "skylake-avx512", AVX512)),
    "AVX-512 with bf16": (
        "avx512_bf16",
        capped("avx512", "AVX512_CORE_BF16", "AVX512", "Cooperlake", "cooperlake", WITH_BF16),
    ),
    "AMX": (
        "amx_bf16",
        capped("avx512", "AVX512_CORE_AMX", "AVX512", "SapphireRapids", "sapphirerapids", WITH_BF16),
    ),
    "this CPU, one thread": ("", {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
}
"""By name: the flag of /proc/cpuinfo that it needs, and its environment."""


def flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def tests_that_fail(environment: dict[str, str]) -> tuple[str, list[str]]:
    """Pytest's last lines, and the tests that failed."""
    summaries, failed = [], []
    for chosen, of_run in RUNS:
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", *chosen]
        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment | of_run, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
                if re.match("(FAILED|ERROR) ", line):
                    failed.append(line.strip())
        summaries.append(last)
        if process.returncode and not failed:
            failed.append(f"pytest ended with {process.returncode}")
    return "; ".join(summaries), failed


def main() -> int:
    has, table, broken = flags(), [], False
    for name in sys.argv[1:] or MACHINES:
        needs, environment = MACHINES[name]
        if needs and needs not in has:
            table.append(f"{name:22} not tried: this CPU has no {needs}")
            continue
        print(f"=== {name}: {' '.join(f'{key}={value}' for key, value in environment.items())}", flush=True)
        summary, failed = tests_that_fail(environment)
        table += [f"{name:22} {summary}", *(f"{'':22} {test}" for test in failed)]
        broken |= bool(failed)
    print("-" * 80, *table, sep="\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
