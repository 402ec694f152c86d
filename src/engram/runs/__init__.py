"""Run directories: writing them, and reading them with every check."""
