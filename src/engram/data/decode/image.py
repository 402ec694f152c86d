"""Decoding of one image. The file may come from anywhere: a damaged or hostile one is refused and fills no memory.

Bytes of a file and Pillow images are decoded in the same way. Decoding one image takes at most DECODE_BYTES of memory,
besides the bytes of its file: larger images are refused, and colours are converted a few rows at a time.
"""

from __future__ import annotations

import io
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import IO, Any, Final, cast

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile

from engram.core.errors import EngramError, option
from engram.data.decode.formats import decoder_bytes, format_names, readable_formats

FILE_BYTES: Final = 512 * 2**20  # largest file
DECODE_BYTES: Final = 2**30  # most memory to decode an image
LONGEST_SIDE: Final = 65_535  # in pixels, as for JPEG; Pillow needs memory for each row, however short
SIZES: Final = (16, 24, 32, 48, 64)  # sizes that `choose_size` chooses from
SAMPLED: Final = 200  # images, approximately, that it looks at
_LARGE_PIXELS: Final = 4_000_000
_READ_BYTES: Final = 2**20  # read at once
_STRIP_PIXELS: Final = 2**18  # converted at once
# How a stored picture is turned upright, by the orientation in its EXIF data.
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED: Final = (5, 6, 7, 8)  # rows of the upright picture are stored as columns
_BACKWARDS: Final = (3, 4, 7, 8)  # and the first of them last

Images = npt.NDArray[np.uint8]  # (H, W, 3), or several: (N, H, W, 3)
Source = str | Path | bytes | bytearray | Image.Image
LoadLarge = Callable[[Callable[[], Images | str]], Images | str]  # calls a function that loads a large image


def try_decode(file: Source, size: int | None, quick: bool, large: LoadLarge | None = None) -> Images | str:
    """Decode an image as upright RGB (H, W, 3), with transparency on white; return the reason if that fails.

    size: resize the central square to this size. None: keep the whole image.
    quick: decode a much larger JPEG at a fraction of its size, at least twice `size`.
    large: how to load images with many pixels, so that only one of them is in memory at a time.
    """
    try:
        return _pixels(file, size, quick, large)
    except Exception as error:  # each decoder raises its own types
        return why_unreadable(error)


def _pixels(file: Source, size: int | None, quick: bool, large: LoadLarge | None) -> Images | str:
    with no_warnings(), _open(file) as image:
        stored = image.width * image.height
        if quick and size is not None and image is not file:
            image.draft(None, (2 * size, 2 * size))
        _check_pixels(image, stored, size)
        # A progressive JPEG is decoded in full even at a fraction of its size.
        held = stored if image.info.get("progressive") else image.width * image.height
        if large is not None and held > _LARGE_PIXELS and image is not file:
            return large(lambda: _load_and_close(image, size))
        return _load(image, size)


def _load_and_close(image: Image.Image, size: int | None) -> Images | str:
    """Return the pixels, or the reason why there are none; free the memory before the next image is loaded."""
    try:
        with no_warnings():  # this thread may not be the one that opened the image
            return _load(image, size)
    except Exception as error:
        return why_unreadable(error)
    finally:
        image.close()


def _load(image: Image.Image, size: int | None) -> Images:
    image.load()
    rgb = to_upright_rgb(image)
    return np.array(rgb) if size is None else central_square(rgb, size)


