"""The command line: `engram demo | learn | predict | serve | info | evaluate | remove | undo | run | ...`."""

from __future__ import annotations

import importlib
import io
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from engram.cli.streams import tell
from engram.core.errors import DetailsNote, EngramError, SharedError, explain, spell_options
from engram.core.memory_limits import keep_freed_memory
from engram.core.torchrun import is_launched, launched_rank

# Modules in cli/commands that are not named after their command. They are imported when needed: most import torch.
_MODULES = {
    "resume": "run",
    "list": "list_all",
    **dict.fromkeys(("remove", "rename", "merge", "move", "undo", "export"), "change_model"),
    **dict.fromkeys(("prepare", "doctor"), "setup"),
    **dict.fromkeys(("report", "results"), "write_pages"),
}
# Parameters whose flag has another name.
FLAGS = {
    "directory": "--out",
    "validation": "--holdout",
    "flip": "--no-mirror",
    "settings": "--set",
    "known": "--more-of-known",
    "start": "--from",
}
UNREADABLE, ELSEWHERE, INTERRUPTED, BROKEN_PIPE = 3, 4, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success, 1 an unexpected error, 2 a mistake in the request, 3 success except for unreadable images, 4 success
    except for runs that another process is doing, 130 Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A class name that the terminal's encoding cannot show must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with spell_options(flag_text):
        return _status(given)


def flag_text(name: str, value: str | None) -> str:
    """Spell the option of a parameter: `image_size` is --image-size."""
    flag = FLAGS.get(name, "--" + name.replace("_", "-"))
    return flag if value in (None, "True", "refresh") else f"{flag} {value}"  # a flag without a value


def _status(given: list[str]) -> int:
    """Run a command, print its error if there is one, and return the exit status."""
    try:
        status = _dispatch(given)
        sys.stdout.flush()
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except KeyboardInterrupt as interrupt:
        tell(str(interrupt) or "interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        status = _leave_pipe()
    except Exception as error:
        status = _explain(error)
    return status


def _dispatch(given: list[str]) -> int:
    if given in (["--version"], ["-V"]):
        from engram.core.provenance import version

        print(f"engram {version()}")
        return 0
    from engram.cli.parser import parse

    if not given:
        try:
            parse(["--help"])
        except SystemExit:
            return 2
    name, options = parse(given)
    if is_launched() and name not in ("run", "resume"):
        raise EngramError(f"torchrun starts several processes, which only 'engram run' and 'resume' share, not {name}")
    from engram.core.plugins import load_plugins

    load_plugins()
    keep_freed_memory()
    module = importlib.import_module(f"engram.cli.commands.{_MODULES.get(name, name)}")
    return getattr(module, f"{name}_command")(options, given)


def _leave_pipe() -> int:
    # Python flushes stdout at exit, which would fail again and print a traceback.
    with suppress(OSError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _explain(error: Exception) -> int:
    """Print one sentence about the error and return the exit status."""
    if os.environ.get("ENGRAM_DEBUG") == "1":
        traceback.print_exception(error)
    rank = launched_rank()
    if rank > 0 and isinstance(error, SharedError):  # process 0 reports it
        return 2
    message, unexpected = explain(error)
    if rank > 0:
        message = f"process {rank}: {message}"
    if isinstance(error, ImportError) and error.args:
        message = f"a library cannot be loaded: {str(error).strip().splitlines()[-1]}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if isinstance(error, (ImportError, MemoryError)) and limit != resource.RLIM_INFINITY:
        message += f"; this process may use only {limit / 1e6:,.0f} MB of memory: raise that limit ('ulimit -v')"
        unexpected = False
    if unexpected:
        notes = (note for note in getattr(error, "__notes__", []) if isinstance(note, DetailsNote))
        message += f"; {next(notes, 'run again with ENGRAM_DEBUG=1 for the details')}"
    tell(message)
    return 1 if unexpected else 2
