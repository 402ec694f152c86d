"""A model directory: complete generations, and a small file that names the current one.

    MODEL/current                   current generation and the checksum of its model.json; the same of the earlier
                                    ones; a checksum of this file
    MODEL/generations/000003/       model.json, weights.safetensors, exemplars/, heldout/
    MODEL/generations/000002/       the model before the last change, for undo; before that one there may be others
    MODEL/learning/                 checkpoint of a lesson in progress
    MODEL/.lock                     locked by the one process that writes

A new generation is written next to the old one and synced to disk; then `current` is replaced atomically. If the
process is killed at any moment, `current` names a complete generation. Readers take no lock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from engram.core.errors import EngramError
from engram.core.io import parse_json
from engram.core.provenance import version
from engram.core.safe_folder import Folder, MissingFile, digest
from engram.runs.directory import MANIFEST as RUN
from engram.runs.directory import find_runs

FORMAT = 1
POINTER, MANIFEST, LOCK, GENERATIONS, LEARNING = "current", "model.json", ".lock", "generations", "learning"
WEIGHTS, FEATURES_FILE = "weights.safetensors", "heldout/features.safetensors"
POINTER_BYTES, MANIFEST_BYTES, WEIGHTS_BYTES, PICTURE_BYTES = 4096, 2**26, 2**34, 2**24
ATTEMPTS = 50  # a reader starts again when a writer has replaced the generation
GENERATION = re.compile(r"\d{6,9}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
UNDO_STEPS, MOST_UNDO_STEPS = 3, 20  # earlier states that are kept by default, and at most
# Why there is nothing to undo: the key in `current`, and the reason in words.
FIRST, LEFT_OUT, REMOVED, UNDONE, SAVED, LIMIT = "first", "left out", "removed", "undone", "saved", "limit"
NOTHING_KEPT = {
    FIRST: "there was no model before its first lesson",
    LEFT_OUT: "the state before was not kept, as asked for",
    REMOVED: "something was removed from it permanently, and the states before still had that",
    UNDONE: "its last lesson was undone already, and only one was kept",
    SAVED: "it was saved as a whole, replacing the model that was there",
    LIMIT: "the states before this one are not kept any more",
    "damaged": "the state before its last lesson was damaged",  # written by early versions
    "": "the version of engram that wrote it kept no earlier state",
}
FILE = re.compile(r"weights\.safetensors|heldout/features\.safetensors|(exemplars|heldout)/\d{5}/\d{5,8}\.png")

T = TypeVar("T")


class NoModelYet(EngramError):
    """The first lesson of this model directory is not finished."""


class _ChecksumMismatch(MissingFile):
    """A model.json has another checksum: it is damaged, or belongs to a later generation with the same number."""


@dataclass(frozen=True)
class Pointer:
    """The content of `current`: the generation's name and the checksum of its model.json.

    previous: the generation that undo restores, with those that further undos restore. why: if there is none, the
    reason, a key of NOTHING_KEPT. is_verified: `current` has a checksum of itself.
    """

    generation: str
    digest: str
    previous: Pointer | None = field(default=None, compare=False)
    why: str = field(default="", compare=False)
    is_verified: bool = field(default=True, compare=False)

    def earlier(self) -> list[Pointer]:
        """Return the earlier generations that are kept, the latest first."""
        return [] if self.previous is None else [self.previous, *self.previous.earlier()]

    def keeping(self, steps: int) -> Pointer | None:
        """Return this generation with fewer earlier ones, so that these are that many with it; None for 0."""
        if not steps:
            return None
        if self.previous is None:
            return self
        kept = self.previous.keeping(steps - 1)
        return replace(self, previous=kept, why=LIMIT if kept is None else self.why)


class Snapshot:
    """One generation: the JSON of its model.json, and its other files, each verified when it is read."""

    def __init__(self, folder: Folder, pointer: Pointer, content: dict[str, Any]) -> None:
        self.pointer = pointer
        self.content = content
        self.path = folder.path
        self._folder = folder
        self._files: dict[str, tuple[int, str]] = _listed_files(content, self.path / MANIFEST)

    @property
    def names(self) -> set[str]:
        """Names of the files that model.json lists."""
        return set(self._files)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, as listed."""
        return self._files[name][0]

    def by_checksum(self) -> dict[str, tuple[Path, str]]:
        """Return the folder of this generation and the name of each file, by the file's checksum."""
        return {checksum: (self.path, name) for name, (_, checksum) in self._files.items()}

    def extra_bytes(self, others: Container[str]) -> int:
        """Return the bytes of the files whose checksums others do not have; shared files are hard links."""
        return sum(size for size, checksum in self._files.values() if checksum not in others)

    def read(self, name: str) -> bytes:
        """Return the content of a file; refuse it if its checksum does not match."""
        if name not in self._files:
            raise EngramError(f"{self.path / MANIFEST} does not list {name}; the model is damaged")
        size, checksum = self._files[name]
        content = self._folder.read(name, size)
        if len(content) != size or digest(content) != checksum:
            way = "" if not name.endswith(".png") else ", or remove this image from the model with remove_images"
            raise EngramError(
                f"{self.path / name} is damaged (its checksum does not match); restore it from a copy of the model{way}"
            )
        return content


