"""The GPU tests of kernels as on an older GPU: code for 8.0 or 8.9, translated by a Hopper GPU's driver.

    python -P tests/bench/kernels/older_gpu_tests.py --as 8.0 --out OUT/tests_8.0.txt

Left out are the tests of Hopper's own kernels. The file is also the plugin of pytest that every process of
the tests loads before anything compiles.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

VARIABLE = "SCALEGATE_PRETENDED_GPU"
FOLDERS = ("kernels", "layouts", "serving_check")
HOPPERS_OWN = (
    "test_hopper_prefill_gpu.py", "test_int4_gpu.py", "test_int8_gpu.py", "test_iq2_xxs_gpu.py",
    "test_nvfp4_gpu.py", "test_pdl_gpu.py",
)  # fmt: skip
SHOWN_LINES = 30


def pytest_configure() -> None:
    from scalegate.tests.bench.kernels.older_gpu import pretend

    pretend(*map(int, os.environ[VARIABLE].split(".")))


def main() -> None:
    from scalegate.tests.bench.gpu import PYTEST, ROOT, marked_gpu

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--as", dest="capability", default="8.0")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    mark, expression, *files = marked_gpu()
    folders = tuple(str(ROOT / "tests" / folder) for folder in FOLDERS)
    chosen = [file for file in files if file.startswith(folders) and not file.endswith(HOPPERS_OWN)]
    command = [sys.executable, "-P", *PYTEST, "-p", "scalegate.tests.bench.kernels.older_gpu_tests"]
    command += ["--numprocesses", str(options.processes), "--dist", "worksteal", mark, expression, *chosen]
    environment = {**os.environ, VARIABLE: options.capability}
    with options.out.open("w", encoding="utf-8") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    lines = options.out.read_text(encoding="utf-8", errors="replace").splitlines()
    ended = [line for line in lines if re.match(r"(FAILED|ERROR|SKIPPED|E  )|=+ .* in ", line)]
    print(f"GPU tests of kernels as {options.capability}:", *ended[-SHOWN_LINES:], sep="\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
