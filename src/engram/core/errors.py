"""Errors for people: one sentence that says what happened, with which value, and what to do."""

from __future__ import annotations

import difflib
import errno
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SHOWN_NAMES = 20  # valid names to list in a message
SYNONYMS = {"gpu": "cuda"}  # 'gpu' is closer to 'cpu' than to 'cuda'
# A message holds the names of options between these two characters, which no text of a user contains.
_OPEN, _CLOSE = "\ue000", "\ue001"
_OPTION = re.compile(f"{_OPEN}([^={_CLOSE}]*)(?:=([^{_CLOSE}]*))?{_CLOSE}")

Spelling = Callable[[str, str | None], str]


def _as_argument(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"


_spelling: Spelling = _as_argument


def option(name: str, value: object = None) -> str:
    """The name of an option (and a value for it), to be put into the message of an EngramError.

    `str(error)` spells it as a Python argument, `image_size=64`, and inside `spell_options` as told there: the command
    line spells it `--image-size 64`.
    """
    return f"{_OPEN}{name}{'' if value is None else f'={value}'}{_CLOSE}"


def spelled(text: str) -> str:
    """A text with its options spelled: for warnings, which are not errors."""
    return _OPTION.sub(lambda match: _spelling(match[1], match[2]), text)


@contextmanager
def spell_options(spelling: Spelling) -> Iterator[None]:
    """Inside this context, messages spell their options by `spelling(name, value)`. For the whole process."""
    global _spelling  # noqa: PLW0603
    before, _spelling = _spelling, spelling
    try:
        yield
    finally:
        _spelling = before


def described(value: object) -> str:
    """Describe a value in a message: a tensor by its shape, anything else by its type."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"a {type(value).__name__.lower()} of the shape {tuple(shape)}"
    inner = sorted({type(each).__name__ for each in value}) if isinstance(value, (list, tuple)) else []
    return f"a {type(value).__name__} of {', '.join(inner)}" if inner else f"a {type(value).__name__}"


class EngramError(ValueError):
    """A mistake in the request or in its data. The command line prints the message and exits with status 2.

    Parameters
    ----------
    message: one sentence: what happened, with which value, what to do. Options in it are written by `option`.
    parameter, value: the argument at fault, if it is one argument.
    suggestions: valid values close to the one given.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: object = None, suggestions: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value
        self.suggestions = tuple(suggestions)

    def __str__(self) -> str:
        return spelled(str(self.args[0]))

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options in the message."""
        return tuple(match[1] for match in _OPTION.finditer(str(self.args[0])))


class SharedError(EngramError):
    """An error that every process of a run has, or that the first one reports."""


class UnknownNameError(EngramError):
    """A name that does not exist. The message suggests the closest valid names, or lists the valid ones.

    Parameters
    ----------
    kind: what the name is of, such as "backbone".
    prefix: text that precedes each name where one is typed, such as "settings.train.".
    hint: text to append to the message.
    """

    def __init__(self, kind: str, name: object, valid: Iterable[str], prefix: str = "", hint: str = "") -> None:
        names = sorted(set(valid))
        near = nearest(str(name), names)
        text = f"no {kind} {prefix + str(name)!r:.120}: {_suggestion(near, names, prefix)}{hint and f' {hint}'}"
        super().__init__(text, parameter=kind, value=name, suggestions=near)


def nearest(name: str, valid: Iterable[str]) -> list[str]:
    """The valid names that were probably meant; empty if none is close.

    Those that differ only in case, spaces or hyphens; otherwise a few that begin with the name; otherwise the closest.
    """
    names = sorted(set(valid))
    wanted, keys = same_key(name), [same_key(each) for each in names]
    wanted = SYNONYMS[wanted] if SYNONYMS.get(wanted) in keys else wanted
    same = [each for each, key in zip(names, keys, strict=True) if key == wanted]
    beginning = [each for each, key in zip(names, keys, strict=True) if wanted and key.startswith(wanted)]
    if same or 0 < len(beginning) <= SHOWN_NAMES:
        return same or beginning
    like = difflib.get_close_matches(wanted, keys, n=1, cutoff=0.6)
    return [names[keys.index(key)] for key in like]


def suggest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """A clause to append to a message: the closest valid names, or the first of all valid names if none is close."""
    names = sorted(set(valid))
    return _suggestion(nearest(name, names), names, prefix)


def _suggestion(near: Sequence[str], names: Sequence[str], prefix: str) -> str:
    if len(near) == 1:
        return f"did you mean {prefix + near[0]!r}?"
    if near:
        return f"did you mean one of {', '.join(prefix + each for each in near)}?"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    shown = ", ".join(prefix + each for each in names[:SHOWN_NAMES])
    return f"valid names: {shown}{more}" if names else "there are none"


def same_key(name: str) -> str:
    """The name without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", name.casefold())


class DetailsNote(str):
    """Note on an unexpected error: where its traceback was saved."""

    __slots__ = ()


def details_note(path: Path) -> DetailsNote:
    """Return the note for a traceback that was saved to this file."""
    return DetailsNote(f"the details are in {path}")


def explain(error: BaseException) -> tuple[str, bool]:
    """One sentence about an error, and whether the error is unexpected (probably a bug)."""
    unexpected = False
    if isinstance(error, EngramError):
        message = str(error)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" where {error.filename} should go" if error.filename else ""
        message = f"the disk is full{place}; free some space and try again, what was written before is intact"
    elif isinstance(error, OSError) and error.filename:
        message = f"{error.filename} cannot be used: {error.strerror}"
    elif _is_out_of_memory(error):
        message = f"there is not enough memory for this; try a smaller {option('batch_size')} or {option('image_size')}"
    else:
        unexpected = True
        message = f"unexpected error: {type(error).__name__}: {error}{in_user_file(error)}"
    return " ".join(spelled(message).split()), unexpected


def in_user_file(error: BaseException) -> str:
    """The place of an error in a file outside this package and the installed ones, in brackets; empty if there is none.

    Such as " (own.py, line 3, in phases)", in a user's method.
    """
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = [str(Path(__file__).parents[1]), *libraries]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith(".py") and not any(frame.filename.startswith(place) for place in installed):
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def _is_out_of_memory(error: BaseException) -> bool:
    # torch has its own class for GPUs and a plain RuntimeError for the CPU; it may not be imported here.
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or named or "can't allocate memory" in str(error)
