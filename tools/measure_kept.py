"""Writes the bytes that each method of the open bench keeps between stages: python tools/measure_kept.py OUT.json

Each row of the bench learns 50 classes, and then 50 more in one stage (in ten, if its network grows with each stage),
one epoch each, from 20 random images of 8x8 pixels a class. What the learner then holds is counted as for CIFAR-100:
images as 32x32 pixels, and what is kept of every training image for 500 images a class. The teacher is not counted: it
is a copy of the network. A method with many random features is measured with three smaller numbers of them: what it
keeps is a polynomial of the second degree in that number. No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from engram.contract.settings import TRAINING_ROLES, change_training, with_role
from engram.core.io import write_json
from engram.core.provenance import versions
from engram.data.augment import Augmentation
from engram.data.sources.load import DataConfig
from engram.data.store import DataSplit, ImageStore
from engram.experiment.execution import RunExecution
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.reproduce.cell_plan import PaperRequest, make_plan
from engram.reproduce.paper import load_paper
from engram.reproduce.records import protocol_key

CLASSES, IMAGES, SIZE = 100, 20, 8
REAL_IMAGES, REAL_SIZE = 500, 32
WIDTHS = (256, 512, 768)
COLUMN = "10 stages"
GROWING = ("der", "memo")  # methods whose network depends on the number of stages


def random_store() -> ImageStore:
    """Random images: what is kept of them does not depend on what they show."""
    random = np.random.default_rng(0)

    def split(count: int) -> DataSplit:
        shape = (CLASSES * count, SIZE, SIZE, 3)
        return DataSplit(random.integers(0, 256, shape, dtype=np.uint8), np.repeat(np.arange(CLASSES), count))

    names = tuple(f"class {i}" for i in range(CLASSES))
    half = (0.5, 0.5, 0.5)
    return ImageStore("random", split(IMAGES), split(1), names, mean=half, std=half)


def short(config: RunConfig) -> RunConfig:
    """The configuration with at most one epoch in every phase, on a CPU."""
    settings = config.settings
    for role in TRAINING_ROLES:
        for training in with_role(settings, role).values():
            changes = {
                "epochs": min(1, training.epochs),
                "batch_size": 256,
                "lr": 0.01,
                "schedule": "constant",
                "warmup": 0.0,
            }
            settings = change_training(settings, (role,), **changes)
    if getattr(settings, "base_epochs", None) is not None:
        settings = replace(settings, base_epochs=1)
    changes: dict[str, Any] = {
        "data": DataConfig("arrays"),
        "order": "natural",
        "device": "cpu",
        "precision": "float32",
    }
    if config.method not in GROWING:
        assert config.base is not None
        changes["increment"] = CLASSES - config.base
    return replace(config, settings=settings, augmentation=Augmentation(pad=1), **changes)


def kept_with(config: RunConfig, store: ImageStore) -> dict[str, int]:
    """The bytes of a row, also with more random features than a CPU can solve for in minutes."""
    width = getattr(config.settings, "width", 0)
    if width <= max(WIDTHS):
        return kept_bytes(config, store)
    found = [kept_bytes(config.with_value("settings.width", small), store) for small in WIDTHS]
    shares = [prod(Fraction(width - other, own - other) for other in WIDTHS if other != own) for own in WIDTHS]
    return {part: int(sum(share * one[part] for share, one in zip(shares, found, strict=True))) for part in found[0]}


def kept_bytes(config: RunConfig, store: ImageStore) -> dict[str, int]:
    """Return the bytes that the learner holds after the last stage: network, images, and everything else."""
    session = Session(config, store)
    for _ in RunExecution(session, None, None, None, 10.0, None).events(resumed=False):
        pass
    found = {"network": 0, "images": 0, "statistics": 0}
    for name, value in session.learner.state_dict().items():
        part, size = name.split(".")[0], value.numel() * value.element_size()
        if part == "teacher":
            continue
        of_every_image = value.ndim > 0 and len(value) == CLASSES * IMAGES
        if of_every_image and (part != "memory" or config.memory.budget == "all"):
            size = size // IMAGES * REAL_IMAGES
        if tuple(value.shape[1:3]) == (SIZE, SIZE):
            size *= (REAL_SIZE // SIZE) ** 2
            part = "images"
        found[part if part in found else "statistics"] += size
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    given = options.parse_args(arguments)
    store, rows, found = random_store(), {}, dict[str, dict[str, int]]()
    asked = PaperRequest(orders=["1"], columns=[COLUMN])
    for cell in make_plan(load_paper(Path("bench")).find(["b50"]), [], asked).cells:
        config = short(cell.wanted[0].config)
        same = protocol_key(config)  # rows that differ in augmentation or epochs keep the same
        rows[cell.row.label] = found[same] = found.get(same) or kept_with(config, store)
        print(cell.row.label, rows[cell.row.label], file=sys.stderr, flush=True)
    write_json(given.out, {"command": "python tools/measure_kept.py OUT.json", "versions": versions(), "rows": rows})


if __name__ == "__main__":
    main()
