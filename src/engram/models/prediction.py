"""Predict and evaluate image files in batches, so that the memory needed does not depend on their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram.data.decode.prefetch import Decoded, decode_stream
from engram.models.inputs import file_side
from engram.models.model import Model, refuse_not_finite
from engram.models.split import digest_of, digests_in

# Pixels in a batch. On a CPU larger batches are slower: tens of megabytes are freed and allocated again each time.
# On a GPU smaller ones are slower: it finishes them before Python has launched the next one.
BATCH_PIXELS = {"cpu": 64 * 32 * 32, "cuda": 4096 * 32 * 32}


@dataclass(frozen=True, eq=False)
class Predicted:
    """A batch of files with their class probabilities (N, K); skipped: path and reason of unreadable files."""

    paths: list[str]
    shares: np.ndarray
    skipped: list[tuple[str, str]]


def predict_files(
    model: Model, paths: Iterable[str | None], by: str | None = None, batch: int | None = None
) -> Iterator[Predicted]:
    """Predict files in their order; threads decode the next ones meanwhile.

    paths: None among them yields the files before it at once, because the next path may take long to arrive.
    batch: None is `default_batch`.
    """
    side = file_side(model.config.image_size)
    return predict_batches(model, decode_stream(paths, side, batch=batch or default_batch(model)), by)


def predict_batches(model: Model, batches: Iterable[Decoded], by: str | None = None) -> Iterator[Predicted]:
    """Predict batches in their order; a GPU works on the next batch while the caller uses this one."""
    read = model.reader(by)
    nothing = torch.empty(0, len(model.classes))
    ahead: _PendingBatch | None = None
    for part in batches:
        before, ahead = ahead, _PendingBatch(part, read(part.images) if part.paths else nothing)
        if before is not None:
            yield before.take()
        if part.pause:
            yield ahead.take()
            ahead = None
    if ahead is not None:
        yield ahead.take()


class _PendingBatch:
    """A batch whose probabilities are being copied from the device."""

    def __init__(self, part: Decoded, shares: Tensor) -> None:
        self._part, self._shares = part, shares.to("cpu", non_blocking=True)
        self._here = torch.cuda.Event() if shares.is_cuda else None
        if self._here is not None:
            self._here.record()

    def take(self) -> Predicted:
        if self._here is not None:
            self._here.synchronize()
        return Predicted(self._part.paths, refuse_not_finite(self._shares.numpy()), self._part.skipped)


def default_batch(model: Model) -> int:
    """Return the number of images per batch that is fastest on the device."""
    height, width = model.config.image_size
    return max(1, BATCH_PIXELS[model.engine.device.type] // (height * width))


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Result of an evaluation.

    counts: number of images (K, K) by true class and predicted class.
    skipped: path and reason of unreadable files.
    learned: number of images that the model was trained on; None if it has no digests of some class.
    """

    by: str
    counts: np.ndarray
    skipped: list[tuple[str, str]]
    learned: int | None = 0

    @property
    def images(self) -> int:
        """Number of images evaluated."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Percent of right predictions, as the mean over the classes that have images; as a lesson measures it."""
        return float(np.mean([100 * right / images for images, right in self.by_class() if images]))

    @property
    def accuracy_of_images(self) -> float:
        """Percent of all images with the right prediction."""
        return 100 * float(np.trace(self.counts)) / max(1, self.images)

    def by_class(self) -> list[tuple[int, int]]:
        """Return for each class the number of images and of right predictions."""
        right = np.diag(self.counts).tolist()
        return list(zip(self.counts.sum(axis=1).tolist(), right, strict=True))


def evaluate_batches(
    model: Model, paths: Sequence[str], positions: Sequence[int], by: str | None = None
) -> Iterator[Evaluated]:
    """Evaluate files; yield the result so far after each batch. positions: of the true classes."""
    by = model.predictor(by)
    position_of = dict(zip(paths, positions, strict=True))
    counts = np.zeros((len(model.classes),) * 2, dtype=np.int64)
    skipped: list[tuple[str, str]] = []
    trained = digests_in(b"".join(known.digests for known in model.classes))
    unknown = any(known.images and not known.digests for known in model.classes)  # a model of an early version
    learned = 0

    def compared(parts: Iterable[Decoded]) -> Iterator[Decoded]:
        nonlocal learned
        for part in parts:
            learned += sum(digest_of(image) in trained for image in part.images) if trained else 0
            yield part

    parts = decode_stream(paths, file_side(model.config.image_size), batch=default_batch(model))
    for part in predict_batches(model, compared(parts), by):
        true = np.array([position_of[path] for path in part.paths], dtype=np.int64)
        np.add.at(counts, (true, part.shares.argmax(axis=1)), 1)
        skipped += part.skipped
        yield Evaluated(by, counts, skipped, None if unknown else learned)