def choose_size(files: Sequence[Source]) -> int:
    """Choose the image size for these files: the largest of SIZES that half of a sample of them reach."""
    sides: list[int] = []
    for file in files[:: max(1, len(files) // SAMPLED)]:
        try:
            with no_warnings(), _open(file) as image:
                sides.append(min(image.size))
        except Exception:  # decoding it later reports or skips it
            continue
    if not sides:
        return 32
    middle = median(sides)
    return max((size for size in SIZES if size <= middle), default=SIZES[0])


def smaller_side(file: Source) -> int | None:
    """Return the smaller side of an image in pixels, without decoding it; None if it cannot be read."""
    try:
        with no_warnings(), _open(file) as image:
            return min(image.size)
    except Exception:  # decoding it reports why
        return None


def time_taken(file: Source) -> float | None:
    """Return when a photograph was taken, in seconds since some time, by its EXIF data; None if it does not say."""
    try:
        with no_warnings(), _open(file) as image:
            text = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal)
        return datetime.strptime(str(text).strip("\0 "), "%Y:%m:%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except Exception:  # damaged data says nothing; decoding it later reports a damaged file
        return None


def decode_protocol_square(file: Source, size: int) -> Images:
    """Decode an image as ImageNet's protocol does: its central square, bilinear, not turned upright."""
    with no_warnings(), _open(file) as image:
        _check_pixels(image, image.width * image.height, size)
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return central_square(rgb, size, Image.Resampling.BILINEAR)


def decode_crop(file: Source, choose: Callable[[int, int], tuple[int, int, int, int]], size: tuple[int, int]) -> Images:
    """Decode an image as ImageNet's protocol does, and resize a part of it to (width, height), bilinear.

    choose: returns left, top, right and bottom of the part, from width and height of the image.
    """
    with no_warnings():
        part = _decode_part(file, choose)  # the rest of the image is freed, before the part is converted
        rgb = part if part.mode == "RGB" else part.convert("RGB")
        return np.asarray(rgb.resize(size, Image.Resampling.BILINEAR))


def _decode_part(file: Source, choose: Callable[[int, int], tuple[int, int, int, int]]) -> Image.Image:
    with _open(file) as image:
        _check_pixels(image, image.width * image.height, 0)
        return image.crop(choose(*image.size))


def _check_pixels(image: Image.Image, stored: int, size: int | None) -> None:
    """Raise an error for an image that is too large. stored: number of pixels in the file."""
    longest, loaded, limit = max(image.size), image.width * image.height, Image.MAX_IMAGE_PIXELS
    if longest > LONGEST_SIDE:
        raise OSError(f"its side of {longest} pixels is longer than the {LONGEST_SIDE} allowed")
    if limit is not None and loaded > limit:  # Pillow itself opens files with twice as many
        raise OSError(f"it claims more pixels than the {limit} allowed")
    decoder = decoder_bytes(image, stored)
    # Then one copy is converted; without a size, an array of all pixels is made as well.
    need = max(4 * loaded + decoder, 8 * loaded) + (3 * loaded if size is None else 0)
    if need > DECODE_BYTES:
        raise OSError(
            f"its {stored} pixels would take {need / 2**20:.0f} MiB of memory, and {DECODE_BYTES // 2**20} are allowed"
        )


@contextmanager
def _open(file: Source) -> Iterator[Image.Image]:
    if isinstance(file, Image.Image):
        content = _unread_jpeg(file)
        if content is None:
            yield file
            return
        file = content
    if isinstance(file, bytes | bytearray):
        _check_bytes(len(file))
        stream: IO[bytes] = io.BytesIO(file)
    else:
        stream = _open_regular(file)
    with stream, Image.open(stream, formats=readable_formats()) as image:
        yield image


def _unread_jpeg(picture: Image.Image) -> bytes | None:
    """Return the file of a JPEG whose pixels are not read yet, to decode it like other files."""
    if not isinstance(picture, JpegImageFile) or not picture.tile or picture.fp is None or picture.tell() != 0:
        return None
    position = picture.fp.tell()
    content = read_all(picture.fp)
    picture.fp.seek(position)
    return content


def read_all(stream: IO[bytes]) -> bytes:
    """Read an open file, from its beginning if it can seek, up to the allowed size."""
    with suppress(OSError, AttributeError):
        stream.seek(0)
    content = bytearray()
    while chunk := stream.read(_READ_BYTES):
        if not isinstance(chunk, bytes):
            raise OSError(f"reading it gives {type(chunk).__name__}, not bytes")
        content += chunk
        _check_bytes(len(content))
    return bytes(content)


def _check_bytes(size: int) -> None:
    if size > FILE_BYTES:
        raise OSError(f"its {size / 2**20:.0f} MiB are more than the {FILE_BYTES // 2**20} allowed")


def _open_regular(file: str | Path) -> IO[bytes]:
    """Open a file for reading; a pipe or a device, which might never end, is an error."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file")
        _check_bytes(status.st_size)
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


class _Decoding(threading.local):
    """Whether the current thread is decoding; takes the place of a compiled pattern in a filter of warnings.

    Other code may copy the filters or read their patterns, as scikit-learn does for its jobs; a copy matches nothing.
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
def no_warnings() -> Iterator[None]:
    """Suppress the warnings of this thread: damaged EXIF data, for example, does not make the pixels wrong.

    `warnings` has one list of filters for all threads, which other code may save and restore at any time. So the filter
    stays in the list, and matches only in threads that are decoding.
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
    """Return the reason why an image cannot be read, from the error."""
    if isinstance(error, Image.UnidentifiedImageError):
        return f"it is not a {format_names()} file"
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        limit = Image.MAX_IMAGE_PIXELS or 0
        return f"it claims more pixels than the {2 * limit} allowed in a JPEG and the {limit} in other files"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [""])[0].rstrip(".") or type(error).__name__


def unreadable_error(file: str | Path, reason: str) -> EngramError:
    """Return the error for a file that cannot be read."""
    advice = f"repair or remove it, or skip such files with {option('skip_bad')}"
    return EngramError(f"the image {file} cannot be read ({reason}); {advice}")


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, turned as its EXIF data says, with transparency on white; a few rows at a time."""
    turn = image.getexif().get(ExifTags.Base.Orientation, 1)
    if image.mode == "RGB" and turn not in _TURNS and not image.has_transparency_data:
        return image
    width, height = image.size[::-1] if turn in _TURNED else image.size
    rgb = Image.new("RGB", (width, height))
    step = max(1, _STRIP_PIXELS // width)
    for first in range(0, height, step):
        rgb.paste(_on_white(_upright_rows(image, turn, first, min(first + step, height))), (0, first))
    return rgb


def _upright_rows(image: Image.Image, turn: int, first: int, last: int) -> Image.Image:
    """Return rows of the upright image: rows or columns of the stored one, counted from either end."""
    length = image.width if turn in _TURNED else image.height
    start, end = (length - last, length - first) if turn in _BACKWARDS else (first, last)
    part = image.crop((start, 0, end, image.height) if turn in _TURNED else (0, start, image.width, end))
    return part.transpose(_TURNS[turn]) if turn in _TURNS else part


def _on_white(image: Image.Image) -> Image.Image:
    """Convert to RGB, with transparency on white."""
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would clip at 255 instead of scaling. 65535 / 257 is 255.
        grey = (np.asarray(image).astype(np.int64).clip(0, 65535) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    return image.convert("RGB")


def central_square(image: Image.Image, size: int, how: Image.Resampling = Image.Resampling.BICUBIC) -> Images:
    """Return the central square, resized to (size, size, 3), without resizing the parts outside of it."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return np.array(image.resize((size, size), how, box=(left, top, left + side, top + side)))
