"""LwF: learning without forgetting (Li, Hoiem, ECCV 2016), in its class-incremental form.

No image of an old class is kept. The previous model's scores for the new images are distilled over the old classes,
whose rows of the head do not change. New classes are only compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from engram.contract import Learner, Part, Passes, Phase, Settings, Stage, Step, Terms, Training, register, setting
from engram.methods.blocks.linear import LinearMethod, classify, classify_new, note_single_class
from engram.methods.blocks.losses import distillation
from engram.methods.blocks.phases import main_phase

SINGLE_CLASS = (
    "without a memory, new classes are only compared with each other, so a single class is not learned; add two or "
    "more classes at a time, or choose a method with a memory"
)


def lwf_training() -> Training:
    """250 epochs; learning rate times 0.1 after 60, 120, 180 and 220."""
    return Training(250, schedule="steps", milestones=(0.24, 0.48, 0.72, 0.88), weight_decay=2e-4, clip=None)


@dataclass(frozen=True)
class LwFSettings(Settings):
    """LwF's settings; the defaults are those of CIFAR-100. temperature: of both softmaxes in the distillation."""

    lambda_kd: float = setting(1.0, at_least=0, after_base=True)
    temperature: float = setting(2.0, above=0, after_base=True)
    train: Training = setting(factory=lwf_training, role="main")


@final
@register(
    "lwf",
    settings=LwFSettings,
    title="Learning without Forgetting (no memory)",
    paper="Li, Hoiem, ECCV 2016",
    memory="none",
)
class LwF(LinearMethod[LwFSettings]):
    """Distils the scores of old classes on the new images. It has no exemplars, so "cnn" is its only predictor."""

    predictors = ("cnn",)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        note_single_class(learner, stage, SINGLE_CLASS)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        if stage.is_base:
            return [main_phase(stage, self.settings.train, classify)]
        parts, weights = Part.BACKBONE | Part.NEW_CLASSES, {"distillation": self.settings.lambda_kd}
        return [main_phase(stage, self.settings.train, self.loss, train=parts, weights=weights)]

    def loss(self, step: Step) -> Terms:
        """Cross-entropy over the new classes plus weighted distillation of the old classes."""
        assert step.teacher is not None
        ours, theirs, temperature = step.student.logits, step.teacher.logits, self.settings.temperature
        return {
            **classify_new(step),
            "distillation": step.weights["distillation"] * distillation(ours, theirs, step.old, temperature).mean(),
        }
