"""`python -m engram`: the command line, as a program of its own."""

from __future__ import annotations

import signal
import sys

from engram.cli.main import main


def program() -> None:
    """Runs the command and exits with its status."""
    status = main()
    # All is said and written. Ctrl-C now would have Python's exit print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    program()
