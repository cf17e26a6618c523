"""Writes a checkpoint as one GGUF file: `pipeline gguf`. The layout of the file is defined in
`gguf_file/`.
"""

from pathlib import Path

from ..checkpoints.checkpoint import open_checkpoint
from ..gguf_file.write import BF16, GGUFSummary, write_gguf


def gguf(
    model: str | Path,
    out: str | Path,
    *,
    matrices: str = BF16,
    revision: str | None = None,
    progress: bool = True,
) -> GGUFSummary:
    """Write `model`, a folder or a Hub id, to the file `out`. Raise UserError for models that llama.cpp could
    not read.

    matrices: the type of all matrices except those in IQ2_XXS: `bf16` or `q8_0`
    revision: branch, tag or commit of `model`, if it is a Hub id
    """
    return write_gguf(open_checkpoint(model, revision), Path(out), matrices, progress)
