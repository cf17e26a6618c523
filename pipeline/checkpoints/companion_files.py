"""Chooses the files that go along with the weights, from a source into an artifact and from there into a
release.

Only files of known kinds, by name, in the folder itself: files that a tokenizer, a processor or an engine
reads, or that a licence requires. Code (`*.py`) is left out; a recipe's `files` adds patterns.
"""

import fnmatch
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import UserError
from ...base.untrusted_names import file_refusal, name_refusal
from ..records.artifact import MANIFEST_NAME, OWN_RECORDS, VERDICT_NAME

KNOWN_PATTERNS = (
    # tokenizers
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json",
    "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "encoder.json", "*.model", "*.tiktoken",
    # chat templates
    "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja", "system_prompt.txt",
    # configs
    "config.json", "generation_config.json", "configuration.json", "processor_config.json",
    "*preprocessor_config.json", "image_processor_config.json", "hf_quant_config.json",
)  # fmt: skip
LICENCES = ("license", "licence", "notice", "copying", "usage", "use_policy", "acceptable_use", "third_party")
"""Beginnings of the names of licences and notices; one of these suffixes follows."""
LICENCE_SUFFIXES = ("", ".txt", ".md", ".rst", ".html", ".pdf")
WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
FOREIGN_WEIGHT_FOLDERS = {"onnx", "original", "metal"}
INDEXES = (".safetensors.index.json", ".bin.index.json")
NOT_PUBLISHED = "not a kind of file that is published; a recipe's `files` adds it"
MAX_FILES = 100_000


@dataclass(frozen=True)
class CompanionFiles:
    """Files beside the weights, by name: the ones that go along, and the ones left out, each with the
    reason.
    """

    files: dict[str, Path]
    left_out: dict[str, str]


def is_known(name: str, more: Iterable[str] = ()) -> bool:
    """Say whether a file of this relative name goes along; `more`: further patterns of such files."""
    lower = name.lower()
    stem, suffix = os.path.splitext(lower)
    licence = "/" not in name and stem.startswith(LICENCES) and suffix in LICENCE_SUFFIXES
    known = any(_matches(lower, pattern) for pattern in KNOWN_PATTERNS)
    return licence or known or any(_matches(name, pattern) for pattern in more)


def companion_files(folder: Path, more: Iterable[str] = ()) -> CompanionFiles:
    """Return the files of `folder` that go with its weights, without config.json; `more`: a recipe's `files`.

    Weights in any format, their indexes, hidden files, config.json and Scalegate's own records are neither
    taken along nor listed.
    """
    files, left_out = {}, {}
    more = tuple(more)
    for name in _names(folder):
        if _is_of_the_weights(name):
            continue
        reason = name_refusal(name) or file_refusal(folder, name)
        if reason is None and not is_known(name, more):
            reason = NOT_PUBLISHED
        if reason is None:
            files[name] = folder / name
        else:
            left_out[name if name.isprintable() else ascii(name)[1:-1]] = reason
    return CompanionFiles(files, left_out)


def refuse_strangers(folder: Path, names: Iterable[str], recipe_files: object) -> None:
    """Raise UserError if an artifact's manifest names files of kinds that are not published."""
    more = recipe_files if isinstance(recipe_files, list) else []
    more = [pattern for pattern in more if isinstance(pattern, str)]
    strange = sorted(n for n in names if not is_known(n, more) and not any(_matches(n, w) for w in WEIGHTS))
    if strange:
        shown = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        raise UserError(
            f"{folder / MANIFEST_NAME} names {shown}: {NOT_PUBLISHED.split(';')[0]}. Quantize again; to "
            "publish files of other kinds, name them under `files` in the recipe"
        )


def _matches(name: str, pattern: str) -> bool:
    """Say whether a shell pattern matches the whole relative path; `*` stays within one folder."""
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _is_of_the_weights(name: str) -> bool:
    path = Path(name)
    ours = name in OWN_RECORDS or path.suffix == ".partial" or name in (VERDICT_NAME, "config.json")
    weights = path.suffix in WEIGHT_SUFFIXES or name.endswith(INDEXES)
    return ours or weights or path.parts[0] in FOREIGN_WEIGHT_FOLDERS or path.parts[0] == "serving_check"


def _names(folder: Path) -> Iterator[str]:
    """Yield all files under `folder` except hidden ones, sorted; links are not followed."""
    found: list[str] = []
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        for name in (*files, *links):
            if not name.startswith("."):
                found.append(Path(directory, name).relative_to(folder).as_posix())
        if len(found) > MAX_FILES:
            raise UserError(f"{folder} holds more than {MAX_FILES:,} files; give the checkpoint's own folder")
    yield from sorted(found)
