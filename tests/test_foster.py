"""FOSTER: a network that is doubled, then distilled into a single one, which the next stage starts from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import recipe
from engram.contract import Phase, Step
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.core.events import BaseReused, EpochFinished
from engram.experiment.base_cache import StageCache
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods.blocks.expanding import WideningHead
from engram.methods.der import ExpandingBackbone
from engram.methods.foster import BOOSTING, COMPRESSION, SINGLE, FOSTERSettings, class_scale, store_scales
from engram.nn.backbones import register_backbone
from engram.nn.network import Output
from helpers import (
    assert_resumes_to,
    begin_stage,
    buffers_of,
    learn_stage,
    make_stage,
    parameters_of,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)
from test_der import Foreign


def session_of(**settings: Any) -> Session:
    return tiny_session(tiny_config("foster").with_settings(**settings))


def settings_of(config: RunConfig) -> FOSTERSettings:
    assert isinstance(config.settings, FOSTERSettings)
    return config.settings


def backbone_of(session: Session) -> ExpandingBackbone:
    backbone = session.learner.network.backbone
    assert isinstance(backbone, ExpandingBackbone)
    return backbone


def head_of(session: Session) -> WideningHead:
    head = session.learner.network.head
    assert isinstance(head, WideningHead)
    return head


def phases_of(session: Session, index: int) -> tuple[Any, dict[str, Phase]]:
    """The stage with its network grown, and its phases by name."""
    stage = begin_stage(session, index)
    return stage, {phase.name: phase for phase in session.method.phases(session.learner, stage, session.engine)}


def single_of(session: Session) -> dict[str, Tensor]:
    """The single network that the next stage starts from, by name."""
    kept = session.learner.buffers.items()
    return {name.removeprefix(SINGLE): value.clone() for name, value in kept if name.startswith(SINGLE)}


def some_images(seed: int = 3) -> Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


# The class scale and the losses


def slow_scale(counts: list[int], beta: float) -> list[float]:
    rarity = [(1 - beta) / (1 - beta**count) for count in counts]
    return [len(counts) * each / sum(rarity) for each in rarity]


@pytest.mark.parametrize(("counts", "beta"), [([20, 20, 500], 0.94), ([3, 7, 1, 40], 0.5), ([200, 500], 0.98)])
def test_the_class_scale_is_that_of_the_formula(counts: list[int], beta: float) -> None:
    scale = class_scale(torch.tensor(counts), beta)
    assert scale.tolist() == pytest.approx(slow_scale(counts, beta))
    assert float(scale.mean()) == pytest.approx(1)
    assert scale.argsort(stable=True).tolist() == torch.tensor(counts).argsort(descending=True, stable=True).tolist()


def test_a_beta_of_0_scales_nothing_and_a_class_without_images_counts_as_one_image() -> None:
    assert class_scale(torch.tensor([1, 20, 500]), 0.0).tolist() == [1, 1, 1]
    assert torch.equal(class_scale(torch.tensor([0, 9]), 0.9), class_scale(torch.tensor([1, 9]), 0.9))


def test_the_scales_of_a_stage_come_from_its_images_and_its_beta() -> None:
    session = session_of(beta1=(0.9, 0.8), beta2=0.7)
    for index, beta1 in ((1, 0.9), (2, 0.8), (3, 0.8)):
        # 2 and 1 exemplars of the old classes, 5 and 3 images of the new ones
        stage = make_stage(index, 2, [0, 0, 1, *[2] * 5, *[3] * 3])
        store_scales(session.learner, stage, settings_of(session.config))
        for name, beta in ((BOOSTING, beta1), (COMPRESSION, 0.7)):
            scale = session.learner.buffers[name].tolist()
            assert scale == pytest.approx([*slow_scale([2, 1, 5, 3], beta), 1, 1])


def slow_entropy(scores: list[float], label: int) -> float:
    return math.log(sum(math.exp(score) for score in scores)) - scores[label]


def slow_softmax(scores: list[float], temperature: float) -> list[float]:
    shares = [math.exp(score / temperature) for score in scores]
    return [share / sum(shares) for share in shares]


def slow_distillation(ours: list[float], targets: list[float], temperature: float) -> float:
    return -sum(p * math.log(q) for p, q in zip(targets, slow_softmax(ours, temperature), strict=True))


def step_of(logits: Tensor, features: Tensor, auxiliary: Tensor, buffers: dict[str, Tensor], teacher: Tensor) -> Step:
    """A step of stage 1 with two old classes, two new ones, and two that have not come."""
    output = Output((), features, logits, logits, torch.ones(()), features, {"auxiliary": auxiliary})
    labels, arrival = torch.tensor([0, 3, 2, 1]), torch.tensor([0, 0, 1, 1, 2**31, 2**31])
    given = (labels, labels < 2, output, output._replace(logits=teacher), {}, buffers)
    return Step(*given, arrival=arrival, stage=torch.tensor(1))


def test_the_terms_are_those_of_the_formulas_with_classes_not_seen() -> None:
    random = np.random.default_rng(5)
    raw, taught, aside, features = (random.normal(size=shape) for shape in ((4, 6), (4, 6), (4, 6), (4, 10)))
    weight, bias, scale = random.normal(size=(6, 5)), random.normal(size=6), random.uniform(0.5, 2, size=6)
    logits, teacher = torch.tensor(raw), torch.tensor(taught)
    for each in (logits, teacher):
        each[:, 4:] = -torch.inf
    logits.requires_grad_()
    named = {SINGLE + "head.weight": weight, SINGLE + "head.bias": bias, BOOSTING: scale, COMPRESSION: scale**2}
    buffers = {name: torch.tensor(value) for name, value in named.items()}
    auxiliary = torch.tensor(aside, requires_grad=True)
    method: Any = session_of(lambda_kd=0.3, temperature=3.0).method
    step = step_of(logits, torch.tensor(features), auxiliary, buffers, teacher)
    labels = step.labels.tolist()
    terms = method.boost(step)
    scaled = [slow_entropy((row[:4] / scale[:4]).tolist(), label) for row, label in zip(raw, labels, strict=True)]
    alone = [slow_entropy(row[:4].tolist(), label) for row, label in zip(aside, labels, strict=True)]
    before = [slow_softmax((weight @ row[:5] + bias)[:2].tolist(), 3.0) for row in features]
    kept = [slow_distillation(row[:2].tolist(), old, 3.0) for row, old in zip(raw, before, strict=True)]
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(
        {"classification": np.mean(scaled), "auxiliary": np.mean(alone), "distillation": 0.3 * np.mean(kept)}
    )
    single = method.compress(step)
    targets = [np.array(slow_softmax(row[:4].tolist(), 3.0)) * scale[:4] ** 2 for row in taught]
    wanted = [
        slow_distillation(row[:4].tolist(), (t / t.sum()).tolist(), 3.0) for row, t in zip(raw, targets, strict=True)
    ]
    assert {name: term.item() for name, term in single.items()} == pytest.approx({"distillation": np.mean(wanted)})
    torch.stack([*terms.values(), *single.values()]).sum().backward()
    for values in (logits, auxiliary):
        assert values.grad is not None
        assert values.grad.isfinite().all()
        assert not values.grad[:, 4:].any()


# The network


def test_a_head_that_is_extended_keeps_old_rows_and_columns_and_nothing_else() -> None:
    head = WideningHead(3, 6)
    head.grow(2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name in ("bias", "auxiliary_bias"):
            head.get_parameter(name)[:2] = torch.tensor([4.0, 5.0])
    before = parameters_of(head)
    head.extend(6, 2, torch.Generator().manual_seed(2))
    assert head.num_classes == 4
    assert head.weight.shape == (6, 6)
    assert torch.equal(head.weight[:2, :3], before["weight"][:2])
    assert head.get_parameter("bias").tolist() == [4, 5, 0, 0, 0, 0]
    assert head.weight[:2, 3:].all()
    assert head.weight[2:4].all()
    assert not head.weight[4:].any()
    assert not torch.isclose(head.auxiliary[:2], before["auxiliary"][:2]).any()
    assert not head.auxiliary_bias.any()
    features = torch.randn(2, 6)
    expected = features[:, 3:] @ head.auxiliary.T
    torch.testing.assert_close(head.extra_outputs(features)["auxiliary"], expected)
    head.widen(3)
    assert torch.equal(head.weight[:2], before["weight"][:2])


def test_boosting_starts_from_the_single_network_twice_and_its_head() -> None:
    session = session_of()
    learn_stage(session, 0)
    network = session.learner.network
    with torch.no_grad():
        alone = network(some_images())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    phases_of(session, 1)
    backbone = backbone_of(session)
    assert len(backbone.older) == 1
    for name, value in before.items():
        if name.startswith("backbone."):
            own = name.removeprefix("backbone.")
            assert torch.equal(backbone.state_dict()[own], value)
            assert torch.equal(backbone.older[0].state_dict()[own], value)
    assert torch.equal(head_of(session).weight[:2, :64], before["head.weight"][:2])
    # What the loss takes for the network of the stage before is that network.
    with torch.no_grad():
        output = network(some_images())
    assert output.features is not None
    single = single_of(session)
    scores = output.features[:, :64] @ single["head.weight"].T + single["head.bias"]
    torch.testing.assert_close(scores[:, :2], alone.scores[:, :2])


def test_the_frozen_backbone_never_changes_and_the_rest_trains() -> None:
    session = session_of()
    learn_stage(session, 0)
    stage, phases = phases_of(session, 1)
    frozen, before = buffers_of(backbone_of(session).older), parameters_of(session.learner.network)
    train_phase(session, stage, phases["main"])
    after = buffers_of(backbone_of(session).older)
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    for name, value in session.learner.network.named_parameters():
        assert not torch.equal(value, before[name]), name
    assert not torch.equal(head_of(session).weight[:2, :64], before["head.weight"][:2, :64])


def test_the_compression_starts_from_the_network_of_the_stage_before_and_is_taught_by_the_doubled_one() -> None:
    session = session_of()
    learn_stage(session, 0)
    single = single_of(session)
    stage, phases = phases_of(session, 1)
    train_phase(session, stage, phases["main"])
    learner = session.learner
    with torch.no_grad():
        doubled = learner.network(some_images()).scores
    start = phases["compression"].start
    assert start is not None
    start()
    assert torch.equal(learner.teacher(some_images()).scores, doubled)
    assert len(backbone_of(session).older) == 0
    assert learner.num_classes == 4
    state = learner.network.state_dict()
    for name, value in single.items():
        rows = slice(2) if name.startswith("head.") else slice(None)  # of the old classes
        assert value.ndim == 0 or torch.equal(state[name][rows], value[rows]), name
    assert state["head.weight"][2:4].all()
    assert phases["compression"].training.weight_decay == 0
    teacher = {name: value.clone() for name, value in learner.teacher.state_dict().items()}
    train_phase(session, stage, replace(phases["compression"], start=None), 1)
    assert all(torch.equal(value, teacher[name]) for name, value in learner.teacher.state_dict().items())


def test_the_doubled_network_predicts_and_the_single_one_is_carried_on() -> None:
    boosted, compressed = session_of(), session_of(evaluate="compressed")
    for session in (boosted, compressed):
        for index in range(2):
            learn_stage(session, index)
    assert len(backbone_of(boosted).older) == 1
    assert len(backbone_of(compressed).older) == 0
    carried = [single_of(session) for session in (boosted, compressed)]
    assert all(torch.equal(carried[0][name], value) for name, value in carried[1].items())
    state = compressed.learner.network.state_dict()
    assert all(torch.equal(state[name], value) for name, value in carried[0].items())
    for session, dim in ((boosted, 128), (compressed, 64)):
        assert session.learner.class_means is not None
        assert session.learner.class_means.shape == (4, dim)
        begin_stage(session, 2)
        for name, value in backbone_of(session).older[0].state_dict().items():
            assert torch.equal(value, carried[0][f"backbone.{name}"]), name
        assert torch.equal(head_of(session).weight[:4, :64], carried[0]["head.weight"][:4])


@pytest.mark.parametrize("evaluate", ["boosted", "compressed"])
def test_it_learns_new_classes_and_keeps_the_old_ones(evaluate: str) -> None:
    # With three exemplars of a class, the published beta would scale old classes by 5.
    config = tiny_config("foster", epochs=8, finetune=12).with_settings(evaluate=evaluate, beta1=(0.5,), beta2=0.5)
    session = tiny_session(config)
    for index in range(2):
        learn_stage(session, index)
    _, by_stage, _ = session.evaluate(1)
    assert min(by_stage["cnn"]) >= 50  # chance is one in four


# What is kept


def test_a_state_of_any_size_is_taken_over_by_a_learner_of_any_size() -> None:
    session, states = session_of(), []
    for index in range(2):
        learn_stage(session, index)
        states.append({name: value.clone() for name, value in session.learner.state_dict().items()})
    begin_stage(session, 2)
    states.append({name: value.clone() for name, value in session.learner.state_dict().items()})
    learner = session_of().learner
    for index in (2, 0, 1):
        learner.buffers.clear()
        learner.load_state_dict(states[index])
        found = learner.state_dict()
        assert found.keys() == states[index].keys()
        assert all(torch.equal(found[name], value) for name, value in states[index].items())


RESUMED = tiny_config("foster", base=1, increment=1, finetune=2)
RESUMED_STORE = toy_store(num_classes=3, per_class=8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Where a run ends that was never stopped."""
    return run_whole(RESUMED, RESUMED_STORE, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("phase", ["main", "compression"])
def test_stopped_in_any_phase_it_resumes_exactly(phase: str, whole: dict[str, Tensor], tmp_path: Path) -> None:
    assert any(name.startswith("network.backbone.older.0.") for name in whole)
    saved = run_stopped(RESUMED, RESUMED_STORE, tmp_path / "stopped", 2, starts(2, phase))
    assert (saved.stage, saved.phase) == (2, phase)
    assert_resumes_to(whole, tmp_path / "stopped", RESUMED_STORE)


def test_a_run_with_a_base_stage_from_the_cache_is_the_run_without(tmp_path: Path) -> None:
    cache, config = StageCache(tmp_path), tiny_config("foster")
    runs = [list(run(config, toy_store(), cache=cache)) for _ in range(2)]
    assert [sum(isinstance(event, BaseReused) for event in events) for events in runs] == [0, 1]
    losses = [[e.terms for e in events if isinstance(e, EpochFinished) and e.stage > 0] for events in runs]
    assert losses[0] == losses[1]


# Settings and recipes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta1": ()}, r"beta1 must be at least 0 and below 1, got \(\)"),
        ({"beta1": (0.9, 1.0)}, r"beta1 must be at least 0 and below 1, got \(0.9, 1.0\)"),
        ({"beta1": (-0.1,)}, "beta1 must be at least 0"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and below 1, got 1.0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"lambda_kd": -1.0}, "lambda_kd must be at least 0"),
        ({"evaluate": "both"}, "evaluate must be one of boosted, compressed, got 'both'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EngramError, match=words):
        tiny_config("foster").with_settings(**change)


def test_a_list_of_betas_can_be_typed() -> None:
    config = recipe("foster-mini-b10-s5").with_value("settings.beta1", "0.98,0.975,0.97")
    assert settings_of(config).beta1 == (0.98, 0.975, 0.97)


def test_a_backbone_that_it_cannot_copy_is_refused_before_training(clean_registries: None) -> None:
    register_backbone("foreign")(Foreign)
    with pytest.raises(EngramError, match=r"foster cannot use the backbone foreign: .*, such as resnet32; choose"):
        tiny_session(tiny_config("foster", backbone="foreign"))


def test_the_recipes_have_the_published_schedule() -> None:
    config = recipe("foster-cifar100-b50-s10")
    settings = settings_of(config)
    assert (config.backbone, config.predictor, str(config.memory)) == ("resnet32", "cnn", "per_class=20")
    trainings = (settings.train, settings.boost, settings.compress)
    assert [(each.epochs, each.weight_decay) for each in trainings] == [(200, 5e-4), (170, 5e-4), (130, 0.0)]
    for training in trainings:
        rates = learning_rates(training, 10)
        assert (training.batch_size, training.clip, float(rates[0])) == (128, None, pytest.approx(0.1))
        assert float(rates[-1]) < 1e-4
    small = settings_of(recipe("foster-mini-b10-s5"))
    assert (small.train.epochs, small.boost.epochs, small.compress.epochs) == (16, 16, 10)
    assert small.compress.weight_decay == 0
    assert tiny_session(tiny_config("foster", epochs=3, finetune=2)).card()["Epochs"] == "3 per stage, 2 of compression"
