"""The engine's own promises, where no GPU is needed to keep them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_config, make_store
from engram import EngramError
from engram.contract import AfterUpdate, Extension, Phase, Step, Terms, Training
from engram.contract.schedules import learning_rates
from engram.core.rng import generator
from engram.data.stage import NEVER
from engram.engine.buffers import PLANNED_STEPS, TERMS, DeviceBuffers
from engram.engine.capture import NotRecordable
from engram.engine.loss_history import Epoch, NonFiniteLoss
from engram.experiment.session import Session
from engram.methods.blocks.batches import CutMix, SecondStream
from engram.methods.dde import Neighbours, TrackMomentum
from engram.methods.der import FrozenBranches
from engram.methods.mnemonics import TrainFactors
from engram.methods.penalty import QuadraticPenalty
from engram.nn.network import Network, Part
from engram.nn.resnet import ResNet, resnet10, resnet18, resnet18_small, resnet32


class FakeRecording:
    """Stands for a CUDA graph: counts the recordings, and replays by taking the step."""

    made = 0

    def __init__(self, step: Callable[[], Any], state: Sequence[Tensor], memory: object = None) -> None:
        type(self).made += 1
        self.step, self.returned = step, None
        assert all(isinstance(tensor, Tensor) for tensor in state)

    def __call__(self) -> Any:
        self.returned = self.step()
        return self.returned


def learn(session: Session, index: int) -> None:
    """The training of one stage, and what the next needs."""
    stage = session.stage(index)
    learner, method, engine = session.learner, session.method, session.engine
    method.grow(learner, stage, engine)
    for number, phase in enumerate(method.phases(learner, stage, engine)):
        for _ in engine.start(learner, stage, phase, number):
            pass
    method.finish(learner, stage, engine)
    learner.snapshot_teacher()


def recording_session(monkeypatch: pytest.MonkeyPatch, recording: type) -> Session:
    """A session that would record its steps, on a CPU."""
    monkeypatch.setattr("engram.engine.runtime.CapturedStep", recording)
    session = Session(make_config(increment=1, settings__train__remainder="drop"), make_store())
    session.engine.capture, session.engine.shares_memory = True, False
    return session


def test_a_plan_for_more_steps_is_allocated_again() -> None:
    buffers = DeviceBuffers(torch.device("cpu"), pad=0)
    first = buffers.plan(3, 4)
    assert buffers.plan(PLANNED_STEPS, 4) is first
    version = buffers.version
    assert len(buffers.plan(PLANNED_STEPS + 1, 4)) == PLANNED_STEPS + 1 <= len(buffers.history)
    assert buffers.version > version, "what was recorded with the one before is recorded anew"


def test_a_recording_serves_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRecording, "made", 0)
    session = recording_session(monkeypatch, FakeRecording)
    made: list[int] = []
    for index in range(4):
        learn(session, index)
        made.append(FakeRecording.made)
    # The base stage's step and its sweep; with the first teacher the main and the balanced step, and the sweep again,
    # which could have read the importance that is there now; then no more.
    assert made == [2, 5, 5, 5]


def test_another_loss_or_a_moved_tensor_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRecording, "made", 0)
    session = recording_session(monkeypatch, FakeRecording)
    learner, engine = session.learner, session.engine
    stage = session.stage(0)
    session.method.grow(learner, stage, engine)
    (phase,) = session.method.phases(learner, stage, engine)

    def recorded(changed: object = phase) -> int:
        before = FakeRecording.made
        for _ in engine.start(learner, stage, changed, 0):  # pyright: ignore[reportArgumentType]
            break
        return FakeRecording.made - before

    assert recorded() == 1
    assert recorded() == 0
    assert recorded(replace(phase, loss=lambda step: dict(phase.loss(step)))) == 1
    assert recorded() == 1  # the slot holds one recording
    assert recorded(replace(phase, training=replace(phase.training, momentum=0.5))) == 1
    assert recorded() == 1
    learner.store("of the method", torch.zeros(3))  # a tensor that the step may have read under this name
    assert recorded() == 1
    learner.store("of the method", torch.ones(3))  # in place
    assert recorded() == 0


def key_of(**changes: Any) -> Any:
    """The recording key of a phase with something changed; it must be hashable."""
    fixed: dict[str, Any] = {"rows": key_of, "loss": key_of, "weights": {"distillation": 1.0}}
    fixed |= {"name": "main", "images": 8, "train": Part.NEW_CLASSES, "training": Training()}
    fixed["extensions"] = (CutMix(0.5),)
    key = Phase(**fixed | changes).recording_key()
    assert isinstance(hash(key), int)
    return key


def test_a_recording_key_has_every_field_that_a_step_depends_on() -> None:
    planned: dict[str, Any] = {"name": "other", "images": 9, "rows": learn, "start": learn, "augment": False}
    read: dict[str, Any] = {"loss": learn, "train": Part.OLD_CLASSES, "teacher": True, "frozen": True}
    read |= {"weights": {"pod": 1.0}, "extensions": ()}
    assert planned.keys() | read.keys() | {"training"} == {each.name for each in fields(Phase)}
    for name, value in planned.items():
        assert key_of(**{name: value}) == key_of(), name
    assert key_of(weights={"distillation": 2.0}) == key_of(), "a step reads weights from tensors"
    for name, value in read.items():
        assert key_of(**{name: value}) != key_of(), name
    planned = {"epochs": 1, "batch_size": 1, "lr": 1.0, "schedule": "constant", "milestones": (0.5,), "factor": 0.5}
    planned |= {"remainder": "keep", "warmup": 0.5}
    read = {"momentum": 0.5, "weight_decay": 0.1, "clip": None, "clip_norm": 1.0, "optimiser": "adamw"}
    read |= {"betas": (0.5, 0.9)}
    assert planned.keys() | read.keys() == {each.name for each in fields(Training)}
    for name, value in (planned | read).items():
        assert (key_of(training=Training(**{name: value})) == key_of()) == (name in planned), name


def test_the_recording_key_of_an_extension_is_itself_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True)
    class Own(Extension):
        strength: float

    different = [Own(1.0), Own(2.0), CutMix(0.5), CutMix(0.4), AfterUpdate(key_of), AfterUpdate(learn)]  # pyright: ignore[reportArgumentType]
    different += [Neighbours(1), Neighbours(2), Neighbours(1, first=5), TrackMomentum(), TrainFactors()]
    different += [QuadraticPenalty(1.0), QuadraticPenalty(2.0), QuadraticPenalty(1.0, 3.0)]
    different += [QuadraticPenalty(1.0, traced=True)]
    assert len({extension.recording_key() for extension in different}) == len(different)
    assert all(extension.recording_key() is extension for extension in different)
    assert Own(1.0).recording_key() == Own(1.0).recording_key()
    rows = torch.arange(4)
    key = SecondStream(rows, 2).recording_key()
    assert key == SecondStream(rows + 1, 2).recording_key(), "rows are read from the plan"
    others = [SecondStream(rows, 3).recording_key(), SecondStream(rows, 2, "other").recording_key()]
    assert key not in others
    assert FrozenBranches(1).recording_key() == FrozenBranches(2).recording_key(), "they are part of the network"


def test_what_cannot_be_recorded_is_taken_step_by_step_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def __init__(self, step: Callable[[], Any], state: Sequence[Tensor], memory: object = None) -> None:
            saved = [tensor.clone() for tensor in state]
            for _ in range(2):  # it is found out only after warming up
                step()
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
            raise NotRecordable("operation not permitted when stream is capturing")

    session = recording_session(monkeypatch, Refuses)
    plain = Session(session.config, make_store())
    learn(session, 0)
    learn(plain, 0)
    assert session.learner.notes == [
        f"the steps of {what} are taken one kernel at a time, and slower, because they cannot be recorded: "
        "operation not permitted when stream is capturing"
        for what in ("the main phase", "the sweep after a stage")
    ]
    ours, theirs = session.learner.state_dict(), plain.learner.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda term: {f"term {i}": term for i in range(TERMS + 1)}, f"{TERMS} terms at most, .* has {TERMS + 1}"),
        (lambda term: {}, "the loss of the main phase returned {}; it should return its terms by name"),
        (lambda term: term, "the loss of the main phase returned tensor.*by name"),
        (lambda term: None, "the loss of the main phase returned None"),
        (lambda term: {"each": term.expand(3)}, r"the term 'each' of the main phase is a tensor of the shape \(3,\)"),
        (lambda term: {"each": 1.5}, "the term 'each' of the main phase is 1.5; it should be a tensor"),
        (lambda term: {"each": term.detach()}, "no term of the main phase depends on what it trains"),
    ],
    ids=["many", "none", "no name", "nothing", "a batch", "a number", "a constant"],
)
def test_a_loss_that_cannot_be_minimised_is_refused(change: Callable[[Tensor], Any], words: str) -> None:
    session = Session(make_config(), make_store())
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)

    def changed(step: Step) -> Any:
        (term,) = phase.loss(step).values()
        return change(term)

    with pytest.raises(EngramError, match=words):
        next(iter(session.engine.start(session.learner, stage, replace(phase, loss=changed), 0)))


def test_epochs_are_reported_once_each_with_their_own_terms_and_rate() -> None:
    session = Session(make_config(settings__train__epochs=5), make_store())
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    loop = session.engine.start(session.learner, stage, phase, 0)
    means: list[dict[str, float]] = []
    seen: list[Epoch] = []
    for _ in loop:
        if loop.step == loop.steps:
            means.append(loop.terms())
        if loop.epoch == 2:  # the others are asked for late
            seen += list(loop.finished())
    seen += list(loop.finished(wait=True))
    assert [epoch.number for epoch in seen] == list(range(5))
    assert [epoch.terms for epoch in seen] == means
    assert [epoch.lr for epoch in seen] == sorted((epoch.lr for epoch in seen), reverse=True)
    assert list(loop.finished(wait=True)) == []


def test_the_plan_is_made_in_pieces_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def parameters() -> list[Tensor]:
        session = Session(make_config(settings__train__epochs=6), make_store())
        learn(session, 0)
        return list(session.learner.network.parameters())

    whole = parameters()
    monkeypatch.setattr("engram.engine.buffers.PLANNED_STEPS", 9)  # two epochs of four steps at a time
    assert all(torch.equal(a, b) for a, b in zip(whole, parameters(), strict=True))


def test_our_kernels_are_for_a_gpu_that_can_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(make_config(), make_store())
    backbone = resnet10(generator(1))
    assert session.engine.why_not_fused(backbone) == "they are for a GPU"
    session.engine.device = torch.device("cuda")
    monkeypatch.setattr("engram.kernels.availability._capability", lambda device: (7, 5))
    monkeypatch.setattr("engram.kernels.availability._has_triton", lambda: False)
    assert session.engine.why_not_fused(backbone) == "they are written in Triton, which is not installed"
    monkeypatch.setattr("engram.kernels.availability._has_triton", lambda: True)
    assert session.engine.why_not_fused(backbone) == "they are for GPUs of compute capability 8.0 and later"


def phase_of(session: Session, **changes: Any) -> Phase:
    """The base stage's phase with something changed, the head grown."""
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    return replace(phase, **changes)


