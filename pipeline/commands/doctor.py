"""What this machine can do: devices, versions, layouts, engines, Hub login, and what to install for the rest.

Looks only at this machine: no request goes out, so nothing can hang.
"""

import platform
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import constants, get_token

from ...base.installed import installed_version
from ...layouts.choosing.plan import device_name
from ...layouts.formats.all_formats import WEIGHT_FORMATS
from ...layouts.kv.format import KV_FORMATS
from ...layouts.packing.all_layouts import LAYOUTS
from ...layouts.packing.layout import Experts, ExpertsLayout, Problem
from ...serving_check.adapters.all_engines import ENGINES
from ...serving_check.adapters.engine import Availability
from ..conventions.all_conventions import CONVENTIONS
from ..machine.tested_stack import Untested, untested_packages

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
    "mslk": "pip install mslk from the wheel index on pytorch.org, for its INT4 layout on Hopper",
    "gemlite": "pip install gemlite, for its INT4 layout on CUDA",
}
PROBE_SHAPE = (4096, 4096)
"""A layer of an 8 B model: N and K that every layout takes whose kernel runs here at all."""
PROBE_EXPERTS = Experts(128, 8)
"""What a layout of experts is asked with: as many as Qwen3's mixtures have."""


@dataclass(frozen=True)
class Device:
    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    detail: str


@dataclass(frozen=True)
class LayoutState:
    """Whether one layout serves one weight format on one device, asked with a layer of an 8 B model."""

    layout: str
    kernel: str
    device: str
    problem: str
    refusal: str | None


@dataclass(frozen=True)
class Engine:
    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class HubLogin:
    endpoint: str
    token: bool
    """Whether there is one; whether the Hub takes it, `hf auth whoami` asks."""
    offline: bool
    cache: str


@dataclass
class Diagnosis:
    """What `pipeline doctor` shows."""

    platform: str
    devices: list[Device]
    versions: dict[str, str | None]
    """None for what is not installed."""
    untested: list[Untested]
    """Those installed in a version that Scalegate was not tested with."""
    layouts: list[LayoutState]
    engines: list[Engine]
    kv_formats: list[str]
    conventions: list[str]
    """Of quantized checkpoints, that it reads."""
    hub: HubLogin
    disk_free_bytes: int
    """Where the command runs, which is where artifacts go unless told otherwise."""
    cache_free_bytes: int
    advice: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def doctor() -> Diagnosis:
    """Look at this machine."""
    versions = {name: installed_version(name) for name in PACKAGES}
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    engines = {name: engine.availability() for name, engine in ENGINES.items()}
    cache = Path(constants.HF_HUB_CACHE)
    return Diagnosis(
        platform=f"Python {platform.python_version()}, {platform.platform()}",
        devices=[_device(device) for device in devices],
        versions=versions,
        untested=untested_packages(),
        layouts=[state for device in devices for state in _layouts(device)],
        engines=[Engine(name, one.available, one.detail) for name, one in engines.items()],
        kv_formats=list(KV_FORMATS),
        conventions=list(CONVENTIONS),
        hub=HubLogin(constants.ENDPOINT, get_token() is not None, constants.is_offline_mode(), str(cache)),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        cache_free_bytes=shutil.disk_usage(_existing(cache)).free,
        advice=_advice(versions, engines),
    )


def _device(device: torch.device) -> Device:
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        detail = f"{psutil.cpu_count(logical=False) or '?'} cores, {torch.get_num_threads()} threads in torch"
        return Device(device_name(device), "cpu", memory.total, memory.available, detail)
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    detail = f"compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    return Device(device_name(device), str(device), total, free, detail)


def _layouts(device: torch.device) -> list[LayoutState]:
    """Every layout asked about every format, and layouts of experts about experts."""
    specs = [spec for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
    states = []
    for name, layout in LAYOUTS.items():
        experts = PROBE_EXPERTS if isinstance(layout, ExpertsLayout) else None
        for spec in specs:
            problem = Problem(spec, *PROBE_SHAPE, torch.bfloat16, device, experts)
            states.append(LayoutState(name, layout.kernel, str(device), spec.key, layout.refuses(problem)))
    return states


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _advice(versions: dict[str, str | None], engines: dict[str, Availability]) -> list[str]:
    advice = []
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        advice.append(f"no CUDA device is seen, by a torch {built}; for a GPU, see pytorch.org/get-started")
    else:
        advice += [text for name, text in INSTALL.items() if versions.get(name) is None]
    advice += [engine.install for engine in engines.values() if engine.install and not engine.available]
    if get_token() is None:
        advice.append("no Hub token: log in with `hf auth login`, or set HF_TOKEN, before pushing to the Hub")
    return advice
