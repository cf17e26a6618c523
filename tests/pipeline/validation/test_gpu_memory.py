"""Shares of a GPU's memory, and which servers run where."""

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation.gpu_memory import (
    BESIDE,
    GIB,
    KV_FACTOR,
    SHARE_OF_FREE,
    Side,
    kv_bytes_per_token,
    kv_cache_bytes,
    kv_heads,
    needed_bytes,
    plan_memory,
)
from scalegate.pipeline.validation.servers import (
    baseline_options,
    may_start_at_once,
    sides_of,
    sized_options,
    with_long_contexts,
)
from scalegate.serving_check.adapters.placement import VISIBLE, Placement, only_these
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.settings import WorkloadSettings
from transformers import AutoConfig, AutoModelForCausalLM

ON_GPU = EngineOptions(device="cuda", kv_cache_tokens=1 << 20)
QWEN3_8B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def sides(checkpoint: Path, placement: Placement, engine: str = "vllm") -> list[Side]:
    opened = open_checkpoint(str(checkpoint))
    wanted = [(name, engine, opened, ON_GPU) for name in ("artifact", "baseline")]
    return sides_of(wanted, placement, lambda gpu: "H200")


def gpu(free: float, total: float = 140.0):
    return lambda device: (int(free * GIB), int(total * GIB))


def test_keys_and_values_are_counted_from_the_config():
    assert kv_bytes_per_token(QWEN3_8B) == 36 * 2 * 8 * 128 * 2
    assert kv_bytes_per_token({"text_config": QWEN3_8B}) == kv_bytes_per_token(QWEN3_8B)
    latent = {
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 128,
    }
    assert kv_bytes_per_token(latent) == 61 * (512 + 64) * 2


def test_both_get_what_they_need_where_both_fit(example_checkpoint: Path):
    placement = Placement()
    both = sides(example_checkpoint, placement)
    plan = plan_memory(both, placement, gpu(130))
    need = needed_bytes(both[0], placement, kv_cache_bytes(both[0], placement))
    assert plan.together and need > BESIDE
    granted = plan.grants["artifact"]
    assert granted is not None and granted == plan.grants["baseline"]
    assert granted.share == pytest.approx(need / (140 * GIB))
    kv_cache = (1 << 20) * kv_bytes_per_token(both[0].checkpoint.config)
    assert granted.kv_cache_bytes is not None and kv_cache < granted.kv_cache_bytes < need - BESIDE + GIB


def test_they_take_turns_where_one_fits_and_nothing_starts_where_none_does(example_checkpoint: Path):
    placement = Placement()
    both = sides(example_checkpoint, placement)
    need = needed_bytes(both[0], placement, kv_cache_bytes(both[0], placement)) / GIB
    plan = plan_memory(both, placement, gpu(1.5 * need))
    assert not plan.together
    granted = plan.grants["artifact"]
    assert granted is not None and granted.share == pytest.approx(SHARE_OF_FREE * 1.5 * need / 140)
    assert granted.kv_cache_bytes is None
    with pytest.raises(UserError, match="GiB are free; end other programs there"):
        plan_memory(both, placement, gpu(0.9 * need))


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of that shape whose numbers are a hole in the file: 16.4 GB that no disk holds."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}
    config = AutoConfig.for_model("qwen3", **QWEN3_8B, **sizes, tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, weight in model.state_dict().items():
        begin, end = end, end + 2 * math.prod(weight.shape)
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)
    return folder


def kvarn(checkpoint: Path, most: int = 32, input_len: int = 4096) -> list[Side]:
    """Both servers of `validate --kv-cache-dtype kvarn_k4v2_g128`, the artifact of the baseline's weights."""
    opened, load = open_checkpoint(str(checkpoint)), WorkloadSettings((1, most), input_len=input_len)
    given = {"device": "cuda", "kv_cache_dtype": "kvarn_k4v2_g128"}
    options = with_long_contexts(sized_options(given, load), given)
    wanted = [
        ("artifact", "embedded", opened, options),
        ("baseline", "embedded", opened, baseline_options(options)),
    ]
    return sides_of(wanted, Placement(), lambda gpu: "H100")


