"""EWC, SI and MAS: training with a quadratic penalty against a loop by hand, and what they keep from stage to stage."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engram import run
from engram.contract import Step, Training
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.core.events import BaseReused, EpochFinished, RunFinished
from engram.data.memory import MemoryConfig
from engram.data.stage import Stage
from engram.experiment.base_cache import StageCache
from engram.experiment.recipes import recipe
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.methods import find_method
from engram.methods.blocks.phases import sampled_rows
from engram.methods.penalty import (
    ANCHOR,
    EWC,
    MAS,
    OMEGA,
    PATH,
    EWCSettings,
    MeasuredSettings,
    QuadraticPenalty,
    keep_omega,
    set_anchor,
)
from engram.nn.network import Output
from helpers import (
    NO_AUGMENTATION,
    assert_resumes_to,
    last_state,
    learn_stage,
    parameters_of,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)

squared_length = MAS(MeasuredSettings()).measure

FAMILY = ["ewc", "si", "mas"]
MEMORY = MemoryConfig(size=3)


def trained(method: str, stages: int, **settings: Any) -> tuple[Session, Stage]:
    """A session some stages on, and the last of them."""
    session = tiny_session(tiny_config(method, memory=MEMORY).with_settings(**settings))
    return session, [learn_stage(session, index) for index in range(stages)][-1]


class ByHand:
    """The same training as the engine's, by torch.optim and a penalty inside the loss, on the whole pool at a time."""

    def __init__(self, session: Session, stage: Stage, factor: float, ceiling: float) -> None:
        learner = session.learner
        self.network = copy.deepcopy(learner.network)
        self.omega, self.anchor = (
            {name: learner.buffers[kind + name].clone() for name in parameters_of(self.network)}
            for kind in (OMEGA, ANCHOR)
        )
        self.omega = {name: value.clamp(max=ceiling) for name, value in self.omega.items()}
        self.masks = self.network.trainable(session.method.phases(learner, stage, session.engine)[0].train, 2)
        self.path = {name: torch.zeros_like(value) for name, value in self.network.named_parameters()}
        self.stage, self.factor = stage, factor
        self.images = stage.pool.pixels.permute(0, 3, 1, 2).float() / 255

    def penalty(self) -> Tensor:
        total = torch.zeros(())
        for name, value in self.network.named_parameters():
            total = total + self.factor * (self.omega[name] * (value - self.anchor[name]) ** 2).sum()
        return total

    def train(self, training: Training) -> list[float]:
        """All steps; the penalty before each."""
        named = dict(self.network.named_parameters())
        sgd = torch.optim.SGD(named.values(), momentum=training.momentum, weight_decay=training.weight_decay)
        self.network.train()
        penalties: list[float] = []
        for lr in learning_rates(training, 1):
            new = self.network(self.images).scores[:, self.stage.num_old : self.stage.num_seen]
            loss = F.cross_entropy(new, self.stage.pool.labels - self.stage.num_old)
            task = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
            penalty = self.penalty()
            penalties.append(penalty.item())
            before = parameters_of(self.network)
            for value, gradient in zip(
                named.values(), torch.autograd.grad(loss + penalty, list(named.values())), strict=True
            ):
                value.grad = gradient.clamp(-(training.clip or torch.inf), training.clip or torch.inf)
            sgd.param_groups[0]["lr"] = float(lr)
            sgd.step()
            with torch.no_grad():
                for (name, value), gradient in zip(named.items(), task, strict=True):
                    value.copy_(torch.where(self.masks[name] > 0, value, before[name]))
                    self.path[name] -= gradient * (value - before[name])
        return penalties


