"""A byte-level BPE tokenizer from `tokenizer.json` as GGUF's keys; other tokenizers are refused."""

from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from ...base.errors import UserError
from ...base.untrusted_files import read_json_object
from ..checkpoints.checkpoint import Checkpoint

TOKENIZER_NAME = "tokenizer.json"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {WORDS + r"\p{N}" + SYMBOLS: "qwen2", WORDS + r"\p{N}{1,3}" + SYMBOLS: "llama-bpe"}
"""For each pattern that splits text before the merges, llama.cpp's name; it supports no others."""


def write_tokenizer(writer: GGUFWriter, checkpoint: Checkpoint, vocab_size: int) -> str | None:
    """Write a checkpoint's tokenizer, and return a note if there is none. Raise UserError for a tokenizer of
    another kind.
    """
    path = checkpoint.folder / TOKENIZER_NAME
    if not path.is_file():
        writer.add_tokenizer_model("none")
        return f"there is no {TOKENIZER_NAME}"
    tokenizer = read_json_object(path)
    model = tokenizer.get("model") or {}
    cut = _pre_tokenizer(tokenizer.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or cut is None:
        kind = model.get("type")
        raise UserError(
            f"{checkpoint.source}: its tokenizer ({kind}) is not a byte-level BPE with a pre-tokenizer that "
            "llama.cpp knows; convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    tokens = {index: text for text, index in model["vocab"].items()}
    types = dict.fromkeys(tokens, TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([types.get(i, TokenType.UNUSED) for i in range(vocab_size)])
    SpecialVocab(checkpoint.folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
    return None


def _pre_tokenizer(section: dict[str, Any]) -> str | None:
    """Return llama.cpp's name for a `pre_tokenizer` section; None if it has none."""
    steps = section.get("pretokenizers", [section])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(byte_level) != 1 or len(steps) != len(patterns) + 1 or len(patterns) > 1:
        return None
    if not patterns:
        return "gpt-2" if byte_level[0].get("use_regex", True) else None
    return SPLITS.get(patterns[0]) if not byte_level[0].get("use_regex", True) else None
