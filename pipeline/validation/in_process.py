"""The figures that need no server: the loaded models, and how close the artifact's predictions are to the
baseline's.

While the servers run, both models stay in memory if there is room for them.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...base.batch_invariance import BatchInvariance
from ...base.errors import UserError
from ...base.progress import progress_bar
from ...layouts.modules.experts import PackedExperts, is_experts, parameters_of
from ...layouts.modules.linear import QuantizedLinear, packed_layers
from ...layouts.modules.merged_linear import MergedLinear
from ...serving_check.checks.served_text import SHOWN_CHARACTERS, may_be_baselines, tokens_off
from ...serving_check.draws import draws_of
from ...serving_check.engine.offline.stored_kv import StoredKVModel
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.answer_figures import ServedText
from ...serving_check.evidence.evidence import ModelFigures, TextScore
from ...serving_check.evidence.in_use import AnswerInUse
from ...serving_check.evidence.served_in_use import ServedInUse, TopLogprobs
from ...serving_check.quality import (
    Comparison,
    below_best,
    compare,
    compare_domains,
    continuation_nats,
    continuations_logits,
    log_probabilities,
)
from ...serving_check.workload.planned_request import WHOLE, Adjustments, Truncation
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.kv_cache import kv_cache_of
from ..machine.device import resolve_dtype
from ..model_loader.load_model import LoadedModel, load_model
from .held_out import HeldOutText
from .run import LoadOptions

LOGITS_BYTES = 2 << 30
"""The most bytes for the logits of windows that are decoded together, for each side."""
MOST_TOGETHER = 16
TOP_P_ERROR = 0.05
"""By how much the probability of a row's most likely tokens may differ: if their logits are 0.1 nats off,
rounded to bfloat16, so is the probability by a tenth of p (1 - p) at most, and there are several of them."""
STORED_TOKENS = 1 << 17
"""The most tokens of answers that are decoded together, each padded to the longest."""


@dataclass(frozen=True)
class InProcessFigures:
    loaded: ModelFigures
    baseline_loaded: ModelFigures
    comparison: Comparison
    dtype: str
    baseline_dtype: str
    by_domain: Mapping[str, Comparison] = field(default_factory=dict)
    """The comparison on each domain; empty if the text has one domain only."""
    given: Comparison | None = None
    """The comparison on the user's own text; None if there is none."""
    by_layers: bool = False
    """Whether the models were run a layer at a time (`by_layers.py`)."""


@dataclass(frozen=True)
class Models:
    """Both models, in memory."""

    ours: LoadedModel
    theirs: LoadedModel


def load_models(artifact: Checkpoint, baseline: Checkpoint, options: LoadOptions) -> Models:
    engine = options.engine
    ours = _load(artifact, options, engine.dtype, engine.layout, engine.batch_invariance)
    return Models(ours, _load(baseline, options, options.baseline_dtype))


