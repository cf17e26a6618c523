"""Greedy tokens of the engine beside those of transformers' `generate()`: where they part, how near a tie.

In bf16 two correct computations round differently, so that tokens part where two are nearly as likely. Each
parting is listed with the distance of the two tokens in the logits there: as `generate()` computed them (bf16
has steps of 2^-4 between 8 and 16), and as the same weights in float32 do, there also relative to the logits.
After the first parting a prompt says nothing more. What bf16 alone does is shown by `generate()` against
itself, with all prompts in one padded batch. Under --batch-invariance pin and per-token the engine's answers
to all prompts together must be those to each alone, and no parting may be further from a tie than the
furthest of `generate()` itself: else the exit status is 1.

    python -P tests/bench/engine/greedy.py CHECKPOINT --device cuda
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from scalegate.base.atomic_files import write_json
from scalegate.base.batch_invariance import INVARIANCE_MODES
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TEXT = Path(__file__).parents[3] / "serving_check" / "data" / "heldout.jsonl"
NEAR_TIE = 2.0**-6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-invariance", default="tuned", choices=INVARIANCE_MODES)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="where the results go as JSON")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    lines = TEXT.read_text(encoding="utf-8").splitlines()
    tokens = tokenizer("".join(json.loads(line)["text"] for line in lines))["input_ids"]
    prompts = [tokens[131 * row : 131 * row + 1 + 7 * row] for row in range(options.prompts)]
    model = load(options, torch.bfloat16)
    generated = [generate(model, [prompt], options.tokens) for prompt in prompts]
    generated = [(tokens[0], logits[0]) for tokens, logits in generated]
    batched, _ = generate(model, prompts, options.tokens)
    settings = EngineOptions(
        max_model_len=1024, kv_cache_tokens=65536, batch_invariance=options.batch_invariance
    )
    engine = Engine(model, settings, frozenset())
    engine.warm_up(progress=False)
    greedy = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    answers = [list(answer.token_ids) for answer in engine.generate(prompts, greedy)]
    alone = [list(engine.generate([prompt], greedy)[0].token_ids) for prompt in prompts]
    exact = load(options, torch.float32)
    partings, batched_partings = (
        [
            parting(exact, row, prompts[row], *generated[row], answer)
            for row, answer in enumerate(others)
            if answer != generated[row][0]
        ]
        for others in (answers, batched)
    )
    results = {
        "checkpoint": options.checkpoint.name,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prompts": len(prompts),
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        "new_tokens": options.tokens,
        "near_tie": NEAR_TIE,
        "batch_invariance": options.batch_invariance,
        "other_than_alone": sum(answer != other for answer, other in zip(answers, alone, strict=True)),
        "partings": partings,
        "partings_of_generate_batched": batched_partings,
        "compilations": [str(event) for event in engine.stats().compilations],
    }
    if options.out is not None:
        write_json(options.out, results)
    show(results)
    furthest, of_generate = (
        max((parting["gap_float32"] for parting in found), default=0.0)
        for found in (partings, batched_partings)
    )
    kept = results["other_than_alone"] == 0 and furthest <= of_generate
    sys.exit(int(options.batch_invariance != "tuned" and not kept))


def load(options: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=dtype).to(options.device).eval()


def generate(
    model: PreTrainedModel, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens for each of the prompts, and the logits [prompts, count, V] that they were the greatest of."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    # Given, as it would be guessed from where the padding token stands in the prompt.
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(masks, device=model.device),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[:, longest:].tolist(), torch.stack(output.logits, 1).float().cpu()


@torch.inference_mode()
def parting(
    exact: PreTrainedModel,
    row: int,
    prompt: list[int],
    expected: list[int],
    logits: torch.Tensor,
    answer: list[int],
) -> dict:
    at = next(index for index, pair in enumerate(zip(expected, answer, strict=True)) if pair[0] != pair[1])
    context = torch.tensor([prompt + expected[:at]], device=exact.device)
    exact_logits = exact(context).logits[0, -1]
    theirs, ours = expected[at], answer[at]
    gap = float((exact_logits[theirs] - exact_logits[ours]).abs())
    return {
        "prompt": row,
        "position": at,
        "generate": theirs,
        "other": ours,
        "gap_bf16": float(logits[at, theirs] - logits[at, ours]),
        "gap_float32": gap,
        "gap_relative": gap / float(exact_logits.abs().max()),
    }


def show(results: dict) -> None:
    print(
        f"{results['checkpoint']} on {results['device']}: {results['prompts']} prompts, "
        f"{results['new_tokens']} tokens each"
    )
    print(f"{results['batch_invariance']}: {results['other_than_alone']} answers other than alone")
    show_partings("the engine", results["partings"])
    show_partings("generate() in one batch", results["partings_of_generate_batched"])
    print(f"compiled after warm-up: {', '.join(results['compilations']) or 'nothing'}")


def show_partings(who: str, partings: list[dict]) -> None:
    far, far_relative = (
        sum(parting[gap] >= NEAR_TIE for parting in partings) for gap in ("gap_float32", "gap_relative")
    )
    print(
        f"{who}: {len(partings)} part from generate(), {far} of them further than {NEAR_TIE} from a tie "
        f"in float32, {far_relative} relative to the logits"
    )
    for parting in partings:
        print(
            f"prompt {parting['prompt']:>3} at {parting['position']:>3}: "
            f"{parting['generate']:>6} or {parting['other']:>6}, "
            f"apart {parting['gap_bf16']:.4f} in bf16, {parting['gap_float32']:.4f} in float32, "
            f"{parting['gap_relative']:.4f} of the greatest logit"
        )


if __name__ == "__main__":
    main()
