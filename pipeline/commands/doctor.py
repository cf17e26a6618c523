"""What this machine can do: devices, versions, layouts, engines, Hub login, and what to install for the rest.

The diagnosis looks only at this machine: no request goes out, so nothing can hang. Nothing is measured
(`layout.py` does that): speeds come from the measurement cache, which choosing layouts fills.
"""

import math
import platform
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import constants, get_token

from ...base.installed import installed_version
from ...layouts.choosing.choose import pick
from ...layouts.choosing.measurement_cache import cached_shapes
from ...layouts.choosing.plan import ShapeChoice, device_name
from ...layouts.choosing.tried import Tried, kv_tried_on, tried_on
from ...layouts.formats.all_formats import WEIGHT_FORMATS
from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import WeightFormat
from ...layouts.kv.format import KV_FORMATS
from ...layouts.packing.all_layouts import LAYOUTS
from ...layouts.packing.layout import Experts, ExpertsLayout, Problem
from ...layouts.packing.per_expert import SUFFIX
from ...layouts.states.all_states import STATE_FORMATS
from ...serving_check.adapters.all_engines import ENGINES
from ...serving_check.adapters.engine import Availability
from ..conventions.all_conventions import CONVENTIONS
from ..machine.tested_stack import UntestedPackage, untested_packages
from ..model_loader.dequantize_note import DEQUANTIZE

PACKAGES = (
    "scalegate",
    "torch",
    "triton",
    "transformers",
    "torchao",
    "safetensors",
    "huggingface_hub",
    "humming-kernels",
    "mslk",
    "gemlite",
    "vllm",
)
INSTALL = {
    "triton": "pip install triton (Linux), for kernels on CUDA",
    "humming-kernels": "pip install humming-kernels, for its INT4 and NVFP4 layouts on CUDA",
    "gemlite": "pip install gemlite, for its INT4 layout on CUDA",
}
CUDA, HUB_TOKEN = "torch for a GPU", "a Hub token"
PROBE_SHAPE = (4096, 4096)
"""N and K of a layer of an 8B model, which every layout supports if its kernel runs here."""
PROBE_EXPERTS = Experts(128, 8)
"""The experts for which layouts are tried: as many as in Qwen3's mixtures."""
PROBE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Device:
    name: str
    kind: str
    """`cpu`, or torch's name of a GPU: `cuda:0`."""
    memory_bytes: int
    free_bytes: int
    detail: str


@dataclass(frozen=True)
class LayoutState:
    """Whether one layout serves one weight format on one device, tested with a layer of an 8 B model."""

    layout: str
    kernel: str
    device: str
    problem: str
    refusal: str | None
    experts: bool
    """Whether it is a layout of experts; another one serves dense layers."""
    tried: Tried | None
    """How we tried its kernel on such a GPU; None if it is not ours, and on a CPU."""


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that serves one weight format on one device, for dense layers or for experts."""

    device: str
    problem: str
    experts: bool
    layout: str | None
    """The layout that most of the measured shapes get, or, if none was measured here, the first that does not
    refuse. None if every layout refuses."""
    shapes: int
    """How many shapes were measured here."""
    speed: float | None
    """The speed as a multiple of the bf16 product's, geometric mean over shapes and M; None if not
    measured."""
    least_speed: float | None
    """The same at the shape and M at which the layout is slowest."""
    tried: Tried | None
    """How we tried the layout's kernel, as in `LayoutState`."""

    @property
    def is_slow(self) -> bool:
        """Say whether the layout dequantizes the weight anew for every product."""
        return self.layout is not None and self.layout.removesuffix(SUFFIX).endswith(DEQUANTIZE)


@dataclass(frozen=True)
class Engine:
    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class HubLogin:
    endpoint: str
    token: bool
    """Whether there is a token. `hf auth whoami` shows whether the Hub accepts it."""
    offline: bool
    cache: str