@pytest.mark.parametrize(
    ("method", "clip", "ceiling"), [("si", None, None), ("si", 0.02, None), ("ewc", None, None), ("ewc", None, 1e-4)]
)
def test_a_stage_trains_as_by_hand(method: str, clip: float | None, ceiling: float | None) -> None:
    """The penalty's gradient, its place before the clamp, its ceiling, its value as a term, and SI's path."""
    training = Training(epochs=6, batch_size=1000, lr=0.05, remainder="keep", clip=clip)
    strength = {"si": 2.0, "ewc": 5.0}[method]
    limit = None if ceiling is None else ceiling * strength * training.lr
    config = tiny_config(method, augmentation=NO_AUGMENTATION)
    session = tiny_session(config.with_settings(train=training, strength=strength, limit=limit))
    learn_stage(session, 0)
    learner, stage = session.learner, session.stage(1)
    session.method.grow(learner, stage, session.engine)
    for name, value in learner.network.named_parameters():
        assert torch.equal(learner.buffers[ANCHOR + name], value)
    if ceiling is not None:
        assert any(bool((value > ceiling).any()) for name, value in learner.buffers.items() if name.startswith(OMEGA))
    slow = ByHand(session, stage, strength if method == "si" else strength / 2, ceiling or math.inf)
    expected = slow.train(training)
    (phase,) = session.method.phases(learner, stage, session.engine)
    loop = session.engine.start(learner, stage, phase, 0)
    penalties = [loop.terms()["penalty"] for _ in loop]
    assert penalties == pytest.approx(expected, rel=1e-3)
    assert penalties[0] == 0
    assert penalties[-1] > 0
    for name, value in learner.network.named_parameters():
        torch.testing.assert_close(value, slow.network.get_parameter(name), rtol=1e-3, atol=1e-5, msg=name)
        if method == "si":
            scale = float(slow.path[name].abs().max())
            torch.testing.assert_close(
                learner.buffers[PATH + name], slow.path[name], rtol=1e-2, atol=1e-3 * scale, msg=name
            )


def test_si_adds_what_the_way_was_worth() -> None:
    session = tiny_session(tiny_config("si"))
    learner = session.learner
    total = {name: torch.zeros_like(value) for name, value in learner.network.named_parameters()}
    for index in range(2):
        learn_stage(session, index)
        for name, value in learner.network.named_parameters():
            path, distance = learner.buffers[PATH + name], value.detach() - learner.buffers[ANCHOR + name]
            total[name] += path.clamp(min=0) / (distance**2 + 0.1)
            torch.testing.assert_close(learner.buffers[OMEGA + name], total[name])
            assert (learner.buffers[OMEGA + name] >= 0).all()
    assert any(bool((learner.buffers[PATH + name] < 0).any()) for name in total), "or the clamp shows nothing"
    assert not learner.buffers[OMEGA + "head.weight"][4:].any(), "classes that have not come matter to nothing"
    assert learner.buffers[OMEGA + "head.weight"][:4].any(dim=1).all()


def test_si_refuses_a_path_that_is_not_finite() -> None:
    session, stage = trained("si", stages=1)
    session.learner.buffers[PATH + "head.bias"].fill_(torch.inf)
    with pytest.raises(EngramError, match="the importance after stage 0 is not finite"):
        session.method.finish(session.learner, stage, session.engine)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.5), (0.0, 0.0), (None, 2 / 6)])
def test_omega_is_merged_and_new_rows_have_their_own(share: float | None, expected: float) -> None:
    session = tiny_session(tiny_config("mas", base=2, increment=4))
    learner = session.learner
    learn_stage(session, 0)
    before = {name: learner.buffers[OMEGA + name].clone() for name, _ in learner.network.named_parameters()}
    stage = session.stage(1)
    session.method.grow(learner, stage, session.engine)
    fresh = {name: torch.rand_like(value) for name, value in before.items()}
    keep_omega(learner, stage, fresh, share)
    for name, value in before.items():
        merged = expected * value + (1 - expected) * fresh[name]
        if name.startswith("head."):
            merged[2:] = fresh[name][2:]
        torch.testing.assert_close(learner.buffers[OMEGA + name], merged)
    with pytest.raises(EngramError, match="the importance after stage 1 is not finite"):
        keep_omega(learner, stage, {"head.bias": torch.full((6,), torch.nan)}, share)


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_the_base_stage_has_no_penalty_and_its_omega_stands_alone(method: str) -> None:
    session, stage = trained(method, stages=1)
    if method == "mas":
        fresh = session.engine.sensitivity(session.learner, stage, stage.all_rows, squared_length, power=1)
    else:
        objective = EWC(EWCSettings()).measure
        fresh = session.engine.sensitivity(session.learner, stage, stage.all_rows, objective, power=2)
    for name, value in fresh.items():
        assert torch.equal(session.learner.buffers[OMEGA + name], value)
    assert [phase.extensions for phase in session.method.phases(session.learner, stage, session.engine)] == [()]


