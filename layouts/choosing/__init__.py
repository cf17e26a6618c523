"""Choosing layouts: candidates are timed at every M, and the choice is kept in a plan."""
