"""PODNet with DDE: distilling causal effect of data in class-incremental learning (Hu et al., CVPR 2021).

PODNet's classification becomes the cross-entropy of an image and its neighbours; its distillation and its balanced
fine-tuning stay. In prediction the scores are freed of the direction that the stage carried all embeddings in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms, register
from engram.methods.dde import (
    DDESettings,
    begin_effect,
    dde_classification,
    finish_effect,
    with_effect,
    with_neighbours,
)
from engram.methods.host import HostMethod, classification_loss, host_phases, weighted
from engram.methods.podnet import PODNetSettings, pod_distances, pod_weights
from engram.methods.settings import AFTER_BASE
from engram.models.heads import Head


@dataclass(frozen=True)
class PODNetDDESettings(PODNetSettings):
    """PODNet's settings and the add-on's."""

    dde: DDESettings = field(default_factory=DDESettings, metadata=AFTER_BASE)


@final
@register(
    "podnet-dde",
    settings=PODNetDDESettings,
    title="PODNet with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
)
class PODNetDDE(HostMethod[PODNetDDESettings]):
    """PODNet that classifies an image together with its neighbours."""

    def head(self, dim: int, capacity: int) -> Head:
        return with_effect(super().head(dim, capacity), dim)

    def base_key(self) -> dict[str, Any] | None:
        """Not the host's own: the network carries the momentum effect."""
        return {**(super().base_key() or {}), "effect": True}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        begin_effect(self.settings.dde, learner, stage)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = pod_weights(self.settings, stage)
        host = host_phases(self.settings, learner, stage, passes, self.loss, weights)
        return with_neighbours(self.settings.dde, stage, host)

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and PODNet's distillation."""
        classification = dde_classification(step, classification_loss(self.settings, step).mean())
        return {"classification": classification, **weighted(step, **pod_distances(step))}

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        finish_effect(self.settings.dde, learner, stage, passes)
