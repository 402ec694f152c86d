"""Measures learning from photographs on a pretrained network: python tools/measure_own_images.py OUT.csv NAME=FOLDER...

FOLDER has the lessons lesson1, lesson2 ... and test, each with one folder of images per class. The network is frozen,
EfficientNet-Lite0 by default. Its features of every image, in LDA's views, are computed once; then three class orders
are learned in lessons (the first as the folders are, the others with the classes drawn again) by

- lda: the method of that name;
- lda, 20 % held out: the same without a fifth of the images of each class, as `engram learn` does by default;
- nearest mean: cosine similarity to the mean of a class's unit embeddings;
- joint logistic regression: scikit-learn's, on the embeddings of all images seen so far at once, the limit.

A row has the accuracy in percent of the test images of all classes seen, after each lesson; the forgetting (mean over
earlier lessons of the best accuracy on their classes minus the last); the CPU seconds of the features of all learned
images and of all solutions; and the bytes that are kept of the images after the last lesson.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from engram.contract import Learner, Stage
from engram.core.metrics import accuracy_by_stage, forgetting
from engram.data.augment import Augmentation
from engram.data.memory import Memory, MemoryConfig
from engram.data.sources.folder import list_classes
from engram.data.stage import Samples, content_ids
from engram.data.store import stable_permutation
from engram.engine import Engine
from engram.methods import find_method
from engram.methods.lda import LDA, LDASettings
from engram.models.inputs import read_images
from engram.nn.backbones import build_backbone
from engram.nn.heads import LinearHead
from engram.nn.network import Network
from engram.nn.pretrained import load_weights

VIEWS = LDA(LDASettings()).feature_views()
ORDERS = 3
HELD_OUT = 0.2
Scores = np.ndarray  # (N, K)
Learn = Callable[[list[tuple[np.ndarray, np.ndarray]]], Iterator[tuple[Callable[[np.ndarray], Scores], int]]]


class Photographs:
    """Embeddings (N, V, D) of an image in LDA's views, classes (N,) and lessons (N,); lesson -1 is the test."""

    def __init__(self, folder: Path, cache: Path | None, weights: str, side: int | None = None) -> None:
        kept = None if cache is None else cache / f"{folder.name}-{weights}-{side}.npz"
        if kept is not None and kept.is_file():
            held = np.load(kept)
            self.features, self.classes, self.lessons = held["features"], held["classes"], held["lessons"]
            self.seconds = float(held["seconds"])
            return
        paths: list[str] = []
        labels: list[str] = []
        lessons: list[int] = []
        for number, part in [*enumerate(sorted(folder.glob("lesson*"))), (-1, folder / "test")]:
            found, names = list_classes(str(part))
            paths, labels, lessons = paths + found, labels + names, lessons + [number] * len(found)
        names = sorted(set(labels))
        self.classes = np.array([names.index(label) for label in labels])
        self.lessons = np.array(lessons)
        started = time.process_time()
        self.features = _embed(paths, weights, side)
        # Of one image, as each was read and embedded once.
        self.seconds = (time.process_time() - started) / len(paths)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                kept, features=self.features, classes=self.classes, lessons=self.lessons, seconds=np.array(self.seconds)
            )


def _embed(paths: list[str], weights: str, side: int | None) -> np.ndarray:
    record, tensors = load_weights(weights)
    backbone = build_backbone(weights, torch.Generator())
    backbone.load_state_dict(tensors)
    network = Network(backbone, LinearHead(backbone.dim, 1), record.mean, record.std)
    size = (side or record.image_size, side or record.image_size)
    engine = Engine(torch.device("cpu"), "float32", Augmentation(), size)
    parts = []
    for start in range(0, len(paths), 64):
        images = torch.from_numpy(read_images(paths[start : start + 64], size))
        inference = engine.inference(network)
        views = [torch.cat([seen.embedding for seen in inference.outputs(images, view)]) for view in VIEWS]
        parts.append(torch.stack(views, dim=1).numpy())
        print(f"{start + len(images)} of {len(paths)} images", file=sys.stderr)
    return np.concatenate(parts)


def lda(lessons: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[Callable[[np.ndarray], Scores], int]]:
    """The package's method, on features that were computed before."""
    info = find_method("lda")
    method = info.make(info.settings())
    size = lessons[0][0].shape[2]
    backbone = build_backbone("resnet10", torch.Generator())  # not used
    networks = [method.network(backbone, method.head(size, 1), (0.0,) * 3, (1.0,) * 3) for _ in range(2)]
    learner = Learner(networks[0], networks[1], Memory(MemoryConfig("none", 0)), 1, uses_teacher=False)
    head = learner.network.head
    assert isinstance(head, LinearHead)

    def powers(features: np.ndarray) -> Tensor:
        values = torch.from_numpy(features)
        return head.input_features(values.flatten(0, 1), (), False).view(values.shape)

    for number, (features, labels) in enumerate(lessons):
        known, new = head.num_classes, int(labels.max()) + 1 - head.num_classes
        learner.reserve(known + new, method.class_buffers)
        images, targets = torch.zeros(len(labels), 1, 1, 3, dtype=torch.uint8), torch.from_numpy(labels)
        pool = Samples(images, targets, content_ids(images), torch.zeros(len(labels), dtype=torch.bool))
        head.grow(new, torch.Generator())
        method.fit(learner, Stage(number, known, new, pool), powers(features).mean(dim=1), targets)
        yield (
            partial(_linear, powers, head),
            sum(held.numel() * held.element_size() for held in learner.buffers.values()),
        )


