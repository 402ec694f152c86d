"""What every registered method keeps to, whatever it does: the same short run of each, looked at from all sides."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

import engram.experiment.runner
from engram.contract import ImageStateRows, Learner, Method, Phase, Step, Training, register
from engram.contract.settings import OPTIMISERS, SCHEDULES, setting, with_role
from engram.core.errors import EngramError
from engram.core.events import EpochFinished, RunFinished, StageFinished, StageStarted
from engram.data.memory import MemoryConfig
from engram.data.stage import Stage
from engram.data.store import DataSplit, ImageStore
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods import METHODS, find_method
from engram.methods.blocks.batches import CutMix, Mixed
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
from engram.methods.bounds import Replay
from engram.methods.dde import NeighbourLogits, Neighbours
from helpers import (
    assert_resumes_to,
    begin_stage,
    parameters_of,
    run_stopped,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)

# Beyond what every tiny run has; a method that needs nothing more is not listed.
SETTINGS: dict[str, dict[str, Any]] = {
    "afc": {"importance_samples": 20},
    "gdumb": {"rehearse": Training(epochs=8, batch_size=4, lr=0.05, remainder="keep")},
    "icarl": {"train__lr": 1.0},
    "bic": {"correction__epochs": 4},
    "der": {"warmup": 0.5},
    "derpp": {"replay": 4},
    "er-ace": {"replay": 4},
    "ssil": {"replay": 4},
    "ucir-dde": {"dde__neighbours": 3, "dde__removal": "learned"},
    "podnet-dde": {"dde__neighbours": 3},
}
# Phases that learn from a teacher alone, without labels.
UNLABELLED = {"compression"}
# How far, in levels of 255, a pixel of an exemplar may be from the image it came from.
CHANGED = {"mnemonics": 2}
# What the loss falls below, of its start. With DDE half of the likelihood is the neighbours', which are never of an old
# image's class: its loss is log 2 at the least.
FALLS_BELOW = {"ucir-dde": 0.95, "podnet-dde": 0.95}
# The images of the base stage that a method does not train on, of 24.
HELD_BACK = {"bic": 2}


@dataclass(frozen=True)
class Played:
    """A finished run: its events, its result, and the learner it leaves behind."""

    events: list[Any]
    result: dict[str, Any]
    session: Session
    base: dict[str, Tensor]  # the state after the base stage
    state: dict[str, Tensor]
    memory_sizes: list[int]
    recordings: dict[int, list[Any]]  # of each stage that began: the keys of its phases
    has_teacher: bool  # whether a phase has one


def play(method: str, store: ImageStore, stages: int = 3, **changes: Any) -> Played:
    """A run of the method through so many stages; through all of them, it must finish."""
    config = tiny_config(method, **{"batch_size": 12} | changes).with_settings(**SETTINGS.get(method, {}))
    sessions: list[Session] = []
    recordings: dict[int, list[Any]] = {}
    teachers: set[bool] = set()
    describe = find_method(method).kind.phases

    def phases(self: Method, learner: Learner, stage: Stage, passes: Any) -> list[Phase]:
        described = describe(self, learner, stage, passes)
        recordings[stage.index] = [phase.recording_key() for phase in described]
        teachers.update(phase.teacher for phase in described)
        return described

    class Watched(Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sessions.append(self)

    events, sizes, states = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engram.experiment.runner, "Session", Watched)
        patch.setattr(find_method(method).kind, "phases", phases)
        for event in run(config, store):
            events.append(event)
            if isinstance(event, StageFinished):
                learner = sessions[0].learner
                sizes.append(len(learner.memory))
                states.append({name: value.clone() for name, value in learner.state_dict().items()})
                if len(states) == stages < 3:
                    break
    last = events[-1]
    assert isinstance(last, RunFinished) == (stages == 3)
    result = dict(last.result) if isinstance(last, RunFinished) else {}
    return Played(events, result, sessions[0], states[0], states[-1], sizes, recordings, True in teachers)


@cache
def played(method: str) -> Played:
    """The run of the method on the toy set that several tests look at."""
    return play(method, toy_store(), seed=1)


@cache
def training_stages(method: str) -> list[int]:
    """The stages that have a phase; a stage without one has a closed form."""
    return [stage.stage for stage in tiny_session(played(method).session.config).plan() if stage.phases]


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# The tests of a method follow each other, so that a process beside others plays the runs of its own methods only.
methods = pytest.mark.parametrize("method", sorted(METHODS), scope="module")


def test_what_is_said_here_of_methods_is_of_known_ones() -> None:
    assert SETTINGS.keys() | CHANGED.keys() | FALLS_BELOW.keys() | HELD_BACK.keys() <= METHODS.keys()


@pytest.mark.parametrize(
    "name", ["", "a/b", "../../x", "My Method", "Mine", "my_method", "my--method", "-mine", "mine-", "mine\n", 3]
)
def test_a_method_is_called_as_a_part_of_a_recipes_name_can_be(name: Any) -> None:
    with pytest.raises(EngramError, match=r"cannot be called .*lower-case letters and digits, with single dashes"):
        register(name, settings=LSCSettings, title="Mine")(Replay)
    assert name not in METHODS


def test_a_method_may_not_be_taken_for_an_nme_recipe() -> None:
    with pytest.raises(
        EngramError, match="'afc-nme': recipes of afc that predict by nme have that name; choose a name"
    ):
        register("afc-nme", settings=LSCSettings, title="Mine")(Replay)
    assert "afc-nme" not in METHODS


@dataclass(frozen=True)
class Lacking(LSCSettings):
    weight: float = field(kw_only=True)


@dataclass(frozen=True)
class Unwilling(LSCSettings):
    weight: float = setting(-1.0, at_least=0)


class Guessing(LSCMethod[LSCSettings]):
    predictors = ("cnn", "guess")


class Plain(LSCMethod[LSCSettings]):
    predictors: Any = "cnn"


class Silent(LSCMethod[LSCSettings]):
    predictors = ()


@pytest.mark.parametrize(
    ("made_of", "given", "sentence"),
    [
        (Replay, {"settings": Lacking}, r"'weight'\); give every setting of Lacking a valid default"),
        (Replay, {"settings": Unwilling}, r"without arguments \(weight must be at least 0, got -1"),
        (Replay, {"settings": dict}, "settings of mine must be a subclass of engram"),
        (Replay, {"settings": LSCSettings()}, "settings of mine must be a subclass of"),
        (Replay, {"memory": "lots"}, "memory of mine must be one of needed, none, all, optional, got 'lots'"),
        (Replay, {"selection": "best"}, r"selection of mine must be one of herding, .*, got 'best'"),
        (Guessing, {}, r"Guessing.predictors of mine must be a tuple of some of cnn, nme, got \('cnn', 'guess'\)"),
        (Plain, {}, "must be a tuple of some of cnn, nme, got 'cnn'"),
        (Silent, {}, r"must be a tuple of some of cnn, nme, got \(\)"),
        (LSCSettings, {}, "register takes a subclass of Method"),
        (print, {}, r"mine is registered with .*; register takes a subclass of Method"),
    ],
)
def test_what_no_run_could_be_made_of_is_not_registered(made_of: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        register("mine", **{"settings": LSCSettings, "title": "Mine"} | given)(made_of)
    assert "mine" not in METHODS


@pytest.mark.parametrize("memory", ["none", "optional"])
def test_a_method_without_exemplars_may_not_predict_by_them(memory: Any) -> None:
    assert "nme" in Replay.predictors
    with pytest.raises(EngramError, match=r'mine cannot predict by nme.*write predictors = \("cnn",\) in Replay'):
        register("mine", settings=LSCSettings, title="Mine", memory=memory)(Replay)
    assert "mine" not in METHODS


@methods
def test_it_can_be_described(method: str) -> None:
    info = find_method(method)
    assert info.name == method
    assert info.title
    assert isinstance(info.make(info.settings()), Method)


@methods
def test_its_head_grows_with_the_stages(method: str) -> None:
    run_ = played(method)
    assert [event.num_seen for event in run_.events if isinstance(event, StageStarted)] == [2, 4, 6]
    assert run_.session.learner.num_classes == 6
    assert [stage["classes"] for stage in run_.result["stages"]] == [2, 4, 6]


@methods
def test_it_reports_each_of_its_predictors(method: str) -> None:
    run_ = played(method)
    predictors = set(run_.session.method.predictors)
    assert "cnn" in predictors
    for index, stage in enumerate(run_.result["stages"]):
        assert set(stage["accuracy"]) == predictors
        for name, by_stage in stage["accuracy_by_stage"].items():
            assert len(by_stage) == index + 1
            # The toy stages are of equal size, so the accuracy over all is the mean over stages.
            assert stage["accuracy"][name] == pytest.approx(np.mean(by_stage))
    assert set(run_.result["average_incremental_accuracy"]) == predictors


@methods
def test_its_terms_stay_finite_and_are_named(method: str) -> None:
    epochs = [event for event in played(method).events if isinstance(event, EpochFinished)]
    assert {event.stage for event in epochs} == set(training_stages(method))
    for event in epochs:
        assert "classification" in event.terms or event.phase in UNLABELLED
        assert np.isfinite(list(event.terms.values())).all()


@methods
def test_it_keeps_its_memory_budget(method: str) -> None:
    run_ = played(method)
    memory = run_.session.learner.memory
    none = [0, 0, 0]
    expected = {"needed": [6, 12, 18], "none": none, "all": [24, 48, 72], "optional": none}
    assert run_.memory_sizes == expected[find_method(method).memory]
    for label in memory.labels:
        samples = memory.of(label)
        assert set(samples.labels.tolist()) == {label}
        # Each exemplar is an image of the training split, pixel by pixel, of the class it says.
        train = run_.session.store.train
        apart = train.images[samples.sources.numpy()].astype(int) - samples.pixels.numpy()
        assert np.abs(apart).max() <= CHANGED.get(method, 0)
        assert set(train.class_ids[samples.sources.numpy()]) == {run_.session.stream.order[label]}


@methods
def test_another_seed_gives_other_numbers(method: str) -> None:
    one, other = played(method).base, play(method, toy_store(), stages=1, seed=2).base
    for name in ("network.backbone.conv.weight", "network.head.weight"):
        assert not torch.allclose(one[name], other[name], atol=1e-3)


@methods
def test_its_loss_falls_on_what_can_be_learned(method: str) -> None:
    run_ = play(method, toy_store(), stages=2, epochs=8, batch_size=8)
    for stage in range(2):
        main = [
            event.terms["classification"]
            for event in run_.events
            if isinstance(event, EpochFinished) and event.stage == stage and event.phase == "main"
        ]
        assert len(main) == (8 if stage in training_stages(method) else 0)
        if not main:
            continue
        below = FALLS_BELOW.get(method, 0.8) if stage else 0.8
        assert np.mean(main[-3:]) < below * np.mean(main[:2]), f"stage {stage}: {main}"
    # Chance is 50 percent on the two base classes.
    base = next(event for event in run_.events if isinstance(event, StageFinished))
    assert base.accuracy["cnn"] >= 75


@methods
@pytest.mark.parametrize("remainder", ["drop", "keep"])
def test_a_stage_smaller_than_a_batch_trains(method: str, remainder: str) -> None:
    if not with_role(find_method(method).settings(), "main"):
        pytest.skip(f"{method} trains nothing")
    session = tiny_session(tiny_config(method, batch_size=500).with_settings(train__remainder=remainder))
    stage = begin_stage(session, 0)
    before = parameters_of(session.learner.network)
    sizes: list[int] = []
    phases = session.method.phases(session.learner, stage, session.engine)
    if not phases:
        pytest.skip(f"{method} trains nothing in the base stage")
    for number, phase in enumerate(phases):

        def spy(step: Step, phase: Any = phase) -> dict[str, Tensor]:
            sizes.append(len(step.labels))
            return phase.loss(step)

        for _ in session.engine.start(session.learner, stage, replace(phase, loss=spy), number):
            pass
    assert sizes == [24 - HELD_BACK.get(method, 0)] * 2
    assert not torch.equal(
        session.learner.network.backbone.get_parameter("conv.weight"), before["backbone.conv.weight"]
    )


@methods
def test_one_class_at_a_time_trains_and_shares_a_budget(method: str) -> None:
    shared = find_method(method).memory == "needed"
    memory = tiny_config(method).memory
    memory = replace(memory, budget="total", size=11) if shared else memory
    run_ = play(method, toy_store(num_classes=3), base=1, increment=1, epochs=1, memory=memory)
    assert [stage["classes"] for stage in run_.result["stages"]] == [1, 2, 3]
    assert not shared or run_.memory_sizes == [11, 10, 9]
    for event in run_.events:
        if isinstance(event, EpochFinished):
            assert np.isfinite(list(event.terms.values())).all()


@methods
def test_a_teacher_is_kept_where_a_phase_has_one(method: str) -> None:
    run_ = played(method)
    assert run_.session.method.uses_teacher == run_.has_teacher
    assert any(name.startswith("teacher.") for name in run_.state) == run_.has_teacher


@methods
def test_one_loss_serves_every_stage(method: str) -> None:
    """A step is recorded once: what changes from stage to stage is in its tensors, not in its loss."""
    recordings = played(method).recordings
    assert recordings.keys() == {0, 1, 2}
    assert recordings[1] == recordings[2]


def without_values(session: Session, stage: Stage, phase: Phase) -> None:
    """Takes the phase's loss and its gradient over tensors that have a shape and no values."""
    learner = session.learner
    network, teaching = (copy.deepcopy(each).to("meta") for each in (learner.network, learner.teacher))
    buffers = {name: value.to("meta") for name, value in learner.buffers.items()}
    arrival = stage.arrival(network.head.capacity).to("meta")
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which knows no such device
        streams, batch = {}, 0
        for name, size in (*phase.streams, ("main", 8)):
            streams[name], batch = slice(batch, batch + size), batch + size
        images, labels = torch.rand(batch, 3, 8, 8), torch.zeros(batch, dtype=torch.int64)
        kept = {name: value.to("meta") for name, value in stage.pool.state.items()}
        student = network(images)
        with torch.no_grad():
            teacher = teaching(images) if phase.teacher else None
        weights = {name: torch.ones(()) for name in phase.weights}
        extras: list[Any] = []
        for extension in phase.extensions:
            if isinstance(extension, CutMix):
                extras.append(Mixed(labels, torch.ones(())))
            if isinstance(extension, Neighbours):
                shape = (batch, extension.count)
                extras.append(NeighbourLogits(torch.rand(*shape, student.logits.shape[1]), torch.rand(shape)))
        given = (labels, labels > 0, student, teacher, weights, buffers)
        rows = ImageStateRows(kept, labels, labels)
        step = Step(
            *given, arrival=arrival, stage=torch.tensor(stage.index), images=rows, streams=streams, extras=tuple(extras)
        )
        terms = phase.loss(step)
        parameters = [each for each in network.parameters() if each.requires_grad]
        torch.autograd.grad(torch.stack(list(terms.values())).sum(), parameters, allow_unused=True)


