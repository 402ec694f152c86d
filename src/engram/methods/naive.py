"""Naive: no memory and no distillation; what everything else must beat."""

from __future__ import annotations

from typing import Any, final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Method, Passes, Phase, register
from engram.methods.host import HostSettings, classify, host_base_key, imprint_proxies, lsc_head, main_phase
from engram.models.heads import Head


@final
@register("naive", settings=HostSettings, title="No memory, no distillation (lower bound)", memory="none")
class Naive(Method[HostSettings]):
    """Trains on the new images alone. Without exemplars there are no class means, so CNN is its only predictor."""

    predictors = ("cnn",)

    def head(self, dim: int, capacity: int) -> Head:
        return lsc_head(self.settings, dim, capacity)

    def base_key(self) -> dict[str, Any]:
        return host_base_key(self.settings)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        imprint_proxies(learner, stage, passes)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return [main_phase(self.settings, stage, classify(self.settings))]
