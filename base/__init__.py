"""What every room uses and none owns: errors, registries, files and names from outside, options, log."""
