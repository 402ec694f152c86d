"""MAS: memory aware synapses (Aljundi et al., ECCV 2018), in its class-incremental form.

A parameter may move the less, the more the scores depend on it: omega is the mean over images of the absolute gradient
of the squared length of the scores. No label has a part in it.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from engram.contract import Learner, Passes, Stage, Step, register
from engram.methods.blocks.importance import sampled_rows
from engram.methods.blocks.linear import seen_columns
from engram.methods.blocks.penalty import MeasuredMethod, MeasuredSettings, keep_omega


def squared_length(step: Step, numbers: Tensor) -> Tensor:
    """The squared length of each image's scores of the classes seen, (B,)."""
    return torch.where(seen_columns(step), step.student.logits, 0).square().sum(dim=1)


@final
@register(
    "mas",
    settings=MeasuredSettings,
    title="Memory aware synapses",
    paper="Aljundi et al., ECCV 2018",
    memory="optional",
    shares_base=True,
)
class MAS(MeasuredMethod[MeasuredSettings]):
    """Ties each parameter by how much the scores depend on it."""

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Omega: the mean over images of each one's absolute gradient, merged with the stages' before."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        lengths = passes.sensitivity(learner, stage, rows, squared_length, power=1)
        keep_omega(learner, stage, lengths, self.settings.merge)
