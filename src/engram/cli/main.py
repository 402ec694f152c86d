"""The command line: `engram demo | learn | predict | info | evaluate | remove | undo | run | reproduce | ...`."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from engram.cli.plugins import bring_in_methods
from engram.core.errors import DETAILS, explain, spell_options

# Where each command is carried out; imported when it is asked for, because most of them need torch.
_MODULES = {
    "demo": "demo",
    "learn": "learn",
    "predict": "predict",
    "info": "info",
    "evaluate": "evaluate",
    "remove": "remove",
    "rename": "rename",
    "undo": "undo",
    "export": "export",
    "run": "run",
    "resume": "run",
    "list": "list_all",
    "report": "report",
    "reproduce": "reproduce",
    "results": "results",
    "prepare": "prepare",
    "doctor": "doctor",
}
FLAGS = {"directory": "--out"}  # parameters whose flag has another name
UNREADABLE, INTERRUPTED, BROKEN_PIPE = 3, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command: 0 for success, 2 for a mistake in what was asked, 130 after Ctrl-C.

    3: it was done, but for images that could not be read.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A class name that the terminal's encoding does not have must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with spell_options(flag_text):
        return _status(given)


def flag_text(name: str, value: str | None) -> str:
    """An option as it is typed: `image_size` is --image-size."""
    flag = FLAGS.get(name, "--" + name.replace("_", "-"))
    return flag if value in (None, "True") else f"{flag} {value}"


def _status(given: list[str]) -> int:
    """The exit status of a command, with its error printed."""
    try:
        status = _dispatch(given)
        sys.stdout.flush()
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else 1
    except KeyboardInterrupt as interrupt:
        print(f"engram: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        status = INTERRUPTED
    except BrokenPipeError:
        status = _leave_pipe()
    except Exception as error:
        status = _explain(error)
    return status


def _dispatch(given: list[str]) -> int:
    if given in (["--version"], ["-V"]):
        from importlib import metadata

        print(f"engram {metadata.version('engram')}")
        return 0
    from engram.cli.parser import parse

    if not given:
        try:
            parse(["--help"])
        except SystemExit:
            return 2
    name, options = parse(given)
    bring_in_methods()
    module = importlib.import_module(f"engram.cli.commands.{_MODULES[name]}")
    return getattr(module, f"{name}_command")(options, given)


def _leave_pipe() -> int:
    # Python flushes stdout once more at exit, which would fail again and print a traceback.
    with suppress(OSError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _explain(error: Exception) -> int:
    """Prints one sentence about the error; returns the exit status."""
    if os.environ.get("ENGRAM_DEBUG") == "1":
        traceback.print_exception(error)
    message, unexpected = explain(error)
    if unexpected:
        kept = [note for note in getattr(error, "__notes__", []) if note.startswith(DETAILS)]
        message += f"; {kept[0] if kept else 'run again with ENGRAM_DEBUG=1 for the details'}"
    print(f"engram: {message}", file=sys.stderr)
    return 1 if unexpected else 2