def test_a_frozen_network_keeps_its_statistics_and_trains_its_head() -> None:
    session = Session(make_config(), make_store())
    phase = phase_of(session, frozen=True, train=Part.NEW_CLASSES)
    network = session.learner.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    seen: list[bool] = []

    def loss(step: Step) -> dict[str, Tensor]:
        seen.append(network.training)
        return phase.loss(step)

    for _ in session.engine.start(session.learner, session.stage(0), replace(phase, loss=loss), 0):
        pass
    assert set(seen) == {False}
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight"}
    with pytest.raises(AssertionError, match="backbone cannot train"):
        replace(phase, train=Part.BACKBONE)


def test_an_epoch_tells_the_last_of_its_rates() -> None:
    session = Session(make_config(), make_store())
    phase = phase_of(session)
    loop = session.engine.start(session.learner, session.stage(0), phase, 0)
    for _ in loop:
        pass
    rates = learning_rates(phase.training, loop.steps).view(-1, loop.steps)
    assert rates[0, 0] > rates[0, -1]
    assert [epoch.lr for epoch in loop.finished(wait=True)] == pytest.approx(rates[:, -1].tolist())


def test_neighbours_need_a_teacher_to_find_them() -> None:
    session = Session(make_config(), make_store())
    with pytest.raises(AssertionError, match="needs a teacher"):
        phase_of(session, extensions=(Neighbours(1),))


