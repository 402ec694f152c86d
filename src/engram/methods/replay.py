"""Replay: the memory without distillation (the paper's "fine-tuning" row)."""

from __future__ import annotations

from typing import Any, final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Method, Passes, Phase, register
from engram.methods.host import HostSettings, host_base_key, host_phases, imprint_proxies, lsc_head
from engram.models.heads import Head


@final
@register("replay", settings=HostSettings, title="Memory, no distillation")
class Replay(Method[HostSettings]):
    """Trains on the new images and the exemplars together, then balances the head."""

    def head(self, dim: int, capacity: int) -> Head:
        return lsc_head(self.settings, dim, capacity)

    def base_key(self) -> dict[str, Any]:
        return host_base_key(self.settings)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        imprint_proxies(learner, stage, passes)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return host_phases(self.settings, learner, stage, passes)