def _linear(powers: Callable[[np.ndarray], Tensor], head: LinearHead, features: np.ndarray) -> Scores:
    with torch.no_grad():
        return head(powers(features).mean(dim=1)).numpy()


def _unit(features: np.ndarray) -> np.ndarray:
    return (features / np.linalg.norm(features, axis=2, keepdims=True)).mean(axis=1)


def nearest_mean(lessons: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[Callable[[np.ndarray], Scores], int]]:
    """The class whose mean is most similar."""
    means = np.zeros((0, lessons[0][0].shape[2]), dtype=np.float32)
    for features, labels in lessons:
        unit = _unit(features)
        own = np.stack([unit[labels == label].mean(axis=0) for label in np.unique(labels)])
        means = np.concatenate([means, own / np.linalg.norm(own, axis=1, keepdims=True)])
        yield (lambda features, means=means: _unit(features) @ means.T), means.nbytes


def joint(lessons: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[Callable[[np.ndarray], Scores], int]]:
    """Logistic regression on all features so far, which it has to keep."""
    for last in range(len(lessons)):
        features = np.concatenate([own.mean(axis=1) for own, _ in lessons[: last + 1]])
        labels = np.concatenate([own for _, own in lessons[: last + 1]])
        fitted = LogisticRegression(max_iter=1000).fit(features, labels)
        yield (lambda features, fitted=fitted: fitted.decision_function(features.mean(axis=1))), features.nbytes


def measure(data: Photographs, order: int, learn: Learn, held_out: float) -> dict[str, object]:
    """One row: lessons of the class order, learned one after the other."""
    sizes = [len(np.unique(data.classes[data.lessons == number])) for number in range(data.lessons.max() + 1)]
    first = [np.unique(data.classes[data.lessons == number]) for number in range(len(sizes))]
    classes = np.concatenate(first)
    if order > 1:
        classes = classes[stable_permutation(len(classes), f"order {order}")]
    label_of = np.argsort(classes)
    labels, test = label_of[data.classes], data.lessons < 0
    ends = np.cumsum(sizes)
    lessons: list[tuple[np.ndarray, np.ndarray]] = []
    for start, end in zip(ends - sizes, ends, strict=True):
        rows = [_learned(np.flatnonzero(~test & (labels == label)), held_out) for label in range(start, end)]
        own = np.concatenate(rows)
        lessons.append((data.features[own], labels[own]))
    started, per_stage, matrix, bytes_kept = time.process_time(), [], [], 0
    for number, (scores, kept) in enumerate(learn(lessons)):
        bytes_kept = kept
        seen = test & (labels < ends[number])
        predicted = scores(data.features[seen]).argmax(axis=1)
        per_stage.append(100 * float((predicted == labels[seen]).mean()))
        matrix.append(accuracy_by_stage(labels[seen], predicted, sizes[: number + 1]))
    seconds = time.process_time() - started + data.seconds * sum(len(own) for _, own in lessons)
    lost = forgetting(matrix)
    accuracies = {f"lesson{number}": round(value, 2) for number, value in enumerate(per_stage, start=1)}
    return {
        **accuracies,
        "forgetting": None if lost is None else round(lost, 2),
        "cpu_seconds": round(seconds, 1),
        "kept_bytes": bytes_kept,
    }


def _learned(rows: np.ndarray, held_out: float) -> np.ndarray:
    kept = len(rows) - round(held_out * len(rows))
    return rows[np.sort(stable_permutation(len(rows), "held out")[:kept])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--cache", type=Path, help="folder to keep the features in, for another call")
    parser.add_argument("--weights", default="efficientnet-lite0", help="the network")
    parser.add_argument("--image-size", type=int, help="side of the images; by default that of the network")
    options = parser.parse_args()
    ways: dict[str, tuple[Learn, float]] = {
        "lda": (lda, 0.0),
        "lda, 20 % held out": (lda, HELD_OUT),
        "nearest mean": (nearest_mean, 0.0),
        "joint logistic regression": (joint, 0.0),
    }
    rows: list[dict[str, object]] = []
    for given in options.sets:
        name, _, folder = given.partition("=")
        data = Photographs(Path(folder), options.cache, options.weights, options.image_size)
        for way, (learn, held_out) in ways.items():
            for order in range(1, ORDERS + 1):
                rows.append({"set": name, "way": way, "order": order, **measure(data, order, learn, held_out)})
                print(rows[-1], file=sys.stderr)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
