"""What the estimates of importance share: the images they are made on, and what is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.contract import Learner, Stage
from engram.core.errors import EngramError
from engram.core.rng import generator


def sampled_rows(learner: Learner, stage: Stage, samples: int | None) -> Tensor:
    """So many rows of the pool at random; None: all."""
    if samples is None:
        return stage.all_rows
    return torch.randperm(len(stage.pool), generator=generator(learner.seed, "importance", stage.index))[:samples]


def check_finite(importance: Tensor, stage: Stage) -> None:
    """Refuses an importance that came of a training that went astray."""
    if not bool(importance.isfinite().all()):
        raise EngramError(f"the importance after stage {stage.index} is not finite; try a lower learning rate")
