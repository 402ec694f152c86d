"""Predict and evaluate image files in batches, so that the memory needed does not depend on their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.data.decode.prefetch import Decoded, decode_stream
from engram.models.digests import digest_of, digests_in
from engram.models.doubt import Doubt
from engram.models.inputs import file_side
from engram.models.model import Model, refuse_not_finite

# Pixels in a batch, and the fewest images. On a CPU, EfficientNet-Lite0 reads four images of 224x224 pixels together in
# two thirds of the time. On a GPU small batches are slow: it finishes each before Python launches the next.
BATCH_PIXELS = {"cpu": 64 * 32 * 32, "cuda": 4096 * 32 * 32}
FEWEST = {"cpu": 4, "cuda": 1}


@dataclass(frozen=True, eq=False)
class Predicted:
    """A batch of files with their class probabilities (N, K); skipped: path and reason of unreadable files.

    familiarity: (N,), how much each image is like those of a known class; None if it was not asked for.
    """

    paths: list[str]
    shares: np.ndarray
    skipped: list[tuple[str, str]]
    familiarity: np.ndarray | None = None


def predict_files(
    model: Model,
    paths: Iterable[str | None],
    by: str | None = None,
    batch: int | None = None,
    doubt: Doubt | None = None,
    learned: LearnedImages | None = None,
) -> Iterator[Predicted]:
    """Predict files in their order; threads decode the next ones meanwhile.

    paths: None among them yields the files before it at once, because the next path may take long to arrive.
    batch: None is `default_batch`.
    doubt: measures the familiarity of the images. learned: counts those that the model was trained on.
    """
    parts = decode_stream(paths, file_side(model.config.image_size), batch=batch or default_batch(model))
    return predict_batches(model, parts if learned is None else learned.watch(parts), by, doubt)


def predict_batches(
    model: Model, batches: Iterable[Decoded], by: str | None = None, doubt: Doubt | None = None
) -> Iterator[Predicted]:
    """Predict batches in their order; a GPU works on the next batch while the caller uses this one."""
    read = model.score_reader(by)

    def answers(images: np.ndarray) -> Tensor:
        """Return the probabilities, and the familiarity as a last column if it was asked for."""
        logits, outputs = read(images)
        last = [] if doubt is None else [doubt.familiarity_of(logits, outputs)[:, None]]
        return torch.cat([logits.softmax(dim=1), *last], dim=1)

    classes = len(model.classes)
    nothing = torch.empty(0, classes + (doubt is not None))
    ahead: _PendingBatch | None = None
    for part in batches:
        before, ahead = ahead, _PendingBatch(part, answers(part.images) if part.paths else nothing, classes)
        if before is not None:
            yield before.take()
        if part.pause:
            yield ahead.take()
            ahead = None
    if ahead is not None:
        yield ahead.take()


class _PendingBatch:
    """A batch whose probabilities are being copied from the device."""

    def __init__(self, part: Decoded, answers: Tensor, classes: int) -> None:
        self._part, self._answers, self._classes = part, answers.to("cpu", non_blocking=True), classes
        self._here = torch.cuda.Event() if answers.is_cuda else None
        if self._here is not None:
            self._here.record()

    def take(self) -> Predicted:
        if self._here is not None:
            self._here.synchronize()
        answers = refuse_not_finite(self._answers.numpy())
        shares, familiarity = answers[:, : self._classes], answers[:, self._classes :]
        found = familiarity[:, 0] if familiarity.shape[1] else None
        return Predicted(self._part.paths, shares, self._part.skipped, found)


def best_positions(shares: np.ndarray, count: int) -> np.ndarray:
    """Return the positions (N, count) of the largest values of each row, largest first; ties in their order."""
    if count == 1:  # sorting would take longer than everything else
        return shares.argmax(axis=1, keepdims=True)
    return np.argsort(-shares, axis=1, kind="stable")[:, :count]


def default_batch(model: Model) -> int:
    """Return the number of images per batch that is fastest on the device."""
    height, width = model.config.image_size
    device = model.engine.device.type
    return max(FEWEST[device], BATCH_PIXELS[device] // (height * width))


class Mistake(NamedTuple):
    """An image with a wrong prediction: positions of its class and of the predicted one, and that one's probability."""

    path: str
    true: int
    predicted: int
    probability: float


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Result of an evaluation.

    counts: number of images (K, K) by true class and predicted class.
    skipped: path and reason of unreadable files.
    learned: number of images that the model was trained on; None if it has no digests of some class.
    familiarity: of each image, if it was asked for.
    mistakes: the images with a wrong prediction.
    """

    by: str
    counts: np.ndarray
    skipped: list[tuple[str, str]]
    learned: int | None = 0
    familiarity: list[float] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

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


class LearnedImages:
    """Counts images that a model was trained on, among those that pass."""

    def __init__(self, model: Model) -> None:
        self._digests = digests_in(b"".join(known.digests for known in model.classes) + model.learned_heldout)
        self._lacks_some = any(known.images and not known.digests for known in model.classes)  # of an early version
        self._count = 0

    @property
    def count(self) -> int | None:
        """The images so far; None if the model has no digests of some class."""
        return None if self._lacks_some else self._count

    def watch(self, parts: Iterable[Decoded]) -> Iterator[Decoded]:
        """Yield the batches, counting."""
        for part in parts:
            self._count += sum(digest_of(image) in self._digests for image in part.images) if self._digests else 0
            yield part


def evaluate_batches(
    model: Model, paths: Sequence[str], positions: Sequence[int], by: str | None = None, doubt: Doubt | None = None
) -> Iterator[Evaluated]:
    """Evaluate files; yield the result so far after each batch. positions: of the true classes."""
    by = model.predictor(by)
    position_of = dict(zip(paths, positions, strict=True))
    counts = np.zeros((len(model.classes),) * 2, dtype=np.int64)
    skipped: list[tuple[str, str]] = []
    learned = LearnedImages(model)
    parts = decode_stream(paths, file_side(model.config.image_size), batch=default_batch(model))
    familiarity: list[float] = []
    mistakes: list[Mistake] = []
    for part in predict_batches(model, learned.watch(parts), by, doubt):
        true = np.array([position_of[path] for path in part.paths], dtype=np.int64)
        predicted = part.shares.argmax(axis=1)
        np.add.at(counts, (true, predicted), 1)
        mistakes += [
            Mistake(part.paths[i], int(true[i]), int(predicted[i]), float(part.shares[i, predicted[i]]))
            for i in np.flatnonzero(predicted != true).tolist()
        ]
        skipped += part.skipped
        familiarity += [] if part.familiarity is None else part.familiarity.tolist()
        yield Evaluated(by, counts, skipped, learned.count, familiarity, mistakes)
