"""What a running engine owes its users: stops, aborts, preemption, admission, refusals, honest statistics."""

import re

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.serving_check.engine.attention import served_layers
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams, StepOutput
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OpenAIGPTConfig,
    Qwen3Config,
    RwkvConfig,
)

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


def make_model(config=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or Qwen3Config(**SIZES), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.4)
    return model


def make_engine(eos: frozenset[int] = frozenset(), **sizes) -> Engine:
    return Engine(make_model(), EngineOptions(**{"max_num_seqs": 8, "prefill_chunk": 32, **sizes}), eos)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def greedy(max_tokens: int = 8, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **settings)


def run_to_end(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_max_tokens_ends_a_request_with_length():
    [completion] = make_engine().generate([prompt(5)], greedy(7))
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")


def test_an_end_of_sequence_token_stops_unless_ignored():
    [free] = make_engine().generate([prompt(5)], greedy(12))
    end = free.token_ids[4]
    expected = free.token_ids[: free.token_ids.index(end) + 1]
    engine = make_engine(eos=frozenset([end]))
    [stopped] = engine.generate([prompt(5)], greedy(12))
    assert (stopped.token_ids, stopped.finish_reason) == (expected, "stop")
    [ignored] = engine.generate([prompt(5)], greedy(12, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == (free.token_ids, "length")


def test_a_stop_token_stops_even_where_the_end_of_sequence_is_ignored():
    [free] = make_engine().generate([prompt(5)], greedy(12))
    stop = free.token_ids[3]
    [stopped] = make_engine().generate([prompt(5)], greedy(12, ignore_eos=True, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_the_context_ends_a_request_with_length():
    [completion] = make_engine(max_model_len=20).generate([prompt(15)], greedy(100))
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_an_abort_frees_pages_wherever_the_request_stands():
    engine = make_engine(max_num_seqs=2, prefill_chunk=8)
    engine.add_request("decoding", prompt(4), greedy(50))
    engine.step()
    engine.add_request("prefilling", prompt(30), greedy(50))
    engine.step()
    engine.add_request("waiting", prompt(4), greedy(50))
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    for name in ("waiting", "prefilling", "decoding"):
        engine.abort(name)
    assert not engine.has_work and engine.step() == []
    assert engine.pool.free_pages == engine.pool.num_pages
    assert engine.stats().kv_cache_usage == 0.0
    engine.abort("never heard of")


def test_an_abort_leaves_the_neighbours_tokens_alone():
    [expected] = make_engine().generate([prompt(9)], greedy(20))
    engine = make_engine()
    engine.add_request("kept", prompt(9), greedy(20))
    engine.add_request("aborted", prompt(12, seed=1), greedy(20))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for out in engine.step() if out.request_id == "kept" for token in out.token_ids]
        if len(tokens) == 6:
            engine.abort("aborted")
    assert tuple(tokens) == expected.token_ids


def test_requests_that_come_and_go_get_the_tokens_they_get_alone():
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (24,), generator=generator).tolist()
    budgets = torch.randint(1, 40, (24,), generator=generator).tolist()
    alone = make_engine()
    expected = [
        alone.generate([prompt(length, seed=index)], greedy(budget))[0].token_ids
        for index, (length, budget) in enumerate(zip(lengths, budgets, strict=True))
    ]
    engine = make_engine(kv_cache_tokens=256)
    tokens: dict[str, list[int]] = {}
    added = 0
    while engine.has_work or added < len(lengths):
        for _ in range(min(added % 3, len(lengths) - added) or 1):  # one, one or two a step
            if added < len(lengths):
                engine.add_request(str(added), prompt(lengths[added], seed=added), greedy(budgets[added]))
                added += 1
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [tuple(tokens[str(index)]) for index in range(len(lengths))] == expected
    assert engine.pool.free_pages == engine.pool.num_pages


def test_a_full_pool_preempts_and_loses_nothing():
    prompts = [prompt(20, seed=index) for index in range(8)]
    roomy = make_engine()
    expected = [answer.token_ids for answer in roomy.generate(prompts, greedy(60))]
    assert roomy.stats().preemptions == 0
    tight = make_engine(max_model_len=96, kv_cache_tokens=176)
    assert [answer.token_ids for answer in tight.generate(prompts, greedy(60))] == expected
    assert tight.stats().preemptions > 0
    assert tight.pool.free_pages == tight.pool.num_pages


def test_a_preempted_request_draws_the_same_seeded_tokens():
    prompts = [prompt(20, seed=index) for index in range(8)]
    settings = [SamplingParams(max_tokens=60, temperature=1.0, top_p=0.9, seed=index) for index in range(8)]
    expected = make_engine().generate(prompts, settings)
    tight = make_engine(max_model_len=96, kv_cache_tokens=176)
    assert tight.generate(prompts, settings) == expected
    assert tight.stats().preemptions > 0


def test_batches_padded_to_buckets_give_the_same_tokens():
    prompts = [prompt(3 + 5 * index, seed=index) for index in range(7)]
    expected = make_engine().generate(prompts, greedy(20))
    assert make_engine(decode_buckets=(1, 4, 8)).generate(prompts, greedy(20)) == expected


def test_rows_of_very_different_lengths_give_the_tokens_they_give_alone():
    sizes = {"page_size": 1, "max_num_seqs": 8}
    prompts = [prompt(length, seed=length) for length in (1, 2, 3, 100, 50, 7, 99, 1)]
    together = make_engine(**sizes).generate(prompts, greedy(20))
    engine = make_engine(**sizes)
    assert [engine.generate([prompt], greedy(20))[0] for prompt in prompts] == together


def test_a_long_prompt_does_not_stop_the_others_from_decoding():
    engine = make_engine(prefill_chunk=8)
    engine.add_request("decoding", prompt(3), greedy(40))
    engine.step()
    engine.add_request("long", prompt(80), greedy(2))
    steps_until_first_token = 0
    while True:
        names = [output.request_id for output in engine.step()]
        assert "decoding" in names
        steps_until_first_token += 1
        if "long" in names:
            break
    assert steps_until_first_token == 10


def test_statistics_say_how_many_really_decoded_together():
    engine = make_engine(max_num_seqs=3)
    for index in range(5):
        engine.add_request(str(index), prompt(4, seed=index), greedy(10))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.prompt_tokens) == (3, 2, 20)
    assert 0 < stats.kv_cache_usage < 1
    run_to_end(engine)
    stats = engine.stats()
    assert max(stats.running_by_step) == 3
    assert (stats.running, stats.waiting, stats.generation_tokens) == (0, 0, 50)
    assert engine.stats().running_by_step == ()


def test_warm_up_leaves_no_trace_in_the_statistics():
    engine = make_engine()
    engine.warm_up(progress=False)
    stats = engine.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens, stats.preemptions) == (0, 0, 0, 0)
    assert not engine.has_work and engine.pool.free_pages == engine.pool.num_pages


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 128, "the prompt has 128 tokens"),
        ([1, VOCABULARY], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused_and_others_go_on(tokens: list[int], message: str):
    engine = make_engine()
    engine.add_request("good", prompt(4), greedy(3))
    with pytest.raises(UserError, match=message):
        engine.add_request("bad", tokens, greedy())
    assert len(run_to_end(engine)["good"]) == 3


def test_two_requests_of_one_name_are_a_programming_error():
    engine = make_engine()
    engine.add_request("same", prompt(4), greedy())
    with pytest.raises(ValueError, match="already in the engine"):
        engine.add_request("same", prompt(4), greedy())


def test_a_pool_too_small_for_one_request_is_refused_at_once():
    with pytest.raises(UserError, match="too small for one full-length request: kv_cache_tokens=100"):
        make_engine(kv_cache_tokens=100)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(UserError, match="more than the model's context of 128"):
        make_engine(max_model_len=129)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "RwkvForCausalLM: it keeps a"),
        (
            OpenAIGPTConfig(vocab_size=64, n_embd=32, n_head=4, n_layer=1),
            "OpenAIGPTLMHeadModel: its attention",
        ),
    ],
)
def test_what_paged_attention_cannot_serve_is_refused_by_name(config, reason: str):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=reason):
        Engine(model, EngineOptions(max_num_seqs=1), frozenset())


