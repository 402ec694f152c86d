"""Recipes for ImageNet: `<method>-imagenet100-b50-s10`, `<method>-imagenet1000-b500-s5` and their like.

A method gets them by an entry in SETTINGS: what it has there otherwise than on CIFAR-100, by data set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engram.contract import MethodInfo
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.sources.load import DataConfig
from engram.experiment.run_config import RunConfig

Changes = dict[str, Any]  # dotted paths in a method's settings

# Base classes, and the new classes of a stage by the number of stages: the columns of the paper's Table 2.
PROTOCOLS: dict[str, tuple[int, dict[int, int]]] = {
    "imagenet100": (50, {50: 1, 25: 2, 10: 5, 5: 10}),
    "imagenet1000": (500, {10: 50, 5: 100}),
}
# Images are kept at 256x256 pixels and seen at 224x224.
AUGMENTATION = Augmentation(pad=0, view=224 / 256)


def both(changes: Changes) -> dict[str, Changes]:
    """The same for ImageNet-100 and ImageNet-1000."""
    return dict.fromkeys(PROTOCOLS, changes)


def _podnet(weight_decay: float) -> Changes:
    # Its author advises batches of 256 and a rate of 0.2 for ImageNet-1000; these are the published files'.
    return {
        "lambda_flat": 10.0,
        "lambda_spatial": 8.0,
        "train.epochs": 90,
        "train.batch_size": 64,
        "train.lr": 0.05,
        "train.weight_decay": weight_decay,
        "finetune.batch_size": 64,
        "finetune.lr": 0.01,
        "finetune.weight_decay": weight_decay,
    }


# UCIR's training, and that of what is built on it: a tenth of the rate after 30 epochs and after 60.
COSINE: Changes = {"train.epochs": 90, "train.milestones": (30 / 90, 60 / 90), "train.weight_decay": 1e-4}

UCIR: Changes = {"lambda_embedding": 10.0, **COSINE}
PODNET = {"imagenet100": _podnet(5e-4), "imagenet1000": _podnet(1e-4)}

# A method without an entry has no ImageNet recipes, and one without a data set in its entry none for that.
SETTINGS: dict[str, dict[str, Changes]] = {
    "afc": both(
        {
            "lambda_disc": 10.0,
            "train.epochs": 90,
            "train.weight_decay": 1e-4,
            "finetune.lr": 0.02,
            "finetune.weight_decay": 1e-4,
        }
    ),
    "podnet": PODNET,
    "podnet-dde": PODNET,
    "ucir": {"imagenet100": UCIR, "imagenet1000": {**UCIR, "finetune.epochs": 20, "finetune.weight_decay": 1e-4}},
    # Its run file for ImageNet-100 has half of UCIR's weight.
    "ucir-dde": {"imagenet100": {**UCIR, "lambda_embedding": 5.0}, "imagenet1000": UCIR},
    "mnemonics": both(UCIR),
    "geodl": both({"lambda_geodesic": 10.0, **COSINE}),
    "icarl": both(
        {
            "train.epochs": 60,
            "train.batch_size": 64,
            "train.lr": 1.0,
            "train.milestones": (20 / 60, 30 / 60, 40 / 60, 50 / 60),
            "train.weight_decay": 1e-5,
        }
    ),
    "bic": both(
        {
            "train.epochs": 100,
            "train.batch_size": 64,
            "train.lr": 0.025,
            "train.milestones": (0.3, 0.6, 0.8, 0.9),
            "train.weight_decay": 1e-4,
        }
    ),
    "ssil": {
        "imagenet1000": {"train.epochs": 100, "train.milestones": (0.4, 0.8), "train.weight_decay": 1e-4},
    },
    "gdumb": {"imagenet100": {"train.epochs": 128, "rehearse.epochs": 16}},
}


def imagenet(method: MethodInfo, dataset: str, stages: int, memory: MemoryConfig) -> RunConfig:
    """The paper's ImageNet protocol: half of the classes first, then so many stages; ResNet-18."""
    base, increments = PROTOCOLS[dataset]
    config = RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig(dataset),
        base=base,
        increment=increments[stages],
        memory=memory,
        backbone="resnet18",
        augmentation=AUGMENTATION if method.brightened else replace(AUGMENTATION, brightness=0.0),
        predictor=method.predictors[0],
    )
    for path, value in SETTINGS[method.name][dataset].items():
        config = config.with_value(f"settings.{path}", value)
    return config


def recipe_name(method: str, dataset: str, stages: int) -> str:
    """The name of such a recipe."""
    return f"{method}-{dataset}-b{PROTOCOLS[dataset][0]}-s{stages}"


def offered(method: str) -> list[tuple[str, int]]:
    """The data sets and numbers of stages that a method has ImageNet recipes for."""
    return [(dataset, stages) for dataset in SETTINGS.get(method, {}) for stages in PROTOCOLS[dataset][1]]
