"""GeoDL: geodesic-flow distillation (Simon, Koniusz, Harandi, CVPR 2021).

UCIR without its ranking, and with another idea of how far the features of a batch have moved: the old and the new
model's features span two subspaces, and the distance is taken through all the subspaces on the shortest way between
them instead of in one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from engram.data.stage import Stage
from engram.learner import Learner
from engram.methods._base import Passes, Phase, Step, Terms, register
from engram.methods.cosine import CosineMethod, CosineSettings, cosine_phases, cross_entropy, old_weight
from engram.methods.geodesic import Centre, features, geodesic_distance, geodesic_similarity
from engram.methods.settings import AFTER_BASE, check_choice, refuse_negative

Reading = Literal["released", "paper"]


@dataclass(frozen=True)
class GeoDLSettings(CosineSettings):
    """GeoDL's settings beside the host's; the defaults are UCIR's on CIFAR-100, as none were published for it.

    lambda_geodesic: weight of the distance, before sqrt(n_old / m). distance: the quadratic form that the released code
    uses, or the paper's 1 - cosine. centre: which mean is taken from the features before their span is, that of the
    batch over its samples or, as in the released code, that of each sample over its dimensions.
    """

    lambda_geodesic: float = field(default=5.0, metadata=AFTER_BASE)
    distance: Reading = field(default="released", metadata=AFTER_BASE)
    centre: Centre = field(default="batch", metadata=AFTER_BASE)

    def __post_init__(self) -> None:
        refuse_negative(self, "lambda_geodesic")
        check_choice(self, "distance", ("released", "paper"))
        check_choice(self, "centre", ("batch", "sample"))


@final
@register(
    "geodl",
    settings=GeoDLSettings,
    title="Geodesic-flow distillation",
    paper="Simon et al., CVPR 2021",
    brightened=False,
    shares_base=True,
)
class GeoDL(CosineMethod[GeoDLSettings]):
    """Keeps the features of a batch near to what they were, along the geodesic between their subspaces."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = {"geodesic": old_weight(self.settings.lambda_geodesic, stage)}
        return cosine_phases(self.settings, stage, self.loss, weights)

    def loss(self, step: Step) -> Terms:
        """Cross-entropy and the distance of the last map's features through the geodesic flow."""
        assert step.teacher is not None
        ours, theirs = features(step.student.maps[-1]), features(step.teacher.maps[-1])
        measure = geodesic_distance if self.settings.distance == "released" else geodesic_similarity
        return {
            "classification": cross_entropy(step),
            "geodesic": step.weights["geodesic"] * measure(ours, theirs, self.settings.centre).float(),
        }
