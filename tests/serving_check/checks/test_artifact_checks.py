"""The checks of an artifact's files and of its quality, on plain figures: what fails, and the cause named."""

from dataclasses import replace

import pytest
import torch
from scalegate.serving_check import quality
from scalegate.serving_check.checks.quality import check_quality
from scalegate.serving_check.checks.text_files import check_text_files
from scalegate.serving_check.checks.weights import check_weights
from scalegate.serving_check.evidence.artifact_figures import (
    ChangedTensor,
    KindErrors,
    ModuleError,
    TextDifference,
    TextFigures,
)
from scalegate.serving_check.evidence.quality_figures import Comparison
from scalegate.serving_check.settings import Bounds

from ..gate_samples import SOUND_WEIGHTS

SOUND = Comparison(8192, 1.52, 1.5, 0.04, 0.26, 0.63, 2.6, 0.92)
FOREIGN = replace(SOUND_WEIGHTS, is_ours=False, recorded=0)


def with_error(error: float | None, figures=SOUND_WEIGHTS, recorded: float | None = 0.095):
    (kind,) = figures.kinds
    first = ModuleError("model.layers.0.mlp.up_proj", error, recorded)
    return replace(figures, kinds=(replace(kind, furthest=(first, *kind.furthest[1:])),))


def test_a_module_is_held_to_the_error_that_the_manifest_records():
    assert check_weights(SOUND_WEIGHTS).status == "pass"
    assert check_weights(with_error(0.095 * 1.0001)).status == "pass"
    for error in (0.095 * 1.003, 0.09, 1.4, None):
        result = check_weights(with_error(error))
        assert result.status == "fail"
        assert "not the ones that were quantized: model.layers.0.mlp.up_proj" in result.reason


@pytest.mark.parametrize(
    ("error", "figures", "recorded", "status"),
    [
        (0.12, FOREIGN, None, "pass"),
        (0.4, FOREIGN, None, "fail"),
        (None, FOREIGN, None, "fail"),
        (0.12, SOUND_WEIGHTS, 0.12, "pass"),
        (0.4, SOUND_WEIGHTS, 0.4, "fail"),
    ],
)
def test_a_module_is_held_to_its_kind_whether_or_not_its_error_is_recorded(
    error, figures, recorded, status: str
):
    result = check_weights(with_error(error, figures, recorded))
    assert result.status == status
    assert status == "pass" or "far from others of their kind: model.layers.0.mlp.up_proj" in result.reason


def test_weights_that_are_exact_are_like_their_kind_and_one_that_is_not_stands_out():
    (kind,) = FOREIGN.kinds
    exact = tuple(ModuleError(error.module, 0.0, None) for error in kind.furthest)
    lossless = replace(FOREIGN, kinds=(replace(kind, median=0.0, spread=0.0, furthest=exact),))
    assert check_weights(lossless).status == "pass"
    assert check_weights(with_error(1.4, lossless, None)).status == "fail"


def test_every_module_far_off_alike_is_another_basis_and_left_to_quality():
    turned = KindErrors("up", "INT4", 4, 1.4, 0.01, (ModuleError("layers.0.up", 1.42, None),))
    assert check_weights(replace(FOREIGN, kinds=(turned,))).status == "pass"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantized": 0}, "no module is quantized, but its manifest lists 4"),
        ({"not_quantized": ("a", "b")}, "manifest says that a, b are quantized, but they are not"),
        ({"not_recorded": ("gate",)}, "gate are quantized, but the manifest does not list them"),
        ({"routers": ("mlp.gate",)}, "mlp.gate are routers and are quantized"),
        ({"missing": ("norm",)}, "the artifact has no counterpart of the baseline's norm"),
        ({"changed": (ChangedTensor("embed", 82, 8192),), "changed_tensors": 1}, "embed (82 of 8192 rows)"),
    ],
)
def test_what_the_manifest_and_the_source_do_not_bear_out_fails(change: dict, words: str):
    result = check_weights(replace(SOUND_WEIGHTS, **change))
    assert result.status == "fail" and words in result.reason


def test_only_the_baseline_itself_or_a_quantized_kv_cache_may_have_plain_weights():
    plain = replace(FOREIGN, quantized=0, compared=0, kinds=())
    assert check_weights(plain).status == "fail"
    assert check_weights(replace(plain, is_baseline=True)).status == "pass"
    assert check_weights(replace(plain, is_other_quantized=True)).status == "pass"
    assert check_weights(replace(plain, is_baseline=True, is_ours=True)).status == "fail", "renamed"


def test_another_tool_may_change_a_tensor_as_a_whole_but_not_some_rows_of_it():
    for rows, status in ((82, "fail"), (8192, "pass")):
        changed = replace(FOREIGN, changed=(ChangedTensor("embed", rows, 8192),), changed_tensors=1)
        assert check_weights(changed).status == status


def test_a_quantized_baseline_leaves_the_weights_unknown():
    assert check_weights(None).status == "unknown"