def read_model(path: str | Path, reader: Callable[[Snapshot], T]) -> T:
    """Call the reader with the current generation and return its result.

    If a writer replaces and removes the generation during the read, the reader is called again with the new one.
    """
    root = Path(path)
    if root.is_file():
        raise EngramError(f"{path} is a file, and a model is a directory; only 'engram predict' takes an exported file")
    if not root.is_dir():
        raise EngramError(f"there is no model at {path}")
    seen: Pointer | None = None
    for _ in range(ATTEMPTS):
        try:
            with Folder.open(root) as folder:
                return _read_generation(folder, read_pointer(folder), reader)
        except MissingFile as error:
            with suppress(EngramError, MissingFile), Folder.open(root) as folder:
                seen, before = read_pointer(folder), seen
                if seen not in (before, None):
                    continue
            missing = Path(str(error))
            if missing.name == POINTER:
                raise not_a_model(root) from None
            raise EngramError(f"{_problem(error)}; restore it from a copy of the model") from None
    raise EngramError(f"the model at {path} was replaced {ATTEMPTS} times while it was read; try again")


def read_previous(path: str | Path, reader: Callable[[Snapshot], T], pointer: Pointer | None = None) -> T:
    """Call the reader with the generation that undo restores; refuse if there is none or it is damaged.

    pointer: the content of `current`, if it was read already.
    """
    try:
        with Folder.open(Path(path)) as folder:
            pointer = pointer or read_pointer(folder)
            if pointer.previous is None:
                raise EngramError(f"there is nothing to undo: {NOTHING_KEPT.get(pointer.why, NOTHING_KEPT[''])}")
            return _read_generation(folder, pointer.previous, reader)
    except MissingFile as error:
        raise EngramError(f"there is nothing to undo: {_problem(error)}") from None


def _read_generation(root: Folder, pointer: Pointer, reader: Callable[[Snapshot], T]) -> T:
    with root.enter(GENERATIONS) as generations, generations.enter(pointer.generation) as generation:
        return reader(_snapshot(generation, pointer))


def _problem(error: MissingFile) -> str:
    how = "is damaged (its checksum does not match)" if isinstance(error, _ChecksumMismatch) else "is missing"
    return f"{error} {how}"


def refuse_model(path: Path) -> None:
    """Refuse a model directory that was given instead of a run directory."""
    if looks_like_model(path):
        raise EngramError(
            f"{path} is a model, not a run directory: 'engram info {path}' describes it, and 'engram learn {path} "
            "IMAGES' teaches it more classes"
        )


def not_a_model(path: Path) -> EngramError:
    """Return the error for a directory without a model; it says what can be done with a run directory."""
    if (path / RUN).is_file():
        return EngramError(
            f"{path} is a run directory, not a model: 'engram report {path}' shows its results, and "
            f"'engram learn MODEL IMAGES --from {path}' makes a model of it"
        )
    if runs := find_runs(path):
        return EngramError(
            f"{path} is a folder of runs, not a model; 'engram predict' and 'engram export' take one of them, such as "
            f"{runs[0]}"
        )
    return EngramError(f"{path} is not a model directory: it has no file {POINTER!r}")


def looks_like_model(path: Path) -> bool:
    """Return whether there is a model at the path, finished or in its first lesson."""
    with suppress(OSError):  # a folder that may not be read
        return (path / POINTER).is_file() and any((path / name).is_dir() for name in (GENERATIONS, LEARNING))
    return False


