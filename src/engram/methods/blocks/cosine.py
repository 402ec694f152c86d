"""The cosine family (UCIR and the methods built on it): a cosine head with imprinted weights, one phase per stage.

A stage trains the backbone, the weights of the new classes and the scale. The weights of the old classes do not change,
so an old embedding that stays in place keeps its class.
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
from engram.methods.blocks.phases import main_phase
from engram.nn.heads import CosineHead, Head


@dataclass(frozen=True)
class CosineSettings(Settings):
    """Settings of the cosine family. Defaults: UCIR on CIFAR-100 (lower learning rates from epochs 80 and 120)."""

    train: Training = setting(
        factory=lambda: Training(schedule="steps", milestones=(0.5, 0.75), factor=0.1, clip=None), role="main"
    )


# On ImageNet: learning rate times 0.1 after 30 and 60 epochs.
IMAGENET_TRAINING = {"train.epochs": 90, "train.milestones": (30 / 90, 60 / 90), "train.weight_decay": 1e-4}


def cross_entropy(step: Step) -> Tensor:
    """Mean cross-entropy of the cosines times the learned scale, over all classes seen."""
    return F.cross_entropy(step.student.logits, step.labels)


def classify(step: Step) -> Terms:
    """The loss of the base stage: only the classification term."""
    return {"classification": cross_entropy(step)}


def old_weight(factor: float, stage: Stage) -> float:
    """Return factor * sqrt(n_old / m), which grows with the number of old classes per new class."""
    return factor * math.sqrt(stage.num_old / stage.num_new)


def imprint(learner: Learner, stage: Stage, passes: Passes) -> None:
    """Open rows for the new classes and, after the base stage, set their weights.

    The weight of a new class is the mean of its training images' unit embeddings under the old model, scaled to the
    mean length of the existing weights.
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
    """One phase over the whole pool: classification in the base stage, then `distil` with the teacher.

    Trains the backbone, the weights of the new classes and the scale; not the weights of the old classes.
    """
    parts = Part.BACKBONE | Part.NEW_CLASSES | Part.HEAD_SHARED
    loss, weights = (classify, {}) if stage.is_base else (distil, weights)
    return [main_phase(stage, settings.train, loss, train=parts, weights=weights)]


CosineSettingsT = TypeVar("CosineSettingsT", bound=CosineSettings)


class CosineMethod(Method[CosineSettingsT]):
    """Base class of the cosine family; each method adds its loss after the base stage."""

    def head(self, dim: int, capacity: int) -> Head:
        return CosineHead(dim, capacity)

    def base_key(self) -> dict[str, Any] | None:
        return {"family": "cosine", **base_settings(self.settings)}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        imprint(learner, stage, passes)
