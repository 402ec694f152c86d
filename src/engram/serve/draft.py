"""The draft of a lesson: images that wait to be taught, in a folder beside the model that survives a restart.

    MODEL.draft/draft.json       the images with their names, classes and findings
    MODEL.draft/images/ID        their files, as they were sent
    MODEL.draft/lesson.json      the lesson that was started with some of them
    MODEL.draft/result.json      the result of that lesson, written by the process that learned
    MODEL.draft/incoming/        uploads that are being received
    MODEL.draft/.lock            locked by the one server that teaches this model

The model's own directory is left alone. Ids and names of files are the server's.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError
from engram.core.io import lock, read_json, write_json, writing
from engram.models.labels import encode_label
from engram.serve.limits import Limits, Refused
from engram.serve.uploads import Received, Spool

DRAFT, IMAGES, LESSON, RESULT, INCOMING, LOCK = (
    "draft.json",
    "images",
    "lesson.json",
    "result.json",
    "incoming",
    ".lock",
)
ID = re.compile(r"[0-9a-f]{16}")
NAME_LENGTH = 200
REJECTED = 200  # refused files that are remembered


@dataclass(frozen=True)
class DraftImage:
    """An image that waits to be taught. label: its class. digest: of its file. findings: see `answers.DraftFinding`."""

    id: str
    name: str
    label: str
    size: int
    digest: str
    findings: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Rejected:
    """A file that was refused."""

    name: str
    error: str


def class_name(text: str) -> str:
    """Return the name of a class as given in a request; refuse one that cannot be used."""
    name = unicodedata.normalize("NFC", text).strip()
    if not name:
        raise Refused(422, "the class has no name; give it one")
    if len(name) > NAME_LENGTH:
        raise Refused(422, f"the name of a class may have {NAME_LENGTH} characters, this has {len(name)}")
    if not name.isprintable():
        raise Refused(422, "the name of a class may only have printable characters")
    try:
        encode_label(name)
    except EngramError as error:
        raise Refused(422, str(error)) from None
    return name


class Draft:
    """Images that wait to be taught to one model. Every method may be called by any thread."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self.spool = Spool(folder / INCOMING, limits)
        self._limits = limits
        self._lock = threading.RLock()
        self._handle: int | None = None
        self._images: dict[str, DraftImage] = {}
        self._rejected: list[Rejected] = []
        self._frozen: frozenset[str] = frozenset()

    def open(self) -> None:
        """Lock the folder and read it, if it exists; refuse if another process has it. Nothing is created."""
        with self._lock:
            if self.folder.is_dir():
                self._own()

    @property
    def is_open(self) -> bool:
        """Whether this process has the folder."""
        return self._handle is not None

    def close(self) -> None:
        """Release the lock; delete a folder in which nothing is left."""
        with self._lock:
            if self._handle is None:
                return
            if not self._images and not (self.folder / LESSON).exists():
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._handle)
            self._handle = None

    def _own(self) -> None:
        """Lock the folder, which is created if necessary; refuse if another process has it."""
        if self._handle is not None:
            return
        with writing(self.folder):
            for name in (IMAGES, INCOMING):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            handle = lock(self.folder / LOCK)
        if handle is None:
            raise Refused(409, "another server teaches this model; use that one, or stop it")
        self._handle = handle
        self._read()

    def _read(self) -> None:
        """Read what a server before left, and delete files that belong to no image."""
        self._images, self._rejected = {}, []
        if (self.folder / DRAFT).exists():
            data = read_json(self.folder / DRAFT)
            for entry in data.get("images", ()):
                image = DraftImage(**{**entry, "findings": tuple(entry["findings"])})
                if ID.fullmatch(image.id) and (self.folder / IMAGES / image.id).is_file():
                    self._images[image.id] = image
            self._rejected = [Rejected(**entry) for entry in data.get("rejected", ())]
        for place in (self.folder / IMAGES).iterdir():
            if place.name not in self._images:
                place.unlink()
        for place in (self.folder / INCOMING).iterdir():
            place.unlink()

    def _write(self) -> None:
        images, rejected = map(asdict, self._images.values()), map(asdict, self._rejected)
        write_json(self.folder / DRAFT, {"images": list(images), "rejected": list(rejected)})

    def prepare(self) -> None:
        """Create the folder before an upload is received into it."""
        with self._lock:
            self._own()

    def images(self) -> list[DraftImage]:
        """Return the images, oldest first."""
        with self._lock:
            return list(self._images.values())

    def rejected(self) -> list[Rejected]:
        """Return the files that were refused last."""
        with self._lock:
            return list(self._rejected)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(image.size for image in self.images())

    def path(self, name: str) -> Path:
        """Return the file of an image by its id; refuse an id that the draft does not have."""
        with self._lock:
            if name not in self._images:
                raise Refused(404, "the draft has no such image")
            return self.folder / IMAGES / self._images[name].id

    def check_room(self, images: int, size: int) -> None:
        """Refuse more images than a draft may hold."""
        with self._lock:
            if len(self._images) + images > self._limits.draft_images:
                raise Refused(413, f"a draft may hold {self._limits.draft_images} images; teach or discard some first")
            if self.size + size > self._limits.draft_bytes:
                raise Refused(
                    413, f"a draft may hold {self._limits.draft_bytes >> 20} MiB; teach or discard some first"
                )

    def add(self, files: Sequence[Received], label: str) -> list[DraftImage]:
        """Take files into the draft; those with an error and those that it has already are remembered as refused."""
        with self._lock:
            self._own()
            readable = [file for file in files if file.error is None]
            self.check_room(len(readable), sum(file.size for file in readable))
            by_digest = {image.digest: image for image in self._images.values()}
            rejected = [Rejected(file.name, file.error) for file in files if file.error is not None]
            added: list[DraftImage] = []
            for file in readable:
                if (same := by_digest.get(file.digest)) is not None:
                    rejected.append(Rejected(file.name, f"the same file is in the draft already ({same.label})"))
                    continue
                image = DraftImage(secrets.token_hex(8), file.name, label, file.size, file.digest)
                os.replace(file.path, self.folder / IMAGES / image.id)
                by_digest[image.digest] = self._images[image.id] = image
                added.append(image)
            self._rejected = [*self._rejected, *rejected][-REJECTED:]
            self._write()
            return added

    def move(self, ids: Iterable[str], label: str) -> None:
        """Give images another class."""
        with self._lock:
            for name in self._free(ids):
                self._images[name] = replace(self._images[name], label=label, findings=())
            self._write()

    def discard(self, ids: Iterable[str] | None) -> int:
        """Delete images, or everything that is not being learned; return their number."""
        with self._lock:
            everything = ids is None
            gone = [name for name in self._images if name not in self._frozen] if ids is None else self._free(ids)
            if everything:
                self._rejected = []
            self._forget(gone)
            return len(gone)

    def _free(self, ids: Iterable[str]) -> list[str]:
        """Return ids; refuse unknown ones, and those that a lesson is learning."""
        names = list(dict.fromkeys(ids))
        if any(name not in self._images for name in names):
            raise Refused(404, "the draft has no such image")
        if not self._frozen.isdisjoint(names):
            raise Refused(409, "these images belong to an unfinished lesson; finish or discard it first")
        return names

    def _forget(self, ids: Iterable[str]) -> None:
        gone = [name for name in ids if self._images.pop(name, None) is not None]
        if self._handle is None:
            return
        self._write()
        for name in gone:
            with suppress(OSError):
                (self.folder / IMAGES / name).unlink()

    def freeze(self, ids: Iterable[str]) -> None:
        """Keep these images as they are until `thaw` or `taught`."""
        with self._lock:
            self._frozen = frozenset(ids)

    def thaw(self) -> None:
        """Allow changes to all images again."""
        self.freeze(())

    def taught(self, ids: Iterable[str]) -> None:
        """Delete images that were learned, and forget the files that were refused beside them."""
        with self._lock:
            self.thaw()
            self._rejected = []
            self._forget(ids)

    def find(self, findings: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Replace the findings of all images."""
        with self._lock:
            for name, image in self._images.items():
                self._images[name] = replace(image, findings=tuple(findings.get(name, ())))
            self._write()

    def read_lesson(self) -> dict[str, Any] | None:
        """Return what was saved about the last lesson."""
        with self._lock:
            return self._optional(LESSON)

    def read_result(self) -> dict[str, Any] | None:
        """Return the result that the process of the last lesson wrote."""
        with self._lock:
            return self._optional(RESULT)

    def _optional(self, name: str) -> dict[str, Any] | None:
        if self._handle is None:
            return None
        try:
            return read_json(self.folder / name)
        except EngramError:
            return None

    def write_lesson(self, data: Mapping[str, Any] | None) -> None:
        """Save something about the lesson; None deletes it."""
        with self._lock:
            self._own()
            if data is None:
                for name in (LESSON, RESULT):
                    (self.folder / name).unlink(missing_ok=True)
            else:
                write_json(self.folder / LESSON, dict(data))
