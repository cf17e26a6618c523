"""The requests of a load as in use: arrival times, settings and prompts.

`open_loop.py` sends the requests.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .drawing import lengths_within, log_uniform, poisson_times, stratified
from .planned_request import Adjustments, Kind, PlannedRequest, Truncation
from .prompts import Slices

RARE: tuple[Kind, ...] = (
    "chat",
    "stop",
    "end",
    "logprobs",
    "adjusted",
    "repetition",
    "choices",
    "truncated",
    "aborted",
)
IN_CHATS: tuple[Kind, ...] = (
    "stop",
    "end",
    "logprobs",
    "adjusted",
    "repetition",
    "choices",
    "truncated",
)
"""The kinds of which one request is a chat."""
RARE_SHARE = 0.05
"""The share of requests of each of these kinds."""
SAMPLED_SHARE = 1 / 3
SHARING = 3
"""Number of requests that share one prefix."""
SHARING_SHARE = 0.25
"""The share of greedy requests that share a prefix with others."""
LEAST_GREEDY = 1 + SHARING
"""The least number of greedy requests: one with the longest prompt, and a group that shares a prefix."""
LEAST_PROMPT = 16
LONGEST_SHARE = 1 / 3
"""The longest prompt's largest share of all prompt tokens, so that the other lengths can still vary."""
LEAST_LONG_ANSWER = 64
"""The least number of tokens in the answer to the longest prompt: they show that long context."""
LEAST_ANSWER, MOST_ANSWER = 8, 200
MEAN_ANSWER = (MOST_ANSWER - LEAST_ANSWER) / math.log(MOST_ANSWER / LEAST_ANSWER)
"""Tokens of an answer on average, 59.6: the mean of a log-uniform distribution."""
TEMPERATURES = (1.0, 0.7, 1.0, 1.3)
"""The temperatures of sampled requests, in turn."""
TEMPERATURES_OF_CHOICES = (1.0, 0.3)
"""The same for kind `choices`. At the higher one choices with one seed show, since others differ. At the
lower one a choice that answers another prompt shows, since its tokens are far less likely."""
SEEDS_AGAIN = 3
"""Number of sampled requests with one prompt."""
STOP_CHARACTERS = 8
LEAST_TO_STOP = 32
"""The least limit of tokens for an answer with a stop string, which comes from the middle of a canary
text."""
SPARE = 8
"""How many tokens an answer may have after the end-of-sequence token is due, to show that it did not end."""
CHOICES = 3
"""How many answers a request of kind `choices` asks for."""
PRESENCE_PENALTY, FREQUENCY_PENALTY = 1.5, 1.0
"""The penalties of kind `adjusted`: so large that it shows if a server applies only one of them."""
BIAS = -5.0
"""The logit bias of kind `adjusted`."""
BIASED = 8
"""How many tokens have that bias: the most frequent ones of the text, which answers would have without it."""
REPETITION_PENALTY = 1.3
"""The penalty of kind `repetition`: logits above 0 are divided by it, others are multiplied."""
LEAST_ADJUSTED = 64
"""The least number of tokens of an answer of kind `adjusted` or `repetition`: some must come again to be
penalized."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for a part of a character."""
TURNS: tuple[tuple[str, ...], ...] = (("user",), ("user", "assistant", "user"))
"""Roles of a conversation that every template takes."""
WITH_SYSTEM: tuple[tuple[str, ...], ...] = (("system", "user"), ("system", "user", "assistant", "user"))
"""Roles that some templates refuse."""
SAMPLED_CHATS_SHARE = 0.25
"""The share of sampled requests that are chats."""
TEXTS = 2
"""How many completions of a block have their prompt as text."""
LEAST_MESSAGE = 4
"""The least number of tokens in a message."""
MOST_AGAIN = 4
"""The most tokens that one token's text gives when it is tokenized again: a character cut in two gives
three."""
TRUNCATIONS = (Truncation(top_k=2), Truncation(top_p=0.5), Truncation(min_p=0.3))
"""The settings of kind `truncated`, in turn: each leaves out so much that it shows if a server ignores it."""


