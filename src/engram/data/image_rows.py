"""Images that stay where they are, in memory or in a mapped file, and are named by their rows there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Source = npt.NDArray[np.uint8]


class Readable(Protocol):
    """Images that are read or made when they are needed. Indexing gives those of some rows."""

    def __getitem__(self, rows: Tensor, /) -> Readable: ...

    def read_into(self, out: Source) -> None:
        """Write the pixels into an array (N, H, W, 3)."""
        ...


class ImageRows:
    """N images of some arrays (M, H, W, 3), which are not copied. Indexing gives other rows; `pixels` reads them.

    sources: the arrays. rows: int64 (N,), positions in all of them, one after the other.
    """

    def __init__(self, sources: Sequence[Source], rows: Tensor) -> None:
        self.sources, self.rows = tuple(sources), rows
        self._starts = np.cumsum([0, *map(len, self.sources)])
        assert len({source.shape[1:] for source in self.sources}) == 1, "images of one size"

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> torch.Size:
        """(N, H, W, 3)."""
        return torch.Size([len(self.rows), *self.sources[0].shape[1:]])

    def __getitem__(self, rows: Tensor | slice) -> ImageRows:
        return ImageRows(self.sources, self.rows[rows])

    def split(self, size: int) -> Iterator[ImageRows]:
        """Parts of `size` images each; the last may be smaller."""
        return (ImageRows(self.sources, rows) for rows in self.rows.split(size))

    def read_into(self, out: Source) -> None:
        """Copy the pixels into an array (N, H, W, 3)."""
        rows = self.rows.numpy()
        if len(self.sources) == 1:
            np.take(self.sources[0], rows, axis=0, out=out, mode="clip")  # "raise" would copy twice
            return
        which = np.searchsorted(self._starts, rows, side="right") - 1
        for number, source in enumerate(self.sources):
            own = which == number
            out[own] = source[rows[own] - self._starts[number]]

    @classmethod
    def of(cls, images: Pixels) -> ImageRows:
        """These images as rows."""
        return images if isinstance(images, ImageRows) else cls([images.numpy()], torch.arange(len(images)))

    @classmethod
    def joined(cls, parts: Sequence[Pixels]) -> ImageRows:
        """All parts, one after the other. Those in the same array stay rows of it."""
        sources: list[Source] = []
        rows: list[Tensor] = []
        for part in map(cls.of, parts):
            moved = part.rows.clone()
            for start, source in zip(part._starts.tolist(), part.sources, strict=False):
                place = next((i for i, known in enumerate(sources) if known is source), len(sources))
                if place == len(sources):
                    sources.append(source)
                own = (part.rows >= start) & (part.rows < start + len(source))
                moved[own] += sum(map(len, sources[:place])) - start
            rows.append(moved)
        return cls(sources, torch.cat(rows))


Pixels = Tensor | ImageRows  # uint8 (N, H, W, 3)


def read_pixels(images: Pixels) -> Tensor:
    """The images as a tensor; those of `ImageRows` are copied."""
    if isinstance(images, Tensor):
        return images
    pixels = torch.empty(images.shape, dtype=torch.uint8)
    images.read_into(pixels.numpy())
    return pixels


def join_images(parts: Sequence[Pixels]) -> Pixels:
    """All images, one part after the other: a tensor if all of them are tensors."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(tensors) if len(tensors) == len(parts) else ImageRows.joined(parts)


def read_ahead(images: Pixels, size: int) -> Iterator[Tensor]:
    """The images in parts of that size. While one of `ImageRows` is used, a thread reads the next."""
    if isinstance(images, Tensor):
        yield from images.split(size)
        return
    with ThreadPoolExecutor(1) as reader:
        following = None
        for part in images.split(size):
            ready, following = following, reader.submit(read_pixels, part)
            if ready is not None:
                yield ready.result()
        if following is not None:
            yield following.result()


def is_mapped(array: npt.NDArray[np.uint8]) -> bool:
    """Whether the array is mapped from a file, so that it takes no memory and is still there after a restart."""
    base: object = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False
