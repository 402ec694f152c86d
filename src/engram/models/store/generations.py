"""A model on disk: generations, each complete, and a small file that says which one is the model.

    MODEL/current                   which generation, and the checksum of its model.json; the same of the one before it
    MODEL/generations/000003/       model.json, weights.safetensors, exemplars/, heldout/
    MODEL/generations/000002/       what it was before the last lesson, for undoing that
    MODEL/learning/                 learning in progress, to be resumed
    MODEL/.lock                     held by the one process that may write

A new generation is written beside the old one and brought to disk; then `current` is replaced in one step. Whatever
moment that is cut off at, `current` names a complete generation. Readers take no lock.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engram.core.errors import EngramError
from engram.core.provenance import version
from engram.models.store.safe_folder import Folder, Vanished, digest

FORMAT = 1
POINTER, MANIFEST, LOCK, GENERATIONS, LEARNING = "current", "model.json", ".lock", "generations", "learning"
WEIGHTS = "weights.safetensors"
POINTER_BYTES, MANIFEST_BYTES, WEIGHTS_BYTES, PICTURE_BYTES = 4096, 2**26, 2**34, 2**24
ATTEMPTS = 50  # of a reader, each after a writer has put another generation in place
GENERATION = re.compile(r"\d{6,9}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
# Why there is no generation to go back to, as `current` has it and as people are told.
FIRST, LEFT_OUT, REMOVED, UNDONE, SAVED, DAMAGED = "first", "left out", "removed", "undone", "saved", "damaged"
NOTHING_KEPT = {
    FIRST: "there was no model before its first lesson",
    LEFT_OUT: "the state before its last lesson was not kept, as asked for",
    REMOVED: "something was removed from it since its last lesson, and the state before still had that",
    UNDONE: "its last lesson was taken back already, and what is kept is one lesson",
    SAVED: "it was saved as it is, in place of what was there",
    DAMAGED: "what it was before its last lesson was damaged",
    "": "the version of engram that wrote it kept no earlier state",
}
FILE = re.compile(r"weights\.safetensors|(exemplars|heldout)/\d{5}/\d{5,8}\.png")

T = TypeVar("T")


class NoModelYet(EngramError):
    """A model directory whose first learning is not finished."""


class _Changed(Vanished):
    """A model.json is not the one that is looked for: damaged, or of a later generation that got the same number."""


@dataclass(frozen=True)
class Pointer:
    """What `current` says: the generation's name and the checksum of its model.json.

    previous: the generation that undoing goes back to; why: where there is none, a key of NOTHING_KEPT.
    """

    generation: str
    digest: str
    previous: Pointer | None = field(default=None, compare=False)
    why: str = field(default="", compare=False)


class Snapshot:
    """One generation: its model.json, and the other files, each checked when it is read."""

    def __init__(self, folder: Folder, pointer: Pointer, manifest: dict[str, Any]) -> None:
        self.pointer = pointer
        self.manifest = manifest
        self.path = folder.path
        self._folder = folder
        self._files: dict[str, tuple[int, str]] = _listed(manifest, self.path / MANIFEST)

    @property
    def names(self) -> set[str]:
        """The files that model.json lists."""
        return set(self._files)

    def size(self, name: str) -> int:
        """The bytes of a file, as listed."""
        return self._files[name][0]

    def paths(self) -> dict[str, Path]:
        """The place of each file, by its checksum."""
        return {checksum: self.path / name for name, (_, checksum) in self._files.items()}

    def bytes_beside(self, other: Snapshot) -> int:
        """The bytes of the files that the other has not; those that both have are links."""
        theirs = other.paths()
        return sum(size for size, checksum in self._files.values() if checksum not in theirs)

    def read(self, name: str) -> bytes:
        """A file's content, found unchanged."""
        if name not in self._files:
            raise EngramError(f"{self.path / MANIFEST} does not list {name}; the model is damaged")
        size, checksum = self._files[name]
        content = self._folder.read(name, size)
        if len(content) != size or digest(content) != checksum:
            way = "" if name == WEIGHTS else ", or remove this image from the model with remove_images"
            raise EngramError(
                f"{self.path / name} is damaged (its checksum does not match); restore it from a copy of the model{way}"
            )
        return content


def read_model(path: str | Path, reader: Callable[[Snapshot], T]) -> T:
    """What the reader makes of the model as it is now: all of it from one generation.

    A generation that a writer replaced and removed meanwhile is let go for the new one.
    """
    root = Path(path)
    if not root.is_dir():
        raise EngramError(f"there is no model at {path}")
    seen: Pointer | None = None
    for _ in range(ATTEMPTS):
        try:
            with Folder.open(root) as folder:
                return _read_generation(folder, read_pointer(folder), reader)
        except Vanished as error:
            with suppress(EngramError, Vanished), Folder.open(root) as folder:
                seen, before = read_pointer(folder), seen
                if seen not in (before, None):
                    continue
            missing = Path(str(error))
            if missing.name == POINTER:
                raise EngramError(f"{root} is not a model directory: it has no file {POINTER!r}") from None
            raise EngramError(f"{_what_is_wrong(error)}; restore it from a copy of the model") from None
    raise EngramError(f"the model at {path} was replaced {ATTEMPTS} times while it was read; try again")


