"""SS-IL: new and old told apart separately, every stage distilled by itself, exemplars in a stream of their own."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engram import recipe
from engram.contract import Phase, Step
from engram.contract.learner import Learner
from engram.core.errors import EngramError
from engram.data.memory import MemoryConfig
from engram.data.stage import Stage
from engram.experiment.session import Session
from engram.methods.ssil import GROUPS, NEWEST, SSIL, SSILSettings, group_stages
from engram.nn.network import Output
from helpers import learn_stage, make_stage, numeric_gradient, tiny_config, tiny_session, toy_store, train_phase

CAPACITY = 11


def session_of(min_group: int = 1, store: Any = None, divided: bool = True, **changes: Any) -> Session:
    config = tiny_config("ssil", **changes).with_settings(replay=4, min_group=min_group, divided=divided)
    return tiny_session(config, store)


def at_stage(session: Session, index: int) -> tuple[Stage, Phase]:
    """The stage of that index, with those before it learned and the head grown, and its one phase."""
    for before in range(index):
        learn_stage(session, before)
    stage = session.stage(index)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    return stage, phase


def buffers_of(sizes: tuple[int, ...], min_group: int) -> dict[str, Tensor]:
    """What the method keeps of the columns in the last of stages of so many classes."""
    session = session_of(min_group, toy_store(num_classes=CAPACITY, per_class=1))
    learner: Learner = session.learner
    for index in range(len(sizes)):
        labels = list(range(sum(sizes[: index + 1])))
        stage = replace(make_stage(index, sum(sizes[:index]), labels), sizes=sizes[: index + 1])
        session.method.grow(learner, stage, session.engine)
    return learner.buffers


def case(sizes: tuple[int, ...], seed: int, min_group: int = 1) -> tuple[Step, np.ndarray, np.ndarray]:
    """A random step of the last stage, in float64, and its scores: student's and teacher's."""
    random = np.random.default_rng(seed)
    seen, old, batch = sum(sizes), sum(sizes[:-1]), 9
    ours, theirs = (np.full((batch, CAPACITY), -np.inf) for _ in range(2))
    ours[:, :seen], theirs[:, :old] = random.normal(0, 3, (batch, seen)), random.normal(0, 3, (batch, old))
    labels = torch.tensor(np.r_[random.integers(old, seen, 5), random.integers(0, old, 4)])
    arrival = torch.full((CAPACITY,), 2**31)
    arrival[:seen] = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    student, teacher = (
        Output((), torch.zeros(batch, 1), scores, scores, torch.ones(()))
        for scores in (torch.tensor(ours, requires_grad=True), torch.tensor(theirs))
    )
    buffers, stage = buffers_of(sizes, min_group), torch.tensor(len(sizes) - 1)
    step = Step(labels, labels < old, student, teacher, {}, buffers, arrival=arrival, stage=stage)
    return step, ours, theirs


def slow_softmax(scores: np.ndarray, columns: list[int], temperature: float) -> dict[int, float]:
    exponentials = {c: math.exp(scores[c] / temperature) for c in columns}
    return {c: value / sum(exponentials.values()) for c, value in exponentials.items()}


def slow_loss(
    labels: list[int],
    ours: np.ndarray,
    theirs: np.ndarray,
    newest: list[int],
    others: list[int],
    groups: list[list[int]],
) -> tuple[float, float]:
    """Each sample within the newest or the others, over all samples; T^2 times the distillation of every group."""
    classification = distilled = 0.0
    for b, label in enumerate(labels):
        columns = newest if label in newest else others
        classification -= math.log(slow_softmax(ours[b], columns, 1)[label])
        for group in groups:
            student, teacher = (slow_softmax(scores[b], group, 2) for scores in (ours, theirs))
            distilled -= 4 * sum(teacher[c] * math.log(student[c]) for c in group)
    return classification / len(labels), distilled / len(labels)


# Stages of so many classes, min_group; the newest columns, and the groups that are distilled.
CASES = [
    ((4, 2, 3), 1, [6, 7, 8], [[0, 1, 2, 3], [4, 5]]),
    ((3, 2), 1, [3, 4], [[0, 1, 2]]),
    ((4, 1, 1, 1), 1, [6], [[0, 1, 2, 3], [4], [5]]),
    ((4, 1, 1, 1), 2, [5, 6], [[0, 1, 2, 3], [4, 5]]),
    ((4, 1, 1, 1), 3, [4, 5, 6], [[0, 1, 2, 3, 4, 5]]),
    ((2, 1, 1, 1, 1), 2, [4, 5], [[0, 1, 2], [3, 4]]),
]


@pytest.mark.parametrize(("sizes", "min_group", "newest", "groups"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_its_formula(
    sizes: tuple[int, ...], min_group: int, newest: list[int], groups: list[list[int]], seed: int
) -> None:
    step, ours, theirs = case(sizes, seed, min_group)
    others = [column for column in range(sum(sizes)) if column not in newest]
    labels = step.labels.tolist()
    terms = SSIL(SSILSettings(min_group=min_group)).loss(step)
    classification, distilled = slow_loss(labels, ours, theirs, newest, others, groups)
    assert terms["classification"].item() == pytest.approx(classification, rel=1e-9, abs=1e-12)
    assert terms["distillation"].item() == pytest.approx(distilled, rel=1e-9)
    (gradient,) = torch.autograd.grad(terms["classification"] + terms["distillation"], step.student.logits)
    seen = sum(sizes)

    def total(scores: np.ndarray) -> float:
        return sum(slow_loss(labels, scores, theirs, newest, others, groups))

    numeric = numeric_gradient(total, ours[:, :seen])
    np.testing.assert_allclose(gradient[:, :seen].numpy(), numeric, atol=1e-7)
    assert (gradient[:, seen:] == 0).all()


def test_new_images_push_no_old_class_and_exemplars_no_new_one() -> None:
    step, *_ = case((4, 2, 3), 0)
    terms = SSIL(SSILSettings()).loss(step)
    (gradient,) = torch.autograd.grad(terms["classification"], step.student.logits)
    assert (gradient[~step.exemplar][:, :6] == 0).all()
    assert (gradient[step.exemplar][:, 6:] == 0).all()
    assert (gradient[~step.exemplar][:, 6:9] != 0).all()
    assert (gradient[step.exemplar][:, :6] != 0).all()


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12), least=st.integers(1, 9))
def test_groups_are_stages_in_a_row_of_so_many_classes(sizes: list[int], least: int) -> None:
    groups = group_stages(sizes, least)
    assert groups == sorted(groups, reverse=True)
    assert set(groups) == set(range(max(groups) + 1))
    counts = Counter[int]()
    for group, size in zip(groups, sizes, strict=True):
        counts[group] += size
    if sum(sizes) < least:
        assert set(groups) == {0}
    else:
        assert min(counts.values()) >= least
    if least == 1:
        assert groups == list(reversed(range(len(sizes))))
    # None has more stages than it needs, but for the oldest.
    for group in range(max(groups)):
        first = groups.index(group)
        assert counts[group] - sizes[first] < least


def test_groups_of_the_columns_follow_the_stages() -> None:
    held = buffers_of((4, 1, 1, 1), 2)
    assert held[NEWEST].tolist() == [False] * 5 + [True] * 2 + [False] * 4
    assert held[GROUPS][:6].tolist() == [1, 1, 1, 1, 0, 0]


# One new class


def test_one_new_class_gets_no_gradient_in_its_own_stage() -> None:
    step, *_ = case((4, 1, 1, 1), 3)
    terms = SSIL(SSILSettings()).loss(step)
    (gradient,) = torch.autograd.grad(terms["classification"] + terms["distillation"], step.student.logits)
    assert (gradient[:, 6] == 0).all()
    assert (gradient[~step.exemplar][:, :4] != 0).all(), "the base stage's classes are distilled on new images too"


@pytest.mark.parametrize("min_group", [1, 2])
def test_the_row_of_one_new_class_stays_as_it_was_unless_groups_are_joined(min_group: int) -> None:
    store = toy_store(num_classes=5)
    session = session_of(min_group, store, base=3, increment=1)
    stage, phase = at_stage(session, 1)
    phase = replace(phase, training=replace(phase.training, weight_decay=0.0))
    network = session.learner.network
    before = {name: network.get_parameter(f"head.{name}").detach().clone() for name in ("weight", "bias")}
    train_phase(session, stage, phase)
    for name, value in before.items():
        after = network.get_parameter(f"head.{name}").detach()
        assert not torch.equal(after[:3], value[:3])
        assert torch.equal(after[3], value[3]) == (min_group == 1), name


def test_it_says_once_that_single_classes_are_learned_late() -> None:
    for min_group, notes in ((1, 1), (2, 0)):
        session = session_of(min_group, toy_store(num_classes=4, per_class=6), base=2, increment=1, epochs=1)
        for index in range(3):
            learn_stage(session, index)
        assert len(session.learner.notes) == notes
        assert all("min_group" in note for note in session.learner.notes)


# What a stage does


def test_every_batch_has_new_images_and_exemplars() -> None:
    session = session_of()
    stage, phase = at_stage(session, 1)
    seen: list[tuple[int, int]] = []

    def spy(step: Step) -> dict[str, Tensor]:
        assert torch.equal(step.exemplar, step.old[step.labels])
        seen.append((int((~step.exemplar).sum()), int(step.exemplar.sum())))
        return phase.loss(step)

    train_phase(session, stage, replace(phase, loss=spy))
    assert seen == [(8, 4)] * 6, "24 new images in batches of 8, two epochs"
    assert phase.images == len(phase.rows()) == 24


def test_new_rows_have_nothing_in_common_at_first() -> None:
    session = session_of()
    at_stage(session, 1)
    weight = session.learner.network.get_parameter("head.weight").detach()
    old, new = weight[:2], weight[2:4]
    assert new.mean(dim=0).abs().max() < 1e-6
    assert new.std() > 0.01
    assert old.mean(dim=0).abs().max() > 0.01, "the base stage's classes are told apart from nothing else"


@pytest.mark.parametrize("divided", [True, False])
def test_the_rate_falls_with_the_stages(divided: bool) -> None:
    session = session_of(divided=divided)
    rates: list[float] = []
    for index in range(3):
        stage = session.stage(index)
        session.method.grow(session.learner, stage, session.engine)
        (phase,) = session.method.phases(session.learner, stage, session.engine)
        rates.append(phase.training.lr)
        assert [name for name, _ in phase.streams] == ([] if index == 0 else ["beside"])
        session.learner.memory.update(
            stage.pool, session.method.exemplars(session.learner, stage, session.engine), stage.num_seen
        )
    assert rates == pytest.approx([0.05, 0.05 / 2, 0.05 / 3] if divided else [0.05] * 3)


def test_its_memory_is_the_first_images_of_each_class() -> None:
    session = session_of(memory=MemoryConfig("total", 9, "first"))
    for index in range(3):
        learn_stage(session, index)
        memory, kept = session.learner.memory, 9 // (2 * index + 2)
        for label in memory.labels:
            assert memory.of(label).sources.tolist() == list(range(12 * label, 12 * label + kept))


def test_recipes_have_the_cifar_settings() -> None:
    config = recipe("ssil-cifar100-b50-s10")
    settings = config.settings
    assert isinstance(settings, SSILSettings)
    assert (settings.replay, settings.temperature, settings.min_group) == (32, 2.0, 1)
    train = settings.train
    assert (train.epochs, train.batch_size, train.lr, train.weight_decay, train.clip) == (160, 128, 0.1, 5e-4, None)
    assert (train.schedule, train.milestones, train.factor) == ("steps", (0.5, 0.75), 0.1)
    for name in ("ssil-cifar100-b50-s50", "ssil-mini-b10-s5", "ssil-folder"):
        assert recipe(name).memory.selection == "first"
        assert recipe(name).predictor == "cnn"
    assert str(config.memory) == "per_class=20"


@pytest.mark.parametrize("change", [{"replay": 0}, {"min_group": 0}, {"temperature": 0.0}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(EngramError, match=f"{name} must be"):
        tiny_config("ssil").with_settings(**change)
