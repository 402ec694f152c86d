"""Exemplars: the default choice of them, balanced sets, and class means for NME (nearest mean of exemplars)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.learner import Learner
from engram.core.rng import generator
from engram.data.memory import select_rows
from engram.data.stage import Samples, Stage

if TYPE_CHECKING:
    from engram.contract.passes import Passes


def choose_exemplars(learner: Learner, stage: Stage, passes: Passes) -> dict[int, Tensor]:
    """The rows of the pool to keep of each new class, best first, by the memory's budget and selection."""
    quota = learner.memory.config.per_class(stage.num_seen)
    if quota == 0:
        return {}
    selection = learner.memory.config.selection
    rows = {label: stage.rows_of(label) for label in stage.new_labels}
    if quota is None:
        return rows
    chosen: dict[int, Tensor] = {}
    for label, embeddings in unit_embeddings(learner, stage, passes).items():
        picked = select_rows(selection, embeddings, quota, generator(learner.seed, "exemplars", label))
        chosen[label] = rows[label][picked]
    return chosen


def unit_embeddings(learner: Learner, stage: Stage, passes: Passes) -> dict[int, Tensor]:
    """The embeddings (N, D), each of length 1, of all images of each new class under the current network."""
    rows = [stage.rows_of(label) for label in stage.new_labels]
    unit = F.normalize(passes.embed(learner.network, stage.pool.images[torch.cat(rows)]), dim=1)
    return dict(zip(stage.new_labels, unit.split([len(own) for own in rows]), strict=True))


def balanced_rows(learner: Learner, stage: Stage, passes: Passes) -> Tensor:
    """As many rows of each class as the memory keeps; those of new classes are chosen by the current model."""
    quota = learner.memory.config.per_class(stage.num_seen)
    old = [stage.rows_of(label)[:quota] for label in range(stage.num_old)]
    return torch.cat([*old, *choose_exemplars(learner, stage, passes).values()])


def balanced_count(learner: Learner, stage: Stage) -> int:
    """The number of rows that `balanced_rows` will return."""
    quota = learner.memory.config.per_class(stage.num_seen)
    return sum(len(stage.rows_of(label)[:quota]) for label in range(stage.num_seen))


def class_means(learner: Learner, passes: Passes) -> Tensor | None:
    """The unit mean (K, D) of each class's unit embeddings, of its exemplars and of their mirror images.

    None if a class seen has no exemplar.
    """
    samples = learner.memory.samples()
    if samples is None or len(learner.memory.labels) < learner.num_classes:
        return None
    return unit_means(learner, samples, learner.num_classes, passes)


def unit_means(learner: Learner, samples: Samples, num_classes: int, passes: Passes) -> Tensor:
    """The unit mean (num_classes, D) of the unit embeddings of each class's images and of their mirror images."""
    unit = sum(
        F.normalize(passes.embed(learner.network, samples.images, mirror=mirror), dim=1) for mirror in (False, True)
    )
    assert isinstance(unit, Tensor)
    # Class by class, and not by index_add_, whose order of summation changes from run to run on a GPU.
    own = [unit[samples.rows_of(label).to(unit.device)] for label in range(num_classes)]
    totals = torch.stack([each.sum(dim=0) for each in own])
    # The length of the mean does not matter: it is normalised to 1.
    return F.normalize(totals, dim=1)
