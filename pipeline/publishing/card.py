"""The model card of a release, filled only from its verdict, its manifest and the base model's own metadata.

Nothing here measures anything, and what nobody measured or declared is left out, or said to be missing.
"""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ...base.batch_invariance import TUNED
from ...base.options import flag, words_of
from ...base.untrusted_files import read_json_object
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE, find_engine
from ...serving_check.engine.options import ARTIFACT_ONLY, UNQUANTIZED
from ...serving_check.evidence.coded_load import default_input_len
from ...serving_check.evidence.task_scores import TaskScore
from ...serving_check.evidence.verdict import CurvePoint, Verdict
from ...serving_check.gate.policy import first_lines
from ...serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings
from ..checkpoints.base_metadata import carried
from ..checkpoints.config_sections import refuse_malformed
from ..conventions.plain import NAME as PLAIN
from ..quantization.calibration.calibration_names import CALIBRATION, SCARCE, SELF
from ..records.artifact import REPORT_FOLDER, SIGNATURE_NAME, Artifact
from ..records.comparison import COLUMNS, read_comparison
from ..records.engine_commands import engines
from ..records.recipe import load_recipe, shipped_recipes
from ..records.sensitivity_table import plain_weights, shown
from ..report.names import BADGE_NAME
from ..report.table import held_out_text, with_error
from ..validation.servers import IN_PROCESS, effective_options, sized_options
from .bundle import report_files
from .markdown import code, fence, plain

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
HUB = "https://huggingface.co"
DEFAULT_EXPORT = "compressed-tensors"
LICENCE_PREFIXES = ("license", "licence", "notice", "usage", "use_policy")
UNKNOWN = "not known"
BADGE = f"{REPORT_FOLDER}/{BADGE_NAME}"
ADOPTED = {"name": "adopted"}
"""The recipe in the manifest of a checkpoint that another tool quantized."""


