"""The files of a release, its card, and its target."""
