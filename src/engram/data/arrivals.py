"""When each training image comes: with its class, or in a later stage (blurry streams, classes that come again)."""

from __future__ import annotations

import numpy as np
import torch

from engram.core.errors import EngramError, option
from engram.core.rng import generator
from engram.data.stream import Stream


def arrival_stages(
    labels: np.ndarray, stream: Stream, seed: int, blurry: float = 0.0, repeat: float = 0.0
) -> np.ndarray:
    """Return the stage (N,) in which each training image comes: exactly one, and none before the stage of its class.

    Parameters
    ----------
    labels: (N,), positions in the class order.
    blurry: this share of the images of each class comes later, spread evenly over the stages after that of the class.
    repeat: at each later stage, this share of the old classes comes again. The images of a class are divided evenly
        over all stages in which it comes.
    """
    own = np.repeat(np.arange(len(stream)), stream.sizes)[labels]
    if blurry:
        stages = _blurred(labels, own, len(stream), seed, blurry)
    elif repeat:
        stages = _repeated(labels, own, stream, seed, repeat)
    else:
        return own
    if (stages == own).all():
        name, share = ("blurry", blurry) if blurry else ("repeat", repeat)
        raise EngramError(
            f"no image comes in a later stage with {option(name, share)}: the share is too small for these classes and "
            "stages; give a larger one, or leave it out"
        )
    return stages


def _blurred(labels: np.ndarray, own: np.ndarray, count: int, seed: int, share: float) -> np.ndarray:
    stages = own.copy()
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        first = int(own[rows[0]]) + 1
        if first == count:  # the classes of the last stage
            continue
        random = generator(seed, "blurry", int(label))
        later = rows[
            torch.randperm(len(rows), generator=random).numpy()[: min(round(share * len(rows)), len(rows) - 1)]
        ]
        start = int(torch.randint(count - first, (), generator=random))  # else the first of them would get the rest
        stages[later] = first + (start + np.arange(len(later))) % (count - first)
    return stages


def _repeated(labels: np.ndarray, own: np.ndarray, stream: Stream, seed: int, share: float) -> np.ndarray:
    comes: dict[int, list[int]] = {int(label): [] for label in np.unique(labels)}
    for stage in range(1, len(stream)):
        old = stream.new_labels(stage).start
        again = torch.randperm(old, generator=generator(seed, "repeat", stage))[: round(share * old)]
        for label in again.tolist():
            comes[label].append(stage)
    stages = own.copy()
    for label, later in comes.items():
        rows = np.flatnonzero(labels == label)
        if len(rows) <= len(later):
            raise EngramError(
                f"a class with {len(rows)} training images cannot come in {len(later) + 1} stages with "
                f"{option('repeat', share)}; give a smaller share, or more images"
            )
        shuffled = rows[torch.randperm(len(rows), generator=generator(seed, "repeat images", label)).numpy()]
        parts = np.array_split(shuffled, len(later) + 1)
        for stage, part in zip(later, parts[1:], strict=True):
            stages[part] = stage
    return stages