@methods
def test_its_losses_look_at_no_value(method: str) -> None:
    """A step that is recorded has no values yet, so a loss may not branch on one, nor may a shape come of one."""
    session = tiny_session(played(method).session.config)
    session.learner.load_state_dict({name: value.clone() for name, value in played(method).base.items()})
    stage = begin_stage(session, 1)
    session.learner.network.train()
    for phase in session.method.phases(session.learner, stage, session.engine):
        without_values(session, stage, phase)


@pytest.mark.parametrize("peek", [lambda term: term * float(term), lambda term: term[term > 0].sum()])
def test_a_loss_that_looks_at_a_value_is_found_out(peek: Any) -> None:
    session = tiny_session()
    stage = begin_stage(session, 0)
    (main,) = session.method.phases(session.learner, stage, session.engine)

    def loss(step: Step) -> dict[str, Tensor]:
        return {name: peek(term) for name, term in main.loss(step).items()}

    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta tensor"):
        without_values(session, stage, replace(main, loss=loss))


@methods
def test_its_state_comes_back(method: str) -> None:
    run_ = played(method)
    other = tiny_session(run_.session.config)
    other.learner.load_state_dict({name: value.clone() for name, value in run_.state.items()})
    assert_same_state(run_.state, other.learner.state_dict())
    accuracy, by_stage, _ = other.evaluate(2)
    assert accuracy == run_.result["stages"][2]["accuracy"]
    assert by_stage == run_.result["stages"][2]["accuracy_by_stage"]


