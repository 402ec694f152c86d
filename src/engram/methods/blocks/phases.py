"""Phases that most methods have: the main phase of a stage, and training on a balanced set after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from engram.contract import (
    Extension,
    Learner,
    Part,
    Passes,
    Phase,
    Stage,
    Step,
    Terms,
    Training,
    balanced_count,
    balanced_rows,
)

EVERYTHING = Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES
ALL_CLASSES = Part.OLD_CLASSES | Part.NEW_CLASSES


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
