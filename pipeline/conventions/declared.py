"""Compares what a config declares with what the files store, for all conventions.

The checks find modules that are stored packed although the config excludes them, invalid scales, small
tensors that contradict the codes beside them, and norms and biases that hold NaN. Large weights that are
stored as plain numbers are not read here.
`model_loader/contradictions.py` has the checks that need the architecture (a layer that is declared quantized
but stored plain, tied weights that differ).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.nvfp4 import NVFP4
from ...layouts.formats.weight_format import Weight
from ..checkpoints.checkpoint import NO_WEIGHT, Checkpoint
from ..checkpoints.decoded_tensors import DecodedTensor
from ..checkpoints.float_source import FLOAT8
from ..checkpoints.safetensors_file import TensorInfo
from .all_conventions import convention_of
from .convention import ExcludingConvention, StoredWeight

SCALE = "scale"
CODES = "codes"
E8M0_SCALES, E8M0_NAN = ("_scales", "_scale"), 255
"""The ends of names of scales in E8M0, which lie in bytes."""
NAMED = 8
"""How many invalid tensors an error names."""


def stored_weights(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """Return every linear weight that its convention describes, by module; reading a spoilt scale is refused.

    Raise UserError if the config excludes a module that is stored packed: readers would take it for plain.
    """
    convention = convention_of(checkpoint)
    stored = convention.modules(checkpoint)
    if isinstance(convention, ExcludingConvention):
        for module, weight in stored.items():
            pattern = convention.excludes(checkpoint, module)
            if pattern is not None:
                raise UserError(
                    f"{checkpoint.source}: tensor {weight.tensors[0]} is packed, but the quantization config "
                    f"excludes it ({pattern!r}): other libraries would read it as unquantized; correct the "
                    "config, or quantize again"
                )
    return {
        module: replace(weight, read=partial(_read_sound, checkpoint, weight))
        for module, weight in stored.items()
    }


def refuse_spoilt(checkpoint: Checkpoint, stored: Mapping[str, StoredWeight]) -> None:
    """Raise a UserError that names each scale that is no number, or is zero for codes that are not; likewise
    norms and biases that are no numbers, and small tensors that contradict the codes.
    """
    refuse_spoilt_vectors(checkpoint, stored)
    for weight in stored.values():
        if weight.check is not None:
            weight.check()
        if weight.read_input is not None:
            weight.read_input()
    fused = {
        name: info
        for name, info in checkpoint.tensors.items()
        if isinstance(info, DecodedTensor) and name.removesuffix(".weight") not in stored
    }
    # Scales of all experts in one tensor are read once, not once for each expert.
    single = [weight for weight in stored.values() if fused.keys().isdisjoint(weight.tensors)]
    spoilt = [said for weight in single for said in _spoilt(checkpoint, weight)]
    parts = [part for info in fused.values() for part in _scales_of(info)]
    _refuse(checkpoint, spoilt + [said for part in parts if (said := _said_of_numbers(part)) is not None])


def refuse_spoilt_vectors(checkpoint: Checkpoint, stored: Mapping[str, StoredWeight]) -> None:
    """Raise a UserError that names each norm and bias that holds NaN or infinity."""
    in_formats = {name for weight in stored.values() for name in weight.tensors}
    vectors = [
        info
        for name, info in checkpoint.tensors.items()
        if len(info.shape) <= 1 and info.dtype.is_floating_point
        if name not in in_formats and not NO_WEIGHT.search(name)
    ]
    _refuse(checkpoint, [said for info in vectors if (said := _said_of_numbers(info)) is not None])


def _refuse(checkpoint: Checkpoint, spoilt: list[str]) -> None:
    if spoilt:
        more = f"\n  and {len(spoilt) - NAMED} more" if len(spoilt) > NAMED else ""
        raise UserError(
            f"{checkpoint.source} has weights or scales that are no numbers, or lost:\n  "
            + "\n  ".join(spoilt[:NAMED])
            + f"{more}\nDownload it again, or quantize again"
        )


def _read_sound(checkpoint: Checkpoint, weight: StoredWeight) -> Weight | Tensor:
    """Return the weight that `weight` reads; if its scales are invalid, they are read again to name the
    problem.
    """
    value = weight.read()
    if isinstance(value, Tensor):
        _refuse(checkpoint, list(_spoilt(checkpoint, weight)))
        if not _extremes(value)[1] < torch.inf:
            _refuse(checkpoint, [f"{weight.module}: {weight.tensors[0]} holds NaN or infinity"])
        return value
    for name, tensor in value.tensors().items():
        low, high = _extremes(tensor)
        is_signed = SCALE in name and isinstance(weight.spec, NVFP4) and bool((_wide(tensor) < 0).any())
        if not high < torch.inf or (low == 0 and SCALE in name) or is_signed:
            _refuse(checkpoint, list(_spoilt(checkpoint, weight)))
    return value


def _spoilt(checkpoint: Checkpoint, weight: StoredWeight) -> Iterator[str]:
    """Yield the problems of one weight's scales, by the tensor's name."""
    scales = [
        part
        for name in weight.tensors
        for part in _scales_of(checkpoint.tensors[name])
        if name != f"{weight.module}.weight" or isinstance(checkpoint.tensors[name], DecodedTensor)
    ]
    said = [text for part in scales if (text := _said_of_numbers(part)) is not None]
    if said:
        yield from (f"{weight.module}: {text}" for text in said)
        return
    if isinstance(weight.spec, NVFP4):
        signed = [part.name for part in scales if bool((_wide(part.read()) < 0).any())]
        if signed:
            yield f"{weight.module}: {', '.join(signed)} is negative, and GPUs read NVFP4's scales unsigned"
    zeros = [part.name for part in scales if SCALE in part.name and _extremes(part.read())[0] == 0]
    if zeros and _hides_codes(checkpoint, weight):
        yield f"{weight.module}: {', '.join(zeros)} is zero for codes that are not zero"


def _scales_of(info: TensorInfo) -> list[TensorInfo]:
    """Return the tensors that multiply codes: the tensor itself, or the sources of a decoded tensor."""
    parts = info.parts if isinstance(info, DecodedTensor) else (info,)
    return [part for part in parts if part.dtype.is_floating_point or _is_e8m0(part)]


def _is_e8m0(info: TensorInfo) -> bool:
    return info.dtype == torch.uint8 and info.name.endswith(E8M0_SCALES)


def _said_of_numbers(part: TensorInfo) -> str | None:
    values = part.read()
    wrong = (values == E8M0_NAN) if values.dtype == torch.uint8 else ~torch.isfinite(_wide(values))
    count = int(wrong.sum())
    return f"{count:,} of {wrong.numel():,} numbers in {part.name} are NaN or infinite" if count else None


def _hides_codes(checkpoint: Checkpoint, weight: StoredWeight) -> bool:
    """Say whether a scale of zero belongs to codes that are not zero; a block of zeros has both."""
    value = weight.read()
    if isinstance(value, Tensor):
        info = checkpoint.tensors[f"{weight.module}.weight"]
        return info.dtype in FLOAT8 and bool(((_wide(info.read()) != 0) & (value == 0)).any())
    tensors = value.tensors()
    if CODES not in tensors:
        return False  # IQ2_XXS has no code for zero: there a scale of zero is how a block of zeros is written
    ones = {name: _without_zeros(tensor) for name, tensor in tensors.items() if SCALE in name}
    changed = value.with_tensors(ones)
    step = max(1, (1 << 24) // value.shape[1])
    return any(
        not torch.equal(
            value.rows(start, start + step).dequantize(torch.float32) == 0,
            changed.rows(start, start + step).dequantize(torch.float32) == 0,
        )
        for start in range(0, value.shape[0], step)
    )


def _without_zeros(scale: Tensor) -> Tensor:
    wide = _wide(scale)
    return torch.where(wide == 0, 1.0, wide).to(scale.dtype)


def _extremes(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest absolute value; both NaN if there is a NaN."""
    if not values.numel() or not values.is_floating_point():
        return 1.0, 1.0
    low, high = _wide(values).abs().aminmax()
    return float(low), float(high)


def _wide(values: Tensor) -> Tensor:
    """Return the tensor in fp32 if it is float8, since few operations support float8."""
    return values.float() if values.element_size() == 1 else values
