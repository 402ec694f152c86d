"""The error a user sees: one sentence that says what happened, with which value, and what to do."""

from __future__ import annotations

import difflib
import errno
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path


class EngramError(ValueError):
    """A mistake in what was asked for or in the data it was asked of.

    The command line prints its message and exits with status 2; nothing already written is lost.
    """


SHOWN_NAMES = 20  # of those that are valid, where none is near, and of those that begin with what was typed
DETAILS = "the details are in "  # how a note with an unexpected error begins that says where its traceback was kept
ALSO_CALLED = {"gpu": "cuda"}  # which 'cpu' is more like


def suggest(name: str, valid: Iterable[str], before: str = "") -> str:
    """The nearest valid name as a clause to append to a message, or the first of the valid names if none is near.

    Case, spaces and hyphens do not matter. before: what stands before each of the names where one is typed, such as
    "settings.train.".
    """
    names = sorted(set(valid))
    near = _near(name, names)
    if len(near) == 1:
        return f"did you mean {before + near[0]!r}?"
    if near:
        return f"did you mean one of {', '.join(before + each for each in near)}?"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    shown = ", ".join(before + each for each in names[:SHOWN_NAMES])
    return f"valid names: {shown}{more}" if names else "there are none"


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Those that are meant but for how they are written, else the few that begin so, else the one most like it."""
    wanted, keys = same_key(name), [same_key(each) for each in names]
    wanted = ALSO_CALLED[wanted] if ALSO_CALLED.get(wanted) in keys else wanted
    same = [each for each, key in zip(names, keys, strict=True) if key == wanted]
    beginning = [each for each, key in zip(names, keys, strict=True) if wanted and key.startswith(wanted)]
    if same or 0 < len(beginning) <= SHOWN_NAMES:
        return same or beginning
    like = difflib.get_close_matches(wanted, keys, n=1, cutoff=0.6)
    return [names[keys.index(key)] for key in like]


def same_key(name: str) -> str:
    """The name without what is easily typed otherwise."""
    return re.sub(r"[\s_-]", "", name.casefold())


def explain(error: BaseException) -> tuple[str, bool]:
    """One sentence about an error, and whether it is unexpected: a mistake in the program, for all that is known."""
    unexpected = False
    if isinstance(error, EngramError):
        message = str(error)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" where {error.filename} should go" if error.filename else ""
        message = f"the disk is full{place}; make room and try again, what was written before is intact"
    elif isinstance(error, OSError) and error.filename:
        message = f"{error.filename} cannot be used: {error.strerror}"
    elif _is_out_of_memory(error):
        message = "there is not enough memory for this; try a smaller --batch-size or --image-size"
    else:
        unexpected = True
        message = f"unexpected error: {type(error).__name__}: {error}{_in_own_file(error)}"
    return " ".join(message.split()), unexpected


def _in_own_file(error: BaseException) -> str:
    """The place of an error in a file of neither this package nor one that is installed, such as a method's own."""
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = [str(Path(__file__).parent), *libraries]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith(".py") and not any(frame.filename.startswith(place) for place in installed):
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def _is_out_of_memory(error: BaseException) -> bool:
    # torch has a class of its own for GPUs and a plain RuntimeError for the CPU; it may not be imported here.
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or named or "can't allocate memory" in str(error)
