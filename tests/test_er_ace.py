"""ER-ACE: new images among the new classes, exemplars among all, each term a mean over its own images."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import recipe
from engram.contract import Output, Step
from engram.core.errors import EngramError
from engram.methods.er_ace import ERACE, ERACESettings
from helpers import begin_stage, learn_stage, tiny_config, tiny_session, train_phase

OLD, SEEN, CAPACITY = 4, 7, 9


def random_scores(labels: list[int], seed: int, replayed: int) -> tuple[Step, np.ndarray]:
    """A random step of a stage that brings classes 4, 5 and 6; the first images are replayed, the others are new."""
    scores = np.full((len(labels), CAPACITY), -np.inf)
    scores[:, :SEEN] = np.random.default_rng(seed).normal(0, 3, (len(labels), SEEN))
    arrival = torch.tensor([0] * OLD + [1] * (SEEN - OLD) + [2**31] * (CAPACITY - SEEN))
    logits, label = torch.tensor(scores, requires_grad=True), torch.tensor(labels)
    output = Output((), torch.zeros(len(labels), 1), logits, logits, torch.ones(()))
    streams = {"replay": slice(replayed)} if replayed else {}
    streams |= {"main": slice(replayed, None)}
    step = Step(label, label < OLD, output, None, {}, {}, arrival=arrival, stage=torch.tensor(1), streams=streams)
    return step, scores


def slow_entropy(scores: np.ndarray, label: int, columns: range) -> float:
    return math.log(sum(math.exp(scores[c]) for c in columns)) - scores[label]


@pytest.mark.parametrize(("labels", "replayed"), [([0, 3, 5, 4, 6, 5, 5], 3), ([1, 2, 0, 4], 3), ([5, 6], 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_its_formula(labels: list[int], replayed: int, seed: int) -> None:
    step, scores = random_scores(labels, seed, replayed)
    new = [slow_entropy(scores[b], y, range(OLD, SEEN)) for b, y in enumerate(labels) if b >= replayed]
    again = [slow_entropy(scores[b], y, range(SEEN)) for b, y in enumerate(labels) if b < replayed]
    terms = ERACE(ERACESettings()).loss(step)
    assert terms["classification"].item() == pytest.approx(sum(new) / len(new), rel=1e-9)
    assert ("replay" in terms) == bool(again)
    if again:
        assert terms["replay"].item() == pytest.approx(sum(again) / len(again), rel=1e-9)


def test_new_images_push_no_old_class_and_replayed_ones_push_all() -> None:
    step, _ = random_scores([0, 3, 4, 4, 6, 5], seed=2, replayed=3)
    terms = ERACE(ERACESettings()).loss(step)
    (gradient,) = torch.autograd.grad(terms["classification"] + terms["replay"], step.student.logits)
    assert (gradient[3:, :OLD] == 0).all()
    assert (gradient[3:, OLD:SEEN] != 0).all()
    assert (gradient[:3, :SEEN] != 0).all()
    assert (gradient[:, SEEN:] == 0).all()


def test_a_batch_has_new_images_and_replayed_ones_of_every_class() -> None:
    session = tiny_session(tiny_config("er-ace", epochs=4).with_settings(replay=4))
    learn_stage(session, 0)
    stage = begin_stage(session, 1)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    replayed: dict[int, set[int]] = {}

    def spy(step: Step) -> dict[str, Tensor]:
        assert not step.exemplar[step.streams["main"]].any()
        assert len(step.labels) == 8 + 4
        ids = step.images.ids[step.streams["replay"]].tolist()
        for label, image in zip(step.labels[step.streams["replay"]].tolist(), ids, strict=True):
            replayed.setdefault(label, set()).add(image)
        return phase.loss(step)

    train_phase(session, stage, replace(phase, loss=spy))
    assert {label: len(images) for label, images in replayed.items()} == dict.fromkeys(range(4), 3), "as the memory"


def test_a_stage_without_exemplars_trains_on_its_new_images() -> None:
    session = tiny_session(tiny_config("er-ace"))
    learn_stage(session, 0)
    for label in session.learner.memory.labels:
        session.learner.memory.keep(label, torch.zeros(0, dtype=torch.int64))
    learn_stage(session, 1)
    assert session.learner.num_classes == 4


def test_recipes_and_limits() -> None:
    settings = recipe("er-ace-cifar100-b50-s10").settings
    assert isinstance(settings, ERACESettings)
    assert (settings.replay, settings.train.epochs, settings.train.milestones) == (32, 160, (0.5, 0.75))
    with pytest.raises(EngramError, match="replay must be at least 1"):
        ERACESettings(replay=0)
