"""Joint training: every image of every class seen, from scratch at each stage; the upper bound."""

from __future__ import annotations

from typing import final

from engram.contract import Learner, Part, Passes, Phase, Stage, register
from engram.core.rng import generator
from engram.methods.blocks.lsc import Classify, LSCMethod, LSCSettings


@final
@register("joint", settings=LSCSettings, title="All images of all classes seen (upper bound)", memory="all")
class Joint(LSCMethod[LSCSettings]):
    """Forgets its weights, not its data: each stage trains a fresh network on everything."""

    uses_teacher = False

    def base_key(self) -> None:
        """It is not shared: the base stage here is a restart like any other."""

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.reset(generator(learner.seed, "restart", stage.index))
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        everything = Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES | Part.HEAD_SHARED
        main = Phase(
            name="main",
            images=len(stage.pool),
            rows=lambda: stage.all_rows,
            loss=Classify(self.settings),
            train=everything,
            training=self.settings.train,
        )
        return [main]
