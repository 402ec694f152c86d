"""The losses of AFC's Table 4: one distillation term on the feature maps beside the classification."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

from torch import Tensor

from engram.contract import Learner, Output, Passes, Phase, RecipeHints, Stage, Step, Terms, register, setting
from engram.methods.afc import AFCSettings, discrepancy
from engram.methods.blocks import losses
from engram.methods.blocks.lsc import LSC_NME, LSCMethod, LSCSettings, distilled, lsc_phases, stage_weight
from engram.nn.heads import Head

Distance = Callable[[Output, Output], Tensor]


@dataclass(frozen=True)
class MapsSettings(LSCSettings):
    """The host's settings and the weight of the one distillation term.

    growing: the weight is lambda_maps * sqrt(classes seen / new classes), else lambda_maps at every stage.
    """

    lambda_maps: float = setting(1.0, at_least=0, after_base=True)
    growing: bool = setting(True, after_base=True)


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
    return lsc_phases(settings, learner, stage, passes, Preserve(settings, distance), {"maps": weight})


MapsSettingsT = TypeVar("MapsSettingsT", bound=MapsSettings)


class MapsMethod(LSCMethod[MapsSettingsT]):
    """A row whose distance needs the two outputs alone; each adds that distance."""

    @staticmethod
    @abstractmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """What is distilled, from the outputs of student and teacher."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return maps_phases(self.settings, learner, stage, passes, self.distance)


@dataclass(frozen=True)
class ChannelSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation."""

    lambda_maps: float = setting(2.0, at_least=0, after_base=True)


@final
@register(
    "channel",
    settings=ChannelSettings,
    title="Preserves the sum over the channels",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: channel",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class Channel(MapsMethod[ChannelSettings]):
    """Distils the maps pooled over their channels."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the sums over the channels."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_channels)


@dataclass(frozen=True)
class GAPSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation."""

    lambda_maps: float = setting(5.0, at_least=0, after_base=True)


@final
@register(
    "gap",
    settings=GAPSettings,
    title="Preserves the mean of each channel",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: GAP",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class GAP(MapsMethod[GAPSettings]):
    """Distils the maps pooled over all pixels."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the means over the pixels."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_pixels)


@dataclass(frozen=True)
class GradCAMSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation.

    summed: attention is the sum over the channels, as in the paper of 2019, instead of all channels side by side.
    """

    lambda_maps: float = setting(0.01, at_least=0, after_base=True)
    summed: bool = setting(False, after_base=True)


@dataclass(frozen=True)
class Attention:
    """The distance of the attention of student and teacher; the teacher's head is asked again, for its gradient."""

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
@register(
    "gradcam",
    settings=GradCAMSettings,
    title="Preserves the attention on the top old class",
    paper="Dhar et al., CVPR 2019; AFC's Table 4: GradCam",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class GradCAM(LSCMethod[GradCAMSettings]):
    """Distils where in the last map the student's best old class is seen."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        distance = Attention(learner.teacher.head, self.settings.summed)
        return maps_phases(self.settings, learner, stage, passes, distance)


@dataclass(frozen=True)
class GramSettings(MapsSettings):
    """The settings of all rows of Table 4, with the weight of PODNet's ablation, the same at every stage."""

    lambda_maps: float = setting(0.1, at_least=0, after_base=True)
    growing: bool = setting(False, after_base=True)


@final
@register(
    "gram",
    settings=GramSettings,
    title="Preserves the Gram matrix of each map",
    paper="Johnson et al., ECCV 2016; AFC's Table 4: Gram matrix",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class Gram(MapsMethod[GramSettings]):
    """Distils the Gram matrices of the maps."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the Gram matrices."""
        return losses.gram_distance(student.maps, teacher.maps)


@dataclass(frozen=True)
class PixelsSettings(MapsSettings):
    """The settings of all rows of Table 4, with AFC's weight."""

    lambda_maps: float = setting(4.0, at_least=0, after_base=True)


@final
@register(
    "pixels",
    settings=PixelsSettings,
    title="Uniform importance, weak reading",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class Pixels(MapsMethod[PixelsSettings]):
    """Distils the maps as they are."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of all values."""
        return losses.whole_map_distance(student.maps, teacher.maps)


@dataclass(frozen=True)
class PODSettings(MapsSettings):
    """The settings of all rows of Table 4, with PODNet's weight for the CNN recipe; the NME recipe has 5."""

    lambda_maps: float = setting(3.0, at_least=0, after_base=True)


@final
@register(
    "pod",
    settings=PODSettings,
    title="PODNet's spatial term alone",
    paper="Douillard et al., ECCV 2020; AFC's Table 4: PODNet",
    shares_base=True,
    recipes=RecipeHints(nme={**LSC_NME, "lambda_maps": 5.0}),
)
class POD(MapsMethod[PODSettings]):
    """Distils the maps pooled over rows and over columns."""

    @staticmethod
    def distance(student: Output, teacher: Output) -> Tensor:
        """Of the sums over the width and over the height."""
        return losses.pooled_distance(student.maps, teacher.maps, losses.over_rows_and_columns)


@final
@register(
    "uniform",
    settings=AFCSettings,
    title="AFC with uniform importance",
    paper="Kang, Park, Han, CVPR 2022 (Table 4: uniform)",
    shares_base=True,
    recipes=RecipeHints(nme=LSC_NME),
)
class Uniform(LSCMethod[AFCSettings]):
    """Distils feature maps, all channels alike."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = {"discrepancy": stage_weight(self.settings.lambda_disc, stage)}
        return lsc_phases(self.settings, learner, stage, passes, self.loss, weights)

    def loss(self, step: Step) -> Terms:
        """Classification plus the discrepancy with importance 1."""
        ones = [step.weights["discrepancy"].new_ones(()) for _ in step.student.maps]
        return distilled(self.settings, step, discrepancy=discrepancy(self.settings, step, ones))
