"""The commands, one module for each kind of work; each takes its options and returns an exit status."""
