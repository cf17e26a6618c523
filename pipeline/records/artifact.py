"""`scalegate.json`: the source of an artifact, its tools and settings, and the sha256 of every file in it.

The manifest is written last and atomically, so a folder with a manifest was finished. This file also reads
and checks the manifest.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ...base.atomic_files import PARTIAL_SUFFIX, write_json
from ...base.batch_invariance import INVARIANCE_MODES, TUNED, BatchInvariance
from ...base.errors import UserError
from ...base.untrusted_files import read_json_object
from ...base.untrusted_names import file_refusal, require_file, require_inside
from ...layouts.choosing.plan import LayoutPlan
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.artifact_figures import PARTS
from .file_digests import digest_of, sha256_of_all

MANIFEST_NAME = "scalegate.json"
VERDICT_NAME = "serving_check.json"
SIGNATURE_NAME = "serving_check.json.sig"
REPORT_FOLDER = "serving_check"
SOURCE_NAME = ".scalegate-source"
"""A hidden file, never published, with the folder on this machine that the artifact was made from."""
SCHEMA_VERSION = 2
SCALED_BY = "scaled_by"
"""The key, in a quantized module's entry, of the norm whose weight was divided by its columns' scales."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""The form of a repository or a revision that may be part of a URL."""


@dataclass(frozen=True)
class FileRecord:
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass
class Artifact:
    """The content of `scalegate.json`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    source: str
    """The Hub id or the folder's name of the checkpoint that it was made from."""
    source_revision: str | None
    recipe: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    """The files that a serving engine may read, by path inside the folder, without our own records."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Formats, export convention, quantized and kept modules, bits per weight, per-module errors."""
    base_metadata: dict[str, str | list[str]] = field(default_factory=dict)
    """Metadata of the base model's card that our card repeats: licence, languages, tags."""
    source_sha256: str | None = None
    """The `weights_digest` of the checkpoint that it was made from."""
    layout_plan: dict[str, Any] | None = None
    verdict_sha256: str | None = None
    schema_version: int = SCHEMA_VERSION
    kv_cache: str = UNQUANTIZED
    """How keys and values are stored in serving: a name in `KV_FORMATS`."""
    kv_cache_engines: dict[str, str] = field(default_factory=dict)
    """For each engine that supports this KV format, the command that serves a folder with the artifact."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Files beside the source's weights that were not copied, and why. This is not written to the
    manifest."""

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST_NAME, {k: v for k, v in asdict(self).items() if k != "left_out"})

    @classmethod
    def read(cls, folder: Path) -> "Artifact":
        """Read `folder`'s manifest. UserError is raised if there is no manifest or it cannot be read."""
        path = folder / MANIFEST_NAME
        if not path.exists():
            raise UserError(
                f"{folder} has no {MANIFEST_NAME}: it is not a finished artifact. "
                f"Make an artifact with `pipeline quantize MODEL --out {folder}`."
            )
        value = read_json_object(require_file(folder, MANIFEST_NAME), advice="quantize again to remake it")
        if value.get("schema_version") != SCHEMA_VERSION:
            raise UserError(
                f"{path} has schema version {value.get('schema_version')}; "
                f"this Scalegate reads version {SCHEMA_VERSION}"
            )
        artifact = _checked(value, path)
        for name in artifact.files:
            require_inside(name, str(path))
        return artifact

    def changed_files(self, folder: Path) -> list[str]:
        """Return the differences between the manifest and the folder's present files, one line each; empty if
        all match.
        """
        problems = []
        to_read = {}
        for name, record in self.files.items():
            path = folder / name
            if not path.exists():
                problems.append(f"{name}: missing")
            elif (refusal := file_refusal(folder, name)) is not None:
                problems.append(f"{name}: {refusal}")
            elif path.stat().st_size != record.size:
                problems.append(f"{name}: {path.stat().st_size} bytes, {record.size} recorded")
            else:
                to_read[path] = name
        digests = sha256_of_all(to_read)
        problems += [
            f"{name}: sha256 differs from the recorded one"
            for path, name in to_read.items()
            if digests[path] != self.files[name].sha256
        ]
        problems += [f"{name}: not recorded" for name in published_files(folder) if name not in self.files]
        return problems

    def bytes_digest(self) -> str:
        """Return one sha256 over all names and digests: a verdict is bound to it."""
        return digest_of({name: record.sha256 for name, record in self.files.items()})

    def sha256(self) -> str:
        """Return the digest of the manifest without the verdict's digest, since the verdict is given on the
        manifest."""
        value = {k: v for k, v in asdict(self).items() if k not in ("left_out", "verdict_sha256")}
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def module_errors(self) -> dict[str, float]:
        """Return each quantized module's relative error against the source, measured when the artifact was
        made.
        """
        modules = self.quantization.get("modules", {})
        return {module: float(measured["relative_error"]) for module, measured in modules.items()}

    def scaled_modules(self) -> dict[str, str]:
        """Return, for each module whose columns were scaled before rounding, the norm's tensor that absorbed
        the scales.
        """
        modules = self.quantization.get("modules", {})
        return {module: str(facts[SCALED_BY]) for module, facts in modules.items() if SCALED_BY in facts}

    def declared_changes(self) -> tuple[str, ...]:
        """Return the parts of tokenizer, templates and generation settings that the recipe changes on
        purpose.
        """
        changes = self.recipe.get("changes")
        return tuple(part for part in changes if part in PARTS) if isinstance(changes, list) else ()

    def batch_invariance(self) -> BatchInvariance:
        """Return the batch invariance that the recipe claims for the served artifact."""
        claim = self.recipe.get("batch_invariance")
        return next((mode for mode in INVARIANCE_MODES if mode == claim), TUNED)

    def layout_plan_sha256(self) -> str | None:
        """Return the layout plan's digest, None if there is none: a verdict is given with the plan in
        force.
        """
        if self.layout_plan is None:
            return None
        return hashlib.sha256(json.dumps(self.layout_plan, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _Format:
    label: str
    modules: int
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class _Quantization:
    """The parts of `quantization` that are read again outside the job that wrote it."""

    formats: list[_Format] = field(default_factory=list)
    export: str = ""
    bits_per_weight: float = 0.0
    relative_error: float = 0.0
    modules: Mapping[str, "_Module"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Module:
    relative_error: Annotated[float, Field(ge=0)]


_ARTIFACT: TypeAdapter[Artifact] = TypeAdapter(Artifact)
_QUANTIZATION: TypeAdapter[_Quantization] = TypeAdapter(_Quantization)
_PLAN: TypeAdapter[LayoutPlan] = TypeAdapter(LayoutPlan)


def _checked(value: dict[str, Any], path: Path) -> Artifact:
    """Return the manifest in `value`. Raise UserError if any field is not of its type."""
    where = ""
    try:
        artifact = _ARTIFACT.validate_python(value)
        where = "quantization."
        summary = _QUANTIZATION.validate_python(artifact.quantization)
        where = "layout_plan."
        if artifact.layout_plan is not None:
            _PLAN.validate_python(artifact.layout_plan)
            LayoutPlan.from_json(artifact.layout_plan)
        where = "quantization.formats."
        if not all(isinstance(entry.spec.get("format"), str) for entry in summary.formats):
            raise KeyError("spec.format")
        where = "source: a Hub id or a printable name "
        on_hub = artifact.source_revision is not None
        if not artifact.source.isprintable() or (
            on_hub
            and not (HUB_ID.fullmatch(artifact.source) and HUB_ID.fullmatch(artifact.source_revision or ""))
        ):
            raise KeyError("with its revision")
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{where}{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeyError, TypeError) as error:
        problem = f"{where}{error.args[0]} is missing or malformed"
    else:
        return artifact
    problem = problem if problem.isprintable() else ascii(problem)
    raise UserError(f"{path} is not a manifest of Scalegate's: {problem}; quantize again to remake it")


OWN_RECORDS = {MANIFEST_NAME, VERDICT_NAME, SIGNATURE_NAME, "README.md"}
"""Files that Scalegate writes about an artifact. A server does not load them, so they may change."""


def published_files(folder: Path) -> list[str]:
    """Return the paths in `folder` of a release's files, without our own records and reports, sorted."""
    names = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        ours = name in OWN_RECORDS or name.startswith(f"{REPORT_FOLDER}/") or name.endswith(PARTIAL_SUFFIX)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not ours and not hidden:
            names.append(name)
    return names


def record_files(folder: Path, known: Mapping[str, FileRecord] | None = None) -> dict[str, FileRecord]:
    """Return the size and sha256 of every published file of `folder`.

    known: digests that this process has computed already
    """
    known, names = known or {}, published_files(folder)
    digests = sha256_of_all(folder / name for name in names if name not in known)
    return {
        name: known.get(name) or FileRecord((folder / name).stat().st_size, digests[folder / name])
        for name in names
    }
