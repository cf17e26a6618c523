"""Answers under a load as in use are scored by the logits of both models, whatever they were asked for."""

import copy
import functools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.validation.in_process import TextScorer, alternatives_error, logprob_errors, with_ties
from scalegate.serving_check import quality
from scalegate.serving_check.checks.served_text import tokens_off
from scalegate.serving_check.engine.offline.stored_kv import StoredKVModel
from scalegate.serving_check.evidence.in_use import AnswerInUse
from scalegate.serving_check.evidence.served_in_use import ServedInUse
from scalegate.serving_check.quality import below_best
from scalegate.serving_check.workload.planned_request import Adjustments, Truncation
from scalegate.serving_check.workload.use_plan import TRUNCATIONS
from scalegate.tests.exhaustive import exhaustive_but
from torch import nn

PROMPT, TOKENS = tuple(range(100, 120)), 24


@pytest.fixture(scope="module")
def model(example_checkpoint: Path) -> nn.Module:
    return load_model(example_checkpoint, device="cpu", dtype=torch.float32, progress=False).model


@pytest.fixture(scope="module", params=exhaustive_but(["plain", "stored"], "stored"))
def scorer(request: pytest.FixtureRequest, model: nn.Module) -> TextScorer:
    if request.param == "plain":
        return TextScorer(model, model)
    return TextScorer(StoredKVModel(copy.deepcopy(model), "unquantized", {}, 128, batch=2), model)


