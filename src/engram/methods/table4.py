"""The methods of Table 4 of the AFC paper: classification plus one distillation term on the feature maps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, final

from torch import Tensor

from engram.contract import Learner, Output, Passes, Phase, RecipeHints, Stage, Step, Terms, register, setting
from engram.contract.phase import mean_over_images
from engram.methods.afc import AFCSettings, discrepancy
from engram.methods.blocks import losses
from engram.methods.blocks.lsc import LSC_NME, LSCMethod, LSCSettings, distilled, lsc_phases, stage_weight
from engram.nn.heads import Head

Distance = Callable[[Output, Output], Tensor]
MethodT = TypeVar("MethodT", bound=LSCMethod)


@dataclass(frozen=True)
class MapsSettings(LSCSettings):
    """Settings of the methods of Table 4, in addition to those of the family.

    lambda_maps: weight of the distillation term; most defaults are those of PODNet's ablation. growing: times
    sqrt(classes seen / new classes).
    """

    lambda_maps: float = setting(1.0, at_least=0, after_base=True)
    growing: bool = setting(True, after_base=True)


@dataclass(frozen=True)
class Preserve:
    """Loss: classification plus the distance of student and teacher. Equal fields: equal losses, and one recording."""

    settings: MapsSettings
    distance: Distance

    @mean_over_images
    def __call__(self, step: Step) -> Terms:
        assert step.teacher is not None
        return distilled(self.settings, step, maps=self.distance(step.student, step.teacher))


MapsSettingsT = TypeVar("MapsSettingsT", bound=MapsSettings)


class MapsMethod(LSCMethod[MapsSettingsT]):
    """Base class of the rows; each adds its distance."""

    needs_maps = True

    @abstractmethod
    def distance(self, learner: Learner) -> Distance:
        """The distance of the outputs of student and teacher."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        loss = Preserve(self.settings, self.distance(learner))
        return lsc_phases(self.settings, learner, stage, passes, loss, self.weights(stage))

    def weights(self, stage: Stage) -> dict[str, float]:
        weight = self.settings.lambda_maps
        return {"maps": stage_weight(weight, stage) if self.settings.growing else weight}


def register_row(
    name: str, settings: type[LSCSettings], title: str, paper: str, nme: Mapping[str, float] = MappingProxyType({})
) -> Callable[[type[MethodT]], type[MethodT]]:
    """Register a row of the table. nme: settings of its NME recipe, in addition to LSC_NME."""
    recipes = RecipeHints(nme={**LSC_NME, **nme})
    return register(name, settings=settings, title=title, paper=paper, shares_base=True, recipes=recipes)


def add_row(
    name: str, title: str, paper: str, measure: Distance, weight: float, grows: bool = True, nme: float | None = None
) -> None:
    """Make and register a row whose distance depends only on the two outputs.

    weight, grows: its default settings. nme: the weight in its NME recipe, if it is another.
    """

    @dataclass(frozen=True)
    class RowSettings(MapsSettings):
        lambda_maps: float = setting(weight, at_least=0, after_base=True)
        growing: bool = setting(grows, after_base=True)

    @register_row(name, RowSettings, title, paper, {} if nme is None else {"lambda_maps": nme})
    class RowMethod(MapsMethod[RowSettings]):
        def distance(self, learner: Learner) -> Distance:
            return measure


def pooled(pool: Callable[[Tensor], Tensor]) -> Distance:
    """The distance of the maps pooled like this."""
    return lambda student, teacher: losses.pooled_distance(student.maps, teacher.maps, pool)


def of_maps(measure: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]) -> Distance:
    """The distance of the maps by this measure."""
    return lambda student, teacher: measure(student.maps, teacher.maps)


ABLATION, UNIFORM = "Douillard et al., ECCV 2020; AFC's Table 4: ", "Kang, Park, Han, CVPR 2022 (Table 4: uniform)"
GRAM = "Johnson et al., ECCV 2016; AFC's Table 4: Gram matrix"
# The weights are those of PODNet's ablation; of "pod", PODNet's; of "pixels", AFC's.
add_row("channel", "Preserves the sum over the channels", ABLATION + "channel", pooled(losses.over_channels), 2.0)
add_row("gap", "Preserves the mean of each channel", ABLATION + "GAP", pooled(losses.over_pixels), 5.0)
add_row("gram", "Preserves the Gram matrix of each map", GRAM, of_maps(losses.gram_distance), 0.1, grows=False)
add_row("pixels", "Uniform importance, weak reading", UNIFORM, of_maps(losses.whole_map_distance), 4.0)
add_row("pod", "Only PODNet's spatial term", ABLATION + "PODNet", pooled(losses.over_rows_and_columns), 3.0, nme=5.0)


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
    GradCAMSettings,
    "Preserves the attention on the top old class",
    "Dhar et al., CVPR 2019; AFC's Table 4: GradCam",
)
class GradCAM(MapsMethod[GradCAMSettings]):
    """Distils the attention of the last map for the student's highest old class."""

    needs_pooled_map = True

    def distance(self, learner: Learner) -> Distance:
        return Attention(learner.teacher.head, self.settings.summed)


@final
@register_row("uniform", AFCSettings, "AFC with uniform importance", UNIFORM)
class Uniform(LSCMethod[AFCSettings]):
    """Distils feature maps with the same weight for all channels."""

    needs_maps = True

    def weights(self, stage: Stage) -> dict[str, float]:
        return {"discrepancy": stage_weight(self.settings.lambda_disc, stage)}

    @mean_over_images(unless="exemplars_only")
    def loss(self, step: Step) -> Terms:
        """Classification plus the discrepancy with importance 1."""
        ones = [step.weights["discrepancy"].new_ones(()) for _ in step.student.maps]
        return distilled(self.settings, step, discrepancy=discrepancy(self.settings, step, ones))
