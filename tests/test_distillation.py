"""The losses of class scores against slow, obvious loops over samples and columns, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.contract import Step
from engram.data.stage import NEVER
from engram.methods.blocks.linear import convex_weights
from engram.methods.blocks.losses import (
    binary_cross_entropy,
    cross_entropy,
    distillation,
    distillation_by_group,
)
from engram.methods.eeil import EEIL, EEILSettings
from engram.methods.icarl import ICaRL, ICaRLSettings
from engram.methods.lwf import LwF, LwFSettings
from engram.methods.wa import WA, WASettings
from engram.nn.network import Output
from helpers import make_stage

SEEDS = range(4)
INFINITY = float("inf")


@dataclass(frozen=True)
class Case:
    """Scores of student and teacher as lists, minus infinity where a class was not seen, and where classes came from.

    The stages are 0 (3 classes), 1 (2 classes) and 2 (2 classes, not known to the teacher); one column is still free.
    """

    student: list[list[float]]
    teacher: list[list[float]]
    labels: list[int]

    arrival = (0, 0, 0, 1, 1, 2, 2, NEVER)

    def tensors(self) -> tuple[Tensor, Tensor]:
        student = torch.tensor(self.student, dtype=torch.float64, requires_grad=True)
        return student, torch.tensor(self.teacher, dtype=torch.float64)

    def step(self, stage: int = 2, weights: Mapping[str, float] | None = None) -> tuple[Step, Tensor]:
        """What a loss sees of the case at a stage, with these weights, and the student's scores."""
        scores, theirs = self.tensors()
        nothing, scale = torch.zeros(len(self.labels), 1), torch.ones((), dtype=torch.float64)
        student, teacher = Output((), nothing, scores, scores, scale), Output((), nothing, theirs, theirs, scale)
        labels, exemplar = torch.tensor(self.labels), torch.zeros(len(self.labels), dtype=torch.bool)
        weighted = {name: torch.tensor(value) for name, value in (weights or {}).items()}
        arrival = torch.tensor(self.arrival)
        step = Step(labels, exemplar, student, teacher, weighted, {}, arrival=arrival, stage=torch.tensor(stage))
        return step, scores


def case_of(seed: int, batch: int = 5) -> Case:
    random = np.random.default_rng(seed)
    student, teacher = random.normal(0, 3, (batch, 8)), random.normal(0, 3, (batch, 8))
    student[:, 7:] = -INFINITY
    teacher[:, 5:] = -INFINITY
    return Case(student.tolist(), teacher.tolist(), random.integers(7, size=batch).tolist())


def columns_of(*columns: int) -> Tensor:
    return torch.tensor([column in columns for column in range(8)])


OLD, NEW, SEEN = columns_of(0, 1, 2, 3, 4), columns_of(5, 6), columns_of(0, 1, 2, 3, 4, 5, 6)


def softmax(scores: list[float], columns: list[int], temperature: float = 1.0) -> dict[int, float]:
    exponentials = {column: math.exp(scores[column] / temperature) for column in columns}
    return {column: value / sum(exponentials.values()) for column, value in exponentials.items()}


def slow_distillation(ours: list[float], theirs: list[float], columns: list[int], temperature: float) -> float:
    student, teacher = softmax(ours, columns, temperature), softmax(theirs, columns, temperature)
    return -sum(teacher[column] * math.log(student[column]) for column in columns)


def slow_binary(score: float, target: float) -> float:
    probability = 1 / (1 + math.exp(-score))
    return -target * math.log(probability) - (1 - target) * math.log(1 - probability)


