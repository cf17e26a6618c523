"""Whether each answer of a load as in use is what its request asked for: its prompt, length, end and text.

The likelihood of an answer's tokens needs the models' logits, and is judged elsewhere.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ..workload.answers import Alternatives, Answer, Envelope
from ..workload.open_loop import LOGPROBS, OpenLoopResult
from ..workload.planned_request import PlannedRequest
from ..workload.spec import RequestRecord
from .answer_figures import TokenText, bare

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LEAST_WITH_ALTERNATIVES = 0.5
"""Share of the tokens that must have as many alternatives as were asked for."""
MOST_TIED, FEWEST_TIED = 0.1, 3
"""Share of the tokens that may not be among their alternatives, and so many of a short answer: of several
with one logit, or with one text, a server may tell others."""
BEGINNING = 4
"""How many tokens, or characters, of two answers with one seed are compared. Other requests in the batch
change how a request's logits are rounded, by about 0.01 nats in bfloat16, so at most 1 of 100 tokens is drawn
differently. Two different seeds seldom draw four equal tokens."""


CLOCK_ERROR_S = 0.2
"""Seconds by which the difference of two clocks may change in a block of some seconds: an adjusted clock."""
MOST_CLOCK_S = 86_400.0
"""Seconds by which the clocks of two machines may differ: a day, for one that is in another time zone."""
SHOWN = 3


def not_as_asked(result: OpenLoopResult, tokenizer: TokenText) -> tuple[str, ...]:
    """Yield, for each wrong answer, its kind and its error.

    Requests that failed, or whose client went away, are left out.
    """
    found = []
    for planned, record in zip(result.requests, result.records, strict=True):
        if record.error is None and record.answer is not None and planned.kind != "aborted":
            problems = list(_problems(planned, record, record.answer, tokenizer))
            if problems:
                found.append(f"{planned.full_kind}: {'; '.join(problems)}")
            found += _of_head(record, record.answer, result.model)
            if record.envelope is not None:
                found += _of_envelope(planned, record.envelope)
    return (*found, *_ids_told_twice(result), *_created_off(result))


def seeds_kept(result: OpenLoopResult) -> tuple[bool, ...]:
    """Return, for each sampled answer with an earlier answer's prompt and seed, whether both begin alike."""
    first: dict[tuple[object, ...], Sequence[int] | str] = {}
    kept = []
    for planned, record in zip(result.requests, result.records, strict=True):
        if planned.kind == "sampled" and record.error is None and record.answer is not None:
            answer = record.answer
            said = answer.text[:BEGINNING] if answer.token_ids is None else list(answer.token_ids[:BEGINNING])
            key = (planned.prompt, planned.temperature, planned.seed)
            if key in first:
                kept.append(said == first[key])
            first.setdefault(key, said)
    return tuple(kept)


def _of_head(record: RequestRecord, answer: Answer, model: str | None) -> Iterator[str]:
    """Check a response in ways that do not depend on the kind of request.

    model: the model's name in the request
    """
    if None not in (answer.model, model) and answer.model != model:
        yield f"name of the model: {model!r} was asked, and the answer says it is of {answer.model!r}"
    prompt, output = record.prompt_tokens, record.output_tokens
    if record.total_tokens not in (None, prompt + output):
        yield (
            f"usage: it says {record.total_tokens} tokens in all, with {prompt} of the prompt and {output} "
            "of the answer"
        )


def _of_envelope(planned: PlannedRequest, envelope: Envelope) -> Iterator[str]:
    """Check what an answer says beside its text; what all answers say together is checked elsewhere."""
    if len(envelope.ids) != 1 or not envelope.ids[0]:
        yield f"id: one answer has {_told(envelope.ids)}"
    of_chat = "chat.completion.chunk" if planned.is_streamed else "chat.completion"
    name = of_chat if planned.messages else "text_completion"
    if envelope.objects != (name,):
        yield f"object: an answer is {_told(envelope.objects)}, it should be {name!r}"
    if len(envelope.created) != 1 or envelope.created[0] is None:
        yield f"created: one answer has {_told(envelope.created)}"
    if not set(envelope.indexes) <= set(range(planned.choices)):
        told = _told(envelope.indexes)
        yield f"choices: {planned.choices} were asked for, and there are those of index {told}"
    if planned.messages and set(envelope.roles) != {"assistant"}:
        yield f"role: a chat's answer begins with {_told(envelope.roles)}"


