"""The parts of a quantization job: its tasks, its shards, and its progress."""
