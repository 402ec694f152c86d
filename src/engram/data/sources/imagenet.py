"""ImageNet, all classes or the first 100, from the usual folders: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG.

Images are decoded once, to squares: the shorter side is resized to 256 pixels and the centre is cropped. Evaluation
sees what the protocol prescribes (the central 224 pixels); training takes its random crops from the square instead of
the whole photograph (docs/imagenet.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import data_home, reading, typed_path
from engram.data.decode.formats import EXTENSIONS
from engram.data.decode.image import decode_protocol_square, unreadable_error, why_unreadable
from engram.data.decode.prefetch import Report
from engram.data.sources.image_cache import Description, ImageCache
from engram.data.store import RGB, DataSplit, Images, ImageStore, some

IMAGENET: Final = {"imagenet100": 100, "imagenet1000": 1000}
SIDE: Final = 256
MEAN: Final[RGB] = (0.485, 0.456, 0.406)
STD: Final[RGB] = (0.229, 0.224, 0.225)
CACHE: Final = "images"

_SPLITS: Final = ("train", "val")
_DECODING: Final = 1  # version; increase it if the same files give different pixels
_CHUNK: Final = 512  # files handed to the threads at once


@dataclass(frozen=True)
class _File:
    """An image file: class id, path relative to the root, and size and time of change, to detect changes."""

    class_id: int
    path: str
    size: int
    changed: int


def read_imagenet(
    name: str,
    path: str | Path,
    *,
    side: int | None = None,
    skip_bad: bool = False,
    progress: Report | None = None,
) -> ImageStore:
    """Read ImageNet, decoded to squares of `side` pixels in a memory-mapped file that is cached.

    Parameters
    ----------
    name: "imagenet100" or "imagenet1000". The classes are the sorted wnids.
    skip_bad: leave out files that cannot be decoded, and list them in `skipped`.
    progress: called with the number of images decoded and of all images.
    """
    root, side = typed_path(path), SIDE if side is None else side
    wnids, files = _list_all(name, root)
    cache, key = ImageCache(data_home() / CACHE), _key(name, side, files)
    description, decoder = cache.description(key), _Decoder(root, side, skip_bad, progress)
    if description is not None and [len(description.counts.get(split, ())) for split in _SPLITS] != 2 * [len(wnids)]:
        description = None  # it is damaged
    if description is not None and description.skipped and not skip_bad:
        decoder.check(description.skipped)
        description = None  # all of them can be read now
    if description is None:
        description = decoder.decode(cache, key, files)
        store = _store(name, wnids, description, cache.images(key, description.images, side))
        description = replace(description, fingerprint=store.fingerprint())
        cache.describe(key, description)
    return _store(name, wnids, description, cache.images(key, description.images, side))


def outline_imagenet(name: str, path: str | Path, side: int | None, skip_bad: bool) -> tuple[ImageStore, str] | None:
    """Return ImageNet with blank images, to plan a run, and what decoding it takes; None if it is decoded already."""
    root, side = typed_path(path), SIDE if side is None else side
    wnids, files = _list_all(name, root)
    cache = ImageCache(data_home() / CACHE)
    description = cache.description(_key(name, side, files))
    if description is not None and (skip_bad or not description.skipped):
        return None
    ids = {split: [file.class_id for file in files[split]] for split in _SPLITS}
    count = sum(map(len, ids.values()))
    counts = {split: tuple(np.bincount(ids[split], minlength=len(wnids)).tolist()) for split in _SPLITS}
    outline = Description(count, side, counts, fingerprint="not decoded")
    blank = np.broadcast_to(np.zeros((1, side, side, 3), np.uint8), (count, side, side, 3))
    takes = f"{count:,} images of {side}x{side} pixels into {cache.folder}, about {count * side**2 * 3 / 1e9:.2g} GB"
    return _store(name, wnids, outline, blank), takes


def _store(name: str, wnids: Sequence[str], description: Description, images: Images) -> ImageStore:
    ids = [np.repeat(np.arange(len(wnids), dtype=np.int64), description.counts[split]) for split in _SPLITS]
    train, test = DataSplit(images[: len(ids[0])], ids[0]), DataSplit(images[len(ids[0]) :], ids[1])
    store = ImageStore(name, train, test, tuple(wnids), mean=MEAN, std=STD, skipped=description.skipped, origin=name)
    return replace(store, known_fingerprint=description.fingerprint)


def published_wnids() -> tuple[str, ...]:
    """Return the class names of imagenet100, by class id."""
    text = resources.files("engram.data").joinpath("class_orders.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["orders"]["imagenet100"]["wnids"])


def _class_names(name: str, root: Path) -> tuple[str, ...]:
    """Return the sorted wnids of the data set; raise an EngramError if the folder has another layout or lacks some."""
    for split in _SPLITS:
        if not (root / split).is_dir():
            raise EngramError(
                f"{root} has no folder {split}/; give the folder of ImageNet with train/ and val/ as {option('data')}"
            )
    found = {split: _folders(root / split) for split in _SPLITS}
    _refuse_flat(root / "val", found["val"])
    wnids = published_wnids() if name == "imagenet100" else tuple(found["train"])
    if len(wnids) != IMAGENET[name]:
        raise EngramError(
            f"{root / 'train'} has {len(wnids):,} class folders with names like n01440764, and {name} has "
            f"{IMAGENET[name]:,}; give all of ImageNet, or use an imagenet100 recipe"
        )
    for split in _SPLITS:
        missing = sorted(set(wnids) - set(found[split]))
        if missing:
            raise EngramError(
                f"{root / split} lacks {len(missing)} of the {len(wnids):,} class folders of {name}: {some(missing, 3)}"
            )
    return wnids


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if re.fullmatch(r"n\d{8}", entry.name) and entry.is_dir())


def _refuse_flat(folder: Path, found: Sequence[str]) -> None:
    """Raise an EngramError for validation images as they are distributed: in one folder, without their classes."""
    if found:
        return
    with os.scandir(folder) as entries:
        flat = any(Path(entry.name).suffix.lower() in EXTENSIONS for entry in entries)
    if flat:
        raise EngramError(
            f"{folder} has its images directly inside instead of in class folders; move each into a folder named after "
            "its wnid, with the public script valprep.sh or by the table LOC_val_solution.csv: image, then wnid"
        )


def _list_all(name: str, root: Path) -> tuple[tuple[str, ...], dict[str, list[_File]]]:
    """Return the sorted wnids of the data set, and the image files of each split."""
    with reading(root):
        wnids = _class_names(name, root)
        return wnids, {split: _list_files(root, split, wnids) for split in _SPLITS}


def _list_files(root: Path, split: str, wnids: Sequence[str]) -> list[_File]:
    """Return the image files of a split, sorted by class and name."""
    files: list[_File] = []
    for class_id, wnid in enumerate(wnids):
        with os.scandir(root / split / wnid) as entries:
            images = [entry for entry in entries if Path(entry.name).suffix.lower() in EXTENSIONS]
        if not images:
            raise EngramError(
                f"the class folder {root / split / wnid} has no image; unpack ImageNet's {split} set again"
            )
        for entry in sorted(images, key=lambda entry: entry.name):
            status = entry.stat()
            files.append(_File(class_id, f"{split}/{wnid}/{entry.name}", status.st_size, status.st_mtime_ns))
    return files


def _key(name: str, side: int, files: dict[str, list[_File]]) -> str:
    """Return the cache key, which depends on the files' names, sizes and times of change, and on the image size."""
    digest = hashlib.blake2b(repr((_DECODING, side)).encode(), digest_size=12)
    for split in _SPLITS:
        for file in files[split]:
            digest.update(repr((file.class_id, file.path, file.size, file.changed)).encode())
    return f"{name}-{side}-{digest.hexdigest()}"


