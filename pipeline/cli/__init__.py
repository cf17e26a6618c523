"""The command line: one command a file, each a thin shell over the Python call of the same name."""
