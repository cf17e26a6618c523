"""What is written down about an artifact and read again: manifest, recipe, signature, comparison."""
