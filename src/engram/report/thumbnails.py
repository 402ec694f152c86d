"""Thumbnails that are part of a page."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

SIDE = 128
_QUALITY = 80


def thumbnail(picture: np.ndarray) -> str:
    """Return the address of an <img> that contains the picture, uint8 (H, W, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
