"""Run directories: what they hold, and reading them with every check."""