@pytest.mark.parametrize("method", FAMILY)
def test_parameters_that_matter_move_less(method: str) -> None:
    def moved(strength: float) -> tuple[Tensor, Tensor]:
        """How far each parameter of the backbone went in the second stage, and its omega before."""
        config = tiny_config(method, epochs=6).with_settings(strength=strength, train__schedule="constant")
        session = tiny_session(config)
        learn_stage(session, 0)
        before = parameters_of(session.learner.network)
        backbone = [name for name in before if name.startswith("backbone.")]
        omega = torch.cat([session.learner.buffers[OMEGA + name].flatten() for name in backbone])
        learn_stage(session, 1)
        after = parameters_of(session.learner.network)
        return torch.cat([(after[name] - before[name]).abs().flatten() for name in backbone]), omega

    free, omega = moved(0.0)
    held, same = moved(20 / float(omega.max()))
    assert torch.equal(omega, same)
    matters, hardly = omega > 0.1 * omega.max(), omega < 0.001 * omega.max()
    assert int(matters.sum()) > 10
    assert int(hardly.sum()) > 10
    assert float(held[matters].mean()) < 0.5 * float(free[matters].mean())
    assert float(held[hardly].mean()) > 0.8 * float(free[hardly].mean())


def test_a_penalty_too_stiff_for_the_rate_is_limited() -> None:
    def penalties(limit: float | None) -> list[float]:
        config = tiny_config("mas", epochs=6).with_settings(strength=1e4, limit=limit, train__schedule="constant")
        terms = [event.terms for event in run(config, toy_store()) if isinstance(event, EpochFinished)]
        return [each["penalty"] for each in terms if "penalty" in each]

    assert max(penalties(1.0)) < 10
    assert max(penalties(None)) > 1000, "or there is nothing to hold back"


@pytest.mark.parametrize("method", FAMILY)
@pytest.mark.parametrize("kept", [0, 3])
def test_a_memory_frees_the_old_rows_and_compares_all_classes(method: str, kept: int) -> None:
    memory = MemoryConfig(size=kept) if kept else MemoryConfig("none", 0)
    session = tiny_session(tiny_config(method, memory=memory))
    learn_stage(session, 0)
    before = parameters_of(session.learner.network)
    learn_stage(session, 1)
    assert len(session.learner.memory) == 4 * kept
    for name in ("head.weight", "head.bias"):
        after = session.learner.network.get_parameter(name)
        assert torch.equal(after[:2], before[name][:2]) == (kept == 0)
        assert not torch.equal(after[2:4], before[name][2:4])
    stage = session.stage(2)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    assert [type(each) for each in phase.extensions] == [QuadraticPenalty]
    assert not phase.teacher
    scores, arrival = torch.tensor([[3.0, 1, 2, 0, 1, 2]]), stage.arrival(6)
    output, labels = Output((), scores, scores, scores, torch.ones(())), torch.tensor([4])
    step = Step(labels, labels < 0, output, None, {}, {}, arrival=arrival, stage=torch.tensor(2))
    (term,) = phase.loss(step).values()
    rivals = [math.exp(score) for score in ([3, 1, 2, 0, 1, 2] if kept else [1, 2])]
    assert float(term) == pytest.approx(math.log(sum(rivals)) - 1)


@pytest.mark.parametrize("method", FAMILY)
@pytest.mark.parametrize("kept", [0, 3])
def test_stopped_inside_a_phase_it_resumes_exactly(method: str, kept: int, tmp_path: Path) -> None:
    config = tiny_config(method, memory=MemoryConfig(size=kept) if kept else MemoryConfig("none", 0))
    whole = run_whole(config, toy_store(), tmp_path / "whole")
    run_stopped(config, toy_store(), tmp_path / "stopped", 2, starts(1))
    way = [value for name, value in last_state(tmp_path / "stopped").items() if name.startswith("phase.path.")]
    assert bool(way) == (method == "si")
    assert all(bool(value.any()) for value in way[:1])
    assert_resumes_to(whole, tmp_path / "stopped", toy_store())


def test_a_phase_stopped_after_its_last_step_still_hands_over_its_path(tmp_path: Path) -> None:
    config = tiny_config("si", epochs=1)
    whole = run_whole(config, toy_store(), tmp_path / "whole")
    saved = run_stopped(config, toy_store(), tmp_path / "stopped", 3)  # the last step of the base stage
    assert (saved.stage, saved.epoch) == (0, 1)
    assert_resumes_to(whole, tmp_path / "stopped", toy_store())


