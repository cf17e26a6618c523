"""`add_special_tokens`: whether the tokenizer puts BOS before a prompt, which a template may have written."""

import pytest
from scalegate.serving_check.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeChatRequest,
)
from scalegate.serving_check.server.served_model import encode_chat, encode_prompts
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

TEXT = "def main"
MESSAGES = [{"role": "user", "content": TEXT}]
MOST = 10_000


@pytest.fixture(scope="module")
def tokenizer(example_checkpoint):
    """The bundled one, with its first token as BOS, and a template that writes BOS too."""
    tokenizer = AutoTokenizer.from_pretrained(example_checkpoint)
    bos = tokenizer.convert_ids_to_tokens(0)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 0)])
    tokenizer.chat_template = bos + "{{ messages[0].content }}"
    return tokenizer


@pytest.mark.parametrize(("fields", "count"), [({}, 1), ({"add_special_tokens": False}, 0)])
def test_a_completion_gets_them_unless_it_refuses(tokenizer, fields, count):
    [tokens] = encode_prompts(tokenizer, CompletionRequest(prompt=TEXT, **fields), MOST)[0]
    assert tokens[:count] == [0] * count and 0 not in tokens[count:]
    assert len(tokens) == len(tokenizer.encode(TEXT, add_special_tokens=False)) + count


@pytest.mark.parametrize(("fields", "count"), [({}, 1), ({"add_special_tokens": True}, 2)])
def test_a_conversation_has_the_templates_alone_unless_it_asks(tokenizer, fields, count):
    for request in (
        ChatCompletionRequest(messages=MESSAGES, **fields),
        TokenizeChatRequest(messages=MESSAGES, **fields).chat(),
    ):
        tokens = encode_chat(tokenizer, request, MOST)
        assert tokens[:count] == [0] * count and 0 not in tokens[count:]
