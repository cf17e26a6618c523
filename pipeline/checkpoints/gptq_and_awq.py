"""GPTQ and AWQ: unsigned integer codes packed into int32, with fp16 scales and packed zero points per group.

GPTQ packs `qweight` along K, [K/8, N] at four bits, and `g_idx` holds the group of each input; the first
version of the format stores each zero point minus one. AWQ packs along N, [K, N/8], with eight columns in an
order of its own. GPTQ and AWQ both represent `<module>.weight` [N, K] in the scales' dtype: `(code - zero) *
scale`, rounded once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from .decoded_tensors import DecodedTensor, decoded
from .safetensors_file import TensorInfo

GPTQ, AWQ = "gptq", "awq"
QWEIGHT = ".qweight"
WORD = 32
BITS = (2, 4, 8)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word in which AWQ stores each of its eight columns."""
ZEROS_AS_THEY_ARE = "gptq_v2"
FORMATS = {GPTQ: (GPTQ, ZEROS_AS_THEY_ARE), AWQ: ("gemm",)}
"""The forms of each that are read, as their makers call them."""
FORMAT_KEYS = ("checkpoint_format", "version", "format")


def decoded_gptq(
    source: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, tuple[DecodedTensor, tuple[str, ...]]]:
    _bits(source, config, BITS)
    group_size = _group_size(config)
    offset = 0 if _format(source, config, GPTQ) == ZEROS_AS_THEY_ARE else 1
    made = {}
    for name, qweight in tensors.items():
        if name.endswith(QWEIGHT):
            module = _Module.of(source, tensors, name.removesuffix(QWEIGHT), group_size)
            bits, n = module.bits(source), qweight.shape[1]
            k = qweight.shape[0] * WORD // bits
            module.refuse_groups(source, k, n)
            made[name] = module.made(n, k, _GPTQDecoder(module, bits, offset, k), f"GPTQ, {bits} bits")
    return made


def decoded_awq(
    source: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, tuple[DecodedTensor, tuple[str, ...]]]:
    _bits(source, config, (4,))
    _format(source, config, AWQ)
    made = {}
    for name, qweight in tensors.items():
        if name.endswith(QWEIGHT):
            module = _Module.of(source, tensors, name.removesuffix(QWEIGHT))
            k, n = qweight.shape[0], qweight.shape[1] * len(AWQ_PLACES)
            module.refuse_groups(source, k, n)
            made[name] = module.made(n, k, _AWQDecoder(module, k), "AWQ, 4 bits")
    return made


def _format(source: str, config: Mapping[str, Any], method: str) -> str:
    """Return the format that the config names; if it names none, the first format that is read."""
    known = FORMATS[method]
    found = next((str(config[key]).lower() for key in FORMAT_KEYS if config.get(key)), known[0])
    if config.get("is_marlin_format"):
        found = "marlin"
    if found not in known:
        listed = " and ".join(f"`{name}`" for name in known)
        raise UserError(f"{source}: Scalegate reads {method.upper()} of version {listed}, not {found!r}")
    return found


