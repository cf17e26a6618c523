"""A GPU of any compute capability, pretended on a machine with none, and a record of what is launched on it.

Engines and layouts run as they do on a GPU, but their kernels are recorded and not run. Tensors lie in the
CPU's memory and say that they are on CUDA. What a kernel would have written holds zeros, so a sampled token
is token 0. Not a test by itself.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from scalegate.kernels.device import compute_capability
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

GPU = torch.device("cuda", 0)
UNINITIALIZED = {"empty", "empty_like", "new_empty", "empty_strided"}
IS_OVERRIDDEN = {"__get__", "__set__", "__delete__"}


@dataclass(frozen=True)
class Launch:
    """One form of a kernel: all that Triton compiles it from, besides the target."""

    kernel: Any
    source: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def compile(self, capability: int) -> Any:
        return triton.compile(self.source, target=GPUTarget("cuda", capability, 32), options=self.options)


@dataclass
class LaunchRecord:
    """What was launched, each form once, by kernel and by what Triton would cache it under."""

    capability: int
    launches: dict[Any, Launch] = field(default_factory=dict)


class Stream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


class OnTheCpu(TorchFunctionMode):
    """Every tensor is made in the CPU's memory, and an uninitialized one is zeros."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        options.pop("pin_memory", None)
        name = getattr(function, "__name__", "")
        if name in IS_OVERRIDDEN:
            return function(*arguments, **options)
        if name == "pin_memory":
            return arguments[0]
        own_op = OPDEFS.get(str(function).replace(".default", "").replace(".", "::"))
        if own_op is not None:
            # Torch would leave this mode before it calls what is registered.
            with self:
                return own_op._init_fn(*arguments, **options)
        if name == "linear" and len(arguments) > 1:
            # A library's product, whose time would be most of a test's.
            return arguments[0].new_zeros(*arguments[0].shape[:-1], len(arguments[1]))
        if name == "_scaled_mm":
            # Also a library's, which has fewer forms for a CPU.
            x, weight = arguments[:2]
            return torch.zeros(len(x), weight.shape[1], dtype=options["out_dtype"])
        if "device" in options and options["device"] is not None:
            options["device"] = on_cpu(options["device"])
        if name in ("to", "cuda"):
            arguments = tuple(map(on_cpu, arguments))
        result = function(*arguments, **options)
        return result.zero_() if name in UNINITIALIZED else result


def on_cpu(value: Any) -> Any:
    """A CUDA device as the CPU; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def device_of(tensor: torch.Tensor) -> torch.device:
    """What a tensor says: the GPU, unless it is a meta tensor."""
    real = torch._C.TensorBase.device.__get__(tensor)
    return GPU if real.type == "cpu" else real


class Driver:
    """Triton's driver of a GPU that compiles for it and has no queue of work."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """By architecture, since kernels keep what they have compiled by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


@contextlib.contextmanager
def pretended_gpu(capability: int, memory: int = 80 << 30) -> Iterator[LaunchRecord]:
    """Within the block torch finds one GPU of this compute capability, such as 89."""
    recording = LaunchRecord(capability)

    def record(
        self: JITFunction,
        key: Any,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attrs: Any,
        *_: Any,
    ) -> None:
        source = self.ASTSource(self, signature, constants, attrs)
        recording.launches[self, str(key)] = Launch(self, source, dict(options.__dict__))

    class Properties:
        name, total_memory = "pretended GPU", memory
        major, minor = divmod(capability, 10)
        multi_processor_count, L2_cache_size = 132, 50 << 20

    with pytest.MonkeyPatch.context() as patch, OnTheCpu():
        patch.setattr(JITFunction, "_do_compile", record)
        patch.setattr(torch.Tensor, "device", property(device_of), raising=False)
        patch.setattr(
            torch.Tensor, "is_cuda", property(lambda tensor: device_of(tensor) == GPU), raising=False
        )
        for name, value in {
            "is_available": True,
            "device_count": 1,
            "get_device_capability": divmod(capability, 10),
            "get_device_properties": Properties(),
            "get_device_name": Properties.name,
            "current_device": 0,
            "mem_get_info": (memory, memory),
            "memory_allocated": 0,
            "synchronize": None,
            "current_stream": Stream(),
        }.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value, **options: value)
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, Stream)
        for name in ("stream", "device_of", "device"):
            patch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
        patch.setattr(triton.runtime.driver, "_active", Driver(capability))
        # It remembers what the GPU before this one was.
        compute_capability.cache_clear()
        try:
            yield recording
        finally:
            compute_capability.cache_clear()
