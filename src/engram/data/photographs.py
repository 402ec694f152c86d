"""The original files of training images, of which random crops are taken at their full size. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engram.core.errors import EngramError
from engram.core.torchrun import processes_here
from engram.data.decode.image import Images, decode_crop, why_unreadable

# Random resized crops
AREA = (0.08, 1.0)  # range of the crop's area, as a share of the image
RATIO = 4 / 3  # largest ratio of its sides, either way
TRIES = 10  # draws until one fits into the image
NUMBERS = 2 * TRIES + 2  # random numbers of a photograph's crop: areas, ratios, position across and down
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


def choose_crop(numbers: Sequence[float], width: int, height: int) -> Box:
    """Return the random crop of a photograph, as torchvision's RandomResizedCrop chooses it.

    Area and log of the ratio are uniform. The first of TRIES pairs that fits is used; if none fits, the largest central
    part whose ratio is allowed.
    """
    low, high = AREA
    for area, ratio in zip(numbers[:TRIES], numbers[TRIES : 2 * TRIES], strict=True):
        pixels, wide = (low + (high - low) * area) * width * height, RATIO ** (2 * ratio - 1)
        across, down = round(math.sqrt(pixels * wide)), round(math.sqrt(pixels / wide))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(numbers[-2] * (width - across + 1)), int(numbers[-1] * (height - down + 1))
            return left, top, left + across, top + down
    across, down = min(width, round(height * RATIO)), min(height, round(width * RATIO))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def decoding_threads() -> int:
    """The number of threads that decode for this process: the usable cores, divided among those of this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // processes_here())


@dataclass(frozen=True, eq=False)
class Photographs:
    """The files of the images of a training split, in their order. paths: in the folder. digest: of paths and sizes."""

    folder: Path
    paths: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, positions: npt.NDArray[np.int64]) -> Photographs:
        """Return the files at these positions."""
        return replace(self, paths=tuple(self.paths[position] for position in positions.tolist()))

    def crop_into(self, position: int, numbers: Sequence[float], out: Images) -> None:
        """Decode a file and resize the crop that the numbers choose to the size of `out` (height, width, 3)."""
        file = self.folder / self.paths[position]
        try:
            out[:] = decode_crop(file, partial(choose_crop, numbers), (out.shape[1], out.shape[0]))
        except Exception as error:  # each decoder raises its own types
            raise EngramError(
                f"the photograph {file} cannot be read any more ({why_unreadable(error)}); put it back and resume the "
                "run, which continues from its last checkpoint"
            ) from None
