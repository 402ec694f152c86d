"""Pixels: whole maps, every value alike (the weak reading of the uniform row of AFC's Table 4).

Divided by the number of values of a map, the distance is so small that it hardly acts, which is how that row came out;
`uniform` is the reading that AFC's own loss gives.
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
class PixelsSettings(MapsSettings):
    """The settings of all rows of Table 4, with AFC's weight."""

    lambda_maps: float = field(default=4.0, metadata=AFTER_BASE)


def distance(student: Output, teacher: Output) -> Tensor:
    """Of all values."""
    return losses.whole_map_distance(student.maps, teacher.maps)


@final
@register(
    "pixels",
    settings=PixelsSettings,
    title="Uniform importance, weak reading",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
)
class Pixels(HostMethod[PixelsSettings]):
    """Distils the maps as they are."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return maps_phases(self.settings, learner, stage, passes, distance)