def test_keys_and_values_are_counted_as_each_server_stores_them(qwen3_8b: Path):
    artifact, baseline = kvarn(qwen3_8b)
    tokens, placement = artifact.options.kv_cache_tokens, Placement()
    # 36 layers of 8 heads: 128 numbers for a key and for a value, in 2 bytes.
    assert kv_cache_bytes(baseline, placement) == pytest.approx(tokens * 36 * 8 * 2 * 128 * 2, rel=0.001)
    # 4 + 2 bits a number, six rows of fp16 scales a page of 128 tokens, and 33 rows of unquantized tokens.
    page = 36 * 8 * (128 * 128 * 6 // 8 + 6 * 128 * 2)
    row = KV_FORMATS["kvarn_k4v2_g128"].plain_tokens * 36 * 8 * 2 * 128 * 2
    assert kv_cache_bytes(artifact, placement) == (tokens // 128 + 1) * page + 33 * row


def test_two_servers_of_8b_with_20_and_5_gb_of_keys_and_values_share_80_gb(qwen3_8b: Path):
    placement = Placement()
    both = kvarn(qwen3_8b)
    assert plan_memory(both, placement, gpu(78.0, 79.2)).together
    plan = plan_memory(both, placement, gpu(60.0, 79.2))
    needed = r"the artifact's 2\d GiB, the baseline's 4\d GiB are needed, 55 GiB are there"
    assert not plan.together and re.search(needed, plan.in_turns_because)


def test_with_as_many_requests_at_once_as_is_said_the_servers_fit_together(example_checkpoint: Path):
    def plan(most: int):
        return plan_memory(kvarn(example_checkpoint, most, 512), Placement(), gpu(15.0))

    said = plan(1024)
    assert not said.together
    most = int(re.search(r"--m up to (\d+)", said.in_turns_because)[1])
    assert plan(most).together and not plan(int(1.02 * most)).together


def test_an_engine_that_is_told_a_smaller_kv_format_needs_less(example_checkpoint: Path):
    placement = Placement()
    [plain, _] = sides(example_checkpoint, placement)
    fp8 = replace(plain, options=replace(plain.options, kv_cache_dtype="fp8"))
    assert kv_cache_bytes(fp8, placement) == kv_cache_bytes(plain, placement) / 2


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with a gated delta rule to one that attends, as in Qwen3-Next."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    attention = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4}
    types = [*["linear_attention"] * 3, "full_attention"]
    linear = {f"linear_num_{of}_heads": 4 for of in ("key", "value")}
    linear |= {f"linear_{of}_head_dim": 32 for of in ("key", "value")}
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **attention, **linear, layer_types=types)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_states_count_for_each_request_and_keys_and_values_for_layers_that_attend(hybrid: Path, engine: str):
    [side, _] = sides(hybrid, Placement(), engine)
    # Per layer four heads of 32 x 32 in float32, and the last 3 inputs of 3 * 4 * 32 channels in bfloat16.
    states = 3 * (4 * 32 * 32 * 4 + 3 * 3 * 4 * 32 * 2)
    attention = 2 * 2 * 16 * 2

    def stored(tokens: int, requests: int) -> float:
        options = replace(side.options, kv_cache_tokens=tokens, max_num_seqs=requests)
        return kv_cache_bytes(replace(side, options=options), Placement())

    factor = KV_FACTOR if engine == "vllm" else 1.0
    assert stored(1 << 20, 64) - stored(1 << 20, 32) == pytest.approx(factor * 32 * states)
    assert stored(1 << 20, 64) - stored(1 << 19, 64) == pytest.approx(factor * (1 << 19) * attention)


def test_only_engines_that_measure_free_memory_wait_for_one_another(example_checkpoint: Path):
    one_gpu, two_gpus = Placement(), Placement(devices=(0, 1))

    def at_once(placement: Placement, engine: str) -> bool:
        both = sides(example_checkpoint, placement, engine)
        return may_start_at_once(both, plan_memory(both, placement, gpu(130)))

    assert at_once(one_gpu, "embedded") and at_once(one_gpu, "vllm")
    assert not at_once(one_gpu, "sglang") and at_once(two_gpus, "sglang")
    own_share = Placement(engine_args="--gpu-memory-utilization 0.4")
    assert not at_once(own_share, "vllm"), "vLLM measures then"
    assert not at_once(one_gpu, "http://localhost:8000")


def test_heads_are_cut_no_finer_than_they_are():
    assert kv_heads(QWEN3_8B) == 8 and kv_heads({"num_attention_heads": 32}) == 32
    assert kv_heads({"kv_lora_rank": 512, "num_attention_heads": 64}) == 1


def test_a_share_in_the_users_words_is_his_and_counts(example_checkpoint: Path):
    for words in ("--gpu-memory-utilization 0.8", "--x --gpu-memory-utilization=0.8"):
        placement = Placement(engine_args=words)
        plan = plan_memory(sides(example_checkpoint, placement), placement, gpu(139))
        assert plan.grants == {"artifact": None, "baseline": None} and not plan.together
    less = Placement(engine_args="--gpu-memory-utilization 0.8", baseline_engine_args="")
    plan = plan_memory(sides(example_checkpoint, less), less, gpu(139))
    assert plan.together and plan.grants["baseline"] is not None
    wrong = Placement(engine_args="--gpu-memory-utilization much")
    with pytest.raises(UserError, match="'much'"):
        plan_memory(sides(example_checkpoint, wrong), wrong, gpu(139))


def test_gpus_are_dealt_out_a_group_to_each_server_or_one_to_all(example_checkpoint: Path):
    def dealt(**options) -> list[tuple[int, ...]]:
        return [side.devices for side in sides(example_checkpoint, Placement(**options))]

    assert dealt() == [(0,), (0,)]
    assert dealt(devices=(0, 1)) == [(0,), (1,)]
    assert dealt(devices=(0, 1), tensor_parallel_size=2) == [(0, 1), (0, 1)]
    assert dealt(devices=(0, 1, 2, 3), tensor_parallel_size=2) == [(0, 1), (2, 3)]
    assert dealt(tensor_parallel_size=2) == [(0, 1), (0, 1)]
    with pytest.raises(UserError, match="names 3 GPUs; a server runs on 1"):
        dealt(devices=(0, 1, 2))
    opened = open_checkpoint(str(example_checkpoint))
    second = replace(ON_GPU, device="cuda:1")
    [alone] = sides_of([("artifact", "vllm", opened, second)], Placement(), lambda gpu: "H200")
    assert alone.devices == (1,)


def test_gpus_of_several_kinds_and_those_that_are_not_there_are_refused(example_checkpoint: Path):
    opened, kinds = open_checkpoint(str(example_checkpoint)), ["H200", "H200", "H100"]
    wanted = [(name, "vllm", opened, ON_GPU) for name in ("artifact", "baseline")]
    assert len(sides_of(wanted, Placement(devices=(0, 1)), kinds.__getitem__)) == 2
    with pytest.raises(UserError, match=r"GPUs of different kinds \(1: H200, 2: H100\)"):
        sides_of(wanted, Placement(devices=(1, 2)), kinds.__getitem__)
    with pytest.raises(UserError, match="there is no GPU 97: PyTorch finds"):
        sides_of(wanted, Placement(devices=(97,)))


def test_a_server_on_its_own_gpu_fits_where_two_would_not(example_checkpoint: Path):
    placement = Placement(devices=(0, 1))
    both = sides(example_checkpoint, placement)
    free = 1.5 * needed_bytes(both[0], placement, kv_cache_bytes(both[0], placement)) / GIB
    assert plan_memory(both, placement, gpu(free)).together


def test_a_process_sees_its_gpus_by_the_numbers_of_its_parent(monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    assert only_these((1, 2)) == {VISIBLE: "1,2"} and only_these(()) == {}
    monkeypatch.setenv(VISIBLE, "4,5,6")
    assert only_these((1, 2)) == {VISIBLE: "5,6"}


def test_words_for_an_engine_are_read_as_a_shell_reads_them():
    placement = Placement(engine_args="--a 'b c'", baseline_engine_args="--d")
    assert placement.words("artifact") == ["--a", "b c"] and placement.words("baseline") == ["--d"]
    assert Placement(engine_args="--a").words("baseline") == ["--a"]
    with pytest.raises(UserError, match="cannot be split into words"):
        Placement(engine_args="--a 'b")


def test_servers_on_a_cluster_take_turns_on_gpus_that_are_not_here(example_checkpoint: Path):
    """The command of docs/engines.md, on a machine with fewer GPUs than both of Ray's have."""
    placement = Placement(
        tensor_parallel_size=8, pipeline_parallel_size=2, engine_args="--distributed-executor-backend=ray"
    )
    both = sides(example_checkpoint, placement)
    assert [side.devices for side in both] == [(), ()]
    assert not plan_memory(both, placement, gpu(140.0)).together
    assert plan_memory(both, Placement(engine_args="--distributed-executor-backend mp"), gpu(140.0)).together


@pytest.mark.parametrize("words", ["--gpu_memory_utilization=0.8", "--gpu_memory_utilization 0.8"])
def test_a_share_is_seen_however_vllm_lets_it_be_spelt(example_checkpoint: Path, words: str):
    placement = Placement(engine_args=words)
    assert not plan_memory(sides(example_checkpoint, placement), placement, gpu(140.0)).together


@pytest.mark.parametrize("words", ["--tensor-parallel-size 2", "-tp 2", "--pipeline_parallel_size=2"])
def test_gpus_are_not_asked_for_in_words_for_the_engine(words: str):
    with pytest.raises(UserError, match=r"give --(tensor|pipeline)-parallel-size instead"):
        Placement(engine_args=words)
