"""Installs the wheel into a vLLM environment, says what that changed, and asks vLLM with it and without it.

    python -P tests/bench/vllm_plugin/beside.py --vllm-python /path/to/vllm/bin/python --model CHECKPOINT

For a vLLM on a CPU or of a version that the plugin does not know: it has to step aside in one line, and every
answer has to be the same. The wheel is uninstalled at the end. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAME = "scalegate-kernels"
ASKED = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=512,
          max_num_seqs=4, enable_prefix_caching=False)
prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 100 + 1 for j in range(8 + i)]} for i in range(4)]
asked = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
answers = [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, asked, use_tqdm=False)]
print("ANSWERS", json.dumps(answers))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    pip = [options.vllm_python, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-q",
        ]
        subprocess.run([*build, "-w", folder, str(ROOT / "packaging" / "kernels")], check=True)
        [wheel] = map(str, Path(folder).glob("*.whl"))
        before = packages(pip), said([*pip, "check"])
        without = ask(options)
        # With its dependencies, and with no index: everything that it needs is there.
        subprocess.run([*pip, "install", "--quiet", "--no-index", wheel], check=True)
        try:
            after = packages(pip), said([*pip, "check"])
            answers = {"installed": ask(options), "turned off": ask(options, SCALEGATE_KERNELS="0")}
        finally:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", NAME], check=True)
    changed = sorted(before[0] ^ after[0])
    print(f"packages that the installation changed: {changed}")
    print(f"pip check: {before[1]!r} -> {after[1]!r}")
    right = len(changed) == 1 and before[1] == after[1]
    for name, (tokens, lines) in answers.items():
        print(f"{name}: answers {'the same' if tokens == without[0] else 'DIFFER'}; log: {lines}")
        right = right and tokens == without[0] and len(lines) == 1
    raise SystemExit(0 if right else 1)


def packages(pip: list[str]) -> set[str]:
    return set(said([*pip, "freeze"]).splitlines())


def said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def ask(options: argparse.Namespace, **environment: str) -> tuple[list[list[int]], list[str]]:
    """vLLM's answers, and the lines of its log that name the plugin."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    started = time.monotonic()
    child = subprocess.run(
        [options.vllm_python, "-P", "-c", ASKED, options.model], capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip
    log = (child.stdout + child.stderr).splitlines()
    answers = [line.removeprefix("ANSWERS ") for line in log if line.startswith("ANSWERS ")]
    if not answers:
        raise SystemExit(f"vLLM did not answer:\n{child.stderr[-3000:]}")
    print(f"vLLM answered after {time.monotonic() - started:.0f} s", flush=True)
    return json.loads(answers[0]), [line for line in log if NAME in line]


if __name__ == "__main__":
    main()
