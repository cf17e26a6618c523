"""lm-eval on local task files, against `pipeline serve` and against its own `hf` model: the same scores.

Multiple choice: which of four lines of code comes next. Rolling perplexity: whole files. Both are made from
held-out text, so no data set is fetched. Runs from an environment with lm-eval and Scalegate:

    pip install 'lm-eval[api]'
    python -P tests/bench/gate/lm_eval_scores.py examples/qwen3-pycode-5m examples/heldout.jsonl
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from scalegate.base.atomic_files import write_json
from scalegate.pipeline.validation.task_scores import evaluate, paired_scores
from scalegate.serving_check.adapters import SubprocessEndpoint

RESULTS = Path(__file__).parents[1] / "results" / "gate" / "lm_eval_scores.json"
CONTEXT = 512
CHOICES = 4
QUESTIONS, DOCUMENTS = 300, 40
MULTIPLE_CHOICE = """
task: next_line
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
ROLLING = """
task: whole_files
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
metadata: {{version: 1.0}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path, help="JSON lines with `text`")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = ",".join(map(str, write_tasks(options.text, folder)))
        serve = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(options.checkpoint)]
        serve += ["--port", "0", "--device", "cpu", "--dtype", options.dtype]
        serve += ["--max-num-seqs", "32", "--max-model-len", str(CONTEXT)]
        with SubprocessEndpoint(serve, str(options.checkpoint), log=folder / "server.txt") as endpoint:
            ours = evaluate(endpoint, options.checkpoint, tasks, CONTEXT, 32)
        theirs = with_transformers(options.checkpoint, options.dtype, tasks, folder / "hf")
    scores = paired_scores(ours, theirs)
    rows = [
        {
            "task": score.task,
            "metric": score.metric,
            "samples": score.samples,
            "scalegate": score.value,
            "hf": score.baseline_value,
            "relative_difference": abs(score.value / score.baseline_value - 1),
            "stderr": score.stderr,
        }
        for score in scores
    ]
    versions = {name: version(name) for name in ("lm_eval", "transformers", "torch")}
    write_json(options.out, {"dtype": options.dtype, "versions": versions, "scores": rows})
    for row in rows:
        print(f"{row['task']:12} {row['metric']:16} {row['scalegate']:12.5f} {row['hf']:12.5f}")


def write_tasks(text: Path, folder: Path) -> list[Path]:
    """The two task files, with their data beside them."""
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    chance = random.Random(0)
    questions = []
    lines = [line for document in documents for line in document.splitlines() if len(line.strip()) > 15]
    while len(questions) < QUESTIONS:
        own = chance.choice(documents).splitlines()
        at = chance.randrange(4, max(5, len(own)))
        if at >= len(own) or len(own[at].strip()) <= 15:
            continue
        choices = [own[at], *chance.sample(lines, CHOICES - 1)]
        chance.shuffle(choices)
        context = "\n".join(own[max(0, at - 12) : at]) + "\n"
        questions.append({"context": context, "choices": choices, "answer": choices.index(own[at])})
    files = []
    whole = [{"text": document[:4000]} for document in documents[:DOCUMENTS]]
    for name, form, rows in (("next_line", MULTIPLE_CHOICE, questions), ("whole_files", ROLLING, whole)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(form.format(data=data), encoding="utf-8")
    return files


def with_transformers(checkpoint: Path, dtype: str, tasks: str, folder: Path) -> dict:
    # Windows as long as those that it sends to a server, of whose context it leaves two tokens.
    arguments = {"pretrained": str(checkpoint), "dtype": dtype, "max_length": CONTEXT - 2}
    command = [sys.executable, "-P", "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", json.dumps(arguments), "--tasks", tasks, "--output_path", str(folder)]
    subprocess.run([*command, "--batch_size", "8"], check=True, stdout=subprocess.DEVNULL)
    return json.loads(next(folder.rglob("results_*.json")).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