def _told(values: Sequence[object]) -> str:
    shown = ", ".join(repr(value) for value in values[:SHOWN]) or "none"
    return shown + (f" and {len(values) - SHOWN} more" if len(values) > SHOWN else "")


def _envelopes(result: OpenLoopResult) -> list[tuple[RequestRecord, Envelope]]:
    return [
        (record, record.envelope)
        for record in result.records
        if record.error is None and record.envelope is not None
    ]


def _ids_told_twice(result: OpenLoopResult) -> Iterator[str]:
    """Yield one error for each id that several answers have."""
    told = Counter(id for _, envelope in _envelopes(result) for id in envelope.ids if id)
    for count in told.values():
        if count > 1:
            yield f"id: {count} answers have the same"


def _created_off(result: OpenLoopResult) -> Iterator[str]:
    """Yield an error if the creation times that answers state are impossible by the server's own clock.

    The server's clock may differ from ours, but by the same time at each answer. Whole seconds are rounded
    down.
    """
    times = [
        (created, record.start, record.start + record.e2el)
        for record, envelope in _envelopes(result)
        for created in envelope.created
        if created is not None
    ]
    if not times or result.began_at is None:
        return
    earliest = max(created - ended for created, _, ended in times)
    latest = min(created + 1 - started for created, started, _ in times)
    # Milliseconds are both: they are named by what is wrong with each of them.
    if not abs(latest - result.began_at) < MOST_CLOCK_S:
        yield f"created: the times are {latest - result.began_at:+.0f} s from this machine's clock"
    elif earliest - latest > CLOCK_ERROR_S:
        yield "created: the times do not follow when requests were sent and answered"


def _problems(
    planned: PlannedRequest, record: RequestRecord, answer: Answer, tokenizer: TokenText
) -> Iterator[str]:
    if planned.choices > 1:
        yield from _of_choices(planned, record, tokenizer)
        return
    tokens = _tokens(planned, answer)
    written = None if tokens is None else tokenizer.decode(tokens)
    yield from _of_prompt(planned, record, answer)
    if answer.token_ids is not None and len(answer.token_ids) != record.output_tokens:
        yield f"usage says {record.output_tokens} tokens, the stream has {len(answer.token_ids)}"
    if planned.kind == "stop":
        yield from _of_stop(planned, record, answer, written)
    elif planned.kind == "end":
        yield from _of_end(planned, record, answer, tokens)
    elif answer.finish_reason != "length":
        yield f"it has all tokens and finish_reason is {answer.finish_reason!r}"
    if planned.kind == "logprobs":
        yield from _of_logprobs(record, answer)
    if written is not None and not answer.is_parsed:
        if planned.stop is not None and answer.finish_reason == "stop":
            written = written.partition(planned.stop)[0]
        if not _is_text_of(written, answer.text):
            yield "its text is not that of its tokens"


def _of_choices(planned: PlannedRequest, record: RequestRecord, tokenizer: TokenText) -> Iterator[str]:
    """Check several answers to one request."""
    assert record.answer is not None
    answers = (record.answer, *record.other_choices)
    yield from _of_prompt(planned, record, record.answer)
    ended = sum(answer.finish_reason == "length" for answer in answers)
    if ended < planned.choices:
        yield f"{ended} of {planned.choices} choices have an end"
    lengths = [len(answer.token_ids) for answer in answers if answer.token_ids is not None]
    if any(length != planned.output_len for length in lengths):
        told = ", ".join(map(str, lengths))
        yield f"its choices have {told} tokens, {planned.output_len} were asked for of each"
    texts = [
        (tokenizer.decode(answer.token_ids), answer) for answer in answers if answer.token_ids is not None
    ]
    if not all(answer.is_parsed or _is_text_of(written, answer.text) for written, answer in texts):
        yield "the text of a choice is not that of its tokens"


