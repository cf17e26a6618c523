"""Hides triton and fcntl from every Python with this folder in PYTHONPATH: on Windows there is neither."""

import sys

# Python's own mark of a module that is not to be found.
sys.modules.update(dict.fromkeys(("triton", "fcntl")))
