"""The commands: each function takes its options and the typed arguments and returns the exit status."""