def write_card(folder: Path, artifact: Artifact, verdict: Verdict, name: str, to: str) -> str:
    """The card of the artifact in `folder`, published under `name` by `pipeline push --to TO`."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"plain": plain, "code": code}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(_fields(folder, artifact, verdict, name, to))
    return _single_blank_lines(text)


def _fields(folder: Path, artifact: Artifact, verdict: Verdict, name: str, to: str) -> dict[str, Any]:
    config = read_json_object(folder / "config.json", infinity=True)
    refuse_malformed(config, str(folder / "config.json"))
    method = (config.get("quantization_config") or {}).get("quant_method")
    recipe = yaml.safe_dump(artifact.recipe, sort_keys=False, allow_unicode=True).rstrip()
    on_hub = artifact.source_revision is not None
    base = artifact.source if on_hub else Path(artifact.source).name
    reproduce = _reproduce(artifact, verdict, base, to)
    return {
        "front_matter": front_matter(artifact, method, verdict, name.split("/")[-1]),
        "name": name.split("/")[-1],
        "base": base,
        "base_url": f"{HUB}/{artifact.source}" if on_hub else None,
        "base_revision": artifact.source_revision,
        "quantization": _quantization(artifact, method),
        "bits_per_weight": artifact.quantization.get("bits_per_weight"),
        "kept_by_budget": plain_weights(artifact.quantization) > 0,
        "relative_error": artifact.quantization.get("relative_error"),
        "calibration": _calibration(artifact.quantization.get(CALIBRATION)),
        "kv_cache": None if artifact.kv_cache == UNQUANTIZED else artifact.kv_cache,
        "batch_invariance": None if artifact.batch_invariance() == TUNED else artifact.batch_invariance(),
        "size": _bytes(sum(r.size for n, r in artifact.files.items() if n.endswith(".safetensors"))),
        "baseline": _baseline(verdict),
        "licence": _licence(artifact.base_metadata),
        "licence_files": licence_files(artifact),
        "engines": engines(name, method, artifact.kv_cache),
        "engine_measured": _engine(verdict),
        "workload": verdict.workload,
        "curve": [_curve_row(point) for point in verdict.curve],
        "rival": _rival(verdict),
        "scores": [_score_row(score) for score in verdict.scores],
        "comparison": _comparison(folder, artifact),
        "sensitivity": _sensitivity(artifact),
        "badge": BADGE if BADGE in report_files(verdict) else None,
        "plots": [{"title": _title(path), "path": path} for path in plot_files(verdict)],
        "first_lines": first_lines(verdict.exploratory, verdict.declared),
        "changed_bounds": _changed_bounds(verdict.bounds),
        "checks": [
            [plain(text) for text in (check.name, check.measured, check.bound, check.status)]
            for check in verdict.checks
        ],
        "quality_tokens": f"{verdict.quality_tokens:,}",
        "held_out_text": held_out_text(verdict),
        "recipe": recipe,
        "fence": fence(recipe, reproduce),
        "adopted": artifact.recipe == ADOPTED,
        "recipe_file": _recipe_file(artifact.recipe),
        "layouts": ", ".join(f"{count} {layout}" for layout, count in verdict.artifact.layouts.items()),
        "device": verdict.environment.device,
        "platform": verdict.environment.platform,
        "cpu_count": verdict.environment.cpu_count,
        "dtype": verdict.environment.dtype,
        "versions": _versions(verdict.environment.versions),
        "quantize_versions": _versions(artifact.versions),
        "reproduce": reproduce,
        "bytes_digest": verdict.artifact.bytes_digest,
        "signed": (folder / SIGNATURE_NAME).is_file(),
        "release": name,
    }


def _comparison(folder: Path, artifact: Artifact) -> dict[str, Any] | None:
    """What `pipeline compare --card` found; None where it is about other bytes, or was never run."""
    found = read_comparison(folder, artifact.bytes_digest())
    if found is None:
        return None
    return {
        "tokens": f"{found.tokens:,}",
        "baseline": found.baseline,
        "columns": ["model", *COLUMNS[1:]],
        "rows": [[plain(cell) for cell in model.cells] for model in found.models],
        "warnings": found.warnings,
    }


def _sensitivity(artifact: Artifact) -> dict[str, Any] | None:
    found = shown(artifact.quantization)
    return found and found | {"rows": [[plain(cell) for cell in row] for row in found["rows"]]}


def front_matter(artifact: Artifact, method: str | None, verdict: Verdict, name: str) -> str:
    """The card's metadata: the base's licence, languages, task and tags as they are, and tasks' scores."""
    base: dict[str, Any] = dict(carried(artifact.base_metadata))
    declared: dict[str, Any] = {}
    if artifact.source_revision is not None:
        declared["base_model"] = artifact.source
    declared["base_model_relation"] = "quantized"
    declared["library_name"] = base.pop("library_name", "transformers")
    declared["pipeline_tag"] = base.pop("pipeline_tag", "text-generation")
    link = base.get("license_link")
    if link is not None and "://" not in link and link not in artifact.files:
        # A path inside the base's repository, which is not among our files.
        if artifact.source_revision is not None:
            base["license_link"] = f"{HUB}/{artifact.source}/blob/{artifact.source_revision}/{link}"
        else:
            del base["license_link"]
    tags = base.pop("tags", [])
    tags = tags if isinstance(tags, list) else [tags]
    kv_cache = [] if artifact.kv_cache == UNQUANTIZED else [f"kv-cache-{artifact.kv_cache}"]
    own_tags = ["scalegate", *_format_names(artifact), *kv_cache, *([method] if method else [])]
    declared |= base
    if verdict.scores:
        results = [_eval_result(score) for score in verdict.scores]
        declared["model-index"] = eval_results_to_model_index(name, results)
    declared["tags"] = list(dict.fromkeys([*tags, *own_tags]))
    return f"---\n{yaml.safe_dump(declared, sort_keys=False, allow_unicode=True)}---\n"


def _eval_result(score: TaskScore) -> EvalResult:
    """As the Hub shows it."""
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


def _format_names(artifact: Artifact) -> list[str]:
    return [one["spec"]["format"] for one in artifact.quantization["formats"]]


def licence_files(artifact: Artifact) -> list[str]:
    return sorted(name for name in artifact.files if name.lower().startswith(LICENCE_PREFIXES))


def plot_files(verdict: Verdict) -> list[str]:
    """The plots of the gate's report by path inside the release."""
    return [name for name in report_files(verdict) if name.endswith(".png")]


def _licence(metadata: dict[str, Any]) -> str | None:
    licence = metadata.get("license")
    if licence is None:
        return None
    text = ", ".join(licence) if isinstance(licence, list) else str(licence)
    return metadata.get("license_name", text) if text == "other" else text


