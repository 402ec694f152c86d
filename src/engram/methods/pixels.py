"""Pixels: whole maps, every value alike (the weak reading of the uniform row of AFC's Table 4).

Divided by the number of values of a map, the distance is so small that it hardly acts, which is how that row came out;
`uniform` is the reading that AFC's own loss gives.
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
class PixelsSettings(MapsSettings):
    """The settings of all rows of Table 4, with AFC's weight."""

    lambda_maps: float = field(default=4.0, metadata=AFTER_BASE)


@final
@register(
    "pixels",
    settings=PixelsSettings,
    title="Uniform importance, weak reading",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
    shares_base=True,
)
class Pixels(MapsMethod[PixelsSettings]):
    """Distils the maps as they are."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of all values."""
        return losses.whole_map_distance(student.maps, teacher.maps)
