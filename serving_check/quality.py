"""Measures how far a model's next-token distributions are from a baseline's on held-out text.

The figures are computed from two models in this process, exactly over the whole vocabulary;
`checks/quality.py` decides what is good enough.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .evidence.quality_figures import Comparison

BFLOAT16_ROUNDING = 2.0**-8
"""Largest relative error of a number rounded to bfloat16."""
LOGIT_ROWS = 512
"""How many rows of logits [rows, vocab] are converted to fp32 at once, which bounds memory."""
RUN = 256
"""How many consecutive tokens of a window are resampled together for confidence intervals. Neighbours'
divergences go up and down together: on trained checkpoints the standard error of a mean grows to 2.8 times
that of independent tokens, and no further from runs of this length on."""
RESAMPLES = 400
TAIL = 0.05
"""The share of tokens, furthest first, that resampled percentiles are looked up in."""
CONFIDENCE = 0.95
TOGETHER_TOKENS = 2048
"""The most tokens, padding included, of texts whose logits are computed together: [2048, V] in bfloat16 take
620 MB if the vocabulary has 152k tokens."""
LEAST_FULL = 0.8
"""The least share of tokens that are not padding. A small model takes as long to start a pass as for some
tokens, a large one is bound by tokens."""


@dataclass(frozen=True)
class Document:
    text: str
    domain: str = ""
    """The kind of text, such as `code`; empty if the file does not say."""


def read_texts(path: Path) -> list[str]:
    """Return the text of each document in the file, from `read_documents`."""
    return [document.text for document in read_documents(path)]


def read_documents(path: Path) -> list[Document]:
    """Return the documents of a `.jsonl` file (`{"text": …}` a line, perhaps with a `domain`), or the whole
    of any other text file.

    A line that is no such document raises ValueError with the file and the number of its first such line.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [Document(content)]
    # By \n alone: a JSON string may hold the other characters that `splitlines` breaks at.
    lines = enumerate(content.split("\n"), start=1)
    return [_document(line, number) for number, line in lines if line.strip()]


