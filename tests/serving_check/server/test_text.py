"""Text from a growing token sequence, and stop strings that come in pieces; with the bundled tokenizer."""

import random

import pytest
from scalegate.serving_check.server.text import REPLACEMENT, IncrementalDecoder, StopStrings
from transformers import AutoTokenizer

TEXT = "def größe(naïve):\n    return '🙂👩‍👩‍👧 漢字 €' + \"\tzero\"  # done\n"


@pytest.fixture(scope="module")
def tokenizer(example_checkpoint):
    return AutoTokenizer.from_pretrained(example_checkpoint)


def chunks(tokenizer, token_ids, sizes=(1,)):
    """What a client is sent when tokens arrive in groups of these sizes, round and round."""
    decoder = IncrementalDecoder(tokenizer)
    sent, position, turn = [], 0, 0
    while position < len(token_ids):
        size = sizes[turn % len(sizes)]
        sent.append(decoder.add(token_ids[position : position + size]))
        position, turn = position + size, turn + 1
    return [*sent, decoder.flush()]


@pytest.mark.parametrize("sizes", [(1,), (2, 5, 1), (1000,)])
def test_the_chunks_together_are_what_the_tokenizer_decodes(tokenizer, sizes):
    token_ids = tokenizer.encode(TEXT * 12)
    assert len(token_ids) > 300
    assert "".join(chunks(tokenizer, token_ids, sizes)) == tokenizer.decode(token_ids) == TEXT * 12


def test_no_chunk_holds_half_a_character(tokenizer):
    token_ids = tokenizer.encode(TEXT)
    naive = [tokenizer.decode([token]) for token in token_ids]
    assert any(REPLACEMENT in piece for piece in naive)
    assert not any(REPLACEMENT in chunk for chunk in chunks(tokenizer, token_ids))


def test_random_tokens_with_broken_bytes_still_add_up(tokenizer):
    generator = random.Random(3)
    single_bytes = [token for token in range(300) if REPLACEMENT in tokenizer.decode([token])]
    assert single_bytes
    for length in (1, 7, 60, 400):
        token_ids = [
            generator.choice(single_bytes) if generator.random() < 0.3 else generator.randrange(1, 8000)
            for _ in range(length)
        ]
        assert "".join(chunks(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_special_tokens_leave_no_text(tokenizer):
    token_ids = [tokenizer.eos_token_id, *tokenizer.encode("a b"), tokenizer.eos_token_id]
    assert "".join(chunks(tokenizer, token_ids)) == "a b"


def test_a_long_sequence_is_not_decoded_again_and_again(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    for token in tokenizer.encode("value = value + 1\n" * 200):
        decoder.add([token])
        assert len(decoder._window) < 64


def stopped(stops, pieces):
    matcher = StopStrings(stops)
    sent = [matcher.feed(piece) for piece in pieces]
    return sent if matcher.found else [*sent, matcher.flush()]


def test_a_stop_string_never_leaks_whatever_the_chunks():
    text, stop = "abcab\nabd END. tail", "END."
    for cut in range(1, len(text)):
        for second in range(cut, len(text)):
            pieces = [text[:cut], text[cut:second], text[second:]]
            assert "".join(stopped([stop], pieces)) == "abcab\nabd "


def test_the_beginning_of_a_stop_string_is_sent_when_it_turns_out_not_to_be_one():
    assert stopped(["aab"], list("aaab")) == ["", "", "a", ""]
    assert stopped(["aab"], list("aac")) == ["", "", "aac", ""]
    assert "".join(stopped(["END"], ["the E", "N"])) == "the EN"


def test_the_earliest_of_several_stop_strings_cuts():
    assert "".join(stopped(["later", "x"], ["one x two later"])) == "one "


def test_without_stop_strings_nothing_is_held_back():
    assert stopped([], ["a", "b"]) == ["a", "b", ""]