def test_omega_and_anchor_grow_with_the_capacity_of_the_head() -> None:
    session, _ = trained("si", stages=2)
    learner = session.learner
    omega = {name: learner.buffers[OMEGA + name].clone() for name, _ in learner.network.named_parameters()}
    learner.network.head.reserve(9)
    set_anchor(learner)
    for name, value in learner.network.named_parameters():
        assert learner.buffers[ANCHOR + name].shape == learner.buffers[OMEGA + name].shape == value.shape
        assert torch.equal(learner.buffers[ANCHOR + name], value)
        assert torch.equal(learner.buffers[OMEGA + name][: len(omega[name])], omega[name])
        assert not learner.buffers[OMEGA + name][len(omega[name]) :].any()
    assert len(learner.buffers[OMEGA + "head.weight"]) == 9
    learn_stage(session, 2)


def key(config: RunConfig) -> str | None:
    return Session(config, toy_store()).base_key()


def test_a_base_stage_from_the_cache_is_as_good(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)

    def result(method: str, cache: StageCache | None) -> tuple[dict[str, Any], bool]:
        events = list(run(tiny_config(method), toy_store(), cache=cache))
        assert isinstance(events[-1], RunFinished)
        curve = {str(stage["stage"]): stage["accuracy_by_stage"] for stage in events[-1].result["stages"]}
        return curve, any(isinstance(event, BaseReused) for event in events)

    alone, _ = result("mas", None)
    assert not result("ewc", cache)[1]
    assert result("mas", cache) == (alone, True)
    assert result("si", cache) == result("si", None), "how its parameters came there is not in the cache"
    assert key(tiny_config("si")) is None


@pytest.mark.parametrize("method", FAMILY)
def test_one_class_at_a_time_needs_a_memory(method: str) -> None:
    def notes(**changes: Any) -> list[str]:
        session = tiny_session(tiny_config(method, epochs=1, increment=1, **changes), toy_store(4, per_class=6))
        for index in range(3):
            learn_stage(session, index)
        return session.learner.notes

    (note,) = notes()
    assert "a single class is not learned" in note
    assert notes(memory=MEMORY) == []


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("ewc", {"strength": -1.0}),
        ("ewc", {"merge": 1.5}),
        ("ewc", {"label": "best"}),
        ("ewc", {"importance_samples": 0}),
        ("mas", {"merge": -0.1}),
        ("mas", {"strength": -1.0}),
        ("mas", {"importance_samples": 0}),
        ("si", {"strength": -0.1}),
        ("si", {"damping": 0.0}),
        ("si", {"limit": -1.0}),
    ],
)
def test_settings_that_make_no_sense_are_refused(method: str, change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(EngramError, match=f"{name}"):
        tiny_config(method).with_settings(**change)
    with pytest.raises(EngramError, match=f"{name} must be|no {name}"):
        find_method(method).settings(**change)


@pytest.mark.parametrize("method", FAMILY)
def test_recipes_keep_no_exemplars_and_take_a_budget(method: str) -> None:
    for name, epochs in ((f"{method}-cifar100-b50-s10", 160), (f"{method}-mini-b10-s5", 16), (f"{method}-folder", 60)):
        config = recipe(name)
        assert config.memory.budget == "none"
        assert config.settings.train.epochs == epochs  # pyright: ignore[reportAttributeAccessIssue]
        assert config.with_value("memory", MEMORY).memory.size == 3


def test_fewer_images_estimate_omega_of_those_alone() -> None:
    session, stage = trained("mas", stages=1, importance_samples=5)
    shuffled = sampled_rows(session.learner, stage, 5)
    assert len(shuffled) == len(set(shuffled.tolist())) == 5
    ours = session.engine.sensitivity(session.learner, stage, shuffled, squared_length, power=1)
    for name, value in ours.items():
        assert torch.equal(session.learner.buffers[OMEGA + name], value)


def test_the_penalty_is_logged() -> None:
    terms = [event.terms for event in run(tiny_config("mas"), toy_store()) if isinstance(event, EpochFinished)]
    assert [sorted(each) for each in terms] == [["classification"]] * 2 + [["classification", "penalty"]] * 4
    assert all(each["penalty"] > 0 for each in terms[2:])


def test_the_order_of_the_flat_buffers_does_not_matter() -> None:
    def learned(layout: torch.memory_format) -> dict[str, Tensor]:
        session = tiny_session(tiny_config("si", epochs=1).with_settings(strength=1.0))
        session.engine.layout = layout
        for index in range(2):
            learn_stage(session, index)
        return session.learner.buffers

    as_is, channels_last = learned(torch.contiguous_format), learned(torch.channels_last)
    assert as_is.keys() == channels_last.keys()
    for name, value in as_is.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(channels_last[name], value, rtol=1e-2, atol=1e-3 * scale, msg=name)
