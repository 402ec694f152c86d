"""What the methods with a linear head share: how the head is made and grows, and the phase that trains everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engram.contract import (
    Extension,
    Learner,
    Method,
    Part,
    Passes,
    Phase,
    SettingsT,
    Stage,
    Step,
    Terms,
    Training,
    base_settings,
)
from engram.core.rng import generator
from engram.methods.blocks.losses import cross_entropy, distillation
from engram.nn.heads import Head, LinearHead

EVERYTHING = Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES


def seen_columns(step: Step) -> Tensor:
    """(K,) bool, the columns of the classes seen, this stage's included."""
    return step.old | step.new


def classify(step: Step) -> Terms:
    """Cross-entropy over all classes seen, and nothing else."""
    return {"classification": cross_entropy(step.student.logits, step.labels, seen_columns(step)).mean()}


def classify_new(step: Step) -> Terms:
    """Cross-entropy over the new classes alone."""
    return {"classification": cross_entropy(step.student.logits, step.labels, step.new).mean()}


def main_phase(
    stage: Stage,
    training: Training,
    loss: Callable[[Step], Terms],
    *,
    rows: Tensor | None = None,
    train: Part = EVERYTHING,
    weights: Mapping[str, float] | None = None,
    extensions: tuple[Extension, ...] = (),
) -> Phase:
    """A phase over the whole pool, or over the rows given; with a teacher after the base stage."""
    rows = stage.all_rows if rows is None else rows
    return Phase(
        name="main",
        images=len(rows),
        rows=lambda: rows,
        loss=loss,
        train=train,
        training=training,
        teacher=not stage.is_base,
        weights=weights or {},
        extensions=extensions,
    )


def note_single_class(learner: Learner, stage: Stage, meaning: str) -> None:
    """Has the user told what a single new class means to the method, at the first stage after the base that has one."""
    if not stage.is_base and stage.num_new == 1 and 1 not in stage.sizes[1:-1]:
        learner.notes.append(f"stage {stage.index} has one new class, and {meaning}")


def convex_weights(stage: Stage) -> dict[str, float]:
    """The weights of the two terms of the old and the new: the distillation's is the share of old classes."""
    share = stage.num_old / stage.num_seen
    return {"classification": 1 - share, "distillation": share}


def convex_distillation(step: Step, temperature: float) -> Terms:
    """Classification over all classes seen and distillation of the old ones, weighted by `convex_weights`."""
    assert step.teacher is not None
    distilled = distillation(step.student.logits, step.teacher.logits, step.old, temperature).mean()
    return {
        "classification": step.weights["classification"] * classify(step)["classification"],
        "distillation": step.weights["distillation"] * distilled,
    }


class LinearMethod(Method[SettingsT]):
    """A linear head with a bias that grows by random rows; each method adds its phases and its loss."""

    def head(self, dim: int, capacity: int) -> Head:
        return LinearHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def base_key(self) -> dict[str, Any] | None:
        return {"family": "linear", **base_settings(self.settings)}
