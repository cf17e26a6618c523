"""A verdict for people: a terminal table, plots, and a self-contained page."""
