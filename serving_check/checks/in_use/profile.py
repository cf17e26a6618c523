"""Whether the artifact's server keeps up under a profile of loads: requests with the lengths of a real
service.

Prompts and decoding are judged apart, since a fast part would hide a slow one. `evidence/profile_ratios.py`
works the figures out; this file puts them into words.
"""

from ...evidence.in_use import ProfileFigures
from ...evidence.profile_ratios import SHOWN_ERROR, PartRatio, profile_ratios
from ...evidence.verdict import CheckResult, CheckStatus
from ...profiles import PROFILES
from ...settings import Bounds

NAME = "profile of loads"
ERROR = 0.01
"""The chance that a part whose ratio is exactly the floor fails."""
HIDDEN = 0.5
"""The 95% interval of a part that passes lies above this share of the floor: blocks that scatter more would
hide a slow server. `tests/bench/gate/profile_characteristic.py` shows how often which server passes."""


def check_profile(name: str, figures: ProfileFigures | None, bounds: Bounds) -> CheckResult:
    """Fail if prompts or decoding are surely slower than the floor; inconclusive if nothing was read, or if
    blocks scatter so much that a part may have half of the floor's speed.

    name:    the profile that the user asked for
    figures: None if the profile was not sent
    """
    floor = bounds.throughput_floor
    bound = (
        f"at least {floor:.2f} of the baseline's prompt tok/s while some request has no token yet, and of "
        "its output tok/s while none waits for one"
    )
    if figures is None:
        return CheckResult(NAME, "inconclusive", f"{name}: nothing", bound, "no request of it was sent")
    ratios = profile_ratios(figures)
    parts = {"prompts": ratios.prompts, "decoding": ratios.decoding}
    slow = {part: of for part, of in parts.items() if of.limits(ERROR)[1] < floor}
    problems = []
    if "prompts" in slow:
        problems.append(
            f"prompts are read at {_words(ratios.prompts)} the baseline's speed: those over {ratios.half:,} "
            f"tokens wait {_number(ratios.longer)} its time for the first token, the others "
            f"{_number(ratios.shorter)}"
        )
    if "decoding" in slow:
        problems.append(f"while no prompt is read, tokens come at {_words(ratios.decoding)} its speed")
    hidden = [part for part, of in parts.items() if of.logs and of.limits(SHOWN_ERROR)[0] < HIDDEN * floor]
    status: CheckStatus = "pass"
    if problems:
        status = "fail"
    elif ratios.prompts.ratio is None:
        status = "inconclusive"
        problems.append("no block of requests was finished")
    elif hidden:
        status = "inconclusive"
        problems.append(
            f"the blocks scatter so much that {' and '.join(hidden)} may be {1 / HIDDEN:g} times slower than "
            "the floor allows. Validate again on a quieter machine"
        )
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{name}: " + ", ".join(f"{part} {_words(of)}" for part, of in parts.items()),
        bound=bound,
        reason="; ".join(problems) or described(figures),
        figures={
            "scale": figures.scale,
            **{f"{part}_ratio": of.ratio for part, of in parts.items()},
            **{f"{part}_ratio_low": of.shown[0] for part, of in parts.items()},
            **{f"{part}_ratio_high": of.shown[1] for part, of in parts.items()},
        },
    )


def described(figures: ProfileFigures) -> str:
    """Say what was sent: `54 requests with prompts of 16 to 4,142 tokens and answers of …, as in …`."""
    prompts, answers = (
        [length for block in lengths for length in block]
        for lengths in (figures.prompt_lengths, figures.answer_lengths)
    )
    scaled = (
        ""
        if figures.scale == 1
        else f"; all lengths are {figures.scale:.2g} times the trace's, as the context and the time allow"
    )
    return (
        f"{len(prompts)} requests with prompts of {min(prompts):,} to {max(prompts):,} tokens and answers of "
        f"{min(answers):,} to {max(answers):,}, mixed as in {PROFILES[figures.name].source}{scaled}"
    )


def _words(part: PartRatio) -> str:
    if part.ratio is None:
        return "not known"
    low, high = part.shown
    limits = f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""
    return f"{part.ratio:.2f}×{limits}"


def _number(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.2f}×"
