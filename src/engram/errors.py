"""The error a user sees: one sentence that says what happened, with which value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EngramError(ValueError):
    """A mistake in what was asked for or in the data it was asked of.

    The command line prints its message and exits with status 2; nothing already written is lost.
    """


def suggest(name: str, valid: Iterable[str]) -> str:
    """The nearest valid name as a clause to append to a message, or the valid names if none is near."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"valid names: {', '.join(names)}" if names else "there are none"
