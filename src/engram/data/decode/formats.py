"""Which image formats are read, and how much memory their decoders need.

TIFF and GIF (its first frame) are read as PNG, JPEG, WebP and BMP are; AVIF if Pillow was built with it; HEIC if the
package pillow-heif is installed.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from PIL import Image, features

HEIC_EXTENSIONS: Final = (".heic", ".heif")
_HEIC_PLUGIN: Final = "pillow_heif"
_READS_AVIF: Final = bool(features.check("avif"))
READS_HEIC: Final = find_spec(_HEIC_PLUGIN) is not None

EXTENSIONS: Final = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *((".avif",) if _READS_AVIF else ()),
    *(HEIC_EXTENSIONS if READS_HEIC else ()),
)
# Bytes per stored pixel that a decoder holds besides Pillow's image, as measured, rounded up.
_DECODER_BYTES: Final = {"WEBP": 12, "AVIF": 16, "HEIF": 16}
_TILE_WIDTH, _TILE_HEIGHT, _STRIP_ROWS, _BITS, _SAMPLES = 322, 323, 278, 258, 277  # tags of TIFF


@cache
def readable_formats() -> tuple[str, ...]:
    """Return the names of the formats for Pillow; on the first call, load the plugin for HEIC."""
    formats = ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", *(["AVIF"] if _READS_AVIF else [])]
    if READS_HEIC:
        plugin: Any = importlib.import_module(_HEIC_PLUGIN)
        plugin.register_heif_opener()
        formats.append("HEIF")
    return tuple(formats)


def format_names() -> str:
    """Return the formats for a message: PNG, JPEG, ... or GIF."""
    *names, last = ["WebP" if name == "WEBP" else name for name in readable_formats()]
    return f"{', '.join(names)} or {last}"


def decoder_bytes(image: Image.Image, stored: int) -> int:
    """Return the memory that the decoder of an open image needs, besides the image itself. stored: its pixels."""
    if image.format == "JPEG":  # it may keep all coefficients
        return 2 * len(image.getbands()) * stored
    if image.format == "TIFF":
        return _tiff_bytes(image)
    return _DECODER_BYTES.get(image.format or "", 0) * stored


def _tiff_bytes(image: Image.Image) -> int:
    """Return the size of a tile or strip: both are decoded at once, and a tile may be larger than the picture."""
    tags: Any = getattr(image, "tag_v2", {})
    width = int(tags.get(_TILE_WIDTH) or image.width)
    height = int(tags.get(_TILE_HEIGHT) or min(int(tags.get(_STRIP_ROWS) or image.height), image.height))
    bits = tags.get(_BITS) or (8,)
    deepest = max(bits) if isinstance(bits, tuple) else int(bits)
    # Pillow keeps a strip as it is stored, and then unpacks its rows.
    return 2 * width * height * int(tags.get(_SAMPLES) or 1) * max(1, -(-deepest // 8))
