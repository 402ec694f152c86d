"""DDE on both hosts: neighbours, the entropy of an image together with them, the momentum effect and its removal."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import make_config, make_store
from engram import EngramError, recipe, run
from engram.contract import Phase, Step
from engram.core.events import BaseReused
from engram.data.augment import Draws, augment
from engram.engine.planning import plan_epochs
from engram.experiment.base_cache import StageCache
from engram.experiment.session import Session
from engram.methods import dde, find_method
from engram.methods.dde import (
    DDESettings,
    MomentumEffect,
    NeighbourLogits,
    Neighbours,
    TrackMomentum,
    fit_removal,
    momentum_effect,
    nearest,
    neighbour_entropy,
)
from engram.nn.heads import CosineHead, Head, LSCHead
from engram.nn.network import Network
from helpers import (
    assert_resumes_to,
    buffers_of,
    learn_stage,
    make_stage,
    parameters_of,
    run_stopped,
    run_whole,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)

HOSTS = ["ucir-dde", "podnet-dde"]
hosts = pytest.mark.parametrize("method", HOSTS)


def at_second_stage(method: str, **changes: Any) -> tuple[Session, Any]:
    """A session with a base stage behind it, and its second stage, whose head is grown."""
    settings = {name: changes.pop(name) for name in list(changes) if name.startswith(("dde__", "train__"))}
    session = tiny_session(tiny_config(method, **changes).with_settings(**settings))
    learn_stage(session, 0)
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    return session, stage


def main_phase(session: Session, stage: Any) -> Phase:
    return session.method.phases(session.learner, stage, session.engine)[0]


# The neighbours


def slow_nearest(unit: np.ndarray, places: list[int], count: int) -> list[list[int]]:
    """The places of the nearest by Euclidean distance, one pair at a time."""
    found: list[list[int]] = []
    for i, one in enumerate(unit):
        distances = [(math.sqrt(((one - unit[j]) ** 2).sum()), j) for j in places if j != i]
        found.append([j for _, j in sorted(distances)[:count]])
    return found


@pytest.mark.parametrize("entries", [1, 40, 2**24])
@pytest.mark.parametrize("count", [1, 4, 12])
def test_nearest_are_those_of_brute_force(count: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dde, "ENTRIES", entries)
    random = np.random.default_rng(0)
    unit = random.normal(size=(30, 5))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    places = sorted(random.permutation(30)[:8].tolist())
    found, is_there = nearest(torch.tensor(unit), torch.tensor(places), count)
    assert found.shape == is_there.shape == (30, count)
    for i, expected in enumerate(slow_nearest(unit, places, count)):
        assert len(expected) == min(count, 7 if i in places else 8)
        assert found[i][is_there[i]].tolist() == expected


def test_an_image_with_nobody_near_has_no_neighbour() -> None:
    unit = F.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    _, is_there = nearest(unit, torch.tensor([1]), 2)
    assert is_there.tolist() == [[True, False], [False, False], [True, False]]
    assert not nearest(unit, torch.zeros(0, dtype=torch.int64), 2)[1].any()


class Seen(NamedTuple):
    """What the loss sees of the neighbours in one step."""

    labels: Tensor
    neighbours: Tensor
    shares: Tensor


def spied(session: Session, stage: Any, phase: Phase) -> list[Seen]:
    """What the loss sees in each step of the phase."""
    seen: list[Seen] = []

    def spy(step: Step) -> dict[str, Tensor]:
        neighbours = step.extra(NeighbourLogits)
        assert neighbours is not None
        seen.append(Seen(step.labels.clone(), neighbours.logits.clone(), neighbours.shares.clone()))
        return phase.loss(step)

    train_phase(session, stage, replace(phase, loss=spy))
    return seen


def eval_logits(network: Network, images: Tensor) -> Tensor:
    """The logits with running statistics, as the head gives them, without the removal."""
    network = copy.deepcopy(network).eval()
    network.head.adjustments.clear()
    with torch.no_grad():
        return network(images).logits


@hosts
@pytest.mark.parametrize("remainder", ["keep", "drop"])
def test_a_step_sees_the_neighbours_that_the_teacher_finds_in_the_epoch(method: str, remainder: str) -> None:
    """With no rate the network stays, so the logits tell which images, and how augmented, were looked at."""
    session, stage = at_second_stage(method, batch_size=7, dde__neighbours=4, train__remainder=remainder)
    learner, engine = session.learner, session.engine
    # The running statistics stay too.
    for module in learner.network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0
    phase = main_phase(session, stage)
    training = replace(phase.training, lr=0.0, epochs=2)
    seen = spied(session, stage, replace(phase, training=training))
    plan = plan_epochs(training, engine.augmentation, stage.all_rows, range(2), (1, 0), learner.seed)
    steps, size = training.batches(len(stage.pool))
    assert len(seen) == 2 * steps
    padded = F.pad(stage.pool.images, (0, 0, 1, 1, 1, 1))
    used = min(steps * size, len(stage.pool))
    for epoch in range(2):
        part = slice(epoch * steps, (epoch + 1) * steps)
        rows = plan.rows[part].flatten()[:used]
        flat = Draws(*(value[part].flatten()[:used] for value in plan.draws.tensors()))
        images = augment(padded, rows, flat, engine.image_size)
        with torch.no_grad():
            unit = F.normalize(learner.teacher(images).embedding, dim=1).double().numpy()
        logits = eval_logits(learner.network, images)
        labels = stage.pool.labels[rows]
        places = [i for i in range(used) if labels[i] >= stage.num_old]
        for i, expected in enumerate(slow_nearest(unit, places, 4)):
            step = seen[epoch * steps + i // size]
            assert step.labels[i % size] == labels[i]
            assert torch.allclose(step.neighbours[i % size], logits[expected], atol=1e-4), (epoch, i)
            assert step.shares[i % size].tolist() == [0.25] * 4


def test_where_an_epoch_ends_in_a_smaller_batch_nothing_beyond_it_is_a_neighbour() -> None:
    """More are asked for than there are: every other new image is found, and no more."""
    session, stage = at_second_stage("ucir-dde", batch_size=7, train__remainder="keep")
    assert len(stage.pool) % 7
    new = stage.pool.labels >= stage.num_old
    for step in spied(session, stage, replace(main_phase(session, stage), extensions=(Neighbours(len(stage.pool)),))):
        found = (step.shares > 0).sum(dim=1)
        assert torch.equal(found, new.sum() - (step.labels >= stage.num_old).long())


def test_neighbours_may_be_looked_for_among_the_first_alone() -> None:
    session, stage = at_second_stage("ucir-dde", batch_size=50)
    phase = main_phase(session, stage)
    (step,) = spied(
        session,
        stage,
        replace(phase, training=replace(phase.training, epochs=1), extensions=(Neighbours(2, first=1),)),
    )
    first = int((step.labels >= stage.num_old).nonzero()[0])
    expected = torch.tensor([[1.0, 0.0]]).repeat(len(step.labels), 1)
    expected[first] = 0  # its own only candidate
    assert torch.equal(step.shares, expected)
    others = torch.arange(len(step.labels)) != first
    assert torch.equal(step.neighbours[others][:, 0], step.neighbours[others][:1, 0].expand(int(others.sum()), -1))


@hosts
def test_looking_at_neighbours_leaves_no_trace_in_the_network(method: str) -> None:
    """Ten neighbours of an image or one: with a loss that does not mind them the network comes out the same."""

    def learned(count: int) -> dict[str, Tensor]:
        session, stage = at_second_stage(method)
        phase = main_phase(session, stage)

        def loss(step: Step) -> dict[str, Tensor]:
            assert all(module.training for module in session.learner.network.modules())
            return {"classification": F.cross_entropy(step.student.logits, step.labels)}

        train_phase(session, stage, replace(phase, loss=loss, extensions=(Neighbours(count), TrackMomentum())))
        return parameters_of(session.learner.network) | buffers_of(session.learner.network)

    one, ten = learned(1), learned(10)
    assert all(torch.equal(value, ten[name]) for name, value in one.items())


# The loss


def slow_entropy(logits: np.ndarray, label: int, neighbours: np.ndarray) -> float:
    """-log of half own probability and half the mean of the neighbours' at the label; own alone where none is."""

    def probability(scores: np.ndarray) -> float:
        return math.exp(scores[label]) / sum(math.exp(score) for score in scores if score > -math.inf)

    if len(neighbours) == 0:
        return -math.log(probability(logits))
    around = sum(probability(scores) for scores in neighbours) / len(neighbours)
    return -math.log((probability(logits) + around) / 2)


