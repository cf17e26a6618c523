"""What the base model says about itself in its card's front matter: licence, languages, tags and the like.

Read once, when an artifact is made, so that a card can be written later with neither the base nor a network.
"""

from pathlib import Path
from typing import Any

import yaml

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


def read_base_metadata(folder: Path) -> dict[str, Any]:
    """The carried fields of `folder/README.md`'s front matter; empty where there is no usable one."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    front_matter = _front_matter(text)
    return {name: front_matter[name] for name in CARRIED_FIELDS if front_matter.get(name)}


def _front_matter(text: str) -> dict[str, Any]:
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], start=1) if line.strip() == "---"), None)
    if end is None:
        return {}
    try:
        # BaseLoader keeps `no` (Norwegian) and `1.0` the strings they were written as.
        value = yaml.load("\n".join(lines[1:end]), Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
