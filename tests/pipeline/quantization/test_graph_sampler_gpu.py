"""A model's step, recorded on a GPU and replayed for each token: the tokens of launching it each time."""

import pytest
import torch
from scalegate.base.progress import progress_bar
from scalegate.pipeline.quantization.calibration.self_calibration import _draw, _recorded
from transformers import PreTrainedModel

from .test_self_calibration import peaked_model

pytestmark = pytest.mark.gpu

COUNT, LENGTH = 6, 40


def drawn(model: PreTrainedModel, seed: int, *recorded) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    with progress_bar(total=COUNT * LENGTH, desc="drawing", unit="tok", shown=False) as bar:
        return _draw(model, COUNT, LENGTH, generator, bar, *recorded)


def test_a_replayed_step_draws_the_tokens_of_a_launched_one():
    model = peaked_model().cuda()
    recorded = _recorded(model, COUNT, LENGTH)
    assert recorded is not None
    for seed in (7, 8):
        assert torch.equal(drawn(model, seed, recorded), drawn(model, seed))
    assert not torch.equal(drawn(model, 7, recorded), drawn(model, 8, recorded))
