"""What one quantization job is made of: its plan, its steps, its shards, and what it has finished."""
