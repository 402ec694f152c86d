"""What a phase may say of its batches beyond their size: a second stream of images, and two images in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engram.core.errors import EngramError


@dataclass(frozen=True, eq=False)
class Beside:
    """A second stream of images: `batch_size` more in each batch, out of rows of their own.

    The phase's own rows say how long an epoch is. This stream goes through its rows in one random order after another,
    over the ends of batches and epochs, so that each has come up as often as any other, or once more; where there are
    fewer rows than batch_size, a batch has some of them twice. rows: of the stage's pool; they must not depend on what
    training changes, because a resumed phase asks for them again.
    """

    rows: Tensor
    batch_size: int


@dataclass(frozen=True)
class CutMix:
    """A box of each image is taken from another of its batch, in a share of the steps (Yun et al., ICCV 2019).

    The box has the same place in all images of a step; the share of an image that stays its own is uniform in [0, 1]
    but for what of the box falls outside. probability: of a step to be mixed.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise EngramError(f"probability must be between 0 and 1, got {self.probability}")


class Mixed(NamedTuple):
    """What a loss sees of mixed images: the labels (B,) of the boxes, and the share () of each image that is its own.

    The share is 1 in a step that is not mixed; the labels of the boxes mean nothing then.
    """

    labels: Tensor
    share: Tensor
