"""The card's front matter: the base model's licence, languages, task and tags, our own tags, and scores of
tasks.

The text below the front matter is in `card.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.task_scores import TaskScore
from ..checkpoints.base_metadata import carried
from ..records.artifact import Artifact, FileRecord

HUB = "https://huggingface.co"
LICENCE_PREFIXES = ("license", "licence", "notice", "usage", "use_policy")


def front_matter(artifact: Artifact, method: str | None, scores: Sequence[TaskScore], name: str) -> str:
    """Return the card's metadata: the base's licence, languages, task and tags as they are, and tasks'
    scores.
    """
    base: dict[str, Any] = dict(carried(artifact.base_metadata))
    declared: dict[str, Any] = {}
    if artifact.source_revision is not None:
        declared["base_model"] = artifact.source
    declared["base_model_relation"] = "quantized"
    declared["library_name"] = base.pop("library_name", "transformers")
    declared["pipeline_tag"] = base.pop("pipeline_tag", "text-generation")
    base_tags = base.pop("tags", [])
    declared |= _reachable_licence(base, artifact)
    if scores:
        results = [_eval_result(score) for score in scores]
        declared["model-index"] = eval_results_to_model_index(name, results)
    declared["tags"] = _tags(base_tags, artifact, method)
    return f"---\n{yaml.safe_dump(declared, sort_keys=False, allow_unicode=True)}---\n"


def preliminary_card(
    source: str, revision: str | None, base_metadata: Mapping[str, str | list[str]], files: Sequence[str]
) -> str:
    """Return the front matter that a release of `source` will have, as far as it is known before one is made.

    files: the files that are published with the weights
    """
    record = FileRecord(0, "0" * 64)
    planned = Artifact(source, revision, {}, {}, dict.fromkeys(files, record), {"formats": []})
    planned.base_metadata = dict(base_metadata)
    return front_matter(planned, None, (), source.rpartition("/")[2])


def _reachable_licence(base: dict[str, Any], artifact: Artifact) -> dict[str, Any]:
    """Return `base` with a link to its licence that works from our repository, or without one."""
    link = base.get("license_link")
    if link is None or "://" in link or link in artifact.files:
        return base
    # A path inside the base's repository, which is not among our files.
    if artifact.source_revision is None:
        return {name: value for name, value in base.items() if name != "license_link"}
    return base | {"license_link": f"{HUB}/{artifact.source}/blob/{artifact.source_revision}/{link}"}


def _tags(base_tags: Any, artifact: Artifact, method: str | None) -> list[str]:
    """Return the base model's tags, then tags for the quantization."""
    tags = base_tags if isinstance(base_tags, list) else [base_tags]
    formats = [spec["spec"]["format"] for spec in artifact.quantization["formats"]]
    kv_cache = [] if artifact.kv_cache == UNQUANTIZED else [f"kv-cache-{artifact.kv_cache}"]
    own_tags = ["scalegate", *formats, *kv_cache, *([method] if method else [])]
    return list(dict.fromkeys([*tags, *own_tags]))


def _eval_result(score: TaskScore) -> EvalResult:
    """Return the score in the form that the Hub shows."""
    return EvalResult(
        task_type="text-generation",
        dataset_type=score.task,
        dataset_name=score.task,
        metric_type=score.metric,
        metric_name=score.metric,
        metric_value=score.value,
        dataset_args=None if score.shots is None else {"num_few_shot": score.shots},
        metric_args=None if score.stderr is None else {"stderr": score.stderr},
    )


def licence_files(artifact: Artifact) -> list[str]:
    return sorted(name for name in artifact.files if name.lower().startswith(LICENCE_PREFIXES))


def licence_of(metadata: dict[str, Any]) -> str | None:
    """Return the licence that the base model's card names."""
    licence = metadata.get("license")
    if licence is None:
        return None
    text = ", ".join(licence) if isinstance(licence, list) else str(licence)
    return metadata.get("license_name", text) if text == "other" else text
