"""How often the check of sampling is right: sound servers that fail, and wrong temperatures that pass.

    python -P tests/bench/gate/sampling_characteristic.py --runs 200

No server: the bundled model writes answers in float32, token after token, after prompts from its held-out
text, at the temperatures and with the lengths of a load as in use. A verdict has as many tokens as a run
scores at most, or fewer, as a load of few requests gives, and the answers of requests for three. From the
distributions of one verdict's answers the tokens of ten are drawn, for each case: at the temperature that
they are judged by, and at others. In one more case the second and the third answer to each request for three
are to another prompt.

Exit status 1 where a bar is missed: over 0.5% of sound verdicts fail, or under 95% of the others.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.model_loader.load_model import LoadedModel, load_model
from scalegate.serving_check.checks.in_use.sampling import SPREAD_LEVEL, SURPRISAL_LEVEL, check_sampling
from scalegate.serving_check.draws import draws_of
from scalegate.serving_check.evidence.in_use import AnswerInUse, Draws
from scalegate.serving_check.evidence.served_in_use import SAMPLED_TOKENS
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.quality import read_texts
from scalegate.serving_check.workload.use_plan import CHOICES, LEAST_ANSWER, TEMPERATURES_OF_CHOICES
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests" / "bench" / "results" / "gate" / "sampling_characteristic.json"
CHECKPOINT, TEXT = ROOT / "examples" / "qwen3-pycode-5m", ROOT / "examples" / "heldout.jsonl"
TEMPERATURES = (1.0, 0.7, 1.0, 1.3)
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 256
SHORTEST, LONGEST = 8, 200
TOKENS = (SAMPLED_TOKENS, 1500)
"""Of a verdict. The release policy's load has given 2,100 to 2,500."""
TOGETHER = 64
"""Answers that are written together: their logits take up to 420 MB."""
DRAWN_FROM = 10
"""Verdicts of each case whose tokens are drawn from the answers of one."""
SOUND = "sound"
CASES = {SOUND: 1.0, "temperature 10% too low": 0.9, "temperature 10% too high": 1.1}
CROSSED = "further choices to another prompt"
REQUESTS_FOR_SEVERAL = 9
"""Of a verdict: three a block."""
CHAT_EVERY, UNSTREAMED_EVERY = 4, 16
"""Of the other answers, as in a load as in use."""
MOST_FALSE_ALARMS, LEAST_CAUGHT = 0.005, 0.95


