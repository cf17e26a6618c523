"""Compares everything that turns text into tokens and ends an answer with the baseline's; weights are not
compared here.

Tokenizers and configs are compared as they are loaded, so that two ways to save the same tokenizer are equal.
Files that only some readers use (a vocabulary beside tokenizer.json, a second chat template) are compared by
content. `checks/text_files.py` explains the meaning of a difference.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from ...base.untrusted_files import read_json_object
from ...base.untrusted_names import require_file
from ...serving_check.evidence.artifact_figures import TextDifference
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tokenizer import load_tokenizer
from .loaded_config import loaded_config

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
NOT_COMPARED = {"truncation", "padding", "version", "model", *SECTIONS}
"""Sections of a tokenizer that a call sets, or that have a part of their own."""
GENERATION_BOOKKEEPING = {"transformers_version", "_from_model_config", "use_cache", *TOKEN_IDS}
"""Keys of generation_config.json that are not compared: how it was saved, keys that change no token, and keys
that are compared as parts of their own."""
PART_OF_FILE = {
    "vocab.json": "vocabulary", "vocab.txt": "vocabulary", "tokenizer.model": "vocabulary",
    "tekken.json": "vocabulary", "merges.txt": "merges", "added_tokens.json": "added_tokens",
    "chat_template.json": "chat_template",
}  # fmt: skip
"""Files that are read by others than transformers' fast tokenizers, and the part that each belongs to."""
TEMPLATES = "additional_chat_templates"
SHOWN_CHARACTERS = 40


def compare_text_files(artifact: Checkpoint, baseline: Checkpoint) -> tuple[TextDifference, ...]:
    """Return every part that differs from the baseline's, with the place of the difference. Raise UserError
    if a file of either side cannot be read.
    """
    found: list[tuple[str, str | None]] = []
    if not _same_files(artifact, baseline):
        found += _tokenizers(artifact, baseline)
    configs = _text_config(artifact), _text_config(baseline)
    generation = _generation(artifact), _generation(baseline)
    found.append(("token_ids", _token_ids("config.json", *configs)))
    found.append(("token_ids", _token_ids(GENERATION, *generation)))
    found.append(("generation_config", _values(*(_with_defaults(side, generation) for side in generation))))
    found.append(("config", _values(loaded_config(artifact), loaded_config(baseline))))
    found += _by_content(artifact, baseline)
    return tuple(TextDifference(part, where) for part, where in found if where is not None)


def _same_files(artifact: Checkpoint, baseline: Checkpoint) -> bool:
    for name in TOKENIZER_FILES:
        paths = [side.folder / name for side in (artifact, baseline)]
        contents = [path.read_bytes() if path.is_file() else None for path in paths]
        if contents[0] != contents[1]:
            return False
    return True


def _tokenizers(artifact: Checkpoint, baseline: Checkpoint) -> Iterator[tuple[str, str | None]]:
    ours, theirs = load_tokenizer(artifact), load_tokenizer(baseline)
    if ours is None or theirs is None:
        if ours is not theirs:
            yield "tokenizer", f"{'the artifact' if ours is None else 'the baseline'} has none"
        return
    left, right = _backend(ours), _backend(theirs)
    yield "vocabulary", _vocabulary(ours.get_vocab(), theirs.get_vocab())
    models = left.get("model") or {}, right.get("model") or {}
    yield "merges", _sequence("merge", *(model.get("merges") or [] for model in models))
    for section in SECTIONS:
        yield section, _value(left.get(section), right.get(section))
    rest = [
        {k: v for k, v in whole.items() if k not in NOT_COMPARED}
        | {f"model.{k}": v for k, v in model.items() if k not in ("vocab", "merges")}
        for whole, model in zip((left, right), models, strict=True)
    ]
    yield "tokenizer", _values(*rest)
    yield "special_tokens", _values(ours.special_tokens_map, theirs.special_tokens_map)
    yield "chat_template", _template(ours.chat_template, theirs.chat_template)


