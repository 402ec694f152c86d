"""UCIR: its losses against slow loops, what a stage imprints, holds and moves, and what its base stage depends on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import EngramError, recipe
from engram.contract import Step
from engram.data.stage import NEVER
from engram.experiment.recipes import recipe_names
from engram.experiment.session import Session
from engram.methods import find_method
from engram.methods.blocks.cosine import old_weight
from engram.methods.blocks.losses import cosine_distance, ranking
from engram.methods.ucir import UCIR, UCIRSettings
from engram.nn.heads import CosineHead
from engram.nn.network import Output
from helpers import (
    buffers_of,
    drift,
    learn_stage,
    make_stage,
    parameters_of,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)

SEEDS = range(4)
INF = math.inf


def slow_ranking(
    scores: np.ndarray, labels: list[int], num_old: int, num_seen: int, rivals: int, margin: float
) -> float:
    """The mean over images of old classes and their highest-scoring new classes of max(0, margin - s_y + s_k)."""
    values: list[float] = []
    for row, label in zip(scores, labels, strict=True):
        if label < num_old:
            new = sorted((float(row[k]) for k in range(num_old, num_seen)), reverse=True)
            values += [max(0.0, margin - float(row[label]) + rival) for rival in new[:rivals]]
    return sum(values) / len(values) if values else 0.0


def slow_cosine_distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    total = 0.0
    for one, other in zip(ours, theirs, strict=True):
        product = sum(a * b for a, b in zip(one, other, strict=True))
        total += 1 - product / math.sqrt(sum(a * a for a in one)) / math.sqrt(sum(b * b for b in other))
    return total / len(ours)


def columns(num_old: int, num_seen: int, capacity: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(capacity)
    return places < num_old, (places >= num_old) & (places < num_seen)


def random_scores(seed: int, num_seen: int, capacity: int, batch: int = 9) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    scores = random.uniform(-1, 1, (batch, capacity))
    scores[:, num_seen:] = -INF
    return scores, random.integers(num_seen, size=batch).tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("num_old", "num_new"), [(5, 3), (5, 2), (5, 1), (1, 1)])
def test_ranking_is_its_formula(seed: int, num_old: int, num_new: int) -> None:
    scores, labels = random_scores(seed, num_old + num_new, capacity=10)
    old, new = columns(num_old, num_old + num_new, 10)
    expected = slow_ranking(scores, labels, num_old, num_old + num_new, 2, 0.5)
    assert expected > 0
    assert ranking(torch.tensor(scores), torch.tensor(labels), old, new, 2, 0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize("num_new", [1, 3])
def test_ranking_gradient_is_finite_and_that_of_the_formula(num_new: int) -> None:
    scores, labels = random_scores(7, 4 + num_new, capacity=8)
    old, new = columns(4, 4 + num_new, 8)
    at = torch.tensor(scores, requires_grad=True)
    gradient = torch.autograd.grad(ranking(at, torch.tensor(labels), old, new, 2, 0.5), at)[0].numpy()
    for place in np.ndindex(scores.shape):
        up, down = scores.copy(), scores.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        slow = [slow_ranking(each, labels, 4, 4 + num_new, 2, 0.5) for each in (up, down)]
        assert gradient[place] == pytest.approx((slow[0] - slow[1]) / 2e-6, abs=1e-8)


def test_ranking_without_an_image_of_an_old_class_is_zero_with_no_gradient() -> None:
    scores, _ = random_scores(0, 6, capacity=8)
    old, new = columns(4, 6, 8)
    at = torch.tensor(scores, requires_grad=True)
    loss = ranking(at, torch.full((len(scores),), 5), old, new, 2, 0.5)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, at)[0].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_cosine_distance_is_its_formula_and_leaves_the_teacher_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    ours, theirs = random.normal(size=(5, 6)), random.normal(size=(5, 6))
    one, other = torch.tensor(ours, requires_grad=True), torch.tensor(theirs, requires_grad=True)
    loss = cosine_distance(one, other)
    assert loss.item() == pytest.approx(slow_cosine_distance(ours, theirs), rel=1e-5)
    loss.backward()
    assert one.grad is not None
    assert one.grad.any()
    assert other.grad is None


def test_weight_is_lambda_times_the_root_of_old_over_new() -> None:
    assert old_weight(5.0, make_stage(1, 8, [0, 8, 9])) == pytest.approx(5 * math.sqrt(8 / 2))
    settings = UCIRSettings()
    assert (settings.lambda_embedding, settings.margin, settings.rivals, settings.lambda_ranking) == (5, 0.5, 2, 1)


def step_of(scores: np.ndarray, labels: list[int], num_old: int, num_seen: int, scale: float) -> Step:
    random = np.random.default_rng(3)
    embedding, other = (torch.tensor(random.normal(size=(len(labels), 4))) for _ in range(2))
    values, factor = torch.tensor(scores), torch.tensor(scale, dtype=torch.float64)
    student = Output((), embedding, values, factor * values, factor)
    arrival = torch.full((scores.shape[1],), NEVER)
    arrival[:num_old], arrival[num_old:num_seen] = 0, 1
    weights = {"embedding": torch.tensor(3.0, dtype=torch.float64)}
    labels_, exemplar = torch.tensor(labels), torch.tensor(labels) < num_old
    teacher = Output((), other, values, values, factor)
    return Step(labels_, exemplar, student, teacher, weights, {}, arrival=arrival, stage=torch.tensor(1))


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_terms_are_their_formulas_and_the_ranking_does_not_see_the_scale(scale: float) -> None:
    scores, labels = random_scores(1, 6, capacity=8)
    step = step_of(scores, labels, 4, 6, scale)
    assert step.teacher is not None
    terms = UCIR(UCIRSettings(lambda_ranking=0.7)).loss(step)
    entropy = 0.0
    for row, label in zip(scores, labels, strict=True):
        entropy += math.log(sum(math.exp(scale * s) for s in row[:6])) - scale * row[label]
    assert terms["classification"].item() == pytest.approx(entropy / len(labels))
    apart = slow_cosine_distance(step.student.embedding.numpy(), step.teacher.embedding.numpy())
    assert terms["embedding"].item() == pytest.approx(3 * apart, rel=1e-5)
    assert terms["ranking"].item() == pytest.approx(0.7 * slow_ranking(scores, labels, 4, 6, 2, 0.5))
    assert UCIR(UCIRSettings(margin=0.1)).loss(step)["ranking"] < UCIR(UCIRSettings()).loss(step)["ranking"]


def weights_of(session: Session) -> Tensor:
    head = session.learner.network.head
    assert isinstance(head, CosineHead)
    return head.weight.detach()


def test_new_weights_are_the_mean_directions_of_their_class_under_the_old_model() -> None:
    session = tiny_session(tiny_config("ucir"))
    learn_stage(session, 0)
    before, engine = weights_of(session).clone(), session.engine
    stage = session.stage(1)
    session.method.grow(session.learner, stage, engine)
    norm = before[:2].norm(dim=1).mean().item()
    for label in stage.new_labels:
        embeddings = engine.embed(session.learner.network, stage.pool.images[stage.rows_of(label)])
        direction = torch.stack([row / row.norm() for row in embeddings]).mean(dim=0)
        weight = weights_of(session)[label]
        assert torch.allclose(weight / weight.norm(), direction / direction.norm(), atol=1e-5)
        assert weight.norm().item() == pytest.approx(norm, rel=1e-5)
    assert torch.equal(weights_of(session)[:2], before[:2])


def test_old_weights_stay_and_new_ones_and_the_scale_move_on() -> None:
    session = tiny_session(tiny_config("ucir"))
    learn_stage(session, 0)
    scale, old = session.learner.network.head.scale, weights_of(session)[:2].clone()
    assert scale is not None
    carried = scale.item()
    assert carried != 1
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    assert scale.item() == carried
    imprinted, before = weights_of(session)[2:4].clone(), parameters_of(session.learner.teacher)
    main, _ = session.method.phases(session.learner, stage, session.engine)
    train_phase(session, stage, main)
    assert torch.equal(weights_of(session)[:2], old), "not even by weight decay"
    assert not torch.equal(weights_of(session)[2:4], imprinted)
    assert scale.item() != carried
    assert not torch.equal(
        session.learner.network.backbone.get_parameter("conv.weight"), before["backbone.conv.weight"]
    )


def test_fine_tuning_moves_the_weights_of_all_classes_on_a_balanced_set_and_nothing_else() -> None:
    session = tiny_session(tiny_config("ucir").with_settings(finetune__epochs=3, finetune__batch_size=4))
    stage = learn_stage(session, 0)
    assert [phase.name for phase in session.method.phases(session.learner, stage, session.engine)] == ["main"]
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    main, balance = session.method.phases(session.learner, stage, session.engine)
    train_phase(session, stage, main, 0)
    network, old, new = session.learner.network, weights_of(session)[:2].clone(), weights_of(session)[2:4].clone()
    others = parameters_of(network) | buffers_of(network)
    rows, quota = balance.rows(), session.config.memory.size
    assert [int((stage.pool.labels[rows] == label).sum()) for label in range(4)] == [quota] * 4
    assert balance.images == len(rows)
    train_phase(session, stage, balance, 1)
    assert not torch.equal(weights_of(session)[:2], old)
    assert not torch.equal(weights_of(session)[2:4], new)
    after = parameters_of(network) | buffers_of(network)
    moved = [name for name, value in after.items() if not torch.equal(value, others[name])]
    assert moved == ["head.weight"], "neither the scale nor the norms' statistics"


def test_only_imagenet_1000_is_fine_tuned() -> None:
    names = [name for name in recipe_names() if name.startswith("ucir-") and not name.startswith("ucir-dde")]
    tuned = [name for name in names if recipe(name).settings.finetune.epochs]  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(tuned) == ["ucir-imagenet1000-b500-s10", "ucir-imagenet1000-b500-s5"]
    training: Any = recipe(tuned[0]).settings
    assert (training.finetune.epochs, training.finetune.lr, training.finetune.weight_decay) == (20, 0.01, 1e-4)
    assert training.finetune.schedule == "steps"
    assert training.finetune.milestones == (0.5,)


def test_a_larger_lambda_holds_the_embeddings() -> None:
    config = tiny_config("ucir", epochs=6)
    held, free = (drift(config.with_settings(lambda_embedding=factor)) for factor in (50.0, 0.0))
    assert held < 0.7 * free


@pytest.mark.parametrize("batch_size", [2, 5])
def test_one_class_a_stage_trains_to_finite_numbers(batch_size: int) -> None:
    session = tiny_session(replace(tiny_config("ucir", batch_size=batch_size), increment=1))
    for index in range(3):
        learn_stage(session, index)
    state = parameters_of(session.learner.network) | buffers_of(session.learner.network)
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_one_loss_serves_all_stages() -> None:
    session = tiny_session(tiny_config("ucir"))
    losses = []
    for index in range(3):
        stage = learn_stage(session, index)
        losses += [phase.loss for phase in session.method.phases(session.learner, stage, session.engine)]
    assert losses[0] != losses[1]
    assert losses[1] == losses[2]


@pytest.mark.parametrize("name", ["lambda_embedding", "lambda_ranking", "margin"])
def test_negative_settings_are_refused(name: str) -> None:
    with pytest.raises(EngramError, match=f"{name} must be at least 0, got -1"):
        UCIRSettings(**{name: -1.0})  # pyright: ignore[reportArgumentType]


def test_no_rival_is_refused() -> None:
    with pytest.raises(EngramError, match="rivals must be at least 1, got 0"):
        UCIRSettings(rivals=0)


def test_recipes_have_the_paper_s_schedule_and_the_small_ones_a_short_one() -> None:
    train = recipe("ucir-cifar100-b50-s10").settings.train  # pyright: ignore[reportAttributeAccessIssue]
    assert (train.epochs, train.lr, train.schedule, train.milestones, train.factor) == (
        160,
        0.1,
        "steps",
        (0.5, 0.75),
        0.1,
    )
    assert (train.weight_decay, train.batch_size, train.clip) == (5e-4, 128, None)
    assert recipe("ucir-mini-b10-s5").settings.train.epochs == 16  # pyright: ignore[reportAttributeAccessIssue]
    assert recipe("ucir-cifar100-b50-s10").memory.per_class(100) == 20
    assert find_method("ucir").predictors == ("cnn", "nme")


def test_both_predictors_come_from_one_run() -> None:
    session = tiny_session(tiny_config("ucir", epochs=8), toy_store())
    for index in range(2):
        learn_stage(session, index)
    accuracy, _, arrays = session.evaluate(1)
    assert set(accuracy) == {"cnn", "nme"}
    assert min(accuracy.values()) > 25
    assert arrays
