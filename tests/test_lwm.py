"""LwM: its attention against GradCAM by autograd and by loops, the gradient that must not vanish, what stays frozen."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engram import EngramError, recipe, run
from engram.contract import Step
from engram.core.events import Warned
from engram.data.stage import NEVER
from engram.experiment.session import Session
from engram.methods import find_method
from engram.methods.lwf import ROWS, LwM, LwMSettings, attention_loss
from engram.nn.heads import LinearHead
from engram.nn.network import Output
from helpers import learn_stage, tiny_config, tiny_session, toy_store, train_phase

BATCH, CHANNELS, CLASSES, OLD, CAPACITY = 5, 4, 5, 3, 7


@dataclasses.dataclass(frozen=True)
class Case:
    """Random maps of a student and its teacher under one linear head."""

    ours: np.ndarray  # (B, C, H, W)
    theirs: np.ndarray
    rows: np.ndarray  # (K, C)
    labels: list[int]

    def scores(self, maps: np.ndarray, classes: int) -> np.ndarray:
        scores = np.full((BATCH, CAPACITY), -np.inf)
        scores[:, :classes] = (maps.clip(min=0).mean(axis=(2, 3)) @ self.rows.T)[:, :classes]
        return scores

    def step(self) -> Step:
        ours, theirs = torch.tensor(self.ours, requires_grad=True), torch.tensor(self.theirs)
        head = torch.tensor(self.rows)
        scores = torch.full((BATCH, CAPACITY), -torch.inf, dtype=torch.float64)
        seen = F.linear(ours.relu().mean(dim=(2, 3)), head)[:, :CLASSES]
        scores = torch.cat([seen, scores[:, CLASSES:]], dim=1)
        one, embedding = torch.ones(()), torch.zeros(BATCH, 1)
        teacher = torch.tensor(self.scores(self.theirs, OLD))
        arrival = torch.full((CAPACITY,), NEVER)
        arrival[:OLD], arrival[OLD:CLASSES] = 0, 1
        return Step(
            torch.tensor(self.labels),
            torch.zeros(BATCH, dtype=torch.bool),
            Output((ours,), embedding, scores, scores, one),
            Output((theirs,), embedding, teacher, teacher, one),
            {},
            {ROWS: head},
            arrival=arrival,
            stage=torch.tensor(1),
        )


def random_case(seed: int) -> Case:
    random = np.random.default_rng(seed)
    ours, theirs = random.normal(size=(2, BATCH, CHANNELS, 3, 2))
    labels = random.integers(OLD, CLASSES, size=BATCH).tolist()
    return Case(ours, theirs, random.normal(size=(CAPACITY, CHANNELS)), labels)


def slow_attention(maps: np.ndarray, row: np.ndarray) -> list[float]:
    """relu(sum_c w_c relu(map_c)) of one image (C, H, W), flattened and divided by its length."""
    values = [
        max(0.0, sum(row[c] * max(0.0, maps[c, y, x]) for c in range(len(row))))
        for y in range(maps.shape[1])
        for x in range(maps.shape[2])
    ]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length if length else 0.0 for value in values]


def slow_terms(case: Case, temperature: float) -> dict[str, float]:
    ours, theirs = case.scores(case.ours, CLASSES), case.scores(case.theirs, OLD)
    classification, distilled, looked = 0.0, 0.0, 0.0
    for i, label in enumerate(case.labels):
        classification += math.log(sum(math.exp(ours[i, k]) for k in range(OLD, CLASSES))) - ours[i, label]
        whole = [sum(math.exp(s[i, k] / temperature) for k in range(OLD)) for s in (ours, theirs)]
        for k in range(OLD):
            share = math.exp(theirs[i, k] / temperature) / whole[1]
            distilled -= share * (ours[i, k] / temperature - math.log(whole[0]))
        row = case.rows[max(range(OLD), key=lambda k, i=i: theirs[i, k])]
        pair = (slow_attention(case.ours[i], row), slow_attention(case.theirs[i], row))
        looked += sum(abs(a - b) for a, b in zip(*pair, strict=True))
    return {
        "classification": classification / BATCH,
        "distillation": distilled / BATCH,
        "attention": looked / BATCH,
    }


@pytest.mark.parametrize("seed", range(4))
def test_terms_are_their_formulas(seed: int) -> None:
    case = random_case(seed)
    terms = LwM(LwMSettings(lambda_kd=3.0, lambda_attention=0.5)).loss(case.step())
    slow = slow_terms(case, 2.0)
    assert terms["classification"].item() == pytest.approx(slow["classification"])
    assert terms["distillation"].item() == pytest.approx(3 * slow["distillation"])
    assert terms["attention"].item() == pytest.approx(0.5 * slow["attention"], rel=1e-5)


def test_attention_is_gradcam_of_the_class_s_score() -> None:
    """The weights of the channels by autograd, from the head as it is, instead of from its rows."""
    torch.manual_seed(0)
    head = LinearHead(CHANNELS, CLASSES)
    head.grow(CLASSES, torch.Generator().manual_seed(1))
    torch.nn.init.normal_(head.get_parameter("bias"))
    ours, theirs = torch.randn(2, BATCH, CHANNELS, 3, 2)
    classes = torch.tensor([0, 4, 2, 2, 1])

    def gradcam(maps: Tensor) -> Tensor:
        activations = maps.relu().requires_grad_()
        scores = head(activations.mean(dim=(2, 3)))
        (gradient,) = torch.autograd.grad(scores.gather(1, classes[:, None]).sum(), activations)
        channels = gradient.mean(dim=(2, 3), keepdim=True)
        return F.normalize((channels * activations).sum(dim=1).relu().flatten(1), dim=1)

    expected = (gradcam(ours) - gradcam(theirs)).abs().sum(dim=1).mean()
    assert torch.allclose(attention_loss(ours, theirs, head.weight[classes]), expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_attention_moves_the_student_s_map_and_nothing_else(seed: int) -> None:
    """In public code the student's map is taken without a gradient, and the term does nothing."""
    case = random_case(seed)
    ours, theirs, rows = (torch.tensor(value, requires_grad=True) for value in (case.ours, case.theirs, case.rows))
    weights = rows.detach()[:BATCH]
    attention_loss(ours, theirs, weights).backward()
    assert ours.grad is not None
    assert theirs.grad is None
    gradient = ours.grad.numpy()
    assert np.abs(gradient).max() > 1e-3

    def slow(maps: np.ndarray) -> float:
        pairs = [
            (slow_attention(a, w), slow_attention(b, w))
            for a, b, w in zip(maps, case.theirs, weights.numpy(), strict=True)
        ]
        return sum(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)) / BATCH

    for place in [(0, 1, 2, 1), (2, 0, 0, 0), (4, 3, 1, 1), (1, 2, 2, 0)]:
        up, down = case.ours.copy(), case.ours.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        assert gradient[place] == pytest.approx((slow(up) - slow(down)) / 2e-6, abs=1e-4)


