"""Which Ms are drawn, and when repeats decide: tests of ratios, their correlation, trimmed means."""
