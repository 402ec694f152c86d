"""LwF: learning without forgetting (Li, Hoiem, ECCV 2016), in its class-incremental form, and LwM, which extends it.

No image of an old class is kept. The previous model's scores for the new images are distilled over the old classes,
whose rows of the head do not change. New classes are only compared with each other.

LwM, learning without memorizing (Dhar, Singh, Peng, Wu, Chellappa, CVPR 2019), also distils attention: for the old
class with the teacher's highest score, the attention maps of student and teacher should agree. The attention map is
that of GradCAM: the last activations, each channel weighted by the gradient of the class's score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Learner, Part, Passes, Stage, Step, Terms, Training, mean_over_images, register, setting
from engram.methods.blocks import losses
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, classify_new, distil, note_single_class
from engram.methods.blocks.phases import stepped

SINGLE_CLASS = (
    "without a memory, new classes are only compared with each other, so a single class is not learned; add two or "
    "more classes at a time, or choose a method with a memory"
)
ROWS = "head.rows"


@dataclass(frozen=True)
class LwFSettings(SteppedSettings):
    """LwF's settings; the defaults are those of CIFAR-100. temperature: of both softmaxes in the distillation."""

    lambda_kd: float = setting(1.0, at_least=0, after_base=True)
    temperature: float = setting(2.0, above=0, after_base=True)
    train: Training = setting(stepped(250, 60, 120, 180, 220, weight_decay=2e-4), role="main")


@dataclass(frozen=True)
class LwMSettings(LwFSettings):
    """LwM's settings; the schedule is LwF's on CIFAR-100. lambda_kd, lambda_attention: the paper's beta and gamma."""

    lambda_attention: float = setting(1.0, at_least=0, after_base=True)


LwFSettingsT = TypeVar("LwFSettingsT", bound=LwFSettings)


class WithoutMemory(LinearMethod[LwFSettingsT]):
    """Distils the scores of old classes on the new images. It has no exemplars, so "cnn" is its only predictor."""

    predictors = ("cnn",)
    # The rows of old classes have no images to learn from: only the distillation would change them.
    trained = Part.BACKBONE | Part.NEW_CLASSES

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        note_single_class(learner, stage, SINGLE_CLASS)

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Cross-entropy over the new classes plus weighted distillation of the old classes."""
        distilled = self.settings.lambda_kd * distil(step, step.old, self.settings.temperature)
        return {**classify_new(step), "distillation": distilled}


@final
@register(
    "lwf",
    settings=LwFSettings,
    title="Learning without Forgetting (no memory)",
    paper="Li, Hoiem, ECCV 2016",
    memory="none",
)
class LwF(WithoutMemory[LwFSettings]):
    """Distils the scores of old classes; keeps no images."""


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
class LwM(WithoutMemory[LwMSettings]):
    """Distils the scores of old classes and the teacher's attention; keeps no images."""

    class_buffers = (ROWS,)
    needs_maps = True
    needs_pooled_map = True

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        if not stage.is_base:
            # Rows of old classes do not change in a stage, in student and teacher.
            learner.store(ROWS, learner.network.get_parameter("head.weight"))

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """LwF's two terms, and distillation of the attention to the top old class."""
        assert step.teacher is not None
        student, teacher = step.student, step.teacher
        top = teacher.scores.masked_fill(~step.old, -torch.inf).argmax(dim=1)
        looked = attention_loss(student.maps[-1], teacher.maps[-1], step.buffers[ROWS][top])
        return {**super().loss(step), "attention": self.settings.lambda_attention * looked}