def _baseline(verdict: Verdict) -> str:
    revision = verdict.baseline.revision
    name = verdict.baseline.name if revision is not None else Path(verdict.baseline.name).name
    unquantized = "unquantized " if verdict.baseline.quantization == "none" else ""
    return f"the {unquantized}`{code(name)}`"


def _engine(verdict: Verdict) -> str:
    ours, theirs = (
        engine.title if (engine := find_engine(name)) else name
        for name in (verdict.environment.engine, verdict.environment.baseline_engine)
    )
    return ours if ours == theirs else f"{ours}, the baseline's on {theirs}"


def _rival(verdict: Verdict) -> dict[str, Any] | None:
    """What the card says of the rival, if there was one."""
    if verdict.rival is None:
        return None
    rows = [
        [
            str(point.m),
            f"{point.artifact.output_throughput:,.0f}",
            f"{rival.figures.output_throughput:,.0f}",
            _number(rival.ratio, 2),
            _interval(rival.ratio_low, rival.ratio_high),
        ]
        for point, rival in verdict.rivals
    ]
    name, quantization = verdict.rival.name, verdict.rival.quantization
    from_m = f"{verdict.bounds.max_first_rival_m:g}"
    return {"name": name, "quantization": quantization, "from_m": from_m, "rows": rows}


def _score_row(score: TaskScore) -> list[str]:
    texts = (
        score.task,
        score.metric,
        str(score.samples or UNKNOWN),
        with_error(score.value, score.stderr),
        with_error(score.baseline_value, score.baseline_stderr),
    )
    return [plain(text) for text in texts]


def _interval(low: float | None, high: float | None) -> str:
    return UNKNOWN if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _curve_row(point: CurvePoint) -> list[str]:
    return [
        str(point.m),
        f"{point.artifact.output_throughput:,.0f}",
        f"{point.baseline.output_throughput:,.0f}",
        _number(point.ratio, 2),
        _interval(point.ratio_low, point.ratio_high),
        _number(point.artifact.tpot_p50_ms, 1),
        _number(point.baseline.tpot_p50_ms, 1),
        _number(point.artifact.ttft_p50_ms, 0),
        _number(point.baseline.ttft_p50_ms, 0),
    ]


def _changed_bounds(bounds: Bounds) -> list[str]:
    defaults = Bounds()
    return [
        f"{field.name.replace('_', ' ')}: {getattr(bounds, field.name):g} "
        f"(the default is {getattr(defaults, field.name):g})"
        for field in fields(Bounds)
        if getattr(bounds, field.name) != getattr(defaults, field.name)
    ]


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN


def _quantization(artifact: Artifact, method: str | None) -> str:
    """`INT4 g128, zero points, stored as compressed-tensors`; of several formats, how many layers have it."""
    formats = artifact.quantization["formats"]
    if not formats:
        return ""
    what = formats[0]["label"]
    if len(formats) > 1:
        what = " and ".join(f"{one['label']} ({one['modules']} layers)" for one in formats)
    return what + (f", stored as {method}" if method else "")


def _calibration(read: dict[str, Any] | None) -> str | None:
    """Which sequences the weights were rounded with in view, and what was wrong with them."""
    if read is None:
        return None
    kinds = [f"{read['text']} sequences of a text"] if read["text"] else []
    kinds += [f"{read['own']} that the model wrote itself"] if read["own"] else []
    strange = "" if read.get("fits", True) else "; the text is of a kind that the model does not know"
    few = len(read.get(SCARCE, ()))
    unreached = f"; {few} experts got fewer tokens of it than they have inputs" if few else ""
    return " and ".join(kinds) + strange + unreached


def _is_shipped(recipe: dict[str, Any]) -> bool:
    name = recipe.get("name")
    return name in shipped_recipes() and load_recipe(str(name)).to_json() == recipe


def _recipe_file(recipe: dict[str, Any]) -> str | None:
    """What a reader saves the recipe as; None where there is nothing to save."""
    return None if recipe == ADOPTED or _is_shipped(recipe) else f"{recipe.get('name')}.yaml"