def _document(line: str, number: int) -> Document:
    try:
        value = json.loads(line)
        text, domain = value["text"], value.get("domain", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = domain = None
    if not isinstance(text, str) or not isinstance(domain, str):
        raise ValueError(f'line {number} is not a JSON object with a string "text"')
    return Document(text, domain)


def token_windows(
    tokenizer: Any, texts: Iterable[str], length: int = 512, max_predictions: int | None = None
) -> list[Tensor]:
    """Cut each document into consecutive windows int64 [<= length] that do not overlap.

    No window spans two documents, and every window has at least two tokens. A window's first token is not
    predicted; cutting stops at `max_predictions`, if given.
    """
    windows: list[Tensor] = []
    predictions = 0
    for text in texts:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        for window in ids.split(length):
            if max_predictions is not None:
                window = window[: max_predictions - predictions + 1]
            if window.numel() >= 2:
                windows.append(window)
                predictions += window.numel() - 1
            if predictions == max_predictions:
                return windows
    return windows


def compare(
    model: nn.Module,
    baseline: nn.Module,
    windows: Sequence[Tensor],
    progress: Callable[[int], None] | None = None,
    second_half: bool = False,
    batch: int = 1,
) -> Comparison:
    """Compare both models on the same windows, with the exact KL divergence at every scored position.

    second_half: score only the second half of each window. A model over stored keys and values decodes this
                 half, a token at a time, over the keys and values of the first half
    batch:       number of windows of one length that are computed together
    """
    return comparison_of(
        run
        for group in _groups(windows, batch)
        for run in token_figures(model, baseline, group, progress, second_half)
    )


def compare_domains(
    model: nn.Module,
    baseline: nn.Module,
    windows: Sequence[Tensor],
    domains: Sequence[str],
    progress: Callable[[int], None] | None = None,
    second_half: bool = False,
    batch: int = 1,
) -> tuple[Comparison, dict[str, Comparison]]:
    """Compare like `compare`, over all windows and over each domain's alone.

    domains: the domain of each window
    """
    runs: dict[str, list[Tensor]] = {domain: [] for domain in domains}
    for domain, found in runs.items():
        own = [window for window, other in zip(windows, domains, strict=True) if other == domain]
        for group in _groups(own, batch):
            found += token_figures(model, baseline, group, progress, second_half)
    whole = comparison_of(itertools.chain.from_iterable(runs.values()))
    return whole, {domain: comparison_of(found) for domain, found in runs.items()}


def token_figures(
    model: nn.Module,
    baseline: nn.Module,
    windows: Tensor,
    progress: Callable[[int], None] | None = None,
    second_half: bool = False,
) -> list[Tensor]:
    """Yield runs of scored tokens, fp64 [<= RUN, 5]: KL, nats under either model, whether both agree, the
    entropy of the baseline's prediction.

    windows: int64 [B, T]
    """
    runs: list[Tensor] = []
    first = windows.shape[1] // 2 if second_half else 1
    sides = [_next_token_logits(side, windows, max(first, 1)) for side in (model, baseline)]
    for window, *texts in zip(windows, *sides, strict=True):
        pairs = zip(*(text.split(LOGIT_ROWS) for text in texts), strict=True)
        rows = []
        for (logits, baseline_logits), targets in zip(
            pairs, window[-len(texts[0]) :].split(LOGIT_ROWS), strict=True
        ):
            log_q = logits.float().log_softmax(-1)
            log_p = baseline_logits.to(log_q.device).float().log_softmax(-1)
            p = log_p.exp()
            kl, entropy = (p * (log_p - log_q)).sum(-1), -(p * log_p).sum(-1)
            agrees = (log_q.argmax(-1) == log_p.argmax(-1)).float()
            rows.append(torch.stack([kl, _nll(log_q, targets), _nll(log_p, targets), agrees, entropy], dim=1))
        runs += torch.cat(rows).double().cpu().split(RUN)
        if progress is not None:
            progress(window.numel())
    return runs


def comparison_of(runs: Iterable[Tensor]) -> Comparison:
    """Return the comparison that summarizes the figures of all tokens."""
    runs = list(runs)
    _require_tokens(sum(len(run) for run in runs))
    return _comparison(runs)


def _groups(windows: Sequence[Tensor], batch: int) -> Iterator[Tensor]:
    """Yield consecutive windows of one length, int64 [<= batch, T]."""
    for _, alike in itertools.groupby(windows, len):
        yield from torch.stack(list(alike)).split(batch)


def _comparison(runs: Sequence[Tensor]) -> Comparison:
    """Return the comparison from runs of tokens. runs: fp64 [tokens, 5] each, as `token_figures` gives
    them
    """
    tokens = torch.cat(list(runs))
    kl = tokens[:, 0].sort().values
    mean_kl, nats, baseline_nats, agreement, entropy = tokens.mean(0).tolist()
    return Comparison(
        tokens=len(tokens),
        nats_per_token=nats,
        baseline_nats_per_token=baseline_nats,
        mean_kl=mean_kl,
        p99_kl=kl[int(0.99 * (len(kl) - 1))].item(),
        p999_kl=kl[int(0.999 * (len(kl) - 1))].item(),
        max_kl=kl[-1].item(),
        top1_agreement=agreement,
        intervals=_intervals(runs, tokens),
        baseline_entropy=entropy,
    )


def _intervals(runs: Sequence[Tensor], tokens: Tensor) -> dict[str, tuple[float, float]]:
    """Return percentile intervals of a bootstrap over runs of tokens (Efron and Tibshirani, 1993, chapters 8,
    13).

    The bootstrap is seeded: the same tokens give the same intervals.
    """
    if len(runs) < 2 or not bool(tokens.isfinite().all()):
        return {}
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(runs), (RESAMPLES, len(runs)), generator=generator)
    times = torch.zeros(RESAMPLES, len(runs), dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    weights = times @ torch.tensor([float(len(run)) for run in runs], dtype=torch.float64)
    means = times @ torch.stack([run.sum(0) for run in runs]) / weights[:, None]
    resampled = {
        "mean_kl": means[:, 0],
        "extra_nats_per_token": means[:, 1] - means[:, 2],
        "top1_agreement": means[:, 3],
    }
    run_of = torch.repeat_interleave(torch.tensor([len(run) for run in runs]))
    furthest = tokens[:, 0].topk(max(1, int(TAIL * len(tokens))))
    above = times[:, run_of[furthest.indices]].cumsum(1)
    for name, share in (("p99_kl", 0.01), ("p999_kl", 0.001), ("max_kl", 0.0)):
        # The first of the furthest tokens with more than this share of the weight at or beyond it.
        index = (above <= share * weights[:, None]).sum(1).clamp(max=len(furthest.values) - 1)
        resampled[name] = furthest.values[index]
    tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
    limits = {name: values.quantile(tails).tolist() for name, values in resampled.items()}
    return {name: (low, high) for name, (low, high) in limits.items()}


def continuation_nats(model: nn.Module, prompt: Sequence[int], continuation: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of `continuation` after `prompt` under `model`."""
    window = torch.tensor([*prompt, *continuation], dtype=torch.int64)
    return _losses(model, window)[len(prompt) - 1 :].mean().item()


def nats(model: nn.Module, window: Tensor) -> float:
    """Return the negative log-likelihood under `model` of all tokens of a window, int64 [T], but the
    first.
    """
    return _losses(model, window).sum().item()


def greedy_gaps(model: nn.Module, prompt: Sequence[int], continuation: Sequence[int]) -> list[float]:
    """Return how far the logit of each token of `continuation` is below the best one there, in nats."""
    return below_best(continuation_logits(model, prompt, continuation), continuation)


def continuation_logits(model: nn.Module, prompt: Sequence[int], continuation: Sequence[int]) -> Tensor:
    """Return fp32 [tokens, V]: the logits that predict each token of `continuation`."""
    window = torch.tensor([[*prompt, *continuation]], dtype=torch.int64)
    [logits] = _next_token_logits(model, window, len(prompt))
    return logits.float()


def continuations_logits(
    model: nn.Module, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[Tensor]:
    """Yield what `continuation_logits` returns for each prompt and its continuation.

    Neighbours of similar lengths are computed together, each padded to the longest: no token depends on later
    ones.
    """
    for group in _of_similar_lengths(texts):
        whole = [torch.tensor([*prompt, *continuation]) for prompt, continuation in group]
        # The text's own last token: any model takes it.
        longest = max(map(len, whole))
        windows = torch.stack([torch.cat([ids, ids[-1:].expand(longest - len(ids))]) for ids in whole])
        first = min(len(prompt) for prompt, _ in group)
        ids = windows.to(next(iter(model.parameters())).device)
        # By index, and not how many at the end: torch multiplies a slice of hidden states in three times the
        # time of a copy.
        kept = torch.arange(first - 1, longest - 1, device=ids.device)
        with torch.inference_mode():
            of_group = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        for (prompt, continuation), logits in zip(group, of_group, strict=True):
            start = len(prompt) - first
            yield logits[start : start + len(continuation)].float()


def _of_similar_lengths(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> Iterator[list[tuple[Sequence[int], Sequence[int]]]]:
    """Yield groups of neighbours that are computed together."""
    group: list[tuple[Sequence[int], Sequence[int]]] = []
    for text in texts:
        lengths = [len(prompt) + len(continuation) for prompt, continuation in (*group, text)]
        padded = len(lengths) * max(lengths)
        if group and (padded > TOGETHER_TOKENS or sum(lengths) < LEAST_FULL * padded):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def below_best(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return how far the logit of each token is below the best one of its row, in nats, logits fp32 [tokens,
    V].

    A gap of at most two roundings of the best logit to bfloat16 counts as 0: such logits are tied, and
    another order of summation may choose the other one.
    """
    best = logits.amax(-1)
    gaps = best + _nll(logits, torch.tensor(tokens))
    ties = gaps <= 2 * BFLOAT16_ROUNDING * best.abs()
    return gaps.masked_fill(ties, 0.0).tolist()


def log_probabilities(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token in nats, from its row of logits, fp32 [tokens, V]."""
    return (-_nll(logits.log_softmax(-1), torch.tensor(tokens))).tolist()


def _losses(model: nn.Module, window: Tensor) -> Tensor:
    """fp64 [T - 1]: the negative log-likelihood of each token but the first."""
    losses = [_nll(logits.log_softmax(-1), targets) for logits, targets in _predictions(model, window)]
    return torch.cat(losses).double()


def _predictions(model: nn.Module, window: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield fp32 logits [rows, vocab] and the tokens they should have predicted [rows], a slice at a time."""
    [logits] = _next_token_logits(model, window[None], 1)
    for rows, targets in zip(logits.split(LOGIT_ROWS), window[1:].split(LOGIT_ROWS), strict=True):
        yield rows.float(), targets


def _next_token_logits(model: nn.Module, windows: Tensor, first: int) -> Tensor:
    """Return [B, T - first, V]: the logits that predict the tokens of windows, int64 [B, T], from token
    `first` on.
    """
    ids, scored = windows.to(next(iter(model.parameters())).device), windows.shape[1] - first
    options = {} if first == 1 else {"logits_to_keep": scored + 1}
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False, **options).logits[:, -scored - 1 : -1]


def _nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(-1, targets.to(log_probabilities.device).unsqueeze(-1)).squeeze(-1)


def _require_tokens(tokens: int) -> None:
    if tokens == 0:
        raise ValueError("no window with two tokens or more: nothing to score")
