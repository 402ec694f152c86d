"""The embedded data set: 20 classes of CIFAR-100 at 16x16 pixels, for a first run without a download."""

from __future__ import annotations

import hashlib
import io
import json
from importlib import resources
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from engram.core.errors import EngramError
from engram.data.sources.cifar import MEAN, STD
from engram.data.store import DataSplit, Images, ImageStore


def read_mini() -> ImageStore:
    """Read the embedded data set: 20 classes with 250 training and 100 test images each, 16x16 pixels.

    It was made from CIFAR-100 (A. Krizhevsky, 2009) by tools/make_mini.py and has the same normalisation.
    """
    assets = resources.files("engram.data").joinpath("assets", "mini")
    try:
        meta = json.loads(assets.joinpath("meta.json").read_text(encoding="utf-8"))
        splits = [_split(assets.joinpath(f"{name}.webp").read_bytes(), name, meta) for name in ("train", "test")]
    except (OSError, KeyError, json.JSONDecodeError, UnidentifiedImageError) as error:
        raise EngramError(f"the embedded data set cannot be read ({error}); reinstall engram") from None
    return ImageStore("mini", splits[0], splits[1], tuple(meta["class_names"]), mean=MEAN, std=STD, origin="mini")


def _split(content: bytes, name: str, meta: dict[str, Any]) -> DataSplit:
    per_class, size = meta["images_per_class"][name], meta["image_size"]
    with Image.open(io.BytesIO(content), formats=["WEBP"]) as mosaic:
        images = cut(np.asarray(mosaic.convert("RGB")), size)
    digest = hashlib.sha256(images.tobytes()).hexdigest()
    if digest != meta["sha256"][name]:
        raise EngramError(
            f"the {name} images of the embedded data set have the checksum {digest[:12]}... instead of "
            f"{meta['sha256'][name][:12]}...; reinstall engram"
        )
    return DataSplit(images, np.repeat(np.arange(len(meta["class_names"]), dtype=np.int64), per_class))


def cut(mosaic: Images, size: int) -> Images:
    """Cut a mosaic (rows * size, columns * size, 3) into its tiles, row by row: (N, size, size, 3)."""
    rows, columns = mosaic.shape[0] // size, mosaic.shape[1] // size
    tiles = mosaic.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(-1, size, size, 3))