def test_a_step_s_gradients_are_finite_where_classes_are_not_seen_and_where_nothing_is_looked_at() -> None:
    case = random_case(0)
    case.ours[0] = -1.0  # no activation at all: no attention
    step = case.step()
    sum(LwM(LwMSettings()).loss(step).values(), torch.zeros(())).backward()
    gradient = step.student.maps[0].grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.any()


def head_of(session: Session) -> Tensor:
    head = session.learner.network.head
    assert isinstance(head, LinearHead)
    return torch.cat([head.weight.detach(), head.get_parameter("bias").detach()[:, None]], dim=1).clone()


def test_old_rows_stay_and_the_loss_reads_them_as_they_are() -> None:
    session = tiny_session(tiny_config("lwm"))
    learn_stage(session, 0)
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    old, new = head_of(session)[:2], head_of(session)[2:4]
    assert torch.equal(session.learner.buffers[ROWS][:2], old[:, :-1])
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    train_phase(session, stage, phase)
    assert torch.equal(head_of(session)[:2], old)
    assert not torch.equal(head_of(session)[2:4], new)
    assert not stage.pool.exemplar.any()


def looked_apart(weight: float) -> float:
    """The attention term at the end of the second stage, without its weight."""
    config = tiny_config("lwm", epochs=8).with_settings(lambda_attention=weight, lambda_kd=0.0)
    session = tiny_session(config, toy_store(size=16))
    learn_stage(session, 0)
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    own = LwM(LwMSettings(lambda_attention=1.0))
    last: list[float] = []

    def spy(step: Step) -> dict[str, Tensor]:
        last.append(own.loss(step)["attention"].item())
        return phase.loss(step)

    train_phase(session, stage, dataclasses.replace(phase, loss=spy))
    return float(np.mean(last[-3:]))


def test_a_larger_weight_keeps_the_attention() -> None:
    assert looked_apart(10.0) < 0.8 * looked_apart(0.0)


def test_stages_of_one_class_are_finite_and_said_once() -> None:
    config = tiny_config("lwm", base=2, increment=1, epochs=1)
    events = list(run(config, toy_store(num_classes=5, per_class=8)))
    said = [event.message for event in events if isinstance(event, Warned)]
    assert len(said) == 1
    assert "stage 1 has one new class" in said[0]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(EngramError, match="lambda_attention must be at least 0, got -1"):
        LwMSettings(lambda_attention=-1)
    with pytest.raises(EngramError, match="temperature must be above 0, got 0"):
        LwMSettings(temperature=0)


def test_recipes_have_no_memory_and_their_own_schedule() -> None:
    config = recipe("lwm-cifar100-b50-s5")
    assert config.memory.budget == "none"
    assert find_method("lwm").predictors == ("cnn",)
    train = config.settings.train  # pyright: ignore[reportAttributeAccessIssue]
    assert [round(share * train.epochs) for share in train.milestones] == [60, 120, 180, 220]
    assert recipe("lwm-mini-b10-s5").settings.train.epochs == 16  # pyright: ignore[reportAttributeAccessIssue]