@dataclass
class Diagnosis:
    """What `pipeline doctor` shows."""

    platform: str
    devices: list[Device]
    versions: dict[str, str | None]
    """The installed version of each package; None if it is not installed."""
    untested: list[UntestedPackage]
    """Packages installed in a version that Scalegate was not tested with."""
    choices: list[LayoutChoice]
    layouts: list[LayoutState]
    engines: list[Engine]
    kv_formats: list[str]
    kv_tried: dict[str, dict[str, Tried]]
    """By GPU and KV format, how the format's kernels were tried on such a GPU."""
    state_formats: list[str]
    """What recurrent layers keep of a request, by the names of the formats that are served."""
    conventions: list[str]
    """The conventions of quantized checkpoints that Scalegate reads."""
    hub: HubLogin
    disk_free_bytes: int
    """Free bytes on the disk of the current folder, into which artifacts are written by default."""
    cache_free_bytes: int
    missing: list[str] = field(default_factory=list)
    """The names of packages that could be installed."""
    advice: list[str] = field(default_factory=list)
    """How to install each package of `missing`, and what it is for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def doctor() -> Diagnosis:
    """Return the diagnosis of this machine."""
    versions = {name: installed_version(name) for name in PACKAGES}
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    states = [state for device in devices for state in _layouts(device)]
    engines = {name: engine.availability() for name, engine in ENGINES.items()}
    missing = _missing(versions, engines)
    cache = Path(constants.HF_HUB_CACHE)
    return Diagnosis(
        platform=f"Python {platform.python_version()}, {platform.platform()}",
        devices=[_device(device) for device in devices],
        versions=versions,
        untested=untested_packages(),
        choices=[choice for device in devices for choice in _choices(device, states)],
        layouts=states,
        engines=[Engine(name, found.available, found.detail) for name, found in engines.items()],
        kv_formats=list(KV_FORMATS),
        kv_tried={str(device): how for device in devices if (how := kv_tried_on(device, KV_FORMATS))},
        state_formats=list(STATE_FORMATS),
        conventions=list(CONVENTIONS),
        hub=HubLogin(constants.ENDPOINT, get_token() is not None, constants.is_offline_mode(), str(cache)),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        cache_free_bytes=shutil.disk_usage(_existing(cache)).free,
        missing=list(missing),
        advice=list(missing.values()),
    )


def _device(device: torch.device) -> Device:
    if device.type == "cpu":
        # The name of a CPU ends with torch's threads.
        memory = psutil.virtual_memory()
        detail = f"{psutil.cpu_count(logical=False) or '?'} cores"
        return Device(device_name(device), "cpu", memory.total, memory.available, detail)
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    detail = f"compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    return Device(device_name(device), str(device), total, free, detail)


def _specs() -> list[WeightFormat]:
    specs = [spec for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
    # In the registry they stand as they were imported.
    return sorted(specs, key=lambda spec: spec.key)


def _layouts(device: torch.device) -> list[LayoutState]:
    """Ask every layout about every format, and layouts of experts about experts."""
    states = []
    for name, layout in LAYOUTS.items():
        experts = PROBE_EXPERTS if isinstance(layout, ExpertsLayout) else None
        for spec in _specs():
            problem = Problem(spec, *PROBE_SHAPE, PROBE_DTYPE, device, experts)
            refusal = layout.refuses(problem)
            how = tried_on(layout, device)
            states.append(
                LayoutState(name, layout.kernel, str(device), spec.key, refusal, experts is not None, how)
            )
    return states


def _choices(device: torch.device, states: Sequence[LayoutState]) -> list[LayoutChoice]:
    """Return, for every format, the layouts that serve dense layers and experts."""
    measured = [
        pick(shape, (), measurements)
        for shape, measurements in cached_shapes(device).items()
        if all(measurement.layout in LAYOUTS for measurement in measurements.measurements)
    ]
    choices = []
    for spec in _specs():
        for experts in (False, True):
            serving = [
                state.layout
                for state in states
                if (state.device, state.problem, state.experts) == (str(device), spec.key, experts)
                and state.refusal is None
            ]
            shapes = [choice for choice in measured if _is_of(choice.shape, spec, experts)]
            choices.append(_choice(device, spec, experts, serving, shapes))
    return choices


def _is_of(shape: str, spec: WeightFormat, experts: bool) -> bool:
    """Say whether a shape, in the notation of plans, belongs to this format and bf16 activations."""
    ending = r" \(.+ experts, .+\)" if experts else ""
    return re.fullmatch(rf"{re.escape(spec.key)} \d+x\d+ bfloat16{ending}", shape) is not None


def _choice(
    device: torch.device,
    spec: WeightFormat,
    experts: bool,
    serving: Sequence[str],
    shapes: Sequence[ShapeChoice],
) -> LayoutChoice:
    """Choose from layouts that do not refuse, in order of preference, and from shapes measured here."""
    layout = next(iter(serving), None)
    if isinstance(spec, Unquantized):
        # Its product is the one that all others are compared with.
        speeds = [1.0] if layout is not None else []
    else:
        speeds = [m.ratio for shape in shapes for m in shape.curve(shape.layout).values()]
    if shapes:
        layout = Counter(shape.layout for shape in shapes).most_common(1)[0][0]
    mean = math.exp(sum(map(math.log, speeds)) / len(speeds)) if speeds else None
    least = min(speeds, default=None)
    how = None if layout is None else tried_on(LAYOUTS[layout], device)
    return LayoutChoice(str(device), spec.key, experts, layout, len(shapes), mean, least, how)


def _existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _missing(versions: dict[str, str | None], engines: dict[str, Availability]) -> dict[str, str]:
    """Return packages that could be installed here, and how to get them."""
    missing = {}
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        missing[CUDA] = f"no CUDA device is seen, by a torch {built}; for a GPU, see pytorch.org/get-started"
    else:
        missing |= {name: text for name, text in INSTALL.items() if versions.get(name) is None}
    missing |= {
        name: engine.install for name, engine in engines.items() if engine.install and not engine.available
    }
    if get_token() is None:
        missing[HUB_TOKEN] = (
            "no Hub token: log in with `hf auth login`, or set HF_TOKEN, before pushing to the Hub"
        )
    return missing
