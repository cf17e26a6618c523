"""The table of `engine.py`: speeds of a side and their ratios to the first side, and how answers differ."""

import statistics
from typing import Any

Row = dict[str, Any]


def print_speeds(length: str, work: tuple[int, int, list[int]], first: list[Row], other: list[Row]) -> None:
    """Print the better of each side's turns. `decode` is the ratio without the time to the first token."""
    _, answer, numbers = work
    for n in numbers:
        found = [
            [row for row in side if (row.get("length"), row.get("n")) == (length, n)]
            for side in (first, other)
        ]
        if all(found):
            speed = [max(row["tok_s"] for row in side) for side in found]
            begins = [min(row["first_s"] for row in side) * 1e3 for side in found]
            step = [
                min(n * answer / row["tok_s"] - row["first_s"] for row in side) / (answer - 1) * 1e3
                for side in found
            ]
            print(
                f"  {length} N={n}: {speed[0]:.0f} -> {speed[1]:.0f} tok/s, {speed[1] / speed[0]:.3f}x; "
                f"decode {step[0]:.2f} -> {step[1]:.2f} ms, {step[0] / step[1]:.3f}x; "
                f"first token {begins[0]:.0f} -> {begins[1]:.0f} ms"
            )


def print_rest(name: str, compiled: list[str], first: list[Row], other: list[Row]) -> None:
    """Print what became of mixed traffic, and how far log-probabilities differ."""
    for row in other:
        if "requests" in row:
            print(
                f"  {row['requests']} requests of mixed lengths in {row['seconds']:.0f} s: "
                f"{row['whole']} whole; compiled: {compiled or 'nothing'}"
            )
    for side, rows in (("first", first), (name, other)):
        for row in rows:
            if again := row.get("largest_when_scored_again"):
                told = " ".join(f"{each:.3f}" for each in again)
                print(f"  {side}: scored again, the largest difference of a log-probability: {told}")
    scores = [next((row["logprobs"] for row in rows if "logprobs" in row), None) for rows in (first, other)]
    if all(scores):
        apart = [b - a for a, b in zip(*scores, strict=True)]
        nats = [-statistics.fmean(each) for each in scores]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        print(
            f"  log-probabilities of {len(apart)} tokens: mean difference "
            f"{statistics.fmean(map(abs, apart)):.4f}, largest {max(map(abs, apart)):.3f}; "
            f"nats {nats[0]:.4f} and {nats[1]:.4f}, {nats[1] - nats[0]:+.4f} (standard error {error:.4f})"
        )
