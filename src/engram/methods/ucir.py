"""UCIR: a unified classifier by rebalancing (Hou, Pan, Loy, Wang, Lin, CVPR 2019), also known as LUCIR.

With few exemplars and many new images, the weights of new classes become longer, old embeddings drift towards them, and
old images are classified as new classes. UCIR has three remedies: cosines instead of products, so that length does not
matter; embeddings keep the direction that they have under the old model; and an old image must be closer to its class
than to the most similar new classes, by a margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, final

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, Step, Terms, Training, register, setting
from engram.methods.blocks.cosine import IMAGENET_TRAINING, CosineMethod, cross_entropy, old_weight
from engram.methods.blocks.linear import SteppedSettings
from engram.methods.blocks.losses import cosine_distance, ranking
from engram.methods.blocks.phases import balanced_phase


@dataclass(frozen=True)
class RebalancingSettings(SteppedSettings):
    """Settings of UCIR's losses, in addition to those of the family; the defaults are those of CIFAR-100.

    lambda_embedding: weight of the embedding term, before sqrt(n_old / m). lambda_ranking, margin, rivals: of the
    ranking of old classes above new ones; the margin is in cosines, and rivals is the paper's K.
    """

    lambda_embedding: float = setting(5.0, at_least=0, after_base=True)
    lambda_ranking: float = setting(1.0, at_least=0, after_base=True)
    margin: float = setting(0.5, at_least=0, after_base=True)
    rivals: int = setting(2, at_least=1, after_base=True)


@dataclass(frozen=True)
class UCIRSettings(RebalancingSettings):
    """UCIR's settings. finetune: of the head on a balanced set, as on ImageNet-1000; 0 epochs: not at all."""

    finetune: Training = setting(
        Training(0, lr=0.01, schedule="steps", milestones=(0.5,), clip=None), after_base=True, role="finetune"
    )


IMAGENET = {"lambda_embedding": 10.0, **IMAGENET_TRAINING}


RebalancingSettingsT = TypeVar("RebalancingSettingsT", bound=RebalancingSettings)


class RebalancingMethod(CosineMethod[RebalancingSettingsT]):
    """UCIR's loss, for UCIR and what is built on it."""

    def weights(self, stage: Stage) -> dict[str, float]:
        return {"embedding": old_weight(self.settings.lambda_embedding, stage)}

    def loss(self, step: Step) -> Terms:
        """UCIR's three terms: cross-entropy, less-forget constraint, inter-class separation."""
        assert step.teacher is not None
        settings, student = self.settings, step.student
        apart = ranking(student.scores, step.labels, step.old, step.new, settings.rivals, settings.margin)
        return {
            "classification": cross_entropy(step),
            "embedding": step.weights["embedding"] * cosine_distance(student.embedding, step.teacher.embedding),
            "ranking": settings.lambda_ranking * apart,
        }


@final
@register(
    "ucir",
    settings=UCIRSettings,
    title="Unified classifier by rebalancing",
    paper="Hou et al., CVPR 2019",
    brightened=False,
    shares_base=True,
    recipes=RecipeHints(
        imagenet={
            "imagenet100": IMAGENET,
            "imagenet1000": {**IMAGENET, "finetune.epochs": 20, "finetune.weight_decay": 1e-4},
        }
    ),
)
class UCIR(RebalancingMethod[UCIRSettings]):
    """Keeps the direction of embeddings, and keeps old images closer to their class than to new classes."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        phases, weights = super().phases(learner, stage, passes), self.weights(stage)
        if stage.is_base or not self.settings.finetune.epochs:
            return phases
        # Trains only the weights of all classes: not the scale, and not the running statistics.
        balance = balanced_phase(
            learner, stage, passes, self.settings.finetune, self.loss, teacher=True, weights=weights, frozen=True
        )
        return [*phases, balance]
