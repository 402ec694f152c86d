"""LwM: learning without memorizing (Dhar, Singh, Peng, Wu, Chellappa, CVPR 2019).

No image of an old class is kept. In addition to the scores of old classes (as in LwF), attention is distilled: for the
old class with the teacher's highest score, the attention maps of student and teacher should agree. The attention map is
that of GradCAM: the last activations, each channel weighted by the gradient of the class's score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Learner, Part, Passes, Phase, Settings, Stage, Step, Terms, Training, register, setting
from engram.methods.blocks import losses
from engram.methods.blocks.linear import LinearMethod, classify_new, note_single_class
from engram.methods.blocks.losses import distillation
from engram.methods.blocks.phases import main_phase
from engram.methods.lwf import SINGLE_CLASS, lwf_training
from engram.nn.heads import LinearHead

ROWS = "head.rows"


@dataclass(frozen=True)
class LwMSettings(Settings):
    """LwM's settings; the schedule is LwF's on CIFAR-100.

    lambda_kd, lambda_attention: the paper's beta and gamma.
    """

    lambda_kd: float = setting(1.0, at_least=0, after_base=True)
    lambda_attention: float = setting(1.0, at_least=0, after_base=True)
    temperature: float = setting(2.0, above=0, after_base=True)
    train: Training = setting(factory=lwf_training, role="main")


def attention_loss(ours: Tensor, theirs: Tensor, rows: Tensor) -> Tensor:
    """Distance of the attention of student and teacher.

    ours, theirs: last maps (B, C, H, W). rows: the row of the head of each sample's class (B, C).

    The head is linear in the mean of the map's positive part. So the gradient of a class's score is its row of the
    head, the same at every pixel, up to a factor that cancels. Only our map gets a gradient.
    """
    return losses.attention_distance(F.relu(ours), F.relu(theirs), rows, rows, summed=True)


@final
@register(
    "lwm", settings=LwMSettings, title="Learning without memorizing", paper="Dhar et al., CVPR 2019", memory="none"
)
class LwM(LinearMethod[LwMSettings]):
    """Distils the scores of old classes and the teacher's attention; keeps no images."""

    predictors = ("cnn",)
    class_buffers = (ROWS,)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        note_single_class(learner, stage, SINGLE_CLASS)
        if stage.is_base:
            return
        head = learner.network.head
        assert isinstance(head, LinearHead)
        learner.store(ROWS, head.weight)  # rows of old classes do not change in a stage, in student and teacher

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        # The rows of old classes have no images to learn from: only the distillation would change them.
        parts = Part.BACKBONE | Part.NEW_CLASSES
        loss = classify_new if stage.is_base else self.loss
        return [main_phase(stage, self.settings.train, loss, train=parts)]

    def loss(self, step: Step) -> Terms:
        """Classification, and distillation of the old scores and of the attention to the top old class."""
        assert step.teacher is not None
        settings, student, teacher = self.settings, step.student, step.teacher
        top = teacher.scores.masked_fill(~step.old, -torch.inf).argmax(dim=1)
        distilled = distillation(student.logits, teacher.logits, step.old, settings.temperature).mean()
        looked = attention_loss(student.maps[-1], teacher.maps[-1], step.buffers[ROWS][top])
        return {
            **classify_new(step),
            "distillation": settings.lambda_kd * distilled,
            "attention": settings.lambda_attention * looked,
        }
