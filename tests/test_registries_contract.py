"""What every registered optimiser, schedule, selection, predictor and augmentation policy keeps to."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engram.contract import ImageOutputs, Part, Training
from engram.contract.optimisers import find_optimiser, new_state
from engram.contract.predictors import PREDICTORS, need_means, predicted_scores
from engram.contract.schedules import learning_rates
from engram.contract.settings import OPTIMISERS, SCHEDULES
from engram.core.rng import generator
from engram.data.memory import SELECTIONS, select_rows
from engram.data.policies import POLICIES
from engram.engine.flat_optimiser import FlatOptimiser
from engram.experiment.session import Session
from engram.experiment.stage_work import best_label, class_scores
from helpers import (
    assert_resumes_to,
    begin_stage,
    learn_stage,
    parameters_of,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)

LR = {"sgd": 0.05}  # of the tiny runs; 0.003 for others, as for most that divide by the gradient's size
# Selections whose first rows are what they choose if they choose fewer.
ORDERED = ("herding", "closest", "random", "first")

optimisers = pytest.mark.parametrize("optimiser", OPTIMISERS.names())
schedules = pytest.mark.parametrize("schedule", SCHEDULES.names())
policies = pytest.mark.parametrize("policy", POLICIES.names())
selections = pytest.mark.parametrize("selection", SELECTIONS.names())


def trained_by(optimiser: str) -> Training:
    return Training(
        epochs=3, batch_size=8, lr=LR.get(optimiser, 0.003), remainder="keep", optimiser=optimiser, weight_decay=0.1
    )


@optimisers
def test_an_optimiser_reduces_the_loss(optimiser: str) -> None:
    session = tiny_session(tiny_config("replay"))
    stage = begin_stage(session, 0)
    (main,) = session.method.phases(session.learner, stage, session.engine)
    phase = replace(main, training=replace(trained_by(optimiser), epochs=6))
    loop = session.engine.start(session.learner, stage, phase, 0)
    for _ in loop:
        pass
    losses = [epoch.terms["classification"] for epoch in loop.finished(wait=True)]
    assert losses[-1] < 0.8 * losses[0]


@optimisers
def test_a_run_by_it_resumes_exactly(optimiser: str, tmp_path: Path) -> None:
    """Stopped inside the main phase of a later stage; the fine-tuning after it is by SGD."""
    config = tiny_config("afc", epochs=2).with_settings(train=trained_by(optimiser), importance_samples=8)
    store = toy_store(4)
    whole = run_whole(config, store, tmp_path / "whole")
    run_stopped(config, store, tmp_path / "run", 4, starts(1))
    assert_resumes_to(whole, tmp_path / "run", store)


@optimisers
def test_what_a_phase_does_not_train_keeps_every_bit(optimiser: str) -> None:
    session = tiny_session(tiny_config("replay"))
    begin_stage(session, 0)
    network, random = session.learner.network, torch.Generator().manual_seed(0)
    before, masks = parameters_of(network), network.trainable(Part.NEW_CLASSES, num_old=1)
    flat = FlatOptimiser(network)
    flat.begin(masks, optimiser)
    for _ in range(3):
        flat.gradients.copy_(torch.randn(len(flat.gradients), generator=random))
        flat.step(torch.tensor([0.1]), trained_by(optimiser))
    for name, parameter in network.named_parameters():
        frozen = masks[name] == 0
        assert torch.equal(parameter[frozen], before[name][frozen]), name
        assert not (parameter[~frozen] == before[name][~frozen]).any(), name


@optimisers
def test_an_optimiser_looks_at_no_value(optimiser: str) -> None:
    """A step that is recorded has no values yet."""
    rule = find_optimiser(optimiser)
    with FakeTensorMode(), torch.no_grad():
        values = torch.rand(7)
        direction = rule.direction(values, torch.rand(7), new_state(rule, values), trained_by(optimiser))
    assert direction.shape == (7,)


@schedules
@pytest.mark.parametrize(("epochs", "steps"), [(0, 4), (1, 1), (1, 10), (6, 4), (20, 3)])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.3, 0.99])
def test_a_schedule_has_a_rate_for_every_step(schedule: str, epochs: int, steps: int, warmup: float) -> None:
    training = Training(epochs=epochs, lr=0.4, schedule=schedule, milestones=(0.5,), warmup=warmup)
    rates = learning_rates(training, steps)
    assert (rates.shape, rates.dtype) == ((epochs * steps,), torch.float32)
    assert bool((rates.isfinite() & (rates >= 0)).all())
    assert epochs == 0 or 0 < float(rates.max()) <= 0.4 + 1e-6


@schedules
def test_after_the_warm_up_the_schedule_spans_the_rest(schedule: str) -> None:
    training = Training(epochs=10, lr=0.4, schedule=schedule, milestones=(0.5,), warmup=0.2)
    rates, rest = learning_rates(training, 5), learning_rates(replace(training, epochs=8, warmup=0.0), 5)
    assert torch.equal(rates[10:], rest)
    assert rates[:10].tolist() == pytest.approx([float(rest[0]) * step / 10 for step in range(1, 11)])


def test_a_warm_up_may_end_inside_an_epoch() -> None:
    rates = learning_rates(Training(epochs=1, lr=1.0, warmup=0.25, schedule="constant"), 8)
    assert rates.tolist() == [0.5, 1, 1, 1, 1, 1, 1, 1]
    falling = learning_rates(Training(epochs=2, lr=1.0, warmup=0.25), 6)
    assert falling[:3].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    assert falling[3:].tolist() == sorted(falling[3:].tolist(), reverse=True)
    assert float(falling[3]) == 1
    assert float(falling[-1]) < 0.1


def unit_rows(count: int, seed: int = 0) -> Tensor:
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) + 0.5
    return torch.nn.functional.normalize(rows, dim=1)


@selections
@pytest.mark.parametrize(("count", "available"), [(1, 1), (3, 20), (20, 20), (9, 4)])
def test_a_selection_gives_different_rows_and_the_same_ones_again(selection: str, count: int, available: int) -> None:
    embeddings = unit_rows(available)
    rows = select_rows(selection, embeddings, count, generator(1, "exemplars", 0)).tolist()
    assert len(set(rows)) == len(rows) == min(count, available)
    assert set(rows) <= set(range(available))
    assert rows == select_rows(selection, embeddings, count, generator(1, "exemplars", 0)).tolist()


@pytest.mark.parametrize("selection", ORDERED)
def test_fewer_exemplars_are_the_first_of_more(selection: str) -> None:
    many = select_rows(selection, unit_rows(30), 12, generator(1, "exemplars", 0)).tolist()
    assert select_rows(selection, unit_rows(30), 5, generator(1, "exemplars", 0)).tolist() == many[:5]


@cache
def learned() -> Session:
    session = tiny_session()
    learn_stage(session, 0)
    learn_stage(session, 1)
    return session


@pytest.mark.parametrize("predictor", PREDICTORS.names())
def test_a_predictor_gives_a_score_to_every_class_seen(predictor: str) -> None:
    session = learned()
    learner, images = session.learner, torch.from_numpy(session.store.test.images)
    outputs = ImageOutputs(session.engine.inference(learner.network).outputs(images))
    scores = predicted_scores(predictor, learner, outputs)
    assert scores.shape == (len(images), learner.num_classes) == (24, 4)
    found = class_scores(learner, session.engine, images, [predictor])[predictor]
    assert torch.equal(found, scores)
    assert np.array_equal(best_label(found), scores.argmax(dim=1).numpy())


def test_what_a_predictor_is_given() -> None:
    session = learned()
    learner, images = session.learner, torch.from_numpy(session.store.test.images[:5])
    outputs = ImageOutputs(session.engine.inference(learner.network).outputs(images))
    assert len(outputs) == 5
    assert torch.equal(outputs.embedding, session.engine.embed(learner.network, images))
    assert torch.equal(outputs.features, session.engine.features(learner.network, images))
    assert torch.equal(outputs.scores, session.engine.infer(learner.network, images)[1])
    scale = learner.network.head.scale
    assert scale is not None
    torch.testing.assert_close(outputs.logits[:, :4], scale * outputs.scores[:, :4])


def test_which_predictors_need_means() -> None:
    assert need_means(["cnn", "nme"]) == ["nme"]


@policies
@pytest.mark.parametrize("shape", [(1,), (3, 5)])
@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_a_policy_draws_as_many_numbers_as_it_says(policy: str, shape: tuple[int, ...], size: tuple[int, int]) -> None:
    found = POLICIES.find(policy)
    first, again, other = (found.draw(shape, generator(seed, "augment"), size) for seed in (1, 1, 2))
    assert (first.shape, first.dtype) == ((*shape, found.numbers), torch.float32)
    assert torch.equal(first, again)
    assert shape == (1,) or found.numbers == 0 or not torch.equal(first, other)


@policies
def test_a_policy_keeps_shape_and_type_of_images_and_treats_each_alone(policy: str) -> None:
    found, random = POLICIES.find(policy), torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 9, 7, 3), generator=random).to(torch.uint8)
    numbers, before = found.draw((40,), random, (9, 7)), images.clone()
    made = found.apply(images, numbers)
    assert (made.shape, made.dtype) == (images.shape, torch.uint8)
    assert torch.equal(images, before), "it leaves its argument alone"
    assert torch.equal(found.apply(images, numbers), made)
    assert torch.equal(found.apply(images[5:8], numbers[5:8]), made[5:8])
    assert not torch.equal(made, images)
