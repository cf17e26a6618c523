"""Penalties, logit bias and min_tokens are transformers' own arithmetic, in every batch, preempted or not."""

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.sampling.logit_adjustments import LogitAdjustments
from scalegate.serving_check.engine.sequence import Sequence
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

CPU = torch.device("cpu")
VOCABULARY = 200
ENDS = frozenset({7, 9})
SETTINGS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"logit_bias": ((3, 5.0), (11, -100.0))},
    {"min_tokens": 12},
    {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((5, 2.5), (8, -3.0)),
        "min_tokens": 6,
    },
]


def expected(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """One row by transformers' processors, in `generate`'s order, and OpenAI's formula."""
    params, tokens = sequence.params, torch.tensor([sequence.tokens])
    scores = logits.float()
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias}
        scores = SequenceBiasLogitsProcessor(bias)(tokens, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(tokens, scores)
    counts = torch.bincount(torch.tensor(sequence.tokens[sequence.num_prompt :]).long(), minlength=VOCABULARY)
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.min_tokens:
        ends = sorted(sequence.ends)
        scores = MinNewTokensLengthLogitsProcessor(sequence.num_prompt, params.min_tokens, ends, "cpu")(
            tokens, scores
        )
    return scores[0]


def sequence_of(row: int, settings: dict) -> Sequence:
    params = SamplingParams(max_tokens=50, **settings)
    prompt = [row, 3, 5, 3]
    sequence = Sequence(str(row), list(prompt), len(prompt), params, row, 99, ENDS)
    sequence.row = row
    return sequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_what_transformers_processors_make_of_them(dtype):
    generator = torch.Generator().manual_seed(0)
    sequences = [sequence_of(row, settings) for row, settings in enumerate(SETTINGS)]
    adjustments = LogitAdjustments(CPU)
    for step in range(15):
        logits = (torch.randn(len(sequences), VOCABULARY, generator=generator) * 3).to(dtype)
        given = logits.clone()
        found = adjustments.apply(logits, sequences)
        assert torch.equal(logits, given)
        for row, sequence in enumerate(sequences):
            assert torch.equal(found[row], expected(logits[row : row + 1], sequence)), (step, sequence.params)
        # Few tokens, so that they come again.
        drawn = torch.randint(0, 12, (len(sequences),), generator=generator)
        adjustments.observe(sequences, drawn)
        for sequence, token in zip(sequences, drawn.tolist(), strict=True):
            sequence.tokens.append(token)


def test_a_row_that_was_anothers_and_a_step_done_twice_are_counted_anew():
    first, second = sequence_of(2, SETTINGS[4]), sequence_of(2, SETTINGS[1])
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    adjustments = LogitAdjustments(CPU)
    adjustments.apply(logits, [first])
    adjustments.observe([first], torch.tensor([5]))
    # The step failed after its tokens were drawn: the sequence never had this one.
    assert torch.equal(adjustments.apply(logits, [first])[0], expected(logits, first))
    second.tokens += [8, 8]
    assert torch.equal(adjustments.apply(logits, [second])[0], expected(logits, second))


def make_engine(**options) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Engine(model, EngineOptions(max_num_seqs=8, prefill_chunk=16, **options), ENDS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


PROMPT = [1, 2, 3, 4, 3, 2, 1]


def test_greedy_tokens_are_generates_own(engine: Engine):
    params = SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1.3, min_tokens=20)
    bias = ((3, 2.0), (4, -5.0))
    settings = [params, SamplingParams(max_tokens=40, temperature=0, logit_bias=bias, ignore_eos=True)]
    found = engine.generate([PROMPT, PROMPT], settings)
    model = engine.runner.model
    model.set_attn_implementation("sdpa")
    common = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    prompt = torch.tensor([PROMPT])
    whole = [
        model.generate(
            prompt, repetition_penalty=1.3, min_new_tokens=20, eos_token_id=sorted(ENDS), **common
        ),
        model.generate(
            prompt, sequence_bias={(token,): value for token, value in bias}, eos_token_id=None, **common
        ),
    ]
    plain = model.generate(prompt, eos_token_id=None, **common)
    model.set_attn_implementation("scalegate_paged")
    for answer, output in zip(found, whole, strict=True):
        assert list(answer.token_ids) == output[0, len(PROMPT) :].tolist()
        assert list(answer.token_ids) != plain[0, len(PROMPT) :].tolist()[: len(answer.token_ids)]


GREEDY = {"max_tokens": 30, "temperature": 0}
MIXTURE = [
    SamplingParams(ignore_eos=True, **GREEDY),
    SamplingParams(repetition_penalty=1.2, ignore_eos=True, **GREEDY),
    SamplingParams(frequency_penalty=0.5, ignore_eos=True, **GREEDY),
    SamplingParams(presence_penalty=1, repetition_penalty=0.9, ignore_eos=True, **GREEDY),
    SamplingParams(min_tokens=10, **GREEDY),
]


def test_neighbours_change_nothing_and_neither_does_being_computed_again(engine: Engine):
    prompts = [[index + 1] * (3 + 5 * index) for index in range(len(MIXTURE))]
    alone = [engine.generate([p], s)[0].token_ids for p, s in zip(prompts, MIXTURE, strict=True)]
    together = [answer.token_ids for answer in engine.generate(prompts, MIXTURE)]
    assert together == alone
    small = make_engine(kv_cache_tokens=128)
    assert [answer.token_ids for answer in small.generate(prompts, MIXTURE)] == alone
    assert small.scheduler.preemptions > 0


def test_an_output_does_not_end_before_min_tokens(engine: Engine):
    bias = tuple((token, 60.0) for token in ENDS)
    settings = {"max_tokens": 20, "temperature": 0, "logit_bias": bias}
    for least in (0, 5):
        [answer] = engine.generate([PROMPT], SamplingParams(min_tokens=least, **settings))
        assert len(answer.token_ids) == least + 1 and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e300},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, 1.0),) * 1025},
        {"min_tokens": 17},
        {"min_tokens": -1},
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(settings: dict):
    with pytest.raises(UserError, match=f"{next(iter(settings))} (is|has)"):
        SamplingParams(**settings)


def test_a_bias_outside_the_vocabulary_is_refused(engine: Engine):
    with pytest.raises(UserError, match="logit_bias has token ids outside"):
        engine.add_request("x", [1], SamplingParams(logit_bias=((VOCABULARY, 1.0),)))
