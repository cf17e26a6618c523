"""The portable packed product on a Hopper GPU, as 8.0, as 8.9 and as itself, beside cuBLAS and Hopper's.

    python -P tests/bench/kernels/portable.py --out OUT
    python -P tests/bench/kernels/portable.py --out OUT --formats int4 --as 8.0 --m 1,16,64

Each capability and format is one run of `linear.py` in a process of its own, which checks every answer
against float64 and writes OUT/FORMAT_CAPABILITY.json. A table of geometric means over the layers of Qwen3-8B
comes last. Two minutes a format and capability, most of them for compiling.
"""

import argparse
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LINEAR = Path(__file__).with_name("linear.py")
LAYOUTS = {
    "int4": "int4_portable,swap_ab,tinygemm",
    "nvfp4": "nvfp4_portable,nvfp4_swap_ab",
    "int8": "int8_portable,int8_swap_ab",
}
CAPABILITIES = ("8.0", "8.9", "9.0")
ITSELF = "9.0"
BARS = {"1": 2.2, "8": 2.2, "16": 2.1, "32": 1.7, "64": 1.25, "128": 1.0, "256": 0.85}
"""Of INT4 over cuBLAS in bf16, by M, that we want."""


def run(capability: str, form: str, rows: str, out: Path) -> bool:
    """Whether every answer was right."""
    arguments = ["--format", form, "--layouts", LAYOUTS[form], "--m", rows, "--out", str(out)]
    command = [sys.executable, "-P", str(Path(__file__)), "--child", capability, *arguments]
    print(f"== {form} as {capability}", flush=True)
    return subprocess.run(command, check=False).returncode == 0


def child(capability: str, arguments: list[str]) -> None:
    if capability != ITSELF:
        sys.path.insert(0, str(Path(__file__).parent))
        from older_gpu import pretend

        pretend(*map(int, capability.split(".")))
    sys.argv = [str(LINEAR), *arguments]
    runpy.run_path(str(LINEAR), run_name="__main__")


def means(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """By layout, the geometric mean over the layers of its speed, bf16 = 1, by M."""
    layers = list(json.loads(path.read_text())["results"].values())
    for name in dict.fromkeys(name for rows in layers for row in rows for name in row["errors"]):
        speeds: dict[str, float] = {}
        for at, row in enumerate(layers[0]):
            product, whole = 1.0, True
            for rows in layers:
                times = rows[at]["microseconds"]
                whole &= name in times
                product *= times["unquantized"] / times[name] if name in times else 1.0
            if whole:
                speeds[str(row["m"])] = product ** (1 / len(layers))
        yield name, speeds


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default=",".join(LAYOUTS), help="comma-separated")
    parser.add_argument("--as", dest="capabilities", default=",".join(CAPABILITIES), help="comma-separated")
    parser.add_argument("--m", default=",".join(BARS), help="comma-separated")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows, wrong = arguments.m.split(","), []
    lines = [f"{'speed, bf16 = 1':<34}" + "".join(f"{f'M={m}':>8}" for m in rows)]
    for form in arguments.formats.split(","):
        for capability in arguments.capabilities.split(","):
            path = arguments.out / f"{form}_{capability}.json"
            if not run(capability, form, arguments.m, path):
                wrong.append(f"{form} as {capability}")
            for name, speeds in means(path) if path.exists() else ():
                cells = "".join(f"{speeds[m]:8.2f}" if m in speeds else f"{'-':>8}" for m in rows)
                lines.append(f"{name + ' as ' + capability:<34}{cells}")
    if "int4" in arguments.formats:
        lines.append(f"{'wanted of int4_portable':<34}" + "".join(f"{BARS.get(m, 0):8.2f}" for m in rows))
    print("\n" + "\n".join(lines))
    print(f"WRONG or failed: {', '.join(wrong)}" if wrong else "all right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