@dataclass(frozen=True)
class UseShape:
    """The sources of the requests of one block, besides a seed and texts."""

    seconds: float
    """The seconds within which all requests arrive."""
    first_rate: float
    """Requests per second at the beginning; from there the rate changes linearly."""
    last_rate: float
    """Requests per second at the end."""
    prompt_tokens: int
    """The most tokens of all prompts together."""
    longest_prompt: int
    """The most tokens of a prompt."""
    context: int
    """The most tokens of a prompt and its answer."""
    kinds: frozenset[Kind]
    """The kinds of requests that the servers accept."""
    kinds_in_chats: frozenset[Kind] = frozenset()
    """Those that they accept in chats as well."""
    end_token: int | None = None
    """The model's end-of-sequence token; without one no answer ends by it."""
    long_prompt: int = 0
    """The number of tokens of the longest prompt, even if it is more than `prompt_tokens` allows."""


@dataclass(frozen=True)
class Conversations:
    """The means to make chat requests."""

    decode: Callable[[Sequence[int]], str]
    encode: Callable[[Sequence[tuple[str, str]]], Sequence[int]]
    """The prompt that the chat template makes of roles and contents, up to where the answer begins."""
    turns: tuple[tuple[str, ...], ...] = TURNS
    """The sequences of roles that the template accepts."""
    encode_text: Callable[[str], Sequence[int]] | None = None
    """The prompt that a text is, with the special tokens that the tokenizer adds; None to send no texts."""


def plan_requests(
    seed: int,
    shape: UseShape,
    text: Sequence[int],
    answered: Sequence[tuple[Sequence[int], str]] = (),
    conversations: Conversations | None = None,
) -> list[PlannedRequest]:
    """Return the requests of one block, by arrival; the same arguments give the same requests.

    The block has at least two requests of each possible kind, however few arrive: one of the two is not
    streamed. Lengths of prompts and answers are log-uniform; one prompt is as long as the budget allows.

    text: token ids that prompts are cut from
    answered: prompts with the greedy answers that the artifact's server gave; stop strings are cut from these
    conversations: None without a chat template; the plan then has no chats
    """
    generator = random.Random(seed)
    stops = [(tuple(prompt), stop) for prompt, answer in answered if (stop := stop_string(answer))]
    askable = _kinds(shape, bool(stops), conversations)
    arrivals = _arrivals(generator, shape, least=fewest_requests(askable))
    counts = dict(_counts(askable, len(arrivals), len(stops)))
    most = len(text) // 2  # of so many tokens, half of all different beginnings are left
    longest = _longest(shape, most)
    slices = Slices(generator, text, LEAST_PROMPT, [prompt for prompt, _ in stops])
    requests: list[PlannedRequest] = []
    if conversations is not None and counts["chat"]:
        kinds_of_chats = _kinds_of_chats(counts, askable & shape.kinds_in_chats)
        budget = shape.prompt_tokens * len(kinds_of_chats) // len(arrivals)
        lengths = lengths_within(budget, generator, len(kinds_of_chats), LEAST_PROMPT, longest)
        chats = [_chat(generator, slices, conversations, length, _most(shape)) for length in lengths]
        frequent_text = _frequent_text(text, conversations)
        requests += [
            replace(chat, kind=kind, stop=frequent_text if kind == "stop" else None)
            for chat, kind in zip(chats, kinds_of_chats, strict=True)
        ]
        counts = {kind: count - kinds_of_chats.count(kind) for kind, count in counts.items()}
    requests += [
        PlannedRequest(0.0, "stop", prompt, 0, stop=stop)
        for prompt, stop in generator.sample(stops, counts["stop"])
    ]
    left = shape.prompt_tokens - sum(len(request.prompt) for request in requests)
    long_prompt = min(shape.long_prompt, shape.context - LEAST_LONG_ANSWER, most)
    requests += _completions(generator, slices, counts, longest, left, long_prompt)
    adjustments = _adjustments(text)
    requests = [replace(request, adjustments=adjustments.get(request.kind)) for request in requests]
    generator.shuffle(requests)
    answers = log_uniform(stratified(generator, len(requests)), LEAST_ANSWER, MOST_ANSWER + 1)
    temperatures: dict[Kind, Iterator[float]] = {
        "sampled": itertools.cycle(TEMPERATURES),
        "choices": itertools.cycle(TEMPERATURES_OF_CHOICES),
    }
    planned = _with_seeds_again(
        [
            _with_answer(generator, replace(request, at=at), answer, shape, temperatures)
            for at, request, answer in zip(arrivals, requests, answers, strict=True)
        ]
    )
    planned = _with_texts(generator, _truncated(planned, seed), conversations, shape.context)
    return _with_unstreamed(generator, planned, of_chats=bool(seed % 2))