def figures_of(
    models: Models, text: HeldOutText, options: LoadOptions, given: HeldOutText | None = None
) -> InProcessFigures:
    """Record the models' layers, and compare the models' predictions on the text, and on the given text by
    itself.
    """
    ours, theirs = models.ours, models.theirs
    loaded, baseline_loaded = _describe(ours), _describe(theirs)
    refuse_other_vocabulary(ours.checkpoint, loaded, theirs.checkpoint, baseline_loaded)
    windows = [*text.windows, *(given.windows if given else [])]
    total = sum(window.numel() for window in windows)
    with progress_bar(total=total, desc="quality", unit="tok", shown=options.progress) as bar:
        longest = max(map(len, windows))
        scored = longest // 2 + 1
        batch = max(1, min(MOST_TOGETHER, LOGITS_BYTES // (scored * loaded.vocab_size * 2)))
        served = _as_served(ours, options, longest, batch)
        is_stored = isinstance(served, StoredKVModel)
        comparison, by_domain, of_given = compare_texts(
            served, theirs.model, text, given, bar.update, is_stored, batch if is_stored else 1
        )
    dtype, baseline_dtype = (str(side.model.dtype).removeprefix("torch.") for side in (ours, theirs))
    return InProcessFigures(loaded, baseline_loaded, comparison, dtype, baseline_dtype, by_domain, of_given)


def compare_texts(
    model: nn.Module,
    baseline: nn.Module,
    text: HeldOutText,
    given: HeldOutText | None,
    progress: Callable[[int], None] | None = None,
    second_half: bool = False,
    batch: int = 1,
) -> tuple[Comparison, dict[str, Comparison], Comparison | None]:
    """Return the comparison on all of the text, on each of its domains if there are several, and on the given
    text by itself.
    """
    whole, by_domain = compare_domains(
        model, baseline, text.windows, text.domains, progress, second_half, batch
    )
    of_given = (
        None if given is None else compare(model, baseline, given.windows, progress, second_half, batch)
    )
    return whole, by_domain if len(by_domain) > 1 else {}, of_given


def refuse_other_vocabulary(
    artifact: Checkpoint, loaded: ModelFigures, baseline: Checkpoint, baseline_loaded: ModelFigures
) -> None:
    if loaded.vocab_size != baseline_loaded.vocab_size:
        raise UserError(
            f"{artifact.source} has a vocabulary of {loaded.vocab_size} tokens, and {baseline.source} one of "
            f"{baseline_loaded.vocab_size}; with --baseline, give the checkpoint that {artifact.source} was "
            "made from"
        )


class TextScorer:
    """Scores texts with both models."""

    def __init__(self, artifact: nn.Module, baseline: nn.Module):
        self._artifact, self._baseline = artifact, baseline

    def baseline_nats(self, prompt: Sequence[int], continuation: Sequence[int]) -> float:
        """Return the mean nats per token under the baseline."""
        return continuation_nats(self._baseline, prompt, continuation)

    def texts(self, served: Sequence[ServedText]) -> tuple[TextScore, ...]:
        """Compare the answers' tokens with the artifact's logits, and with the baseline's if that can tell
        anything."""
        # Of similar lengths, so that those that are computed together end together.
        ordered = sorted(served, key=self._length)
        off = list(_tokens_off(self._artifact, ordered))
        baseline_off = self._baseline_off(ordered, off)
        scores = [
            TextScore(text.m, len(text.tokens), ours, theirs, text.text[:SHOWN_CHARACTERS])
            for text, ours, theirs in zip(ordered, off, baseline_off, strict=True)
        ]
        return tuple(sorted(scores, key=lambda score: score.m))

    def answers_in_use(self, served: Sequence[ServedInUse]) -> tuple[AnswerInUse, ...]:
        """Compare the answers' tokens with the artifact's logits, and greedy tokens with the baseline's if
        that can tell anything."""
        ordered = sorted(served, key=self._length)
        logits = _logits_of(self._artifact, ordered)
        scored = [_answer_in_use(answer, rows) for answer, rows in zip(ordered, logits, strict=True)]
        greedy = [at for at, answer in enumerate(ordered) if answer.kind != "sampled"]
        off = self._baseline_off([ordered[at] for at in greedy], [scored[at].off for at in greedy])
        for at, baseline_off in zip(greedy, off, strict=True):
            scored[at] = replace(scored[at], baseline_off=baseline_off)
        return tuple(scored)

    def _length(self, served: ServedText | ServedInUse) -> int:
        """Return the number of tokens that count for the time to score an answer: those that are read at
        once, or those that are decoded."""
        is_decoded = isinstance(self._artifact, StoredKVModel)
        return len(served.tokens) + (0 if is_decoded else len(served.prompt))

    def _baseline_off(
        self, greedy: Sequence[ServedText | ServedInUse], off: Sequence[int]
    ) -> Iterable[int | None]:
        """Yield how many tokens of each answer are off by the baseline's logits; None for each if too few are
        off by the artifact's for a comparison.
        """
        if may_be_baselines(sum(off)):
            return _tokens_off(self._baseline, greedy)
        return [None] * len(greedy)


def _tokens_off(model: nn.Module, greedy: Sequence[ServedText | ServedInUse]) -> Iterator[int]:
    for answer, logits in zip(greedy, _logits_of(model, greedy), strict=True):
        logits = _as_asked(logits, answer) if isinstance(answer, ServedInUse) else logits.float()
        yield tokens_off(below_best(logits, answer.tokens))


def _answer_in_use(served: ServedInUse, logits: Tensor) -> AnswerInUse:
    """Return the scored answer, without the baseline's logits.

    logits: the artifact's logits [tokens, V]
    """
    logits = _as_asked(logits, served)
    draws = None
    if served.kind == "sampled":
        name = f"{served.seed} {served.choice} {served.prompt}"
        draws = draws_of(logits, served.tokens, served.temperature, name)
    errors = None
    if served.logprobs is not None:
        errors = logprob_errors(served.logprobs, log_probabilities(logits, served.tokens))
    return AnswerInUse(
        kind=served.kind,
        prompt_tokens=len(served.prompt),
        tokens=len(served.tokens),
        m=served.m,
        prompts_beside=served.prompts_beside,
        off=tokens_off(below_best(logits, served.tokens)),
        baseline_off=0,
        beginning=served.text[:SHOWN_CHARACTERS],
        draws=draws,
        logprob_errors=errors,
        alternatives_error=alternatives_error(served.alternatives, logits),
        repeats_other_seed=served.repeats_other_seed,
        choice=served.choice,
        is_chat=served.is_chat,
        is_streamed=served.is_streamed,
    )


def logprob_errors(told: Sequence[float | None], expected: Sequence[float]) -> tuple[float, float]:
    """Return the difference of the log-probabilities in nats, mean and largest; infinite if any is
    missing.
    """
    if len(told) != len(expected):
        return math.inf, math.inf
    pairs = zip(told, expected, strict=True)
    errors = [math.inf if theirs is None else abs(theirs - ours) for theirs, ours in pairs]
    return fmean(errors), max(errors)


def alternatives_error(told: Sequence[TopLogprobs], logits: Tensor) -> float | None:
    """Return the mean difference in nats of the log-probabilities that the server reports for the most likely
    tokens; None if it reports none.

    Each log-probability that the server reports is compared with that of the reported token, and with that of
    the token at the same rank. The larger difference counts: tokens may be wrong with their own
    log-probabilities, or right with another token's.

    logits: [tokens, V]
    """
    if not told:
        return None
    expected = logits.double().log_softmax(-1)
    errors = []
    whole = max(map(len, told), default=0)
    for row, alternatives in zip(expected, told, strict=False):
        ranked = row.topk(whole).values.tolist()
        for (token, logprob), of_rank in zip(alternatives, ranked, strict=False):
            # Where some have one text, and so are told as one, ranks are not known.
            likely = [of_rank] if len(alternatives) == whole else []
            likely += [] if token is None else [row[token].item()]
            errors += [max(abs(logprob - own) for own in likely)] if likely else []
    return fmean(errors) if errors else None


@runtime_checkable
class ReadsTexts(Protocol):
    """A model that reads texts in its own way."""

    def continuations(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[Tensor]:
        """Yield, for each prompt and its continuation, the logits [tokens, V] of the continuation."""


def _logits_of(model: nn.Module, served: Sequence[ServedText | ServedInUse]) -> Iterator[Tensor]:
    """Yield the logits of each answer [tokens, V]; many are computed together."""
    texts = [(answer.prompt, answer.tokens) for answer in served]
    if isinstance(model, ReadsTexts):
        return model.continuations(texts)
    return continuations_logits(model, texts)


def _as_asked(logits: Tensor, served: ServedInUse) -> Tensor:
    """Return the logits in fp32, without a token that could not be chosen, with the penalties and the bias,
    or with all tokens alike that could be drawn.
    """
    if served.end_token is not None:
        return logits.float().index_fill(1, torch.tensor([served.end_token], device=logits.device), -math.inf)
    if served.truncation != WHOLE:
        return with_ties(logits.float(), served.truncation)
    if served.adjustments is not None:
        return _adjusted(logits.float().clone(), served, served.adjustments)
    return logits.float()


def with_ties(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return `logits` [tokens, V] where no token that may be drawn is better than the worst of them."""
    ranked = logits.sort(-1, descending=True).values
    worst = ranked[:, -1:]
    if truncation.top_k > 0:
        worst = worst.maximum(ranked[:, truncation.top_k - 1 : truncation.top_k])
    if truncation.top_p < 1:
        before = ranked.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        kept = (before < truncation.top_p + TOP_P_ERROR).sum(-1, keepdim=True)
        worst = worst.maximum(ranked.gather(-1, kept - 1))
    if truncation.min_p > 0:
        worst = worst.maximum(ranked[:, :1] + math.log(truncation.min_p))
    return logits.minimum(worst)


def _adjusted(logits: Tensor, served: ServedInUse, adjustments: Adjustments) -> Tensor:
    """Change `logits` [tokens, V]: each row by the tokens before it."""
    if adjustments.repetition_penalty != 1:
        _penalize_repetition(logits, served, adjustments.repetition_penalty)
    for token, bias in adjustments.bias:
        logits[:, token] += bias
    seen: set[int] = set()
    for position, token in enumerate(served.tokens, 1):
        logits[position:, token] -= adjustments.frequency_penalty
        if token not in seen:
            logits[position:, token] -= adjustments.presence_penalty
        seen.add(token)
    return logits


def _penalize_repetition(logits: Tensor, served: ServedInUse, penalty: float) -> None:
    """Changes `logits` [tokens, V] of tokens that the prompt has, or the answer before the row."""
    seen = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    seen[list(served.prompt)] = True
    for row, token in zip(logits, served.tokens, strict=True):
        row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
        seen[token] = True


def scorer_of(models: Models, options: LoadOptions, longest: int) -> TextScorer:
    """longest: the most tokens of a prompt and its continuation"""
    batch = max(1, min(MOST_TOGETHER, STORED_TOKENS // longest))
    return TextScorer(_as_served(models.ours, options, longest, batch), models.theirs.model)


def _load(
    checkpoint: Checkpoint,
    options: LoadOptions,
    dtype: str,
    layout: str | None = None,
    batch_invariance: BatchInvariance = "tuned",
) -> LoadedModel:
    return load_model(
        # A server loads those tensors, too, that a recipe leaves out.
        checkpoint.folder if checkpoint.left_out else checkpoint,
        device=options.engine.device,
        dtype=resolve_dtype(dtype),
        layout=layout,
        batch_invariance=batch_invariance,
        progress=options.progress,
    )


def _as_served(loaded: LoadedModel, options: LoadOptions, longest: int, batch: int = 1) -> nn.Module:
    """Return the model with its keys and values as they are stored while it serves."""
    kv_cache = kv_cache_of(loaded.checkpoint, options.engine.kv_cache_dtype)
    if kv_cache.kv_format == UNQUANTIZED:
        return loaded.model
    return StoredKVModel(loaded.model, kv_cache.kv_format, kv_cache.scales, longest, batch)


def _describe(loaded: LoadedModel) -> ModelFigures:
    return ModelFigures(
        linear_shapes=linear_shapes(loaded.model),
        vocab_size=int(loaded.model.config.get_text_config().vocab_size),
        layouts=loaded.layouts,
        packed=packed_layers(loaded.model),
        weight_bytes=weight_bytes(loaded.model),
    )


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and packed weights; shared ones count once."""
    tensors = [*model.parameters(), *model.buffers()]
    # oneDNN's own order of bytes has no storage that can be pointed at.
    return sum(
        {
            id(tensor) if tensor.is_mkldnn else tensor.data_ptr(): tensor.numel() * tensor.element_size()
            for tensor in tensors
        }.values()
    )


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return [N, K] of every linear layer by its own name, merged or not; [E, N, K] of a layer's experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, MergedLinear):
            inside.add(module.merged)
            shapes[name] = module.out_features, module.in_features
        elif isinstance(module, nn.Linear | QuantizedLinear) and module not in inside:
            shapes[name] = module.out_features, module.in_features
        elif isinstance(module, PackedExperts):
            inside.add(module.experts)
            shapes |= {f"{name}.{parameter}": shape for parameter, shape in module.shapes().items()}
        elif is_experts(module) and module not in inside:
            shapes |= {
                f"{name}.{leaf}": tuple(weight.shape) for leaf, weight in parameters_of(module).items()
            }
    return shapes


def release_memory() -> None:
    """Free objects that nothing refers to any more, on the GPU as well."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
