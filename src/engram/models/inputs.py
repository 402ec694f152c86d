"""What people give as images: arrays, tensors or lists of paths, of files or of pictures, as uint8 (N, H, W, 3)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from PIL import Image

from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.data.decode.image import Source, choose_size, read_all, to_upright_rgb, try_decode, why_unreadable
from engram.data.decode.prefetch import decode_files, decode_stream
from engram.data.store import Images, as_images

BATCH = 1024  # images looked at at once where all are not wanted
_LARGE = threading.Lock()  # held by the thread that has a large upload in memory


def are_paths(given: Any) -> bool:
    """Whether these are paths of image files rather than pixels."""
    if isinstance(given, (str, os.PathLike)):
        raise EngramError(f"X is the one path {str(given)!r}; give a list of paths")
    if isinstance(given, (list, tuple)):
        return len(given) > 0 and isinstance(given[0], (str, os.PathLike))
    if not isinstance(getattr(given, "shape", None), tuple) or len(given.shape) != 1:
        return False  # of one dimension: an array of paths, or a column of a table
    first = next(iter(given), None)
    return isinstance(first, (str, os.PathLike))


def read_images(given: Any, size: tuple[int, int] | None) -> Images:
    """The images, each of that size; without one, as large as the arrays are or as `choose_size` says of files."""
    if are_paths(given):
        paths = _paths(given)
        images, _, _ = decode_files(paths, choose_size(paths) if size is None else file_side(size))
        return images
    if _are_uploads(given, size):
        sources = _sources(given)
        return _squares(sources, choose_size(sources) if size is None else file_side(size))
    images = _pixels(given)
    if size is not None:
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
    if _are_uploads(given, size):
        for start in range(0, len(given), BATCH):
            yield _squares(_sources(given[start : start + BATCH], start), file_side(size), start)
        return
    _refuse_kinds(given)
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


def _is_upload(item: Any) -> bool:
    return isinstance(item, (bytes, bytearray, Image.Image)) or hasattr(item, "read")


def _are_uploads(given: Any, size: tuple[int, int] | None) -> bool:
    """Whether these are prepared as files are: the bytes of files, open files and pictures.

    Pictures alone are arrays where the size is to be theirs, or is no square.
    """
    if not isinstance(given, (list, tuple)) or not given or not all(map(_is_upload, given)):
        return False
    if not all(isinstance(item, Image.Image) for item in given):
        return True
    return len({item.size for item in given}) > 1 if size is None else size[0] == size[1]


def _sources(given: Sequence[Any], start: int = 0) -> list[Source]:
    """What was uploaded, open files read; start: the place of the first, for who is told of one."""
    sources: list[Source] = []
    for place, item in enumerate(given, start):
        try:
            sources.append(read_all(item) if hasattr(item, "read") else item)
        except Exception as error:  # whatever such an object raises
            raise _unreadable(place, why_unreadable(error)) from None
    return sources


def _squares(sources: Sequence[Source], side: int, start: int = 0) -> Images:
    check_memory(len(sources) * side * side * 3, f"{len(sources)} images of {side}x{side} pixels")
    images = np.empty((len(sources), side, side, 3), dtype=np.uint8)
    for place, source in enumerate(sources):
        found = try_decode(source, side, quick=True, large=_alone)
        if isinstance(found, str):
            raise _unreadable(start + place, found)
        images[place] = found
    return images


def _alone(load: Callable[[], Images | str]) -> Images | str:
    with _LARGE:
        return load()


def _unreadable(place: int, reason: str) -> EngramError:
    return EngramError(f"the image X[{place}] cannot be read ({reason}); mend it or leave it out")


def file_side(size: tuple[int, int]) -> int:
    """The side that image files are brought to; refuses a model whose images are no squares."""
    if size[0] != size[1]:
        raise EngramError(
            f"this model's images are {size[1]}x{size[0]} pixels, and files become squares; give arrays of that size"
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
    """Refuses what may look like an array, but has no pixels to slice."""
    if _is_upload(given):
        raise EngramError(f"X is one image ({type(given).__name__}); give a list of images, or one array")
    is_tensor = isinstance(given, torch.Tensor)
    if hasattr(given, "toarray") or isinstance(given, np.matrix) or (is_tensor and given.layout != torch.strided):
        raise EngramError(
            f"X is a {type(given).__name__}: sparse input is not supported; images are arrays (N, height, width, 3)"
        )
    if is_tensor and given.is_meta:
        raise EngramError("X is a tensor on the device 'meta', which holds no values; give one that does")
    if isinstance(given, (Mapping, Set)):
        raise EngramError(
            f"X is a {type(given).__name__}; images are an array (N, height, width, 3) or a list of paths"
        )


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
    _refuse_kinds(given)
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        return (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    if not hasattr(given, "__array__"):
        _length(given)
    if isinstance(given, (list, tuple)):
        odd = [item for item in given if _is_upload(item) and not isinstance(item, Image.Image)]
        if odd:
            raise EngramError(f"X holds {odd[0]!r:.40} among others; give files and pictures, paths alone or one array")
        given = [_picture(item) if isinstance(item, Image.Image) else item for item in given]
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        shapes = {getattr(item, "shape", None) for item in given} if isinstance(given, list) else set()
        reason = "the images differ in size" if len(shapes - {None}) > 1 else str(error).splitlines()[0]
        raise EngramError(f"X could not be read as one array ({reason}); give one array") from None


def _picture(image: Image.Image) -> np.ndarray:
    try:
        return np.asarray(to_upright_rgb(image))
    except Exception as error:  # it may be read from its file only now, and each decoder has its own kinds
        name = getattr(image, "filename", "") or "a picture in X"
        raise EngramError(f"{name} cannot be read ({' '.join(str(error).split())}); mend or leave it out") from None


def _check_size(images: Images, size: tuple[int, int]) -> None:
    if images.shape[1:3] != size:
        alone = "; one image alone is x[None]" if images.shape[2:] == (3, 3) and images.shape[:2] == size else ""
        raise EngramError(
            f"the images are {images.shape[2]}x{images.shape[1]} pixels, and this model's are {size[1]}x{size[0]}; "
            f"resize them{alone}"
        )
