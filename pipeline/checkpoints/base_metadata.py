"""The metadata in the front matter of the base model's card: licence, languages, tags and the like.

The metadata is read once, when an artifact is made, so that a card can be written later without the base or a
network.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ...base.errors import UserError
from ...base.untrusted_files import parse_yaml, read_outside
from ...base.untrusted_names import require_file

CARD_NAME = "README.md"
MAX_CARD_BYTES = 16 << 20
MAX_LINE, MAX_LIST = 300, 500
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""The YAML loader; libyaml's, which is faster, if PyYAML was built with it: front matter may be long."""
CARRIED_FIELDS = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
    "library_name",
    "tags",
    "datasets",
)
"""Fields that stay true of a quantized copy; scores, widgets and gating prompts do not."""


def read_base_metadata(folder: Path) -> dict[str, str | list[str]]:
    """Return the carried fields of `folder/README.md`'s front matter; empty if there is none.

    Raise UserError if the file cannot be read: otherwise the artifact's card would silently lose the base's
    licence.
    """
    path = folder / CARD_NAME
    if not path.exists():
        return {}
    try:
        text = read_outside(require_file(folder, CARD_NAME), MAX_CARD_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    return carried(_front_matter(text, str(path)))


def carried(front_matter: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Return the carried fields that are short lines of text, or lists of them."""
    found: dict[str, str | list[str]] = {}
    for name in CARRIED_FIELDS:
        value = front_matter.get(name)
        if _is_line(value) or (
            isinstance(value, list) and len(value) <= MAX_LIST and value and all(map(_is_line, value))
        ):
            found[name] = value
    return found


def _is_line(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= MAX_LINE and value.isprintable()


def _front_matter(text: str, where: str) -> dict[str, Any]:
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], start=1) if line.strip() == "---"), None)
    if end is None:
        return {}
    # The empty line stands for the first `---`: errors count lines as the file does.
    text = "\n".join(["", *lines[1:end]])
    # BaseLoader keeps `no` (Norwegian) and `1.0` the strings they were written as.
    value = parse_yaml(text, where, LOADER, advice="correct the front matter, or remove it")
    return value if isinstance(value, dict) else {}
