"""Registry: things that a configuration names, from this package and from files of a user."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from engram.core.errors import EngramError, UnknownNameError

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Their code is known by the commit or by the version of torch. Classes of Python have no file.
_KNOWN = {"engram", "torch", *sys.stdlib_module_names}

# A hint about an unknown name, for things that a user may have in a file of their own.
OWN = "(one of your own: import its module first; for a command, set ENGRAM_METHODS=FILE.py)"

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """file, code: of the user's code, both empty for code of this package. code: None if the code cannot be read.

    origin: module and qualified name of what was registered, by which a new definition of it is recognised.
    """

    value: T
    file: str
    code: str | None
    origin: tuple[str, str] | None = None


class Registry(Generic[T]):
    """Values of one kind by name, and a digest of the code of those that are defined outside this package.

    Parameters
    ----------
    kind: what is registered, such as "backbone".
    hint: text to append to the message about an unknown name.
    elsewhere: finds names that are not registered, such as those of another library; returns the value, its file and
        its code (see `code`), or None.
    """

    def __init__(
        self, kind: str, hint: str = "", elsewhere: Callable[[str], tuple[T, str, str | None] | None] | None = None
    ) -> None:
        self.kind = kind
        self._one = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self._hint = hint
        self._elsewhere = elsewhere
        self._entries: dict[str, _Entry[T]] = {}
        self._found: dict[str, _Entry[T]] = {}  # elsewhere

    def add(self, name: str, value: T, *, code: Iterable[object] | None = None) -> None:
        """Register a value under a name: lower-case letters, digits and single dashes.

        A new definition of what has the name, as in a notebook's cell that is run again, replaces it.

        code: the functions and classes that define the value; by default the value itself.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise EngramError(
                f"{self._one} cannot be called {name!r}: a name is lower-case letters and digits, with single "
                f"dashes between, such as 'my-{self.kind.replace(' ', '-')}2'"
            )
        parts = [value] if code is None else list(code)
        origin = origin_of(parts[0])
        if name in self._entries and (origin is None or origin != self._entries[name].origin):
            held = self._entries[name].value
            raise EngramError(
                f"{self._one} named {name!r} is registered already ({getattr(held, '__qualname__', held)!s:.80}); "
                "choose another name"
            )
        self._entries[name] = _Entry(value, *_code_of(parts), origin)

    def find(self, name: str) -> T:
        """The value of that name."""
        return self._entry(name).value

    def names(self) -> list[str]:
        """All names, in the order in which they were registered."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def remove(self, name: str) -> None:
        """Remove a name, so that it can be registered again."""
        self._entry(name)
        del self._entries[name]

    def code(self, name: str) -> str | None:
        """A digest of the user's code, as it was when the name was registered; empty for code of this package.

        None if the code cannot be read, for example for a function defined in an interactive session.
        """
        return self._entry(name).code

    def versions(self, name: str) -> Mapping[str, str]:
        """The user's file and the digest of its code, for run.json: KIND_file and KIND_code; empty if there is none."""
        entry, key = self._entry(name), self.kind.replace(" ", "_")
        return {f"{key}_file": entry.file, f"{key}_code": entry.code} if entry.code else {}

    def _entry(self, name: str) -> _Entry[T]:
        if name in self._entries:
            return self._entries[name]
        if name not in self._found:
            found = None if self._elsewhere is None else self._elsewhere(name)
            if found is None:
                raise UnknownNameError(self.kind, name, self._entries, hint=self._hint)
            self._found[name] = _Entry(*found)
        return self._found[name]


def origin_of(part: object) -> tuple[str, str] | None:
    """Module and qualified name of a function or class; None for anything else."""
    if inspect.isfunction(part) or isinstance(part, type):
        return str(part.__module__), part.__qualname__
    return None


def joined_versions(used: Iterable[tuple[Registry[Any], str]]) -> dict[str, str]:
    """The versions of several registered things; those of one kind, such as two optimisers, are joined by "+"."""
    found: dict[str, dict[str, None]] = {}
    for registry, name in used:
        for key, value in registry.versions(name).items():
            found.setdefault(key, {})[value] = None
    return {key: "+".join(values) for key, values in found.items()}


def _code_of(objects: Iterable[object]) -> tuple[str, str | None]:
    """The name of the first file outside this package that defines the objects, and a digest of all such files.

    The files of a class are its own and those of its base classes.
    """
    parts = [part for each in objects for part in (each.__mro__ if isinstance(each, type) else (each,))]
    files: dict[Path, bytes] = {}
    for part in parts:
        if not inspect.isfunction(part) and not inspect.isclass(part):  # such as a partial: its arguments are not read
            return "", None
        if (part.__module__ or "").partition(".")[0] in _KNOWN:
            continue
        try:
            inspect.getsource(part)  # fails if it is not in its module's file
            path = Path(inspect.getfile(part))
            files[path] = path.read_bytes()
        except (OSError, TypeError):
            return "", None
    if not files:
        return "", ""
    return next(iter(files)).name, hashlib.blake2b(b"".join(files.values()), digest_size=6).hexdigest()
