"""SS-IL: separated softmax for incremental learning (Ahn, Kwak, Lim, Bang, Kim, Moon, ICCV 2021).

With one softmax over all classes, the many new images push down the scores of old classes, which have few images. So
new images are classified over the new classes only, exemplars over the old classes only, and the previous model is
distilled within the classes of each earlier stage. Every batch has exemplars, as a second stream of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, Step, Terms, mean_over_images, register, setting
from engram.methods.blocks.batches import SecondStream
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, classify, note_single_class, seen_columns
from engram.methods.blocks.losses import cross_entropy, distillation_by_group
from engram.methods.blocks.phases import main_phase

NEWEST, GROUPS = "ssil.newest", "ssil.groups"
SINGLE_CLASS = (
    "new classes are only compared with each other, so a single class is learned only later, from its exemplars; add "
    "two or more classes at a time (min_group joins stages; the method's card describes the disadvantage)"
)


@dataclass(frozen=True)
class SSILSettings(SteppedSettings):
    """SS-IL's settings; the defaults are those of CIFAR-100.

    temperature: of both softmaxes in the distillation. replay: exemplars in each batch, in addition to the new images.
    divided: divide the learning rate by the number of the stage, counted from 1. min_group: the least number of classes
    of a softmax; neighbouring stages are joined until they have it.
    """

    temperature: float = setting(2.0, above=0, after_base=True)
    replay: int = setting(32, at_least=1, after_base=True)
    divided: bool = setting(True, after_base=True)
    min_group: int = setting(1, at_least=1, after_base=True)


def group_stages(sizes: Sequence[int], least: int) -> list[int]:
    """The group of each stage, 0 for that of the newest stage. sizes: classes per stage.

    Stages are joined from the newest to the oldest; a group is full once it has `least` classes. If the last group is
    not full, its stages join the previous group.
    """
    groups, group, classes = [0] * len(sizes), 0, 0
    for place in reversed(range(len(sizes))):
        groups[place] = group
        classes += sizes[place]
        if classes >= least:
            group, classes = group + 1, 0
    full = max(0, group - 1)
    return [min(each, full) for each in groups]


def centre_new_rows(learner: Learner, stage: Stage) -> None:
    """Subtract their mean from the rows of the new classes.

    New classes are only compared with each other, so no gradient would ever change the mean, and it would shift all new
    scores relative to the old ones.
    """
    with torch.no_grad():
        new = learner.network.get_parameter("head.weight")[stage.num_old : stage.num_seen]
        new -= new.mean(dim=0)


@final
@register(
    "ssil",
    settings=SSILSettings,
    title="Separated Softmax",
    paper="Ahn, Kwak, Lim, Bang, Kim, Moon, ICCV 2021",
    selection="first",
    recipes=RecipeHints(
        imagenet={"imagenet1000": {"train.epochs": 100, "train.milestones": (0.4, 0.8), "train.weight_decay": 1e-4}}
    ),
)
class SSIL(LinearMethod[SSILSettings]):
    """Classifies new and old classes separately, and distils every earlier stage separately."""

    class_buffers = (NEWEST, GROUPS)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Open the rows of the new classes, and store which columns share a softmax in this stage."""
        super().grow(learner, stage, passes)
        if not stage.is_base:
            centre_new_rows(learner, stage)
        head, least = learner.network.head, self.settings.min_group
        sizes = stage.arrival(stage.num_seen).unique_consecutive(return_counts=True)[1].tolist()
        newest, groups = torch.zeros(head.capacity, dtype=torch.bool), torch.zeros(head.capacity, dtype=torch.int64)
        newest[: stage.num_seen] = _by_class(group_stages(sizes, least), sizes) == 0
        groups[: stage.num_old] = _by_class(group_stages(sizes[:-1], least), sizes[:-1])
        learner.store(NEWEST, newest.to(head.seen.device))
        learner.store(GROUPS, groups.to(head.seen.device))
        if least == 1:
            note_single_class(learner, stage, SINGLE_CLASS)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        training = self.settings.train
        if self.settings.divided:
            training = replace(training, lr=training.lr / (stage.index + 1))
        if stage.is_base:
            return [main_phase(stage, training, classify)]
        exemplar = stage.pool.exemplar
        new, old = stage.all_rows[~exemplar], stage.all_rows[exemplar]
        stream = (SecondStream(old, self.settings.replay),) if len(old) else ()
        return [main_phase(stage, training, self.loss, rows=new, extensions=stream)]

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Classification within the newest classes or within the other classes, and distillation within each group."""
        assert step.teacher is not None
        ours, theirs, newest = step.student.logits, step.teacher.logits, step.buffers[NEWEST]
        columns = torch.where(newest[step.labels][:, None], newest, seen_columns(step) & ~newest)  # (B, K)
        temperature = self.settings.temperature
        distilled = distillation_by_group(ours, theirs, step.buffers[GROUPS], step.old, temperature)
        return {
            "classification": cross_entropy(ours, step.labels, columns).mean(),
            "distillation": temperature**2 * distilled.mean(),
        }


def _by_class(groups: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The group of each class, given the group and the number of classes of each stage."""
    return torch.repeat_interleave(torch.tensor(groups, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64))
