"""Training that several methods have: schedules, the main phase of a stage, a balanced set after it, importance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engram.contract import Learner, Part, Passes, Phase, Stage, Step, Terms, Training, balanced_count, balanced_rows
from engram.contract.extension import Extension
from engram.core.errors import EngramError
from engram.core.rng import generator

EVERYTHING = Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES
ALL_CLASSES = Part.OLD_CLASSES | Part.NEW_CLASSES


def stepped(epochs: int, *after: int, **others: Any) -> Training:
    """Training whose learning rate is multiplied by 0.1 (`factor`) after these epochs; by default without `clip`."""
    milestones = tuple(each / epochs for each in after)
    return Training(epochs, schedule="steps", milestones=milestones, **{"clip": None, **others})


def main_phase(
    stage: Stage,
    training: Training,
    loss: Callable[[Step], Terms],
    *,
    rows: Tensor | None = None,
    train: Part = EVERYTHING,
    teacher: bool = True,
    weights: Mapping[str, float] | None = None,
    extensions: tuple[Extension, ...] = (),
) -> Phase:
    """A phase over these rows of the pool (None: all). teacher: use the teacher after the base stage."""
    rows = stage.all_rows if rows is None else rows
    return Phase(
        name="main",
        images=len(rows),
        rows=lambda: rows,
        loss=loss,
        train=train,
        training=training,
        teacher=teacher and not stage.is_base,
        weights=weights or {},
        extensions=extensions,
    )


def balanced_phase(
    learner: Learner,
    stage: Stage,
    passes: Passes,
    training: Training,
    loss: Callable[[Step], Terms],
    *,
    train: Part = ALL_CLASSES,
    teacher: bool = False,
    weights: Mapping[str, float] | None = None,
    frozen: bool = False,
    start: Callable[[], None] | None = None,
    extensions: tuple[Extension, ...] = (),
) -> Phase:
    """A phase over as many images of each class as the memory keeps.

    The images of new classes are chosen by the model when the phase starts.
    """
    return Phase(
        name="balance",
        images=balanced_count(learner, stage),
        rows=partial(balanced_rows, learner, stage, passes),
        loss=loss,
        train=train,
        training=training,
        teacher=teacher,
        weights=weights or {},
        frozen=frozen,
        start=start,
        extensions=extensions,
    )


def sampled_rows(learner: Learner, stage: Stage, samples: int | None) -> Tensor:
    """That many random rows of the pool, to estimate an importance on; all rows if samples is None."""
    if samples is None:
        return stage.all_rows
    return torch.randperm(len(stage.pool), generator=generator(learner.seed, "importance", stage.index))[:samples]


def check_finite(importance: Tensor, stage: Stage) -> None:
    """Refuse an importance that is not finite, which means that training diverged."""
    if not bool(importance.isfinite().all()):
        raise EngramError(f"the importance after stage {stage.index} is not finite; try a lower learning rate")
