"""Sound artifacts through all of `pipeline validate`, with fresh seeds: none may fail, nine in ten must pass.

    python -P tests/bench/gate/sound_runs.py --runs 30 [--only int4 kvarn] [--hybrid HYBRID] [--keep FOLDER]
    python -P tests/bench/gate/sound_runs.py --join RESULT.json…

The bundled checkpoint in four forms, and a hybrid if there is one, each at three loads (prompt tokens and
answer tokens of a request): the runs take the pairs in turn. Each is quantized once, by its recipe with
BOUNDS, since KVarN and long prompts are slower than the release policy allows on a CPU. HYBRID is a
checkpoint that `tests/bench/engine/train_hybrid.py` has trained. `--first-run 5 --runs 1` is the sixth alone,
so that runs can be divided among machines; `--join` puts their results together. `--keep` keeps each verdict
by the name of its row, for `power.py`. Exit status 1 where one failed, or fewer than nine in ten passed.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from scalegate.base.atomic_files import write_json
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.validate import validate
from scalegate.serving_check.adapters.all_engines import DEFAULT_ENGINE
from scalegate.serving_check.evidence.environment import describe_environment

EXAMPLES = Path(__file__).parents[3] / "examples"
CHECKPOINT = EXAMPLES / "qwen3-pycode-5m"
BOUNDS = {"throughput_floor": 0.6, "max_ttft_ratio": 3, "max_tpot_ratio": 2}
SLOW_BOUNDS = {
    "fp8": {"throughput_floor": 0.08, "max_ttft_ratio": 15, "max_tpot_ratio": 15, "max_itl_ratio": 15}
}
"""Bounds of forms that take even longer: on a CPU, attention over keys and values in FP8 takes ten times as
long as over bfloat16, and the other forms' bounds fail it rightly."""
RESULT = Path(__file__).parents[1] / "results" / "gate" / "sound_runs.json"
FORMS = {
    "int4": "format: int4\ngroup_size: 64\n",
    "nvfp4": "format: nvfp4\n",
    "kvarn": "format: unquantized\nkv_cache: kvarn_k4v2_g128\n",
    "fp8": "format: unquantized\nkv_cache: fp8\ncalibration: self\n",
    "hybrid": "format: int4\ngroup_size: 64\n",
}
LOADS = ((64, 64), (900, 64), (16, 256))
MOST_FAILED, LEAST_PASSED = 0, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first-run", type=int, default=0)
    parser.add_argument("--join", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--only", nargs="+", choices=FORMS)
    parser.add_argument("--hybrid", type=Path, help="a folder that train_hybrid.py wrote")
    parser.add_argument("--keep", type=Path, help="a folder for the verdicts")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.join:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in options.join]
        rows = sorted((row for result in found for row in result["runs"]), key=lambda row: row["run"])
        write_json(options.out, {"environment": found[0]["environment"], "runs": rows})
        conclude(rows)
    sources = dict.fromkeys(FORMS, CHECKPOINT) | {"hybrid": options.hybrid}
    forms = options.only or [form for form, source in sources.items() if source]
    if any(sources[form] is None for form in forms):
        parser.error("the form hybrid needs --hybrid")
    environment = vars(describe_environment("cpu", "auto", DEFAULT_ENGINE, DEFAULT_ENGINE))
    rows: list[dict[str, Any]] = []
    pairs = list(itertools.product(forms, LOADS))
    runs = range(options.first_run, options.first_run + options.runs)
    needed = {pairs[index % len(pairs)][0] for index in runs}
    with tempfile.TemporaryDirectory() as work:
        artifacts = {form: made(form, sources[form], Path(work)) for form in sorted(needed)}
        for index in runs:
            form, load = pairs[index % len(pairs)]
            row = run_once(artifacts[form], sources[form], form, load, options.keep, index)
            rows.append({"run": index} | row)
            print(sentence(rows[-1]), flush=True)
            write_json(options.out, {"environment": environment, "runs": rows})
    conclude(rows)


def conclude(rows: Sequence[dict[str, Any]]) -> NoReturn:
    """Print how often each status was reached, and exit."""
    counts = Counter(row["status"] for row in rows)
    print(dict(counts))
    sys.exit(counts["fail"] + counts["refused"] > MOST_FAILED or counts["pass"] < LEAST_PASSED * len(rows))


def made(form: str, source: Path, work: Path) -> Path:
    recipe = work / f"{form}.yaml"
    bounds = BOUNDS | SLOW_BOUNDS.get(form, {})
    recipe.write_text(FORMS[form] + "".join(f"{name}: {value}\n" for name, value in bounds.items()))
    quantize(source, recipe, out=work / form, progress=False)
    layout(work / form, progress=False)
    return work / form


def run_once(
    artifact: Path, source: Path, form: str, load: tuple[int, int], keep: Path | None, index: int
) -> dict[str, Any]:
    started = time.monotonic()
    row: dict[str, Any] = {"form": form, "input_len": load[0], "output_len": load[1]}
    report = None if keep is None else keep / f"{index}-{form}-{load[0]}-{load[1]}"
    try:
        verdict = validate(
            artifact,
            source,
            device="cpu",
            input_len=load[0],
            output_len=load[1],
            report=report,
            progress=False,
        )
    except UserError as error:
        return row | {"status": "refused", "not_passed": {"refused": error.message}}
    return row | {
        "seed": verdict.workload.seed,
        "status": verdict.status,
        "not_passed": {check.name: f"{check.status}: {check.reason}" for check in verdict.failures},
        "seconds": round(time.monotonic() - started, 1),
        "parts": verdict.seconds_by_part,
        "blocks": {point.m: len(point.log_ratios) for point in verdict.curve},
        "ratios": {point.m: point.ratio for point in verdict.curve},
    }


def sentence(row: dict[str, Any]) -> str:
    load = f"{row['input_len']}/{row['output_len']}"
    others = "; ".join(f"{name}: {why}" for name, why in row["not_passed"].items())
    return f"{row['form']:6} {load:8} {row['status']:12} {row.get('seconds', 0):6.1f} s  {others}"


if __name__ == "__main__":
    main()