def random_case(seed: int, seen: int = 4, batch: int = 6, count: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, those of neighbours (classes not seen have minus infinity), and labels."""
    random = np.random.default_rng(seed)
    logits, neighbours = random.normal(0, 3, (batch, 7)), random.normal(0, 3, (batch, count, 7))
    logits[:, seen:], neighbours[:, :, seen:] = -np.inf, -np.inf
    return logits, neighbours, random.integers(0, seen, batch)


@pytest.mark.parametrize("seen", [4, 1])
def test_entropy_is_its_formula_with_as_many_neighbours_as_there_are(seen: int) -> None:
    logits, neighbours, labels = random_case(0, seen)
    counts = [5, 5, 3, 1, 0, 5]
    shares = np.array([[(1 / n if k < n else 0.0) for k in range(5)] for n in counts])
    got = neighbour_entropy(*(torch.tensor(value) for value in (logits, labels, neighbours, shares)))
    expected = [slow_entropy(logits[i], labels[i], neighbours[i][: counts[i]]) for i in range(6)]
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_entropy_gradient_is_that_of_the_formula_and_neighbours_get_none() -> None:
    logits, neighbours, labels = random_case(1)
    counts = [5, 5, 3, 1, 0, 5]
    shares = torch.tensor([[(1 / n if k < n else 0.0) for k in range(5)] for n in counts], dtype=torch.float64)
    at, near = torch.tensor(logits, requires_grad=True), torch.tensor(neighbours, requires_grad=True)
    neighbour_entropy(at, torch.tensor(labels), near, shares).sum().backward()
    assert near.grad is None
    assert at.grad is not None
    for i, c in np.ndindex(6, 4):
        label = int(labels[i])
        up, down = logits[i].copy(), logits[i].copy()
        up[c] += 1e-6
        down[c] -= 1e-6
        slow = [slow_entropy(each, label, neighbours[i][: counts[i]]) for each in (up, down)]
        assert at.grad[i, c].item() == pytest.approx((slow[0] - slow[1]) / 2e-6, abs=1e-7)
    assert not at.grad[:, 4:].any()


def test_entropy_far_from_any_probability_stays_finite() -> None:
    """A label that neither the image nor its neighbours give a chance to, beyond float32's exponentials."""
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    loss = neighbour_entropy(logits, torch.tensor([0]), torch.tensor([[[0.0, 400.0]]]), torch.ones(1, 1))
    assert loss.item() == pytest.approx(400 + math.log(2))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isfinite().all()


@hosts
def test_the_other_terms_are_the_host_s(method: str) -> None:
    session, stage = at_second_stage(method)
    host = find_method(method.removesuffix("-dde"))
    ours = session.config.settings
    plain = host.make(
        host.settings(**{f.name: getattr(ours, f.name) for f in fields(host.settings) if hasattr(ours, f.name)})
    )
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    learner, phase = session.learner, main_phase(session, stage)
    weights = {name: torch.tensor(value) for name, value in phase.weights.items()}
    labels = torch.tensor([0, 1, 2, 3] * 2)
    arrival = stage.arrival(learner.network.head.capacity)
    learner.network.train()
    student, teacher = learner.network(images), learner.teacher(images)
    alone = Step(labels, labels < 2, student, teacher, weights, {}, arrival=arrival, stage=torch.tensor(1))
    others = plain.loss(alone)  # pyright: ignore[reportAttributeAccessIssue]
    assert {name: value.item() for name, value in phase.loss(alone).items()} == {
        name: value.item() for name, value in others.items()
    }, "without neighbours it is the host"
    near = torch.randn(8, 3, student.logits.shape[1])
    terms = phase.loss(replace(alone, extras=(NeighbourLogits(near, torch.full((8, 3), 1 / 3)),)))
    assert list(terms) == list(others)
    for name, term in terms.items():
        assert (term.item() == others[name].item()) == (name != "classification"), name
    expected = [
        slow_entropy(student.logits[i].double().detach().numpy(), int(labels[i]), near[i].double().numpy())
        for i in range(8)
    ]
    assert terms["classification"].item() == pytest.approx(np.mean(expected), rel=1e-4)


def test_old_images_are_ranked_against_the_one_new_class_and_not_against_the_batch() -> None:
    session = tiny_session(replace(tiny_config("ucir-dde"), increment=1))
    learn_stage(session, 0)
    stage = session.stage(1)
    assert stage.num_new == 1
    session.method.grow(session.learner, stage, session.engine)
    network, labels = session.learner.network, torch.tensor([0, 1, 2, 2, 0])
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    student, phase = network(images), main_phase(session, stage)
    arrival, teacher = stage.arrival(network.head.capacity), session.learner.teacher(images)
    weights = {name: torch.tensor(value) for name, value in phase.weights.items()}
    step = Step(labels, labels < 2, student, teacher, weights, {}, arrival=arrival, stage=torch.tensor(1))
    terms = phase.loss(step)
    scores = student.scores.detach().double().numpy()
    hinges = [max(0.0, 0.5 - scores[i, labels[i]] + scores[i, 2]) for i in (0, 1, 4)]
    assert terms["ranking"].item() == pytest.approx(np.mean(hinges), rel=1e-5)


# The momentum effect


@hosts
def test_the_direction_is_the_decaying_sum_of_the_batches_means_and_starts_anew_each_stage(method: str) -> None:
    session = tiny_session(tiny_config(method))
    effect = momentum_effect(session.learner.network)
    for index in range(3):
        stage = session.stage(index)
        before = effect.moving.clone()
        assert before.any() == (index > 0)
        session.method.grow(session.learner, stage, session.engine)
        assert not effect.moving.any()
        assert torch.equal(effect.before, before)
        by_hand = np.zeros(effect.moving.shape[0])
        phases = session.method.phases(session.learner, stage, session.engine)
        for number, phase in enumerate(phases):
            means: list[np.ndarray] = []

            def spy(step: Step, phase: Phase = phase, means: list[np.ndarray] = means) -> dict[str, Tensor]:
                means.append(step.student.embedding.detach().double().numpy().mean(axis=0))
                return phase.loss(step)

            train_phase(session, stage, replace(phase, loss=spy), number)
            for mean in means if number == 0 else []:
                by_hand = 0.9 * by_hand + mean
        # Of the main phase alone, whatever follows it.
        assert np.allclose(effect.moving.numpy(), by_hand, atol=1e-5)
        session.method.finish(session.learner, stage, session.engine)
        chosen = session.method.exemplars(session.learner, stage, session.engine)
        session.learner.memory.update(stage.pool, chosen, stage.num_seen)
        session.learner.snapshot_teacher()


def slow_effect(head: Head, embedding: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """cos(h, u) times the head's score of u, for each class, written out."""
    unit, u = embedding / np.linalg.norm(embedding), direction / np.linalg.norm(direction)
    cosine = float(unit @ u)
    assert isinstance(head, (CosineHead, LSCHead))
    weight = head.weight.detach().double().numpy()
    scores: list[float] = []
    for rows in weight:
        alike = [float(row @ u) / (float(np.linalg.norm(row)) or 1.0) for row in np.atleast_2d(rows)]
        if isinstance(head, CosineHead):
            scores.append(alike[0])
        else:
            near = [2 * head.sharpness**2 * (each - 1) for each in alike]
            total = sum(math.exp(each) for each in near)
            scores.append(sum(math.exp(each) / total * each for each in near))
    return cosine * np.array(scores)


@hosts
def test_predictions_are_freed_of_half_the_effect_after_the_base(method: str) -> None:
    session = tiny_session(tiny_config(method, epochs=4))
    network, images = session.learner.network, toy_store().test.images
    pixels = torch.from_numpy(np.ascontiguousarray(images))
    for index in range(2):
        learn_stage(session, index)
        effect = momentum_effect(network)
        assert effect.factors.tolist() == [0, 0.5 * index]
        embedding, scores = session.engine.infer(network, pixels)
        network.head.adjustments.clear()
        _, raw = session.engine.infer(network, pixels)
        network.head.adjustments.append("effect")
        assert torch.equal(scores, raw) == (index == 0), "the base stage is untouched"
        seen = network.head.num_classes
        for i in range(len(embedding)):
            effects = slow_effect(network.head, embedding[i].double().numpy(), effect.moving.double().numpy())[:seen]
            expected = raw[i, :seen].double().numpy() - 0.5 * index * effects
            assert np.allclose(scores[i, :seen].numpy(), expected, atol=1e-5)
        assert scores[:, seen:].isneginf().all()


@hosts
def test_training_sees_the_scores_as_they_are_and_the_teacher_as_they_are_predicted(method: str) -> None:
    session = tiny_session(tiny_config(method))
    for index in range(2):
        learn_stage(session, index)
    learner = session.learner
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        predicted, taught = learner.network.eval()(images), learner.teacher(images)
        trained = eval_logits(learner.network, images)
    assert torch.equal(predicted.logits, taught.logits)
    assert not torch.allclose(predicted.logits, trained)
    scale = predicted.scale.item()
    seen = learner.num_classes
    assert torch.allclose(scale * predicted.scores[:, :seen], predicted.logits[:, :seen], atol=1e-5)
    session.engine.bind(learner, 6)
    learner.network.train()
    before = buffers_of(learner.network)
    forward = session.engine._forward
    assert forward is not None
    assert torch.allclose(forward.predict(images).logits, trained, atol=1e-5), "and so do the neighbours"
    assert not forward.predict(images).logits.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in buffers_of(learner.network).items())
    student = learner.network(images)
    learner.network.head.adjustments.clear()
    assert torch.equal(student.logits, learner.network(images).logits)


@hosts
def test_a_saved_model_predicts_as_it_did(method: str) -> None:
    session = tiny_session(tiny_config(method))
    for index in range(2):
        learn_stage(session, index)
    state = {name: value.clone() for name, value in session.learner.state_dict().items()}
    assert {f"{whose}.head.effect.moving" for whose in ("network", "teacher")} <= state.keys()
    other = tiny_session(session.config)
    other.learner.load_state_dict(state)
    pixels = torch.from_numpy(np.ascontiguousarray(toy_store().test.images))
    assert torch.equal(
        session.engine.infer(session.learner.network, pixels)[1], other.engine.infer(other.learner.network, pixels)[1]
    )


@hosts
@pytest.mark.parametrize("removal", ["fixed", "learned"])
def test_after_the_base_stage_nothing_is_taken_away(method: str, removal: str) -> None:
    session = tiny_session(tiny_config(method).with_settings(dde__removal=removal))
    learn_stage(session, 0)
    effect = momentum_effect(session.learner.network)
    assert effect.moving.any()
    assert not effect.factors.any()


def test_no_direction_yet_has_no_effect() -> None:
    effect, head = MomentumEffect(4), CosineHead(4, 3)
    head.grow(3, torch.Generator().manual_seed(0))
    effect.remove(0.3, 0.5)
    assert not effect(torch.randn(5, 4), head).any()


def test_settings_may_leave_the_removal_or_the_neighbours_out() -> None:
    session, stage = at_second_stage("ucir-dde", dde__removal="none", dde__neighbours=0)
    assert main_phase(session, stage).extensions == (TrackMomentum(),)
    assert not momentum_effect(session.learner.network).factors.any()
    assert momentum_effect(at_second_stage("ucir-dde", dde__strength=0.2)[0].learner.network).factors[
        1
    ] == pytest.approx(0.2)


# The learned removal


@hosts
def test_a_learned_removal_lowers_the_entropy_of_the_balanced_set(method: str) -> None:
    session = tiny_session(tiny_config(method, epochs=4).with_settings(dde__removal="learned", dde__fit_rate=0.05))
    stage = [learn_stage(session, index) for index in range(3)][-1]
    learner, settings = session.learner, session.config.settings.dde  # pyright: ignore[reportAttributeAccessIssue]
    samples = learner.memory.samples()
    assert samples is not None
    embedding = session.engine.embed(learner.network, samples.images)
    effect, labels = momentum_effect(learner.network), samples.labels

    def entropy(before: float, moving: float) -> float:
        effect.remove(before, moving)
        with torch.no_grad():
            logits = learner.network.eval().classify((embedding,), embedding).logits
        return F.cross_entropy(logits, labels).item()

    learned = effect.factors.tolist()
    assert learned != pytest.approx([0, settings.strength], abs=1e-3)
    blend, strength = fit_removal(settings, learner, stage, embedding, labels)
    fitted = [float(strength * (1 - blend)), float(strength * blend)]
    assert learned == pytest.approx(fitted, abs=1e-4), "of the direction before, and of this stage's"
    assert entropy(*fitted) < entropy(0, settings.strength) - 1e-4


def test_the_learned_removal_is_adam_on_the_formula() -> None:
    """Against the formula written out, with Adam by hand, in one batch an epoch."""
    session = tiny_session(tiny_config("ucir-dde").with_settings(dde__removal="learned"))
    stage = [learn_stage(session, index) for index in range(3)][-1]
    learner = session.learner
    head, effect = learner.network.head, momentum_effect(learner.network)
    settings = DDESettings(removal="learned", fit_epochs=6, fit_rate=0.3)  # far enough to have to turn back
    random = np.random.default_rng(0)
    given, labels = random.normal(size=(20, effect.moving.shape[0])), random.integers(0, 6, 20)
    assert isinstance(head, CosineHead)
    assert head.scale is not None
    head.scale.data.fill_(4.0)
    scale, weight = head.scale.item(), head.weight.detach().double().numpy()

    def loss(numbers: np.ndarray) -> float:
        total = 0.0
        for h, label in zip(given, labels, strict=True):
            raw = np.array([h @ w / np.linalg.norm(h) / np.linalg.norm(w) for w in weight])
            before, moving = (slow_effect(head, h, v.double().numpy()) for v in (effect.before, effect.moving))
            z = scale * (raw - numbers[1] * ((1 - numbers[0]) * before + numbers[0] * moving))
            total += math.log(sum(math.exp(each) for each in z)) - z[label]
        return total / len(labels)

    numbers, mean, square = np.array([1.0, 0.5]), np.zeros(2), np.zeros(2)
    for t in range(1, 7):
        steps = np.eye(2) * 1e-5
        gradient = np.array([(loss(numbers + step) - loss(numbers - step)) / 2e-5 for step in steps])
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        rate = 0.3 if t <= 3 else 0.03
        numbers = numbers - rate * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
    got = fit_removal(settings, learner, stage, torch.tensor(given).float(), torch.tensor(labels))
    assert [float(each) for each in got] == pytest.approx(numbers.tolist(), abs=2e-4)


# Runs


@hosts
def test_a_run_stopped_inside_an_epoch_resumes_exactly(method: str, tmp_path: Path) -> None:
    config = make_config(method).with_settings(dde__removal="learned", dde__neighbours=4)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    expected = run_whole(config, make_store(), whole)
    assert expected["network.head.effect.moving"].any()
    # In the middle of an epoch of stage 1: 4 steps an epoch in stage 0, 5 then.
    saved = run_stopped(config, make_store(), stopped, 15)
    assert (saved.stage, saved.phase, saved.epoch) == (1, "main", 2)
    assert_resumes_to(expected, stopped, make_store())
    predictions = [(directory / "stages" / "002.safetensors").read_bytes() for directory in (stopped, whole)]
    assert predictions[0] == predictions[1]


@hosts
@pytest.mark.parametrize("batch_size", [3, 40])
def test_one_class_at_a_time_trains_to_finite_numbers(method: str, batch_size: int) -> None:
    """With fewer images of a new class than neighbours asked for, too."""
    store = toy_store(num_classes=4, per_class=6)
    config = replace(tiny_config(method, batch_size=batch_size), base=1, increment=1)
    session = tiny_session(config.with_settings(dde__removal="learned"), store)
    for index in range(4):
        learn_stage(session, index)
    state = parameters_of(session.learner.network) | buffers_of(session.learner.network)
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert momentum_effect(session.learner.network).moving.any()


@hosts
def test_the_work_of_neighbours_is_in_the_plan(method: str) -> None:
    session = tiny_session(tiny_config(method))
    host = tiny_session(tiny_config(method.removesuffix("-dde")))
    ours, theirs = (each.plan()[1].phases[0].work for each in (session, host))
    assert ours / theirs == pytest.approx((1.5 + 0.08 * 11) / 1.5)


# Settings


@hosts
def test_ten_neighbours_and_one_of_the_first_where_there_are_many_classes(method: str) -> None:
    settings = recipe(f"{method}-cifar100-b50-s10").settings.dde  # pyright: ignore[reportAttributeAccessIssue]
    assert settings.neighbour_search(make_stage(1, 50, [0, 50])) == Neighbours(10)
    assert settings.neighbour_search(make_stage(1, 499, [499])) == Neighbours(10)
    assert settings.neighbour_search(make_stage(1, 500, [500])) == Neighbours(1, first=10_000)
    assert settings.neighbour_search(make_stage(0, 0, [0, 1])) is None
    assert DDESettings(neighbours=3).neighbour_search(make_stage(1, 500, [500])) == Neighbours(3, first=10_000)
    assert (settings.removal, settings.strength) == ("fixed", 0.5)


@pytest.mark.parametrize("name", ["neighbours", "strength", "fit_epochs", "fit_rate"])
def test_negative_settings_are_refused(name: str) -> None:
    with pytest.raises(EngramError, match=f"{name} must be at least 0, got -1"):
        DDESettings(**{name: -1})  # pyright: ignore[reportArgumentType]


def test_an_unknown_removal_is_refused_with_the_nearest() -> None:
    with pytest.raises(EngramError, match=r"no removal 'fix'.*fixed"):
        DDESettings(removal="fix")  # pyright: ignore[reportArgumentType]


@hosts
def test_a_base_stage_out_of_the_cache_brings_its_direction(method: str, tmp_path: Path) -> None:
    cache, config = StageCache(tmp_path), make_config(method).with_settings(dde__removal="learned")
    first, second = (list(run(config, make_store(), cache=cache)) for _ in range(2))
    assert any(isinstance(event, BaseReused) for event in second)
    results = [events[-1].result for events in (first, second)]  # pyright: ignore[reportAttributeAccessIssue]
    assert [s["accuracy_by_stage"] for s in results[0]["stages"]] == [
        s["accuracy_by_stage"] for s in results[1]["stages"]
    ]
