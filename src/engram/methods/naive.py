"""Naive: no memory and no distillation (lower bound)."""

from __future__ import annotations

from typing import final

from engram.contract import Learner, Passes, Phase, Stage, register
from engram.methods.blocks.lsc import LSCMethod, LSCSettings, lsc_main_phase


@final
@register(
    "naive", settings=LSCSettings, title="No memory, no distillation (lower bound)", memory="none", shares_base=True
)
class Naive(LSCMethod[LSCSettings]):
    """Trains on the new images only. It has no exemplars, so "cnn" is its only predictor."""

    predictors = ("cnn",)
    uses_teacher = False

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return [lsc_main_phase(self.settings, stage)]
