"""UCIR with DDE: distilling causal effect of data in class-incremental learning (Hu et al., CVPR 2021).

UCIR's cross-entropy becomes that of an image and its neighbours; its other terms stay. In prediction the cosines are
freed of the direction that the stage's training carried all embeddings in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms, register
from engram.methods.cosine import CosineMethod, cosine_phases, cross_entropy
from engram.methods.dde import (
    DDESettings,
    begin_effect,
    dde_classification,
    finish_effect,
    with_effect,
    with_neighbours,
)
from engram.methods.settings import AFTER_BASE
from engram.methods.ucir import UCIRSettings, rebalancing, rebalancing_weights
from engram.models.heads import Head


@dataclass(frozen=True)
class UCIRDDESettings(UCIRSettings):
    """UCIR's settings and the add-on's."""

    dde: DDESettings = field(default_factory=DDESettings, metadata=AFTER_BASE)


@final
@register(
    "ucir-dde",
    settings=UCIRDDESettings,
    title="UCIR with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
)
class UCIRDDE(CosineMethod[UCIRDDESettings]):
    """UCIR that classifies an image together with its neighbours."""

    def head(self, dim: int, capacity: int) -> Head:
        return with_effect(super().head(dim, capacity), dim)

    def base_key(self) -> dict[str, Any] | None:
        """Not UCIR's own: the network carries the momentum effect."""
        return {**(super().base_key() or {}), "effect": True}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        begin_effect(self.settings.dde, learner, stage)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        host = cosine_phases(self.settings, stage, self.loss, rebalancing_weights(self.settings, stage))
        return with_neighbours(self.settings.dde, stage, host)

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and UCIR's two other terms."""
        classification = dde_classification(step, cross_entropy(step))
        return {"classification": classification, **rebalancing(self.settings, step)}

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        finish_effect(self.settings.dde, learner, stage, passes)