def test_what_follows_an_update_is_in_force_at_the_next_step() -> None:
    session = Session(make_config(), make_store())

    def clamp(network: Network) -> None:
        network.get_parameter("head.weight").clamp_(min=0)

    phase = phase_of(session, extensions=(AfterUpdate(clamp),))
    weight = session.learner.network.get_parameter("head.weight")
    loop = session.engine.start(session.learner, session.stage(0), phase, 0)
    assert {float(weight.detach().min()) for _ in loop} == {0.0}


def test_a_loss_sees_which_stage_each_class_came_with() -> None:
    session = Session(make_config(base=2, increment=2), make_store())
    learn(session, 0)
    learn(session, 1)
    stage = session.stage(2)
    session.method.grow(session.learner, stage, session.engine)
    phase = session.method.phases(session.learner, stage, session.engine)[0]
    steps: list[Step] = []

    def loss(step: Step) -> dict[str, Tensor]:
        steps.append(step)
        return phase.loss(step)

    for _ in session.engine.start(session.learner, stage, replace(phase, loss=loss), 0):
        break
    (step,) = steps
    assert step.arrival is not None
    assert step.arrival.tolist() == [0, 0, 1, 1, 2, 2]
    assert step.old.tolist() == [True] * 4 + [False] * 2
    assert step.new.tolist() == [False] * 4 + [True] * 2
    early = session.stage(0).arrival(6).tolist()
    assert early[:2] == [0, 0]
    assert set(early[2:]) == {NEVER}