@functools.cache
def continued(model: nn.Module, temperature: float = 0.0) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What follows `PROMPT`, and its log-probabilities."""
    ids, told = list(PROMPT), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        if temperature:
            token = (logits / temperature).softmax(-1).multinomial(1, generator=generator).item()
        else:
            token = logits.argmax().item()
        told.append(logits.log_softmax(-1)[token].item())
        ids.append(token)
    return tuple(ids[len(PROMPT) :]), tuple(told)


def served(kind: str, tokens: tuple[int, ...], **changes: object) -> ServedInUse:
    return replace(ServedInUse(kind, PROMPT, tokens, "text", 0.0, None, 2.0, 1), **changes)


def score(scorer: TextScorer, answer: ServedInUse) -> AnswerInUse:
    [scored] = scorer.answers_in_use([answer])
    return scored


def test_greedy_tokens_and_their_log_probabilities_are_the_models_own(model: nn.Module, scorer: TextScorer):
    tokens, told = continued(model)
    scored = score(scorer, served("logprobs", tokens, logprobs=told))
    assert (scored.off, scored.baseline_off, scored.tokens, scored.prompt_tokens) == (0, None, TOKENS, 20)
    assert (scored.m, scored.prompts_beside, scored.beginning, scored.draws) == (2.0, 1, "text", None)
    mean, largest = scored.logprob_errors
    assert mean <= largest < 1e-3
    other = score(scorer, served("greedy", tuple(range(7000, 7000 + TOKENS))))
    assert other.off > TOKENS / 2 < other.baseline_off and other.logprob_errors is None


def test_drawn_tokens_are_as_surprising_as_their_distributions_say(model: nn.Module, scorer: TextScorer):
    tokens, told = continued(model, temperature=0.8)
    scored = score(scorer, served("sampled", tokens, temperature=0.8, seed=1, repeats_other_seed=False))
    assert scored.draws.tokens == TOKENS and scored.repeats_other_seed is False
    assert abs(scored.draws.surprisal) < 4 * math.sqrt(scored.draws.variance)
    assert scored.baseline_off == 0 < scored.off
    at_one = score(scorer, served("sampled", tokens, temperature=1.0, seed=1))
    assert at_one.draws.nats == pytest.approx(-sum(told), abs=1e-3)


def test_answers_that_are_scored_together_are_scored_as_each_alone(
    scorer: TextScorer, monkeypatch: pytest.MonkeyPatch
):
    """Prompts and answers of several lengths, of which some are padded to that of others."""
    monkeypatch.setattr(quality, "LEAST_FULL", 0.3)
    lengths = [(20, 12), (9, 30), (14, 7), (30, 1), (5, 20)]
    answers = [
        ServedInUse(kind, tuple(range(prompt)), tuple(range(500, 500 + tokens)), "", 1.0, 1, 1.0, 0)
        for (prompt, tokens), kind in zip(lengths, ["greedy", "sampled"] * 3, strict=False)
    ]
    together = {answer.prompt_tokens: answer for answer in scorer.answers_in_use(answers)}
    assert together.keys() == {prompt for prompt, _ in lengths}
    for answer in answers:
        alone, found = score(scorer, answer), together[len(answer.prompt)]
        assert (found.tokens, found.off) == (alone.tokens, alone.off)
        # Both models are the same one. Alone, some have too few tokens for a comparison with the baseline.
        assert found.baseline_off == (0 if answer.kind == "sampled" else found.off)
        if answer.kind == "sampled":
            assert found.draws.nats == pytest.approx(alone.draws.nats, rel=1e-4)
    other = replace(answers[1], tokens=answers[1].tokens[::-1])
    assert score(scorer, other).draws.nats != pytest.approx(together[9].draws.nats, rel=1e-2)


def test_the_end_of_sequence_could_not_be_chosen(model: nn.Module, scorer: TextScorer):
    tokens, _ = continued(model)
    with torch.inference_mode():
        first = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    best, second = first.topk(2).indices.tolist()
    assert tokens[0] == best and first[best] - first[second] > 0.3
    assert score(scorer, served("end", (second,), end_token=best)).off == 0
    assert score(scorer, served("end", (second,))).off == 1


def test_penalties_and_a_bias_change_what_is_greedy(model: nn.Module, scorer: TextScorer):
    """Each of them alone, too: it is another answer."""
    asked = Adjustments(1.5, 0.75, ((continued(model)[0][0], -5.0),))
    tokens = adjusted(model, asked)
    assert score(scorer, served("adjusted", tokens, adjustments=asked)).off == 0
    for changes in ({"presence_penalty": 0.0}, {"frequency_penalty": 0.0}, {"bias": ()}):
        other = adjusted(model, replace(asked, **changes))
        assert score(scorer, served("adjusted", other, adjustments=asked)).off > 0


@pytest.mark.parametrize(
    ("truncation", "inside", "outside"),
    [
        (Truncation(top_k=2), (0, 1), (2, 3, 9)),
        (Truncation(top_p=0.5), (0, 1), (3, 4)),
        (Truncation(min_p=0.2), (0, 1), (2, 3)),
        (Truncation(top_k=1, top_p=0.9), (0,), (1, 2)),
    ],
)
def test_tokens_outside_a_truncation_are_off(truncation, inside, outside):
    """Probabilities: 0.4, 0.24, 0.06, and less."""
    logits = torch.tensor([[0.4, 0.24, 0.06, *[0.03] * 10]]).log() + 20
    for token in (*inside, *outside):
        [gap] = below_best(with_ties(logits, truncation), [token])
        assert (tokens_off([gap]) == 1) == (token in outside), (token, gap)


def test_a_truncated_answer_is_off_where_all_tokens_were_drawn(model: nn.Module, scorer: TextScorer):
    tokens, _ = continued(model, temperature=1.0)
    greedy, _ = continued(model)
    for truncation in TRUNCATIONS:
        ours = served("truncated", greedy, temperature=1.0, seed=1, truncation=truncation)
        assert score(scorer, ours).off == 0
        assert score(scorer, replace(ours, tokens=tokens)).off > 0


def test_a_repetition_penalty_counts_the_prompt_and_the_answer(model: nn.Module, scorer: TextScorer):
    asked = Adjustments(0.0, 0.0, (), repetition_penalty=1.3)
    tokens = adjusted(model, asked)
    assert score(scorer, served("repetition", tokens, adjustments=asked)).off == 0
    none = adjusted(model, replace(asked, repetition_penalty=1.0))
    of_answer_alone = adjusted(model, asked, counts_prompt=False)
    for other in (none, of_answer_alone):
        assert score(scorer, served("repetition", other, adjustments=asked)).off > 0


@functools.cache
def adjusted(model: nn.Module, asked: Adjustments, counts_prompt: bool = True) -> tuple[int, ...]:
    """What follows `PROMPT` greedily with penalties and biases, one token at a time."""
    found: list[int] = []
    for _ in range(2 * TOKENS):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*PROMPT, *found]]), use_cache=False).logits[0, -1]
        logits = logits.clone()
        for token, bias in asked.bias:
            logits[token] += bias
        for token in {*(PROMPT if counts_prompt else ()), *found}:
            factor = asked.repetition_penalty
            logits[token] *= 1 / factor if logits[token] > 0 else factor
        for token, count in Counter(found).items():
            logits[token] -= asked.presence_penalty + count * asked.frequency_penalty
        found.append(logits.argmax().item())
    return tuple(found)


def test_alternatives_are_wrong_with_the_names_or_the_numbers_of_others(model: nn.Module):
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -2:]
    values, ids = logits.double().log_softmax(-1).topk(5)
    right = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    assert alternatives_error((), logits) is None
    assert alternatives_error(right, logits) < 1e-6
    unnamed = [[(None, logprob) for _, logprob in row] for row in right]
    assert alternatives_error(unnamed, logits) < 1e-6
    assert alternatives_error(unnamed[::-1], logits) > 0.1
    renamed = [[(row[index - 1][0], logprob) for index, (_, logprob) in enumerate(row)] for row in right]
    assert alternatives_error(renamed, logits) > 0.5
    told_as_one = [right[0], right[1][:2] + right[1][3:]]
    assert alternatives_error(told_as_one, logits) < 1e-6


def test_missing_log_probabilities_are_infinitely_wrong():
    assert logprob_errors((-1.0, -2.5), (-1.0, -2.0)) == (0.25, 0.5)
    assert logprob_errors((-1.0,), (-1.0, -2.0)) == (math.inf, math.inf)
    assert logprob_errors((-1.0, None), (-1.0, -2.0)) == (math.inf, math.inf)
