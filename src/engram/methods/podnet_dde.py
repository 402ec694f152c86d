"""PODNet with DDE: distilling causal effect of data in class-incremental learning (Hu et al., CVPR 2021).

PODNet's classification becomes the cross-entropy of an image and its neighbours; its distillation and its balanced
fine-tuning stay. In prediction the scores are freed of the direction that the stage carried all embeddings in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms, register
from engram.methods.dde import WithDDE, WithDDESettings, dde_classification, with_neighbours
from engram.methods.host import HostMethod, classification_loss, host_phases, weighted
from engram.methods.podnet import PODNetSettings, pod_distances, pod_weights


@dataclass(frozen=True)
class PODNetDDESettings(WithDDESettings, PODNetSettings):
    """PODNet's settings and the add-on's."""


@final
@register(
    "podnet-dde",
    settings=PODNetDDESettings,
    title="PODNet with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
)
class PODNetDDE(WithDDE[PODNetDDESettings], HostMethod[PODNetDDESettings]):
    """PODNet that classifies an image together with its neighbours."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = pod_weights(self.settings, stage)
        host = host_phases(self.settings, learner, stage, passes, self.loss, weights)
        return with_neighbours(self.settings.dde, stage, host)

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and PODNet's distillation."""
        classification = dde_classification(step, classification_loss(self.settings, step).mean())
        return {"classification": classification, **weighted(step, **pod_distances(step))}
