"""One term on the feature maps beside the classification: what the rows of AFC's Table 4 have in common.

A row is its distance of student and teacher; head, classification, fine-tuning and the weight's growth are the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms
from engram.methods.host import HostMethod, HostSettings, distilled, host_phases, stage_weight
from engram.methods.settings import AFTER_BASE, refuse_negative
from engram.models.network import Output

Distance = Callable[[Output, Output], Tensor]


@dataclass(frozen=True)
class MapsSettings(HostSettings):
    """The host's settings and the weight of the one distillation term.

    growing: the weight is lambda_maps * sqrt(classes seen / new classes), else lambda_maps at every stage.
    """

    lambda_maps: float = field(default=1.0, metadata=AFTER_BASE)
    growing: bool = field(default=True, metadata=AFTER_BASE)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_negative(self, "lambda_maps")


@dataclass(frozen=True)
class Preserve:
    """A loss: classification, and the distance of student and teacher. Equal parts make equal losses: one recording."""

    settings: MapsSettings
    distance: Distance

    def __call__(self, step: Step) -> Terms:
        assert step.teacher is not None
        return distilled(self.settings, step, maps=self.distance(step.student, step.teacher))


def maps_phases(
    settings: MapsSettings, learner: Learner, stage: Stage, passes: Passes, distance: Distance
) -> list[Phase]:
    """The host's phases with this distance as the one distillation term."""
    weight = stage_weight(settings.lambda_maps, stage) if settings.growing else settings.lambda_maps
    return host_phases(settings, learner, stage, passes, Preserve(settings, distance), {"maps": weight})


MapsSettingsT = TypeVar("MapsSettingsT", bound=MapsSettings)


class MapsMethod(HostMethod[MapsSettingsT]):
    """A row whose distance needs the two outputs alone; each adds that distance."""

    @staticmethod
    @abstractmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """What is distilled, from the outputs of student and teacher."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return maps_phases(self.settings, learner, stage, passes, self.distance)
