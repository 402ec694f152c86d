"""MAS: memory aware synapses (Aljundi et al., ECCV 2018), in its class-incremental form.

A parameter may move the less, the more the scores depend on it: omega is the mean over images of the absolute gradient
of the squared length of the scores. No label has a part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from engram.data.stage import Stage
from engram.errors import EngramError
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Settings, Step, Training, register
from engram.methods.host import AFTER_BASE
from engram.methods.linear import seen_columns
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


@dataclass(frozen=True)
class MASSettings(Settings):
    """MAS's settings. strength: the penalty is strength / 2 * sum omega (theta - anchor)^2.

    merge: the share of the omega before in the merged one, None for old classes / classes seen. importance_samples: the
    images omega is estimated on, None for all. limit: the most of its way back that a step may take a parameter, None
    for no limit.
    """

    strength: float = field(default=1.0, metadata=AFTER_BASE)
    merge: float | None = field(default=0.5, metadata=AFTER_BASE)
    importance_samples: int | None = field(default=None, metadata=AFTER_BASE)
    limit: float | None = field(default=1.0, metadata=AFTER_BASE)
    train: Training = field(default_factory=tethered_training)

    def __post_init__(self) -> None:
        refuse_outside(self, strength=None, merge=1, limit=None)
        if self.importance_samples is not None and self.importance_samples < 1:
            raise EngramError(f"importance_samples must be at least 1, got {self.importance_samples}")


def squared_length(step: Step, numbers: Tensor) -> Tensor:
    """The squared length of each image's scores of the classes seen, (B,)."""
    return torch.where(seen_columns(step), step.student.logits, 0).square().sum(dim=1)


@final
@register(
    "mas", settings=MASSettings, title="Memory aware synapses", paper="Aljundi et al., ECCV 2018", memory="optional"
)
class MAS(TetheredMethod[MASSettings]):
    """Ties each parameter by how much the scores depend on it."""

    def base_key(self) -> dict[str, Any] | None:
        return tethered_base_key(self.settings.train)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        held = None if stage.is_base else tether(settings.strength / 2, settings.train, settings.limit)
        return [tethered_phase(learner, stage, settings.train, held)]

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Omega: the mean over images of each one's absolute gradient, merged with the stages' before."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        lengths = passes.sensitivity(learner, stage, rows, squared_length, power=1)
        keep_omega(learner, stage, lengths, self.settings.merge)
