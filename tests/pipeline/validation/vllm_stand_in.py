"""Stands for the `vllm` command: our own server behind vLLM's words, or one of vLLM's failures.

It shows how the command is started, watched and ended; that vLLM itself is driven so is shown on a GPU.
STAND_IN names a failure; STAND_IN_WORDS a file that the words are added to.
"""

import os
import sys
import time
from pathlib import Path

OUT_OF_MEMORY = (
    "(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
)
KEPT = ("--host", "--port", "--max-num-seqs", "--max-model-len", "--dtype", "--kv-cache-dtype")


def main() -> None:
    words = sys.argv[1:]
    with Path(os.environ["STAND_IN_WORDS"]).open("a") as file:
        file.write(
            " ".join(words) + f" | {os.environ.get('CUDA_VISIBLE_DEVICES')}"
            f" | {os.environ.get('VLLM_BATCH_INVARIANT')}\n"
        )
    fault = os.environ.get("STAND_IN")
    if fault == "memory":
        sys.exit(OUT_OF_MEMORY)
    if fault == "hang":
        time.sleep(600)
    print("INFO Kernel JIT monitor activated; monitored JIT compilations", flush=True)
    print("INFO Using StandInLinearKernel for CompressedTensorsWNA16", flush=True)
    kept = [part for at, word in enumerate(words) if word in KEPT for part in words[at : at + 2]]
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", words[1], *kept, "--device", "cpu"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