def with_other_test_images(store: ImageStore) -> ImageStore:
    random = np.random.default_rng(9)
    images = random.integers(0, 256, store.test.images.shape, dtype=np.uint8)
    return replace(store, test=DataSplit(images, random.permutation(store.test.class_ids)))


@methods
def test_stopped_inside_a_stage_with_a_past_it_resumes_exactly(method: str, tmp_path: Path) -> None:
    """So the same seed gives the same numbers; and test images have no way into training, as these are others."""
    store, stages = with_other_test_images(toy_store()), training_stages(method)[:2]
    if not stages:
        assert_same_state(played(method).state, play(method, store, seed=1).state)
        return
    saved = run_stopped(played(method).session.config, store, tmp_path / "run", 2, starts(stages[-1]))
    assert (saved.stage, saved.epoch) == (stages[-1], 1)
    assert_resumes_to(played(method).state, tmp_path / "run", store)


@methods
def test_planned_phases_are_those_that_run(method: str) -> None:
    run_ = played(method)
    planned = tiny_session(run_.session.config).plan()
    for stage in planned:
        ran = [event for event in run_.events if isinstance(event, EpochFinished) and event.stage == stage.stage]
        phases = list(dict.fromkeys(event.phase for event in ran))
        assert phases == [phase.name for phase in stage.phases]
        for phase in stage.phases:
            assert sum(event.phase == phase.name for event in ran) == phase.epochs


