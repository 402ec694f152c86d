"""The pictures of a model: what they are called, and PNG files of them and back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from engram.core.errors import EngramError
from engram.data.decode.image import no_warnings

EXEMPLARS, HELDOUT = "exemplars", "heldout"


def picture_name(kind: str, label: int, rank: int) -> str:
    """What a picture of a class is called; rank: its place among them."""
    return f"{kind}/{label:05d}/{rank:05d}.png"


def place_of(name: str) -> int:
    """The class that a picture of that name is of, by its place."""
    return int(name.split("/")[1])


def picture_names(counts: dict[str, list[int]]) -> Iterator[str]:
    """The names of the pictures of every class; counts: of each kind, by class."""
    for kind, numbers in counts.items():
        for label, number in enumerate(numbers):
            yield from (picture_name(kind, label, rank) for rank in range(number))


def to_png(image: np.ndarray) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def from_png(content: bytes, size: tuple[int, int], where: Path) -> np.ndarray:
    """The image in a PNG file's content; refuses what is none of that size. where: the file, to name it by."""
    try:
        with no_warnings(), Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            fits = image.size == (size[1], size[0]) and image.mode == "RGB"
            if fits:
                return np.asarray(image)
    except Exception as error:  # each decoder has its own kinds
        raise EngramError(f"{where} is no PNG image ({type(error).__name__}); the model is damaged") from None
    raise EngramError(f"{where} is not an RGB image of {size[1]}x{size[0]} pixels; the model is damaged")
