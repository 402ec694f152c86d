"""Replay: the memory without distillation (the paper's "fine-tuning" row)."""

from __future__ import annotations

from typing import final

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, register
from engram.methods.blocks.lsc import LSC_NME, LSCMethod, LSCSettings, lsc_phases


@final
@register(
    "replay",
    settings=LSCSettings,
    title="Memory, no distillation",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: fine-tuning)",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class Replay(LSCMethod[LSCSettings]):
    """Trains on the new images and the exemplars together, then fine-tunes the head on a balanced set."""

    uses_teacher = False

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return lsc_phases(self.settings, learner, stage, passes)
