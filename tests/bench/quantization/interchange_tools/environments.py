"""The environments of the tools compared with: one for each, since they exclude each other.

transformers 5.23.0 by default loads no asymmetric compressed-tensors checkpoint, llm-compressor's own
included: it expects the zero points unpacked.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
REQUIREMENTS = {
    "compressed-tensors": ("compressed-tensors==0.20.0", "transformers==5.22.0", "accelerate==1.15.0"),
    "llmcompressor": ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0"),
    "modelopt": ("nvidia-modelopt[hf]==0.47.0", "transformers==5.14.1"),
    "torchao": ("torchao==0.18.0", "transformers==5.23.0", "accelerate==1.15.0"),
}
SOLVERS = {
    "solvers": ("transformers==5.17.0", "setuptools==84.2.1", "qwantize==0.1.1", "fouroversix==1.0.5"),
}
"""NVFP4 solvers that write no checkpoints; fouroversix is built without its CUDA kernels, against torch."""
CALIBRATED = {"auto-round": ("auto-round==0.16.1", "transformers==5.17.0", "accelerate==1.15.0")}
"""Tools that only `calibrated_quality.py` compares with."""
INSTALLED = "installed.txt"


def make_environments(folder: Path, wanted: Mapping[str, Sequence[str]] = REQUIREMENTS) -> dict[str, Path]:
    """The Python of every tool's environment under `folder`; what is missing there is installed."""
    return {tool: _environment(folder / tool, (TORCH, *wanted[tool])) for tool in wanted}


def _environment(folder: Path, requirements: tuple[str, ...]) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted, installed = "\n".join(requirements), folder / INSTALLED
    if not installed.is_file() or installed.read_text(encoding="utf-8") != wanted:
        print(f"installing {folder.name}: {', '.join(requirements)}", flush=True)
        install = [str(python), "-m", "pip", "install", "-q", "--no-build-isolation"]
        environment = {**os.environ, "SKIP_CUDA_BUILD": "1"}
        # One after another: a package may be built with those before it.
        for requirement in requirements:
            subprocess.run([*install, requirement], check=True, env=environment)
        installed.write_text(wanted, encoding="utf-8")
    return python
