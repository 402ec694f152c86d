"""Bounds: methods without distillation. Naive has no memory, replay has one, joint trains on all images."""

from __future__ import annotations

from typing import final

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, both_imagenets, register
from engram.core.rng import generator
from engram.methods.blocks.cosine import NEW_AND_SCALE
from engram.methods.blocks.lsc import LSC_IMAGENET, LSC_NME, Classify, LSCMethod, LSCSettings
from engram.methods.blocks.phases import EVERYTHING, main_phase


@final
@register(
    "naive", settings=LSCSettings, title="No memory, no distillation (lower bound)", memory="none", shares_base=True
)
class Naive(LSCMethod[LSCSettings]):
    """Trains on the new images only. It has no exemplars, so "cnn" is its only predictor."""

    predictors = ("cnn",)
    uses_teacher = False
    returning_classes = True

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return super().phases(learner, stage, passes)[:1]


@final
@register(
    "replay",
    settings=LSCSettings,
    title="Memory, no distillation",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: fine-tuning)",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME, imagenet=both_imagenets(LSC_IMAGENET)),
)
class Replay(LSCMethod[LSCSettings]):
    """Trains on the new images and the exemplars together, then fine-tunes the head on a balanced set."""

    uses_teacher = False
    returning_classes = True
    unbalanced_memory = True


@final
@register("joint", settings=LSCSettings, title="All images of all classes seen (upper bound)", memory="all")
class Joint(LSCMethod[LSCSettings]):
    """Trains a new network on all images at each stage."""

    uses_teacher = False
    returning_classes = True
    family = None  # the base stage starts from other random weights, like every stage here, so it is not shared

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.reset(generator(learner.seed, "restart", stage.index))
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        classify, training = Classify(self.settings), self.settings.main_training(stage)
        return [main_phase(stage, training, classify, train=EVERYTHING | NEW_AND_SCALE, teacher=False)]