def read_pointer(folder: Folder) -> Pointer:
    """Read `current`. Damage never reads as "no model yet" or "nothing to undo"."""
    path = folder.path / POINTER
    data = _json_object(folder.read(POINTER, POINTER_BYTES), path)
    _check_format(data, path)
    is_verified = "checksum" in data
    if is_verified and data["checksum"] != pointer_checksum(data):
        raise _damaged(path, "its checksum does not match")
    if unknown := data.keys() - {"format", "generation", "digest", "previous", "why", "checksum"}:
        raise _damaged(path, f"it has an unknown entry {min(unknown)!r:.40}")
    if not is_verified and data.get("why", "") not in NOTHING_KEPT:
        raise _damaged(path, f"{data['why']!r:.40} is no reason")
    if data.get("generation", "") is None:
        if not is_verified and (data.keys() != {"format", "generation", "digest"} or has_generations(folder.path)):
            raise _damaged(path, "it names no generation")
        raise NoModelYet(f"there is no model at {folder.path} yet: learning its first classes is not finished")
    return replace(_chain(data, path), is_verified=is_verified)


def _chain(data: Any, path: Path, depth: int = 0) -> Pointer:
    """Return the generation that an entry of `current` names, with the earlier ones."""
    if depth > MOST_UNDO_STEPS:
        raise _damaged(path, f"it names more than {MOST_UNDO_STEPS} earlier generations")
    generation, checksum = _named(data, path)
    previous = _chain(data["previous"], path, depth + 1) if "previous" in data else None
    return Pointer(generation, checksum, previous, str(data.get("why", UNDONE if depth else "")))


def has_generations(model: Path) -> bool:
    """Return whether there is a complete generation in the model at a path."""
    return any(GENERATION.fullmatch(entry.parent.name) for entry in model.glob(f"{GENERATIONS}/*/{MANIFEST}"))


def pointer_checksum(data: dict[str, Any]) -> str:
    """Return the checksum of everything in `current` but the checksum."""
    entries = {key: value for key, value in data.items() if key != "checksum"}
    return digest(json.dumps(entries, sort_keys=True).encode())


def _damaged(path: Path, how: str) -> EngramError:
    return EngramError(f"{path} is damaged: {how}; restore it from a copy of the model")


def _named(data: Any, path: Path) -> tuple[str, str]:
    """Return the generation that an entry of `current` names, and its checksum."""
    generation, checksum = (data.get(key) for key in ("generation", "digest")) if isinstance(data, dict) else ("", "")
    if not isinstance(generation, str) or not GENERATION.fullmatch(generation):
        raise _damaged(path, "it names no generation")
    if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
        raise _damaged(path, "it has no checksum of a generation")
    return generation, checksum


def _json_object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        data = parse_json(content)
    except ValueError as error:
        raise EngramError(f"{path} is not valid JSON: it is damaged ({error})") from None
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
        raise EngramError(f"{path} has format {found!r:.40}, which engram never used; it is damaged")


def _snapshot(generation: Folder, pointer: Pointer) -> Snapshot:
    path = generation.path / MANIFEST
    content = generation.read(MANIFEST, MANIFEST_BYTES)
    if digest(content) != pointer.digest:
        raise _ChecksumMismatch(str(path))
    data = _json_object(content, path)
    _check_format(data, path)
    return Snapshot(generation, pointer, data)


def _listed_files(content: dict[str, Any], path: Path) -> dict[str, tuple[int, str]]:
    """Return size and checksum of the files that model.json lists; refuse names outside the model."""
    files = content.get("files")
    if not isinstance(files, dict):
        raise EngramError(f"{path} does not list the model's files; it is damaged")
    listed: dict[str, tuple[int, str]] = {}
    for name, entry in files.items():
        if not FILE.fullmatch(name):
            raise EngramError(f"{path} lists {name!r:.80}, which is not a file of a model; it is damaged")
        size, checksum = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        limit = PICTURE_BYTES if name.endswith(".png") else WEIGHTS_BYTES
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= limit:
            raise EngramError(f"{path} gives {name} an impossible size; it is damaged")
        if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
            raise EngramError(f"{path} gives {name} no checksum; it is damaged")
        listed[name] = (size, checksum)
    return listed
