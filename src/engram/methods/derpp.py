"""DER++: dark experience replay (Buzzega, Boschini, Porrello, Abati, Calderara, NeurIPS 2020).

Each image keeps the logits that it had when it was last trained on in its own stage. Later, one batch of exemplars is
kept close to these logits, and another one, drawn independently, is classified. There is no teacher: the stored logits
are the only trace of earlier networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from engram.contract import ImageTensor, Learner, Passes, Phase, Stage, Step, Terms, register, setting
from engram.methods.blocks.batches import SecondStream
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, seen_columns
from engram.methods.blocks.losses import cross_entropy
from engram.methods.blocks.phases import main_phase

STORED = "logits"  # of each image; minus infinity for outputs that did not exist, and for an image never trained on
FOR_LOGITS, FOR_LABELS = "logits", "labels"  # the two streams of exemplars


@dataclass(frozen=True)
class DERPPSettings(SteppedSettings):
    """DER++'s settings.

    alpha: weight of the distance from the stored logits. beta: weight of the classification of exemplars. replay: the
    exemplars in each batch for either of them, in addition to its new images.
    """

    alpha: float = setting(0.3, at_least=0, after_base=True)
    beta: float = setting(0.5, at_least=0, after_base=True)
    replay: int = setting(32, at_least=1, after_base=True)


def stored_distance(logits: Tensor, stored: Tensor) -> Tensor:
    """Mean squared difference of logits (B, K) and stored ones, over all finite stored values; 0 if there are none."""
    exists = stored.isfinite()
    # Masked before they are subtracted: the gradient of an infinite difference is not a number.
    apart = logits.masked_fill(~exists, 0) - stored.masked_fill(~exists, 0)
    return apart.square().sum() / exists.sum().clamp(min=1)


@final
@register(
    "derpp",
    settings=DERPPSettings,
    title="Dark Experience Replay++",
    paper="Buzzega, Boschini, Porrello, Abati, Calderara, NeurIPS 2020",
    selection="random",
)
class DERPP(LinearMethod[DERPPSettings]):
    """Keeps the logits of exemplars close to the stored ones, and classifies other exemplars."""

    uses_teacher = False
    returning_classes = True
    unbalanced_memory = True
    family = None  # a shared base stage has no logits of its images
    image_state: Mapping[str, ImageTensor] = MappingProxyType({STORED: ImageTensor(per_class=True, fill=-torch.inf)})

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        exemplar, train = stage.pool.exemplar, self.settings.train
        new, old = stage.all_rows[~exemplar], stage.all_rows[exemplar]
        if not len(old):  # the base stage
            return [main_phase(stage, train, self.learn_new, teacher=False)]
        streams = tuple(SecondStream(old, self.settings.replay, name) for name in (FOR_LOGITS, FOR_LABELS))
        return [main_phase(stage, train, self.loss, rows=new, teacher=False, extensions=streams)]

    def learn_new(self, step: Step) -> Terms:
        """Classification of the new images, whose logits are stored."""
        part = step.streams["main"]
        logits = step.student.logits[part]
        step.images.write(STORED, logits, part)
        return {"classification": cross_entropy(logits, step.labels[part], seen_columns(step)).mean()}

    def loss(self, step: Step) -> Terms:
        """Classification + alpha * distance from the stored logits + beta * classification of other exemplars."""
        logits, stored, settings = step.student.logits, step.images.read(STORED), self.settings
        replayed, labelled = step.streams[FOR_LOGITS], step.streams[FOR_LABELS]
        again = cross_entropy(logits[labelled], step.labels[labelled], seen_columns(step))
        return {
            **self.learn_new(step),
            "logits": settings.alpha * stored_distance(logits[replayed], stored[replayed]),
            "replay": settings.beta * again.mean(),
        }
