"""Channel: the sum over the channels of a map stays as it was (a row of AFC's Table 4).

Where the map is strong matters, not in which channel.
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
class ChannelSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation."""

    lambda_maps: float = field(default=2.0, metadata=AFTER_BASE)


@final
@register(
    "channel",
    settings=ChannelSettings,
    title="Preserves the sum over the channels",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: channel",
    shares_base=True,
)
class Channel(MapsMethod[ChannelSettings]):
    """Distils the maps pooled over their channels."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the sums over the channels."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_channels)
