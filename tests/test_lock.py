"""The lock and pyproject.toml agree: each pin is within its bounds, and nothing installed goes unpinned."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$")
"""Torch's own packages for CUDA, which torch pins exactly; where it brings no Triton, the Makefile does."""


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


@pytest.fixture(scope="module")
def declared() -> list[Requirement]:
    """What `pip install -e '.[dev]'` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(each) for each in project["dependencies"] + project["optional-dependencies"]["dev"]]


def unmet(declared: list[Requirement], pins: dict[str, str]) -> list[str]:
    ours = [one for one in declared if not OF_TORCH.match(one.name)]
    return [
        str(one)
        for one in ours
        if (pin := pins.get(canonicalize_name(one.name))) is None or not one.specifier.contains(pin)
    ]


def test_every_requirement_is_pinned_within_its_bounds(declared, pins):
    assert unmet(declared, pins) == []
    assert unmet(declared, pins | {"torch": "2.10.0"}) == ["torch>=2.11"], "a pin below its floor is seen"
    assert unmet([Requirement("not-pinned")], pins) == ["not-pinned"]


def test_what_they_bring_along_is_pinned_too(declared, pins):
    assert unpinned(declared, pins) == set()
    assert "numpy" in unpinned(declared, {name: pin for name, pin in pins.items() if name != "numpy"})


def unpinned(declared: list[Requirement], pins: dict[str, str]) -> set[str]:
    """Of all that is installed for `declared`."""
    wanted, seen = list(declared), set()
    while wanted:
        one = wanted.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen or not applies(one):
            continue
        seen.add(key)
        try:
            needed = distribution(one.name).requires or []
        except PackageNotFoundError:
            continue
        wanted += [r for r in map(Requirement, needed) if applies(r, one.extras)]
    return {name for name, _ in seen if is_installed(name) and not OF_TORCH.match(name)} - pins.keys()


def applies(one: Requirement, extras: set[str] = frozenset()) -> bool:
    if one.marker is None:
        return True
    return any(one.marker.evaluate({**default_environment(), "extra": extra}) for extra in extras or {""})


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False
