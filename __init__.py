"""Quantize a language model, prove that it serves fast when many requests decode together, publish it.

    from scalegate import LLM

`import scalegate` imports nothing else; each of these names brings along what it needs when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base.errors import UserError
    from .pipeline.commands.adopt import adopt
    from .pipeline.commands.layout import layout
    from .pipeline.commands.llm import LLM, Generation
    from .pipeline.commands.push import push
    from .pipeline.commands.quantize import quantize
    from .pipeline.commands.release import release
    from .pipeline.commands.serve import serve
    from .pipeline.commands.sign import sign
    from .pipeline.commands.validate import validate
    from .pipeline.commands.verify import verify
    from .serving_check.engine.options import EngineOptions
    from .serving_check.engine.request import SamplingParams

_WHERE = {
    "LLM": "pipeline.commands.llm",
    "Generation": "pipeline.commands.llm",
    "SamplingParams": "serving_check.engine.request",
    "EngineOptions": "serving_check.engine.options",
    "UserError": "base.errors",
    "adopt": "pipeline.commands.adopt",
    "quantize": "pipeline.commands.quantize",
    "layout": "pipeline.commands.layout",
    "validate": "pipeline.commands.validate",
    "push": "pipeline.commands.push",
    "release": "pipeline.commands.release",
    "serve": "pipeline.commands.serve",
    "sign": "pipeline.commands.sign",
    "verify": "pipeline.commands.verify",
}

__all__ = [
    "LLM",
    "EngineOptions",
    "Generation",
    "SamplingParams",
    "UserError",
    "adopt",
    "layout",
    "push",
    "quantize",
    "release",
    "serve",
    "sign",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .base.installed import own_version

        return own_version()
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, "__version__"})
