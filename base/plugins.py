"""Plugins: third-party modules that register formats, layouts, KV formats, engines or conventions.

Plugins are found in two ways: through entry points of the group `scalegate.plugins`, and through the
environment variable `SCALEGATE_PLUGINS`, a comma-separated list of modules or .py files. Child processes
inherit both.
"""

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from .errors import UserError

GROUP = "scalegate.plugins"
VARIABLE = "SCALEGATE_PLUGINS"

_LOCK = threading.RLock()
_STATE = {"loaded": False, "loading": False}


def load_plugins() -> None:
    """Import every plugin, once a process. A plugin that cannot be imported raises a UserError with its name.

    A plugin that reads a registry during its own import sees what has been registered so far.
    """
    if _STATE["loaded"]:
        return
    with _LOCK:
        if _STATE["loaded"] or _STATE["loading"]:
            return
        _STATE["loading"] = True
        try:
            for entry in entry_points(group=GROUP):
                _import(f"{entry.name} (entry point {entry.value})", entry.load)
            for word in _words(os.environ.get(VARIABLE, "")):
                _import(f"{word} (named in {VARIABLE})", partial(_load, word))
            _STATE["loaded"] = True
        finally:
            _STATE["loading"] = False


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _import(name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except Exception as error:  # a plugin is somebody else's program and may raise anything
        raise UserError(
            f"the plugin {name} cannot be imported: {type(error).__name__}: {error}. Repair or remove it"
        ) from error


def _load(word: str) -> None:
    """Import a module by its name, or a .py file by its path."""
    if not word.endswith(".py"):
        importlib.import_module(word)
        return
    path = Path(word).expanduser().resolve()
    name = f"scalegate_plugin_{path.stem}"
    if name in sys.modules:
        if sys.modules[name].__file__ != str(path):
            raise ImportError(f"{sys.modules[name].__file__} is a plugin of the same name")
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
