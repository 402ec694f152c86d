"""Measures on the embedded set what tuning does to exemplars: python tools/measure_mnemonics.py OUT.csv SEED...

For each class order and seed, stage after stage of `mnemonics-mini-b10-s5`: the exemplars as chosen are tuned in
several ways, and one row says how many pixel values change, by how much, and what becomes of the released objective
(cross-entropy of the stage's images, as they are, with the prototypes of the stored exemplars). The run itself goes on
with the recipe's own settings.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engram import recipe
from engram.contract import Training
from engram.contract.exemplars import choose_exemplars, unit_means
from engram.data.sources.load import load_store
from engram.data.stage import Stage
from engram.experiment.session import Session
from engram.methods.mnemonics import Mnemonics, prototype_entropy, to_uint8

# Rate, epochs, weight decay: as released; far higher, without and with the decay.
WAYS = ((1e-5, 1, 5e-4), (10.0, 10, 0.0), (10.0, 1, 5e-4))
COLUMNS = (
    *("seed", "stage", "lr", "epochs", "weight_decay", "storage", "share_changed", "mean_change"),
    *("entropy_before", "entropy_after"),
)


def entropy(session: Session, stage: Stage, images: Tensor, labels: Tensor, old: Tensor) -> float:
    """The released objective over the whole pool, with the prototypes of these images."""
    network = session.learner.network
    embedding = session.engine.embed(network, images)
    features = F.normalize(session.engine.embed(network, stage.pool.images), dim=1)
    new = torch.stack([F.normalize(embedding[labels == label].mean(dim=0), dim=0) for label in stage.new_labels])
    return float(F.cross_entropy(features @ torch.cat([old, new]).T, stage.pool.labels))


def rows_of(session: Session, stage: Stage, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a stage that was just trained."""
    learner, engine = session.learner, session.engine
    chosen = torch.cat(list(choose_exemplars(learner, stage, engine).values()))
    images, labels = stage.pool.pixels[chosen], stage.pool.labels[chosen]
    kept = learner.memory.samples()
    dim = learner.network.backbone.dim
    old = torch.zeros(0, dim) if kept is None else unit_means(learner, kept, stage.num_old, engine)
    objective, before = partial(prototype_entropy, labels=labels, old=old), entropy(session, stage, images, labels, old)
    for lr, epochs, decay in WAYS:
        how = Training(epochs=epochs, lr=lr, weight_decay=decay, schedule="constant", clip=None, remainder="keep")
        levels = engine.tune(learner, stage, images, stage.all_rows, objective, how, "new")
        for storage in ("truncate", "round"):
            result = to_uint8(levels, storage)
            apart = (result.float() - images.float()).abs()
            values = (seed, stage.index, lr, epochs, decay, storage, float((apart > 0).float().mean()))
            after = entropy(session, stage, result, labels, old)
            yield dict(zip(COLUMNS, (*values, float(apart.mean()), before, after), strict=True))


def main(out: str, *seeds: str) -> None:
    """Writes the rows of all stages and seeds."""
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for seed in seeds:
            config = replace(recipe("mnemonics-mini-b10-s5"), seed=int(seed), order=seed, device="cpu")
            session = Session(config.on_this_machine(), load_store(config.data))
            method, learner, engine = session.method, session.learner, session.engine
            assert isinstance(method, Mnemonics)
            for index in range(len(session.stream)):
                stage = session.stage(index)
                method.grow(learner, stage, engine)
                for number, phase in enumerate(method.phases(learner, stage, engine)):
                    for _ in engine.start(learner, stage, phase, number):
                        pass
                writer.writerows(rows_of(session, stage, int(seed)))
                file.flush()
                learner.memory.update(stage.pool, method.exemplars(learner, stage, engine), stage.num_seen)
                learner.snapshot_teacher()


if __name__ == "__main__":
    main(*sys.argv[1:])
