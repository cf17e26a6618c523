"""Scores of lm-eval's tasks from running servers: lm-eval runs in its own process, as any client.

Not for judging them. The tasks are lm-eval's own by name, or YAML files of its form.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...serving_check.adapters import Endpoint
from ...serving_check.evidence.task_scores import TaskScore
from ..checkpoints.checkpoint import Checkpoint

CONTEXT = 2048
"""The most tokens of a task's prompts, unless the model's context is shorter: lm-eval's default for
servers."""
MOST_CONCURRENT = 32
LINES_OF_LOG = 12
Results = Mapping[str, Any]
"""The JSON that lm-eval writes: `results`, `higher_is_better`, `versions` and others, by task."""


def require_lm_eval() -> None:
    """Raise UserError if lm-eval is not installed, so that the user learns it before hours of work."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks runs lm-eval, which is not installed; pip install 'lm-eval[api]'")


def public_tasks(tasks: str | None) -> str | None:
    """Return the tasks as a verdict names them: files by name only."""
    return None if tasks is None else ",".join(Path(task).name for task in tasks.split(","))


def task_context(checkpoint: Checkpoint) -> int:
    """Return the context that a server needs for tasks: the model's own, within bounds."""
    return CONTEXT if checkpoint.context is None else min(checkpoint.context, CONTEXT)


def evaluate(endpoint: Endpoint, tokenizer: Path, tasks: str, context: int, concurrent: int) -> Results:
    """Run lm-eval on one server and return its results. A failure raises UserError with the end of lm-eval's
    log.

    tokenizer: the checkpoint's folder
    context:   the longest request of the server in tokens, output included
    """
    arguments = {
        "model": endpoint.model,
        "base_url": f"{endpoint.base_url}/v1/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": min(concurrent, MOST_CONCURRENT),
        "max_length": context,
    }
    with tempfile.TemporaryDirectory(prefix="scalegate-lm-eval-") as folder:
        command = [sys.executable, "-P", "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--model_args", json.dumps(arguments), "--tasks", tasks, "--output_path", folder]
        log = Path(folder) / "log.txt"
        with log.open("wb") as file:
            environment = os.environ | {"OPENAI_API_KEY": endpoint.api_key or "none"}
            ended = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
        found = sorted(Path(folder).rglob("results_*.json"))
        if ended.returncode or not found:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            said = "\n  ".join(lines[-LINES_OF_LOG:])
            raise UserError(f"lm-eval could not run --tasks {tasks}; it said:\n  {said}")
        results: Results = json.loads(found[-1].read_text(encoding="utf-8"))
        return results


def paired_scores(artifact: Results, baseline: Results) -> tuple[TaskScore, ...]:
    """Return every metric that both sides have, in lm-eval's order."""
    scores = []
    for task, figures in artifact["results"].items():
        others = baseline["results"].get(task, {})
        for key, value in figures.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not _is_number(value) or key not in others:
                continue
            errors = [
                error if _is_number(error := side.get(f"{metric}_stderr,{name}")) else None
                for side in (figures, others)
            ]
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric if name == "none" else f"{metric},{name}",
                    value=float(value),
                    stderr=errors[0],
                    baseline_value=float(others[key]),
                    baseline_stderr=errors[1],
                    higher_is_better=artifact.get("higher_is_better", {}).get(task, {}).get(metric),
                    samples=artifact.get("n-samples", {}).get(task, {}).get("effective"),
                    shots=artifact.get("n-shot", {}).get(task),
                    version=str(artifact.get("versions", {}).get(task, "")),
                )
            )
    return tuple(scores)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