def fewest_requests(kinds: Collection[Kind]) -> int:
    """Return the least number of requests in a block."""
    return 2 * len(set(kinds) - {"greedy"}) + LEAST_GREEDY


def stop_string(answer: str) -> str | None:
    """Return a few characters from the middle of an answer; None if they would not be found for certain."""
    middle = len(answer) // 2
    stop = answer[middle : middle + STOP_CHARACTERS]
    broken = REPLACEMENT in stop
    return None if broken or len(stop) < STOP_CHARACTERS or not stop.strip() else stop


def _kinds(shape: UseShape, has_stops: bool, conversations: Conversations | None) -> frozenset[Kind]:
    """Return the kinds that can be requested."""
    missing: set[Kind] = set()
    if not has_stops:
        missing.add("stop")
    if shape.end_token is None:
        missing.add("end")
    if conversations is None or not _has_room(shape, conversations):
        missing.add("chat")
    wanted: set[Kind] = {"greedy", *shape.kinds}
    return frozenset(wanted - missing)


def _has_room(shape: UseShape, conversations: Conversations) -> bool:
    """Say whether a short conversation of any roles and an answer fit in the context."""
    return all(
        _overhead(conversations, roles) + len(roles) * LEAST_MESSAGE * MOST_AGAIN <= _most(shape)
        for roles in conversations.turns
    )


def _most(shape: UseShape) -> int:
    """Return the most tokens of a prompt that leaves room for an answer in the context."""
    return shape.context - LEAST_ANSWER - SPARE