@dataclass(frozen=True)
class PlannedAnswer:
    """One answer to be written."""

    verdict: int
    temperature: float
    tokens: int
    choice: int | None = None
    is_chat: bool = False
    is_streamed: bool = True
    is_crossed: bool = False
    """Written after another prompt than the one that it is judged by."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help=f"verdicts of each case, in {DRAWN_FROM}s")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a verdict")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    loaded = load_model(CHECKPOINT, device="cpu", dtype=torch.float32, progress=False)
    text = loaded.tokenizer("\n".join(read_texts(TEXT)), add_special_tokens=False)["input_ids"]
    levels = {"surprisal": SURPRISAL_LEVEL, "spread": SPREAD_LEVEL}
    rows = []
    for tokens in options.tokens:
        found = simulated(loaded, text, math.ceil(options.runs / DRAWN_FROM), tokens)
        rows += [{"tokens": tokens} | row_of(case, results) for case, results in found.items()]
        write_json(options.out, {"levels": levels, "rows": rows})
    print("\n".join(map(sentence, rows)))
    missed = [sentence(row) for row in rows if not is_met(row)]
    if missed:
        sys.exit("bar missed: " + "; ".join(missed))


def simulated(
    loaded: LoadedModel, text: Sequence[int], written: int, tokens: int
) -> dict[str, list[CheckResult]]:
    """By case: the verdicts that are drawn from the answers of so many, which have so many tokens each."""
    drawn = random.Random(0)
    asked = [answer for verdict in range(written) for answer in answers_of(verdict, drawn, tokens)]
    # Of one temperature, and of similar lengths, so that those that are written together end together.
    asked.sort(key=lambda answer: (answer.temperature, answer.tokens))
    found: dict[tuple[str, int, int], list[AnswerInUse]] = {
        (case, verdict, again): []
        for case in (*CASES, CROSSED)
        for verdict in range(written)
        for again in range(DRAWN_FROM)
    }
    generator = torch.Generator().manual_seed(0)
    crossed, right = ([answer for answer in asked if answer.is_crossed == which] for which in (True, False))
    groups = [
        some[start : start + TOGETHER] for some in (right, crossed) for start in range(0, len(some), TOGETHER)
    ]
    for group in tqdm(groups):
        logits, said = written_logits(loaded, text, group, drawn, generator)
        for answer, rows, tokens in zip(group, logits, said.tolist(), strict=True):
            if answer.is_crossed:
                scored = draws_of(
                    rows[: answer.tokens], tokens[: answer.tokens], answer.temperature, str(answer)
                )
                for again in range(DRAWN_FROM):
                    found[CROSSED, answer.verdict, again].append(as_scored(answer, scored))
                continue
            for case, factor in CASES.items():
                chances = (rows[: answer.tokens] / (answer.temperature * factor)).softmax(-1)
                draws = chances.multinomial(DRAWN_FROM, replacement=True, generator=generator)
                for again, redrawn in enumerate(draws.T.tolist()):
                    name = f"{case} {answer} {again} {drawn.random()}"
                    scored = draws_of(rows[: answer.tokens], redrawn, answer.temperature, name)
                    found[case, answer.verdict, again].append(as_scored(answer, scored))
                    if case == SOUND and not answer.choice:
                        found[CROSSED, answer.verdict, again].append(as_scored(answer, scored))
    return {
        case: [check_sampling(answers) for (of, *_), answers in found.items() if of == case]
        for case in (*CASES, CROSSED)
    }


def answers_of(verdict: int, drawn: random.Random, tokens: int) -> list[PlannedAnswer]:
    """As many as have so many tokens, and those of requests for several."""
    asked: list[PlannedAnswer] = []
    while sum(answer.tokens for answer in asked) < tokens:
        index = len(asked)
        asked.append(
            PlannedAnswer(
                verdict,
                TEMPERATURES[index % len(TEMPERATURES)],
                log_uniform(drawn, SHORTEST, LONGEST),
                is_chat=index % CHAT_EVERY == 1,
                is_streamed=index % UNSTREAMED_EVERY != 2,
            )
        )
    for index in range(REQUESTS_FOR_SEVERAL):
        temperature = TEMPERATURES_OF_CHOICES[index % len(TEMPERATURES_OF_CHOICES)]
        length = max(LEAST_ANSWER, log_uniform(drawn, SHORTEST, LONGEST) // CHOICES)
        planned = PlannedAnswer(
            verdict, temperature, length, 0, is_chat=index % 3 == 1, is_streamed=index % 3 != 2
        )
        asked += [replace(planned, choice=choice) for choice in range(CHOICES)]
        asked += [replace(planned, choice=choice, is_crossed=True) for choice in range(1, CHOICES)]
    return asked


def log_uniform(drawn: random.Random, least: int, most: int) -> int:
    return round(math.exp(drawn.uniform(math.log(least), math.log(most))))


@torch.inference_mode()
def written_logits(
    loaded: LoadedModel,
    text: Sequence[int],
    group: Sequence[PlannedAnswer],
    drawn: random.Random,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Logits [answers, longest, V] while they are written, each after a prompt of its own of one length, and
    the tokens [answers, longest]. Tokens of crossed answers follow another prompt than their logits do.
    """
    length = log_uniform(drawn, SHORTEST_PROMPT, LONGEST_PROMPT)
    starts = [drawn.randrange(len(text) - length) for _ in group]
    given = torch.tensor([text[start : start + length] for start in starts])
    temperatures = torch.tensor([[answer.temperature] for answer in group])
    if group[-1].is_crossed:
        group = [replace(answer, is_crossed=False) for answer in group]
        _, said = written_logits(loaded, text, group, drawn, generator)
        output = loaded.model(input_ids=torch.cat([given, said], 1), logits_to_keep=said.shape[1] + 1)
        return output.logits[:, :-1], said
    cache, logits, said = None, [], []
    for _ in range(max(answer.tokens for answer in group)):
        output = loaded.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits.append(output.logits[:, -1])
        given = (logits[-1] / temperatures).softmax(-1).multinomial(1, generator=generator)
        said.append(given)
    return torch.stack(logits, dim=1), torch.cat(said, 1)


def as_scored(asked: PlannedAnswer, draws: Draws) -> AnswerInUse:
    return AnswerInUse(
        "sampled",
        SHORTEST_PROMPT,
        draws.tokens,
        1.0,
        0,
        1,
        0,
        "",
        draws,
        choice=asked.choice,
        is_chat=asked.is_chat,
        is_streamed=asked.is_streamed,
    )


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
    is_sound = row["case"] == SOUND
    return bool(row["failed"] <= MOST_FALSE_ALARMS if is_sound else row["failed"] >= LEAST_CAUGHT)


def sentence(row: dict[str, Any]) -> str:
    z, spread = row["z"], row["chi_square"]
    return (
        f"{row['tokens']} tokens, {row['case']:34} {row['failed']:6.1%} of {row['verdicts']} verdicts fail   "
        f"z {z['mean']:+.2f} ± {z['deviation']:.2f}   χ² {spread['mean']:.1f} ± {spread['deviation']:.1f}"
    )


if __name__ == "__main__":
    main()
