"""Images of a streamed step if crops come from photographs: planned crops of files, or centres of stored images.

Legend: K planned images, N images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.data.image_rows import ImageRows, Pixels, Source, read_pixels
from engram.data.photographs import NUMBERS, Photographs


def draw_numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw the numbers (*shape, NUMBERS) that `choose_crop` needs, from 0 to 1."""
    return torch.rand(*shape, NUMBERS, generator=generator)


class PlannedCrops:
    """Crops of photographs, one for each image of a plan. Indexing gives other ones; `read_into` decodes them.

    positions: int64 (K,), of their files. numbers: (K, NUMBERS).
    """

    def __init__(self, photographs: Photographs, positions: Tensor, numbers: Tensor) -> None:
        self._photographs, self._positions, self._numbers = photographs, positions, numbers

    def __getitem__(self, rows: Tensor) -> PlannedCrops:
        return PlannedCrops(self._photographs, self._positions[rows], self._numbers[rows])

    def read_into(self, out: Source) -> None:
        """Write the crops (K, height, width, 3), resized."""
        for place, position, numbers in zip(out, self._positions.tolist(), self._numbers.tolist(), strict=True):
            self._photographs.crop_into(position, numbers, place)


class CentralParts:
    """The central parts of images. Indexing gives those of other rows; `read_into` copies them."""

    def __init__(self, images: Pixels) -> None:
        self._images = ImageRows.of(images)

    def __getitem__(self, rows: Tensor) -> CentralParts:
        return CentralParts(self._images[rows])

    def read_into(self, out: Source) -> None:
        """Write the central pixels (N, height, width, 3), as many as there is room for."""
        height, width = out.shape[1:3]
        top, left = (self._images.shape[1] - height) // 2, (self._images.shape[2] - width) // 2
        out[:] = read_pixels(self._images).numpy()[:, top : top + height, left : left + width]