def test_a_difference_fails_unless_it_is_declared_and_is_named_with_where():
    differing = TextFigures((TextDifference("chat_template", "line 3 is 'x', the baseline's 'y'"),))
    result = check_text_files(differing)
    assert result.status == "fail"
    assert "chat_template: line 3 is 'x'" in result.reason and "`changes: [chat_template]`" in result.reason
    assert check_text_files(replace(differing, declared=("chat_template",))).status == "pass"
    assert check_text_files(replace(differing, declared=("merges",))).status == "fail"
    assert check_text_files(TextFigures()).status == "pass"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mean_kl": 0.2}, "more bits per weight"),
        ({"mean_kl": 0.2}, "the largest errors (a.b 0.3)"),
        ({"max_kl": 9.8}, "rows of the embeddings"),
        ({"p999_kl": 3.0, "max_kl": 9.8}, "damaged packed words"),
        ({"mean_kl": 7.0, "nats_per_token": 9.0, "top1_agreement": 0.01}, "a finer recipe will not help"),
        ({"mean_kl": float("nan"), "nats_per_token": float("nan")}, "NaN or Inf"),
    ],
)
def test_advice_is_what_the_figures_call_for(change: dict, words: str):
    assert check_quality(SOUND, Bounds()).status == "pass"
    result = check_quality(replace(SOUND, **change), Bounds(), ["a.b 0.3"])
    assert result.status == "fail" and words in result.reason
    assert ("smaller groups" in result.reason) == (change == {"mean_kl": 0.2})


def test_a_figure_whose_interval_reaches_to_the_bound_is_inconclusive():
    near = replace(SOUND, mean_kl=0.11, intervals={"mean_kl": (0.09, 0.13)})
    assert check_quality(near, Bounds()).status == "inconclusive"
    assert check_quality(replace(near, intervals={"mean_kl": (0.101, 0.12)}), Bounds()).status == "fail"
    low = replace(SOUND, top1_agreement=0.84, intervals={"top1_agreement": (0.82, 0.86)})
    assert "--quality-tokens" in check_quality(low, Bounds()).reason
    seen = replace(SOUND, max_kl=9.8, intervals={"max_kl": (0.4, 9.8)})
    assert check_quality(seen, Bounds()).status == "fail", "what was seen is no estimate"


def test_a_domain_that_is_far_off_is_not_excused_by_the_others():
    parts = {"code": replace(SOUND, mean_kl=0.01), "chat": replace(SOUND, mean_kl=0.13)}
    assert check_quality(replace(SOUND, mean_kl=0.07), Bounds()).status == "pass"
    result = check_quality(replace(SOUND, mean_kl=0.07), Bounds(), by_domain=parts)
    assert result.status == "fail" and "mean KL 0.1300 on chat is above 0.1000" in result.reason
    assert "0.0100 on code, 0.1300 on chat" in result.measured and result.figures["mean_kl_chat"] == 0.13
    near = parts | {"chat": replace(parts["chat"], intervals={"mean_kl": (0.08, 0.16)})}
    assert check_quality(SOUND, Bounds(), by_domain=near).status == "inconclusive"
    assert check_quality(SOUND, Bounds(), by_domain={"code": SOUND, "chat": SOUND}).status == "pass"


def test_a_given_text_is_held_to_all_bounds_by_itself():
    result = check_quality(SOUND, Bounds(), given=SOUND)
    assert result.status == "pass" and f"and {SOUND.tokens} of the text given" in result.reason
    assert result.figures["given_mean_kl"] == SOUND.mean_kl
    for change, words in (
        ({"max_kl": 9.8}, "largest KL 9.80 on the text given is above 8.00"),
        ({"top1_agreement": 0.8}, "top-1 agreement 80.0% on the text given is below 85.0%"),
        ({"mean_kl": float("nan"), "nats_per_token": float("nan")}, "NaN or Inf"),
    ):
        result = check_quality(SOUND, Bounds(), given=replace(SOUND, **change))
        assert result.status == "fail" and words in result.reason


def test_intervals_cover_the_truth_and_grow_with_the_correlation_of_neighbours():
    """Figures of runs that share a level: independent tokens would promise far too narrow an interval."""
    generator = torch.Generator().manual_seed(1)
    covered, widths = 0, []
    for _ in range(40):
        levels = torch.randn(32, 1, generator=generator).mul(0.3).exp()
        kl = levels * torch.rand(32, quality.RUN, generator=generator).log().neg()
        rest = torch.zeros(32, quality.RUN)
        runs = torch.stack([kl, kl + 1, rest + 1, rest, rest], dim=2).double().unbind()
        found = quality._comparison(runs)
        low, high = found.intervals["mean_kl"]
        covered += low <= torch.tensor(0.3).square().div(2).exp().item() <= high
        widths.append(high - low)
        assert found.p999_kl <= found.max_kl and found.intervals["p999_kl"][0] <= found.p999_kl
    assert covered >= 34
    independent = 2 * 1.96 / (32 * quality.RUN) ** 0.5
    assert min(widths) > 2 * independent
    assert quality._comparison(runs[:1]).intervals == {}
