"""bitsandbytes: NF4 and FP4 codes in blocks of the flattened weight, and INT8 with one scale per row.

At four bits `<module>.weight` is uint8 [N * K / 2, 1], or the same bytes in a wider dtype, and the first code
of a byte is in its high nibble. The weight comes with the `absmax` of each block, the `quant_map` of the
sixteen values, and a JSON state. `absmax` may itself be quantized. At eight bits the weight is int8 [N, K],
and `SCB` has each row's largest magnitude; the weight is decoded to the dtype of the 16-bit tensors beside
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...base.untrusted_files import parse_json
from .decoded_tensors import DecodedTensor, decoded
from .safetensors_file import TensorInfo

METHOD = "bitsandbytes"
STATE = ".quant_state.bitsandbytes__"
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
CODES, NESTED_CODES = 16, 256
SCB, FORMAT = "SCB", "weight_format"
PER_LARGEST = 1 / 127
"""bitsandbytes multiplies by the reciprocal, which rounds otherwise than a division."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def decoded_bitsandbytes(
    source: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, tuple[DecodedTensor, tuple[str, ...]]]:
    """Map the name of each weight's codes to the decoded weight and to the tensors that the weight is made
    from.
    """
    made: dict[str, tuple[DecodedTensor, tuple[str, ...]]] = {}
    for name, info in tensors.items():
        if STATE in name:
            weight = name.split(STATE)[0]
            made[weight] = _four_bits(source, tensors, weight, info)
        elif name.endswith(f".{SCB}"):
            module = name.removesuffix(f".{SCB}")
            made[f"{module}.weight"] = _eight_bits(source, tensors, module, info)
    return made


def _four_bits(
    source: str, tensors: Mapping[str, TensorInfo], name: str, state: TensorInfo
) -> tuple[DecodedTensor, tuple[str, ...]]:
    said = parse_json(bytes(state.read().numpy()).decode("utf-8", "replace"), f"{source}: {state.name}")
    parts = {part: tensors[f"{name}.{part}"] for part in BESIDE if f"{name}.{part}" in tensors}
    codes, shape = tensors.get(name), _shape_of(said)
    if codes is None or shape is None or not {"absmax", "quant_map"} <= parts.keys():
        raise UserError(
            f"{source}: {name} is not a whole {METHOD} weight: a part is missing; download the checkpoint "
            "again"
        )
    numbers, said_dtype = codes.nbytes * 2, said.get("dtype")
    if numbers != shape[0] * shape[1] or shape[1] % 2 or said_dtype not in DTYPES:
        raise UserError(
            f"{source}: {name} has {numbers} codes for shape {list(shape)} in {said_dtype!r}; "
            "download the checkpoint again"
        )
    sizes = ["blocksize", *(["nested_blocksize"] if "nested_absmax" in parts else [])]
    wrong = [key for key in sizes if not isinstance(said.get(key), int) or said[key] < 1]
    if wrong or ("nested_absmax" in parts and not isinstance(said.get("nested_offset"), int | float)):
        missing = (*wrong, "nested_offset")[0]
        raise UserError(f"{source}: {state.name} has no {missing}; download the checkpoint again")
    counts = {"quant_map": CODES, "absmax": -(-numbers // said["blocksize"])}
    if "nested_absmax" in parts:
        counts["nested_absmax"] = -(-counts["absmax"] // said["nested_blocksize"])
        counts["nested_quant_map"] = NESTED_CODES
    for part, count in counts.items():
        if part not in parts or parts[part].shape != (count,):
            found = list(parts[part].shape) if part in parts else "none"
            raise UserError(f"{source}: {name}.{part} has to hold {count} numbers, not {found}")
    used = [codes, *parts.values(), state]
    decode = _FourBits(codes, parts, said, shape[1])
    label = f"{METHOD} {str(said.get('quant_type', '')).upper()}, blocks of {said['blocksize']}"
    weight = decoded(name, used, DTYPES[said["dtype"]], shape, decode, label)
    return weight, tuple(part.name for part in used)


def _shape_of(said: Any) -> tuple[int, int] | None:
    shape = said.get("shape") if isinstance(said, dict) else None
    if isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) for n in shape):
        return shape[0], shape[1]
    return None


@dataclass(frozen=True)
class _FourBits:
    codes: TensorInfo
    parts: Mapping[str, TensorInfo]
    state: Mapping[str, Any]
    k: int

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the decoded rows `start:stop`, [stop - start, K]."""
        first, last = start * self.k, stop * self.k
        packed = self.codes.read().flatten().view(torch.uint8)[first // 2 : last // 2]
        codes = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten()
        block = torch.arange(first, last) // int(self.state["blocksize"])
        values = self.parts["quant_map"].read().float()[codes.int()] * self._absmax()[block]
        return values.to(DTYPES[self.state["dtype"]]).view(-1, self.k)

    def _absmax(self) -> Tensor:
        absmax = self.parts["absmax"].read()
        if "nested_absmax" not in self.parts:
            return absmax.float()
        values = self.parts["nested_quant_map"].read().float()[absmax.int()]
        block = torch.arange(len(values)) // int(self.state["nested_blocksize"])
        return values * self.parts["nested_absmax"].read().float()[block] + float(self.state["nested_offset"])


def _eight_bits(
    source: str, tensors: Mapping[str, TensorInfo], module: str, scales: TensorInfo
) -> tuple[DecodedTensor, tuple[str, ...]]:
    name = f"{module}.weight"
    codes = tensors.get(name)
    if codes is None or codes.dtype != torch.int8 or scales.shape != codes.shape[:1]:
        raise UserError(f"{source}: {scales.name} needs an int8 tensor {name} with as many rows")

    halves = (torch.float16, torch.bfloat16)
    dtype = next((info.dtype for info in tensors.values() if info.dtype in halves), torch.float16)

    def decode(start: int, stop: int) -> Tensor:
        rows = codes.read_rows(start, stop).float()
        return (rows * scales.read_rows(start, stop).float().unsqueeze(1) * PER_LARGEST).to(dtype)

    used = [codes, scales, *(tensors[n] for n in (f"{module}.{FORMAT}",) if n in tensors)]
    weight = decoded(name, used, dtype, codes.shape, decode, f"{METHOD} INT8, a scale a row")
    return weight, tuple(part.name for part in used)