def _reproduce(artifact: Artifact, verdict: Verdict, base: str, to: str) -> str:
    """The one command, with every setting that is not the default, and no folder of this machine in it."""
    recipe = artifact.recipe
    if recipe == ADOPTED:
        return _reproduce_adopted(artifact, verdict, base, to)
    words = ["pipeline", "release", base]
    if artifact.source_revision is not None:
        words += ["--revision", artifact.source_revision]
    words += ["--recipe", str(recipe.get("name")) if _is_shipped(recipe) else f"{recipe.get('name')}.yaml"]
    export = artifact.quantization.get("export", DEFAULT_EXPORT)
    words += [] if export in (DEFAULT_EXPORT, PLAIN) else ["--export", export]
    text = (artifact.quantization.get(CALIBRATION) or {}).get("source", SELF)
    words += [] if text in (SELF, recipe.get("calibration")) else ["--calibration", text]
    words += _given_baseline(artifact, verdict, base)
    words += _given_settings(artifact, verdict)
    target = f"folder:{Path(to.removeprefix('folder:')).name}" if to.startswith("folder:") else to
    return shlex.join([*words, "--to", target])


def _reproduce_adopted(artifact: Artifact, verdict: Verdict, base: str, to: str) -> str:
    """The commands from the other tool's checkpoint on."""
    folder = Path(to.removeprefix("folder:")).name
    revision = [] if artifact.source_revision is None else ["--baseline-revision", artifact.source_revision]
    adopt = ["pipeline", "adopt", folder, "--baseline", base, *revision]
    validate = ["pipeline", "validate", folder, *_given_settings(artifact, verdict)]
    return f"{shlex.join(adopt)}\n{shlex.join(validate)}"


def _given_settings(artifact: Artifact, verdict: Verdict) -> list[str]:
    """What the verdict was asked with otherwise than by default."""
    recipe, words = artifact.recipe, list[str]()
    workload, usual = verdict.workload, WorkloadSettings()
    words += [] if workload.ms == usual.ms else ["--m", ",".join(map(str, workload.ms))]
    for option, value, default in (
        ("input_len", workload.input_len, default_input_len(artifact.kv_cache)),
        ("output_len", workload.output_len, usual.output_len),
        ("waves", workload.waves, usual.waves),
        ("max_repeats", workload.max_blocks, usual.max_blocks),
        ("warmups", workload.warmups, usual.warmups),
        ("seed", workload.seed, usual.seed),
        ("text", verdict.quality_text, None),
        ("quality_tokens", verdict.quality_tokens_asked, QUALITY_TOKENS),
        ("eval", verdict.tasks, None),
    ):
        words += [] if value == default else [flag(option), str(value)]
    floor = verdict.bounds.throughput_floor
    words += (
        [] if floor == recipe.get("throughput_floor", Bounds.throughput_floor) else ["--floor", f"{floor:g}"]
    )
    if verdict.rival is not None:
        words += [] if recipe.get("rival") else ["--rival", verdict.rival.name]
        from_m, usual_m = verdict.bounds.max_first_rival_m, Bounds.from_recipe(recipe).max_first_rival_m
        words += [] if from_m == usual_m else ["--rival-from-m", f"{from_m:g}"]
    engine, baseline_engine = verdict.environment.engine, verdict.environment.baseline_engine
    words += [] if engine == DEFAULT_ENGINE else _engine_words("--engine", engine)
    words += [] if engine == baseline_engine else _engine_words("--baseline-engine", baseline_engine)
    return words + _given_options(verdict)


def _engine_words(option: str, engine: str) -> list[str]:
    """None for the address of a server that was running then."""
    known = find_engine(engine)
    return [] if known is not None and not known.starts else [option, engine]


def _given_baseline(artifact: Artifact, verdict: Verdict, base: str) -> list[str]:
    """The baseline, where it was called otherwise than the model that was quantized."""
    baseline = verdict.baseline
    name = baseline.name if baseline.revision is not None else Path(baseline.name).name
    words = [] if name == base else ["--baseline", name]
    if words and baseline.revision is not None:
        words += ["--baseline-revision", baseline.revision]
    return words


def _given_options(verdict: Verdict) -> list[str]:
    """The engine's options that `release` would not have set by itself, as words of its command."""
    recorded = verdict.environment.engine_options or {}
    usual = effective_options(sized_options({"device": recorded.get("device")}, verdict.workload))
    told_elsewhere = IN_PROCESS.union(ARTIFACT_ONLY)
    given = {
        name: value
        for name, value in recorded.items()
        if name not in told_elsewhere and usual.get(name) != value
    }
    return words_of(given)


def _title(path: str) -> str:
    return f"{Path(path).stem.replace('_', ' ')} against M"


def _single_blank_lines(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1].strip()):
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip() + "\n"
