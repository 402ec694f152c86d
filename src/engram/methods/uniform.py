"""Uniform importance: AFC's distillation with every channel weighted the same (the ablation in the paper's Table 4)."""

from __future__ import annotations

from typing import final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms, register
from engram.methods.afc import AFCSettings, discrepancy
from engram.methods.host import HostMethod, distilled, host_phases, stage_weight


@final
@register(
    "uniform",
    settings=AFCSettings,
    title="AFC with uniform importance",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
    shares_base=True,
)
class Uniform(HostMethod[AFCSettings]):
    """Distils feature maps, all channels alike."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = {"discrepancy": stage_weight(self.settings.lambda_disc, stage)}
        return host_phases(self.settings, learner, stage, passes, self.loss, weights)

    def loss(self, step: Step) -> Terms:
        """Classification plus the discrepancy with importance 1."""
        ones = [step.weights["discrepancy"].new_ones(()) for _ in step.student.maps]
        return distilled(self.settings, step, discrepancy=discrepancy(self.settings, step, ones))
