"""Gram: which channels of a map are strong together stays as it was (a row of AFC's Table 4).

The loss that carries the style of a picture over to another one, here from the teacher to the student.
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
from engram.models.network import Output


@dataclass(frozen=True)
class GramSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation, the same at every stage."""

    lambda_maps: float = field(default=0.1, metadata=AFTER_BASE)
    growing: bool = field(default=False, metadata=AFTER_BASE)


def distance(student: Output, teacher: Output) -> Tensor:
    """Of the Gram matrices."""
    return losses.gram_distance(student.maps, teacher.maps)


@final
@register(
    "gram",
    settings=GramSettings,
    title="Preserves the Gram matrix of each map",
    paper="Johnson et al., ECCV 2016; AFC's Table 4: Gram matrix",
)
class Gram(HostMethod[GramSettings]):
    """Distils the Gram matrices of the maps."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return maps_phases(self.settings, learner, stage, passes, distance)
