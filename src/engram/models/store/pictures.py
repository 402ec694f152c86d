"""Names of a model's pictures, and their conversion to and from PNG."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from engram.core.errors import EngramError
from engram.data.decode.image import no_warnings

EXEMPLARS, HELDOUT = "exemplars", "heldout"


def picture_name(kind: str, position: int, rank: int) -> str:
    """Return the name of the picture with that rank in the class at that position."""
    return f"{kind}/{position:05d}/{rank:05d}.png"


def class_position(name: str) -> int:
    """Return the position of the class that a picture of that name belongs to."""
    return int(name.split("/")[1])


def to_png(image: np.ndarray) -> bytes:
    """Encode an image as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def from_png(content: bytes, size: tuple[int, int], path: Path) -> np.ndarray:
    """Decode a PNG file; refuse anything but an RGB image of that size. path: for messages."""
    try:
        with no_warnings(), Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.size == (size[1], size[0]) and image.mode == "RGB":
                return np.asarray(image)
    except Exception as error:  # each decoder has its own error types
        raise EngramError(f"{path} is not a PNG image ({type(error).__name__}); the model is damaged") from None
    raise EngramError(f"{path} is not an RGB image of {size[1]}x{size[0]} pixels; the model is damaged")
