"""The part of `validate` before the gate: the models, the servers, and the figures measured in process."""
