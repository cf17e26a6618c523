"""KVarN's decode attention as compiled for Hopper, run by `../ptx/emulator.py`, beside attention in fp64."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from scalegate.kernels.attention.kvarn import decode as kvarn_decode
from scalegate.kernels.attention.kvarn import held
from scalegate.kernels.attention.kvarn.decode import plain_splits
from scalegate.kernels.attention.options import LOG2_E
from scalegate.kernels.hadamard import log2, rotate_reference
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.attention.kvarn_contexts import Contexts, contexts_of
from scalegate.tests.kernels.attention.test_low_bit_kv_compiles import AS_IT_CAME, PLAIN, compiled
from scalegate.tests.kernels.ptx.emulator import Kernel
from scalegate.tests.kernels.ptx.memory import Memory, RaceError
from scalegate.tests.kernels.ptx.registers import Array, UnknownInstructionError

NOT_WRITTEN = 0x7FFF
LENGTHS = [0, 1, 64, 65, 200, 257, 300, 700, 14 * 128 + 5]


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    value_bits: int
    programs: int = 3
    """For the splits of one head of a context: less than there are, so that one takes several."""
    split: int = 256
    softcap: float = 0.0
    sinks: bool = False
    dim: int = 128
    page: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def piece(self) -> int:
        return min(64, self.page)

    def sink_logits(self) -> torch.Tensor:
        return torch.linspace(-2, 6, self.heads)

    def contexts(self, lengths: list[int]) -> Contexts:
        heads = (self.heads, self.kv_heads, self.dim)
        return contexts_of(lengths, heads, self.value_bits, self.dtype, self.page)

    def constants(self) -> dict[str, object]:
        per_head = self.heads // self.kv_heads
        return {
            **PLAIN, "HEADS": self.heads, "KV_HEADS": self.kv_heads, "PER_HEAD": per_head, "DIM": self.dim,
            "LOG_DIM": log2(self.dim), "VALUE_BITS": self.value_bits, "GROUP_SIZE": self.page,
            "SPLIT": self.split, "PIECE": self.piece, "SOFTCAP": self.softcap > 0, "SINKS": self.sinks,
            "PDL": True, "STAGES": kvarn_decode.STAGES, "SPLITS_AT_ONCE": 8,
            **({} if self.sinks else {"sinks_ptr": None}),
        }  # fmt: skip


@functools.cache
def programs_of(case: Case) -> list[tuple[str, int]]:
    """PTX, and bytes of shared memory: `_append`, `_attend_splits`, `_merge_splits`."""
    constants, group = case.constants(), triton.next_power_of_2(case.heads // case.kv_heads)
    stages, is_narrow = kvarn_decode.STAGES, case.dim <= 128
    warps, registers = (1, kvarn_decode.REGISTERS[case.value_bits]) if is_narrow else (2, None)
    attend = {**constants, "GROUP": max(4, group)}
    kind = "*bf16" if case.dtype == torch.bfloat16 else "*fp16"
    types = {**dict.fromkeys(AS_IT_CAME, kind), "out_ptr": kind, "sinks_ptr": "*fp32"}
    kernels = [
        compiled(held._append, {**constants, "GROUP": group}, 1, 3, **types),
        compiled(kvarn_decode._attend_splits, attend, warps, stages, registers, kvarn_decode.Form, **types),
        compiled(kvarn_decode._merge_splits, constants, warps, 3, **types),
    ]
    return [(kernel.asm["ptx"], kernel.metadata.shared) for kernel in kernels]


@dataclass(frozen=True)
class Split:
    is_coded: bool
    start: int
    end: int


def splits_of(length: int, case: Case) -> list[Split]:
    """As `decode.py` says in words."""
    if length == 0:
        return []
    page = case.page
    own = (length - 1) // page * page
    coded_end = max(own, page)
    pages = coded_end // page - 1
    tokens = page * (1 if pages <= 4 else 2 if pages <= 8 else case.split // page)
    coded = [Split(True, at, min(at + tokens, coded_end)) for at in range(page, coded_end, tokens)]
    plain = [
        Split(False, at, min(at + case.piece, end))
        for start, end in [(0, min(length, page)), *([(own, length)] if own else [])]
        for at in range(start, end, case.piece)
    ]
    return coded + plain


def numbers(x: torch.Tensor) -> Array:
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).contiguous().numpy()


def from_bf16(x: Array) -> Array:
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass
class DecodeResult:
    """What a step wrote; bf16 as int16."""

    held: Array
    turned: Array
    partial: Array
    lse: Array
    out: Array


def decoded(
    contexts: Contexts, case: Case, programs: list[tuple[str, int]], late_copies: bool = True
) -> DecodeResult:
    """Of each context's last token, which `held` does not have yet."""
    query, key, value = (
        torch.stack([x[-1] if len(x) else x.new_zeros(x.shape[1:]) for x in part])
        for part in (contexts.queries, contexts.keys, contexts.values)
    )
    lengths = [len(x) for x in contexts.keys]
    batch, max_splits = len(lengths), 16 + plain_splits(case.page)
    before = contexts.held.clone()
    for row, length in zip(contexts.rows, lengths, strict=True):
        if length == 0:
            continue
        before[row, min((length - 1) // case.page, 1), :, :, (length - 1) % case.page] = 9.0
    memory = Memory()
    for name, array in {
        "query": numbers(query),
        "key": numbers(key),
        "value": numbers(value),
        "positions": np.array(lengths) - 1,
        "turned": np.full(query.shape, np.nan, np.float16),
        **{name: numbers(part) for name, part in vars(contexts.pages).items()},
        "held": numbers(before),
        "table": numbers(contexts.table),
        "sinks": case.sink_logits().numpy(),
        "lengths": np.array(lengths, np.int32),
        "rows": numbers(contexts.rows),
        "partial": np.full((batch, case.heads, max_splits, case.dim), np.nan, np.float32),
        "lse": np.full((batch, case.heads, max_splits), np.nan, np.float32),
        "out": np.full(query.shape, NOT_WRITTEN, np.int16),
    }.items():
        memory.place(name, array)

    def at(names: str) -> list[int | float]:
        return [memory.address(name) for name in names.split()]

    append, attend, merge = (Kernel(*program, memory, late_copies) for program in programs)
    stride = case.kv_heads * case.dim
    arguments = [*at("query key value positions rows lengths held turned"), stride, stride]
    append.launch((batch, case.kv_heads, 1), arguments)
    tiles = "key_words value_words channels tokens"
    attend.launch(
        (case.programs, case.kv_heads, batch),
        [
            *at(f"query turned {tiles} held table lengths rows partial lse out"),
            case.dim**-0.5 * LOG2_E, case.softcap * LOG2_E, contexts.table.shape[1], max_splits,
        ],
    )  # fmt: skip
    # A program alone writes the result of a context of one split.
    only = np.array([len(splits_of(length, case)) == 1 and not case.sinks for length in lengths])
    assert ((memory.read("out") == NOT_WRITTEN).all((1, 2)) != only).all()
    merge.launch((case.heads, batch, 1), [*at(f"partial lse lengths {'sinks' * case.sinks} out"), max_splits])
    out = memory.read("out")
    out = from_bf16(out) if case.dtype == torch.bfloat16 else out.view(np.float16)
    return DecodeResult(*(memory.read(name) for name in ("held", "turned", "partial", "lse")), out)


def in_fp64(contexts: Contexts, request: int, split: Split, softcap: float) -> tuple[Array, Array]:
    """lse [H] in log2, and the result [H, D]; of codes, rotated."""
    part = slice(split.start, split.end)
    query = contexts.queries[request][-1]
    if split.is_coded:
        key, value = (rotate_reference(x[part]).double() for x in contexts.seen[request])
        query = rotate_reference(query).half()
    else:
        key, value = (x[request][part].double() for x in (contexts.keys, contexts.values))
    groups = query.shape[0] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("hd,nhd->hn", query.double(), key) * query.shape[1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(1) * LOG2_E
    return lse.numpy(), torch.einsum("hn,nhd->hd", scores.softmax(-1), value).numpy()


def relative(x: Array, want: Array) -> float:
    return float(np.linalg.norm(x.astype(np.float64) - want) / np.linalg.norm(want))


@dataclass
class Errors:
    """The largest, relative to the norm of what is right; of sums, in log2."""

    coded: float = 0.0
    coded_sum: float = 0.0
    plain: float = 0.0
    plain_sum: float = 0.0
    out: float = 0.0
    turned: float = 0.0


def errors_of(contexts: Contexts, case: Case, found: DecodeResult) -> Errors:
    errors = Errors()
    for request, key in enumerate(contexts.keys):
        length = len(key)
        splits = splits_of(length, case)
        count = len(splits) if len(splits) > 1 or case.sinks else 0
        assert (
            np.isnan(found.partial[request, :, count:]).all()
            and np.isnan(found.lse[request, :, count:]).all()
        )
        for i, split in enumerate(splits[:count]):
            want_lse, want = in_fp64(contexts, request, split, case.softcap)
            kind = "coded" if split.is_coded else "plain"
            error = relative(found.partial[request, :, i], want)
            of_sum = float(np.abs(found.lse[request, :, i] - want_lse).max())
            setattr(errors, kind, _larger(getattr(errors, kind), error))
            setattr(errors, f"{kind}_sum", _larger(getattr(errors, f"{kind}_sum"), of_sum))
        if length == 0:
            assert not found.out[request].any()
            continue
        sinks = case.sink_logits() if case.sinks else None
        expected = contexts.expected(request, length - 1, case.dim**-0.5, case.softcap, sinks)
        errors.out = _larger(errors.out, relative(found.out[request], expected.numpy()))
        if length > 2 * case.page:
            query = rotate_reference(contexts.queries[request][-1]).numpy()
            errors.turned = _larger(errors.turned, relative(found.turned[request], query))
        else:
            assert np.isnan(found.turned[request]).all()
    return errors


def _larger(x: float, y: float) -> float:
    """A number that is none is large."""
    return math.inf if math.isnan(y) else max(x, y)


CASES = [
    Case(4, 1, 2),
    Case(4, 1, 4),
    Case(8, 2, 2, programs=1),
    Case(8, 2, 4),
    Case(3, 1, 4, split=512, softcap=20.0),
    Case(2, 1, 2, sinks=True, dtype=torch.float16),
    Case(4, 1, 2, dim=64),
    Case(4, 2, 4, dim=256),
]


@pytest.mark.parametrize("late_copies", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("case", exhaustive_but(CASES, CASES[0]), ids=str)
def test_a_step_as_compiled_attends_to_pages_and_plain_tokens(case: Case, late_copies: bool):
    contexts = case.contexts(LENGTHS)
    found = decoded(contexts, case, programs_of(case), late_copies)
    assert np.array_equal(found.held, numbers(contexts.held))
    errors = errors_of(contexts, case, found)
    assert errors.coded < 2e-3 and errors.plain < 4e-3 and errors.out < 4e-3, errors
    assert errors.coded_sum < 1e-2 and errors.plain_sum < 1e-5 and errors.turned < 1e-3, errors


BREAKS = {
    "another byte of a query": ("t, 0x5410;}", "t, 0x5401;}"),
    "probabilities' bytes in another order": ("s, t, 0x7632;", "s, t, 0x3276;"),
    "codes that are not centered": ("0x80808080, 0x6A;", "0x00808080, 0x6A;"),
    "low bytes' sign": ("u, 0x80808080;}", "u, 0x80800080;}"),
    "values not transposed": (".x4.trans.shared", ".x4.shared"),
    "copies that nothing waits for": ("cp.async.wait_group", "// cp.async.wait_group"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_in_compiled_code_is_seen(name: str):
    case, (right, wrong) = Case(4, 1, 2), BREAKS[name]
    contexts = case.contexts([700])
    append, (attend, shared), merge = programs_of(case)
    assert right in attend
    found = decoded(contexts, case, [append, (attend.replace(right, wrong), shared), merge])
    assert errors_of(contexts, case, found).out > 1e-2


def test_a_barrier_that_is_missing_is_seen():
    case = Case(4, 2, 4, dim=256)
    append, (attend, shared), merge = programs_of(case)
    broken = [append, (attend.replace("bar.sync", "// bar.sync"), shared), merge]
    with pytest.raises(RaceError):
        decoded(case.contexts([300]), case, broken)


def test_an_instruction_that_is_not_emulated_is_told_with_its_line():
    case = Case(4, 1, 2)
    append, (attend, shared), merge = programs_of(case)
    unknown = [append, (attend.replace("ex2.approx", "tanh.approx", 1), shared), merge]
    with pytest.raises(UnknownInstructionError, match=r"tanh\.approx"):
        decoded(case.contexts([300]), case, unknown)
