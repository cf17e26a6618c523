"""Checks of a load as in use, and of the servers at rest after it."""
