"""DER: backbones that are added and never change again, a head over all of them, and a second one for the newest."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engram import recipe, run
from engram.contract import Phase, Step, Training
from engram.contract.learner import Learner
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.core.events import BaseReused, EpochFinished
from engram.experiment.base_cache import StageCache
from engram.experiment.session import Session
from engram.experiment.stage_work import STEP_COST, PhasePlan
from engram.methods import find_method
from engram.methods.der import DERSettings, ExpandingBackbone, ExpandingHead, auxiliary_loss
from engram.nn.backbone import both_means
from engram.nn.backbones import register_backbone
from engram.nn.network import Output
from engram.nn.resnet import ResNet, resnet10
from helpers import (
    assert_resumes_to,
    buffers_of,
    learn_stage,
    parameters_of,
    predict,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)


def session_of(**settings: Any) -> Session:
    return tiny_session(tiny_config("der").with_settings(**settings))


def backbone_of(session: Session) -> ExpandingBackbone:
    backbone = session.learner.network.backbone
    assert isinstance(backbone, ExpandingBackbone)
    return backbone


def head_of(session: Session) -> ExpandingHead:
    head = session.learner.network.head
    assert isinstance(head, ExpandingHead)
    return head


def newest_of(session: Session) -> dict[str, Tensor]:
    state = backbone_of(session).state_dict()
    return {name: value.clone() for name, value in state.items() if not name.startswith("older.")}


def phases_of(session: Session, index: int) -> tuple[Any, dict[str, Phase]]:
    """The stage with its head grown, and its phases by name."""
    stage = session.stage(index)
    session.method.grow(session.learner, stage, session.engine)
    return stage, {phase.name: phase for phase in session.method.phases(session.learner, stage, session.engine)}


def some_images(seed: int = 3) -> Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


# The losses


def slow_auxiliary(scores: list[float], label: int, new: list[int]) -> float:
    """-log of the target's share of exp(score) over column 0 (any old class) and the new columns."""
    target = label if label in new else 0
    total = sum(math.exp(scores[column]) for column in [0, *new])
    return math.log(total) - scores[target]


