"""What all other folders use: errors, registries, plugins, options, untrusted files, progress, log."""
