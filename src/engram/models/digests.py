"""Short digests of images, by which a model recognises those that it learned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

DIGEST_BYTES = 8


def digest_of(image: np.ndarray) -> bytes:
    """Return a short digest of an image's pixels."""
    return hashlib.blake2b(image.tobytes(), digest_size=DIGEST_BYTES).digest()


def join_digests(images: Iterable[np.ndarray]) -> bytes:
    """Return the digests of images, concatenated."""
    return b"".join(digest_of(image) for image in images)


def digests_in(joined: bytes) -> frozenset[bytes]:
    """Return the digests in their concatenation."""
    return frozenset(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))
