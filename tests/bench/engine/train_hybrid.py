"""Train a tiny hybrid, short convolutions beside attention as in LFM2, to try the whole way on two CPU cores.

    python -P tests/bench/engine/train_hybrid.py examples/qwen3-pycode-5m TEXT.jsonl OUT --minutes 6
    pipeline release OUT int4-hqq --to ORG/NAME --dry-run

TEXT has one JSON object a line, with a `text`. The tokenizer is taken from the model that is given first. The
model learns enough for its text to depend on what it has read, which is all that a check of states needs.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

WINDOW, BATCH = 256, 8
RATE, WARM_UP = 2e-3, 50
SEED = 11


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, help="a folder of a model with a tokenizer")
    parser.add_argument("text", type=Path, help="JSON lines with a `text`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    windows = windows_of(options.tokenizer, options.text)
    model = hybrid(len(AutoTokenizer.from_pretrained(options.tokenizer)))
    train(model, windows, options.minutes * 60)
    model.to(torch.bfloat16).save_pretrained(options.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(options.tokenizer / name, options.out)


def windows_of(tokenizer: Path, text: Path) -> Tensor:
    """int64 [windows, WINDOW]."""
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids += [*encoder(json.loads(line)["text"])["input_ids"], encoder.eos_token_id]
    whole = len(ids) // WINDOW
    return torch.tensor(ids[: whole * WINDOW]).view(whole, WINDOW)


def hybrid(vocab_size: int) -> Lfm2ForCausalLM:
    config = Lfm2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Lfm2ForCausalLM(config)


def train(model: Lfm2ForCausalLM, windows: Tensor, seconds: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    started, step = time.monotonic(), 0
    while (passed := time.monotonic() - started) < seconds:
        batch = windows[torch.randint(len(windows), (BATCH,))]
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP, 2 * (1 - passed / seconds))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, {passed:.0f} s: loss {loss.item():.2f}", flush=True)
        step += 1


if __name__ == "__main__":
    main()
