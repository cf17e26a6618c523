"""Compiled calls in memory, as `run_calls.py` reads them."""

from collections.abc import Sequence

import numpy as np

from .calls import Call


class CallList:
    """The calls of a step, one after another."""

    def __init__(self, calls: Sequence[Call], step: np.ndarray):
        """step: the step's numbers, int64; they stay where they are"""
        self.count = len(calls)
        self._step = step
        self._numbers = [_in_memory((step.ctypes.data, *call.numbers)) for call in calls]
        addresses = [numbers.ctypes.data for numbers in self._numbers]
        functions = [call.function for call in calls]
        self._calls = np.array([functions, addresses], np.int64).T.copy()
        self.address = self._calls.ctypes.data


def _in_memory(numbers: Sequence[int | float]) -> np.ndarray:
    """Return the numbers as int64; of a float64, its bits."""
    bits = [np.float64(each).view(np.int64) if isinstance(each, float) else each for each in numbers]
    return np.array(bits, np.int64)