def test_what_a_phase_starts_with_is_done_once_before_its_rows() -> None:
    session = Session(make_config(), make_store())
    done: list[str] = []
    phase = phase_of(session)
    asked = phase.rows

    def rows() -> Tensor:
        done.append("rows")
        return asked()

    phase = replace(phase, start=lambda: done.append("start"), rows=rows)
    loop = session.engine.start(session.learner, session.stage(0), phase, 0)
    assert done == ["start", "rows"]
    next(iter(loop))
    session.engine.start(session.learner, session.stage(0), phase, 0, loop.state())
    assert done == ["start", "rows"], "going on is no new start"


@pytest.mark.parametrize(
    ("taken", "sentence"),
    [
        (
            0,
            r"is not finite .* step 1 of \d+ .* first step of the phase, so look at how 'apart' is computed \(the",
        ),
        (1, r"stopped being finite .* step 2 of \d+ .*: try a lower learning rate$"),
        (4, r"stopped being finite .* epoch 2, step 1 of 4 .*: try a lower learning rate$"),
    ],
)
def test_what_is_not_finite_before_anything_moved_is_not_blamed_on_the_learning_rate(taken: int, sentence: str) -> None:
    session = Session(make_config(), make_store())
    phase = phase_of(session)
    steps = count()

    def loss(step: Step) -> Terms:
        logits = step.student.logits  # of which those of the classes to come are minus infinity
        apart = (logits - logits).sum() if next(steps) == taken else logits[:, 0].sum()
        return phase.loss(step) | {"apart": apart}

    loop = session.engine.start(session.learner, session.stage(0), replace(phase, loss=loss), 0)
    for _ in zip(range(taken + 1), loop, strict=False):
        pass
    with pytest.raises(NonFiniteLoss, match=sentence):
        loop.terms()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_do_not_wait_busily_for_long_unless_somebody_said_how(given: dict[str, str], expected: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = "import engram, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], env={**environment, **given}, capture_output=True, check=True)
    assert told.stdout.decode().split() == [expected, "False"]


@pytest.mark.parametrize(("backbone", "steps"), [("resnet18-small", 3), ("resnet10", 4)])
def test_a_last_batch_of_one_image_is_left_out_where_it_cannot_be_normalised(backbone: str, steps: int) -> None:
    """28 images of 8x8 pixels in batches of 9: of an image one backbone leaves a map of 1x1, the other 2x2."""
    config = make_config(backbone=backbone, settings__train__batch_size=9, settings__train__epochs=1)
    session = Session(config, make_store())
    learner, method, engine, stage = session.learner, session.method, session.engine, session.stage(0)
    method.grow(learner, stage, engine)
    (phase,) = method.phases(learner, stage, engine)
    loop = engine.start(learner, stage, phase, 0)
    assert len(list(loop)) == loop.steps == steps
    (seen,) = engine.sweep(learner, stage, stage.all_rows, lambda step: [torch.ones_like(step.labels).sum()], 9)
    assert seen == (27 if steps == 3 else 28)
    learn(session, 0)


def test_batches_that_are_all_of_one_image_are_refused_where_none_can_be_normalised() -> None:
    session = Session(make_config(backbone="resnet18", settings__train__batch_size=1), make_store(size=16))
    with pytest.raises(EngramError, match=r"16x16 pixels .* use larger batches, larger images or another backbone"):
        learn(session, 0)


@pytest.mark.parametrize("make", [resnet10, resnet18, resnet18_small, resnet32])
@pytest.mark.parametrize("size", [(8, 8), (9, 16), (17, 33), (32, 32)])
def test_the_size_of_the_last_map_is_told_beforehand(
    make: Callable[[torch.Generator], ResNet], size: tuple[int, int]
) -> None:
    backbone = make(generator(0, "backbone"))
    assert backbone.last_map(size) == backbone(torch.zeros(2, 3, *size))[0][-1].shape[2:]
