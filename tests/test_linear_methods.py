"""What the methods with a linear head do beside their losses: what moves, what is held back, what is written after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.core.events import Warned
from engram.experiment.recipes import recipe
from engram.experiment.runner import run
from engram.methods import find_method
from engram.methods.wa import clamp_weights
from helpers import (
    assert_resumes_to,
    learn_stage,
    parameters_of,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)

FAMILY = ["icarl", "wa", "lwf", "bic", "eeil", "ssil"]
PHASES = [*((method, "main") for method in FAMILY), ("bic", "correct"), ("eeil", "balance")]
ROWS = ("head.weight", "head.bias")


def test_icarl_trains_by_its_own_schedule() -> None:
    config = recipe("icarl-cifar100-b50-s10")
    assert config.predictor == "nme"
    training = config.settings.train  # pyright: ignore[reportAttributeAccessIssue]
    rates = learning_rates(training, 1)
    assert [round(float(rates[epoch]), 4) for epoch in (0, 48, 49, 62, 63, 69)] == [2.0, 2.0, 0.4, 0.4, 0.08, 0.08]


@pytest.mark.parametrize("method", FAMILY)
def test_it_learns_one_class_at_a_time(method: str) -> None:
    session = tiny_session(tiny_config(method, base=1, increment=1), toy_store(num_classes=3, per_class=8))
    for index in range(3):
        learn_stage(session, index)  # refuses a loss that is not finite
    assert session.learner.num_classes == 3
    assert all(value.isfinite().all() for value in session.learner.network.parameters())


@pytest.mark.parametrize("method", FAMILY)
def test_short_recipes_keep_the_methods_own_rate(method: str) -> None:
    own = find_method(method).settings().train  # pyright: ignore[reportAttributeAccessIssue]
    for name, epochs in ((f"{method}-mini-b10-s5", 16), (f"{method}-folder", 60)):
        train = recipe(name).settings.train  # pyright: ignore[reportAttributeAccessIssue]
        assert (train.epochs, train.lr, train.milestones) == (epochs, own.lr, own.milestones)


def test_wa_makes_zero_of_a_negative_weight() -> None:
    session = tiny_session(tiny_config("wa"))
    session.method.grow(session.learner, session.stage(0), session.engine)
    weight = session.learner.network.get_parameter("head.weight")
    before = weight.detach().clone()
    assert (before < 0).any()
    with torch.no_grad():
        clamp_weights(session.learner.network)
    assert torch.equal(weight, torch.where(before > 0, before, 0))


def test_wa_keeps_the_head_from_turning_negative_and_aligns_the_new_classes() -> None:
    session = tiny_session(tiny_config("wa"))
    head, method = session.learner.network.head, session.method
    learn_stage(session, 0)
    weight = session.learner.network.get_parameter("head.weight")
    assert head.get_parameter("weight") is weight
    trained: list[torch.Tensor] = []
    learn_stage(session, 1, before_finish=lambda stage: trained.append(weight.detach().clone()))
    (before,), after = trained, weight.detach()
    for weights in (before, after):
        assert (weights[:4] >= 0).all()
        assert weights[:4].any()
    assert torch.equal(after[:2], before[:2]), "old rows are left as they were trained"
    lengths = after[:4].norm(dim=1)
    assert float(lengths[2:].mean()) == pytest.approx(float(lengths[:2].mean()), rel=1e-5)
    ratio = after[2:4].norm() / before[2:4].norm()
    assert abs(float(ratio) - 1) > 1e-3
    torch.testing.assert_close(after[2:4], before[2:4] * ratio)
    assert torch.equal(session.learner.teacher.get_parameter("head.weight"), after), "the aligned model teaches"
    assert "head.bias" not in dict(session.learner.network.named_parameters())
    method.finish(session.learner, session.stage(0), session.engine)
    assert torch.equal(weight, after), "the base stage has nothing to align"


def test_wa_leaves_new_weights_without_a_length_alone() -> None:
    session = tiny_session(tiny_config("wa"))
    learn_stage(session, 0)
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    weight = session.learner.network.get_parameter("head.weight")
    weight.data[2:4] = 0
    session.method.finish(session.learner, stage, session.engine)
    assert weight.isfinite().all()
    assert not weight[2:4].any()


def test_lwf_leaves_the_old_rows_of_the_head_alone() -> None:
    session = tiny_session(tiny_config("lwf"))
    learn_stage(session, 0)
    before = {name: session.learner.network.get_parameter(name).detach().clone() for name in ROWS}
    learn_stage(session, 1)
    for name in ROWS:
        after = session.learner.network.get_parameter(name).detach()
        assert torch.equal(after[:2], before[name][:2])
        assert not torch.equal(after[2:4], before[name][2:4])
    assert len(session.learner.memory) == 0


def test_lwf_says_once_that_single_classes_are_not_learned() -> None:
    session = tiny_session(tiny_config("lwf", base=1, increment=1, epochs=1), toy_store(num_classes=3, per_class=8))
    for index in range(3):
        learn_stage(session, index)
    (note,) = session.learner.notes
    assert "so a single class is not learned" in note


@pytest.mark.parametrize("method", ["lwf", "lwm", "ssil", "ewc", "si", "mas"])
def test_a_later_stage_of_one_class_is_said_not_to_be_learned(method: str) -> None:
    config = tiny_config(method, increment=3, epochs=1)
    said = {}
    for classes in (6, 8):  # stages of 2, 3, 1 and of 2, 3, 3
        events = run(config, toy_store(classes, per_class=6))
        said[classes] = [event.message for event in events if isinstance(event, Warned)]
    (note,) = said[6]
    assert note.startswith("stage 2 has one new class, and ")
    assert said[8] == []


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"temperature": -2.0}, {"lambda_kd": -1.0}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(EngramError, match=f"{name} must be"):
        tiny_config("lwf").with_settings(**change)


@pytest.mark.parametrize(("method", "phase"), PHASES)
def test_stopped_in_any_phase_it_resumes_exactly(method: str, phase: str, tmp_path: Path) -> None:
    config = tiny_config(method, finetune=2)
    if method == "bic":
        config = config.with_settings(correction__epochs=4)
    whole = run_whole(config, toy_store(), tmp_path / "whole")
    saved = run_stopped(config, toy_store(), tmp_path / "stopped", 2, starts(1, phase))
    assert (saved.stage, saved.phase) == (1, phase)
    assert_resumes_to(whole, tmp_path / "stopped", toy_store())


def test_eeil_balances_all_weights_under_a_copy_from_just_before() -> None:
    session = tiny_session(tiny_config("eeil", finetune=2))
    learner = session.learner
    learn_stage(session, 0)
    stage = session.stage(1)
    session.method.grow(learner, stage, session.engine)
    main, balance = session.method.phases(learner, stage, session.engine)
    base = parameters_of(learner.teacher)
    train_phase(session, stage, main)
    assert all(torch.equal(value, base[name]) for name, value in learner.teacher.named_parameters())
    trained = parameters_of(learner.network)
    train_phase(session, stage, balance, 1)
    assert all(torch.equal(value, trained[name]) for name, value in learner.teacher.named_parameters())
    for name, value in learner.network.named_parameters():
        rows = slice(0, 4) if name.startswith("head.") else slice(None)
        assert not torch.equal(value[rows], trained[name][rows]), name
    labels = stage.pool.labels[balance.rows()]
    assert torch.bincount(labels).tolist() == [3, 3, 3, 3]
    assert len(labels) == balance.images


def test_eeil_without_fine_tuning_has_one_phase() -> None:
    session = tiny_session(tiny_config("eeil", finetune=0))
    assert [[phase.name for phase in stage.phases] for stage in session.plan()] == [["main"]] * 3