def _bits(source: str, config: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = config.get("bits", config.get("w_bit"))
    if bits not in known:
        method, listed = config.get("quant_method"), " or ".join(map(str, known))
        raise UserError(f"{source}: Scalegate reads {method} with {listed} bits, not {bits!r}")
    return bits


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Return how many inputs share a scale, as the config says; None if it names no size, or says that all
    inputs of a layer do.
    """
    size = config.get("group_size")
    return size if isinstance(size, int) and size > 0 else None


@dataclass(frozen=True)
class _Module:
    """The tensors of one linear layer."""

    name: str
    qweight: TensorInfo
    qzeros: TensorInfo
    scales: TensorInfo
    g_idx: TensorInfo | None
    declared_size: int | None = None
    """How many inputs share a scale, as the config says for the whole model; not asked for AWQ, which has no
    shorter last group."""

    @classmethod
    def of(
        cls, source: str, tensors: Mapping[str, TensorInfo], name: str, declared_size: int | None = None
    ) -> "_Module":
        found = [tensors.get(f"{name}.{part}") for part in ("qweight", "qzeros", "scales")]
        qweight, qzeros, scales = found
        if qweight is None or qzeros is None or scales is None:
            raise UserError(
                f"{source}: {name} has no qweight, qzeros and scales; download or copy the checkpoint again"
            )
        if any(len(info.shape) != 2 for info in (qweight, qzeros, scales)):
            raise UserError(
                f"{source}: {name}{QWEIGHT} has shape {list(qweight.shape)}; it must have two dimensions"
            )
        if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
            dtype = str(qweight.dtype).removeprefix("torch.")
            raise UserError(f"{source}: {name}{QWEIGHT} has dtype {dtype}; Scalegate reads codes in int32")
        if not scales.dtype.is_floating_point:
            dtype = str(scales.dtype).removeprefix("torch.")
            raise UserError(f"{source}: {name}.scales has dtype {dtype}; Scalegate reads scales in floats")
        if qzeros.shape[0] != scales.shape[0]:
            raise UserError(
                f"{source}: {name} has zero points of {qzeros.shape[0]} groups and scales of "
                f"{scales.shape[0]}; download or copy the checkpoint again"
            )
        return cls(name, qweight, qzeros, scales, tensors.get(f"{name}.g_idx"), declared_size)

    def bits(self, source: str) -> int:
        """Return the width of the layer's GPTQ codes, by its zero points: layers of a model may differ."""
        bits = self.qzeros.shape[1] * WORD / self.scales.shape[1]
        if bits not in BITS or self.qweight.shape[1] != self.scales.shape[1]:
            raise UserError(
                f"{source}: {self.name} has qweight {list(self.qweight.shape)}, qzeros "
                f"{list(self.qzeros.shape)} and scales {list(self.scales.shape)}, which are no GPTQ layer of "
                "2, 4 or 8 bits"
            )
        return int(bits)

    def made(self, n: int, k: int, decode: Any, stored_as: str) -> tuple[DecodedTensor, tuple[str, ...]]:
        parts = [self.qweight, self.qzeros, self.scales, *([self.g_idx] if self.g_idx else [])]
        several = self.scales.shape[0] > 1
        label = f"{stored_as}, groups of {self.size(k)}" if several else f"{stored_as}, one group a row"
        weight = decoded(f"{self.name}.weight", parts, self.scales.dtype, (n, k), decode, label)
        check = None if self.g_idx is None else lambda: self._check_groups(k)
        return replace(weight, check=check), tuple(part.name for part in parts)

    def _check_groups(self, k: int) -> None:
        self.groups(k)

    def refuse_groups(self, source: str, k: int, n: int) -> None:
        """Raise UserError if the scales do not fit codes of [K, N], or groups that are not stored do not
        divide K.
        """
        groups, columns = self.scales.shape
        in_order = self.g_idx is None and -(-k // self.size(k)) == groups
        if columns != n or not (in_order or (self.g_idx and self.g_idx.shape == (k,))):
            raise UserError(
                f"{source}: {self.name} has scales {list(self.scales.shape)}, which do not fit K = {k} and "
                f"N = {n}; download or copy the checkpoint again"
            )

    def size(self, k: int) -> int:
        """Return how many inputs share a scale; the last group may have fewer. Layers of a model may differ
        from the size that its config names.
        """
        count, declared = self.scales.shape[0], self.declared_size
        fits = declared is not None and -(-k // declared) == count
        return declared if fits and declared is not None else max(1, k // max(1, count))

    def groups(self, k: int) -> Tensor:
        """Return the group that each input belongs to, int64 [K]."""
        count = self.scales.shape[0]
        if self.g_idx is None:
            return torch.arange(k) // self.size(k)
        if self.g_idx.dtype.is_floating_point:
            raise UserError(f"{self.g_idx.name} holds no integers, and names the group of each input")
        groups = self.g_idx.read().long()
        if int(groups.amin()) < 0 or int(groups.amax()) >= count:
            raise UserError(f"{self.g_idx.name} has group numbers beyond the {count} groups that have scales")
        return groups


@dataclass(frozen=True)
class _GPTQDecoder:
    module: _Module
    bits: int
    offset: int
    k: int

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the decoded rows `start:stop`, [stop - start, K]."""
        codes = _unpacked(self.module.qweight.read()[:, start:stop], self.bits, 0)
        zeros = _unpacked(self.module.qzeros.read(), self.bits, 1)[:, start:stop] + self.offset
        zeros &= (1 << self.bits) - 1
        return _weights(codes, zeros, self.module.scales.read()[:, start:stop], self.module.groups(self.k))


@dataclass(frozen=True)
class _AWQDecoder:
    module: _Module
    k: int

    def __call__(self, start: int, stop: int) -> Tensor:
        codes = _awq_columns(self.module.qweight.read())[:, start:stop]
        zeros = _awq_columns(self.module.qzeros.read())[:, start:stop]
        return _weights(codes, zeros, self.module.scales.read()[:, start:stop], self.module.groups(self.k))


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the codes in int32 words, least significant first, along `dim`."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = len(shifts)
    codes = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1)


def _awq_columns(words: Tensor) -> Tensor:
    shifts = torch.tensor(AWQ_PLACES, dtype=torch.int32) * 4
    return ((words.unsqueeze(-1) >> shifts) & 0xF).flatten(1)


def _weights(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return the decoded rows [n, K] from codes [K, n], and zeros and scales [groups, n]."""
    values = (codes - zeros[groups]).float() * scales.float()[groups]
    return values.to(scales.dtype).T.contiguous()
