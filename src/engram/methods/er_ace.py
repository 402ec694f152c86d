"""ER-ACE: experience replay with an asymmetric cross-entropy (Caccia et al., ICLR 2022).

With one softmax over all classes, new images push their features into the region of the old ones at the start of a
stage. So new images are classified among the new classes only. Exemplars, in a stream of their own, are classified
among all classes seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch

from engram.contract import Learner, Passes, Phase, Settings, Stage, Step, Terms, Training, register, setting
from engram.methods.blocks.linear import LinearMethod, classify, note_single_class, seen_columns
from engram.methods.blocks.losses import cross_entropy
from engram.methods.blocks.phases import main_phase
from engram.methods.blocks.second_stream import SecondStream

SINGLE_CLASS = (
    "new images are classified among the new classes only: such a class is learned only later, from its exemplars; "
    "bring two or more at a time"
)


def er_ace_training() -> Training:
    """160 epochs, a tenth of the rate after 80 and 120."""
    return Training(160, schedule="steps", milestones=(0.5, 0.75), clip=None)


@dataclass(frozen=True)
class ERACESettings(Settings):
    """ER-ACE's settings. replay: the exemplars in each batch, in addition to its new images."""

    replay: int = setting(32, at_least=1, after_base=True)
    train: Training = setting(factory=er_ace_training, role="main")


@final
@register(
    "er-ace",
    settings=ERACESettings,
    title="Experience Replay with Asymmetric Cross-Entropy",
    paper="Caccia, Aljundi, Asadi, Tuytelaars, Pineau, Belilovsky, ICLR 2022",
    selection="random",
    shares_base=True,
)
class ERACE(LinearMethod[ERACESettings]):
    """Classifies new images among the new classes and exemplars among all."""

    uses_teacher = False

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        note_single_class(learner, stage, SINGLE_CLASS)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        exemplar = stage.pool.exemplar
        new, old = stage.all_rows[~exemplar], stage.all_rows[exemplar]
        replayed = (SecondStream(old, self.settings.replay, "replay"),) if len(old) else ()
        loss = classify if stage.is_base else self.loss
        main = main_phase(stage, self.settings.train, loss, rows=new, extensions=replayed)
        return [replace(main, teacher=False)]

    def loss(self, step: Step) -> Terms:
        """The sum of two means: over the new images and over the exemplars (0 if the batch has none)."""
        columns = torch.where(step.exemplar[:, None], seen_columns(step), step.new)  # (B, K)
        losses = cross_entropy(step.student.logits, step.labels, columns)
        new, replayed = ~step.exemplar, step.exemplar
        return {
            "classification": (losses * new).sum() / new.sum().clamp(min=1),
            "replay": (losses * replayed).sum() / replayed.sum().clamp(min=1),
        }
