"""Gram: which channels of a map are strong together stays as it was (a row of AFC's Table 4).

The loss that carries the style of a picture over to another one, here from the teacher to the student.
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
class GramSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation, the same at every stage."""

    lambda_maps: float = field(default=0.1, metadata=AFTER_BASE)
    growing: bool = field(default=False, metadata=AFTER_BASE)


@final
@register(
    "gram",
    settings=GramSettings,
    title="Preserves the Gram matrix of each map",
    paper="Johnson et al., ECCV 2016; AFC's Table 4: Gram matrix",
    shares_base=True,
)
class Gram(MapsMethod[GramSettings]):
    """Distils the Gram matrices of the maps."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the Gram matrices."""
        return losses.gram_distance(student.maps, teacher.maps)
