"""Read images given as arrays, tensors, paths, open files or Pillow images into uint8 arrays (N, H, W, 3)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.data.arrays import as_array, as_images, is_column, is_dataset, read_dataset
from engram.data.decode.image import Images, Source, choose_size, read_all, try_decode, why_unreadable
from engram.data.decode.prefetch import decode_files, decode_stream

BATCH = 1024  # images read at a time for prediction
_LARGE = threading.Lock()  # only one thread at a time decodes a large upload


def are_paths(given: Any) -> bool:
    """Return whether these are paths of image files rather than pixels."""
    if isinstance(given, (str, os.PathLike)):
        raise EngramError(f"X is a single path {str(given)!r}; give a list of paths")
    if isinstance(given, (list, tuple)):
        return len(given) > 0 and isinstance(given[0], (str, os.PathLike))
    if not isinstance(getattr(given, "shape", None), tuple) or len(given.shape) != 1:
        return False  # an array of paths, or a column of a table, has one dimension
    first = next(iter(given), None)
    return isinstance(first, (str, os.PathLike))


def read_images(given: Any, size: tuple[int, int] | None, preferred: int | None = None) -> Images:
    """Read images of that size. None: the size of arrays; for files the preferred side, or that of `choose_size`."""
    if is_column(given):
        given = list(given)
    if are_paths(given):
        paths = _paths(given)
        images, _, _ = decode_files(paths, (preferred or choose_size(paths)) if size is None else file_side(size))
        return images
    if _are_uploads(given, size):
        sources = _sources(given)
        return _squares(sources, (preferred or choose_size(sources)) if size is None else file_side(size))
    images = read_dataset(given, "X")[0] if is_dataset(given) else _pixels(given)
    if size is not None:
        _check_size(images, size)
    return images


def _decode_all(paths: Sequence[str], side: int) -> tuple[Images, list[int]]:
    images, positions, _ = decode_files(paths, side)
    return images, positions


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files that are read when they are needed.

    decode: from paths and a side to images and the positions of the files that could be read.
    """

    paths: Sequence[str]
    decode: Callable[[Sequence[str], int], tuple[Images, list[int]]] = _decode_all


