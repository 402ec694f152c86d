"""What people give as images: arrays, tensors or lists of paths, as uint8 (N, H, W, 3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engram.data.decode import choose_size
from engram.data.decoding import decode_files, decode_stream
from engram.data.store import Images, as_images
from engram.errors import EngramError

BATCH = 1024  # images looked at at once where all are not wanted


def are_paths(given: Any) -> bool:
    """Whether these are paths of image files rather than pixels."""
    if isinstance(given, (str, os.PathLike)):
        raise EngramError(f"X is the one path {str(given)!r}; give a list of paths")
    if isinstance(given, np.ndarray):
        return given.ndim == 1 and given.dtype.kind in "UO" and len(given) > 0 and isinstance(given[0], (str, Path))
    return isinstance(given, (list, tuple)) and len(given) > 0 and isinstance(given[0], (str, os.PathLike))


def read_images(given: Any, size: tuple[int, int] | None) -> Images:
    """The images, each of that size; without one, as large as the arrays are or as `choose_size` says of files."""
    if are_paths(given):
        paths = _paths(given)
        images, _, _ = decode_files(paths, choose_size(paths) if size is None else file_side(size))
        return images
    images = _pixels(given)
    _check_size(images, size)
    return images


def read_batches(given: Any, size: tuple[int, int]) -> Iterator[Images]:
    """The images some at a time, for predictions: what it needs does not grow with their number."""
    if are_paths(given):
        for part in decode_stream(_paths(given), file_side(size), batch=BATCH):
            if part.skipped:
                path, reason = part.skipped[0]
                raise EngramError(f"the image {path} cannot be read ({reason}); mend or remove it")
            yield part.images
        return
    if not hasattr(given, "__getitem__"):
        given = _array(given)
    for start in range(0, _length(given), BATCH):
        images = _pixels(given[start : start + BATCH])
        _check_size(images, size)
        yield images


def _paths(given: Any) -> list[str]:
    paths: list[str] = []
    for path in given:
        if not isinstance(path, (str, os.PathLike)):
            raise EngramError(f"X begins with a path, but holds {path!r:.60} too; give paths alone or one array")
        paths.append(os.fspath(path))
    return paths


def file_side(size: tuple[int, int]) -> int:
    """The side that image files are brought to; refuses a model whose images are no squares."""
    if size[0] != size[1]:
        raise EngramError(
            f"this model's images are {size[1]}x{size[0]} pixels, and files become squares; give arrays of that size"
        )
    return size[0]


def _length(given: Any) -> int:
    if hasattr(given, "toarray") or isinstance(given, np.matrix):
        raise EngramError(
            f"X is a {type(given).__name__}: sparse input is not supported; images are arrays (N, height, width, 3)"
        )
    try:
        count = len(given)
    except TypeError:
        raise EngramError(f"X is {given!r:.60}; images are an array (N, height, width, 3) or a list of paths") from None
    if not count:
        raise EngramError("X holds 0 sample(s); give at least one image")
    return count


def _pixels(given: Any) -> Images:
    array = _array(given)
    _length(array)
    if array.dtype.kind == "c":
        raise EngramError("Complex data not supported: X holds complex numbers, and images are uint8 or floats")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise EngramError("X holds NaN or inf; images are uint8, or floats from 0 to 1")
    if array.ndim not in (3, 4):
        raise EngramError(
            f"X has the shape {array.shape}, but images are (N, height, width) or (N, height, width, 3). "
            "Reshape your data"
        )
    if array.dtype.kind == "f":
        if array.min() < 0 or array.max() > 1:
            raise EngramError(
                f"X holds floats from {array.min():g} to {array.max():g}; images are uint8, or floats from 0 to 1"
            )
        array = np.rint(array * 255).astype(np.uint8)
    return as_images(array, "X")


def _array(given: Any) -> np.ndarray:
    if type(given).__module__.partition(".")[0] == "torch":
        given = given.detach().cpu().numpy()
    elif not hasattr(given, "__array__"):
        _length(given)
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise EngramError(f"X could not be read as one array ({str(error).splitlines()[0]}); give one array") from None


def _check_size(images: Images, size: tuple[int, int] | None) -> None:
    if size is not None and images.shape[1:3] != size:
        raise EngramError(
            f"the images are {images.shape[2]}x{images.shape[1]} pixels, and this model learned from "
            f"{size[1]}x{size[0]}; resize them"
        )
