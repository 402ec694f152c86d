"""What the methods with a linear head share: how the head is made and grows, and the phase that trains everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from engram.data.stage import Stage
from engram.errors import EngramError
from engram.learner import Learner
from engram.methods._base import Method, Passes, Phase, Settings, SettingsT, Step, Terms, Training
from engram.methods.distillation import cross_entropy, distillation
from engram.models.heads import Head, LinearHead
from engram.models.network import Network, Part
from engram.plain import to_plain
from engram.random import generator

EVERYTHING = Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES


def seen_columns(step: Step) -> Tensor:
    """(K,) bool, the columns of the classes seen, this stage's included."""
    return step.old | step.new


def classify(step: Step) -> Terms:
    """Cross-entropy over all classes seen, and nothing else."""
    return {"classification": cross_entropy(step.student.logits, step.labels, seen_columns(step)).mean()}


def main_phase(
    stage: Stage,
    training: Training,
    loss: Callable[[Step], Terms],
    *,
    rows: Tensor | None = None,
    train: Part = EVERYTHING,
    weights: Mapping[str, float] | None = None,
    after_step: Callable[[Network], None] | None = None,
) -> Phase:
    """Everything in the pool, or the rows given; after the base stage there is a teacher."""
    rows = stage.all_rows if rows is None else rows
    teacher = not stage.is_base
    return Phase("main", len(rows), lambda: rows, loss, train, training, teacher, weights or {}, after_step=after_step)


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


def check_temperature(temperature: float) -> None:
    """Refuses a temperature that no softmax can have."""
    if not temperature > 0:
        raise EngramError(f"temperature must be above 0, got {temperature}")


def linear_base_key(name: str, settings: Settings) -> dict[str, Any]:
    """What determines a method's base stage: its name and all settings but those marked AFTER_BASE."""
    later = {field.name for field in fields(settings) if field.metadata.get("after_base")}
    return {"host": name, **{key: value for key, value in to_plain(settings).items() if key not in later}}


class LinearMethod(Method[SettingsT]):
    """A linear head with a bias that grows by random rows; each method adds its phases and its loss."""

    def head(self, dim: int, capacity: int) -> Head:
        return LinearHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def base_key(self) -> dict[str, Any] | None:
        return linear_base_key(type(self).__name__, self.settings)
