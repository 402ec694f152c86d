"""The losses against slow, obvious implementations of their formulas, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engram.core.errors import EngramError
from engram.methods.afc import AFCSettings, discrepancy, read_importance
from engram.methods.blocks.losses import (
    discrepancy_paper,
    discrepancy_released,
    nca_paper,
    nca_released,
    normalise_importance,
)
from engram.methods.blocks.lsc import Classify, LSCSettings, classification_loss, stage_weight
from helpers import (
    RandomStep,
    make_stage,
    numeric_gradient,
    random_step,
    slow_discrepancy_paper,
    slow_discrepancy_released,
    slow_nca_paper,
    slow_nca_released,
)

SEEDS = range(6)


def gradient_of(loss: Tensor, at: Tensor) -> np.ndarray:
    return torch.autograd.grad(loss, at, retain_graph=True)[0].numpy()


# Classification, released


@pytest.mark.parametrize("seed", SEEDS)
def test_released_nca_is_its_formula(seed: int) -> None:
    case = random_step(seed)
    logits = torch.tensor(case.scores * case.scale)
    expected = [slow_nca_released(list(row * case.scale), y) for row, y in zip(case.scores, case.labels, strict=True)]
    np.testing.assert_allclose(nca_released(logits, torch.tensor(case.labels)).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_released_nca_gradient_flows_through_the_maximum(seed: int) -> None:
    case = random_step(seed)
    logits = torch.tensor(case.scores, requires_grad=True)
    labels = torch.tensor(case.labels)

    def total(scores: np.ndarray) -> float:
        return sum(slow_nca_released(list(row), y) for row, y in zip(scores, case.labels, strict=True))

    gradient = gradient_of(nca_released(logits, labels).sum(), logits)
    np.testing.assert_allclose(gradient, numeric_gradient(total, case.scores), rtol=1e-6, atol=1e-8)
    # The loss does not change when all scores shift together; a detached maximum would leave these sums away from 0.
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=8), st.data())
def test_released_nca_is_cross_entropy_where_the_label_leads_and_counts_the_leader_twice_elsewhere(
    scores: list[float], data: st.DataObject
) -> None:
    label = data.draw(st.integers(0, len(scores) - 1))
    loss = float(nca_released(torch.tensor([scores], dtype=torch.float64), torch.tensor([label])))
    leader = max(scores)
    rivals = [score for i, score in enumerate(scores) if i != label]
    if scores[label] == leader:
        expected = math.log(sum(math.exp(score - leader) for score in scores)) + leader - scores[label]
    else:
        expected = math.log(sum(math.exp(score - leader) for score in rivals) + 1) + leader - scores[label]
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert loss >= 0


def test_released_nca_of_one_class_is_zero_and_so_is_its_gradient() -> None:
    logits = torch.tensor([[1.7], [-2.0]], requires_grad=True)
    loss = nca_released(logits, torch.tensor([0, 0]))
    assert loss.tolist() == [0, 0]
    assert gradient_of(loss.sum(), logits).tolist() == [[0], [0]]


# Classification, paper


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("margin", [0.0, 0.6, 2.0])
def test_paper_nca_is_its_formula(seed: int, margin: float) -> None:
    case = random_step(seed)
    logits, scale = torch.tensor(case.scores * case.scale), torch.tensor(case.scale, dtype=torch.float64)
    expected = [
        slow_nca_paper(list(row), y, case.scale, margin) for row, y in zip(case.scores, case.labels, strict=True)
    ]
    loss = nca_paper(logits, torch.tensor(case.labels), scale, margin)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_paper_nca_gradients_of_scores_and_scale(seed: int) -> None:
    case = random_step(seed)
    scores = torch.tensor(case.scores, requires_grad=True)
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    loss = nca_paper(scale * scores, torch.tensor(case.labels), scale, 0.6).sum()

    def total(values: np.ndarray, eta: float) -> float:
        margin = 0.6 * case.scale / eta  # what eta times the margin is does not move with eta
        return sum(slow_nca_paper(list(row), y, eta, margin) for row, y in zip(values, case.labels, strict=True))

    by_scores = numeric_gradient(lambda values: total(values, case.scale), case.scores)
    by_scale = numeric_gradient(lambda eta: total(case.scores, float(eta[0])), np.array([case.scale]))
    np.testing.assert_allclose(gradient_of(loss, scores), by_scores, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(gradient_of(loss, scale), by_scale[0], rtol=1e-6, atol=1e-8)


def test_paper_nca_does_not_turn_the_scale_around_before_anything_is_learned() -> None:
    scale = torch.tensor(1.0, requires_grad=True)
    loss = nca_paper(scale * torch.zeros(4, 5), torch.tensor([0, 1, 2, 3]), scale, 0.6).mean()
    assert float(gradient_of(loss, scale)) == pytest.approx(0, abs=1e-7)


def test_paper_nca_is_a_hinge_at_zero() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0]], requires_grad=True)
    loss = nca_paper(logits, torch.tensor([0]), torch.tensor(1.0), 0.6)
    assert loss.tolist() == [0]
    assert gradient_of(loss.sum(), logits).tolist() == [[0, 0, 0]]


# Unseen classes stand at minus infinity


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reading", ["released", "paper"])
def test_unseen_classes_change_neither_loss_nor_gradient(seed: int, reading: str) -> None:
    case = random_step(seed)
    labels = torch.tensor(case.labels)

    def loss_and_gradients(unseen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scores = torch.tensor(case.scores, requires_grad=True)
        scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
        padding = torch.full((len(case.scores), unseen), -torch.inf, dtype=torch.float64)
        logits = torch.cat([scale * scores, padding], dim=1)
        loss = nca_released(logits, labels) if reading == "released" else nca_paper(logits, labels, scale, 0.6)
        return loss.detach().numpy(), gradient_of(loss.sum(), scores), gradient_of(loss.sum(), scale)

    for alone, padded in zip(loss_and_gradients(0), loss_and_gradients(4), strict=True):
        assert np.isfinite(padded).all()
        np.testing.assert_allclose(padded, alone, rtol=1e-12)


@pytest.mark.parametrize("reading", ["released", "paper"])
def test_one_class_seen_of_many_gives_zero_and_no_nan(reading: str) -> None:
    score = torch.tensor([[0.3], [-0.8]], requires_grad=True)
    logits = torch.cat([score, torch.full((2, 3), -torch.inf)], dim=1)
    labels = torch.tensor([0, 0])
    loss = nca_released(logits, labels) if reading == "released" else nca_paper(logits, labels, torch.tensor(1.0), 0.6)
    assert loss.tolist() == [0, 0]
    assert gradient_of(loss.sum(), score).tolist() == [[0], [0]]


# The margin, by settings


@pytest.mark.parametrize("seed", SEEDS)
def test_the_margin_changes_the_loss_of_the_paper_and_not_the_released_one(seed: int) -> None:
    case = random_step(seed)
    case.labels[:] = case.scores.argmin(axis=1)  # every hinge is open, whatever the margin

    def losses(variant: str, margin: float) -> np.ndarray:
        chosen = LSCSettings(variant=variant, margin=margin)  # pyright: ignore[reportArgumentType]
        return classification_loss(chosen, case.step()).detach().numpy()

    np.testing.assert_array_equal(losses("released", 0.6), losses("released", 0.0))
    np.testing.assert_allclose(losses("paper", 0.6) - losses("paper", 0.0), 0.6 * case.scale, rtol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_taking_the_margin_from_every_score_cancels_in_the_released_loss(seed: int) -> None:
    case = random_step(seed)
    logits, labels = torch.tensor(case.scores), torch.tensor(case.labels)
    np.testing.assert_allclose(nca_released(logits - 0.6, labels).numpy(), nca_released(logits, labels).numpy())


def test_the_default_margin_is_that_of_the_paper() -> None:
    assert LSCSettings().margin == 0.6


@pytest.mark.parametrize("seed", SEEDS)
def test_the_settings_choose_the_reading_of_the_loss_and_its_mean_is_trained_on(seed: int) -> None:
    case = random_step(seed)
    rows = list(zip(case.scores, case.labels, strict=True))
    released = np.mean([slow_nca_released(list(row * case.scale), y) for row, y in rows])
    paper = np.mean([slow_nca_paper(list(row), y, case.scale, 0.6) for row, y in rows])
    for chosen, expected in (
        (LSCSettings(), released),
        (LSCSettings(variant="paper"), paper),
        (LSCSettings(variant="paper", classification="released"), released),
        (LSCSettings(classification="paper"), paper),
    ):
        terms = Classify(chosen)(case.step())
        assert list(terms) == ["classification"]
        assert terms["classification"].item() == pytest.approx(expected, rel=1e-10)


# Discrepancy


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reading", ["released", "paper"])
@pytest.mark.parametrize("exemplars_only", [False, True])
def test_discrepancy_is_its_formula(seed: int, reading: str, exemplars_only: bool) -> None:
    case = random_step(seed)
    counted = case.exemplar if exemplars_only else np.ones(len(case.labels), dtype=bool)
    slow = slow_discrepancy_released if reading == "released" else slow_discrepancy_paper
    chosen = AFCSettings(variant=reading, exemplars_only=exemplars_only)  # pyright: ignore[reportArgumentType]
    step = case.step()
    fast = discrepancy(chosen, step, read_importance(step)).item()
    assert fast == pytest.approx(slow(case, counted), rel=1e-5)  # the maps are brought to float32


def test_the_discrepancy_reading_can_be_set_apart_from_the_variant() -> None:
    case = random_step(0)
    everything = np.ones(len(case.labels), dtype=bool)
    step = case.step()
    crossed = discrepancy(AFCSettings(discrepancy="paper"), step, read_importance(step))
    assert crossed.item() == pytest.approx(slow_discrepancy_paper(case, everything), rel=1e-5)
    crossed = discrepancy(AFCSettings(variant="paper", discrepancy="released"), step, read_importance(step))
    assert crossed.item() == pytest.approx(slow_discrepancy_released(case, everything), rel=1e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("reading", ["released", "paper"])
def test_discrepancy_gradient(seed: int, reading: str) -> None:
    case = random_step(seed, batch=2)
    slow = slow_discrepancy_released if reading == "released" else slow_discrepancy_paper
    fast = discrepancy_released if reading == "released" else discrepancy_paper
    everything = np.ones(len(case.labels), dtype=bool)
    step = case.step()
    loss = fast(step.student.maps, tuple(torch.tensor(value) for value in case.teacher), read_importance(step))
    for i, ours in enumerate(step.student.maps):

        def moved(values: np.ndarray, i: int = i) -> float:
            maps = [*case.student[:i], values, *case.student[i + 1 :]]
            return slow(RandomStep(**{**vars(case), "student": maps}), everything)

        numeric = numeric_gradient(moved, case.student[i])
        np.testing.assert_allclose(gradient_of(loss, ours), numeric, rtol=2e-3, atol=2e-5)


def test_exemplars_only_ignores_what_new_images_do() -> None:
    case = random_step(1)
    step = case.step()
    chosen = AFCSettings(exemplars_only=True)
    loss = discrepancy(chosen, step, read_importance(step))
    for ours in step.student.maps:
        gradient = gradient_of(loss, ours)
        assert (gradient[~case.exemplar] == 0).all()
        assert (gradient[case.exemplar] != 0).any()


@pytest.mark.parametrize("reading", ["released", "paper"])
def test_a_batch_without_exemplars_has_no_discrepancy(reading: str) -> None:
    case = random_step(2)
    case.exemplar[:] = False
    step = case.step()
    chosen = AFCSettings(variant=reading, exemplars_only=True)  # pyright: ignore[reportArgumentType]
    loss = discrepancy(chosen, step, read_importance(step))
    assert loss.item() == 0
    for ours in step.student.maps:
        assert (gradient_of(loss, ours) == 0).all()


@pytest.mark.parametrize("fast", [discrepancy_released, discrepancy_paper])
def test_student_equal_to_teacher_has_no_discrepancy_and_no_nan_gradient(
    fast: Callable[..., Tensor],
) -> None:
    case = random_step(3)
    student = [torch.tensor(value, requires_grad=True) for value in case.student]
    importance = [torch.tensor(value) for value in case.importance]
    loss = fast(student, [ours.detach().clone() for ours in student], importance)
    assert loss.item() == 0
    for ours in student:
        assert (gradient_of(loss, ours) == 0).all()


@pytest.mark.parametrize("fast", [discrepancy_released, discrepancy_paper])
@pytest.mark.parametrize("silent", ["student", "teacher", "both"])
def test_a_channel_that_is_zero_everywhere_gives_no_nan(fast: Callable[..., Tensor], silent: str) -> None:
    random = np.random.default_rng(4)
    ours, theirs = random.normal(size=(2, 3, 4, 4)), random.normal(size=(2, 3, 4, 4))
    if silent != "teacher":
        ours[:, 1] = 0
    if silent != "student":
        theirs[:, 1] = 0
    student = torch.tensor(ours, dtype=torch.float32, requires_grad=True)
    loss = fast([student], [torch.tensor(theirs, dtype=torch.float32)], [torch.ones(3)])
    assert math.isfinite(loss.item())
    assert np.isfinite(gradient_of(loss, student)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_released_discrepancy_sees_neither_sign_nor_size_and_the_paper_sees_the_sign(seed: int) -> None:
    case = random_step(seed)
    teacher = [torch.tensor(value) for value in case.teacher]
    importance = [torch.tensor(value) for value in case.importance]
    student = [torch.tensor(value) for value in case.student]
    flipped = [-ours for ours in student]
    doubled = [2 * ours for ours in student]
    for fast in (discrepancy_released, discrepancy_paper):
        torch.testing.assert_close(fast(doubled, teacher, importance), fast(student, teacher, importance))
    torch.testing.assert_close(
        discrepancy_released(flipped, teacher, importance), discrepancy_released(student, teacher, importance)
    )
    assert not torch.isclose(
        discrepancy_paper(flipped, teacher, importance), discrepancy_paper(student, teacher, importance)
    )


# The weight of the discrepancy


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 12), st.floats(0, 20))
def test_the_weight_of_a_stage_is_lambda_times_the_root_of_seen_over_new(old: int, new: int, factor: float) -> None:
    stage = make_stage(1, old, list(range(old, old + new)), size=1)
    assert stage_weight(factor, stage) == pytest.approx(factor * math.sqrt((old + new) / new))


def test_lambda_of_the_first_cifar_stages() -> None:
    assert AFCSettings().lambda_disc == 4
    one_of_51 = make_stage(1, 50, [50], size=1)
    assert stage_weight(4, one_of_51) == pytest.approx(4 * math.sqrt(51))
    ten_of_100 = make_stage(5, 90, list(range(90, 100)), size=1)
    assert stage_weight(4, ten_of_100) == pytest.approx(4 * math.sqrt(10))


# Normalising the importance


@settings(max_examples=50, deadline=None)
@given(st.lists(st.just(0.0) | st.floats(1e-30, 1e6), min_size=1, max_size=9))
def test_normalised_importance_has_mean_one_and_keeps_the_ratios(values: list[float]) -> None:
    mean = sum(values) / len(values)
    normalised = normalise_importance(torch.tensor(values, dtype=torch.float64)).tolist()
    if mean == 0:
        assert normalised == [1] * len(values)
    else:
        assert normalised == pytest.approx([value / mean for value in values], rel=1e-9)
        assert sum(normalised) / len(values) == pytest.approx(1)


def test_tiny_importances_are_normalised_in_float32_too() -> None:
    normalised = normalise_importance(torch.tensor([1e-30, 3e-30]))
    assert normalised.tolist() == pytest.approx([0.5, 1.5])


# What is refused


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LSCSettings(variant="papre"), "no variant 'papre': did you mean 'paper'?"),  # pyright: ignore
        (lambda: LSCSettings(classification="hinge"), "no classification 'hinge': valid names: paper, released"),  # pyright: ignore
        (lambda: LSCSettings(similarity="dot"), "no similarity 'dot': valid names: cosine, distance"),  # pyright: ignore
        (lambda: AFCSettings(discrepancy="none"), "no discrepancy 'none': valid names: paper, released"),  # pyright: ignore
        (lambda: LSCSettings(proxies=0), "proxies must be at least 1, got 0"),
        (lambda: LSCSettings(sharpness=0), "sharpness must be above 0, got 0"),
        (lambda: AFCSettings(lambda_disc=-1), "lambda_disc must be at least 0, got -1"),
        (lambda: AFCSettings(importance_samples=0), "importance_samples must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence.replace("?", r"\?")):
        make()


def test_cross_entropy_agrees_where_the_label_leads_by_torch_too() -> None:
    logits = torch.tensor([[3.0, 1.0, -1.0], [0.0, 0.5, 2.0]])
    labels = torch.tensor([0, 2])
    torch.testing.assert_close(nca_released(logits, labels), F.cross_entropy(logits, labels, reduction="none"))
