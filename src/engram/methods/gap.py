"""GAP: the mean of each channel of a map stays as it was (a row of AFC's Table 4).

How strong each channel is matters, not where.
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
class GAPSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation."""

    lambda_maps: float = field(default=5.0, metadata=AFTER_BASE)


@final
@register(
    "gap",
    settings=GAPSettings,
    title="Preserves the mean of each channel",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: GAP",
    shares_base=True,
)
class GAP(MapsMethod[GAPSettings]):
    """Distils the maps pooled over all pixels."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the means over the pixels."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_pixels)
