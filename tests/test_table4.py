"""PODNet and the rows of AFC's Table 4 as methods: their terms, weights and recipes, and what they do in training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.contract import Phase, Step
from engram.core.errors import EngramError
from engram.core.events import EpochFinished, RunFinished
from engram.data.stage import Stage
from engram.experiment.recipes import recipe
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods import METHODS
from engram.methods.blocks.losses import (
    cosine_distance,
    gram_distance,
    over_channels,
    over_pixels,
    over_rows_and_columns,
    pooled_distance,
    whole_map_distance,
)
from engram.methods.podnet import PODNetSettings
from engram.methods.table4 import Attention, GradCAMSettings, MapsSettings
from helpers import learn_stage, parameters_of, tiny_config, tiny_session, toy_store, train_phase

# By method, the weight that a stage with as many classes seen as new ones has.
ONE_TERM = {"pod": 3.0, "gap": 5.0, "channel": 2.0, "gram": 0.1, "gradcam": 0.01, "pixels": 4.0}
ALL = [*ONE_TERM, "podnet"]

one_term = pytest.mark.parametrize("method", list(ONE_TERM))
every = pytest.mark.parametrize("method", ALL)


def at_stage(session: Session, index: int) -> tuple[Stage, list[Phase]]:
    """The stage with its head grown, and its phases; those before it are learned."""
    for before in range(index):
        learn_stage(session, before)
    stage = session.stage(index)
    session.method.grow(session.learner, stage, session.engine)
    return stage, session.method.phases(session.learner, stage, session.engine)


class Seen(Exception):
    """Carries a step out of the loop before its backward pass."""


def watched_step(session: Session, stage: Stage, phase: Phase, number: int = 3) -> Step:
    """What the loss sees in one of the first steps of the phase, its graph still there."""
    taken = 0

    def spy(step: Step) -> dict[str, Tensor]:
        nonlocal taken
        if taken == number:
            raise Seen(step)
        taken += 1
        return phase.loss(step)

    with pytest.raises(Seen) as seen:
        for _ in session.engine.start(session.learner, stage, replace(phase, loss=spy), 0):
            pass
    return seen.value.args[0]


# Terms and weights


@every
def test_the_terms_are_classification_and_weighted_distances(method: str) -> None:
    session = tiny_session(tiny_config(method))
    stage, (main, balance) = at_stage(session, 1)
    assert main.teacher
    assert not balance.teacher
    step = watched_step(session, stage, main)
    student, teacher = step.student, step.teacher
    assert teacher is not None
    terms = main.loss(step)
    names = ["flat", "spatial"] if method == "podnet" else ["maps"]
    assert list(terms) == ["classification", *names]
    expected = {
        "pod": lambda: pooled_distance(student.maps, teacher.maps, over_rows_and_columns),
        "gap": lambda: pooled_distance(student.maps, teacher.maps, over_pixels),
        "channel": lambda: pooled_distance(student.maps, teacher.maps, over_channels),
        "gram": lambda: gram_distance(student.maps, teacher.maps),
        "pixels": lambda: whole_map_distance(student.maps, teacher.maps),
        "gradcam": lambda: Attention(session.learner.teacher.head, False)(student, teacher),
        "podnet": lambda: pooled_distance(student.maps, teacher.maps, over_rows_and_columns),
    }[method]()
    assert expected.item() > 0
    torch.testing.assert_close(terms[names[-1]], step.weights[names[-1]] * expected)
    if method == "podnet":
        flat = cosine_distance(student.embedding, teacher.embedding)
        torch.testing.assert_close(terms["flat"], step.weights["flat"] * flat)
    # What distils reaches the backbone.
    for name in names:
        (gradient,) = torch.autograd.grad(terms[name], student.maps[0], retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient.any()


@one_term
@pytest.mark.parametrize("growing", [None, True, False])
def test_the_weight_of_a_stage(method: str, growing: bool | None) -> None:
    config = tiny_config(method, base=4, increment=1)
    if growing is not None:
        config = config.with_settings(growing=growing)
    _, (main, *_) = at_stage(tiny_session(config), 1)
    grows = method != "gram" if growing is None else growing
    assert main.weights == {"maps": pytest.approx(ONE_TERM[method] * (math.sqrt(5 / 1) if grows else 1))}


def test_the_weights_of_podnet() -> None:
    _, (main, *_) = at_stage(tiny_session(tiny_config("podnet", base=4, increment=1)), 1)
    assert main.weights == {"flat": pytest.approx(math.sqrt(5)), "spatial": pytest.approx(3 * math.sqrt(5))}


@every
def test_without_weight_it_trains_as_replay_does(method: str) -> None:
    none = {"lambda_flat": 0.0, "lambda_spatial": 0.0} if method == "podnet" else {"lambda_maps": 0.0}
    networks: list[dict[str, Tensor]] = []
    for config in (tiny_config(method).with_settings(**none), tiny_config("replay"), tiny_config(method)):
        session = tiny_session(config)
        stage, phases = at_stage(session, 1)
        train_phase(session, stage, phases[0])
        networks.append(parameters_of(session.learner.network))
    without, replay, itself = networks
    for name, value in without.items():
        torch.testing.assert_close(value, replay[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(itself["backbone.conv.weight"], replay["backbone.conv.weight"])


@pytest.mark.parametrize("method", ["podnet", "pod", "gap", "channel"])
def test_it_holds_the_student_nearer_to_the_teacher_than_replay_does(method: str) -> None:
    def distance(name: str) -> float:
        session = tiny_session(tiny_config(name, epochs=8))
        stage, phases = at_stage(session, 1)
        train_phase(session, stage, phases[0])
        step = watched_step(session, stage, replace(phases[0], teacher=True), number=0)
        assert step.teacher is not None
        return pooled_distance(step.student.maps, step.teacher.maps, over_rows_and_columns).item()

    assert distance(method) < distance("replay")


# GradCAM


def test_another_teacher_or_setting_is_another_loss() -> None:
    def loss(**settings: Any) -> Any:
        session = tiny_session(tiny_config("gradcam").with_settings(**settings))
        session.method.grow(session.learner, stage := session.stage(0), session.engine)
        later = replace(stage, index=1)
        return session, session.method.phases(session.learner, later, session.engine)[0].loss

    session, one = loss()
    assert one != loss()[1]
    assert one.distance == Attention(session.learner.teacher.head, False)
    assert loss(summed=True)[1].distance.summed


@pytest.mark.parametrize("summed", [False, True])
def test_gradcam_trains_by_activations_alone(summed: bool) -> None:
    """The gradient at the last map is that of the formula with the channels' weights held; and it is not zero."""
    session = tiny_session(tiny_config("gradcam").with_settings(summed=summed))
    stage, (main, _) = at_stage(session, 1)
    step = watched_step(session, stage, main)
    student, teacher = step.student, step.teacher
    assert teacher is not None
    head, distance = session.learner.teacher.head, Attention(session.learner.teacher.head, summed)
    found = torch.autograd.grad(distance(student, teacher), student.maps[-1], retain_graph=True)[0]
    assert found.any()

    # Slowly: each sample's best class of the two old ones, weights by the whole graph from score to map.
    classes = student.scores[:, :2].argmax(dim=1)
    ours = torch.autograd.grad(
        student.scores[torch.arange(len(classes)), classes].sum(), student.maps[-1], retain_graph=True
    )[0].mean(dim=(2, 3))
    their_map = teacher.maps[-1].clone().requires_grad_()
    scores = head(their_map.mean(dim=(2, 3)))[torch.arange(len(classes)), classes]
    theirs = torch.autograd.grad(scores.sum(), their_map)[0].mean(dim=(2, 3))
    leaf = student.maps[-1].detach().clone().requires_grad_()

    def look(maps: Tensor, weight: Tensor) -> Tensor:
        seen = torch.einsum("bchw,bc->bchw", maps, weight)
        seen = (seen.sum(1) if summed else seen).clamp(min=0).flatten(1)
        return seen / seen.norm(dim=1, keepdim=True)

    loss = (look(leaf, ours) - look(their_map.detach(), theirs)).abs().sum(1).mean()
    torch.testing.assert_close(distance(student, teacher), loss)
    torch.testing.assert_close(found, torch.autograd.grad(loss, leaf)[0], rtol=1e-3, atol=1e-6)
    # The head is not this term's to move.
    weight = session.learner.network.head.get_parameter("weight")
    assert torch.autograd.grad(distance(student, teacher), weight, allow_unused=True) == (None,)