@dataclass
class _Decoder:
    """Decodes the files of all splits in threads, in their order, and lists those that were skipped."""

    root: Path
    side: int
    skip_bad: bool
    progress: Report | None
    skipped: list[str] = field(default_factory=list)

    def decode(self, cache: ImageCache, key: str, files: dict[str, list[_File]]) -> Description:
        """Write the pixels of all files to the cache and return the description of the data set."""
        counts = {split: [0] * (files[split][-1].class_id + 1) for split in _SPLITS}
        listed = [file for split in _SPLITS for file in files[split]]
        with closing(self._images(listed, counts)) as decoded:
            images = cache.save(key, decoded, len(listed) * self.side**2 * 3)
        by_class = {split: tuple(numbers) for split, numbers in counts.items()}
        return Description(images, self.side, by_class, tuple(self.skipped), str(self.root.resolve()))

    def check(self, skipped: Sequence[str]) -> None:
        """Raise an EngramError for the first of these files that still cannot be decoded."""
        for path in skipped:
            found = self._attempt(path)
            if isinstance(found, EngramError):
                self._skip(path, found)

    def _images(self, files: Sequence[_File], counts: dict[str, list[int]]) -> Generator[Images, None, None]:
        """Yield the images that can be decoded, and count them by split and class."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for start in range(0, len(files), _CHUNK):
                part = files[start : start + _CHUNK]
                images = threads.map(self._attempt, [file.path for file in part])
                for done, (file, image) in enumerate(zip(part, images, strict=True), start + 1):
                    if isinstance(image, EngramError):
                        self._skip(file.path, image)
                    else:
                        counts[file.path.partition("/")[0]][file.class_id] += 1
                        yield image
                    if self.progress is not None:
                        self.progress(done, len(files))

    def _attempt(self, path: str) -> Images | EngramError:
        try:
            return decode_square(self.root / path, self.side)
        except EngramError as error:
            return error

    def _skip(self, path: str, error: EngramError) -> None:
        if not self.skip_bad:
            raise error
        self.skipped.append(path)


def decode_square(file: Path, side: int) -> Images:
    """Decode an image file and resize its central square to (side, side, 3)."""
    try:
        return decode_protocol_square(file, side)
    except Exception as error:  # each decoder raises its own types
        raise unreadable_error(file, why_unreadable(error)) from None
