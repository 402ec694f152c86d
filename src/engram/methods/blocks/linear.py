"""The linear family: a linear head that grows by random rows, and losses on its scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engram.contract import Learner, Method, Passes, SettingsT, Stage, Step, Terms, base_settings
from engram.core.rng import generator
from engram.methods.blocks.losses import cross_entropy, distillation
from engram.nn.heads import Head, LinearHead


def seen_columns(step: Step) -> Tensor:
    """(K,) bool, the columns of the classes seen, this stage's included."""
    return step.old | step.new


def classify(step: Step) -> Terms:
    """Cross-entropy over all classes seen, as the only term."""
    return {"classification": cross_entropy(step.student.logits, step.labels, seen_columns(step)).mean()}


def classify_new(step: Step) -> Terms:
    """Cross-entropy over the new classes only, as the only term."""
    return {"classification": cross_entropy(step.student.logits, step.labels, step.new).mean()}


def note_single_class(learner: Learner, stage: Stage, meaning: str) -> None:
    """Warn about a single new class, at the first stage after the base stage that has one. meaning: of this case."""
    if not stage.is_base and stage.num_new == 1 and 1 not in stage.sizes[1:-1]:
        learner.notes.append(f"stage {stage.index} has one new class, and {meaning}")


def convex_weights(stage: Stage) -> dict[str, float]:
    """Weights of classification and distillation that add up to 1: distillation has the share of old classes."""
    share = stage.num_old / stage.num_seen
    return {"classification": 1 - share, "distillation": share}


def convex_distillation(step: Step, temperature: float) -> Terms:
    """Classification over all classes seen and distillation of the old classes, weighted by `convex_weights`."""
    assert step.teacher is not None
    distilled = distillation(step.student.logits, step.teacher.logits, step.old, temperature).mean()
    return {
        "classification": step.weights["classification"] * classify(step)["classification"],
        "distillation": step.weights["distillation"] * distilled,
    }


class LinearMethod(Method[SettingsT]):
    """Base class of the linear family; each method adds its phases and its loss."""

    def head(self, dim: int, capacity: int) -> Head:
        return LinearHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def base_key(self) -> dict[str, Any] | None:
        return {"family": "linear", **base_settings(self.settings)}
