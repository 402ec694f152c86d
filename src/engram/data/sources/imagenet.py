"""ImageNet, all classes or the first 100, from the usual folders: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG.

Images are decoded once, to squares: the shorter side is resized to 256 pixels and the centre is cropped. Evaluation
sees what the protocol prescribes (the central 224 pixels); training takes its random crops from the square instead of
the whole photograph, unless it is asked for the photographs' files (docs/imagenet.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import data_home, reading, typed_path
from engram.data.decode.formats import EXTENSIONS
from engram.data.decode.image import decode_protocol_square, unreadable_error, why_unreadable
from engram.data.decode.prefetch import Report
from engram.data.photographs import Photographs
from engram.data.sources.decoding import Decoding, check_files
from engram.data.sources.image_cache import Description, FolderRecord, ImageCache, Notice, folder_name
from engram.data.store import RGB, DataSplit, Images, ImageStore, some

IMAGENET: Final = {"imagenet100": 100, "imagenet1000": 1000}
SIDE: Final = 256
MEAN: Final[RGB] = (0.485, 0.456, 0.406)
STD: Final[RGB] = (0.229, 0.224, 0.225)
CACHE: Final = "images"

_SPLITS: Final = ("train", "val")
_DECODING: Final = 1  # version; increase it if the same files give different pixels
CHECKED_FILES: Final = 256  # whose size and time are compared when a decoded folder is used again


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
    photographs: bool = False,
    progress: Report | None = None,
    notice: Notice | None = None,
) -> ImageStore:
    """Read ImageNet, decoded to squares of `side` pixels in a memory-mapped file that is cached.

    Parameters
    ----------
    name: "imagenet100" or "imagenet1000". The classes are the sorted wnids.
    skip_bad: leave out files that cannot be decoded, and list them in `skipped`.
    photographs: also return the files of the training images, which are all listed then.
    progress: called with the number of images decoded and of all images.
    notice: called with a sentence if another process is decoding the same images, which this one waits for.
    """
    root, side = typed_path(path), SIDE if side is None else side
    cache = ImageCache(data_home() / CACHE)
    known = None if photographs else _recognise(cache, name, side, root)
    description = None if known is None else _usable(cache, known.key, known.classes, skip_bad)
    if known is not None and description is not None:
        return _store(name, known.classes, description, cache.images(known.key, description.images, side))
    wnids, files = _list_all(name, root)
    key = _key(name, side, files)
    description = _usable(cache, key, wnids, skip_bad)
    if description is None:
        attempt = partial(_attempt, root, side)
        with cache.locked(key, notice):
            before = cache.description(key)
            if before is not None and not skip_bad:
                check_files(before.skipped, attempt)
            description = _usable(cache, key, wnids, skip_bad)
            if description is None:  # also if all files that were skipped can be read now
                listed = {split: [(file.class_id, file.path) for file in files[split]] for split in _SPLITS}
                decoding = Decoding(cache, key, side, wnids, listed, attempt, progress)
                description = replace(decoding.decode(skip_bad), source=str(root.resolve()))
                cache.finish(key, description)
    cache.remember(folder_name(name, side, root), _record(root, key, wnids, files))
    store = _store(name, wnids, description, cache.images(key, description.images, side))
    return replace(store, photographs=_photographs(root, files["train"], store)) if photographs else store


def _photographs(root: Path, files: Sequence[_File], store: ImageStore) -> Photographs:
    """Return the files of the training images, which are in the order of the files without those that were skipped."""
    skipped = set(store.skipped)
    kept = [file for file in files if file.path not in skipped]
    if [file.class_id for file in kept] != store.train.class_ids.tolist():
        raise EngramError(
            f"{root / 'train'} has {len(kept):,} readable image files, and {len(store.train):,} images were decoded "
            f"from it; delete the decoded images in {data_home() / CACHE} to decode them again"
        )
    digest = hashlib.blake2b(digest_size=16)
    for file in kept:
        digest.update(repr((file.path, file.size)).encode())
    return Photographs(root.resolve(), tuple(file.path for file in kept), digest.hexdigest())


def _usable(cache: ImageCache, key: str, wnids: Sequence[str], skip_bad: bool) -> Description | None:
    """Return the description of a decoded set if it is complete and as asked."""
    found = cache.description(key)
    if found is None or [len(found.counts.get(split, ())) for split in _SPLITS] != 2 * [len(wnids)]:
        return None
    return None if found.fingerprint is None or (found.skipped and not skip_bad) else found


def _recognise(cache: ImageCache, name: str, side: int, root: Path) -> FolderRecord | None:
    """Return the record of a folder that was decoded before and seems unchanged; None if it has to be listed.

    It compares the times of change of train/, val/ and every class folder, which change when a file is added, removed
    or renamed, and size and time of change of CHECKED_FILES files. It does not look at the other files.
    """
    known = cache.recall(folder_name(name, side, root))
    if known is None:
        return None
    try:
        folders = {path: (root / path).stat().st_mtime_ns for path in known.folders}
        files = {path: _stamp((root / path).stat()) for path in known.files}
    except OSError:
        return None
    return known if folders == dict(known.folders) and files == dict(known.files) else None


def _record(root: Path, key: str, wnids: Sequence[str], files: dict[str, list[_File]]) -> FolderRecord:
    """Return what identifies a folder: the times of its class folders, and some of its files."""
    paths = [*_SPLITS, *(f"{split}/{wnid}" for split in _SPLITS for wnid in wnids)]
    folders = {path: (root / path).stat().st_mtime_ns for path in paths}
    listed = [file for split in _SPLITS for file in files[split]]
    some_files = listed[:: max(1, len(listed) // CHECKED_FILES)]
    return FolderRecord(key, tuple(wnids), folders, {file.path: (file.size, file.changed) for file in some_files})


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _attempt(root: Path, side: int, path: str) -> Images | EngramError:
    try:
        return decode_square(root / path, side)
    except EngramError as error:
        return error


def outline_imagenet(
    name: str, path: str | Path, side: int | None, skip_bad: bool, photographs: bool = False
) -> tuple[ImageStore, str] | None:
    """Return ImageNet with blank images, to plan a run, and what decoding it takes; None if it is decoded already."""
    root, side = typed_path(path), SIDE if side is None else side
    cache = ImageCache(data_home() / CACHE)
    known = _recognise(cache, name, side, root)
    if known is not None and _usable(cache, known.key, known.classes, skip_bad) is not None:
        return None
    wnids, files = _list_all(name, root)
    if _usable(cache, _key(name, side, files), wnids, skip_bad) is not None:
        return None
    ids = {split: [file.class_id for file in files[split]] for split in _SPLITS}
    count = sum(map(len, ids.values()))
    counts = {split: tuple(np.bincount(ids[split], minlength=len(wnids)).tolist()) for split in _SPLITS}
    outline = Description(count, side, counts, fingerprint="not decoded")
    blank = np.broadcast_to(np.zeros((1, side, side, 3), np.uint8), (count, side, side, 3))
    takes = f"{count:,} images of {side}x{side} pixels into {cache.folder}, about {count * side**2 * 3 / 1e9:.2g} GB"
    store = _store(name, wnids, outline, blank)
    return (replace(store, photographs=_photographs(root, files["train"], store)) if photographs else store), takes


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


def decode_square(file: Path, side: int) -> Images:
    """Decode an image file and resize its central square to (side, side, 3)."""
    try:
        return decode_protocol_square(file, side)
    except Exception as error:  # each decoder raises its own types
        raise unreadable_error(file, why_unreadable(error)) from None
