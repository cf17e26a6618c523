"""The records about an artifact: manifest, recipe, signature, comparison."""
