"""What each KV format costs in quality on a trained checkpoint: extra nats per token and KL, in decoding.

    python -P tests/bench/quantization/kv_quality.py CHECKPOINT --heldout heldout.jsonl \
        --out OUT/kv_quality_5m.json
    python -P tests/bench/quantization/kv_quality.py CHECKPOINT --heldout heldout.jsonl --windows 4 \
        --out some.json
    python -P tests/bench/quantization/kv_quality.py CHECKPOINT --heldout heldout.jsonl --as-prompts \
        --windows 64 \\
        --formats fp8 fp8_e4m3_queries --out OUT/e4m3_queries_5m.json

Windows of 2,048 tokens, scored over their last 1,024: the first half is a prompt, the second is decoded token
by token over keys and values as they are stored. Beside the shipped formats stand per-token ones of three and
four bits, asymmetric, with and without a rotation: what KVarN has to beat; fp8 with the queries of prompts
rounded to e4m3 as well. With --as-prompts nothing is decoded: windows are prompts from end to end. A run that
was interrupted goes on where it stopped: the figures of the tokens so far lie beside the results.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.base.atomic_files import atomic_path, write_json
from scalegate.layouts.kv.format import KV_FORMATS, KVScales, largest_of
from scalegate.layouts.kv.token_by_token import TokenByToken
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.calibration.calibration_text import read_calibration_text
from scalegate.pipeline.quantization.calibration.kv_scales import largest_keys_and_values
from scalegate.serving_check.engine.offline.stored_kv import StoredKVModel
from scalegate.serving_check.quality import comparison_of, read_texts, token_figures, token_windows
from scalegate.tests.kernels.attention.rounded_queries import rounded_queries
from torch import Tensor, nn
from tqdm import tqdm

WINDOW = 2048
SHOWN = ("extra_nats_per_token", "mean_kl", "p999_kl", "top1_agreement")


@dataclass(frozen=True)
class PerToken(TokenByToken):
    """Asymmetric round-to-nearest of each token's head to `bits`, rotated first where `rotated`.

    It stores what was rounded unquantized: for figures of quality, not of size or speed.
    """

    bits: int = 3
    rotated: bool = False

    def allocate(self, *arguments):
        layer = super().allocate(*arguments)
        forward = layer.forward

        def rounding(query, key, value, *rest):
            return forward(query, self.round(key), self.round(value), *rest)

        layer.forward = rounding
        return layer

    def round(self, x: Tensor) -> Tensor:
        """x [T, H_kv, D]."""
        turn = hadamard(x.shape[-1]) if self.rotated else torch.eye(x.shape[-1])
        turned = x.float() @ turn
        low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
        scale = ((high - low) / (2**self.bits - 1)).clamp(min=1e-8)
        return ((((turned - low) / scale).round() * scale + low) @ turn.T).to(x.dtype)


class E4M3Queries(TokenByToken):
    """fp8 whose prompts' queries are rounded to e4m3, as large steps take them on Hopper."""

    def allocate(self, *arguments):
        layer = super().allocate(*arguments)
        forward = layer.forward

        def rounding(query, key, value, metadata, *rest):
            decodes = metadata.host.num_decodes
            query = torch.cat([query[:decodes], rounded_queries(query[decodes:])])
            return forward(query, key, value, metadata, *rest)

        layer.forward = rounding
        return layer


class AsPrompts(nn.Module):
    """A model over stored keys and values whose every token belongs to a prompt."""

    def __init__(self, stored: StoredKVModel):
        super().__init__()
        self.stored = stored

    def forward(self, input_ids: Tensor, logits_to_keep: int, **options):
        output = self.stored(input_ids)
        output.logits = output.logits[:, -logits_to_keep:]
        return output


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix over the square root of its size, fp32 [size, size]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


RIVALS = {
    f"{bits}_bit_per_token{'_rotated' if rotated else ''}": PerToken(None, bits, rotated)
    for bits in (3, 4)
    for rotated in (False, True)
}
RIVALS["fp8_e4m3_queries"] = E4M3Queries(torch.float8_e4m3fn)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="a text for the scales of fp8 and NVFP4; else none")
    parser.add_argument("--formats", nargs="+", help="default all")
    parser.add_argument("--windows", type=int, default=16, help="so many, spread over the text")
    parser.add_argument("--as-prompts", action="store_true", help="decode nothing")
    parser.add_argument("--batch", type=int, default=8, help="windows that are decoded together")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    for name, rival in RIVALS.items():
        KV_FORMATS.add(name, rival)
    formats = options.formats or [name for name in KV_FORMATS if name != "unquantized"]
    kept = options.out.with_suffix(".tokens.pt")
    tokens: dict[str, Tensor] = torch.load(kept) if kept.exists() else {}
    loaded = load_model(options.checkpoint, dtype=torch.float32, progress=False)
    windows = [
        window
        for window in token_windows(loaded.tokenizer, read_texts(options.heldout), WINDOW)
        if len(window) == WINDOW
    ]
    step = max(1, len(windows) // options.windows)
    chosen = torch.stack(windows[::step][: options.windows])
    results = {
        "checkpoint": options.checkpoint.name,
        "torch": torch.__version__,
        "window": WINDOW,
        "scored": WINDOW // 2,
        "dtype": "float32",
        "calibrated": options.calibration is not None,
        "mode": "prompts" if options.as_prompts else "decoding",
        "formats": {},
    }
    scales = calibrated(options)
    baseline = load_model(options.checkpoint, dtype=torch.float32, progress=False).model
    for name in formats:
        stored = StoredKVModel(loaded.model, name, scales_for(name, scales), WINDOW, batch=options.batch)
        side = AsPrompts(stored) if options.as_prompts else stored
        done = tokens.get(name, torch.empty(0, WINDOW // 2, 4, dtype=torch.float64))
        with tqdm(total=len(chosen), initial=len(done), desc=name, unit="window") as bar:
            while len(done) < len(chosen):
                batch = chosen[len(done) : len(done) + options.batch]
                runs = token_figures(side, baseline, batch, second_half=True)
                done = tokens[name] = torch.cat([done, torch.cat(runs).view(len(batch), -1, 4)])
                with atomic_path(kept) as partial:
                    torch.save(tokens, partial)
                bar.update(len(batch))
        comparison = comparison_of(run for window in done for run in window.split(256))
        results["formats"][name] = {
            **{key: value for key, value in asdict(comparison).items() if key != "intervals"},
            "extra_nats_per_token": comparison.extra_nats_per_token,
            "intervals": comparison.intervals,
            "windows": len(done),
        }
        write_json(options.out, results)
        print(name, *(f"{key} {results['formats'][name][key]:.4f}" for key in SHOWN), flush=True)


def calibrated(options: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """By layer, the largest magnitudes of keys and values on the text; empty without one."""
    checkpoint = open_checkpoint(options.checkpoint)
    if options.calibration is None:
        return {}
    text = read_calibration_text(checkpoint, str(options.calibration))
    found = largest_keys_and_values(checkpoint, text.sequences[:32], torch.device("cpu"), progress=False)
    return dict(enumerate(found.values()))


def scales_for(name: str, largest: dict[int, tuple[float, float]]) -> dict[int, KVScales]:
    holds = largest_of(KV_FORMATS[name])
    if holds is None:
        return {}
    return {
        layer: KVScales(*(torch.tensor([magnitude / holds]) for magnitude in pair))
        for layer, pair in largest.items()
    }


if __name__ == "__main__":
    main()
