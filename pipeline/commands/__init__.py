"""The commands, as functions: `quantize`, `layout`, `validate`, `push`, and what goes with them."""
