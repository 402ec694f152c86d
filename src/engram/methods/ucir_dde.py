"""UCIR with DDE: distilling causal effect of data in class-incremental learning (Hu et al., CVPR 2021).

UCIR's cross-entropy becomes that of an image and its neighbours; its other terms stay. In prediction the cosines are
freed of the direction that the stage's training carried all embeddings in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms, register
from engram.methods.cosine import CosineMethod, cosine_phases, cross_entropy
from engram.methods.dde import WithDDE, WithDDESettings, dde_classification, with_neighbours
from engram.methods.ucir import RebalancingSettings, rebalancing, rebalancing_weights


@dataclass(frozen=True)
class UCIRDDESettings(WithDDESettings, RebalancingSettings):
    """UCIR's settings and the add-on's."""


@final
@register(
    "ucir-dde",
    settings=UCIRDDESettings,
    title="UCIR with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
    brightened=False,
)
class UCIRDDE(WithDDE[UCIRDDESettings], CosineMethod[UCIRDDESettings]):
    """UCIR that classifies an image together with its neighbours."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        host = cosine_phases(self.settings, stage, self.loss, rebalancing_weights(self.settings, stage))
        return with_neighbours(self.settings.dde, stage, host)

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and UCIR's two other terms."""
        classification = dde_classification(step, cross_entropy(step))
        return {"classification": classification, **rebalancing(self.settings, step)}