def check_gradient(loss: Callable[[Tensor], Tensor], scores: Tensor, still: Tensor) -> None:
    """The gradient is that of central differences, and zero (not NaN) in the columns that stand still."""
    (gradient,) = torch.autograd.grad(loss(scores).sum(), scores)
    assert gradient.isfinite().all()
    assert not gradient[:, still].any()
    for row, column in np.ndindex(*scores.shape):
        if not still[column]:
            moved = torch.zeros_like(scores)
            moved[row, column] = 1e-6
            slope = (loss(scores.detach() + moved).sum() - loss(scores.detach() - moved).sum()) / 2e-6
            assert float(gradient[row, column]) == pytest.approx(float(slope), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_cross_entropy_is_over_its_columns_alone(seed: int) -> None:
    case = case_of(seed)
    scores, _ = case.tensors()
    new = [5 + label % 2 for label in case.labels]
    for columns, labels in ((SEEN, case.labels), (NEW, new)):
        listed = torch.nonzero(columns).flatten().tolist()
        expected = [-math.log(softmax(row, listed)[label]) for row, label in zip(case.student, labels, strict=True)]
        target = torch.tensor(labels)
        np.testing.assert_allclose(cross_entropy(scores, target, columns).detach().numpy(), expected, rtol=1e-9)
        check_gradient(lambda x, target=target, columns=columns: cross_entropy(x, target, columns), scores, ~columns)


def test_cross_entropy_of_one_new_class_is_zero_and_so_is_its_gradient() -> None:
    scores, _ = case_of(0).tensors()
    loss = cross_entropy(scores, torch.full((5,), 5), columns_of(5))
    assert loss.tolist() == [0] * 5
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert not gradient.any()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_is_its_formula(seed: int, temperature: float) -> None:
    case = case_of(seed)
    scores, teacher = case.tensors()
    expected = [
        slow_distillation(ours, theirs, [0, 1, 2, 3, 4], temperature)
        for ours, theirs in zip(case.student, case.teacher, strict=True)
    ]
    loss = distillation(scores, teacher, OLD, temperature)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-9)
    check_gradient(lambda x: distillation(x, teacher, OLD, temperature), scores, ~OLD)


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_by_group_is_a_sum_over_every_previous_stage(seed: int) -> None:
    case = case_of(seed)
    scores, teacher = case.tensors()
    expected = [
        slow_distillation(ours, theirs, [0, 1, 2], 2.0) + slow_distillation(ours, theirs, [3, 4], 2.0)
        for ours, theirs in zip(case.student, case.teacher, strict=True)
    ]
    arrival = torch.tensor(case.arrival)
    loss = distillation_by_group(scores, teacher, arrival, OLD, 2.0)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-9)
    check_gradient(lambda x: distillation_by_group(x, teacher, arrival, OLD, 2.0), scores, ~OLD)


def test_distillation_by_group_of_one_group_is_distillation_and_of_single_classes_is_zero() -> None:
    scores, teacher = case_of(1).tensors()
    together = distillation_by_group(scores, teacher, torch.zeros(8, dtype=torch.int64), OLD, 2.0)
    np.testing.assert_allclose(together.detach(), distillation(scores, teacher, OLD, 2.0).detach(), rtol=1e-9)
    alone = distillation_by_group(scores, teacher, torch.arange(8), OLD, 2.0)
    assert alone.tolist() == [0] * 5
    (gradient,) = torch.autograd.grad(alone.sum(), scores)
    assert not gradient.any()