@pytest.mark.parametrize("new", [[4], [3, 4], [2, 3, 4]])
def test_the_auxiliary_loss_is_cross_entropy_over_new_classes_and_one_for_all_old(new: list[int]) -> None:
    random = np.random.default_rng(len(new))
    labels = [0, 1, new[0], new[-1], 1]
    scores = torch.tensor(random.normal(size=(5, 7)) * 3, requires_grad=True)
    columns = torch.tensor([column in new for column in range(7)])
    losses = auxiliary_loss(scores, torch.tensor(labels), columns)
    expected = [slow_auxiliary(row, label, new) for row, label in zip(scores.tolist(), labels, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    losses.sum().backward()
    assert scores.grad is not None
    touched = scores.grad.abs().sum(dim=0) > 0
    assert touched.tolist() == [column == 0 or column in new for column in range(7)]


def test_an_old_image_counts_as_old_whatever_its_class() -> None:
    scores = torch.randn(1, 6, dtype=torch.float64).expand(3, 6)
    new = torch.tensor([False, False, False, True, True, False])
    one, other, another = auxiliary_loss(scores, torch.tensor([0, 1, 2]), new)
    assert one == other == another


def output_of(logits: Tensor, auxiliary: Tensor) -> Output:
    return Output((), torch.zeros(len(logits), 1), logits, logits, torch.ones(()), extras={"auxiliary": auxiliary})


def test_the_terms_are_those_of_the_formulas_with_classes_not_seen() -> None:
    random = np.random.default_rng(5)
    raw, aside = random.normal(size=(4, 6)), random.normal(size=(4, 6))
    logits = torch.tensor(raw)
    logits[:, 4:] = -torch.inf
    logits.requires_grad_()
    labels, arrival = [0, 3, 2, 1], torch.tensor([0, 0, 1, 1, 2**31, 2**31])
    method = session_of(lambda_aux=0.5, temperature=3.0).method
    step = Step(
        torch.tensor(labels),
        torch.zeros(4, dtype=torch.bool),
        output_of(logits, torch.tensor(aside, requires_grad=True)),
        None,
        {"auxiliary": torch.tensor(0.5)},
        {},
        arrival=arrival,
        stage=torch.tensor(1),
    )
    terms = method.loss(step)  # pyright: ignore[reportAttributeAccessIssue]

    def slow(divisor: float) -> float:
        shares = [[math.exp(value / divisor) for value in row[:4]] for row in raw]
        return float(np.mean([math.log(sum(s) / s[label]) for s, label in zip(shares, labels, strict=True)]))

    expected = np.mean([slow_auxiliary(row, label, [2, 3]) for row, label in zip(aside.tolist(), labels, strict=True)])
    assert terms["classification"].item() == pytest.approx(slow(1.0))
    assert terms["auxiliary"].item() == pytest.approx(0.5 * expected)
    balanced = method.balance(step)  # pyright: ignore[reportAttributeAccessIssue]
    assert list(balanced) == ["classification"]
    assert balanced["classification"].item() == pytest.approx(slow(3.0))
    (terms["classification"] + balanced["classification"]).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 4:].any()


# The backbone and the head


def shaken(seed: int) -> ExpandingBackbone:
    """An expanding backbone whose norms have learned something, so that modes and statistics matter."""
    backbone = ExpandingBackbone(resnet10(torch.Generator().manual_seed(seed)))
    draws = torch.Generator().manual_seed(seed)
    for value in backbone.parameters():
        value.data.add_(torch.randn(value.shape, generator=draws) * 0.1)
    backbone.train()(torch.rand(6, 3, 8, 8, generator=draws))
    return backbone


def test_an_older_backbone_is_what_the_newest_was_and_only_the_newest_has_parameters() -> None:
    backbone = shaken(1)
    names = [name for name, _ in backbone.named_parameters()]
    before, places = backbone.state_dict(), [value.data_ptr() for value in backbone.parameters()]
    before = {name: value.clone() for name, value in before.items()}
    backbone.expand()
    assert [name for name, _ in backbone.named_parameters()] == names
    assert [value.data_ptr() for value in backbone.parameters()] == places
    assert backbone.dim == 128
    for name, value in before.items():
        assert torch.equal(backbone.state_dict()[name], value)
        assert torch.equal(backbone.state_dict()[f"older.0.{name}"], value)
        assert backbone.state_dict()[f"older.0.{name}"].data_ptr() != backbone.state_dict()[name].data_ptr()


def test_looking_back_gives_each_older_backbone_as_in_evaluation_in_order() -> None:
    backbone = shaken(1)
    assert backbone.branch_embeddings(some_images()) is None
    expected: list[Tensor] = []
    for _ in range(3):
        with torch.no_grad():
            last = backbone.eval()(some_images())[0][-1]
        expected.append(last.double())
        backbone.expand()
        for value in backbone.parameters():
            value.data.mul_(0.9)
    found = backbone.train().branch_embeddings(some_images())
    assert found is not None
    assert found.shape == (2, 5, 192)
    for number, last in enumerate(expected):
        raw, rectified = found[:, :, 64 * number : 64 * (number + 1)].double()
        pixels = last.shape[2] * last.shape[3]
        torch.testing.assert_close(raw, last.sum(dim=(2, 3)) / pixels, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rectified, last.clamp(min=0).sum(dim=(2, 3)) / pixels, rtol=1e-5, atol=1e-6)


def test_older_backbones_take_no_notice_of_the_batch_and_keep_their_statistics_while_the_newest_trains() -> None:
    backbone = shaken(2)
    backbone.expand()
    before = buffers_of(backbone)
    backbone.train()
    together, alone = backbone.branch_embeddings(some_images()), backbone.branch_embeddings(some_images()[:1])
    assert together is not None
    assert alone is not None
    torch.testing.assert_close(together[:, :1], alone, rtol=1e-4, atol=1e-5)
    backbone(some_images())
    after = buffers_of(backbone)
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("older."), name
    assert backbone.training
    assert not any(module.training for module in backbone.older.modules())


def test_both_means_are_of_the_map_and_of_its_positive_part() -> None:
    maps = torch.tensor([[[[1.0, -3.0], [5.0, 0.0]]]])
    assert both_means(maps).tolist() == [[[0.75]], [[1.5]]]


def test_a_network_classifies_by_all_embeddings_side_by_side() -> None:
    session = session_of()
    learn_stage(session, 0)
    learn_stage(session, 1)
    network = session.learner.network.eval()
    backbone, head = backbone_of(session), head_of(session)
    with torch.no_grad():
        output = network(some_images())
        normalised = (some_images() - network.mean) / network.std
        last = [each(normalised)[0][-1] for each in (backbone.older[0], backbone)]
    embedding = torch.cat([each.mean(dim=(2, 3)) for each in last], dim=1)
    rectified = [each.relu().mean(dim=(2, 3)) for each in last]
    torch.testing.assert_close(output.embedding, embedding)
    torch.testing.assert_close(output.scores[:, :4], (torch.cat(rectified, dim=1) @ head.weight.T)[:, :4])
    assert output.scores[:, 4:].isneginf().all()
    torch.testing.assert_close(output.features, torch.cat(rectified, dim=1))
    torch.testing.assert_close(output.extras["auxiliary"], rectified[1] @ head.auxiliary.T)
    assert session.learner.class_means is not None
    assert session.learner.class_means.shape == (4, 128)


def test_the_names_of_a_state_tell_how_many_backbones_it_has() -> None:
    count = ExpandingBackbone(resnet10(torch.Generator())).count_branches
    assert count(["conv.weight", "groups.0.0.bn1.weight"]) == 0
    assert count(["conv.weight", "older.0.conv.weight", "older.0.bn.bias", "older.11.conv.weight"]) == 2


# What a stage does


def test_each_stage_freezes_the_backbone_of_the_one_before_for_good() -> None:
    session = session_of()
    kept: list[dict[str, Tensor]] = []
    for index in range(3):
        learn_stage(session, index)
        backbone = backbone_of(session)
        assert len(backbone.older) == index
        assert session.learner.network.head.get_parameter("weight").shape == (6, 64 * (index + 1))
        for number, expected in enumerate(kept):
            state = backbone.older[number].state_dict()
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(state[name], value), f"backbone {number}, {name}, at stage {index}"
        kept.append(newest_of(session))
    assert not torch.equal(kept[0]["conv.weight"], kept[1]["conv.weight"])
    assert not torch.equal(kept[0]["bn.running_mean"], kept[1]["bn.running_mean"])


def test_the_newest_starts_as_a_copy_and_every_row_of_the_head_is_new() -> None:
    session = session_of()
    learn_stage(session, 0)
    newest, weight = newest_of(session), head_of(session).weight.detach().clone()
    phases_of(session, 1)
    for name, value in newest_of(session).items():
        assert torch.equal(value, newest[name]), name
    fresh = head_of(session).weight.detach()
    assert fresh[:4].abs().sum(dim=1).all()
    assert not fresh[4:].any()
    assert not torch.equal(fresh[:2, :64], weight[:2])
    spread = float(fresh[:4].std()) * math.sqrt(128)
    assert spread == pytest.approx(1, rel=0.2)


def test_the_heads_start_anew_after_the_warm_up_and_before_the_balanced_phase() -> None:
    session = session_of(warmup=0.5)
    learn_stage(session, 0)
    stage, phases = phases_of(session, 1)
    assert list(phases) == ["warm-up", "main", "balance"]
    head, seen = head_of(session), [head_of(session).weight.detach().clone()]
    for number, phase in enumerate(phases.values()):
        if phase.start is not None:
            trained = head.weight.detach().clone(), head.auxiliary.detach().clone()
            phase.start()
            assert not torch.isclose(head.weight[:4], trained[0][:4]).any()
            assert not torch.isclose(head.auxiliary[:4], trained[1][:4]).any()
            assert all(not torch.equal(head.weight, other) for other in seen)
            seen.append(head.weight.detach().clone())
        train_phase(session, stage, dataclasses.replace(phase, start=None), number)
    assert len(seen) == 3


def test_the_balanced_phase_moves_the_head_alone_on_a_balanced_set() -> None:
    session = session_of(finetune__epochs=3)
    learn_stage(session, 0)
    stage, phases = phases_of(session, 1)
    train_phase(session, stage, phases["main"])
    before, buffers = parameters_of(session.learner.network), buffers_of(session.learner.network)
    balance = phases["balance"]
    assert balance.frozen
    train_phase(session, stage, balance, 1)
    for name, value in session.learner.network.named_parameters():
        assert torch.equal(value, before[name]) == name.startswith("backbone."), name
    for name, value in session.learner.network.named_buffers():
        assert torch.equal(value, buffers[name]), name
    labels = stage.pool.labels[balance.rows()]
    assert torch.bincount(labels).tolist() == [3, 3, 3, 3]
    assert len(labels) == balance.images


def test_the_auxiliary_term_reaches_the_newest_backbone_and_not_the_head_over_all() -> None:
    session = session_of()
    learn_stage(session, 0)
    _, phases = phases_of(session, 1)
    network = session.learner.network.train()
    stage = session.stage(1)
    arrival, labels = stage.arrival(6), torch.tensor([0, 1, 2, 3, 3])
    network.zero_grad()
    output, weights = network(some_images()), {"auxiliary": torch.ones(())}
    step = Step(labels, labels < 2, output, None, weights, {}, arrival=arrival, stage=torch.tensor(1))
    phases["main"].loss(step)["auxiliary"].backward()
    gradients = {name: value.grad for name, value in network.named_parameters()}
    assert gradients["backbone.conv.weight"] is not None
    assert gradients["backbone.conv.weight"].any()
    rows = gradients["head.auxiliary"]
    assert rows is not None
    assert rows.abs().sum(dim=1).bool().tolist() == [True, False, True, True, False, False]
    weight = gradients["head.weight"]
    assert weight is None or not weight.any()


def test_without_warm_up_and_balancing_there_is_one_phase() -> None:
    session = session_of(warmup=0.0, finetune__epochs=0)
    assert [[phase.name for phase in stage.phases] for stage in session.plan()] == [["main"]] * 3
    default = tiny_session(tiny_config("der", epochs=16))
    base, *later = [[(phase.name, phase.epochs) for phase in stage.phases] for stage in default.plan()]
    assert base == [("warm-up", 1), ("main", 16)]
    assert later == [[*base, ("balance", 1)]] * 2


def test_the_planned_work_of_an_image_grows_with_the_backbones() -> None:
    plans = tiny_session(tiny_config("der", epochs=16)).plan()

    def each(phase: PhasePlan) -> float:
        return phase.work / (phase.images + STEP_COST * phase.steps)

    assert [each(stage.phases[1]) for stage in plans] == pytest.approx([16.0, 16 * 1.3, 16 * 1.6])
    assert each(plans[2].phases[2]) == pytest.approx(0.9)


def test_it_learns_one_class_at_a_time() -> None:
    config = tiny_config("der", base=1, increment=1, epochs=3)
    events = list(run(config, toy_store(num_classes=4, per_class=8)))
    terms = [event.terms for event in events if isinstance(event, EpochFinished) and event.phase == "main"]
    assert ["auxiliary" in each for each in terms] == [False] * 3 + [True] * 9
    assert all(np.isfinite(list(each.values())).all() for each in terms)
    assert all(each["auxiliary"] > 0 for each in terms[3:])


def test_it_learns_new_classes_and_keeps_the_old_ones() -> None:
    session = tiny_session(tiny_config("der", epochs=8, finetune=8))
    for index in range(3):
        learn_stage(session, index)
    _, by_stage, _ = session.evaluate(2)
    assert min(by_stage["cnn"]) >= 50  # chance is one in six
    assert min(by_stage["nme"]) >= 50


# What is kept


def test_no_teacher_is_kept() -> None:
    session = session_of()
    learn_stage(session, 0)
    before = parameters_of(session.learner.teacher)
    learn_stage(session, 1)
    assert all(torch.equal(value, before[name]) for name, value in session.learner.teacher.named_parameters())


def states_of(session: Session) -> list[dict[str, Tensor]]:
    states: list[dict[str, Tensor]] = []
    for index in range(3):
        learn_stage(session, index)
        states.append({name: value.clone() for name, value in session.learner.state_dict().items()})
    return states


def test_a_state_of_any_size_is_taken_over_by_a_learner_of_any_size() -> None:
    states = states_of(session_of())
    learner = session_of().learner
    for index in (2, 0, 1, 1):
        learner.load_state_dict(states[index])
        found = learner.state_dict()
        assert found.keys() == states[index].keys()
        assert all(torch.equal(found[name], value) for name, value in states[index].items())
        embedding = learner.network.eval()(some_images()).embedding
        assert embedding.shape == (5, 64 * (index + 1))


def test_a_teacher_of_an_expanding_network_grows_with_it() -> None:
    session, other = session_of(), session_of()
    learner = session.learner
    learner = Learner(learner.network, other.learner.network, learner.memory, learner.seed)
    learn_stage(session, 0)
    learn_stage(session, 1)
    learner.snapshot_teacher()
    assert torch.equal(learner.teacher(some_images()).scores, learner.network.eval()(some_images()).scores)


def test_training_goes_on_from_a_state_as_it_would_have_gone_on() -> None:
    session = session_of()
    for index in range(2):
        learn_stage(session, index)
    other = session_of()
    other.learner.load_state_dict({name: value.clone() for name, value in session.learner.state_dict().items()})
    for each in (session, other):
        learn_stage(each, 2)
    found, expected = other.learner.state_dict(), session.learner.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


RESUMED = tiny_config("der", base=1, increment=1, finetune=2).with_settings(warmup=0.5)
RESUMED_STORE = toy_store(num_classes=3, per_class=8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Where a run ends that was never stopped."""
    return run_whole(RESUMED, RESUMED_STORE, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("phase", ["warm-up", "main", "balance"])
def test_stopped_in_any_phase_it_resumes_exactly(phase: str, whole: dict[str, Tensor], tmp_path: Path) -> None:
    assert any(name.startswith("network.backbone.older.1.") for name in whole)
    saved = run_stopped(RESUMED, RESUMED_STORE, tmp_path / "stopped", 2, starts(2, phase))
    assert (saved.stage, saved.phase) == (2, phase)
    assert_resumes_to(whole, tmp_path / "stopped", RESUMED_STORE)


# The base stage that runs share


def test_a_run_with_a_base_stage_from_the_cache_is_the_run_without(tmp_path: Path) -> None:
    cache, config = StageCache(tmp_path), tiny_config("der")
    runs = [list(run(config, toy_store(), cache=cache)) for _ in range(2)]
    assert [sum(isinstance(event, BaseReused) for event in events) for events in runs] == [0, 1]
    losses = [[e.terms for e in events if isinstance(e, EpochFinished) and e.stage > 0] for events in runs]
    assert losses[0] == losses[1]


# Settings and recipes


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"warmup": -0.1}, {"lambda_aux": -1.0}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(EngramError, match=f"{name} must be"):
        tiny_config("der").with_settings(**change)


class Foreign(ResNet):
    """A backbone of one's own, of which DER knows no way to make a copy."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(resnet10(generator).specification, generator)
        self.stem = torch.nn.Conv2d(3, 3, 1)


def test_a_backbone_that_it_cannot_copy_is_refused_before_training(clean_registries: None) -> None:
    register_backbone("foreign")(Foreign)
    with pytest.raises(EngramError, match=r"der cannot use the backbone foreign: .*, such as resnet32; choose"):
        tiny_session(tiny_config("der", backbone="foreign"))


def test_the_recipes_have_the_papers_schedule() -> None:
    config = recipe("der-cifar100-b50-s10")
    settings = config.settings
    assert isinstance(settings, DERSettings)
    assert (config.backbone, config.predictor, str(config.memory)) == ("resnet32", "cnn", "per_class=20")
    rates = learning_rates(settings.train, 1).tolist()
    assert rates == pytest.approx([0.1] * 100 + [0.01] * 20 + [0.001] * 40)
    assert learning_rates(settings.finetune, 1).tolist() == pytest.approx([0.1] * 15 + [0.01] * 15)
    assert (settings.temperature, settings.lambda_aux) == (5.0, 1.0)
    assert round(settings.warmup * settings.train.epochs) == 10
    for training in (settings.train, settings.finetune):
        assert (training.batch_size, training.weight_decay, training.clip) == (128, 5e-4, None)


def test_the_warm_up_rises_epoch_by_epoch_to_the_rate() -> None:
    training = Training(epochs=10, lr=0.1, schedule="rise")
    expected = [0.01 * epoch for epoch in range(1, 11)]
    assert learning_rates(training, 1).tolist() == pytest.approx(expected)
    assert learning_rates(training, 3).tolist() == pytest.approx([rate for rate in expected for _ in range(3)])
    assert learning_rates(dataclasses.replace(training, epochs=0), 3).tolist() == []


def test_the_published_backbone_has_recipes_of_its_own() -> None:
    assert recipe("der-resnet18-cifar100-b50-s5").backbone == "resnet18-small"
    config = tiny_config("der", backbone="resnet18-small", epochs=1, finetune=1)
    session = tiny_session(config, toy_store(num_classes=4, per_class=4))
    for index in range(2):
        learn_stage(session, index)
    assert backbone_of(session).dim == 1024
    # 1 + 2 * 8 convolutions and the head are the 18 layers.
    own = [name for name, _ in backbone_of(session).named_parameters() if "conv" in name]
    assert len(own) == 17


def test_short_recipes_shorten_the_warm_up_too() -> None:
    for name, epochs in (("der-mini-b10-s5", 16), ("der-folder", 60)):
        settings = recipe(name).settings
        assert isinstance(settings, DERSettings)
        assert settings.train.epochs == epochs
        assert 1 <= round(settings.warmup * epochs) <= 4
        # A new head on five images of each of twelve classes: as many steps as on CIFAR-100, about.
        steps, _ = settings.finetune.batches(60)
        assert settings.finetune.epochs * steps >= 200
        assert settings.train.milestones == find_method("der").settings().train.milestones  # pyright: ignore[reportAttributeAccessIssue]


def test_predictions_are_by_the_head_and_by_means_over_all_embeddings() -> None:
    session = session_of()
    learn_stage(session, 0)
    learn_stage(session, 1)
    images = torch.from_numpy(session.store.test.images[:8])
    embedding, scores = session.engine.infer(session.learner.network, images)
    assert embedding.shape == (8, 128)
    means = session.learner.class_means
    assert means is not None
    nearest = torch.cdist(F.normalize(embedding, dim=1), means).argmin(dim=1)
    found = predict(session, images)
    assert found["nme"].tolist() == nearest.tolist()
    assert found["cnn"].tolist() == scores.argmax(dim=1).tolist()
