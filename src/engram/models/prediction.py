"""Predictions for image files from anywhere, some at a time: what it needs does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram.data.decode.prefetch import Decoded, decode_stream
from engram.models.inputs import file_side
from engram.models.model import Model
from engram.models.split import digest_of, digests_in

# In a batch. On a CPU larger ones are slower: memory of some ten megabytes is given back and asked for anew each time.
# On a GPU smaller ones are: it is done with them before Python has started what comes next.
BATCH_PIXELS = {"cpu": 64 * 32 * 32, "cuda": 4096 * 32 * 32}


@dataclass(frozen=True, eq=False)
class Predicted:
    """Some files: the shares of each class (N, K), a row each; skipped: path and reason of unreadable ones."""

    paths: list[str]
    shares: np.ndarray
    skipped: list[tuple[str, str]]


def predict_files(
    model: Model, paths: Iterable[str | None], by: str | None = None, batch: int | None = None
) -> Iterator[Predicted]:
    """The files in their order, decoded ahead by threads while the network works. batch: None is `fitting_batch`.

    None among the paths: the next may be long in coming, and all before it come at once.
    """
    side = file_side(model.config.image_size)
    return predict_batches(model, decode_stream(paths, side, batch=batch or fitting_batch(model)), by)


def predict_batches(model: Model, batches: Iterable[Decoded], by: str | None = None) -> Iterator[Predicted]:
    """The batches in their order; a GPU works on the next one while whoever takes this one does."""
    read = model.reader(by)
    nothing = torch.empty(0, len(model.classes))
    ahead: _Coming | None = None
    for part in batches:
        before, ahead = ahead, _Coming(part, read(part.images) if part.paths else nothing)
        if before is not None:
            yield before.take()
        if part.pause:
            yield ahead.take()
            ahead = None
    if ahead is not None:
        yield ahead.take()


class _Coming:
    """A batch whose shares are on their way from the device."""

    def __init__(self, part: Decoded, shares: Tensor) -> None:
        self._part, self._shares = part, shares.to("cpu", non_blocking=True)
        self._here = torch.cuda.Event() if shares.is_cuda else None
        if self._here is not None:
            self._here.record()

    def take(self) -> Predicted:
        if self._here is not None:
            self._here.synchronize()
        return Predicted(self._part.paths, self._shares.numpy(), self._part.skipped)


def fitting_batch(model: Model) -> int:
    """The images at a time that the device is quickest with."""
    height, width = model.config.image_size
    return max(1, BATCH_PIXELS[model.engine.device.type] // (height * width))


@dataclass(frozen=True, eq=False)
class Evaluated:
    """How a model did: counts (K, K) of true class by predicted class, and what could not be read.

    learned: how many of the images the model was trained on; None where it does not know of all its classes.
    """

    by: str
    counts: np.ndarray
    skipped: list[tuple[str, str]]
    learned: int | None = 0

    @property
    def images(self) -> int:
        """The images looked at."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Percent of the images that were called what they are."""
        return 100 * float(np.trace(self.counts)) / max(1, self.images)

    def by_class(self) -> list[tuple[int, int]]:
        """For each class, the images and how many of them were called what they are."""
        right = np.diag(self.counts).tolist()
        return list(zip(self.counts.sum(axis=1).tolist(), right, strict=True))


def evaluate_batches(
    model: Model, paths: Sequence[str], places: Sequence[int], by: str | None = None
) -> Iterator[Evaluated]:
    """The standing after each batch of files whose true classes have these places; the last is the whole."""
    by = model.predictor(by)
    place_of = dict(zip(paths, places, strict=True))
    counts = np.zeros((len(model.classes),) * 2, dtype=np.int64)
    skipped: list[tuple[str, str]] = []
    trained = digests_in(b"".join(known.digests for known in model.classes))
    unknown = any(
        known.images and not known.digests for known in model.classes
    )  # of a model from before there were any
    learned = 0

    def compared(parts: Iterable[Decoded]) -> Iterator[Decoded]:
        nonlocal learned
        for part in parts:
            learned += sum(digest_of(image) in trained for image in part.images) if trained else 0
            yield part

    parts = decode_stream(paths, file_side(model.config.image_size), batch=fitting_batch(model))
    for part in predict_batches(model, compared(parts), by):
        true = np.array([place_of[path] for path in part.paths], dtype=np.int64)
        np.add.at(counts, (true, part.shares.argmax(axis=1)), 1)
        skipped += part.skipped
        yield Evaluated(by, counts, skipped, None if unknown else learned)
