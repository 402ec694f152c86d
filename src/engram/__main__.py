"""`python -m engram`: the command line as a program."""

from __future__ import annotations

import signal
import sys

from engram.cli.main import INTERRUPTED, main


def program() -> None:
    """Run the command and exit with its status."""
    try:
        status = main()
    except KeyboardInterrupt:  # one more Ctrl-C, while the last one was reported
        status = INTERRUPTED
    # Everything is printed and written. With Ctrl-C during its exit, Python would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    program()
