"""MAS: memory aware synapses (Aljundi et al., ECCV 2018), in its class-incremental form.

The more the scores depend on a parameter, the less the parameter may change. omega is the mean over images of the
absolute gradient of the squared length of the scores. It uses no labels.
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
    """The squared length of each image's scores for the classes seen, (B,)."""
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
    """Penalises changes of each parameter by how much the scores depend on it."""

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Set omega to the mean over images of the absolute gradient, merged with that of the previous stages."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        lengths = passes.sensitivity(learner, stage, rows, squared_length, power=1)
        keep_omega(learner, stage, lengths, self.settings.merge)
