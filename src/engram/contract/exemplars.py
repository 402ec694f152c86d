"""Exemplars: the default choice of them, balanced sets, and class means for NME (nearest mean of exemplars)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.learner import Learner
from engram.core.rng import generator
from engram.data.memory import RESERVOIR, reservoir_order, select_rows
from engram.data.stage import Samples, Stage

if TYPE_CHECKING:
    from engram.contract.passes import Passes


def choose_exemplars(learner: Learner, stage: Stage, passes: Passes) -> dict[int, Tensor]:
    """The rows of the pool to keep of each class, best first, by the memory's budget and selection.

    Of the new classes, and of the old ones with new images, which are chosen together with its exemplars. For a
    reservoir, of all classes.
    """
    config = learner.memory.config
    if config.selection == RESERVOIR:
        rows = reservoir_order(stage.pool.sources, learner.seed)[: config.size]
        labels = stage.pool.labels[rows]
        return {label: rows[labels == label] for label in labels.unique().tolist()}
    return _chosen(learner, stage, passes, [*stage.new_labels, *stage.returning_labels])


def _chosen(learner: Learner, stage: Stage, passes: Passes, labels: Sequence[int]) -> dict[int, Tensor]:
    """As many rows of each of these classes as the memory may keep, best first."""
    quota, seed = learner.memory.config.per_class(stage.num_seen), learner.seed
    if quota == 0:
        return {}
    rows = {label: stage.rows_of(label) for label in labels}
    if quota is None:
        return rows
    if learner.memory.config.selection == RESERVOIR:
        sources = stage.pool.sources
        return {label: own[reservoir_order(sources[own], seed)[:quota]] for label, own in rows.items()}
    chosen: dict[int, Tensor] = {}
    for label, embeddings in unit_embeddings(learner, stage, passes, labels).items():
        again = (stage.index,) if label < stage.num_old else ()
        random = generator(seed, "exemplars", label, *again)
        chosen[label] = rows[label][select_rows(learner.memory.config.selection, embeddings, quota, random)]
    return chosen


def unit_embeddings(
    learner: Learner, stage: Stage, passes: Passes, labels: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """The embeddings (N, D), each of length 1, of all images of each of these classes under the current network.

    labels: None: the new classes.
    """
    labels = stage.new_labels if labels is None else labels
    rows = [stage.rows_of(label) for label in labels]
    unit = F.normalize(passes.embed(learner.network, stage.pool.images[torch.cat(rows)]), dim=1)
    return dict(zip(labels, unit.split([len(own) for own in rows]), strict=True))


def balanced_rows(learner: Learner, stage: Stage, passes: Passes) -> Tensor:
    """As many rows of each class as the memory keeps; those of new classes are chosen by the current model."""
    quota = learner.memory.config.per_class(stage.num_seen)
    old = [stage.rows_of(label)[:quota] for label in range(stage.num_old)]
    return torch.cat([*old, *_chosen(learner, stage, passes, stage.new_labels).values()])


def balanced_count(learner: Learner, stage: Stage) -> int:
    """The number of rows that `balanced_rows` will return."""
    quota = learner.memory.config.per_class(stage.num_seen)
    return sum(len(stage.rows_of(label)[:quota]) for label in range(stage.num_seen))


def class_means(learner: Learner, passes: Passes) -> Tensor | None:
    """The unit mean (K, D) of each class's unit embeddings, of its exemplars and of their mirror images.

    None if a class seen has no exemplar; in a reservoir, the mean of such a class is zero.
    """
    samples, is_reservoir = learner.memory.samples(), learner.memory.config.selection == RESERVOIR
    if samples is None or (len(learner.memory.labels) < learner.num_classes and not is_reservoir):
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
