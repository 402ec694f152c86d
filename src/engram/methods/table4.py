"""The methods of Table 4 of the AFC paper: classification plus one distillation term on the feature maps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

from torch import Tensor

from engram.contract import Learner, Output, Passes, Phase, RecipeHints, Stage, Step, Terms, register, setting
from engram.methods.afc import AFCSettings, discrepancy
from engram.methods.blocks import losses
from engram.methods.blocks.lsc import LSC_NME, LSCMethod, LSCSettings, distilled, lsc_phases, stage_weight
from engram.nn.heads import Head

Distance = Callable[[Output, Output], Tensor]
MethodT = TypeVar("MethodT", bound=LSCMethod)


def register_row(
    name: str, *, settings: type[LSCSettings], title: str, paper: str, nme: Mapping[str, Any] | None = None
) -> Callable[[type[MethodT]], type[MethodT]]:
    """Register a row of the table. nme: settings of its NME recipe, in addition to LSC_NME."""
    recipes = RecipeHints(nme={**LSC_NME, **(nme or {})})
    return register(name, settings=settings, title=title, paper=paper, shares_base=True, recipes=recipes)


@dataclass(frozen=True)
class MapsSettings(LSCSettings):
    """Settings of the methods of Table 4, in addition to those of the family.

    lambda_maps: weight of the distillation term. growing: times sqrt(classes seen / new classes).
    """

    lambda_maps: float = setting(1.0, at_least=0, after_base=True)
    growing: bool = setting(True, after_base=True)


@dataclass(frozen=True)
class Preserve:
    """Loss: classification plus the distance of student and teacher. Equal fields: equal losses, and one recording."""

    settings: MapsSettings
    distance: Distance

    def __call__(self, step: Step) -> Terms:
        assert step.teacher is not None
        return distilled(self.settings, step, maps=self.distance(step.student, step.teacher))


def maps_phases(
    settings: MapsSettings, learner: Learner, stage: Stage, passes: Passes, distance: Distance
) -> list[Phase]:
    """The phases of the LSC family with this distance as the distillation term."""
    weight = stage_weight(settings.lambda_maps, stage) if settings.growing else settings.lambda_maps
    return lsc_phases(settings, learner, stage, passes, Preserve(settings, distance), {"maps": weight})


MapsSettingsT = TypeVar("MapsSettingsT", bound=MapsSettings)


class MapsMethod(LSCMethod[MapsSettingsT]):
    """Base class of rows whose distance depends only on the two outputs; each adds its distance."""

    @staticmethod
    @abstractmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """The distance of the outputs of student and teacher."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return maps_phases(self.settings, learner, stage, passes, self.distance)


@dataclass(frozen=True)
class ChannelSettings(MapsSettings):
    """Settings with the weight of PODNet's ablation."""

    lambda_maps: float = setting(2.0, at_least=0, after_base=True)


@final
@register_row(
    "channel",
    settings=ChannelSettings,
    title="Preserves the sum over the channels",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: channel",
)
class Channel(MapsMethod[ChannelSettings]):
    """Distils the maps pooled over their channels."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Distance of the sums over the channels."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_channels)


@dataclass(frozen=True)
class GAPSettings(MapsSettings):
    """Settings with the weight of PODNet's ablation."""

    lambda_maps: float = setting(5.0, at_least=0, after_base=True)


@final
@register_row(
    "gap",
    settings=GAPSettings,
    title="Preserves the mean of each channel",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: GAP",
)
class GAP(MapsMethod[GAPSettings]):
    """Distils the maps pooled over all pixels."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Distance of the means over the pixels."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_pixels)


@dataclass(frozen=True)
class GradCAMSettings(MapsSettings):
    """Settings with the weight of PODNet's ablation.

    summed: attention is the sum over the channels, as in the LwM paper (2019), instead of all channels separately.
    """

    lambda_maps: float = setting(0.01, at_least=0, after_base=True)
    summed: bool = setting(False, after_base=True)


@dataclass(frozen=True)
class Attention:
    """Distance of the attention of student and teacher. head: the teacher's, which is run again for its gradient."""

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
@register_row(
    "gradcam",
    settings=GradCAMSettings,
    title="Preserves the attention on the top old class",
    paper="Dhar et al., CVPR 2019; AFC's Table 4: GradCam",
)
class GradCAM(LSCMethod[GradCAMSettings]):
    """Distils the attention of the last map for the student's highest old class."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        distance = Attention(learner.teacher.head, self.settings.summed)
        return maps_phases(self.settings, learner, stage, passes, distance)


@dataclass(frozen=True)
class GramSettings(MapsSettings):
    """Settings with the weight of PODNet's ablation, which is the same at every stage."""

    lambda_maps: float = setting(0.1, at_least=0, after_base=True)
    growing: bool = setting(False, after_base=True)


@final
@register_row(
    "gram",
    settings=GramSettings,
    title="Preserves the Gram matrix of each map",
    paper="Johnson et al., ECCV 2016; AFC's Table 4: Gram matrix",
)
class Gram(MapsMethod[GramSettings]):
    """Distils the Gram matrices of the maps."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Distance of the Gram matrices."""
        return losses.gram_distance(student.maps, teacher.maps)


@dataclass(frozen=True)
class PixelsSettings(MapsSettings):
    """Settings with AFC's weight."""

    lambda_maps: float = setting(4.0, at_least=0, after_base=True)


@final
@register_row(
    "pixels",
    settings=PixelsSettings,
    title="Uniform importance, weak reading",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
)
class Pixels(MapsMethod[PixelsSettings]):
    """Distils the maps without pooling."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Distance of all values."""
        return losses.whole_map_distance(student.maps, teacher.maps)


@dataclass(frozen=True)
class PODSettings(MapsSettings):
    """Settings with PODNet's weight for the CNN recipe; the NME recipe has 5."""

    lambda_maps: float = setting(3.0, at_least=0, after_base=True)


@final
@register_row(
    "pod",
    settings=PODSettings,
    title="Only PODNet's spatial term",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: PODNet",
    nme={"lambda_maps": 5.0},
)
class POD(MapsMethod[PODSettings]):
    """Distils the maps pooled over rows and over columns."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Distance of the sums over the width and over the height."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_rows_and_columns)


@final
@register_row(
    "uniform",
    settings=AFCSettings,
    title="AFC with uniform importance",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
)
class Uniform(LSCMethod[AFCSettings]):
    """Distils feature maps with the same weight for all channels."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = {"discrepancy": stage_weight(self.settings.lambda_disc, stage)}
        return lsc_phases(self.settings, learner, stage, passes, self.loss, weights)

    def loss(self, step: Step) -> Terms:
        """Classification plus the discrepancy with importance 1."""
        ones = [step.weights["discrepancy"].new_ones(()) for _ in step.student.maps]
        return distilled(self.settings, step, discrepancy=discrepancy(self.settings, step, ones))
