"""A model on disk: generations, each complete, and a small file that says which one is the model.

    MODEL/current                   which generation, and the checksum of its model.json
    MODEL/generations/000003/       model.json, weights.safetensors, exemplars/, heldout/
    MODEL/learning/                 learning in progress, to be resumed
    MODEL/.lock                     held by the one process that may write

A new generation is written beside the old one and brought to disk; then `current` is replaced in one step. Whatever
moment that is cut off at, `current` names a complete generation. Readers take no lock.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from engram.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.errors import EngramError
from engram.files import TEMPORARY, writing
from engram.modeldir.files import Folder, Vanished, digest, is_real_folder, sync_folder, write_new
from engram.rundir import version

FORMAT = 1
POINTER, MANIFEST, LOCK, GENERATIONS, LEARNING = "current", "model.json", ".lock", "generations", "learning"
STATE = "state.safetensors"
WEIGHTS = "weights.safetensors"
POINTER_BYTES, MANIFEST_BYTES, WEIGHTS_BYTES, PICTURE_BYTES = 4096, 2**26, 2**34, 2**24
ATTEMPTS = 50  # of a reader, each after a writer has put another generation in place
_GENERATION = re.compile(r"\d{6,9}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"weights\.safetensors|(exemplars|heldout)/\d{5}/\d{5,8}\.png")

T = TypeVar("T")


class NoModelYet(EngramError):
    """A model directory whose first learning is not finished."""


@dataclass(frozen=True)
class Pointer:
    """What `current` says: the generation's name and the checksum of its model.json."""

    generation: str
    digest: str


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

    def digests(self) -> dict[str, str]:
        """The checksum of each file."""
        return {name: checksum for name, (_, checksum) in self._files.items()}

    def read(self, name: str) -> bytes:
        """A file's content, found unchanged."""
        if name not in self._files:
            raise EngramError(f"{self.path / MANIFEST} does not list {name}; the model is damaged")
        size, checksum = self._files[name]
        content = self._folder.read(name, size)
        if len(content) != size or digest(content) != checksum:
            raise EngramError(
                f"{self.path / name} is damaged (its checksum does not match); restore it from a copy of the model"
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
                pointer = read_pointer(folder)
                with folder.enter(GENERATIONS) as generations, generations.enter(pointer.generation) as generation:
                    return reader(_snapshot(generation, pointer))
        except Vanished as error:
            with suppress(EngramError, Vanished), Folder.open(root) as folder:
                seen, before = read_pointer(folder), seen
                if seen not in (before, None):
                    continue
            missing = Path(str(error))
            if missing.name == POINTER:
                raise EngramError(f"{root} is not a model directory: it has no file {POINTER!r}") from None
            raise EngramError(f"{missing} is missing: the model is damaged; restore it from a copy") from None
    raise EngramError(f"the model at {path} was replaced {ATTEMPTS} times while it was read; try again")


def read_pointer(folder: Folder) -> Pointer:
    """What `current` says."""
    path = folder.path / POINTER
    data = parse_json(folder.read(POINTER, POINTER_BYTES), path)
    _check_format(data, path)
    generation, checksum = data.get("generation"), data.get("digest")
    if generation is None and "generation" in data:
        raise NoModelYet(f"there is no model at {folder.path} yet: learning its first classes is not finished")
    if not isinstance(generation, str) or not _GENERATION.fullmatch(generation):
        raise EngramError(f"{path} names no generation: it is damaged; restore it from a copy of the model")
    if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
        raise EngramError(f"{path} has no checksum: it is damaged; restore it from a copy of the model")
    return Pointer(generation, checksum)


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
        raise EngramError(f"{path} is damaged (its checksum does not match); restore it from a copy of the model")
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
        if not _FILE.fullmatch(name):
            raise EngramError(f"{path} lists {name!r:.80}, which is no file of a model; it is damaged")
        size, checksum = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        limit = WEIGHTS_BYTES if name == WEIGHTS else PICTURE_BYTES
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= limit:
            raise EngramError(f"{path} gives {name} no possible size; it is damaged")
        if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
            raise EngramError(f"{path} gives {name} no checksum; it is damaged")
        listed[name] = (size, checksum)
    return listed


class Writer:
    """The right to change a model, for one process at a time; the second to ask is refused.

    create: the directory may be new or empty. Use it as a context.
    """

    def __init__(self, path: str | Path, create: bool = False) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._begun = False  # here, and there is nothing in it yet
        if create:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
        if not self.path.is_dir():
            raise EngramError(f"there is no model at {self.path}")
        self._refuse_others()
        self._acquire()
        try:
            if create and not (self.path / POINTER).exists():
                self._switch(None)
                self._begun = True
            self._clean_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets another process write; a directory that was begun for nothing is taken back."""
        if self._lock is None:
            return
        if self._begun and not any((self.path / name).exists() for name in (LEARNING, GENERATIONS)):
            with suppress(OSError):
                (self.path / POINTER).unlink()
                (self.path / LOCK).unlink()
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def current(self) -> Pointer | None:
        """The generation that is the model now; None where there is none yet."""
        try:
            with Folder.open(self.path) as folder:
                return read_pointer(folder)
        except NoModelYet:
            return None
        except Vanished:
            raise EngramError(f"{self.path} is not a model directory: it has no file {POINTER!r}") from None

    def commit(self, manifest: dict[str, Any], files: Iterable[tuple[str, bytes]]) -> Pointer:
        """Makes these files, and a model.json that lists them, the model: all of it, or nothing changes.

        A file that the generation before had under any name is linked, not written again.
        """
        before = self.current()
        number = 1 + max([int(name) for name in self._generations()], default=0)
        place = self.path / GENERATIONS / f"{number:06d}"
        part = place.with_name(place.name + TEMPORARY)
        with writing(part):
            part.mkdir(parents=True)
            try:
                listed = self._write_files(part, files, before)
                content = {"format": FORMAT, "engram": version(), **manifest, "files": listed}
                text = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
                write_new(part / MANIFEST, text)
                for folder in sorted({part, *(path for path in part.rglob("*") if path.is_dir())}, reverse=True):
                    sync_folder(folder)
                part.rename(place)
                sync_folder(place.parent)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            pointer = Pointer(place.name, digest(text))
            try:
                self._switch(pointer)
            except BaseException:
                if self.current() != pointer:
                    shutil.rmtree(place, ignore_errors=True)
                raise
        self.drop_learning()
        self._clean_up()
        return pointer

    def _write_files(
        self, part: Path, files: Iterable[tuple[str, bytes]], before: Pointer | None
    ) -> dict[str, list[int | str]]:
        held: dict[str, Path] = {}
        if before is not None:
            with suppress(EngramError, Vanished):  # what cannot be linked is written
                folder = self.path / GENERATIONS / before.generation
                digests = read_model(self.path, Snapshot.digests)
                held = {checksum: folder / name for name, checksum in digests.items() if name != WEIGHTS}
        listed: dict[str, list[int | str]] = {}
        for name, content in files:
            assert _FILE.fullmatch(name), name
            path, checksum = part / name, digest(content)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (checksum in held and _link(held[checksum], path, content)):
                write_new(path, content)
            listed[name] = [len(content), checksum]
        return listed

    def _switch(self, pointer: Pointer | None) -> None:
        """Puts another `current` in place, in one step; None: there is no model yet."""
        generation, checksum = (None, None) if pointer is None else (pointer.generation, pointer.digest)
        text = json.dumps({"format": FORMAT, "generation": generation, "digest": checksum})
        temporary = self.path / f".{POINTER}{TEMPORARY}"
        with writing(self.path / POINTER):
            temporary.unlink(missing_ok=True)
            write_new(temporary, (text + "\n").encode())
            os.replace(temporary, self.path / POINTER)
            sync_folder(self.path)

    def learning(self) -> Checkpoint | None:
        """Where learning stood that was not finished; None where there is none."""
        place = self.path / LEARNING
        if not (place / STATE).exists() and not (place / STATE).is_symlink():
            return None
        try:
            if not is_real_folder(place) or (place / STATE).is_symlink() or not (place / STATE).is_file():
                raise EngramError(f"{place} holds what is not engram's")
            return load_checkpoint(place / STATE)
        except EngramError as error:
            reason = str(error).removesuffix("; start the run again")
            raise EngramError(f"learning in {self.path} cannot be resumed: {reason}; drop it and start again") from None

    def save_learning(self, checkpoint: Checkpoint) -> None:
        """Keeps where learning stands, in place of what was kept before."""
        place = self.path / LEARNING
        with writing(place):
            place.mkdir(exist_ok=True)
        self._refuse_links()
        save_checkpoint(place / STATE, checkpoint)

    def drop_learning(self) -> None:
        """Forgets learning in progress."""
        place = self.path / LEARNING
        if is_real_folder(place):
            shutil.rmtree(place, ignore_errors=True)

    def _generations(self) -> list[str]:
        place = self.path / GENERATIONS
        if not is_real_folder(place):
            return []
        return [entry.name for entry in place.iterdir() if _GENERATION.fullmatch(entry.name)]

    def _clean_up(self) -> None:
        """Removes what a kill left: half-written generations, and those that are not the model any more."""
        self._refuse_links()
        place, pointer = self.path / GENERATIONS, self.current()
        if place.exists():
            for entry in list(place.iterdir()):
                if pointer is None or entry.name != pointer.generation:
                    shutil.rmtree(entry, ignore_errors=True)
        with suppress(OSError):
            (self.path / f".{POINTER}{TEMPORARY}").unlink()

    def _refuse_others(self) -> None:
        """Refuses a directory that is somebody else's."""
        if (self.path / POINTER).exists():
            return
        others = [entry.name for entry in self.path.iterdir() if entry.name not in (LOCK, f".{POINTER}{TEMPORARY}")]
        if GENERATIONS in others:
            raise EngramError(f"{self.path} has lost its file {POINTER!r}: it is damaged; restore it from a copy")
        if others:
            raise EngramError(
                f"{self.path} is not a model directory and holds {min(others)!r}; choose a new or empty one"
            )

    def _refuse_links(self) -> None:
        for name in (GENERATIONS, LEARNING):
            place = self.path / name
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise EngramError(f"{place} is no folder of this model (a link, or a file); remove it")

    def _acquire(self) -> None:
        path = self.path / LOCK
        with writing(path):
            while True:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_at(path, handle):
                        break
                except BlockingIOError:
                    os.close(handle)
                    raise EngramError(f"another process is changing the model at {self.path}; wait for it") from None
                except BaseException:
                    os.close(handle)
                    raise
                os.close(handle)  # it was removed between opening and locking
        self._lock = handle


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one that the path names now."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _link(source: Path, path: Path, content: bytes) -> bool:
    """Another name for a file that has this content; False where that cannot be had."""
    try:
        if source.is_symlink() or source.read_bytes() != content:
            return False
        os.link(source, path, follow_symlinks=False)
    except OSError:
        return False
    return True
