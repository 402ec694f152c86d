"""The error a user sees: one sentence that says what happened, with which value, and what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class EngramError(ValueError):
    """A mistake in what was asked for or in the data it was asked of.

    The command line prints its message and exits with status 2; nothing already written is lost.
    """


SHOWN_NAMES = 20  # of those that are valid, where none is near


def suggest(name: str, valid: Iterable[str], before: str = "") -> str:
    """The nearest valid name as a clause to append to a message, or the first of the valid names if none is near.

    before: what stands before each of the names where one is typed, such as "settings.train.".
    """
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {before + close[0]!r}?"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    shown = ", ".join(before + each for each in names[:SHOWN_NAMES])
    return f"valid names: {shown}{more}" if names else "there are none"


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
        message = f"unexpected error: {type(error).__name__}: {error}"
    return " ".join(message.split()), unexpected


def _is_out_of_memory(error: BaseException) -> bool:
    # torch has a class of its own for GPUs and a plain RuntimeError for the CPU; it may not be imported here.
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or named or "can't allocate memory" in str(error)
