"""When repeats decide: tests of ratios, their correlation, trimmed means."""
