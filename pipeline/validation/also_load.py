"""Loads the artifact in another library and compares its predictions with ours on the same tokens.

The comparison finds problems that the files alone do not show: a scale that two readers apply differently, a
tensor that one reader ignores. Transformers gives its logits to this process; any other engine serves the
artifact and reports the log-probabilities of tokens that it draws. If the library cannot load the artifact on
this machine, the result has the reason, and nothing is known.
"""

import importlib.metadata
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import logging as transformers_logging

from ...base.errors import UserError
from ...serving_check.adapters import Endpoint
from ...serving_check.adapters.engine import MemoryGrant, ServerJob
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import EngineOptions
from ...serving_check.evidence.artifact_figures import ReadElsewhere
from ...serving_check.quality import continuation_logits, log_probabilities
from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.loaded_by_transformers import why_transformers_fails
from ..model_loader.skeleton import auto_class_of
from .options import NO_OTHER_READER, TRANSFORMERS
from .run import Run
from .servers import server_of

LIBRARIES = ("compressed-tensors", "torchao")
"""The libraries with which transformers reads the quantized weights of our artifacts."""
TOKENS = 256
"""How many tokens of a held-out window are read: enough to find a wrong scale, a second on a CPU."""
SHOWN_CHARACTERS = 200
DRAWN = 16
"""Tokens that a server draws after each prompt; prompts have 16, 32, 48, … tokens."""
SHARE_OF_FREE = 0.9
"""The share of the GPU's free memory for a server that is started beside both models."""
REQUEST_TIMEOUT_S = 600.0


def read_elsewhere(run: Run, ours: nn.Module | None, window: Tensor) -> tuple[ReadElsewhere, ...]:
    """Return the comparison with the requested reader, if any.

    ours: None if both models together do not fit in memory
    """
    reader = run.asked.also_load
    if reader == NO_OTHER_READER:
        return ()
    if ours is None:
        told = "both models together do not fit in memory, where it would be compared with ours"
        return (ReadElsewhere(reader, 0, None, None, told),)
    if reader == TRANSFORMERS:
        return (read_by_transformers(run.artifact, ours, window),)
    return (read_by_server(run, ours, window),)


def read_by_server(run: Run, ours: nn.Module, window: Tensor) -> ReadElsewhere:
    """Return the KL of our predictions from those of an engine, whose server draws tokens."""
    reader, first = run.asked.also_load, next(ours.parameters())
    prompts = [window[:length].tolist() for length in range(DRAWN, min(TOKENS, len(window)) + 1, DRAWN)]
    options = EngineOptions(
        device=run.options.device,
        dtype=str(first.dtype).removeprefix("torch."),
        max_num_seqs=1,
        max_model_len=TOKENS + DRAWN,
    )
    with TemporaryDirectory(prefix="scalegate-reader-") as logs:
        job = ServerJob(
            reader,
            "artifact",
            run.artifact.folder,
            options,
            Path(logs) / "artifact.log",
            _grant(first.device),
            run.progress,
            Placement(startup_timeout=run.placement.startup_timeout),
            () if first.device.index is None else (first.device.index,),
        )
        server = server_of(job)
        try:
            with server as endpoint:
                drawn = [_draw(endpoint, prompt, seed) for seed, prompt in enumerate(prompts)]
        except UserError as error:
            return ReadElsewhere(reader, 0, None, None, error.message[:SHOWN_CHARACTERS])
    if not all(drawn):
        return ReadElsewhere(reader, 0, None, None, "it tells no token ids, or no log-probabilities")
    return _of_draws(reader, ours, prompts, drawn)


def _grant(device: torch.device) -> MemoryGrant | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return MemoryGrant(SHARE_OF_FREE * free / total)


def _draw(endpoint: Endpoint, prompt: Sequence[int], seed: int) -> list[tuple[int, float]]:
    """Return tokens drawn from the whole distribution after `prompt`, with their log-probabilities; none if
    the server does not report both."""
    body = {
        "prompt": prompt,
        "max_tokens": DRAWN,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    choice = endpoint.complete(body, REQUEST_TIMEOUT_S) or {}
    tokens, told = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not tokens or not told or len(tokens) != len(told):
        return []
    return [
        (token, math.nan if logprob is None else logprob) for token, logprob in zip(tokens, told, strict=True)
    ]


def _of_draws(
    reader: str, ours: nn.Module, prompts: Sequence[list[int]], drawn: Sequence[list[tuple[int, float]]]
) -> ReadElsewhere:
    """Return the KL from drawn tokens. With d = log q - log p of a token drawn from q, d - 1 + exp(-d) has
    the KL of p from q as its mean and is never negative; over 256 tokens, its standard error is a tenth of
    the mean if d is normal."""
    estimates = []
    for prompt, answer in zip(prompts, drawn, strict=True):
        tokens = [token for token, _ in answer]
        expected = log_probabilities(continuation_logits(ours, prompt, tokens), tokens)
        estimates += [
            _divergence(told - logprob) for (_, told), logprob in zip(answer, expected, strict=True)
        ]
    mean = fmean(estimates)
    return ReadElsewhere(reader, len(estimates), mean if math.isfinite(mean) else None, None, None)


def _divergence(difference: float) -> float:
    try:
        return difference - 1 + math.exp(-difference)
    except OverflowError:
        return math.inf


def read_by_transformers(artifact: Checkpoint, ours: nn.Module, window: Tensor) -> ReadElsewhere:
    """Return the KL of transformers' predictions from ours, in nats per token.

    ours:   the artifact in our loader, on the device that transformers should use too
    window: int64 [T], of which the first `TOKENS` are read
    """
    tokens = window[:TOKENS][None].to(next(ours.parameters()).device)
    reader = f"{TRANSFORMERS} {_versions()}"
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            if (reason := why_transformers_fails(artifact)) is not None:
                return ReadElsewhere(reader, 0, None, None, reason[:SHOWN_CHARACTERS])
            model: nn.Module = auto_class_of(artifact, ours).from_pretrained(artifact.folder, dtype="auto")
            theirs = model.to(tokens.device).eval()(tokens).logits[0].float()
    except Exception as error:
        # Readers raise what they like at files that they do not expect.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return ReadElsewhere(reader, 0, None, None, told[:SHOWN_CHARACTERS])
    finally:
        transformers_logging.set_verbosity(level)
    with torch.inference_mode():
        expected = functional.log_softmax(ours(tokens).logits[0].float(), dim=-1)
        found = functional.log_softmax(theirs, dim=-1)
        divergence = functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        agreement = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    return ReadElsewhere(reader, tokens.shape[1], float(divergence.mean()), float(agreement), None)


def _versions() -> str:
    found = [importlib.metadata.version(TRANSFORMERS)]
    for library in LIBRARIES:
        try:
            found.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {library}")
    return ", ".join(found)
