"""What the tests of models share: tiny pictures of classes that differ, and models that learn them in a moment."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from engram.core.events import Event, Learned
from engram.methods import find_method
from engram.models.learning import learn_into
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.models.store.codec import open_model

SIZE = 8
NAMES = ("apple", "boat", "camel", "dingo", "easel", "falcon", "goose")
COLOURS = ((200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60), (200, 60, 200), (60, 200, 200), (130, 130, 130))


def pictures(names: Iterable[str], count: int = 8, seed: int = 0, size: int = SIZE) -> tuple[np.ndarray, list[str]]:
    """`count` images of each class, a colour and a pattern under noise, and their labels."""
    images, labels = [], []
    for name in names:
        number = NAMES.index(name)
        pattern = np.array(COLOURS[number]) + np.random.default_rng(number).integers(-25, 26, (size, size, 3))
        noise = np.random.default_rng((seed, number)).normal(0, 15, (count, size, size, 3))
        images.append((pattern + noise).clip(0, 255).astype(np.uint8))
        labels += [name] * count
    return np.concatenate(images), labels


def tiny(method: str = "afc", epochs: int = 2, **changes: Any) -> ModelConfig:
    """A configuration that learns a handful of pictures in a fraction of a second."""
    settings = {"train.batch_size": 8, "train.lr": 0.05, "train.clip": 1.0, "train.remainder": "keep"}
    fields = find_method(method).settings.__dataclass_fields__
    if "train" not in fields:
        settings = {}
    if "width" in fields:
        settings["width"] = 32
    changes = {"memory": 3, "backbone": "resnet10", "settings": settings, "device": "cpu"} | changes
    return ModelConfig.choose(method, image_size=SIZE, images=24, epochs=epochs, **changes)


def memory_of(method: str) -> str:
    """A memory that the method can be had with."""
    return {"needed": "per_class=3", "optional": "per_class=3"}.get(
        find_method(method).memory, find_method(method).memory
    )


def learn(path: Path, names: Iterable[str], seed: int = 0, count: int = 8, **options: Any) -> list[Event]:
    """The events of learning these classes."""
    images, labels = pictures(names, count, seed)
    return list(learn_into(path, images, labels, device="cpu", **options))


def make(path: Path, *lessons: Iterable[str], config: ModelConfig | None = None) -> Path:
    """A model that has learned the lessons. This process trains it once, and writes the same files from then on."""
    config = config or tiny(validation=0.25)
    trained = _trained if not config.code_versions() else _trained.__wrapped__  # code from outside may be another's
    first: dict[int, Path] = {}
    for name, inode, content in trained(tuple(map(tuple, lessons)), config):
        file = path / name
        if content is None:
            file.mkdir(parents=True)
        elif inode in first:
            os.link(first[inode], file)
        else:
            file.write_bytes(content)
            first[inode] = file
    return path


@cache
def _trained(lessons: tuple[tuple[str, ...], ...], config: ModelConfig) -> list[tuple[str, int, bytes | None]]:
    """Name, inode and content of each file of a model that has learned the lessons; a folder has no content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        for number, names in enumerate(lessons):
            events = learn(path, names, config=None if number else config)
            assert isinstance(events[-1], Learned)
        found = [path, *sorted(path.rglob("*"))]
        return [
            (str(each.relative_to(path)), each.stat().st_ino, each.read_bytes() if each.is_file() else None)
            for each in found
        ]


def opened(path: Path, **options: Any) -> Model:
    """The model at a path, on the CPU."""
    return open_model(path, "cpu", **options)[0]


def scores(model: Model, images: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Every score that the model's predictions are made of, by predictor."""
    if images is None:
        images, _ = pictures(NAMES, 2, seed=9)
    assert model.learner is not None
    embedding, found = model.engine.infer(model.learner.network, torch.from_numpy(images))
    result = {"cnn": found[:, : len(model.classes)].numpy()}
    if model.learner.class_means is not None:
        unit = torch.nn.functional.normalize(embedding, dim=1)
        result["nme"] = (unit @ model.learner.class_means.T).numpy()
    return result


def same(ours: Model, theirs: Model) -> bool:
    """Whether two models know the same classes and give the same scores, bit for bit."""
    a, b = scores(ours), scores(theirs)
    return ours.labels == theirs.labels and a.keys() == b.keys() and all(np.array_equal(a[by], b[by]) for by in a)


def png(image: np.ndarray) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def everything(path: Path) -> dict[str, bytes]:
    """Every file below a path, by name."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def learn_in_child(path: str, names: tuple[str, ...]) -> None:
    """Learns in a process of its own, saving how far it is after every step, until it is done or killed."""
    torch.set_num_threads(1)
    images, labels = pictures(names)
    for _ in learn_into(
        path, images, labels, config=None if names != NAMES[:3] else tiny(), device="cpu", checkpoint_minutes=0
    ):
        pass
