"""EEIL: end-to-end incremental learning (Castro, Marin-Jimenez, Guil, Schmid, Alahari, ECCV 2018).

Each earlier stage keeps a softmax of its own that is distilled beside the classification of all classes. Trained on
many new images and few exemplars, the network is then fine-tuned, whole, on as many images of each class; a copy of it
from just before teaches the new classes' scores there, so that they are not lost again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
    balanced_count,
    balanced_rows,
    register,
    setting,
)
from engram.methods.blocks.linear import EVERYTHING, LinearMethod, classify, main_phase
from engram.methods.blocks.losses import distillation, distillation_by_group


def eeil_training() -> Training:
    """40 epochs, a tenth of the rate every 10."""
    return Training(40, schedule="steps", milestones=(0.25, 0.5, 0.75), weight_decay=1e-4, clip=None)


def eeil_finetuning() -> Training:
    """30 epochs at a tenth of the rate, a tenth of that every 10."""
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
        balance = Phase(
            name="balance",
            images=balanced_count(learner, stage),
            rows=partial(balanced_rows, learner, stage, passes),
            loss=self.balance,
            train=EVERYTHING,
            training=self.settings.finetune,
            teacher=True,
            start=learner.snapshot_teacher,
        )
        return [main, balance]

    def loss(self, step: Step) -> Terms:
        """Classification of all classes seen plus the distillation of each earlier stage by itself."""
        assert step.teacher is not None
        assert step.arrival is not None
        scores = (step.student.logits, step.teacher.logits)
        distilled = distillation_by_group(*scores, step.arrival, step.old, self.settings.temperature)
        return {**classify(step), "distillation": distilled.mean()}

    def balance(self, step: Step) -> Terms:
        """Classification of all classes seen plus the distillation of the new ones, which this stage's copy teaches."""
        assert step.teacher is not None
        scores = (step.student.logits, step.teacher.logits)
        distilled = distillation(*scores, step.new, self.settings.temperature)
        return {**classify(step), "distillation": distilled.mean()}
