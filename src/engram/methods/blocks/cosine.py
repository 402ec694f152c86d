"""The cosine family (UCIR and the methods built on it): a cosine head with imprinted weights, one phase per stage.

A stage trains the backbone, the weights of the new classes and the scale. The weights of the old classes do not change,
so an old embedding that stays in place keeps its class.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Learner, Method, Part, Passes, Phase, Stage, Step, Terms, mean_over_images, unit_embeddings
from engram.core.rng import generator
from engram.methods.blocks.linear import SteppedSettingsT
from engram.methods.blocks.phases import main_phase
from engram.nn.heads import CosineHead, Head

NEW_AND_SCALE = Part.BACKBONE | Part.NEW_CLASSES | Part.HEAD_SHARED
# On ImageNet: learning rate times 0.1 after 30 and 60 epochs.
IMAGENET_TRAINING = {"train.epochs": 90, "train.milestones": (30 / 90, 60 / 90), "train.weight_decay": 1e-4}


def cross_entropy(step: Step) -> Tensor:
    """Mean cross-entropy of the cosines times the learned scale, over all classes seen."""
    return F.cross_entropy(step.student.logits, step.labels)


@mean_over_images
def classify(step: Step) -> Terms:
    """The loss of the base stage: only the classification term."""
    return {"classification": cross_entropy(step)}


def old_weight(factor: float, stage: Stage) -> float:
    """Return factor * sqrt(n_old / m), which grows with the number of old classes per new class."""
    return factor * math.sqrt(stage.num_old / stage.num_new)


@torch.no_grad()
def imprint(learner: Learner, stage: Stage, passes: Passes, directions: Callable[[int, Tensor], Tensor]) -> None:
    """Open rows for the new classes and, after the base stage, set their weights.

    directions: makes a class's unit weights from its label and the unit embeddings (N, D) of its training images under
    the old model. They are scaled to the mean length of the existing weights.
    """
    head = learner.network.head
    head.grow(stage.num_new, generator(learner.seed, "head", stage.index))
    if stage.is_base:
        return
    weight = head.get_parameter("weight")
    norm = weight[: stage.num_old].norm(dim=-1).mean()
    for label, own in unit_embeddings(learner, stage, passes).items():
        weight[label] = directions(label, own) * norm


class CosineMethod(Method[SteppedSettingsT]):
    """Base class of the cosine family; each method adds its loss after the base stage, and the weights of its terms."""

    family = "cosine"

    def head(self, dim: int, capacity: int) -> Head:
        return CosineHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """The weight of a new class is the mean of its unit embeddings, scaled as `imprint` does."""
        imprint(learner, stage, passes, lambda _, own: F.normalize(own.mean(dim=0), dim=0))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """One phase over the whole pool: classification in the base stage, then the loss, with the teacher."""
        loss, weights = (classify, {}) if stage.is_base else (self.loss, self.weights(stage))
        return [main_phase(stage, self.settings.train, loss, train=NEW_AND_SCALE, weights=weights)]

    @abstractmethod
    def weights(self, stage: Stage) -> dict[str, float]:
        """The weights of the loss after the base stage."""

    @abstractmethod
    def loss(self, step: Step) -> Terms:
        """The loss after the base stage."""
