"""POD: PODNet's spatial term alone (the PODNet row of AFC's Table 4).

Where in the rows and in the columns of a map each channel is strong stays as it was; what happens inside a row or a
column is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from engram.methods import losses
from engram.methods._base import register
from engram.methods.maps import MapsMethod, MapsSettings
from engram.methods.settings import AFTER_BASE
from engram.models.network import Output


@dataclass(frozen=True)
class PODSettings(MapsSettings):
    """The settings of all rows of Table 4, with PODNet's weight for the CNN recipe; the NME recipe has 5."""

    lambda_maps: float = field(default=3.0, metadata=AFTER_BASE)


@final
@register(
    "pod",
    settings=PODSettings,
    title="PODNet's spatial term alone",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: PODNet",
    shares_base=True,
)
class POD(MapsMethod[PODSettings]):
    """Distils the maps pooled over rows and over columns."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the sums over the width and over the height."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_rows_and_columns)
