"""Text from the bundled checkpoint, or from any that is named: `python -P examples/generate.py [MODEL]`."""

import sys
from pathlib import Path

from scalegate import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "qwen3-pycode-5m"

with LLM(model, max_num_seqs=8, max_model_len=512) as llm:
    params = SamplingParams(max_tokens=32, temperature=0)
    for result in llm.generate(["def read_lines(path):", "import os\n\nclass "], params):
        print(result.text)
