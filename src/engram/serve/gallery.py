"""The pictures that a model keeps: exemplars and held-out images, by opaque ids, with their embeddings."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.models.model import Model
from engram.models.prediction import default_batch
from engram.models.store.codec import open_model
from engram.models.store.generations import Pointer, Snapshot, read_model
from engram.models.store.pictures import EXEMPLARS, HELDOUT, picture_name
from engram.serve.limits import Refused
from engram.serve.predicting import unit_embeddings

_ID = re.compile(r"([0-9a-f]{8})-(\d{1,9})")
SHOWN = 50  # images behind a cell of the confusion matrix


@dataclass(frozen=True)
class Examples:
    """The pictures of a generation. An id is the beginning of the generation's digest and a number.

    names: of the files. positions: of their classes.
    """

    pointer: Pointer
    names: list[str]
    positions: list[int]

    @classmethod
    def of(cls, pointer: Pointer, classes: list[dict[str, Any]]) -> Examples:
        """List the pictures. classes: of the manifest."""
        listed = [
            (picture_name(kind, position, rank), position)
            for kind in (EXEMPLARS, HELDOUT)
            for position, entry in enumerate(classes)
            for rank in range(entry[kind])
        ]
        return cls(pointer, [name for name, _ in listed], [position for _, position in listed])

    def id(self, number: int) -> str:
        """Return the id of a picture."""
        return f"{self.pointer.digest[:8]}-{number}"

    def by_class(self) -> dict[int, list[str]]:
        """Return the ids by the position of their class."""
        found: dict[int, list[str]] = defaultdict(list)
        for number, position in enumerate(self.positions):
            found[position].append(self.id(number))
        return found

    def read(self, path: Path, name: str) -> bytes:
        """Return the PNG file of a picture by its id; refuse an id of another generation."""
        match = _ID.fullmatch(name)
        number = int(match[2]) if match else -1
        if match is None or match[1] != self.pointer.digest[:8] or number >= len(self.names):
            raise Refused(404, "the model has no such picture now")

        def read(snapshot: Snapshot) -> bytes:
            if snapshot.pointer != self.pointer:
                raise Refused(404, "the model has no such picture now")
            return snapshot.read(self.names[number])

        return read_model(path, read)


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embeddings of the pictures of a generation, and the predictions of its held-out images."""

    examples: Examples
    embedding: np.ndarray  # (N, D), length 1
    predicted: np.ndarray  # (N,), positions
    heldout: np.ndarray  # (N,), bool

    @classmethod
    def make(cls, examples: Examples, path: Path, device: Any) -> Gallery:
        """Compute them all; refuse if the model has changed meanwhile."""
        model, pointer = open_model(path, device)
        if pointer != examples.pointer:
            raise Refused(409, "the model has changed in the meantime; try again")
        read, batch = model.logit_reader(), default_batch(model)
        embeddings: list[np.ndarray] = []
        predicted: list[np.ndarray] = []
        for images in _pictures(model):
            for part in torch.split(images, batch):
                embeddings.append(unit_embeddings(model, part.numpy()).astype(np.float32))
                predicted.append(read(part).argmax(dim=1).cpu().numpy())
        empty = np.empty((0, 1), np.float32), np.empty(0, np.int64)
        return cls(
            examples,
            np.concatenate(embeddings) if embeddings else empty[0],
            np.concatenate(predicted) if predicted else empty[1],
            np.array([name.startswith(HELDOUT) for name in examples.names], dtype=bool),
        )

    def nearest(self, embedding: np.ndarray, count: int) -> list[list[tuple[int, float]]]:
        """Return for each image (N, D) the numbers and cosine similarities of the most similar pictures."""
        if not len(self.embedding):
            return [[] for _ in embedding]
        similar = embedding @ self.embedding.T
        best = np.argsort(-similar, axis=1, kind="stable")[:, :count]
        return [
            [(int(place), float(row[place])) for place in places] for row, places in zip(similar, best, strict=True)
        ]

    def confusion(self, classes: int) -> tuple[np.ndarray, dict[str, list[str]]]:
        """Return counts (K, K) by true and predicted class on held-out images, and the ids behind each cell."""
        counts = np.zeros((classes, classes), dtype=np.int64)
        cells: dict[str, list[str]] = defaultdict(list)
        for number in np.flatnonzero(self.heldout).tolist():
            true, guess = self.examples.positions[number], int(self.predicted[number])
            counts[true, guess] += 1
            if len(cells[f"{true},{guess}"]) < SHOWN:
                cells[f"{true},{guess}"].append(self.examples.id(number))
        return counts, dict(cells)


def _pictures(model: Model) -> list[torch.Tensor]:
    """Return the pictures of each class, in the order of their names."""
    assert model.learner is not None
    return [
        memory.of(position).pixels
        for memory in (model.learner.memory, model.heldout)
        for position in range(len(model.classes))
        if position in memory.labels
    ]


class Once:
    """A value that is made by the first thread that needs it, while the others wait."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Any = None

    def __call__(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made