def _by_content(artifact: Checkpoint, baseline: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """Yield files whose content differs between the sides, and such files that only the artifact has."""
    names = dict(PART_OF_FILE)
    for side in (artifact, baseline):
        names |= {f"{TEMPLATES}/{path.name}": "chat_template" for path in (side.folder / TEMPLATES).glob("*")}
    for name, part in names.items():
        ours, theirs = _content(artifact, name), _content(baseline, name)
        if ours is not None and ours != theirs:
            told = "only the artifact has it" if theirs is None else "not what the baseline's says"
            yield part, f"{name}: {told}"


def _content(checkpoint: Checkpoint, name: str) -> Any:
    """Return the content of a file, independent of its spaces and the order of its keys; None if there is no
    such file.
    """
    path = checkpoint.folder / name
    if not path.is_file():
        return None
    path = require_file(checkpoint.folder, name)
    if path.suffix == ".json":
        return read_json_object(path)
    content = path.read_bytes()
    if path.suffix in (".txt", ".jinja"):
        return [
            line.rstrip() for line in content.decode("utf-8", errors="replace").splitlines() if line.strip()
        ]
    return content


def _backend(tokenizer: Any) -> dict[str, Any]:
    """Return the `tokenizers` library's own serialization; empty if the tokenizer has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())


def _vocabulary(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    wrong = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if not wrong:
        return None
    first = min(wrong, key=lambda token: (theirs.get(token, len(theirs)), token))
    here, there = ours.get(first, "absent"), theirs.get(first, "absent")
    return f"token {_short(first)} is {here}, the baseline's {there}{_more(len(wrong) - 1)}"


def _sequence(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    wrong = [(index, left, right) for index, (left, right) in pairs if left != right]
    if not wrong:
        return None
    index, left, right = wrong[0]
    return f"{what} {index} is {_short(left)}, the baseline's {_short(right)}{_more(len(wrong) - 1)}"


def _template(ours: Any, theirs: Any) -> str | None:
    """Return the first line that differs in a chat template, or in the first of several templates that
    differs.
    """
    if isinstance(ours, str) and isinstance(theirs, str):
        return _sequence("line", ours.splitlines(), theirs.splitlines()) or _value(ours, theirs)
    return _value(ours, theirs)


def _token_ids(file: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return the difference of two token ids or lists of ids. One id equals a list with that id, in any
    order.
    """
    for name in TOKEN_IDS:
        left, right = _ids(ours.get(name)), _ids(theirs.get(name))
        if left != right:
            return f"{file}: {name} is {_short(ours.get(name))}, the baseline's {_short(theirs.get(name))}"
    return None


def _ids(value: Any) -> set[Any]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return {token for token in values if isinstance(token, int | str)}


def _values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    wrong = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not wrong:
        return None
    where = _value(ours.get(wrong[0]), theirs.get(wrong[0]))
    key = wrong[0] if wrong[0].isprintable() else ascii(wrong[0])
    return f"{key[:SHOWN_CHARACTERS]}: {where}{_more(len(wrong) - 1)}"


def _value(ours: Any, theirs: Any) -> str | None:
    if ours == theirs:
        return None
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return _values(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return _sequence("item", ours, theirs)
    return f"{_short(ours)}, the baseline's {_short(theirs)}"


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(checkpoint.config) | (checkpoint.config.get("text_config") or {})


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    if not (checkpoint.folder / GENERATION).is_file():
        return {}
    return read_json_object(require_file(checkpoint.folder, GENERATION))


def _with_defaults(own: Mapping[str, Any], both: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the effective settings of one side: transformers' defaults replace missing ones."""
    defaults = GenerationConfig()
    names = {name for side in both for name in side} - GENERATION_BOOKKEEPING
    return {name: own.get(name, getattr(defaults, name, None)) for name in names}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, default=str)
    text = ascii(text) if isinstance(value, str) else text
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _more(count: int) -> str:
    return f" (and {count} more)" if count else ""