def test_gradcam_before_the_first_step_finds_nothing_to_change() -> None:
    session = tiny_session(tiny_config("gradcam"))
    stage, (main, _) = at_stage(session, 1)
    step = watched_step(session, stage, main)
    assert step.teacher is not None
    maps = step.teacher.maps[-1].clone().requires_grad_()
    embedding = maps.mean(dim=(2, 3))
    teacher = session.learner.teacher
    student = teacher.classify((maps,), embedding)
    loss = Attention(teacher.head, False)(student, step.teacher)
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert torch.autograd.grad(loss, maps)[0].isfinite().all()


# One class at a time


@every
@pytest.mark.parametrize("base", [1, 2])
def test_one_class_a_stage(method: str, base: int) -> None:
    events = list(run(tiny_config(method, base=base, increment=1, epochs=1), toy_store(num_classes=4)))
    assert isinstance(events[-1], RunFinished)
    assert [stage["classes"] for stage in events[-1].result["stages"]] == list(range(base, 5))
    terms = [event.terms for event in events if isinstance(event, EpochFinished)]
    assert all(np.isfinite(list(each.values())).all() for each in terms)
    distances = [sum(each.values()) - each["classification"] for each in terms if len(each) > 1]
    assert len(distances) == 4 - base
    assert min(distances) > 0


