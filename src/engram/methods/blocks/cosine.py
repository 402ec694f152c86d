"""The host of UCIR and the methods built on it: a cosine head with imprinted weights, trained once a stage.

A stage trains the backbone, the new classes' weights and the scale; the old classes' weights stay as they are, so that
what keeps an old embedding in place keeps its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import (
    Learner,
    Method,
    Part,
    Passes,
    Phase,
    Settings,
    Stage,
    Step,
    Terms,
    Training,
    base_settings,
    setting,
    unit_embeddings,
)
from engram.core.rng import generator
from engram.nn.heads import CosineHead, Head


@dataclass(frozen=True)
class CosineSettings(Settings):
    """The settings of the host; the defaults are UCIR's on CIFAR-100 (lower rates from epochs 80 and 120)."""

    train: Training = setting(
        factory=lambda: Training(schedule="steps", milestones=(0.5, 0.75), factor=0.1, clip=None), role="main"
    )


# On ImageNet: a tenth of the rate after 30 epochs and after 60.
IMAGENET_TRAINING = {"train.epochs": 90, "train.milestones": (30 / 90, 60 / 90), "train.weight_decay": 1e-4}


def cross_entropy(step: Step) -> Tensor:
    """The cross-entropy over all classes seen, of the cosines times the learned scale; the mean over the batch."""
    return F.cross_entropy(step.student.logits, step.labels)


def classify(step: Step) -> Terms:
    """A loss that is the classification term alone."""
    return {"classification": cross_entropy(step)}


def old_weight(factor: float, stage: Stage) -> float:
    """factor * sqrt(n_old / m): the more old classes a new one comes upon, the more holds them."""
    return factor * math.sqrt(stage.num_old / stage.num_new)


def imprint(learner: Learner, stage: Stage, passes: Passes) -> None:
    """Opens rows for the new classes and, after the base stage, places their weights.

    A new class's weight is the direction of the mean of its training images' unit embeddings under the old model, as
    long as the existing weights are on average.
    """
    head = learner.network.head
    assert isinstance(head, CosineHead)
    head.grow(stage.num_new, generator(learner.seed, "head", stage.index))
    if stage.is_base:
        return
    with torch.no_grad():
        norm = head.weight[: stage.num_old].norm(dim=1).mean()
        for label, own in unit_embeddings(learner, stage, passes).items():
            head.weight[label] = F.normalize(own.mean(dim=0), dim=0) * norm


def cosine_phases(
    settings: CosineSettings, stage: Stage, distil: Callable[[Step], Terms], weights: dict[str, float]
) -> list[Phase]:
    """One phase over everything in the pool: the base stage classifies, later ones train with `distil` and the teacher.

    Backbone, the new classes' weights and the scale move; the old weights do not.
    """
    parts = Part.BACKBONE | Part.NEW_CLASSES | Part.HEAD_SHARED
    main = Phase(
        name="main",
        images=len(stage.pool),
        rows=lambda: stage.all_rows,
        loss=classify if stage.is_base else distil,
        train=parts,
        training=settings.train,
        teacher=not stage.is_base,
        weights={} if stage.is_base else weights,
    )
    return [main]


CosineSettingsT = TypeVar("CosineSettingsT", bound=CosineSettings)


class CosineMethod(Method[CosineSettingsT]):
    """What all methods on this host have in common; each adds its loss after the base stage."""

    def head(self, dim: int, capacity: int) -> Head:
        return CosineHead(dim, capacity)

    def base_key(self) -> dict[str, Any] | None:
        return {"family": "cosine", **base_settings(self.settings)}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        imprint(learner, stage, passes)
