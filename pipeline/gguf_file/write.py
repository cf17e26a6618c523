"""Writing a whole checkpoint as one GGUF file that llama.cpp reads, a tensor at a time.

IQ2_XXS weights keep their bits, and symmetric INT4 in groups of 32 becomes Q4_0. Weights in other quantized
formats become BF16, since no GGUF type holds their numbers; unquantized tensors keep their dtype, and vectors
become fp32, as llama.cpp requires. On request, all matrices that would be BF16 are rounded to Q8_0.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from ...base.atomic_files import atomic_path
from ...base.errors import UserError
from ...base.progress import progress_bar
from ...layouts.formats.int4 import Int4, Int4Weight
from ...layouts.formats.iq2_xxs import IQ2XXS, IQ2XXSWeight
from ...layouts.formats.weight_format import Weight
from ..checkpoints.checkpoint import NO_WEIGHT, Checkpoint
from ..conventions.convention import StoredWeight
from ..conventions.declared import stored_weights
from .architecture import Architecture
from .blocks import (
    BLOCK_BYTES,
    Q4_0_BYTES,
    Q4_0_COLUMNS,
    Q8_0_BYTES,
    Q8_0_COLUMNS,
    to_blocks,
    to_q4_0,
    to_q8_0,
)
from .tokenizer import write_tokenizer

BF16, Q8_0 = "bf16", "q8_0"
MATRICES = (BF16, Q8_0)
"""The types in which matrices can be written, except those in IQ2_XXS."""
FILE_TYPES = {BF16: gguf.LlamaFileType.MOSTLY_BF16, Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0}
ROPE_FACTORS = "rope_freqs.weight"
TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
DTYPES = {kind: dtype for dtype, kind in TYPES.items()}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor to write: its GGUF name and type, the shape [N, bytes of a row] of its bytes, and the
    bytes.
    """

    name: str
    type: GGMLQuantizationType
    byte_shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.byte_shape))


@dataclass(frozen=True)
class GGUFSummary:
    """The contents of a GGUF file.

    tensors:           the number of each GGUF type
    without_tokenizer: why it has no tokenizer; None if it has one
    """

    path: Path
    tensors: dict[str, int]
    without_tokenizer: str | None


def write_gguf(checkpoint: Checkpoint, out: Path, matrices: str = BF16, progress: bool = True) -> GGUFSummary:
    """Write `checkpoint` to `out`, atomically. Raise UserError for a model that llama.cpp could not read.

    matrices: one of `MATRICES`
    """
    if matrices not in MATRICES:
        raise UserError(
            f"matrices are written as {' or '.join(MATRICES)}, not {matrices}: the gguf package has no "
            "quantizer for K-quants. Write bf16, and run llama.cpp's llama-quantize on the file"
        )
    architecture = Architecture.of(checkpoint.source, checkpoint.config)
    tensors = [_rounded(tensor, matrices) for tensor in _tensors(checkpoint, architecture)]
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.type.name] = counts.get(tensor.type.name, 0) + 1
    with _room_for(out), atomic_path(out) as partial:
        writer = GGUFWriter(partial, architecture.name)
        try:
            architecture.write_metadata(writer, checkpoint.public_name)
            iq2 = GGMLQuantizationType.IQ2_XXS.name in counts
            kind = gguf.LlamaFileType.MOSTLY_IQ2_XXS if iq2 else FILE_TYPES[matrices]
            writer.add_file_type(kind)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            left_out = write_tokenizer(writer, checkpoint, checkpoint.config["vocab_size"])
            for tensor in tensors:
                writer.add_tensor_info(
                    tensor.name, tensor.byte_shape, np.dtype(np.uint8), tensor.nbytes, tensor.type
                )
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            total = sum(tensor.nbytes for tensor in tensors)
            with progress_bar(total=total, desc="writing", unit="B", unit_scale=True, shown=progress) as bar:
                for tensor in tensors:
                    writer.write_tensor_data(tensor.read())
                    bar.update(tensor.nbytes)
        finally:
            writer.close()
    return GGUFSummary(out, counts, left_out)


