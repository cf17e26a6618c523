"""The text that quality is measured on: spread over its domains, and what a given one must have at least."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import Checkpoint, open_checkpoint
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.validation.given_text import LEAST_ENTROPY, read_given, require_doubt
from scalegate.pipeline.validation.held_out import HELD_OUT, LONG_WINDOW, WINDOW, read_held_out
from scalegate.pipeline.validation.known_text import MOST_BITS, read_known
from scalegate.serving_check.evidence.quality_figures import Comparison
from scalegate.serving_check.quality import read_documents, read_texts
from scalegate.serving_check.settings import QUALITY_TOKENS

DOMAINS = ["code", "prose", "chat", "languages"]


@pytest.fixture(scope="module")
def checkpoint(example_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(example_checkpoint)


def predicted_by_domain(text) -> Counter:
    counts: Counter = Counter()
    for domain, window in zip(text.domains, text.windows, strict=True):
        counts[domain] += len(window) - 1
    return counts


def test_every_domain_of_the_shipped_text_gives_as_many_tokens(checkpoint: Checkpoint):
    text = read_held_out(None, checkpoint, checkpoint, QUALITY_TOKENS)
    counts = predicted_by_domain(text)
    assert list(counts) == DOMAINS and counts.total() == QUALITY_TOKENS
    assert max(counts.values()) - min(counts.values()) < WINDOW
    assert len(text.token_ids) == counts.total() + len(text.windows)


def test_a_domain_that_is_used_up_leaves_its_share_to_the_others(checkpoint: Checkpoint):
    counts = predicted_by_domain(read_held_out(None, checkpoint, checkpoint, 40_000))
    assert counts.total() == 40_000
    assert counts["chat"] < 10_000 < counts["code"]


def test_long_windows_are_full_and_each_of_one_domain(checkpoint: Checkpoint):
    text = read_held_out(None, checkpoint, checkpoint, QUALITY_TOKENS, LONG_WINDOW)
    assert text.domains == DOMAINS
    assert [len(window) for window in text.windows] == 4 * [LONG_WINDOW]


def test_a_domain_s_tokens_come_from_as_many_documents_as_there_are(checkpoint: Checkpoint, tmp_path: Path):
    path = tmp_path / "text.jsonl"
    texts = [f"document {index} " + " ".join(map(str, range(400))) for index in range(8)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    text = read_held_out(path, checkpoint, checkpoint, 8 * (WINDOW - 1))
    begins = [text.tokenizer.decode(window[:8].tolist()) for window in text.windows]
    assert [begin.startswith(f"document {index} ") for index, begin in enumerate(begins)] == 8 * [True]
    assert text.domains == 8 * [""]


def test_a_domain_that_the_baseline_cannot_predict_is_left_out(checkpoint: Checkpoint):
    """The bundled checkpoint was trained on code alone."""
    model = load_model(checkpoint.folder, device="cpu", dtype=torch.float32, progress=False).model
    text = read_known(model, checkpoint, checkpoint, 2048)
    assert set(text.domains) == {"code"} and list(text.foreign) == DOMAINS[1:]
    assert all(bits > MOST_BITS for bits in text.foreign.values())
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    guessing = read_known(model, checkpoint, checkpoint, 2048)
    assert set(guessing.domains) == set(DOMAINS) and guessing.foreign == {}, "there is nothing else to read"


def test_the_code_of_the_shipped_text_is_the_example(heldout_text: Path):
    code = [document.text for document in read_documents(HELD_OUT) if document.domain == "code"]
    assert code == read_texts(heldout_text)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["too short"], r"has \d+ tokens to predict; quality needs at least 1000: give a longer one"),
        (["again and again " * 2000], r"has \d different tokens; .* it repeats itself"),
        (
            [" ".join(str(7919 * (index + step) % 1009) for step in range(12)) for index in range(200)],
            r"has \d+ tokens before a predicted one, on average; .* join them",
        ),
    ],
)
def test_a_text_that_tells_nothing_is_refused_with_the_reason(
    checkpoint: Checkpoint, tmp_path: Path, lines: list[str], said: str
):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    with pytest.raises(UserError, match=said):
        read_given(path, checkpoint, checkpoint, QUALITY_TOKENS, WINDOW, 64)


def test_a_text_of_one_s_own_is_read(checkpoint: Checkpoint, heldout_text: Path):
    assert len(read_given(heldout_text, checkpoint, checkpoint, 1024, WINDOW, 64).windows) >= 2


def test_a_text_that_the_baseline_does_not_doubt_is_refused():
    known = Comparison(4096, 0.02, 0.02, 0.0, 0.0, 0.0, 0.0, 1.0, baseline_entropy=LEAST_ENTROPY / 2)
    with pytest.raises(UserError, match=r"0\.050 nats of entropy .* knows it by heart"):
        require_doubt(Path("mine.txt"), known)
    require_doubt(
        Path("mine.txt"), Comparison(4096, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 1.0, baseline_entropy=LEAST_ENTROPY)
    )


def test_conversations_are_sent_where_the_template_renders_them(checkpoint: Checkpoint, caplog):
    text = read_held_out(None, checkpoint, checkpoint, 1024)
    conversations = text.conversations
    assert conversations is not None
    assert conversations.decode(conversations.encode([("user", "hi")])).startswith("# user: hi")
    text.tokenizer.chat_template = "{{ raise_exception('tools only') }}"
    assert text.conversations is None and "tools only" in caplog.text
    text.tokenizer.chat_template = None
    assert text.conversations is None