def _arrivals(generator: random.Random, shape: UseShape, least: int) -> list[float]:
    """Return when requests arrive, in order: `least` of them or more.

    If the budget does not allow all prompts at their shortest, times are left out at random.
    """
    times = poisson_times(generator, shape.seconds, shape.first_rate, shape.last_rate, least)
    most = max(least, int(shape.prompt_tokens * (1 - LONGEST_SHARE)) // LEAST_PROMPT)
    return sorted(generator.sample(times, min(most, len(times))))


def _kinds_of_chats(counts: Mapping[Kind, int], in_chats: Collection[Kind]) -> list[Kind]:
    """Return the kind of each chat.

    counts: how many requests of each kind there are. in_chats: the kinds of which one is a chat
    """
    sampled = min(counts["sampled"] - SEEDS_AGAIN, round(SAMPLED_CHATS_SHARE * counts["sampled"]))
    kinds: list[Kind] = ["chat" for _ in range(counts["chat"])]
    kinds += ["sampled" for _ in range(sampled)]
    return kinds + [kind for kind in IN_CHATS if kind in in_chats and counts[kind]]


def _adjustments(text: Sequence[int]) -> dict[Kind, Adjustments]:
    frequent = tuple((token, BIAS) for token, _ in Counter(text).most_common(BIASED))
    return {
        "adjusted": Adjustments(PRESENCE_PENALTY, FREQUENCY_PENALTY, frequent),
        "repetition": Adjustments(0.0, 0.0, (), REPETITION_PENALTY),
    }


def _frequent_text(text: Sequence[int], conversations: Conversations) -> str:
    """Return the text of the most frequent token that is no white space."""
    texts = (conversations.decode([token]) for token, _ in Counter(text).most_common())
    return next((text for text in texts if text.strip() and REPLACEMENT not in text), ".")


def _with_unstreamed(
    generator: random.Random, requests: Sequence[PlannedRequest], of_chats: bool
) -> list[PlannedRequest]:
    """Return the requests, of which one of each kind is not streamed, never the one with the longest prompt.

    of_chats: whether to choose a chat, if there is one of the kind; otherwise a completion is chosen, if
              there is one
    """
    longest = max(len(request.prompt) for request in requests)
    by_kind: dict[Kind, list[int]] = {}
    for index, request in enumerate(requests):
        if request.kind != "aborted" and len(request.prompt) < longest:
            by_kind.setdefault(request.kind, []).append(index)
    chosen = {
        generator.choice([at for at in of_kind if bool(requests[at].messages) == of_chats] or of_kind)
        for of_kind in by_kind.values()
    }
    return [replace(request, is_streamed=at not in chosen) for at, request in enumerate(requests)]


def _truncated(requests: Sequence[PlannedRequest], first: int) -> list[PlannedRequest]:
    """Return the requests, those of kind `truncated` with each truncation in turn.

    first: which one is the first: each block begins with another
    """
    turn = itertools.count(first)
    return [
        replace(request, truncation=TRUNCATIONS[next(turn) % len(TRUNCATIONS)])
        if request.kind == "truncated"
        else request
        for request in requests
    ]


def _with_texts(
    generator: random.Random,
    requests: Sequence[PlannedRequest],
    conversations: Conversations | None,
    context: int,
) -> list[PlannedRequest]:
    """Return the requests, of which a few greedy completions have their prompts as text, none the longest."""
    if conversations is None or conversations.encode_text is None:
        return list(requests)
    changed = list(requests)
    greedy = [at for at, request in enumerate(requests) if request.kind == "greedy"]
    shortest = sorted(greedy, key=lambda at: len(requests[at].prompt))[: max(1, len(greedy) // 2)]
    for at in generator.sample(shortest, min(TEXTS, len(shortest))):
        text = conversations.decode(requests[at].prompt)
        prompt = tuple(conversations.encode_text(text))
        if text.strip() and prompt and len(prompt) + requests[at].output_len <= context:
            changed[at] = replace(requests[at], prompt=prompt, text=text)
    return changed


def _counts(kinds: frozenset[Kind], requests: int, stops: int) -> Mapping[Kind, int]:
    """Return the number of requests of each kind."""
    others = [kind for kind in RARE if kind in kinds and kind != "aborted"]
    affordable = (requests - LEAST_GREEDY - SEEDS_AGAIN - len(others)) // (len(others) + 1)
    rare = max(1, min(round(RARE_SHARE * requests), affordable))
    counts: dict[Kind, int] = {
        kind: 0 if kind not in kinds else rare if kind == "aborted" else rare + 1 for kind in RARE
    }
    counts["stop"] = min(counts["stop"], stops)
    left = requests - sum(counts.values()) - LEAST_GREEDY
    counts["sampled"] = max(1, min(round(SAMPLED_SHARE * requests), left)) if "sampled" in kinds else 0
    counts["greedy"] = requests - sum(counts.values())
    return counts


def _longest(shape: UseShape, most: int) -> int:
    """Return the number of tokens of the longest prompt that the budget allows, at most `most`."""
    affordable = max(LEAST_PROMPT, int(shape.prompt_tokens * LONGEST_SHARE))
    return min(shape.longest_prompt, affordable, max(LEAST_PROMPT, shape.context - LEAST_LONG_ANSWER), most)


def _completions(
    generator: random.Random,
    slices: Slices,
    counts: Mapping[Kind, int],
    longest: int,
    budget: int,
    long_prompt: int,
) -> list[PlannedRequest]:
    """Return all requests except chats and requests with a stop string; the first request has the longest
    prompt, and a longer answer.

    long_prompt: tokens of the longest prompt that do not count towards the budget
    """
    others: list[Kind] = ["sampled", *(kind for kind in RARE if kind not in ("chat", "stop"))]
    count = counts["greedy"] - 1 + sum(counts[kind] for kind in others)
    longest = min(longest, max(LEAST_PROMPT, budget - count * LEAST_PROMPT))
    first = slices.cut(max(longest, long_prompt))
    requests = [replace(_completion("greedy", first), output_len=LEAST_LONG_ANSWER)]
    lengths = iter(lengths_within(budget - longest, generator, count, LEAST_PROMPT, longest))
    greedy = sorted(next(lengths) for _ in range(counts["greedy"] - 1))
    groups = [greedy[start : start + SHARING] for start in range(0, len(greedy) - SHARING + 1, SHARING)]
    sharing = max(1, round(SHARING_SHARE * len(greedy) / SHARING))
    chosen = set(generator.sample(range(len(groups)), sharing))
    for index, group in enumerate(groups):
        if index in chosen:
            prompts = _with_a_prefix(generator, slices, min(group))
        else:
            prompts = [slices.cut(length) for length in group]
        requests += [_completion("greedy", prompt) for prompt in prompts]
    requests += [_completion("greedy", slices.cut(length)) for length in greedy[len(groups) * SHARING :]]
    for kind in others:
        requests += [_completion(kind, slices.cut(next(lengths))) for _ in range(counts[kind])]
    return requests


def _with_a_prefix(generator: random.Random, slices: Slices, length: int) -> list[list[int]]:
    """Return prompts of `length` tokens that share at least half of their tokens as a prefix."""
    shared = generator.randint((length + 1) // 2, length - 1)
    first = slices.cut(length)
    others = [first[:shared] + slices.any(length - shared) for _ in range(SHARING - 1)]
    return [first, *others]


def _chat(
    generator: random.Random, slices: Slices, conversations: Conversations, length: int, most: int
) -> PlannedRequest:
    """Return a chat whose prompt has about `length` tokens, never more than `most`."""
    roles = generator.choice(conversations.turns)
    each = (length - _overhead(conversations, roles)) // len(roles)
    while True:
        each = max(each, LEAST_MESSAGE)
        messages = tuple((role, conversations.decode(slices.any(each))) for role in roles)
        prompt = tuple(conversations.encode(messages))
        if len(prompt) <= most or each == LEAST_MESSAGE:
            return PlannedRequest(0.0, "chat", prompt, 0, messages)
        # Text that is cut within a word or a character may have more tokens when it is tokenized again.
        each //= 2


def _overhead(conversations: Conversations, roles: Sequence[str]) -> int:
    """Return the number of tokens that a chat template adds to the contents."""
    return len(conversations.encode([(role, ".") for role in roles]))


def _completion(kind: Kind, prompt: Sequence[int]) -> PlannedRequest:
    return PlannedRequest(0.0, kind, tuple(prompt), 0)


def _with_seeds_again(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Repeat the shortest sampled prompt three times: with one seed at the beginning and at the end, beside
    the fewest requests and beside the most, and in between with another seed. Nothing is repeated if there
    are fewer sampled completions; chats are left out."""
    sampled = [
        index for index, request in enumerate(requests) if request.kind == "sampled" and not request.messages
    ]
    shortest = sorted(sampled, key=lambda index: len(requests[index].prompt))[:SEEDS_AGAIN]
    again = list(requests)
    if len(shortest) == SEEDS_AGAIN:
        repeated = requests[shortest[0]]
        others = [requests[index] for index in sampled if index not in shortest]
        others.insert(len(others) // 2, replace(repeated, seed=requests[shortest[1]].seed))
        for index, request in zip(sampled, [repeated, *others, repeated], strict=True):
            again[index] = replace(request, at=requests[index].at)
    return again


def _with_answer(
    generator: random.Random,
    request: PlannedRequest,
    answer: int,
    shape: UseShape,
    temperatures: Mapping[Kind, Iterator[float]],
) -> PlannedRequest:
    """Return the request with the settings of its kind. The request's answer has `answer` tokens, or as many
    as the request already has if they are more and the context holds them."""
    room = shape.context - len(request.prompt)
    tokens = min(max(answer, request.output_len), room)
    if request.kind == "sampled":
        temperature, seed = next(temperatures["sampled"]), generator.getrandbits(31)
        return replace(request, output_len=tokens, temperature=temperature, seed=seed)
    if request.kind == "choices":
        # As many tokens in all as of another request, of which there is no end either.
        each = min(max(LEAST_ANSWER, answer // CHOICES), room)
        temperature, seed = next(temperatures["choices"]), generator.getrandbits(31)
        return replace(request, output_len=each, temperature=temperature, seed=seed, choices=CHOICES)
    if request.kind == "truncated":
        # Where the temperature is 1 it does not matter whether it is applied before or after.
        return replace(request, output_len=tokens, temperature=1.0, seed=generator.getrandbits(31))
    if request.kind == "stop":
        return replace(request, output_len=min(max(answer, LEAST_TO_STOP), room))
    if request.kind in ("adjusted", "repetition"):
        return replace(request, output_len=min(max(answer, LEAST_ADJUSTED), room))
    if request.kind == "end":
        tokens = min(answer, room - SPARE)
        return replace(request, output_len=tokens + SPARE, end_token=shape.end_token, min_tokens=tokens)
    if request.kind == "aborted":
        return replace(request, output_len=tokens, abort_after=generator.randint(1, tokens // 2))
    return replace(request, output_len=tokens)
