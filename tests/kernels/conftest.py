"""Lets the tests of this folder import `hopper_compiler.py`."""
