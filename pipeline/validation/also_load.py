"""The artifact as transformers itself loads it, its logits beside ours on the same tokens.

What the files alone do not show: a scale that two readers apply differently, a tensor that one of them leaves
out. Where transformers cannot load it here, it says why, and nothing is known.
"""

import importlib.metadata
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import logging as transformers_logging

from ...serving_check.evidence.artifact_figures import ReadElsewhere
from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.skeleton import auto_class_of
from .options import TRANSFORMERS

LIBRARIES = ("compressed-tensors", "torchao")
"""What transformers reads quantized weights with, as far as artifacts of ours are concerned."""
TOKENS = 256
"""Of one window of the held-out text: enough for a wrong scale, and a second on a CPU for a small model."""
SHOWN_CHARACTERS = 200


def read_by_transformers(artifact: Checkpoint, ours: nn.Module, window: Tensor) -> ReadElsewhere:
    """KL of transformers' predictions from ours, in nats a token.

    ours:   the artifact as our loader has it, on the device that transformers is to use
    window: int64 [T], of which the first `TOKENS` are read
    """
    tokens = window[:TOKENS][None].to(next(ours.parameters()).device)
    reader = f"{TRANSFORMERS} {_versions()}"
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
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