def _tokens(planned: PlannedRequest, answer: Answer) -> Sequence[int] | None:
    """Return the tokens of the text: all except the end-of-sequence token; None if the server does not report
    them.
    """
    if answer.token_ids is None:
        return None
    tokens = list(answer.token_ids)
    return tokens[:-1] if tokens and tokens[-1] == planned.end_token else tokens


def _is_text_of(written: str, text: str) -> bool:
    """Say whether the streamed `text` has the same tokens as `written`, which was decoded at once.

    If more text follows a broken character, only the text before it is compared: each server resumes a stream
    in its own way, and some complete a character that the prompt has begun.
    """
    beginning, _, rest = written.partition(REPLACEMENT)
    if bare(rest):
        return text.strip().startswith(beginning.strip())
    return bare(written) == bare(text)


def _of_prompt(planned: PlannedRequest, record: RequestRecord, answer: Answer) -> Iterator[str]:
    whose = "the chat template's" if planned.messages else "the one sent"
    if record.prompt_tokens != len(planned.prompt):
        yield f"usage says {record.prompt_tokens} prompt tokens, {whose} has {len(planned.prompt)}"
    elif answer.prompt_token_ids not in (None, planned.prompt):
        yield f"its prompt is not {whose}"


def _of_stop(
    planned: PlannedRequest, record: RequestRecord, answer: Answer, written: str | None
) -> Iterator[str]:
    assert planned.stop is not None
    if planned.stop in answer.text:
        yield "its stop string is in the text"
    elif answer.finish_reason == "stop":
        if written is not None and planned.stop not in written:
            yield "it ended by a stop string that its tokens do not have"
    elif written is not None and planned.stop in written:
        yield "it went on after its stop string"
    if answer.finish_reason != "stop" and record.output_tokens != planned.output_len:
        yield (
            f"{record.output_tokens} of {planned.output_len} tokens, and finish_reason is "
            f"{answer.finish_reason!r}"
        )
    elif record.output_tokens > planned.output_len:
        yield f"{record.output_tokens} tokens, at most {planned.output_len} were asked for"


def _of_end(
    planned: PlannedRequest, record: RequestRecord, answer: Answer, tokens: Sequence[int] | None
) -> Iterator[str]:
    if answer.finish_reason != "stop":
        yield f"it was to end by the end-of-sequence token, and finish_reason is {answer.finish_reason!r}"
    got = record.output_tokens if tokens is None else len(tokens)
    # Usage counts the end-of-sequence token with most servers, ours among them, and not with some.
    is_counted = tokens is None and got == planned.min_tokens + 1
    if got != planned.min_tokens and not is_counted:
        yield f"{got} tokens before its end, {planned.min_tokens} were asked for"


def _of_logprobs(record: RequestRecord, answer: Answer) -> Iterator[str]:
    if answer.logprobs is None:
        yield "it has no log-probabilities"
    elif len(answer.logprobs) != record.output_tokens or None in answer.logprobs:
        told = sum(logprob is not None for logprob in answer.logprobs)
        yield f"it has log-probabilities of {told} of {record.output_tokens} tokens"
    else:
        yield from _of_alternatives(answer.logprobs, answer.alternatives or ())


def _of_alternatives(logprobs: Sequence[float | None], alternatives: Sequence[Alternatives]) -> Iterator[str]:
    """Check greedy tokens, each of which is among the most likely tokens."""
    # Tokens whose texts are equal are one here. Pieces of a character are: each is told as U+FFFD.
    enough = sum(
        len(told.logprobs) >= LOGPROBS or any(REPLACEMENT in (text or "") for text in told.logprobs)
        for told in alternatives
    )
    if enough < LEAST_WITH_ALTERNATIVES * len(logprobs):
        yield f"{LOGPROBS} alternatives are told at {enough} of {len(logprobs)} tokens"
        return
    other = sum(
        told.chosen is not None
        and REPLACEMENT not in told.chosen
        and told.logprobs.get(told.chosen) != logprob
        for told, logprob in zip(alternatives, logprobs, strict=False)
    )
    if other > max(MOST_TIED * len(logprobs), min(FEWEST_TIED, len(logprobs) - 1)):
        yield (
            f"{other} of {len(logprobs)} tokens are not among their alternatives, or with another "
            "log-probability"
        )
