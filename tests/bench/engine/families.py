"""What Scalegate does with each model family: quantize it to INT4, serve it, and serve what was quantized.

CHECKPOINTS is a folder with one small checkpoint for each family, named after it, such as transformers saves
a random model of that family. Greedy tokens are compared with those of transformers in float32: the source's
with the weights as they are, the artifact's with its weights dequantized. A family has a process of its own,
so that a crash or a hang is an outcome like any other. An interrupted run goes on where it stopped.

`docs/generate/families.py` makes the table of docs/my-model.md from the results.

    python -P tests/bench/engine/families.py CHECKPOINTS --out tests/bench/results/engine/families.json
"""

import argparse
import importlib
import json
import multiprocessing
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from scalegate import LLM, SamplingParams, UserError, quantize
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.conventions.convention import StoredWeight

RECIPE = "int4-symmetric"
PROMPT_LENGTHS = (3, 21, 50)
NEW_TOKENS = 16
NEAR_TIE = 2e-3
"""Logits that differ by less than this part of their standard deviation count as equal."""
LIMIT_SECONDS = 240.0
MOST_CHARACTERS = 300
"""Of an error's message."""
IMPORTED_ONCE = (
    "scalegate.pipeline.model_loader.load_model",
    "scalegate.serving_check.engine.engine",
    "transformers.generation.utils",
)
"""What every family's process would import by itself."""
EXPERT = re.compile(r"(?P<layer>.+\.)experts\.\d+\.(?P<projection>\w+)\.weight$")
EQUAL, DIFFERENT, ANSWERS = "same tokens", "other tokens", "answers, not compared"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument(
        "--out", type=Path, required=True, help="families that it has already are not run again"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    families = json.loads(options.out.read_text())["families"] if options.out.is_file() else {}
    for folder in sorted(path.parent for path in options.checkpoints.glob("*/tokenizer.json")):
        if folder.name in families:
            continue
        families[folder.name] = in_own_process(folder)
        print(folder.name, families[folder.name], flush=True)
        write_json(
            options.out,
            {"recipe": RECIPE, "versions": versions(), "families": dict(sorted(families.items()))},
        )


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def in_own_process(folder: Path) -> dict[str, str]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=examine, args=(folder, sender))
    process.start()
    sender.close()
    found: dict[str, str] = {}
    try:
        while receiver.poll(LIMIT_SECONDS):
            found |= receiver.recv()
        found["ended"] = f"no outcome within {LIMIT_SECONDS:.0f} s"
    except EOFError:
        process.join()
        if process.exitcode:
            found["ended"] = f"exit status {process.exitcode}"
    process.kill()
    process.join()
    return found


def examine(folder: Path, sender: Any) -> None:
    """Send each outcome as soon as it is known."""
    prompts = random_prompts()
    sender.send({"architecture": architecture(folder)})
    with tempfile.TemporaryDirectory() as scratch:
        artifact = Path(scratch) / "artifact"
        outcome = quantized(folder, artifact)
        sender.send({"quantize": outcome})
        sender.send({"source": served(folder, folder, prompts)})
        if (artifact / "scalegate.json").is_file():
            plain = dequantized(folder, artifact, Path(scratch) / "dequantized")
            sender.send({"artifact": served(artifact, plain, prompts)})