# Settings and recipes


@pytest.mark.parametrize(
    ("settings", "values", "sentence"),
    [
        (PODNetSettings, {"lambda_flat": -1}, "lambda_flat must be at least 0, got -1"),
        (PODNetSettings, {"lambda_spatial": -0.5}, "lambda_spatial must be at least 0, got -0.5"),
        (MapsSettings, {"lambda_maps": math.nan}, "lambda_maps must be at least 0, got nan"),
        (GradCAMSettings, {"lambda_maps": -2}, "lambda_maps must be at least 0, got -2"),
        (GradCAMSettings, {"proxies": 0}, "proxies must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        settings(**values)


@every
def test_every_row_names_its_paper(method: str) -> None:
    assert METHODS[method].paper
    assert method == "podnet" or "Table 4" in METHODS[method].paper


@pytest.mark.parametrize("name", ["replay", "uniform"])
def test_the_other_rows_of_table_4_can_be_found(name: str) -> None:
    row = {"replay": "fine-tuning", "uniform": "uniform"}[name]
    assert f"Table 4: {row}" in METHODS[name].paper


@pytest.mark.parametrize("stages", [50, 25, 10, 5])
def test_the_recipes_of_podnet(stages: int) -> None:
    cnn, nme = recipe(f"podnet-cifar100-b50-s{stages}"), recipe(f"podnet-nme-cifar100-b50-s{stages}")
    assert isinstance(cnn.settings, PODNetSettings)
    assert isinstance(nme.settings, PODNetSettings)
    assert (cnn.settings.lambda_flat, cnn.settings.lambda_spatial) == (1, 3)
    assert (nme.settings.lambda_flat, nme.settings.lambda_spatial) == (1, 5)
    assert (cnn.settings.sharpness, cnn.settings.learned_scale, cnn.predictor) == (1, True, "cnn")
    assert (nme.settings.sharpness, nme.settings.learned_scale, nme.predictor) == (3, False, "nme")
    same = replace(nme.settings, lambda_spatial=3.0, sharpness=1.0, learned_scale=True)
    assert same == cnn.settings
    afc = recipe(f"afc-cifar100-b50-s{stages}")
    assert replace(cnn, recipe=afc.recipe, method="afc", settings=afc.settings) == afc


@one_term
def test_the_recipes_of_table_4(method: str) -> None:
    cnn, nme = recipe(f"{method}-cifar100-b50-s50"), recipe(f"{method}-nme-cifar100-b50-s50")
    assert isinstance(cnn.settings, MapsSettings)
    assert isinstance(nme.settings, MapsSettings)
    assert cnn.settings.lambda_maps == ONE_TERM[method]
    assert nme.settings.lambda_maps == (5 if method == "pod" else ONE_TERM[method])
    assert (nme.settings.sharpness, nme.settings.learned_scale, nme.predictor) == (3, False, "nme")
    assert (cnn.settings.train.epochs, cnn.settings.finetune.epochs, cnn.settings.finetune.lr) == (160, 20, 0.05)
