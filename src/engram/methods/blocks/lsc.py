"""The host shared by AFC, its ablations and its bounds: LSC head, NCA loss, balanced fine-tuning.

PODNet brought this host and AFC changed only what is distilled, so each method on it is a loss and little else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
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
    balanced_count,
    balanced_rows,
    base_settings,
    setting,
    unit_embeddings,
)
from engram.core.rng import generator
from engram.methods.blocks import losses
from engram.nn.heads import Head, LSCHead, Similarity
from engram.nn.kmeans import kmeans

Variant = Literal["released", "paper"]

# The head of the paper's NME rows: sharper, and without a learned scale.
LSC_NME = {"sharpness": 3.0, "learned_scale": False}
# Where the paper and the released code differ, and what each says. docs/afc.md has a line on each.
DIFFERENCES: dict[str, dict[Variant, Any]] = {
    "similarity": {"released": "distance", "paper": "cosine"},
    "classification": {"released": "released", "paper": "paper"},
    "discrepancy": {"released": "released", "paper": "paper"},
    "balanced": {"released": True, "paper": False},
}


@dataclass(frozen=True)
class LSCSettings(Settings):
    """The settings of the host; the defaults are those of the CNN recipe on CIFAR-100.

    variant chooses a reading where the paper and the released code differ: "released" gave the paper's tables. Each
    difference can be set apart: similarity, classification and balanced are None for "as the variant says".
    sharpness is a and learned_scale is eta; the NME recipe has sharpness 3 and no learned scale.
    """

    # The variant acts through the readings of the differences, which are in the base stage's key of their own.
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

    def reading(self, difference: str) -> Any:
        """What holds for one of the DIFFERENCES: the setting itself, or what the variant says where it is None."""
        value = getattr(self, difference)
        return DIFFERENCES[difference][self.variant] if value is None else value


def lsc_base_key(settings: LSCSettings) -> dict[str, Any]:
    """What determines the base stage of every method on this host, with the readings that hold."""
    key = base_settings(settings)
    readings = {name: settings.reading(name) for name in DIFFERENCES if name in key}
    return {"family": "lsc", **key, **readings}


def lsc_head(settings: LSCSettings, dim: int, capacity: int) -> LSCHead:
    """The head that these settings ask for."""
    similarity = settings.reading("similarity")
    return LSCHead(dim, capacity, settings.proxies, settings.sharpness, similarity, settings.learned_scale)


def classification_loss(settings: LSCSettings, step: Step) -> Tensor:
    """The NCA loss of each sample (B,), in the reading these settings ask for."""
    student = step.student
    if settings.reading("classification") == "released":
        return losses.nca_released(student.logits, step.labels)
    return losses.nca_paper(student.logits, step.labels, student.scale, settings.margin)


def distilled(settings: LSCSettings, step: Step, **distances: Tensor) -> Terms:
    """The classification term, and each distance of student and teacher times the phase's weight of that name."""
    return {"classification": classification_loss(settings, step).mean(), **weighted(step, **distances)}


def weighted(step: Step, **distances: Tensor) -> Terms:
    """Each distance of student and teacher times the phase's weight of that name."""
    return {name: step.weights[name] * distance for name, distance in distances.items()}


def stage_weight(weight: float, stage: Stage) -> float:
    """weight * sqrt(n / m): n classes seen, the m new ones included (AFC's eq. final_loss, and PODNet's)."""
    return weight * math.sqrt(stage.num_seen / stage.num_new)


@dataclass(frozen=True)
class Classify:
    """A loss that is the classification term alone. Two with the same settings are equal: one recording serves both."""

    settings: LSCSettings

    def __call__(self, step: Step) -> Terms:
        return {"classification": classification_loss(self.settings, step).mean()}


def imprint_proxies(learner: Learner, stage: Stage, passes: Passes) -> None:
    """Opens rows for the new classes and, after the base stage, places their proxies.

    For each new class: k-means on the unit embeddings of all its training images under the old model; the centres
    times the mean norm of the existing proxies.
    """
    head = learner.network.head
    assert isinstance(head, LSCHead)
    head.grow(stage.num_new, generator(learner.seed, "head", stage.index))
    if stage.is_base:
        return
    with torch.no_grad():
        norm = head.weight[: stage.num_old].norm(dim=2).mean()
        for label, own in unit_embeddings(learner, stage, passes).items():
            centres = kmeans(own, head.proxies, generator(learner.seed, "kmeans", label))
            head.weight[label] = centres * norm


def main_phase(
    settings: LSCSettings,
    stage: Stage,
    loss: Callable[[Step], Terms],
    *,
    teacher: bool = False,
    weights: Mapping[str, float] | None = None,
) -> Phase:
    """Everything in the pool; backbone, the new classes' proxies and the scale move, the old proxies do not."""
    parts = Part.BACKBONE | Part.NEW_CLASSES | Part.HEAD_SHARED
    return Phase(
        name="main",
        images=len(stage.pool),
        rows=lambda: stage.all_rows,
        loss=loss,
        train=parts,
        training=settings.train,
        teacher=teacher,
        weights=weights or {},
    )


def balanced_phase(settings: LSCSettings, learner: Learner, stage: Stage, passes: Passes) -> Phase:
    """Fine-tuning on as many images of each class as the memory keeps; all proxies move and nothing else.

    The new classes' images are chosen by the model as it is when the phase starts.
    """
    parts = Part.OLD_CLASSES | Part.NEW_CLASSES
    return Phase(
        name="balance",
        images=balanced_count(learner, stage),
        rows=partial(balanced_rows, learner, stage, passes),
        loss=Classify(settings),
        train=parts,
        training=settings.finetune,
    )


def lsc_phases(
    settings: LSCSettings,
    learner: Learner,
    stage: Stage,
    passes: Passes,
    distil: Callable[[Step], Terms] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Phase]:
    """The base stage classifies; later ones train with `distil` and the teacher, if given, then balance the head."""
    if stage.is_base:
        return [main_phase(settings, stage, Classify(settings))]
    if distil is None:
        phases = [main_phase(settings, stage, Classify(settings))]
    else:
        phases = [main_phase(settings, stage, distil, teacher=True, weights=weights)]
    if settings.reading("balanced") and settings.finetune.epochs:
        phases.append(balanced_phase(settings, learner, stage, passes))
    return phases


LSCSettingsT = TypeVar("LSCSettingsT", bound=LSCSettings)


class LSCMethod(Method[LSCSettingsT]):
    """What all methods on this host have in common; each adds its phases and, if it has one, its own loss."""

    def head(self, dim: int, capacity: int) -> Head:
        return lsc_head(self.settings, dim, capacity)

    def base_key(self) -> dict[str, Any] | None:
        return lsc_base_key(self.settings)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        imprint_proxies(learner, stage, passes)
