"""Nats per token, KL and agreement against figures worked out by other means."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scalegate.serving_check.quality import (
    Document,
    compare,
    compare_domains,
    continuation_nats,
    read_documents,
    read_texts,
    token_windows,
)
from torch import nn


class FixedModel(nn.Module):
    """Predicts the same distribution everywhere."""

    def __init__(self, probabilities: list[float]):
        super().__init__()
        self.log_probabilities = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        # A constant added to the logits of a position changes nothing.
        return SimpleNamespace(logits=(self.log_probabilities + 3).expand(*input_ids.shape, -1))


EVEN = FixedModel([0.25, 0.25, 0.25, 0.25])
SKEWED = FixedModel([0.7, 0.1, 0.1, 0.1])
WINDOWS = [torch.tensor([0, 0, 1, 2]), torch.tensor([3, 0])]


def test_nats_are_the_mean_over_predicted_tokens():
    result = compare(SKEWED, EVEN, WINDOWS)
    assert result.tokens == 4
    assert result.nats_per_token == pytest.approx(-(2 * math.log(0.7) + 2 * math.log(0.1)) / 4)
    assert math.exp(result.baseline_nats_per_token) == pytest.approx(4.0)


def test_kl_is_of_the_model_from_the_baseline():
    result = compare(EVEN, SKEWED, WINDOWS)
    expected = 0.7 * math.log(0.7 / 0.25) + 0.3 * math.log(0.1 / 0.25)
    assert result.mean_kl == pytest.approx(expected, rel=1e-5)
    skewed = -(2 * math.log(0.7) + 2 * math.log(0.1)) / 4
    assert result.extra_nats_per_token == pytest.approx(-math.log(0.25) - skewed, rel=1e-5)


def test_each_domain_has_figures_of_its_own():
    whole, by_domain = compare_domains(SKEWED, EVEN, [*WINDOWS, *WINDOWS], ["a", "b", "b", "a"])
    assert whole == compare(SKEWED, EVEN, [*WINDOWS, *WINDOWS])
    assert by_domain == {
        "a": compare(SKEWED, EVEN, [WINDOWS[0], WINDOWS[1]]),
        "b": compare(SKEWED, EVEN, [WINDOWS[1], WINDOWS[0]]),
    }


def test_the_baseline_s_entropy_is_that_of_its_predictions():
    assert compare(SKEWED, EVEN, WINDOWS).baseline_entropy == pytest.approx(math.log(4))
    expected = -0.7 * math.log(0.7) - 0.3 * math.log(0.1)
    assert compare(EVEN, SKEWED, WINDOWS).baseline_entropy == pytest.approx(expected)


def test_a_model_against_itself_is_at_zero_and_agrees_everywhere():
    result = compare(SKEWED, SKEWED, WINDOWS)
    assert (result.mean_kl, result.max_kl, result.top1_agreement) == (0.0, 0.0, 1.0)


def test_only_the_continuation_is_counted():
    assert continuation_nats(SKEWED, [1, 2, 3], [0, 0]) == pytest.approx(-math.log(0.7))
    assert continuation_nats(SKEWED, [1, 2, 3], [1]) == pytest.approx(-math.log(0.1))


def test_nothing_to_score_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="nothing to score"):
        compare(EVEN, EVEN, [])


class Words:
    """A tokenizer of one token a word."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_windows_do_not_span_documents_nor_exceed_the_budget():
    texts = ["a b c d e", "f", "g h i"]
    assert [w.numel() for w in token_windows(Words(), texts, length=2)] == [2, 2, 2]
    assert [w.numel() for w in token_windows(Words(), texts, length=10)] == [5, 3]
    cut = token_windows(Words(), texts, length=3, max_predictions=4)
    assert sum(w.numel() - 1 for w in cut) == 4


def test_texts_come_from_json_lines_or_are_the_whole_file(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n', encoding="utf-8")
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert read_texts(tmp_path / "a.jsonl") == ["one", "two"]
    assert read_texts(tmp_path / "a.txt") == ["one\ntwo\n"]
    (tmp_path / "b.jsonl").write_text('{"text": "one", "domain": "code"}\n{"text": "two"}\n')
    assert read_documents(tmp_path / "b.jsonl") == [Document("one", "code"), Document("two")]


@pytest.mark.parametrize("broken", ['{"text": "cut', '{"txt": "two"}', '["two"]', '{"text": 2}'])
def test_a_broken_json_line_is_named(tmp_path: Path, broken: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one\u2028more"}}\n\n{broken}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"^line 3 is not a JSON object"):
        read_texts(path)


def test_comparing_leaves_inference_mode_as_it_was():
    compare(SKEWED, EVEN, WINDOWS)
    assert not torch.is_inference_mode_enabled()
