"""What a release consists of, its card, and where it goes."""
