"""The LSC family (PODNet, AFC, its ablations and bounds): LSC head, NCA loss, balanced fine-tuning.

PODNet introduced this combination, and AFC changed only the distillation. So a method of the family is mostly a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from engram.contract import Learner, Method, Passes, Phase, Settings, Stage, Step, Terms, Training, setting
from engram.contract.phase import mean_over_images
from engram.core.rng import generator
from engram.methods.blocks import losses
from engram.methods.blocks.cosine import NEW_AND_SCALE, imprint
from engram.methods.blocks.phases import balanced_phase, main_phase
from engram.nn.heads import Head, LSCHead, Similarity
from engram.nn.kmeans import kmeans

Variant = Literal["released", "paper"]

# The head of the paper's NME rows: sharper, and without a learned scale.
LSC_NME = {"sharpness": 3.0, "learned_scale": False}
# AFC's settings for ImageNet, without those of its distillation.
LSC_IMAGENET = {
    "train.epochs": 90,
    "train.weight_decay": 1e-4,
    "finetune.lr": 0.02,
    "finetune.weight_decay": 1e-4,
}
# The differences between the AFC paper and its released code, by setting. docs/afc.md describes each.
DIFFERENCES: dict[str, dict[Variant, Any]] = {
    "similarity": {"released": "distance", "paper": "cosine"},
    "classification": {"released": "released", "paper": "paper"},
    "discrepancy": {"released": "released", "paper": "paper"},
    "balanced": {"released": True, "paper": False},
}


@dataclass(frozen=True)
class LSCSettings(Settings):
    """Settings of the LSC family; the defaults are those of the CNN recipe on CIFAR-100.

    variant: follow the paper or the released code where they differ; "released" produced the paper's tables.
    similarity, classification, balanced: set one of these differences separately; None: as in the variant.
    sharpness: a. learned_scale: whether eta is learned. The NME recipe has sharpness 3 and no learned scale.
    base_epochs: epochs of the base stage, which strong augmentation needs more of; None: those of `train`.
    """

    # The variant acts only through the differences, which are in the key of the base stage.
    variant: Variant = setting("released", after_base=True, role="variant")
    similarity: Similarity | None = None
    classification: Variant | None = None
    balanced: bool | None = setting(None, after_base=True)
    proxies: int = setting(10, at_least=1)
    sharpness: float = setting(1.0, above=0)
    learned_scale: bool = True
    margin: float = 0.6
    train: Training = setting(factory=Training, role="main")
    finetune: Training = setting(
        factory=lambda: Training(epochs=20, lr=0.05, schedule="constant"), after_base=True, role="finetune"
    )
    base_epochs: int | None = setting(None, at_least=1, added=True)

    def reading(self, difference: str) -> Any:
        """The value of one of the DIFFERENCES: the setting, or that of the variant if the setting is None."""
        value = getattr(self, difference)
        return DIFFERENCES[difference][self.variant] if value is None else value

    def main_training(self, stage: Stage) -> Training:
        """How the main phase of a stage trains."""
        if stage.is_base and self.base_epochs is not None:
            return replace(self.train, epochs=self.base_epochs)
        return self.train


def classification_loss(settings: LSCSettings, step: Step) -> Tensor:
    """The NCA loss of each sample (B,), as in the paper or the released code."""
    student = step.student
    if settings.reading("classification") == "released":
        return losses.nca_released(student.logits, step.labels)
    return losses.nca_paper(student.logits, step.labels, student.scale, settings.margin)


def distilled(settings: LSCSettings, step: Step, **distances: Tensor) -> Terms:
    """The classification term, and the distances of student and teacher, each times the phase's weight of its name."""
    weighted = {name: step.weights[name] * distance for name, distance in distances.items()}
    return {"classification": classification_loss(settings, step).mean(), **weighted}


def stage_weight(weight: float, stage: Stage) -> float:
    """Return weight * sqrt(n / m), with n classes seen, m of them new (lambda^t in Eq. (16) of the AFC paper)."""
    return weight * math.sqrt(stage.num_seen / stage.num_new)


@dataclass(frozen=True)
class Classify:
    """A loss with only the classification term. Losses with equal settings are equal, so they share a recording."""

    settings: LSCSettings

    @mean_over_images
    def __call__(self, step: Step) -> Terms:
        return {"classification": classification_loss(self.settings, step).mean()}


def lsc_phases(
    settings: LSCSettings,
    learner: Learner,
    stage: Stage,
    passes: Passes,
    distil: Callable[[Step], Terms] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Phase]:
    """The main phase and, after the base stage, fine-tuning of all proxies (and nothing else) on a balanced set.

    The main phase trains the backbone, the proxies of the new classes and the scale. distil: its loss after the base
    stage, which uses the teacher, with these weights; None: only classification.
    """
    classify = Classify(settings)
    training = settings.main_training(stage)
    if distil is None or stage.is_base:
        main = main_phase(stage, training, classify, train=NEW_AND_SCALE, teacher=False)
    else:
        main = main_phase(stage, training, distil, train=NEW_AND_SCALE, weights=weights)
    if stage.is_base or not settings.reading("balanced") or not settings.finetune.epochs:
        return [main]
    return [main, balanced_phase(learner, stage, passes, settings.finetune, classify)]


LSCSettingsT = TypeVar("LSCSettingsT", bound=LSCSettings)


class LSCMethod(Method[LSCSettingsT]):
    """Base class of the LSC family; a method adds its loss after the base stage and the weights of its terms."""

    family = "lsc"

    def head(self, dim: int, capacity: int) -> Head:
        settings = self.settings
        similarity = settings.reading("similarity")
        return LSCHead(dim, capacity, settings.proxies, settings.sharpness, similarity, settings.learned_scale)

    def base_key(self) -> dict[str, Any] | None:
        """The key of every method of the family, with the values of the differences."""
        key = super().base_key()
        return key and key | {name: self.settings.reading(name) for name in DIFFERENCES if name in key}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """The proxies of a new class are the k-means centres of its unit embeddings, scaled as `imprint` does."""

        def centres(label: int, own: Tensor) -> Tensor:
            return kmeans(own, self.settings.proxies, generator(learner.seed, "kmeans", label))

        imprint(learner, stage, passes, centres)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        distil = self.loss if self.uses_teacher else None
        return lsc_phases(self.settings, learner, stage, passes, distil, self.weights(stage))

    def weights(self, stage: Stage) -> dict[str, float]:
        """The weights of the loss after the base stage."""
        return {}

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """The loss after the base stage, of a method with a teacher."""
        return distilled(self.settings, step)
