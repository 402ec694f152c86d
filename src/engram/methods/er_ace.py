"""ER-ACE: experience replay with an asymmetric cross-entropy (Caccia et al., ICLR 2022).

With one softmax over all classes, new images push their features into the region of the old ones at the start of a
stage. So new images are classified among the new classes only. Replayed images, exemplars and as many images of each
new class, are classified among all classes seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from engram.contract import Learner, Passes, Phase, Stage, Step, Terms, register, setting
from engram.core.rng import generator
from engram.methods.blocks.batches import SecondStream
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, classify, seen_columns
from engram.methods.blocks.losses import cross_entropy
from engram.methods.blocks.phases import main_phase

REPLAY = "replay"  # the stream of replayed images


@dataclass(frozen=True)
class ERACESettings(SteppedSettings):
    """ER-ACE's settings. replay: the replayed images in each batch, in addition to its new images."""

    replay: int = setting(32, at_least=1, after_base=True)


def replayed_rows(learner: Learner, stage: Stage) -> Tensor:
    """The rows of the exemplars and of as many images of each new class, drawn at random; none without exemplars.

    Only images of a new class among all classes raise its scores above those of the old classes.
    """
    exemplars = stage.all_rows[stage.pool.exemplar]
    if not len(exemplars):
        return exemplars
    quota, rows = learner.memory.config.per_class(stage.num_seen), [exemplars]
    for label in stage.new_labels:
        own = stage.rows_of(label)
        rows.append(own[torch.randperm(len(own), generator=generator(learner.seed, "replay", label))[:quota]])
    return torch.cat(rows)


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
    """Classifies new images among the new classes and replayed ones among all."""

    uses_teacher = False
    unbalanced_memory = True

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        new, replayed = stage.all_rows[~stage.pool.exemplar], replayed_rows(learner, stage)
        streams = (SecondStream(replayed, self.settings.replay, REPLAY),) if len(replayed) else ()
        loss = classify if stage.is_base else self.loss
        return [main_phase(stage, self.settings.train, loss, rows=new, teacher=False, extensions=streams)]

    def loss(self, step: Step) -> Terms:
        """The sum of two means: over the new images, and over the replayed ones if there are any."""
        logits, main, replay = step.student.logits, step.streams["main"], step.streams.get(REPLAY)
        terms = {"classification": cross_entropy(logits[main], step.labels[main], step.new).mean()}
        if replay is not None:
            terms["replay"] = cross_entropy(logits[replay], step.labels[replay], seen_columns(step)).mean()
        return terms
