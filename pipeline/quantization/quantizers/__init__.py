"""How float weights become a format's numbers: a quantizer for each format, and their registry."""
