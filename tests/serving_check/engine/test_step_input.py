"""Staged steps: tokens, requests and padding in every kind of batch, and their way to a GPU."""

import numpy as np
import pytest
import torch
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.scheduler import PrefillChunk, Schedule
from scalegate.serving_check.engine.sequence import UNKNOWN, Sequence
from scalegate.serving_check.engine.step_input import ALIGNMENT, StepBuffers, StepInput, StepShape
from transformers import AutoModelForCausalLM, Qwen3Config

CPU = torch.device("cpu")
PAGE, ROWS, WIDTH = 4, 5, 6
TABLE = np.arange(1, ROWS * WIDTH + 1, dtype=np.int32).reshape(ROWS, WIDTH)
ARRAYS = ("slot_mapping", "positions", "token_rows", "seq_lens", "decode_seq_lens", "query_start_loc")


def sequence(row: int, length: int, last: int | None = None) -> Sequence:
    tokens = [100 * row + position for position in range(length)]
    if last is not None:
        tokens[-1] = last
    return Sequence(str(row), tokens, length, SamplingParams(), 0, 99, row=row)


class Event:
    """Stands for a CUDA event: notes what would have been waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited for")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and events as on a GPU, on a machine that may have none."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.fixture(params=["used where it is staged", "copied"])
def buffers(request: pytest.FixtureRequest, pinned: None) -> StepBuffers:
    return StepBuffers(TABLE, PAGE, 300, CPU, static=request.param == "copied")


def staged(buffers: StepBuffers, decode: list, prefill: list, shape: StepShape) -> StepInput:
    host = buffers.stage(decode, prefill, shape)
    buffers.send(shape, len(decode) + len(prefill))
    return buffers.input(shape, host)


def pages_of(step: StepInput, request: int, count: int) -> list[int]:
    return step.attention.block_table[request, :count].tolist()


def test_decoding_requests_and_padding(buffers: StepBuffers):
    step = staged(buffers, [sequence(2, 7), sequence(0, 4, UNKNOWN)], [], buffers.decode_shape(4))
    attention = step.attention
    assert step.token_ids.tolist() == [206, UNKNOWN, 0, 0] and step.logits_indices is None
    assert attention.positions.tolist() == [6, 3, 0, 0]
    assert attention.slot_mapping.tolist() == [TABLE[2, 1] * PAGE + 2, TABLE[0, 0] * PAGE + 3, -1, -1]
    assert attention.token_rows.tolist() == attention.request_rows.tolist() == [2, 0, ROWS, ROWS]
    assert attention.seq_lens.tolist() == attention.decode_seq_lens.tolist() == [7, 4, 0, 0]
    assert attention.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert step.sample_rows.tolist() == [2, 0, ROWS, ROWS] and step.sample_positions.tolist() == [7, 4, 0, 0]
    assert pages_of(step, 0, 2) == TABLE[2, :2].tolist() and pages_of(step, 1, 1) == [TABLE[0, 0]]
    assert attention.prefill_tiles is None


def test_a_token_that_is_decoded_again_is_attended_to_as_decoding_and_wants_no_logits(buffers: StepBuffers):
    again, prompt = PrefillChunk(sequence(1, 9), 6, 1, is_replay=True), PrefillChunk(sequence(4, 20), 0, 2)
    step = staged(buffers, [sequence(3, 5)], [again, prompt], buffers.shape(8, ROWS, ROWS))
    attention = step.attention
    assert step.token_ids.tolist()[:4] == [304, 106, 400, 401]
    assert attention.decode_seq_lens.tolist() == [5, 7, 0, 0, 0]
    assert step.sample_rows.tolist() == [3, ROWS, ROWS, ROWS, ROWS]
    assert (attention.host.num_decodes, attention.host.num_prefills) == (2, 1)
    if buffers.static:
        tiles = [tile for tile in attention.prefill_tiles.tolist() if tile[1]]
        assert tiles == [[2, 2, 0, 2], [4, 4, -1, 0]]


def test_a_mixed_batch_has_decoding_requests_then_chunks_then_padding(buffers: StepBuffers):
    ends, goes_on = PrefillChunk(sequence(1, 9), 6, 3), PrefillChunk(sequence(4, 20), 0, 2)
    step = staged(buffers, [sequence(3, 5)], [ends, goes_on], buffers.shape(8, ROWS, ROWS))
    attention = step.attention
    assert step.token_ids.tolist() == [304, 106, 107, 108, 400, 401, 0, 0]
    assert attention.positions.tolist() == [4, 6, 7, 8, 0, 1, 0, 0]
    assert attention.token_rows.tolist() == [3, 1, 1, 1, 4, 4, ROWS, ROWS]
    places = ((3, 4), (1, 6), (1, 7), (1, 8), (4, 0), (4, 1))
    slots = [TABLE[row, position // PAGE] * PAGE + position % PAGE for row, position in places]
    assert attention.slot_mapping.tolist() == [*slots, -1, -1]
    assert attention.request_rows.tolist() == [3, 1, 4, ROWS, ROWS]
    assert attention.seq_lens.tolist() == [5, 9, 2, 0, 0]
    assert attention.decode_seq_lens.tolist() == [5, 0, 0, 0, 0]
    assert attention.query_start_loc.tolist() == [0, 1, 4, 6, 6, 6]
    assert step.logits_indices.tolist()[:2] == [0, 3], "the decoding request's, and the prompt's that ends"
    assert step.sample_rows.tolist() == [3, 1, ROWS, ROWS, ROWS]
    assert step.sample_positions.tolist()[:2] == [5, 9]
    assert pages_of(step, 1, 3) == TABLE[1, :3].tolist()
    if buffers.static:
        tiles = [tile for tile in attention.prefill_tiles.tolist() if tile[1]]
        assert tiles == [[1, 3, 6, 1], [4, 2, 0, 2], [6, 2, -1, 0]]
    else:
        assert attention.prefill_tiles is None


def test_requests_are_told_one_by_one(buffers: StepBuffers):
    chunk = PrefillChunk(sequence(1, 9), 6, 3)
    host = buffers.stage([sequence(3, 5)], [chunk], buffers.shape(8, ROWS, ROWS))
    decoding, prefilling = host.requests()
    assert (decoding.row, decoding.first_token, decoding.start, decoding.count) == (3, 0, 4, 1)
    assert (prefilling.row, prefilling.first_token, prefilling.start, prefilling.count) == (1, 1, 6, 3)
    assert prefilling.pages.tolist() == TABLE[1, :3].tolist()
    assert [chunk.row for chunk in host.requests(host.num_decodes)] == [1]


def test_nothing_of_a_step_is_left_in_the_next(buffers: StepBuffers):
    shape = buffers.shape(16, ROWS, ROWS)
    chunks = [PrefillChunk(sequence(row, 3), 0, 3) for row in range(ROWS)]
    for _ in range(2):
        staged(buffers, [], chunks, shape)
    after, fresh = staged(buffers, [], [], shape), StepBuffers(TABLE, PAGE, 300, CPU, buffers.static)
    wanted = staged(fresh, [], [], shape)
    for name in ARRAYS:
        assert torch.equal(getattr(after.attention, name), getattr(wanted.attention, name)), name
    assert torch.equal(after.token_ids, wanted.token_ids)
    assert torch.equal(after.sample_rows, wanted.sample_rows)


@pytest.mark.usefixtures("pinned")
def test_arrays_of_a_shape_stay_where_they_are_and_aligned():
    buffers = StepBuffers(TABLE, PAGE, 300, CPU, static=True)
    mixed = [buffers.shape(num_tokens, ROWS, ROWS) for num_tokens in (1, 77, 300)]
    shapes = [*map(buffers.decode_shape, range(1, ROWS + 1)), *mixed]
    tables = set()
    for shape in shapes:
        first, again = (staged(buffers, [sequence(0, 3)], [], shape) for _ in range(2))
        tables.add(first.attention.block_table.data_ptr())
        for array, other in [
            (first.token_ids, again.token_ids),
            (first.sample_rows, again.sample_rows),
            *((getattr(step.attention, name) for step in (first, again)) for name in ARRAYS),
        ]:
            assert array.data_ptr() == other.data_ptr() and array.is_contiguous()
            offset = array.data_ptr() - buffers._device.data_ptr()
            assert offset % ALIGNMENT == 0 or array.untyped_storage().data_ptr() != buffers._device.data_ptr()
    assert len(tables) == 1, "kernels read past no request's end, but rows left from before are pages still"


@pytest.mark.usefixtures("pinned")
def test_a_step_is_one_copy_from_memory_not_reused_before_it_has_run(monkeypatch: pytest.MonkeyPatch):
    buffers = StepBuffers(TABLE, PAGE, 300, CPU, static=True)
    copies, copy = [], torch.Tensor.copy_

    def noted(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append((source.is_contiguous() and to.is_contiguous() and non_blocking, source.data_ptr()))
        return copy(to, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    for _ in range(4):
        staged(buffers, [sequence(0, 3)], [PrefillChunk(sequence(1, 2), 0, 2)], buffers.shape(8, ROWS, ROWS))
    assert [fast for fast, _ in copies] == [True] * 4
    sources = [at for _, at in copies]
    assert sources[0] == sources[2] != sources[1] == sources[3]
    for event in buffers._copied:
        assert event.log == ["waited for", "recorded"] * 2


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
def test_one_pass_over_a_mixed_batch_gives_the_tokens_of_two_passes(kv_format: str):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    prompts = [[7 * position % 256 for position in range(length)] for length in (3, 31, 9, 44, 1)]
    sizes = EngineOptions(max_num_seqs=3, max_model_len=64, prefill_chunk=8, kv_cache_dtype=kv_format)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine = Engine(model, sizes, frozenset())
    wanted = [answer.token_ids for answer in engine.generate(prompts, greedy)]
    mixed: list[Schedule] = []

    def in_one_pass(schedule: Schedule) -> list[Schedule]:
        mixed.extend([schedule] if schedule.decode and schedule.prefill else [])
        return [schedule] if schedule.num_tokens else []

    engine.runner.batches = in_one_pass
    assert [answer.token_ids for answer in engine.generate(prompts, greedy)] == wanted
    assert len(mixed) > 3 and len(set(wanted)) == len(wanted)
