"""The checks of the gate, each a file: what it measured, against which bound, and why it came out so."""
