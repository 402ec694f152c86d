"""Image files to pixels, for files from anywhere: a damaged or hostile one is refused by name and fills no memory.

What came another way, as the bytes of a file or as a picture of Pillow, is prepared in the same manner.
"""

from __future__ import annotations

import io
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import IO, Any, Final, cast

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from engram.data.store import Images

EXTENSIONS: Final = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp")
FILE_BYTES: Final = 512 * 2**20
SIZES: Final = (16, 24, 32, 48, 64)  # that an image size is chosen from
LOOKED_AT: Final = 200  # images, about, to choose it
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP")
_LARGE_PIXELS: Final = 4_000_000
_READ_BYTES: Final = 2**20  # at once

Source = str | Path | bytes | bytearray | Image.Image
Large = Callable[[Callable[[], Images | str]], Images | str]  # how images of more pixels are loaded: one at a time


def try_decode(file: Source, size: int | None, quick: bool, large: Large | None = None) -> Images | str:
    """One image as upright RGB (H, W, 3), transparency on white; the reason where it cannot be read.

    size: its central square of that side. quick: a JPEG much larger than `size` is decoded at a fraction of its size,
    at least twice that asked for.
    """
    try:
        return _pixels(file, size, quick, large)
    except Exception as error:  # each decoder has its own kinds
        return why_unreadable(error)


def _pixels(file: Source, size: int | None, quick: bool, large: Large | None) -> Images | str:
    with quietly(), _open(file) as image:
        held = image.width * image.height
        if quick and size is not None and image is not file:
            image.draft(None, (2 * size, 2 * size))
        if not image.info.get("progressive"):  # such a JPEG is in memory as a whole, at whatever size it is wanted
            held = image.width * image.height
        _check_pixels(image)
        if large is not None and held > _LARGE_PIXELS and image is not file:
            return large(lambda: _load_and_close(image, size))
        return _load(image, size)


def _load_and_close(image: Image.Image, size: int | None) -> Images | str:
    """The pixels, or why there are none; what was loaded is let go before the next one is."""
    try:
        with quietly():  # it may be another thread than the one that opened it
            return _load(image, size)
    except Exception as error:
        return why_unreadable(error)
    finally:
        image.close()


def _load(image: Image.Image, size: int | None) -> Images:
    image.load()
    rgb = to_upright_rgb(image)
    return np.array(rgb if size is None else central_square(rgb, size), dtype=np.uint8)


def choose_size(files: Sequence[Source]) -> int:
    """The side in pixels to bring images to: the largest of SIZES that half of those looked at have."""
    sides: list[int] = []
    for file in files[:: max(1, len(files) // LOOKED_AT)]:
        try:
            with quietly(), _open(file) as image:
                sides.append(min(image.size))
        except Exception:  # it is refused or skipped when it is decoded
            continue
    if not sides:
        return 32
    middle = median(sides)
    return max((size for size in SIZES if size <= middle), default=SIZES[0])


@contextmanager
def opened(file: Source) -> Iterator[Image.Image]:
    """An image whose pixels may be still to be read, no more of them than are allowed; no warnings meanwhile."""
    with quietly(), _open(file) as image:
        _check_pixels(image)
        yield image


def _check_pixels(image: Image.Image) -> None:
    """Refuses more pixels than are allowed in memory. Pillow itself opens files of twice as many."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise OSError(f"it claims more pixels than the {limit} allowed")


@contextmanager
def _open(file: Source) -> Iterator[Image.Image]:
    if isinstance(file, Image.Image):
        content = _unread_jpeg(file)
        if content is None:
            yield file
            return
        file = content
    stream = _open_bytes(file) if isinstance(file, bytes | bytearray) else _open_regular(file)
    with stream, Image.open(stream, formats=_FORMATS) as image:
        yield image


def _unread_jpeg(picture: Image.Image) -> bytes | None:
    """The file of a JPEG whose pixels are still to be read, to be decoded as files are; the picture stays as it is."""
    if not isinstance(picture, JpegImageFile) or not picture.tile or picture.fp is None or picture.tell() != 0:
        return None
    place = picture.fp.tell()
    content = read_all(picture.fp)
    picture.fp.seek(place)
    return content


def read_all(stream: IO[bytes]) -> bytes:
    """What an open file holds, from its beginning where it can go back there; no more than is allowed."""
    with suppress(OSError, AttributeError):
        stream.seek(0)
    content = bytearray()
    while chunk := stream.read(_READ_BYTES):
        if not isinstance(chunk, bytes):
            raise OSError(f"reading it gives {type(chunk).__name__}, not bytes")
        content += chunk
        _check_bytes(len(content))
    return bytes(content)


def _open_bytes(content: bytes | bytearray) -> IO[bytes]:
    _check_bytes(len(content))
    return io.BytesIO(content)


def _check_bytes(size: int) -> None:
    if size > FILE_BYTES:
        raise OSError(f"its {size / 2**20:.0f} MiB are more than the {FILE_BYTES // 2**20} allowed")


def _open_regular(file: str | Path) -> IO[bytes]:
    """The file open for reading; a pipe or a device, which could go on for ever, is refused."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is a folder" if stat.S_ISDIR(status.st_mode) else "it is no ordinary file")
        _check_bytes(status.st_size)
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


class _Decoding(threading.local):
    """Whether the thread at hand is decoding. In a filter of warnings it stands in a pattern's place.

    Others may copy the filters, or take them for patterns, as scikit-learn does for its jobs: then it fits nothing.
    """

    depth = 0
    pattern = "(?!)"

    def __reduce__(self) -> tuple[type[_Decoding], tuple[()]]:
        return _Decoding, ()

    def match(self, message: str) -> bool:
        del message
        return self.depth > 0


_DECODING: Final = _Decoding()
_IGNORED: Final = ("ignore", _DECODING, Warning, None, 0)
_FILTERS_LOCK: Final = threading.Lock()


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings of this thread meanwhile: damaged EXIF data, say, does not make the pixels wrong.

    `warnings` has one list of filters for all threads, which others may save and restore at any time. So what is put
    there is not taken away, and says nothing of warnings of threads that are not decoding.
    """
    filters = cast("list[Any]", warnings.filters)
    with _FILTERS_LOCK:
        if not filters or filters[0] is not _IGNORED:
            with suppress(ValueError):
                filters.remove(_IGNORED)
            filters.insert(0, _IGNORED)
    _DECODING.depth += 1
    try:
        yield
    finally:
        _DECODING.depth -= 1


def why_unreadable(error: Exception) -> str:
    """What is wrong with an image file, from the error that reading it ended with."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "it is no PNG, JPEG, WebP or BMP file"
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        return f"it claims more pixels than the {2 * (Image.MAX_IMAGE_PIXELS or 0)} allowed"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [""])[0].rstrip(".") or type(error).__name__


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, turned as its EXIF data says, transparency on white."""
    return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: conversion by Pillow would clip at 255 instead of scaling. 65535 / 257 is 255.
        grey = (np.asarray(image).astype(np.int64).clip(0, 65535) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    return image.convert("RGB")


def central_square(image: Image.Image, size: int, how: Image.Resampling = Image.Resampling.BICUBIC) -> Image.Image:
    """The central square resized: as resizing the shorter side and cropping, without ever making the long side."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), how, box=box)
