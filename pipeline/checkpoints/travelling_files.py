"""Which files travel with the weights, from a source into an artifact and from an artifact into a release.

Known kinds only, by name, in the folder itself: what a tokenizer, a processor or an engine reads, and what a
licence asks to pass on. Code (`*.py`) is not among them. A recipe's `files` adds patterns of its own.
"""

import fnmatch
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import UserError
from ...base.untrusted_names import file_refusal, name_refusal
from ..records.artifact import MANIFEST_NAME, OWN_RECORDS, VERDICT_NAME

KNOWN = (
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
"""How the names of licences and notices begin; what follows is one of these suffixes."""
LICENCE_SUFFIXES = ("", ".txt", ".md", ".rst", ".html", ".pdf")
WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
FOREIGN_WEIGHT_FOLDERS = {"onnx", "original", "metal"}
INDEXES = (".safetensors.index.json", ".bin.index.json")
STRANGE = "not a kind of file that is published; a recipe's `files` adds it"
MAX_FILES = 100_000


@dataclass(frozen=True)
class Travelling:
    """What lies beside the weights: what goes along, and what stays behind with the reason, by name."""

    files: dict[str, Path]
    left_out: dict[str, str]


def is_known(name: str, more: Iterable[str] = ()) -> bool:
    """Whether a file of this name, relative to its folder, is of a kind that travels; `more` adds some."""
    lower = name.lower()
    stem, suffix = os.path.splitext(lower)
    licence = "/" not in name and stem.startswith(LICENCES) and suffix in LICENCE_SUFFIXES
    known = any(_matches(lower, pattern) for pattern in KNOWN)
    return licence or known or any(_matches(name, pattern) for pattern in more)


def travelling_files(folder: Path, more: Iterable[str] = ()) -> Travelling:
    """What of `folder` goes with its weights, config.json not included; `more` are a recipe's `files`.

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
            reason = STRANGE
        if reason is None:
            files[name] = folder / name
        else:
            left_out[name if name.isprintable() else ascii(name)[1:-1]] = reason
    return Travelling(files, left_out)


def refuse_strangers(folder: Path, names: Iterable[str], recipe_files: object) -> None:
    """UserError where an artifact's manifest names files that are no kind of file that is published."""
    more = [one for one in recipe_files if isinstance(one, str)] if isinstance(recipe_files, list) else []
    strange = sorted(n for n in names if not is_known(n, more) and not any(_matches(n, w) for w in WEIGHTS))
    if strange:
        shown = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        raise UserError(
            f"{folder / MANIFEST_NAME} names {shown}: {STRANGE.split(';')[0]}. Quantize again, which leaves "
            "them out, or by a recipe whose `files` names them"
        )


def _matches(name: str, pattern: str) -> bool:
    """A shell pattern over the whole relative path, `*` within one folder."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _is_of_the_weights(name: str) -> bool:
    path = Path(name)
    ours = name in OWN_RECORDS or path.suffix == ".partial" or name in (VERDICT_NAME, "config.json")
    weights = path.suffix in WEIGHT_SUFFIXES or name.endswith(INDEXES)
    return ours or weights or path.parts[0] in FOREIGN_WEIGHT_FOLDERS or path.parts[0] == "serving_check"


def _names(folder: Path) -> Iterator[str]:
    """Everything under `folder` that is not a directory, hidden ones left out, links not followed; sorted."""
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