def architecture(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 7900, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def quantized(folder: Path, artifact: Path) -> str:
    """`quantized`, the refusal, or the source's tensors that the artifact lacks."""
    try:
        quantize(folder, RECIPE, artifact, progress=False)
    except Exception as error:
        return failure(error, folder)
    source, made = open_checkpoint(folder), open_checkpoint(artifact)
    modules = stored(artifact)
    missing = [
        name
        for name, tensor in source.tensors.items()
        if name not in made.tensors and not covered(name, len(tensor.shape), [*modules, *made.tensors])
    ]
    return f"loses {len(missing)} tensors, {missing[0]} first" if missing else "quantized"


def failure(error: Exception, folder: Path) -> str:
    """A refusal in its own words, without the folder that differs from run to run; or a fault."""
    words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    kind = "refused" if isinstance(error, UserError) else "fault"
    return f"{kind}: {' '.join(words.replace(f'{folder}: ', '').split())[:MOST_CHARACTERS]}"


def stored(artifact: Path) -> dict[str, StoredWeight]:
    checkpoint = open_checkpoint(artifact)
    return dict(convention_of(checkpoint).modules(checkpoint))


def covered(name: str, dimensions: int, made: list[str]) -> bool:
    """Whether a source tensor is one of the artifact's weights, or stacked weights or biases of experts."""
    module = name.removesuffix(".weight")
    parent = module.rpartition(".")[0] + "."
    is_stacked = dimensions == 3 or (dimensions == 2 and name.endswith("_bias"))
    return module in made or (is_stacked and any(other.startswith(parent) for other in made))


def dequantized(source: Path, artifact: Path, folder: Path) -> Path | None:
    """The artifact as plain weights in the source's own names; None where a weight has no place there."""
    modules = {name: weight for name, weight in stored(artifact).items() if weight.is_quantized}
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    plain = {
        f"{module}.weight": weight.read().dequantize(torch.float32)  # type: ignore[union-attr]
        for module, weight in modules.items()
    }
    experts = {name: value for name, value in plain.items() if name not in tensors}
    tensors |= {name: value.contiguous() for name, value in plain.items() if name in tensors}
    stacked = restacked(experts, tensors)
    if stacked is None:
        return None
    tensors |= stacked
    folder.mkdir()
    save_file({name: plain.contiguous() for name, plain in tensors.items()}, folder / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    return folder


def restacked(
    experts: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Weights [N, K] of single experts as the source stacks them; None where it has no such tensor.

    Families stack gate and up one above the other or row by row, and some transpose them: the arrangement is
    the one that is nearest to the source, of which these weights are roundings.
    """
    layers: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, weight in experts.items():
        found = EXPERT.match(name)
        if found is None:
            return None
        layers.setdefault(found["layer"], {}).setdefault(found["projection"], []).append(weight)
    made = {}
    for layer, projections in layers.items():
        down = torch.stack(projections.pop("down_proj"))
        first = [torch.stack(weights) for _, weights in sorted(projections.items())]
        for forms in ([down], [torch.cat(first, 1), torch.stack(first, 2).flatten(1, 2)]):
            nearest = [
                ((source.float() - form).norm().item(), name, form)
                for name, source in tensors.items()
                if name.startswith(layer) and source.ndim == 3
                for form in (*forms, *(form.transpose(1, 2) for form in forms))
                if form.shape == source.shape
            ]
            if not nearest:
                return None
            _, name, form = min(nearest, key=lambda found: found[0])
            made[name] = form.contiguous()
    return made


def served(folder: Path, reference: Path | None, prompts: Sequence[list[int]]) -> str:
    """What our engine answers, beside what transformers answers on `reference`."""
    try:
        with LLM(
            folder,
            dtype="float32",
            max_num_seqs=4,
            max_model_len=128,
            kv_cache_tokens=1024,
            prefill_chunk=24,
            progress=False,
        ) as llm:
            greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
            answers = [list(result.token_ids) for result in llm.generate(prompts, greedy)]
    except Exception as error:
        return failure(error, folder)
    if reference is None:
        return ANSWERS
    try:
        model = getattr(transformers, architecture(reference)).from_pretrained(reference, dtype=torch.float32)
        expected = [generated(model.eval(), prompt) for prompt in prompts]
    except Exception as error:
        return f"{ANSWERS}: transformers raises {type(error).__name__}"
    return EQUAL if all(map(same, answers, expected)) else DIFFERENT


def generated(model: Any, prompt: list[int]) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), found.logits


def same(answer: list[int], expected: tuple[list[int], tuple[torch.Tensor, ...]]) -> bool:
    """Equal tokens, or two at a tie where the answers part."""
    tokens, logits = expected
    if len(answer) != len(tokens):
        return False
    part = next((place for place, (a, b) in enumerate(zip(answer, tokens, strict=True)) if a != b), None)
    if part is None:
        return True
    row = logits[part][0].float()
    return bool((row[tokens[part]] - row[answer[part]]).abs() < NEAR_TIE * row.std())


if __name__ == "__main__":
    main()