@contextmanager
def _room_for(out: Path) -> Iterator[None]:
    """Raise UserError if the disk is full. numpy, which the gguf package writes tensors with, then raises an
    OSError without a number: "4194304 requested and 3918720 written".
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"no room to write {out} ({error.strerror or error}); make room, or give another --out"
        ) from error


def _tensors(checkpoint: Checkpoint, architecture: Architecture) -> Iterator[GGUFTensor]:
    """Yield every tensor of the file, from the checkpoint's headers alone."""
    stored = stored_weights(checkpoint)
    parts = {name for weight in stored.values() for name in weight.tensors}
    for module, weight in stored.items():
        yield _quantized(architecture, f"{module}.weight", weight)
    factors = architecture.rope_factors()
    if factors is not None:
        shape = (factors.numel() * factors.itemsize,)
        yield GGUFTensor(ROPE_FACTORS, TYPES[torch.float32], shape, lambda: _bytes(factors))
    for name, info in checkpoint.tensors.items():
        if name in parts or NO_WEIGHT.search(name):
            continue
        if info.dtype not in TYPES:
            raise UserError(
                f"{checkpoint.source}: {name} has dtype {info.dtype}, which cannot be written as GGUF"
            )
        dtype = info.dtype if len(info.shape) > 1 else torch.float32
        byte_shape = (*info.shape[:-1], info.shape[-1] * dtype.itemsize)

        def read(name: str = name, dtype: torch.dtype = dtype) -> np.ndarray:
            return _bytes(_ordered(checkpoint.read(name), architecture.row_order(name)).to(dtype))

        yield GGUFTensor(architecture.tensor_name(name), TYPES[dtype], byte_shape, read)


def _rounded(tensor: GGUFTensor, matrices: str) -> GGUFTensor:
    """Return the tensor in Q8_0 if it is a matrix that `matrices` asks for in Q8_0, else the tensor
    itself.
    """
    dtype = DTYPES.get(tensor.type)
    if matrices == BF16 or dtype is None or len(tensor.byte_shape) != 2:
        return tensor
    n, k = tensor.byte_shape[0], tensor.byte_shape[1] // dtype.itemsize
    if k % Q8_0_COLUMNS:
        return tensor

    def read() -> np.ndarray:
        return to_q8_0(torch.from_numpy(tensor.read()).view(dtype))

    return GGUFTensor(tensor.name, GGMLQuantizationType.Q8_0, (n, k // Q8_0_COLUMNS * Q8_0_BYTES), read)


def _quantized(architecture: Architecture, name: str, stored: StoredWeight) -> GGUFTensor:
    (n, k), order = stored.shape, architecture.row_order(name)
    gguf_name = architecture.tensor_name(name)

    def read_ordered() -> Weight:
        weight = stored.read()
        if isinstance(weight, Tensor):
            raise ValueError(f"{name} is no {stored.spec.label} weight")
        return weight.with_tensors(
            {part: _ordered(tensor, order) for part, tensor in weight.tensors().items()}
        )

    def read_dense() -> np.ndarray:
        weight = stored.read()
        return _bytes(_ordered(weight if isinstance(weight, Tensor) else weight.dequantize(), order))

    if isinstance(stored.spec, IQ2XXS):
        byte_shape = n, k // IQ2XXS.column_multiple * BLOCK_BYTES
        return GGUFTensor(
            gguf_name,
            GGMLQuantizationType.IQ2_XXS,
            byte_shape,
            lambda: to_blocks(cast(IQ2XXSWeight, read_ordered())),
        )
    if stored.spec == Int4(Q4_0_COLUMNS, symmetric=True):
        byte_shape = n, k // Q4_0_COLUMNS * Q4_0_BYTES
        return GGUFTensor(
            gguf_name,
            GGMLQuantizationType.Q4_0,
            byte_shape,
            lambda: to_q4_0(cast(Int4Weight, read_ordered())),
        )
    return GGUFTensor(gguf_name, GGMLQuantizationType.BF16, (n, 2 * k), read_dense)


def _ordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order]


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()
