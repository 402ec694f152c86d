"""Options of the command line: one frozen dataclass per command."""
