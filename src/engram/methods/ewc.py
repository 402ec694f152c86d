"""EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017), in its class-incremental form.

A parameter may move the less, the more the log-likelihood of a label depends on it: omega is the diagonal of the Fisher
information, the mean over images of the squared gradient, estimated once after each stage and merged over the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from engram.data.stage import Stage
from engram.errors import EngramError, suggest
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Settings, Step, Training, register
from engram.methods.distillation import cross_entropy
from engram.methods.host import AFTER_BASE
from engram.methods.linear import seen_columns
from engram.methods.losses import MASKED
from engram.methods.tether import (
    TetheredMethod,
    keep_omega,
    refuse_outside,
    sampled_rows,
    tether,
    tethered_base_key,
    tethered_phase,
    tethered_training,
)

Label = Literal["true", "predicted", "sampled"]
LABELS: tuple[Label, ...] = ("true", "predicted", "sampled")


@dataclass(frozen=True)
class EWCSettings(Settings):
    """EWC's settings. strength: the penalty is strength / 2 * sum omega (theta - anchor)^2.

    label: whose likelihood it is: the true one's, the one predicted, or one drawn from the prediction. merge: the
    share of the omega before in the merged one, None for old classes / classes seen. importance_samples: the images
    omega is estimated on, None for all. limit: the most of its way back that a step may take a parameter, None for
    no limit.
    """

    strength: float = field(default=5000.0, metadata=AFTER_BASE)
    label: Label = field(default="predicted", metadata=AFTER_BASE)
    merge: float | None = field(default=0.5, metadata=AFTER_BASE)
    importance_samples: int | None = field(default=None, metadata=AFTER_BASE)
    limit: float | None = field(default=1.0, metadata=AFTER_BASE)
    train: Training = field(default_factory=tethered_training)

    def __post_init__(self) -> None:
        refuse_outside(self, strength=None, merge=1, limit=None)
        if self.label not in LABELS:
            raise EngramError(f"no label {self.label!r}: {suggest(str(self.label), LABELS)}")
        if self.importance_samples is not None and self.importance_samples < 1:
            raise EngramError(f"importance_samples must be at least 1, got {self.importance_samples}")


def draw_labels(logits: Tensor, columns: Tensor, numbers: Tensor) -> Tensor:
    """Labels (B,) out of the softmax over the columns, one by each uniform number (B,) in [0, 1)."""
    below = logits.masked_fill(~columns, MASKED).softmax(dim=1).cumsum(dim=1)
    return (below <= numbers[:, None] * below[:, -1:]).sum(dim=1)


@final
@register(
    "ewc",
    settings=EWCSettings,
    title="Elastic weight consolidation",
    paper="Kirkpatrick et al., PNAS 2017",
    memory="optional",
)
class EWC(TetheredMethod[EWCSettings]):
    """Ties each parameter by its Fisher information."""

    def base_key(self) -> dict[str, Any] | None:
        return tethered_base_key(self.settings.train)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        held = None if stage.is_base else tether(settings.strength / 2, settings.train, settings.limit)
        return [tethered_phase(learner, stage, settings.train, held)]

    def log_likelihood(self, step: Step, numbers: Tensor) -> Tensor:
        """log p(y | x) among all classes seen, (B,), y being the label that the settings ask for."""
        logits, columns, labels = step.student.logits, seen_columns(step), step.labels
        if self.settings.label == "predicted":
            labels = logits.detach().masked_fill(~columns, -torch.inf).argmax(dim=1)
        elif self.settings.label == "sampled":
            labels = draw_labels(logits.detach(), columns, numbers)
        return -cross_entropy(logits, labels, columns)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Omega: the mean over images of each one's squared gradient, merged with the stages' before."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        fisher = passes.sensitivity(learner, stage, rows, self.log_likelihood, power=2)
        keep_omega(learner, stage, fisher, self.settings.merge)
