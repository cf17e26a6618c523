"""How often the check of sampling is right: sound servers that fail, and wrong temperatures that pass.

    python -P tests/bench/gate/sampling_characteristic.py --runs 200

No server: answers are drawn here, token after token, from the bundled model's own distributions in float32,
after prompts from its held-out text, at the temperatures and with the lengths of a load as in use. A verdict
has as many tokens as are scored in a run. Those of the wrong cases are drawn at another temperature than they
are judged by.

Exit status 1 where a bar is missed: over 0.5% of sound verdicts fail, or under 95% of those whose temperature
is off by 10%.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.model_loader.load_model import LoadedModel, load_model
from scalegate.serving_check.checks.sampling import SPREAD_LEVEL, SURPRISAL_LEVEL, check_sampling
from scalegate.serving_check.draws import draws_of
from scalegate.serving_check.evidence.in_use import AnswerInUse, Draws
from scalegate.serving_check.evidence.served_in_use import SAMPLED_TOKENS
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.quality import read_texts

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests" / "bench" / "results" / "gate" / "sampling_characteristic.json"
CHECKPOINT, TEXT = ROOT / "examples" / "qwen3-pycode-5m", ROOT / "examples" / "heldout.jsonl"
TEMPERATURES = (1.0, 0.7, 1.0, 1.3)
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 256
SHORTEST, LONGEST = 8, 200
TOGETHER = 64
"""Answers that are drawn together: their logits take up to 420 MB."""
CASES = {"sound": 1.0, "temperature 10% too low": 0.9, "temperature 10% too high": 1.1}
MOST_FALSE_ALARMS, LEAST_CAUGHT = 0.005, 0.95


@dataclass(frozen=True)
class Asked:
    """One answer to be drawn."""

    verdict: int
    temperature: float
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="verdicts of each case")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    loaded = load_model(CHECKPOINT, device="cpu", dtype=torch.float32, progress=False)
    text = loaded.tokenizer("\n".join(read_texts(TEXT)), add_special_tokens=False)["input_ids"]
    rows = []
    for case, factor in CASES.items():
        rows.append(row_of(case, verdicts(loaded, text, factor, options.runs, random.Random(case))))
        print(sentence(rows[-1]), flush=True)
        levels = {"surprisal": SURPRISAL_LEVEL, "spread": SPREAD_LEVEL}
        write_json(options.out, {"tokens": SAMPLED_TOKENS, "levels": levels, "rows": rows})
    missed = [sentence(row) for row in rows if not is_met(row)]
    if missed:
        sys.exit("bar missed: " + "; ".join(missed))


def verdicts(
    loaded: LoadedModel, text: Sequence[int], factor: float, runs: int, drawn: random.Random
) -> list[CheckResult]:
    """factor: the temperature that tokens are drawn at, over the one that was asked for"""
    asked = [answer for verdict in range(runs) for answer in answers_of(verdict, drawn)]
    # Of one temperature, and of similar lengths, so that those that are drawn together end together.
    asked.sort(key=lambda answer: (answer.temperature, answer.tokens))
    found: list[list[Draws]] = [[] for _ in range(runs)]
    for start in range(0, len(asked), TOGETHER):
        group = asked[start : start + TOGETHER]
        for answer, draws in zip(group, answered(loaded, text, group, factor, drawn), strict=True):
            found[answer.verdict].append(draws)
    return [check_sampling([as_scored(draws) for draws in verdict]) for verdict in found]


def answers_of(verdict: int, drawn: random.Random) -> list[Asked]:
    """As many as have the tokens that a run scores."""
    asked: list[Asked] = []
    while sum(answer.tokens for answer in asked) < SAMPLED_TOKENS:
        temperature = TEMPERATURES[len(asked) % len(TEMPERATURES)]
        asked.append(Asked(verdict, temperature, log_uniform(drawn, SHORTEST, LONGEST)))
    return asked


def log_uniform(drawn: random.Random, least: int, most: int) -> int:
    return round(math.exp(drawn.uniform(math.log(least), math.log(most))))


@torch.inference_mode()
def answered(
    loaded: LoadedModel, text: Sequence[int], group: Sequence[Asked], factor: float, drawn: random.Random
) -> list[Draws]:
    """Draw the answers of a group together, each after a prompt of its own, all of one length."""
    length = log_uniform(drawn, SHORTEST_PROMPT, LONGEST_PROMPT)
    starts = [drawn.randrange(len(text) - length) for _ in group]
    generator = torch.Generator().manual_seed(drawn.getrandbits(63))
    given = torch.tensor([text[start : start + length] for start in starts])
    temperatures = torch.tensor([[answer.temperature * factor] for answer in group])
    cache, logits, tokens = None, [], []
    for _ in range(max(answer.tokens for answer in group)):
        output = loaded.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits.append(output.logits[:, -1])
        given = (logits[-1] / temperatures).softmax(-1).multinomial(1, generator=generator)
        tokens.append(given[:, 0])
    all_logits, all_tokens = torch.stack(logits, dim=1), torch.stack(tokens, dim=1).tolist()
    return [
        draws_of(rows[: answer.tokens], chosen[: answer.tokens], answer.temperature, str(drawn.random()))
        for answer, rows, chosen in zip(group, all_logits, all_tokens, strict=True)
    ]


def as_scored(draws: Draws) -> AnswerInUse:
    return AnswerInUse("sampled", SHORTEST_PROMPT, draws.tokens, 1.0, 0, 1, 0, "", draws)


def row_of(case: str, results: Sequence[CheckResult]) -> dict[str, Any]:
    figures = [result.figures for result in results]
    z, spread = ([float(each[name] or 0) for each in figures] for name in ("z", "chi_square"))
    by = {
        name: sum(float(each[f"{name}_chance"] or 0) < level for each in figures) / len(figures)
        for name, level in (("surprisal", SURPRISAL_LEVEL), ("spread", SPREAD_LEVEL))
    }
    return {
        "case": case,
        "verdicts": len(results),
        "failed": sum(result.status == "fail" for result in results) / len(results),
        "failed_by": by,
        "z": {"mean": round(fmean(z), 3), "deviation": round(pstdev(z), 3)},
        "chi_square": {"mean": round(fmean(spread), 2), "deviation": round(pstdev(spread), 2)},
    }


def is_met(row: dict[str, Any]) -> bool:
    sound = CASES[row["case"]] == 1.0
    return bool(row["failed"] <= MOST_FALSE_ALARMS if sound else row["failed"] >= LEAST_CAUGHT)


def sentence(row: dict[str, Any]) -> str:
    z, spread = row["z"], row["chi_square"]
    return (
        f"{row['case']:26} {row['failed']:6.1%} of {row['verdicts']} verdicts fail   "
        f"z {z['mean']:+.2f} ± {z['deviation']:.2f}   χ² {spread['mean']:.1f} ± {spread['deviation']:.1f}"
    )


if __name__ == "__main__":
    main()