def read_previous(path: str | Path, reader: Callable[[Snapshot], T], pointer: Pointer | None = None) -> T:
    """What the reader makes of the generation that undoing goes back to; refuses where there is none, or not whole.

    pointer: what `current` said, where that is known.
    """
    try:
        with Folder.open(Path(path)) as folder:
            pointer = pointer or read_pointer(folder)
            if pointer.previous is None:
                raise EngramError(f"there is nothing to undo: {NOTHING_KEPT.get(pointer.why, NOTHING_KEPT[''])}")
            return _read_generation(folder, pointer.previous, reader)
    except Vanished as error:
        raise EngramError(f"there is nothing to undo: {_what_is_wrong(error)}") from None


def _read_generation(root: Folder, pointer: Pointer, reader: Callable[[Snapshot], T]) -> T:
    with root.enter(GENERATIONS) as generations, generations.enter(pointer.generation) as generation:
        return reader(_snapshot(generation, pointer))


def _what_is_wrong(error: Vanished) -> str:
    how = "is damaged (its checksum does not match)" if isinstance(error, _Changed) else "is missing"
    return f"{error} {how}"


def looks_like_model(path: Path) -> bool:
    """Whether there is a model at the path, or one that is being learned."""
    return (path / POINTER).is_file() and any((path / name).is_dir() for name in (GENERATIONS, LEARNING))


def read_pointer(folder: Folder) -> Pointer:
    """What `current` says."""
    path = folder.path / POINTER
    data = parse_json(folder.read(POINTER, POINTER_BYTES), path)
    _check_format(data, path)
    if data.get("generation", "") is None:
        raise NoModelYet(f"there is no model at {folder.path} yet: learning its first classes is not finished")
    before = data.get("previous")
    previous = None if before is None else Pointer(*_named(before, path))
    return Pointer(*_named(data, path), previous, str(data.get("why", "")))


def _named(data: Any, path: Path) -> tuple[str, str]:
    """The generation that an entry of `current` names, and its checksum."""
    generation, checksum = (data.get(key) for key in ("generation", "digest")) if isinstance(data, dict) else ("", "")
    if not isinstance(generation, str) or not GENERATION.fullmatch(generation):
        raise EngramError(f"{path} names no generation: it is damaged; restore it from a copy of the model")
    if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
        raise EngramError(f"{path} has no checksum: it is damaged; restore it from a copy of the model")
    return generation, checksum


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in a file's content; anything else is refused with a sentence."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:40]} is no number that a model has")
        return value

    def whole(text: str) -> int:
        if len(text) > 20:
            raise ValueError(f"{text[:20]}... is larger than any number of a model")
        return int(text)

    try:
        data = json.loads(content.decode("utf-8"), parse_constant=number, parse_float=number, parse_int=whole)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EngramError(f"{path} is no JSON: it is damaged ({reason})") from None
    if not isinstance(data, dict):
        raise EngramError(f"{path} should hold a JSON object and holds a {type(data).__name__}; it is damaged")
    return data


def _check_format(data: dict[str, Any], path: Path) -> None:
    found = data.get("format")
    if isinstance(found, int) and not isinstance(found, bool) and found > FORMAT:
        raise EngramError(
            f"{path} has format {found}, and this is engram {version()}, which reads up to format {FORMAT}; "
            "use a newer version of engram"
        )
    if found != FORMAT or isinstance(found, bool):
        raise EngramError(f"{path} has format {found!r:.40}, which is none of engram's; it is damaged")


def _snapshot(generation: Folder, pointer: Pointer) -> Snapshot:
    path = generation.path / MANIFEST
    content = generation.read(MANIFEST, MANIFEST_BYTES)
    if digest(content) != pointer.digest:
        raise _Changed(str(path))
    data = parse_json(content, path)
    _check_format(data, path)
    return Snapshot(generation, pointer, data)


def _listed(manifest: dict[str, Any], path: Path) -> dict[str, tuple[int, str]]:
    """The files that model.json lists, with size and checksum; names that lead elsewhere are refused."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise EngramError(f"{path} does not list the model's files; it is damaged")
    listed: dict[str, tuple[int, str]] = {}
    for name, entry in files.items():
        if not FILE.fullmatch(name):
            raise EngramError(f"{path} lists {name!r:.80}, which is no file of a model; it is damaged")
        size, checksum = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        limit = WEIGHTS_BYTES if name == WEIGHTS else PICTURE_BYTES
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= limit:
            raise EngramError(f"{path} gives {name} no possible size; it is damaged")
        if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
            raise EngramError(f"{path} gives {name} no checksum; it is damaged")
        listed[name] = (size, checksum)
    return listed
