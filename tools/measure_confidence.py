"""Measures on the embedded set how far confidence is from accuracy: python tools/measure_confidence.py OUT.csv SEED...

For each seed a model learns eight classes, then six and six more, with a tenth of their images held out, by which its
confidence is fitted. After each lesson, for each predictor, on the test images of the classes known by then: the share
that is called right, the mean confidence and its expected calibration error in ten bins, as the network gives it and
as the model does.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engram import IncrementalClassifier, read_mini

LESSONS = ((0, 8), (8, 14), (14, 20))
EPOCHS, BINS = 16, 10
COLUMNS: tuple[str, ...] = (
    "seed",
    "classes",
    "by",
    "accuracy",
    "plain_confidence",
    "confidence",
    "plain_error",
    "error",
    "temperature",
)


def calibration_error(shares: np.ndarray, right: np.ndarray) -> float:
    """How far confidence is from the share that is right, over bins of confidence, weighted by their images."""
    sure = shares.max(axis=1)
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    return sum(
        abs(sure[own].mean() - right[own].mean()) * own.mean() for own in (bins == k for k in range(BINS)) if own.any()
    )


def rows_of(seed: int) -> Iterator[dict[str, object]]:
    """The rows of one model."""
    mini = read_mini()
    model = IncrementalClassifier(epochs=EPOCHS, validation=0.1, seed=seed)
    for first, end in LESSONS:
        new = (mini.train.class_ids >= first) & (mini.train.class_ids < end)
        teach = model.partial_fit if first else model.fit
        teach(mini.train.images[new], mini.train.class_ids[new])
        seen = mini.test.class_ids < end
        fitted = model.model_
        plain = fitted.copy()
        plain.temperatures = {}
        for by in fitted.predictors:
            shares = {each: each.probabilities(mini.test.images[seen], by) for each in (plain, fitted)}
            right = model.classes_[shares[fitted].argmax(axis=1)] == mini.test.class_ids[seen]
            sure = [f"{100 * each.max(axis=1).mean():.1f}" for each in shares.values()]
            errors = [f"{100 * calibration_error(each, right):.1f}" for each in shares.values()]
            found = [f"{100 * right.mean():.1f}", *sure, *errors, f"{fitted.temperatures.get(by, 1.0):.2f}"]
            yield dict(zip(COLUMNS, [seed, end, by, *found], strict=True))


def main() -> None:
    """Writes the rows."""
    out, *seeds = sys.argv[1:]
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for seed in seeds:
            writer.writerows(rows_of(int(seed)))
            file.flush()


if __name__ == "__main__":
    main()
