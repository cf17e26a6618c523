"""A cache of measurements on disk, so that a shape is timed only once on a device.

The cache lies in `~/.cache/scalegate/layouts`, or in `layouts` of the directory in SCALEGATE_CACHE. A file
that cannot be read is treated as missing. Deleting the directory is always safe.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...base.atomic_files import write_json
from ...base.installed import kernel_versions
from ..packing.layout import Problem
from .measure import ShapeMeasurements
from .plan import Measurement, device_name

CACHE_VARIABLE = "SCALEGATE_CACHE"
_SOURCE_FOLDERS = ("layouts", "kernels")


def cache_directory() -> Path:
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root) if root else Path.home() / ".cache" / "scalegate") / "layouts"


def cached(problem: Problem, ms: Sequence[int], layouts: Sequence[str]) -> ShapeMeasurements | None:
    """Return the measurements for exactly this problem, these Ms and layouts; None if they are not in the
    cache.
    """
    entry = _read(_path(problem, ms, layouts))
    return None if entry is None else entry[1]


def cached_shapes(device: torch.device) -> dict[str, ShapeMeasurements]:
    """Return all measurements that still hold on this device, of any model, by shape as plans write it.

    A shape that was measured at several sets of Ms has the measurements of the largest set.
    """
    wanted = _machine(device)
    shapes: dict[str, ShapeMeasurements] = {}
    for path in sorted(cache_directory().glob("*.json")):
        key, measured = _read(path) or ({}, ShapeMeasurements())
        if not measured.measurements or any(key.get(name) != value for name, value in wanted.items()):
            continue
        known = shapes.get(str(key.get("shape")))
        if known is None or len(known.measurements) < len(measured.measurements):
            shapes[str(key.get("shape"))] = measured
    return shapes


def store(problem: Problem, ms: Sequence[int], layouts: Sequence[str], found: ShapeMeasurements) -> None:
    """Put `found` into the cache; if the cache cannot be written, nothing is stored and no error is
    raised.
    """
    try:
        write_json(_path(problem, ms, layouts), {"key": _key(problem, ms, layouts)} | asdict(found))
    except OSError:
        return


def _read(path: Path) -> tuple[dict[str, Any], ShapeMeasurements] | None:
    """Return the key and the measurements in a file of the cache; None if the file cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        measurements = [Measurement(**fields) for fields in value["measurements"]]
        return dict(value["key"]), ShapeMeasurements(measurements, dict(value["refusals"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(problem: Problem, ms: Sequence[int], layouts: Sequence[str]) -> Path:
    key = json.dumps(_key(problem, ms, layouts), sort_keys=True)
    return cache_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _key(problem: Problem, ms: Sequence[int], layouts: Sequence[str]) -> dict[str, object]:
    return _machine(problem.device) | {"shape": str(problem), "ms": list(ms), "layouts": list(layouts)}


def _machine(device: torch.device) -> dict[str, object]:
    """Return what a measurement depends on besides its shape. If any part of this key changes, the shape is
    timed again.
    """
    return {"device": device_name(device), "versions": kernel_versions(), "source": _own_source()}


@cache
def _own_source() -> str:
    return source_digest(Path(__file__).resolve().parents[2])


def source_digest(root: Path) -> str:
    """Return a digest of our layouts and kernels. The digest changes with every edit, unlike a version
    number.
    """
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCE_FOLDERS for path in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
