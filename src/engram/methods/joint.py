"""Joint: training on all images of all classes seen, from scratch at each stage (upper bound)."""

from __future__ import annotations

from typing import final

from engram.contract import Learner, Part, Passes, Phase, Stage, register
from engram.core.rng import generator
from engram.methods.blocks.lsc import Classify, LSCMethod, LSCSettings
from engram.methods.blocks.phases import EVERYTHING, main_phase


@final
@register("joint", settings=LSCSettings, title="All images of all classes seen (upper bound)", memory="all")
class Joint(LSCMethod[LSCSettings]):
    """Trains a new network on all images at each stage."""

    uses_teacher = False

    def base_key(self) -> None:
        """None: the base stage is not shared, because it starts from other random weights, like every stage here."""

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.reset(generator(learner.seed, "restart", stage.index))
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        parts = EVERYTHING | Part.HEAD_SHARED
        return [main_phase(stage, self.settings.train, Classify(self.settings), train=parts, teacher=False)]