@methods
def test_no_epochs_still_ends_in_a_result(method: str) -> None:
    config = tiny_config(method)
    settings = {
        name: Training(epochs=0) for name, value in vars(config.settings).items() if isinstance(value, Training)
    }
    config = config.with_settings(**settings)
    events = list(run(config, toy_store(num_classes=4)))
    assert isinstance(events[-1], RunFinished)
    assert len(events[-1].result["stages"]) == 2


def another(value: Any, hint: Any) -> Any:
    """A value that a setting of this type can have instead; of settings in settings, every one is another."""
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        inner = {field.name: another(getattr(value, field.name), hints[field.name]) for field in fields(value)}
        return replace(value, **inner)  # pyright: ignore[reportArgumentType]
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(choice for choice in reversed(get_args(kind)) if choice != value)
    if bool in kinds:
        return value is False
    if isinstance(value, str):  # the name of an optimiser or of a schedule
        registry = OPTIMISERS if value in OPTIMISERS else SCHEDULES
        return next(name for name in registry.names() if name != value)
    if isinstance(value, tuple):
        return tuple(each / 2 for each in value) or (0.5,)
    return (value or 0) + 1 if int in kinds else (value or 0.5) / 2


def base_config(method: str) -> RunConfig:
    return tiny_config(method).with_settings(**SETTINGS.get(method, {}))


