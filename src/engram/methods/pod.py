"""POD: PODNet's spatial term alone (the PODNet row of AFC's Table 4).

Where in the rows and in the columns of a map each channel is strong stays as it was; what happens inside a row or a
column is free.
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
class PODSettings(MapsSettings):
    """The settings of all rows of Table 4, with PODNet's weight for the CNN recipe; the NME recipe has 5."""

    lambda_maps: float = field(default=3.0, metadata=AFTER_BASE)


def distance(student: Output, teacher: Output) -> Tensor:
    """Of the sums over the width and over the height."""
    return losses.pooled_distance(student.maps, teacher.maps, losses.over_rows_and_columns)


@final
@register(
    "pod",
    settings=PODSettings,
    title="PODNet's spatial term alone",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: PODNet",
)
class POD(HostMethod[PODSettings]):
    """Distils the maps pooled over rows and over columns."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return maps_phases(self.settings, learner, stage, passes, distance)
