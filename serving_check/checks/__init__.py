"""The checks of the gate, each in its own file: the measured value, the bound, and the reason for the
result.
"""
