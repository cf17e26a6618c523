"""The commands, as functions: `quantize`, `layout`, `validate`, `push`, and the functions that go with
them.
"""
