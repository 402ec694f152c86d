"""EEIL: end-to-end incremental learning (Castro, Marin-Jimenez, Guil, Schmid, Alahari, ECCV 2018).

The softmax of each earlier stage is distilled separately, in addition to the classification of all classes. Then the
whole network is fine-tuned on a balanced set. A copy from before the fine-tuning teaches the scores of new classes
there, so that they are not forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from engram.contract import (
    Learner,
    Passes,
    Phase,
    RecipeHints,
    Settings,
    Stage,
    Step,
    Terms,
    Training,
    register,
    setting,
)
from engram.methods.blocks.linear import LinearMethod, classify
from engram.methods.blocks.losses import distillation, distillation_by_group
from engram.methods.blocks.phases import EVERYTHING, balanced_phase, main_phase


def eeil_training() -> Training:
    """40 epochs; learning rate times 0.1 every 10."""
    return Training(40, schedule="steps", milestones=(0.25, 0.5, 0.75), weight_decay=1e-4, clip=None)


def eeil_finetuning() -> Training:
    """30 epochs, starting at a tenth of the learning rate; times 0.1 every 10."""
    return Training(30, lr=0.01, schedule="steps", milestones=(10 / 30, 20 / 30), weight_decay=1e-4, clip=None)


@dataclass(frozen=True)
class EEILSettings(Settings):
    """EEIL's settings; the defaults are those of CIFAR-100. temperature: of both softmaxes in the distillation."""

    temperature: float = setting(2.0, above=0, after_base=True)
    train: Training = setting(factory=eeil_training, role="main")
    finetune: Training = setting(factory=eeil_finetuning, after_base=True, role="finetune")


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
        if stage.is_base:
            return [main_phase(stage, self.settings.train, classify)]
        main = main_phase(stage, self.settings.train, self.loss)
        if not self.settings.finetune.epochs:
            return [main]
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
        return [main, balance]

    def loss(self, step: Step) -> Terms:
        """Classification of all classes seen plus a separate distillation of each earlier stage."""
        assert step.teacher is not None
        assert step.arrival is not None
        ours, theirs, temperature = step.student.logits, step.teacher.logits, self.settings.temperature
        distilled = distillation_by_group(ours, theirs, step.arrival, step.old, temperature)
        return {**classify(step), "distillation": distilled.mean()}

    def balance(self, step: Step) -> Terms:
        """Classification of all classes seen plus the distillation of new classes from the copy of this stage."""
        assert step.teacher is not None
        distilled = distillation(step.student.logits, step.teacher.logits, step.new, self.settings.temperature)
        return {**classify(step), "distillation": distilled.mean()}
