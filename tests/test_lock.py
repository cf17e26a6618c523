"""Each lock agrees with pyproject.toml, and what is installed here is exactly what one of the locks pins."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ["constraints.txt", "constraints-newest.txt"]
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$")
"""Torch's own packages for CUDA, which torch pins; where it brings no Triton, install_torch.sh does."""

Pins = dict[str, str]


def pins_of(lock: str) -> Pins:
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


@pytest.fixture(scope="module")
def declared() -> list[Requirement]:
    """What `pip install -e '.[dev]'` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(each) for each in project["dependencies"] + project["optional-dependencies"]["dev"]]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_is_pinned_within_its_bounds(declared, lock):
    pins = pins_of(lock)
    assert unmet(declared, pins) == []
    for outside in ("2.10.0", "2.16.0"):
        [torch] = unmet(declared, pins | {"torch": outside})
        assert torch.startswith("torch"), "a pin outside its bounds is seen"
    assert unmet([Requirement("not-pinned")], pins) == ["not-pinned"]


def unmet(declared: list[Requirement], pins: Pins) -> list[str]:
    ours = [requirement for requirement in declared if not OF_TORCH.match(requirement.name)]
    return [
        str(requirement)
        for requirement in ours
        if (pin := pins.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(pin)
    ]


def test_what_is_installed_is_what_a_lock_pins(declared):
    installed = installed_for(declared)
    differences = {lock: differing(installed, pins_of(lock)) for lock in LOCKS}
    assert [] in differences.values(), differences
    agreeing = pins_of(next(lock for lock in LOCKS if not differences[lock]))
    assert differing(installed, agreeing | {"numpy": "1.26.0"}) == [f"numpy {installed['numpy']}, not 1.26.0"]
    unpinned = {name: version for name, version in agreeing.items() if name != "numpy"}
    assert differing(installed, unpinned) == [f"numpy {installed['numpy']}, not None"]


def differing(installed: Pins, pins: Pins) -> list[str]:
    return [
        f"{name} {version}, not {pins.get(name)}"
        for name, version in installed.items()
        if version != pins.get(name)
    ]


def installed_for(declared: list[Requirement]) -> Pins:
    """Everything that is installed for `declared`, by version, without what names a build: `+cpu`."""
    wanted, seen, found = list(declared), set(), {}
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen or not applies(requirement):
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        wanted += [r for r in map(Requirement, package.requires or []) if applies(r, requirement.extras)]
        if not OF_TORCH.match(name):
            found[name] = Version(package.version).public
    return found


def applies(requirement: Requirement, extras: set[str] = frozenset()) -> bool:
    if requirement.marker is None:
        return True
    return any(
        requirement.marker.evaluate({**default_environment(), "extra": extra}) for extra in extras or {""}
    )