class LessonImages:
    """Images given to a lesson. Files are read when they are needed: those of known classes may be left out."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._pixels: Images | None = None
        self._files: ImageFiles | None = None
        if isinstance(given, ImageFiles):
            self._files = given
        elif are_paths(given):
            self._files = ImageFiles(_paths(given))

    @property
    def files(self) -> Sequence[str]:
        """The paths of the images, if they are files; else none."""
        return () if self._files is None else self._files.paths

    def own_size(self, preferred: int | None = None) -> tuple[int, int]:
        """Return the size for a new model. preferred: the side that files are resized to."""
        if self._files is not None:
            side = preferred or choose_size(self._files.paths)
            return side, side
        self._pixels = read_images(self._given, None, preferred)
        return self._pixels.shape[1], self._pixels.shape[2]

    def check_count(self, labels: int, size: tuple[int, int]) -> None:
        """Refuse another number of labels than of images."""
        count = len(self._all(size)) if self._files is None else len(self._files.paths)
        if count != labels:
            raise EngramError(f"{count} images need {count} labels, got {labels}")

    def read(self, rows: Sequence[int], size: tuple[int, int]) -> tuple[Images, list[int]]:
        """Return the images of these rows, and the rows that could be read."""
        if self._files is None:
            images = self._all(size)
            return images if len(rows) == len(images) else images[list(rows)], list(rows)
        images, positions = self._files.decode([self._files.paths[row] for row in rows], file_side(size))
        return images, [rows[position] for position in positions]

    def names(self, rows: Sequence[int]) -> list[str] | None:
        """Return the paths of these rows; None if the images are not files."""
        return None if self._files is None else [self._files.paths[row] for row in rows]

    def _all(self, size: tuple[int, int]) -> Images:
        if self._pixels is None:
            self._pixels = read_images(self._given, size)
        _check_size(self._pixels, size)
        return self._pixels


def read_batches(given: Any, size: tuple[int, int]) -> Iterator[Images]:
    """Read images in batches, so that the memory needed does not depend on their number."""
    if is_column(given):
        for start in range(0, _length(given), BATCH):
            yield from read_batches(list(given[start : start + BATCH]), size)
        return
    if are_paths(given):
        for part in decode_stream(_paths(given), file_side(size), batch=BATCH):
            if part.skipped:
                path, reason = part.skipped[0]
                raise EngramError(f"the image {path} cannot be read ({reason}); repair or remove it")
            yield part.images
        return
    if _are_uploads(given, size):
        for start in range(0, len(given), BATCH):
            yield _squares(_sources(given[start : start + BATCH], start), file_side(size), start)
        return
    if is_dataset(given):
        for start in range(0, _length(given), BATCH):
            images, _ = read_dataset(given, "X", range(start, min(start + BATCH, len(given))))
            _check_size(images, size)
            yield images
        return
    _refuse_kinds(given)
    if not hasattr(given, "__getitem__"):
        given = as_array(given, "X")
    for start in range(0, _length(given), BATCH):
        images = _pixels(given[start : start + BATCH])
        _check_size(images, size)
        yield images


def _paths(given: Any) -> list[str]:
    paths: list[str] = []
    for path in given:
        if not isinstance(path, (str, os.PathLike)):
            raise EngramError(f"X begins with a path, but holds {path!r:.60} too; give only paths, or one array")
        paths.append(os.fspath(path))
    return paths


def _is_upload(item: Any) -> bool:
    return isinstance(item, (bytes, bytearray, Image.Image)) or hasattr(item, "read")


def _are_uploads(given: Any, size: tuple[int, int] | None) -> bool:
    """Return whether these are decoded like files: bytes of files, open files and Pillow images.

    A list of only Pillow images is read as an array if their own size is used, or the size is not a square.
    """
    if not isinstance(given, (list, tuple)) or not given or not all(map(_is_upload, given)):
        return False
    if not all(isinstance(item, Image.Image) for item in given):
        return True
    return len({item.size for item in given}) > 1 if size is None else size[0] == size[1]


def _sources(given: Sequence[Any], start: int = 0) -> list[Source]:
    """Return the sources with open files read. start: index of the first, for messages."""
    sources: list[Source] = []
    for place, item in enumerate(given, start):
        try:
            sources.append(read_all(item) if hasattr(item, "read") else item)
        except Exception as error:  # an object of the user may raise anything
            raise _unreadable(place, why_unreadable(error)) from None
    return sources


def _squares(sources: Sequence[Source], side: int, start: int = 0) -> Images:
    check_memory(len(sources) * side * side * 3, f"{len(sources)} images of {side}x{side} pixels")
    images = np.empty((len(sources), side, side, 3), dtype=np.uint8)
    for place, source in enumerate(sources):
        found = try_decode(source, side, quick=True, large=_one_at_a_time)
        if isinstance(found, str):
            raise _unreadable(start + place, found)
        images[place] = found
    return images


def _one_at_a_time(load: Callable[[], Images | str]) -> Images | str:
    with _LARGE:
        return load()


def _unreadable(place: int, reason: str) -> EngramError:
    return EngramError(f"the image X[{place}] cannot be read ({reason}); repair it or leave it out")


def file_side(size: tuple[int, int]) -> int:
    """Return the side that image files are resized to; refuse a model whose images are not square."""
    if size[0] != size[1]:
        raise EngramError(
            f"this model's images are {size[1]}x{size[0]} pixels, but files are resized to squares; "
            "give arrays of that size"
        )
    return size[0]


def _length(given: Any) -> int:
    _refuse_kinds(given)
    try:
        count = len(given)
    except TypeError:
        raise EngramError(f"X is {given!r:.60}; images are an array (N, height, width, 3) or a list of paths") from None
    if not count:
        raise EngramError("X holds 0 sample(s); give at least one image")
    return count


def _refuse_kinds(given: Any) -> None:
    """Refuse objects that look like an array but cannot be sliced into images."""
    if _is_upload(given):
        raise EngramError(f"X is a single image ({type(given).__name__}); give a list of images, or one array")
    is_tensor = isinstance(given, torch.Tensor)
    if hasattr(given, "toarray") or isinstance(given, np.matrix) or (is_tensor and given.layout != torch.strided):
        raise EngramError(
            f"X is a {type(given).__name__}: sparse input is not supported; images are arrays (N, height, width, 3)"
        )
    if is_tensor and given.is_meta:
        raise EngramError("X is a tensor on the device 'meta', which holds no values; use another device")
    if isinstance(given, (Mapping, Set)):
        raise EngramError(
            f"X is a {type(given).__name__}; images are an array (N, height, width, 3) or a list of paths"
        )


def _pixels(given: Any) -> Images:
    _refuse_kinds(given)
    if not hasattr(given, "__array__"):
        _length(given)
    if isinstance(given, (list, tuple)):
        odd = [item for item in given if _is_upload(item) and not isinstance(item, Image.Image)]
        if odd:
            raise EngramError(
                f"X holds {odd[0]!r:.40} among others; give only files and Pillow images, only paths, or one array"
            )
    array = as_array(given, "X")
    _length(array)
    return as_images(array, "X")


def _check_size(images: Images, size: tuple[int, int]) -> None:
    if images.shape[1:3] != size:
        single = "; a single image is x[None]" if images.shape[2:] == (3, 3) and images.shape[:2] == size else ""
        raise EngramError(
            f"the images are {images.shape[2]}x{images.shape[1]} pixels, and this model's are {size[1]}x{size[0]}; "
            f"resize them{single}"
        )
