"""Sends both servers a load as in use: blocks of the same requests at the same times, one server after the other.

The baseline's curve says how many requests a second lead from one at a time to more than the largest M.
"""

BLOCKS = 3
"""On either side: a throughput ratio needs more than two for limits that can fail."""
