"""What one quantization job is made of: its tasks, its shards, and what it has finished."""
