"""EEIL: end-to-end incremental learning (Castro, Marin-Jimenez, Guil, Schmid, Alahari, ECCV 2018).

The softmax of each earlier stage is distilled separately, in addition to the classification of all classes. Then the
whole network is fine-tuned on a balanced set. A copy from before the fine-tuning teaches the scores of new classes
there, so that they are not forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, Step, Terms, Training, register, setting
from engram.contract.phase import mean_over_images
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, classify, distil
from engram.methods.blocks.losses import distillation_by_group
from engram.methods.blocks.phases import EVERYTHING, balanced_phase, stepped


@dataclass(frozen=True)
class EEILSettings(SteppedSettings):
    """EEIL's settings; the defaults are those of CIFAR-100. temperature: of both softmaxes in the distillation."""

    temperature: float = setting(2.0, above=0, after_base=True)
    train: Training = setting(stepped(40, 10, 20, 30, weight_decay=1e-4), role="main")
    finetune: Training = setting(stepped(30, 10, 20, lr=0.01, weight_decay=1e-4), after_base=True, role="finetune")


@final
@register(
    "eeil",
    settings=EEILSettings,
    title="End-to-End Incremental Learning",
    paper="Castro, Marin-Jimenez, Guil, Schmid, Alahari, ECCV 2018",
    recipes=RecipeHints(finetune={"epochs": 30, "batch_size": 8}),
)
class EEIL(LinearMethod[EEILSettings]):
    """Distils every earlier stage's softmax, then fine-tunes the whole network on a balanced set."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        phases = super().phases(learner, stage, passes)
        if stage.is_base or not self.settings.finetune.epochs:
            return phases
        balance = balanced_phase(
            learner,
            stage,
            passes,
            self.settings.finetune,
            self.balance,
            train=EVERYTHING,
            teacher=True,
            start=learner.snapshot_teacher,
        )
        return [*phases, balance]

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Classification of all classes seen plus a separate distillation of each earlier stage."""
        assert step.teacher is not None
        assert step.arrival is not None
        ours, theirs, temperature = step.student.logits, step.teacher.logits, self.settings.temperature
        distilled = distillation_by_group(ours, theirs, step.arrival, step.old, temperature)
        return {**classify(step), "distillation": distilled.mean()}

    @mean_over_images
    def balance(self, step: Step) -> Terms:
        """Classification of all classes seen plus the distillation of new classes from the copy of this stage."""
        return {**classify(step), "distillation": distil(step, step.new, self.settings.temperature)}
