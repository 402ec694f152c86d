"""AFC as a whole: its total loss in both readings, its phases, its relatives, and the numbers of its recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engram.experiment.stage_work
from engram.contract import Method, Step
from engram.contract.learner import Learner
from engram.core.events import StageFinished
from engram.data.memory import Memory, MemoryConfig
from engram.engine import Engine
from engram.experiment.recipes import recipe
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods.afc import AFC, AFCSettings
from engram.methods.blocks.lsc import LSCSettings
from engram.methods.table4 import Uniform
from engram.nn.heads import LSCHead
from engram.nn.network import Part
from helpers import (
    learn_stage,
    parameters_of,
    random_step,
    slow_discrepancy_paper,
    slow_discrepancy_released,
    slow_nca_paper,
    slow_nca_released,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)


def grown(session: Session, index: int) -> tuple[Any, list[Any]]:
    """The stage with its head grown, and its phases."""
    stage = session.stage(index)
    session.method.grow(session.learner, stage, session.engine)
    return stage, session.method.phases(session.learner, stage, session.engine)


# The total loss


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("exemplars_only", [False, True])
def test_the_total_is_classification_plus_weighted_discrepancy(seed: int, variant: str, exemplars_only: bool) -> None:
    case = random_step(seed)
    counted = case.exemplar if exemplars_only else np.ones(len(case.labels), dtype=bool)
    rows = list(zip(case.scores, case.labels, strict=True))
    if variant == "released":
        classification = np.mean([slow_nca_released(list(row * case.scale), y) for row, y in rows])
        discrepancy = slow_discrepancy_released(case, counted)
    else:
        classification = np.mean([slow_nca_paper(list(row), y, case.scale, 0.6) for row, y in rows])
        discrepancy = slow_discrepancy_paper(case, counted)
    settings = AFCSettings(variant=variant, exemplars_only=exemplars_only)  # pyright: ignore[reportArgumentType]
    terms = AFC(settings).loss(case.step())
    assert set(terms) == {"classification", "discrepancy"}
    assert terms["classification"].item() == pytest.approx(classification, rel=1e-6)
    assert terms["discrepancy"].item() == pytest.approx(case.weight * discrepancy, rel=1e-5)


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("exemplars_only", [False, True])
def test_uniform_is_afc_with_an_importance_of_one(variant: str, exemplars_only: bool) -> None:
    case = random_step(0)
    ones = replace(case, importance=[np.ones_like(value) for value in case.importance])
    settings = AFCSettings(variant=variant, exemplars_only=exemplars_only)  # pyright: ignore[reportArgumentType]
    ours, theirs = Uniform(settings).loss(case.step()), AFC(settings).loss(ones.step())
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_a_stage_of_uniform_is_a_stage_of_afc_with_an_importance_of_one(variant: str) -> None:
    afc, uniform = (tiny_session(tiny_config(name).with_settings(variant=variant)) for name in ("afc", "uniform"))
    learn_stage(afc, 0)
    assert list(afc.learner.buffers) == [f"importance.{i}" for i in range(4)]
    for value in afc.learner.buffers.values():
        value.fill_(1)
    # The estimate moved the statistics of the network, which uniform has no reason to do: both go on from one state.
    learn_stage(uniform, 0)
    assert uniform.learner.buffers == {}
    uniform.learner.load_state_dict({name: value.clone() for name, value in afc.learner.state_dict().items()})
    for session in (afc, uniform):
        stage, phases = grown(session, 1)
        for number, phase in enumerate(phases):
            train_phase(session, stage, phase, number)
    theirs = parameters_of(uniform.learner.network)
    for name, value in parameters_of(afc.learner.network).items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_both_readings_learn(variant: str) -> None:
    """Ten classes in two epochs. A scale that turned below zero would have all of them the wrong way round."""
    config = recipe("afc-mini-b10-s5").with_settings(variant=variant, train__epochs=2).with_value("device", "cpu")
    (base,) = (event for event in run(config, stop_after_stage=0) if isinstance(event, StageFinished))
    assert base.accuracy["cnn"] > 20


def test_importance_weighs_the_channels_in_training() -> None:
    def after_stage(change: Callable[[Tensor], object]) -> Tensor:
        session = tiny_session()
        learn_stage(session, 0)
        for value in session.learner.buffers.values():
            change(value)
        stage, phases = grown(session, 1)
        train_phase(session, stage, phases[0])
        return parameters_of(session.learner.network)["backbone.conv.weight"]

    as_found = after_stage(lambda value: value)
    assert torch.equal(as_found, after_stage(lambda value: value))
    assert not torch.equal(as_found, after_stage(lambda value: value.fill_(1)))


def test_afc_without_discrepancy_trains_as_replay_does() -> None:
    # The estimate alone tells them apart: it moves the statistics of the network. Put those back.
    sessions = [tiny_session(tiny_config("afc").with_settings(lambda_disc=0.0)), tiny_session(tiny_config("replay"))]
    for session in sessions:
        learn_stage(session, 0)
    afc, replay = sessions
    state = afc.learner.state_dict() | replay.learner.state_dict()  # replay has no teacher
    afc.learner.load_state_dict({name: value.clone() for name, value in state.items()})
    for session in sessions:
        stage, phases = grown(session, 1)
        assert [phase.name for phase in phases] == ["main", "balance"]
        for number, phase in enumerate(phases):
            train_phase(session, stage, phase, number)
    theirs = parameters_of(replay.learner.network)
    for name, value in parameters_of(afc.learner.network).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


# The phases


def test_the_phases_of_afc() -> None:
    session = tiny_session()
    stage, phases = grown(session, 0)
    (main,) = phases
    assert (main.name, main.teacher, main.images) == ("main", False, 24)
    assert main.rows().tolist() == list(range(24))
    for number, phase in enumerate(phases):
        train_phase(session, stage, phase, number)
    session = tiny_session()
    learn_stage(session, 0)
    stage, (main, balance) = grown(session, 1)
    assert (main.name, main.teacher) == ("main", True)
    assert main.train == Part.BACKBONE | Part.NEW_CLASSES | Part.HEAD_SHARED
    assert main.weights == {"discrepancy": pytest.approx(4 * np.sqrt(4 / 2))}
    assert main.training == session.config.settings.train  # pyright: ignore[reportAttributeAccessIssue]
    assert main.images == len(main.rows()) == 24 + 6
    assert (balance.name, balance.teacher) == ("balance", False)
    assert balance.train == Part.OLD_CLASSES | Part.NEW_CLASSES
    assert balance.training == session.config.settings.finetune  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("method", ["afc", "joint"])
def test_the_base_stage_may_have_its_own_number_of_epochs(method: str) -> None:
    plain = tiny_config(method)
    session = tiny_session(plain.with_value("settings.base_epochs", "3"))
    _, (main, *_) = grown(session, 0)
    assert main.training == replace(plain.settings.train, epochs=3)  # pyright: ignore[reportAttributeAccessIssue]
    key = session.method.base_key()
    assert key is None or key != tiny_session(plain).method.base_key()
    learn_stage(session, 0)
    _, (main, *_) = grown(session, 1)
    assert main.training == plain.settings.train  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("text", ["per_class=3", "total=8", "per_class=50"])
def test_the_balanced_phase_has_as_many_images_of_each_class(text: str) -> None:
    session = tiny_session(tiny_config("afc", memory=MemoryConfig.parse(text)))
    learn_stage(session, 0)
    stage, (main, balance) = grown(session, 1)
    train_phase(session, stage, main)
    rows = balance.rows()
    counts = torch.bincount(stage.pool.labels[rows]).tolist()
    quota = {"per_class=3": 3, "total=8": 2, "per_class=50": 12}[text]
    assert counts == [quota] * 4
    assert balance.images == len(rows) == len(set(rows.tolist()))
    for label in (0, 1):  # the old classes: the best of what the memory holds
        chosen = rows[stage.pool.labels[rows] == label]
        assert stage.pool.exemplar[chosen].all()
        assert stage.pool.sources[chosen].tolist() == session.learner.memory.of(label).sources[:quota].tolist()


def test_the_balanced_phase_chooses_with_the_network_as_it_is_then() -> None:
    session = tiny_session(tiny_config("afc", epochs=6))
    learn_stage(session, 0)
    stage, (main, balance) = grown(session, 1)
    before = balance.rows().tolist()
    train_phase(session, stage, main)
    assert balance.rows().tolist() != before


def test_the_paper_has_no_balanced_phase_unless_asked_for() -> None:
    for settings, names in (
        ({"variant": "paper"}, ["main"]),
        ({"variant": "paper", "balanced": True}, ["main", "balance"]),
        ({"balanced": False}, ["main"]),
        ({"finetune__epochs": 0}, ["main"]),
    ):
        session = tiny_session(tiny_config("afc").with_settings(**settings))
        learn_stage(session, 0)
        assert [phase.name for phase in grown(session, 1)[1]] == names


def test_the_teacher_is_the_model_of_the_stage_before_and_stays() -> None:
    session = tiny_session()
    learn_stage(session, 0)
    learner = session.learner
    student = {name: value.clone() for name, value in learner.network.state_dict().items()}
    for name, value in learner.teacher.state_dict().items():
        assert torch.equal(value, student[name]), name
    assert not learner.teacher.training
    assert not any(parameter.requires_grad for parameter in learner.teacher.parameters())
    stage, phases = grown(session, 1)
    for number, phase in enumerate(phases):
        train_phase(session, stage, phase, number)
    for name, value in learner.teacher.state_dict().items():
        assert torch.equal(value, student[name]), name
    assert not learner.teacher.training


def test_the_discrepancy_of_an_untrained_student_comes_from_train_mode_alone() -> None:
    # Before its first step the student is its teacher but for BatchNorm: batch statistics against running ones.
    session = tiny_session()
    learn_stage(session, 0)
    stage, (main, _) = grown(session, 1)
    steps: list[Step] = []

    def spy(step: Step) -> dict[str, Tensor]:
        steps.append(step)
        return main.loss(step)

    next(iter(session.engine.start(session.learner, stage, replace(main, loss=spy), 0)))
    (step,) = steps
    assert step.teacher is not None
    assert len(step.student.maps) == len(step.teacher.maps) == 4
    for ours, theirs in zip(step.student.maps, step.teacher.maps, strict=True):
        assert ours.shape == theirs.shape
        assert ours.requires_grad
        assert not theirs.requires_grad
        assert not torch.allclose(ours, theirs, atol=1e-4)
    assert torch.equal(step.exemplar, step.labels < 2)


def test_the_order_within_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def listen(owner: Any, name: str, word: str) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            heard.append(word)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    listen(AFC, "grow", "grow")
    listen(AFC, "finish", "importance")
    listen(Memory, "update", "exemplars")
    listen(engram.experiment.stage_work, "class_means", "class means")
    listen(Learner, "snapshot_teacher", "teacher")
    listen(Session, "evaluate", "evaluate")
    original = Engine.start

    def start(self: Engine, learner: Any, stage: Any, phase: Any, *rest: Any, **named: Any) -> Any:
        heard.append(phase.name)
        return original(self, learner, stage, phase, *rest, **named)

    monkeypatch.setattr(Engine, "start", start)
    list(run(tiny_config("afc", base=4), toy_store()))
    after = ["importance", "exemplars", "class means", "teacher", "evaluate"]
    assert heard == ["grow", "main", *after, "grow", "main", "balance", *after]


# Variants and settings


def test_each_variant_reads_every_difference_its_own_way() -> None:
    released, paper = AFCSettings(), AFCSettings(variant="paper")
    differences = ("similarity", "classification", "discrepancy", "balanced")
    assert [released.reading(name) for name in differences] == ["distance", "released", "released", True]
    assert [paper.reading(name) for name in differences] == ["cosine", "paper", "paper", False]
    mixed = AFCSettings(variant="paper", similarity="distance", balanced=True)
    assert [mixed.reading(name) for name in differences] == ["distance", "paper", "paper", True]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("distance", 1.0, 10, True)),
        ({"variant": "paper"}, ("cosine", 1.0, 10, True)),
        ({"sharpness": 3.0, "learned_scale": False}, ("distance", 3.0, 10, False)),
        ({"proxies": 4, "similarity": "cosine"}, ("cosine", 1.0, 4, True)),
    ],
)
@pytest.mark.parametrize("method", ["afc", "uniform", "replay", "naive", "joint", "podnet", "gap"])
def test_the_settings_shape_the_head(method: str, settings: dict[str, Any], expected: tuple[Any, ...]) -> None:
    head = tiny_session(tiny_config(method).with_settings(**settings)).learner.network.head
    assert isinstance(head, LSCHead)
    assert (head.similarity, head.sharpness, head.proxies, head.scale is not None) == expected


def test_the_cifar_recipe_has_the_numbers_of_the_paper() -> None:
    config = recipe("afc-cifar100-b50-s10")
    settings = config.settings
    assert isinstance(settings, AFCSettings)
    assert (config.base, config.increment, str(config.memory), config.backbone) == (50, 5, "per_class=20", "resnet32")
    assert config.memory.selection == "herding"
    assert (config.augmentation.pad, config.augmentation.flip, config.augmentation.brightness) == (4, True, 63 / 255)
    assert (settings.variant, settings.lambda_disc, settings.margin, settings.proxies) == ("released", 4.0, 0.6, 10)
    assert (settings.sharpness, settings.learned_scale) == (1.0, True)
    assert (settings.exemplars_only, settings.importance_samples) == (False, None)
    train, finetune = settings.train, settings.finetune
    assert (train.epochs, train.batch_size, train.lr, train.schedule) == (160, 128, 0.1, "cosine")
    assert (finetune.epochs, finetune.batch_size, finetune.lr, finetune.schedule) == (20, 128, 0.05, "constant")
    for training in (train, finetune):
        assert (training.momentum, training.weight_decay, training.clip) == (0.9, 5e-4, 5.0)


@pytest.mark.parametrize(("stages", "increment"), [(50, 1), (25, 2), (10, 5), (5, 10)])
def test_the_four_cifar_protocols(stages: int, increment: int) -> None:
    config = recipe(f"afc-cifar100-b50-s{stages}")
    assert (config.base, config.increment) == (50, increment)
    assert 50 + stages * increment == 100


def test_the_nme_recipe_is_sharper_and_has_no_scale() -> None:
    config = recipe("afc-nme-cifar100-b50-s10")
    assert isinstance(config.settings, AFCSettings)
    assert (config.settings.sharpness, config.settings.learned_scale, config.predictor) == (3.0, False, "nme")
    same = replace(config.settings, sharpness=1.0, learned_scale=True)
    assert same == recipe("afc-cifar100-b50-s10").settings


# The relatives


def test_naive_trains_on_new_images_alone() -> None:
    session = tiny_session(tiny_config("naive"))
    learn_stage(session, 0)
    stage, phases = grown(session, 1)
    assert [(phase.name, phase.teacher) for phase in phases] == [("main", False)]
    assert not stage.pool.exemplar.any()
    assert set(stage.pool.labels.tolist()) == {2, 3}
    assert session.method.predictors == ("cnn",)


def test_replay_has_a_memory_and_no_teacher() -> None:
    session = tiny_session(tiny_config("replay"))
    learn_stage(session, 0)
    stage, phases = grown(session, 1)
    assert [(phase.name, phase.teacher, dict(phase.weights)) for phase in phases] == [
        ("main", False, {}),
        ("balance", False, {}),
    ]
    assert torch.bincount(stage.pool.labels).tolist() == [3, 3, 12, 12]
    assert int(stage.pool.exemplar.sum()) == 6


def test_joint_starts_afresh_on_every_image_seen() -> None:
    session = tiny_session(tiny_config("joint"))
    stage, _ = grown(session, 0)
    first = parameters_of(session.learner.network)
    assert torch.bincount(stage.pool.labels).tolist() == [12, 12]
    session = tiny_session(tiny_config("joint"))
    learn_stage(session, 0)
    trained = parameters_of(session.learner.network)
    stage, (main,) = grown(session, 1)
    fresh = parameters_of(session.learner.network)
    assert torch.bincount(stage.pool.labels).tolist() == [12, 12, 12, 12]
    assert main.train == Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES | Part.HEAD_SHARED
    assert not main.teacher
    for name, value in fresh.items():
        if value.ndim > 1:
            used = value[:4] if name == "head.weight" else value
            assert not torch.equal(value, trained[name]), name
            assert used.std() > 0, name
        else:  # BatchNorm and scale are back where every network starts
            assert torch.equal(value, first[name]), name
    for name, value in session.learner.network.backbone.named_buffers():
        assert torch.equal(value, torch.ones_like(value) if "var" in name else torch.zeros_like(value)), name


def test_every_method_on_the_host_takes_its_settings() -> None:
    for name in ("afc", "uniform"):
        assert isinstance(tiny_config(name).settings, AFCSettings)
    for name in ("replay", "naive", "joint"):
        assert type(tiny_config(name).settings) is LSCSettings
    assert all(issubclass(cls, Method) for cls in (AFC, Uniform))
