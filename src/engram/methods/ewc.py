"""EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017), in its class-incremental form.

The more the log-likelihood of a label depends on a parameter, the less the parameter may change. omega is the diagonal
of the Fisher information: the mean over images of the squared gradient, estimated after each stage and merged over the
stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from engram.contract import Learner, Passes, Stage, Step, register, setting
from engram.methods.blocks.importance import sampled_rows
from engram.methods.blocks.linear import seen_columns
from engram.methods.blocks.losses import MASKED, cross_entropy
from engram.methods.blocks.penalty import MeasuredMethod, MeasuredSettings, keep_omega

Label = Literal["true", "predicted", "sampled"]
LABELS: tuple[Label, ...] = ("true", "predicted", "sampled")


@dataclass(frozen=True)
class EWCSettings(MeasuredSettings):
    """EWC's settings. label: the label whose likelihood is used: true, predicted, or sampled from the prediction."""

    strength: float = setting(5000.0, at_least=0, after_base=True)
    label: Label = setting("predicted", after_base=True)


def draw_labels(logits: Tensor, columns: Tensor, numbers: Tensor) -> Tensor:
    """Draw labels (B,) from the softmax over the columns. numbers: uniform in [0, 1), (B,)."""
    below = logits.masked_fill(~columns, MASKED).softmax(dim=1).cumsum(dim=1)
    return (below <= numbers[:, None] * below[:, -1:]).sum(dim=1)


@final
@register(
    "ewc",
    settings=EWCSettings,
    title="Elastic weight consolidation",
    paper="Kirkpatrick et al., PNAS 2017",
    memory="optional",
    shares_base=True,
)
class EWC(MeasuredMethod[EWCSettings]):
    """Penalises changes of each parameter by its Fisher information."""

    def log_likelihood(self, step: Step, numbers: Tensor) -> Tensor:
        """log p(y | x) over all classes seen, (B,), where y is the label chosen by the settings."""
        logits, columns, labels = step.student.logits, seen_columns(step), step.labels
        if self.settings.label == "predicted":
            labels = logits.detach().masked_fill(~columns, -torch.inf).argmax(dim=1)
        elif self.settings.label == "sampled":
            labels = draw_labels(logits.detach(), columns, numbers)
        return -cross_entropy(logits, labels, columns)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Set omega to the mean over images of the squared gradient, merged with that of the previous stages."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        fisher = passes.sensitivity(learner, stage, rows, self.log_likelihood, power=2)
        keep_omega(learner, stage, fisher, self.settings.merge)
