"""Reading a checkpoint's tokenizer, apart from its model: a server's API side needs no more than this.

The tokenizer has its own file because importing this part of transformers takes seconds.
"""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...base.errors import UserError
from .checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """Return the checkpoint's tokenizer; None if it has none."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((checkpoint.folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:
        # Tokenizer files are read by several libraries, each with its own exceptions.
        raise UserError(f"{checkpoint.source}: its tokenizer cannot be loaded: {error}") from error
