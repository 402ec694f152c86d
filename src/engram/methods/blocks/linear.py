"""The linear family: a linear head that grows by random rows, one phase per stage, and losses on its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from engram.contract import Learner, Method, Part, Passes, Phase, Settings, Stage, Step, Terms, Training, setting
from engram.contract.phase import mean_over_images
from engram.methods.blocks.losses import cross_entropy, distillation
from engram.methods.blocks.phases import EVERYTHING, main_phase, stepped
from engram.nn.heads import Head, LinearHead


@dataclass(frozen=True)
class SteppedSettings(Settings):
    """Settings of methods whose learning rate falls in steps. train: of a stage's main phase."""

    train: Training = setting(stepped(160, 80, 120), role="main")


def seen_columns(step: Step) -> Tensor:
    """(K,) bool, the columns of the classes seen, this stage's included."""
    return step.old | step.new


@mean_over_images
def classify(step: Step) -> Terms:
    """Cross-entropy over all classes seen, as the only term."""
    return {"classification": cross_entropy(step.student.logits, step.labels, seen_columns(step)).mean()}


@mean_over_images
def classify_new(step: Step) -> Terms:
    """Cross-entropy over the new classes only, as the only term."""
    return {"classification": cross_entropy(step.student.logits, step.labels, step.new).mean()}


def distil(step: Step, columns: Tensor, temperature: float) -> Tensor:
    """The mean distillation loss of the teacher's scores over these columns (K,)."""
    assert step.teacher is not None
    return distillation(step.student.logits, step.teacher.logits, columns, temperature).mean()


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
    terms = {**classify(step), "distillation": distil(step, step.old, temperature)}
    return {name: step.weights[name] * term for name, term in terms.items()}


SteppedSettingsT = TypeVar("SteppedSettingsT", bound=SteppedSettings)


class LinearMethod(Method[SteppedSettingsT]):
    """Base class of the linear family; a method adds its loss and its weights, or phases of its own.

    trained: the parts that are trained after the base stage.
    """

    family = "linear"
    trained: Part = EVERYTHING

    def head(self, dim: int, capacity: int) -> Head:
        return LinearHead(dim, capacity)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """One phase over the whole pool: cross-entropy in the base stage, then the loss, with the teacher."""
        train, weights = self.settings.train, self.weights(stage)
        if stage.is_base:
            return [main_phase(stage, train, self.base_loss)]
        return [main_phase(stage, train, self.loss, train=self.trained, weights=weights)]

    def weights(self, stage: Stage) -> dict[str, float]:
        """The weights of the loss after the base stage."""
        return {}

    @mean_over_images
    def base_loss(self, step: Step) -> Terms:
        """The loss of the base stage."""
        return classify(step)

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """The loss after the base stage."""
        return classify(step)
