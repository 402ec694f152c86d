"""Helpers for estimates of importance: the images they use, and a check of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.contract import Learner, Stage
from engram.core.errors import EngramError
from engram.core.rng import generator


def sampled_rows(learner: Learner, stage: Stage, samples: int | None) -> Tensor:
    """That many random rows of the pool; all rows if samples is None."""
    if samples is None:
        return stage.all_rows
    return torch.randperm(len(stage.pool), generator=generator(learner.seed, "importance", stage.index))[:samples]


def check_finite(importance: Tensor, stage: Stage) -> None:
    """Refuse an importance that is not finite, which means that training diverged."""
    if not bool(importance.isfinite().all()):
        raise EngramError(f"the importance after stage {stage.index} is not finite; try a lower learning rate")
