"""What is measured on: the size of the problem, its synthetic images and its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from engram.contract import Training
from engram.core.errors import EngramError
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.sources.load import DataConfig
from engram.data.store import DataSplit, ImageStore
from engram.experiment.run_config import Device, Precision, RunConfig
from engram.methods import find_method

# What a whole run of the CIFAR-100 recipes trains, which shorter runs are extrapolated to.
FULL_EPOCHS, FULL_FINETUNE = 160, 20


@dataclass(frozen=True)
class Scale:
    """The size of the problem and of the measurements.

    per_class, test_per_class: images. runs: how many at once, one measurement each. steps: of one repetition, after
    warm_up steps. files, rounds: that `predict` reads, and how often it takes them on a GPU once they are decoded.
    run_epochs, run_finetune: epochs of the whole runs that `after`, `growth` and `methods` time. The growth_ fields are
    the classes in all (one run each), base, increment and images a class of those that `growth` times. methods: those
    that `methods` times; none is all.
    """

    classes: int = 100
    base: int = 50
    increment: int = 5
    per_class: int = 500
    test_per_class: int = 100
    image_size: int = 32
    pad: int = 4
    backbone: str = "resnet32"
    batch_size: int = 128
    exemplars: int = 20
    runs: tuple[int, ...] = (1, 2, 3, 6, 12)
    warm_up: int = 20
    steps: int = 150
    repetitions: int = 5
    profiled_steps: int = 20
    workers: int = 8
    run_epochs: int = 4
    run_finetune: int = 2
    growth_classes: tuple[int, ...] = (100, 200)
    growth_base: int = 20
    growth_increment: int = 10
    growth_per_class: int = 250
    files: int = 4096
    rounds: int = 16
    methods: tuple[str, ...] = ()
    device: Device = "auto"
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        for name in self.methods:
            find_method(name)  # which refuses what there is not
        if not self.runs or min(self.runs) < 1:
            raise EngramError(f"the runs at once must be 1 or more, got {','.join(map(str, self.runs)) or 'none'}")
        if self.workers < 0:
            raise EngramError(f"the workers of the plain loop must be 0 or more, got {self.workers}")
        for name, least in (("steps", 1), ("repetitions", 3), ("profiled_steps", 1), ("run_epochs", 2), ("files", 1)):
            if getattr(self, name) < least:
                raise EngramError(f"{name} must be at least {least}, got {getattr(self, name)}")


FULL = Scale()
# Every code path in seconds on a CPU. Its numbers say nothing about speed.
QUICK = Scale(
    classes=8,
    base=4,
    increment=2,
    per_class=16,
    test_per_class=4,
    image_size=8,
    pad=1,
    backbone="resnet10",
    batch_size=16,
    exemplars=4,
    runs=(1, 2),
    warm_up=1,
    steps=2,
    repetitions=3,
    profiled_steps=2,
    workers=1,
    run_epochs=2,
    run_finetune=2,
    growth_classes=(12, 14),
    growth_base=2,
    growth_increment=2,
    growth_per_class=12,
    files=40,
    rounds=2,
    methods=("afc", "bic"),
)


def synthetic_store(
    num_classes: int, per_class: int, test_per_class: int, image_size: int, seed: int = 0
) -> ImageStore:
    """Random uint8 images with a normalisation, so that nothing has to be counted before a session starts."""
    random = np.random.default_rng(seed)

    def split(count: int) -> DataSplit:
        shape = (num_classes * count, image_size, image_size, 3)
        return DataSplit(random.integers(0, 256, shape, dtype=np.uint8), np.repeat(np.arange(num_classes), count))

    names = tuple(f"class {i}" for i in range(num_classes))
    half = (0.5, 0.5, 0.5)
    return ImageStore("synthetic", split(per_class), split(test_per_class), names, mean=half, std=half)


def store_of(scale: Scale) -> ImageStore:
    """The images that steps and after-stage passes are measured on."""
    return synthetic_store(scale.classes, scale.per_class, scale.test_per_class, scale.image_size)


def afc_config(scale: Scale, *, seed: int = 1, epochs: int = FULL_EPOCHS, finetune: int = FULL_FINETUNE) -> RunConfig:
    """AFC with the settings of its CIFAR-100 recipe, at that scale."""
    training = Training(epochs=epochs, batch_size=scale.batch_size)
    balanced = replace(training, epochs=finetune, lr=0.05, schedule="constant")
    return RunConfig(
        method="afc",
        settings=find_method("afc").settings(**cast(dict[str, Any], {"train": training, "finetune": balanced})),
        data=DataConfig("arrays"),
        base=scale.base,
        increment=scale.increment,
        order="natural",
        seed=seed,
        memory=MemoryConfig(size=scale.exemplars),
        backbone=scale.backbone,
        augmentation=Augmentation(pad=scale.pad),
        device=scale.device,
        precision=scale.precision,
        recipe="benchmark",
    )