def test_distillation_by_group_bears_groups_far_apart() -> None:
    """Shifted by the maximum of all columns, the lower group's exponentials would be zero in float32."""
    scores = torch.tensor([[500.0, 499.0, -500.0, -502.0]], requires_grad=True)
    groups, columns = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    loss = distillation_by_group(scores, scores.detach(), groups, columns, 1.0)

    def entropy(gap: float) -> float:
        share = 1 / (1 + math.exp(-gap))
        return -share * math.log(share) - (1 - share) * math.log(1 - share)

    assert float(loss.detach()) == pytest.approx(entropy(1) + entropy(2), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    np.testing.assert_allclose(gradient.numpy(), 0, atol=1e-6)  # the student agrees with the teacher


@pytest.mark.parametrize("seed", SEEDS)
def test_binary_cross_entropy_is_its_formula(seed: int) -> None:
    case = case_of(seed)
    scores, _ = case.tensors()
    targets = torch.rand(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = [
        sum(slow_binary(row[column], float(targets[i, column])) for column in (5, 6))
        for i, row in enumerate(case.student)
    ]
    loss = binary_cross_entropy(scores, targets, NEW)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-9)
    check_gradient(lambda x: binary_cross_entropy(x, targets, NEW), scores, ~NEW)


@pytest.mark.parametrize("seed", SEEDS)
def test_icarl_is_one_mean_over_batch_and_classes(seed: int) -> None:
    """Old columns follow the teacher for every sample; the label of an old class is never a target."""
    case = case_of(seed)
    step, scores = case.step()
    total = 0.0
    for ours, theirs, label in zip(case.student, case.teacher, case.labels, strict=True):
        for column in range(7):
            old = column < 5
            target = 1 / (1 + math.exp(-theirs[column])) if old else float(column == label)
            total += slow_binary(ours[column], target)
    terms = ICaRL(ICaRLSettings()).loss(step)
    assert sum(float(term.detach()) for term in terms.values()) == pytest.approx(total / (5 * 7), rel=1e-9)
    (gradient,) = torch.autograd.grad(torch.stack(list(terms.values())).sum(), scores)
    assert gradient.isfinite().all()


def test_icarl_asks_the_labels_alone_in_the_base_stage() -> None:
    case = Case([[0.5, -1.0, 2.0, *[-INFINITY] * 5]], [[-INFINITY] * 8], [2])
    step, scores = case.step(stage=0)
    expected = (slow_binary(0.5, 0) + slow_binary(-1.0, 0) + slow_binary(2.0, 1)) / 3
    (loss,) = ICaRL(ICaRLSettings()).base_loss(step).values()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.isfinite().all()


def slow_parts(case: Case, temperature: float) -> tuple[float, float]:
    """The means over the batch of cross-entropy over the 7 classes seen and of distillation of the 5 old ones."""
    classified, distilled = 0.0, 0.0
    for ours, theirs, label in zip(case.student, case.teacher, case.labels, strict=True):
        classified -= math.log(softmax(ours, list(range(7)))[label])
        distilled += slow_distillation(ours, theirs, [0, 1, 2, 3, 4], temperature)
    return classified / len(case.labels), distilled / len(case.labels)


@pytest.mark.parametrize("seed", SEEDS)
def test_wa_weighs_old_and_new_by_their_share_of_the_classes(seed: int) -> None:
    case = case_of(seed)
    weights = convex_weights(make_stage(2, 5, [5, 6, 0, 1]))
    assert weights == {"classification": pytest.approx(2 / 7), "distillation": pytest.approx(5 / 7)}
    step, scores = case.step(weights=weights)
    classified, distilled = slow_parts(case, 2.0)
    terms = WA(WASettings()).loss(step)
    assert float(terms["classification"].detach()) == pytest.approx(2 / 7 * classified, rel=1e-6)
    assert float(terms["distillation"].detach()) == pytest.approx(5 / 7 * distilled, rel=1e-6)
    (gradient,) = torch.autograd.grad(torch.stack(list(terms.values())).sum(), scores)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_lwf_classifies_among_the_new_and_distils_the_old(seed: int) -> None:
    case = case_of(seed)
    case = Case(case.student, case.teacher, [5 + label % 2 for label in case.labels])
    step, scores = case.step()
    classified = [-math.log(softmax(row, [5, 6])[label]) for row, label in zip(case.student, case.labels, strict=True)]
    terms = LwF(LwFSettings(lambda_kd=3.0)).loss(step)
    assert float(terms["classification"].detach()) == pytest.approx(sum(classified) / 5, rel=1e-9)
    assert float(terms["distillation"].detach()) == pytest.approx(3 * slow_parts(case, 2.0)[1], rel=1e-9)
    (gradient,) = torch.autograd.grad(terms["classification"], scores, retain_graph=True)
    assert not gradient[:, :5].any(), "no new image pushes an old class down"


@pytest.mark.parametrize("seed", SEEDS)
def test_eeil_distils_every_earlier_stage_and_then_the_newest(seed: int) -> None:
    case = case_of(seed)
    case = Case(case.student, [[*row[:5], 0.3, -row[0], -INFINITY] for row in case.teacher], case.labels)
    step, scores = case.step()
    rows = list(zip(case.student, case.teacher, strict=True))
    before = [slow_distillation(*row, [0, 1, 2], 2.0) + slow_distillation(*row, [3, 4], 2.0) for row in rows]
    newest = [slow_distillation(*row, [5, 6], 2.0) for row in rows]
    method = EEIL(EEILSettings())
    for loss, distilled in ((method.loss, before), (method.balance, newest)):
        terms = loss(step)
        assert float(terms["classification"].detach()) == pytest.approx(slow_parts(case, 2.0)[0], rel=1e-9)
        assert float(terms["distillation"].detach()) == pytest.approx(sum(distilled) / 5, rel=1e-9)
        (gradient,) = torch.autograd.grad(torch.stack(list(terms.values())).sum(), scores)
        assert gradient.isfinite().all()


def test_eeil_distils_in_the_first_stage_after_the_base() -> None:
    """A loop over earlier stages that leaves out the latest would distil nothing here."""
    case = Case([[0.5, -1.0, 2.0, 1.0, 0.0, *[-INFINITY] * 3]], [[2.0, 0.1, -0.7, *[-INFINITY] * 5]], [3])
    step, _ = case.step(stage=1)
    expected = slow_distillation(case.student[0], case.teacher[0], [0, 1, 2], 2.0)
    assert float(EEIL(EEILSettings()).loss(step)["distillation"].detach()) == pytest.approx(expected, rel=1e-9)
