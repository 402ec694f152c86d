"""GradCAM: the new model looks where the old one looked (Dhar et al., CVPR 2019; a row of AFC's Table 4).

Both are asked about one class, the student's best among the old ones: each channel of the last map, weighted by how
much it raises that class's score, shows where that class is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods import losses
from engram.methods._base import Passes, Phase, register
from engram.methods.host import HostMethod
from engram.methods.maps import MapsSettings, maps_phases
from engram.methods.settings import AFTER_BASE
from engram.models.heads import Head
from engram.models.network import Output


@dataclass(frozen=True)
class GradCAMSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation.

    summed: attention is the sum over the channels, as in the paper of 2019, instead of all channels side by side.
    """

    lambda_maps: float = field(default=0.01, metadata=AFTER_BASE)
    summed: bool = field(default=False, metadata=AFTER_BASE)


@dataclass(frozen=True)
class Attention:
    """The distance of the attention of student and teacher; the teacher's head is asked again, for its gradient."""

    head: Head
    summed: bool

    def __call__(self, student: Output, teacher: Output) -> Tensor:
        classes = losses.top_old_class(student.scores, teacher.scores)
        embedding = teacher.embedding.detach().requires_grad_()
        return losses.attention_distance(
            student.maps[-1],
            teacher.maps[-1],
            losses.class_gradient(student.scores, classes, student.embedding),
            losses.class_gradient(self.head(embedding), classes, embedding),
            self.summed,
        )


@final
@register(
    "gradcam",
    settings=GradCAMSettings,
    title="Preserves the attention on the top old class",
    paper="Dhar et al., CVPR 2019; AFC's Table 4: GradCam",
    shares_base=True,
)
class GradCAM(HostMethod[GradCAMSettings]):
    """Distils where in the last map the student's best old class is seen."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        distance = Attention(learner.teacher.head, self.settings.summed)
        return maps_phases(self.settings, learner, stage, passes, distance)
