"""Measures how LDA's probabilities should be calibrated: python tools/measure_calibration.py OUT.csv NAME=FOLDER...

FOLDER has the lessons lesson1, lesson2 ... with one folder of images per class (the folder test is not used). Of all
their images a part is left out:

- alike: a fifth of each class, drawn at random;
- clusters: of each class one of four groups of images whose embeddings are alike, which stands for other days.

Of the rest, a fifth of each class is held out. LDA learns the others, and a temperature is fitted on the held-out
images, such that the mean confidence is their accuracy less a margin. Then the held-out images are learned too, as
`engram learn` does. A row has the accuracy, the mean confidence and the calibration error (ten bins) of the images that
were left out, all in percent, over three draws with two parts each.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans

from engram.data.store import stable_permutation
from engram.models.calibration import fit_temperature
from measure_confidence import calibration_error
from measure_own_images import Photographs, Scores, lda

MARGINS = (0.0, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
DRAWS, PARTS = 3, 2  # of the parts of a draw, so many are left out in turn
RANDOM_PARTS, CLUSTERS = 5, 4
Part = tuple[Scores, np.ndarray, Scores, np.ndarray]  # scores and classes of held-out images, and of those left out


def probabilities(scores: Scores, temperature: float = 1.0) -> np.ndarray:
    return torch.from_numpy(scores / temperature).softmax(dim=1).numpy()


def at_random(classes: np.ndarray, draw: str) -> np.ndarray:
    """A part, from 0 to 4, for each image, such that each has a fifth of each class."""
    part = np.empty(len(classes), dtype=int)
    for label in np.unique(classes):
        rows = np.flatnonzero(classes == label)
        part[rows[stable_permutation(len(rows), f"{draw} of {label}")]] = np.arange(len(rows)) % RANDOM_PARTS
    return part


def by_cluster(embeddings: np.ndarray, classes: np.ndarray, draw: int) -> np.ndarray:
    """The group of each image among those of its class."""
    part = np.empty(len(classes), dtype=int)
    for label in np.unique(classes):
        rows = np.flatnonzero(classes == label)
        part[rows] = KMeans(min(CLUSTERS, len(rows)), n_init="auto", random_state=draw).fit_predict(embeddings[rows])
    return part


def parts(data: Photographs, kind: str) -> Iterator[Part]:
    rows = data.lessons >= 0
    features, classes = data.features[rows], data.classes[rows]
    embeddings = np.sqrt(np.abs(features)).mean(axis=1)
    for draw in range(DRAWS):
        is_random = kind == "alike"
        part = at_random(classes, f"draw {draw}") if is_random else by_cluster(embeddings, classes, draw)
        for number in range(PARTS):
            out = part == number
            held = ~out
            held[held] = at_random(classes[held], f"held out {draw}") == 0
            learned = ~out & ~held
            if len(np.unique(classes[learned])) < len(np.unique(classes)):
                continue
            (measured, _), (known, _) = (next(lda([(features[own], classes[own])])) for own in (learned, ~out))
            yield measured(features[held]), classes[held], known(features[out]), classes[out]


def measure(found: list[Part], margin: float) -> dict[str, object]:
    shares, labels, temperatures = [], [], []
    for held, held_labels, scores, own in found:
        temperature = fit_temperature(probabilities(held), held_labels, margin)
        temperatures.append(1.0 if temperature is None else temperature)
        shares.append(probabilities(scores, temperatures[-1]))
        labels.append(own)
    every, right = np.concatenate(shares), np.concatenate(shares).argmax(axis=1) == np.concatenate(labels)
    return {
        "accuracy": round(100 * float(right.mean()), 1),
        "confidence": round(100 * float(every.max(axis=1).mean()), 1),
        "error": round(100 * float(calibration_error(every, right)), 1),
        "temperature": round(float(np.median(temperatures)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--cache", type=Path, help="folder to keep the features in, for another call")
    parser.add_argument("--weights", default="efficientnet-lite0-lite2", help="the network")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for given in options.sets:
        name, _, folder = given.partition("=")
        data = Photographs(Path(folder), options.cache, options.weights)
        for kind in ("alike", "clusters"):
            found = list(parts(data, kind))
            for margin in MARGINS:
                rows.append({"set": name, "left out": kind, "margin": 100 * margin, **measure(found, margin)})
                print(rows[-1], file=sys.stderr)
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
