"""Command-line options: one frozen dataclass per command, and how they change a configuration."""
