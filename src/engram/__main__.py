"""`python -m engram`: the command line as a program."""

from __future__ import annotations

import os
import signal
import sys


def program() -> None:
    """Run the command and exit with its status."""
    try:
        from engram.cli.main import main

        status = main()
    except KeyboardInterrupt:  # one more Ctrl-C, while the last one was reported
        status = 128 + signal.SIGINT
    except (ImportError, MemoryError) as error:  # not even the explanation of an error could be loaded
        why = str(error) or "not enough memory; raise the limit, if there is one ('ulimit -v')"
        os.write(2, f"engram: cannot start: {why}\n".encode(errors="backslashreplace"))
        status = 2
    # Everything is printed and written. With Ctrl-C during its exit, Python would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    program()
