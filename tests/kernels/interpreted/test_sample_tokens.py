"""Drawing tokens with the kernel gives what drawing them with torch gives; see conftest.py."""

import itertools
import math

import pytest
import torch
from scalegate.kernels.sampling import sample_tokens as module
from scalegate.kernels.sampling.sample_tokens import sample_tokens
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.sampling.sampler import SamplingBatch, sample
from scalegate.serving_check.engine.sequence import Sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 150
PARAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.0, 0.8), (1.0, 0.9, 0.1), (0, 1, 40, 500), (0.0, 0.2)
    )
]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)


def settings_of(sequences: list[Sequence]) -> list[torch.Tensor]:
    numbers = [
        (p.temperature, p.top_p, math.log(p.min_p) if p.min_p else -math.inf)
        for p in (sequence.params for sequence in sequences)
    ]
    integers = [(sequence.seed, sequence.params.top_k) for sequence in sequences]
    return [torch.tensor(numbers), torch.tensor(integers)]


def drawn(logits: torch.Tensor, sequences: list[Sequence], positions: torch.Tensor) -> torch.Tensor:
    """By the kernel, with the settings of each row lying somewhere else."""
    rows = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(5))
    settings = [torch.empty_like(setting).index_copy(0, rows, setting) for setting in settings_of(sequences)]
    inputs = (tensor.to(DEVICE) for tensor in (logits, rows, positions, *settings))
    return sample_tokens(*inputs).cpu()


@pytest.mark.parametrize(
    ("dtype", "spread", "params"),
    [
        pytest.param(torch.float32, 3.0, PARAMS, marks=pytest.mark.exhaustive),
        (torch.float32, 3.0, PARAMS[2::3]),
        pytest.param(torch.bfloat16, 3.0, PARAMS[::3], marks=pytest.mark.exhaustive),
        pytest.param(torch.float16, 3.0, PARAMS[1::5], marks=pytest.mark.exhaustive),
        (torch.bfloat16, 0.1, PARAMS[::3]),
    ],
    ids=["all", "float32", "bfloat16", "float16", "little spread"],
)
def test_tokens_are_those_that_torch_draws(dtype: torch.dtype, spread: float, params: list[SamplingParams]):
    """Spread little, a tenth of the mass lies below zero, so that bounds are far from the greatest logit."""
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(len(params), VOCAB, generator=generator)).to(dtype)
    logits[:, 100:110] = -math.inf
    sequences = [
        Sequence("", [1], 1, sampling, seed, 9)
        for sampling, seed in zip(
            params, torch.randint(0, 2**63 - 1, (len(params),), generator=generator).tolist(), strict=True
        )
    ]
    positions = torch.randint(0, 1000, (len(params),), generator=generator)
    wanted = sample(logits, SamplingBatch.of(sequences, torch.device("cpu")), positions)
    found = drawn(logits, sequences, positions)
    # Sums in another order may move a boundary across a draw, once in some hundred thousand.
    assert torch.equal(found, wanted)
    greedy = torch.tensor([sampling.temperature == 0 for sampling in params])
    assert (found != logits.argmax(dim=-1))[~greedy].any(), "every row draws its best token: nothing is shown"


def test_of_equal_logits_the_first_is_greedy_and_all_pass_top_k():
    logits = torch.zeros(10, VOCAB)
    logits[:, [7, 71, 140]] = 4.0  # 7 and 71 lie at the same place of their blocks
    asked = SamplingParams(temperature=1.0, top_k=2)
    sequences = [Sequence("", [1], 1, SamplingParams(temperature=0.0), 0, 9)]
    sequences += [Sequence("", [1], 1, asked, seed, 9) for seed in range(9)]
    found = drawn(logits, sequences, torch.zeros(10, dtype=torch.int64))
    assert found[0] == 7 and set(found[1:].tolist()) == {7, 71, 140}


@pytest.mark.exhaustive
def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    sequences = [Sequence("", [1], 1, SamplingParams(temperature=1.0), seed, 9) for seed in range(400)]
    logits = probabilities.log().expand(400, 4).contiguous()
    counts = drawn(logits, sequences, torch.full((400,), 3)).bincount(minlength=4) / 400
    # Four standard deviations of a proportion of a half.
    assert (counts - probabilities).abs().max() < 0.1