@cache
def any_session() -> Session:
    session = tiny_session()
    assert session.fingerprint
    return session


@cache
def base_key(config: RunConfig) -> str | None:
    """The key of a session with this configuration, whose images and classes are those of every tiny one."""
    session = copy.copy(any_session())
    session.config, session.method = config, find_method(config.method).make(config.settings)
    return session.base_key()


@cache
def trained_base(config: RunConfig) -> dict[str, Tensor]:
    """The network after the base stage, as the cache keeps it."""
    session = tiny_session(config)
    stage = begin_stage(session, 0)
    for number, phase in enumerate(session.method.phases(session.learner, stage, session.engine)):
        train_phase(session, stage, phase, number)
    return session.learner.network.state_dict()


@methods
def test_its_base_stage_is_that_of_all_that_share_its_key(method: str) -> None:
    """The guard against a wrong base stage: neither what is left out of the key nor the method changes it by a bit."""
    config = base_config(method)
    key = base_key(config)
    if key is None:
        pytest.skip(f"{method} does not share its base stage")
    hints = get_type_hints(type(config.settings))
    others = {name: another(value, hints[name]) for name, value in vars(config.settings).items()}
    left_out = {name: other for name, other in others.items() if base_key(config.with_settings(**{name: other})) == key}
    assert "train" not in left_out
    memory = {"needed": MemoryConfig(size=5), "optional": MemoryConfig(size=3)}.get(find_method(method).memory)
    changed = replace(config.with_settings(**left_out), memory=memory or config.memory)
    assert base_key(changed) == key
    assert_same_state(trained_base(changed), trained_base(config))
    # The same as that of the first is the same as that of all.
    first = next(other for other in sorted(METHODS) if base_key(base_config(other)) == key)
    assert_same_state(trained_base(base_config(first)), trained_base(config))