def test_a_position_encoding_that_depends_on_the_batch_is_served_where_it_does_not():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=DYNAMIC))
    reason = "past 64 tokens its 'dynamic' position encoding depends on the rest of the batch"
    with pytest.raises(UserError, match=f"{reason}; requests of at most 64 tokens"):
        Engine(model, EngineOptions(max_num_seqs=1, max_model_len=65), frozenset())
    engine = Engine(model, EngineOptions(max_num_seqs=1), frozenset())
    assert engine.max_model_len == 64
    assert len(engine.generate([prompt(60)], greedy(4))[0].token_ids) == 4


def test_an_unknown_attention_argument_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    model = make_model()
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **k: original(self, *a, **k, position_bias=torch.ones(1))
    )
    with pytest.raises(UserError, match="layer 0 passes 'position_bias' to its attention"):
        Engine(model, EngineOptions(max_num_seqs=1), frozenset())


def test_a_forward_that_cannot_be_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    model = make_model()

    def forward(*_: object, pixel_values: torch.Tensor, **__: object) -> None:
        """Wants an image, as BLIP-2 does."""

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM: its forward raises TypeError: .*'pixel_values'"):
        Engine(model, EngineOptions(max_num_seqs=1), frozenset())


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (2x16 and 12x8)", UserError),
        ("Tensor.item() cannot be called on meta tensors", RuntimeError),
    ],
)
def test_without_weights_only_faults_of_the_meta_device_leave_open_whether_a_model_is_served(
    monkeypatch: pytest.MonkeyPatch, fault: str, raised: type[Exception]
):
    model = make_model().to("meta")

    def forward(*_: object, **__: object) -> None:
        raise RuntimeError(fault)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(raised, match=re.escape(fault)):
        served_layers(model)


def test_gpt2_learned_positions_are_served_exactly():
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = make_model(config)
    expected = model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    [completion] = Engine(model, EngineOptions(max_num_seqs=2), frozenset()).generate([[5, 6, 7]], greedy(20))
    assert list(completion.token_ids) == expected[0, 3:].tolist()
