"""Change a model on disk: one process at a time, and each change completely or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from engram.core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.core.errors import EngramError, option
from engram.core.io import TEMPORARY, lock, writing
from engram.core.provenance import version
from engram.core.safe_folder import (
    Folder,
    MissingFile,
    digest,
    is_real_folder,
    read_inside,
    sync_folder,
    write_new,
)
from engram.models.store.generations import (
    FILE,
    FORMAT,
    GENERATION,
    GENERATIONS,
    LEARNING,
    LOCK,
    MANIFEST,
    MANIFEST_BYTES,
    POINTER,
    RUN,
    UNDO_STEPS,
    NoModelYet,
    Pointer,
    Snapshot,
    not_a_model,
    pointer_checksum,
    read_model,
    read_pointer,
    read_previous,
)

STATE = "state.safetensors"
_PARTIAL = re.compile(rf"{GENERATION.pattern}(\.[0-9a-f]{{8}})?{re.escape(TEMPORARY)}")  # names of partial generations

File = tuple[str, Callable[[], bytes]]  # name, and a function that returns the content


class Writer:
    """Exclusive access to a model directory, as a context; a second process is refused.

    create: allow a new or empty directory.
    """

    def __init__(self, path: str | Path, create: bool = False) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._is_new = False  # created here and still empty
        refuse_other_directory(self.path)
        if create:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
        if not self.path.is_dir():
            raise EngramError(f"there is no model at {self.path}")
        self._acquire()
        try:
            if create and not (self.path / POINTER).exists():
                self._is_new = True
                self._switch(None)
            self.clean_up()
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
        """Release the lock; delete a directory that was created and is still empty."""
        if self._lock is None:
            return
        if self._is_new and not (self.path / LEARNING).exists():
            with suppress(OSError):
                if (self.path / GENERATIONS).exists():
                    (self.path / GENERATIONS).rmdir()  # fails if there is a model
                for name in (POINTER, f".{POINTER}{TEMPORARY}", LOCK):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def current(self) -> Pointer | None:
        """Return the current generation, or None if there is none yet."""
        try:
            with Folder.open(self.path) as folder:
                return read_pointer(folder)
        except NoModelYet:
            return None
        except MissingFile:
            raise not_a_model(self.path) from None

    def commit(
        self,
        manifest: dict[str, Any],
        files: Iterable[File],
        *,
        previous: Pointer | None = None,
        why: str = "",
        steps: int | None = None,
    ) -> Pointer:
        """Write a generation and make it the current one.

        previous: the generation to keep for undo, with those before it. why: the reason if there is none, a key of
        NOTHING_KEPT. steps: how many of these to keep; None keeps as many as there were, and at least UNDO_STEPS.
        """
        return self.adopt(self.write_generation(manifest, files), previous=previous, why=why, steps=steps)

    def adopt(
        self, generation: Pointer, *, previous: Pointer | None = None, why: str = "", steps: int | None = None
    ) -> Pointer:
        """Make a written generation the current one, atomically; the arguments are those of `commit`."""
        if previous is not None:
            previous = previous.keeping(max(UNDO_STEPS, len(previous.earlier())) if steps is None else steps)
        pointer = replace(generation, previous=previous, why=why)
        try:
            self._switch(pointer)
        except BaseException:
            self.clean_up()
            raise
        self.drop_learning()
        self.clean_up()
        return pointer

    def write_generation(self, manifest: dict[str, Any], files: Iterable[File]) -> Pointer:
        """Write a complete generation to disk, without making it the current one.

        A file that the current or the previous generation has, under any name, is linked instead of written.
        """
        place = self._free_place()
        part = place.with_name(f"{place.name}.{secrets.token_hex(4)}{TEMPORARY}")
        try:
            with writing(part):
                part.mkdir(parents=True)
                listed = self._write_files(part, files)
                content = {"format": FORMAT, "engram": version(), **manifest, "files": listed}
                text = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
                write_new(part / MANIFEST, text)
                for folder in sorted({part, *(path for path in part.rglob("*") if path.is_dir())}, reverse=True):
                    sync_folder(folder)
                part.rename(place)
                sync_folder(place.parent)
        except BaseException:
            self.clean_up()
            raise
        return Pointer(place.name, digest(text))

    def _write_files(self, part: Path, files: Iterable[File]) -> dict[str, list[int | str]]:
        """Write files in parallel, because each waits for the disk; return size and checksum of each by name."""
        held: dict[str, tuple[Path, str]] = {}
        for read in (read_previous, read_model):
            with suppress(EngramError):  # without a file to link to, it is written
                held |= read(self.path, Snapshot.by_checksum)

        def put(file: File) -> tuple[str, list[int | str]]:
            name, content = file[0], file[1]()
            assert FILE.fullmatch(name), name
            path, checksum = part / name, digest(content)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (checksum in held and _link(*held[checksum], path, content)):
                write_new(path, content)
            return name, [len(content), checksum]

        pool = ThreadPoolExecutor(8, "write")
        try:
            return dict(pool.map(put, files))
        finally:
            pool.shutdown(cancel_futures=True)

    def _switch(self, pointer: Pointer | None) -> None:
        """Replace `current` atomically; None: there is no model yet."""
        data: dict[str, Any] = {"format": FORMAT, **_pointer_entry(pointer)}
        text = json.dumps({**data, "checksum": pointer_checksum(data)})
        temporary = self.path / f".{POINTER}{TEMPORARY}"
        with writing(self.path / POINTER):
            temporary.unlink(missing_ok=True)
            write_new(temporary, (text + "\n").encode())
            os.replace(temporary, self.path / POINTER)
            sync_folder(self.path)

    def learning(self) -> Checkpoint | None:
        """Return the checkpoint of an unfinished lesson, or None."""
        path = self.path / LEARNING / STATE
        if not os.path.lexists(path):
            return None
        try:
            return load_checkpoint(path, self.path)
        except EngramError as error:
            raise EngramError(
                f"learning in {self.path} cannot be resumed: the checkpoint {path} is damaged or from another "
                f"version; drop it with {option('restart', True)} and start again"
            ) from error

    def save_learning(self, checkpoint: Checkpoint) -> None:
        """Save the checkpoint of a lesson, replacing the one before."""
        save_checkpoint(self.path / LEARNING / STATE, checkpoint, self.path)

    def drop_learning(self) -> None:
        """Delete the checkpoint of an unfinished lesson."""
        place = self.path / LEARNING
        if is_real_folder(place):
            shutil.rmtree(place, ignore_errors=True)

    def _free_place(self) -> Path:
        """Return the path of the next generation: a number above the current one that nothing has yet."""
        pointer = self.current()
        number = 1 if pointer is None else 1 + max(int(each.generation) for each in _named_by(pointer))
        while os.path.lexists(place := self.path / GENERATIONS / f"{number:06d}"):
            number += 1
        return place

    def clean_up(self) -> None:
        """Delete what a killed process left: partial generations, and those that were replaced.

        Anything else in the folder is left alone. Complete generations are deleted only if it is certain that the
        current one is another: `current` is verified, and so is the generation that it names.
        """
        self._refuse_links()
        place, pointer = self.path / GENERATIONS, self.current()
        named = {each.generation for each in _named_by(pointer)}
        doubtful = _named_by(pointer)[:1] if pointer is None or pointer.is_verified else _named_by(pointer)
        is_certain = all(map(self._is_intact, doubtful))
        for entry in list(place.iterdir()) if place.exists() else []:
            is_replaced = is_certain and GENERATION.fullmatch(entry.name) and entry.name not in named
            if (is_replaced or _PARTIAL.fullmatch(entry.name)) and is_real_folder(entry):
                shutil.rmtree(entry, ignore_errors=True)
        with suppress(OSError):
            (self.path / f".{POINTER}{TEMPORARY}").unlink()

    def _is_intact(self, pointer: Pointer) -> bool:
        """Return whether the model.json of a generation has the checksum in `current`."""
        try:
            content = read_inside(self.path, f"{GENERATIONS}/{pointer.generation}/{MANIFEST}", MANIFEST_BYTES)
        except (EngramError, MissingFile):
            return False
        return digest(content) == pointer.digest

    def _refuse_links(self) -> None:
        for name in (GENERATIONS, LEARNING):
            place = self.path / name
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise EngramError(f"{place} is a link or a file, not a folder of this model; remove it")

    def _acquire(self) -> None:
        with writing(self.path / LOCK):
            self._lock = lock(self.path / LOCK)
        if self._lock is None:
            raise EngramError(f"another process is changing the model at {self.path}; wait for it")


def clean_up_model(path: str | Path) -> None:
    """Delete what a killed process left in the model at that path, unless another process is writing there."""
    with suppress(EngramError, OSError):
        Writer(path).close()


def _named_by(pointer: Pointer | None) -> list[Pointer]:
    """Return the generations that `current` names: the current one, and the earlier ones that are kept."""
    return [] if pointer is None else [pointer, *pointer.earlier()]


def _pointer_entry(pointer: Pointer | None) -> dict[str, Any]:
    """Return a generation as an entry of `current`, with the earlier ones."""
    if pointer is None:
        return {"generation": None, "digest": None}
    entry: dict[str, Any] = {"generation": pointer.generation, "digest": pointer.digest}
    if pointer.previous is not None:
        entry["previous"] = _pointer_entry(pointer.previous)
    elif pointer.why:
        entry["why"] = pointer.why
    return entry


def refuse_other_directory(path: Path) -> None:
    """Refuse a file, or a directory that is not empty and not a model."""
    if path.is_symlink() and not path.exists():
        raise EngramError(f"{path} is a broken link; remove it, or choose another path for the model")
    if path.exists() and not path.is_dir():
        raise EngramError(f"{path} is a file, and a model is a directory; choose another path")
    if not path.is_dir() or (path / POINTER).exists():
        return
    others = [entry.name for entry in path.iterdir() if entry.name not in (LOCK, f".{POINTER}{TEMPORARY}")]
    if GENERATIONS in others:
        raise EngramError(f"{path} has lost its file {POINTER!r}: it is damaged; restore it from a copy")
    if RUN in others:
        raise not_a_model(path)
    if others:
        raise EngramError(f"{path} is not a model directory and holds {min(others)!r}; choose a new or empty one")


def _link(folder: Path, name: str, path: Path, content: bytes) -> bool:
    """Create a hard link to a file in a folder if it has this content; return whether that worked."""
    try:
        if read_inside(folder, name, len(content)) != content:
            return False
        os.link(folder / name, path, follow_symlinks=False)
    except (OSError, EngramError, MissingFile):
        return False
    return True
