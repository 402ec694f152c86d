"""The losses on feature maps of PODNet and of AFC's Table 4 against slow, obvious loops, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.methods.blocks.losses import (
    attention_distance,
    class_gradient,
    cosine_distance,
    gram_distance,
    over_channels,
    over_pixels,
    over_rows_and_columns,
    pooled_distance,
    top_old_class,
    whole_map_distance,
)
from engram.nn.heads import LSCHead
from engram.nn.network import Network
from engram.nn.resnet import resnet10
from helpers import numeric_gradient, random_step

SEEDS = range(4)


def unit(values: list[float]) -> list[float]:
    """Divided by its length; zeros stay zeros."""
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values] if length else values


def apart(one: list[float], other: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def slow_rows_and_columns(values: np.ndarray) -> list[float]:
    channels, height, width = values.shape
    found = [sum(float(values[c, y, x]) ** 2 for x in range(width)) for c in range(channels) for y in range(height)]
    found += [sum(float(values[c, y, x]) ** 2 for y in range(height)) for c in range(channels) for x in range(width)]
    return found


def slow_channels(values: np.ndarray) -> list[float]:
    channels, height, width = values.shape
    return [sum(float(values[c, y, x]) ** 2 for c in range(channels)) for y in range(height) for x in range(width)]


def slow_pixels(values: np.ndarray) -> list[float]:
    channels, height, width = values.shape
    places = [(y, x) for y in range(height) for x in range(width)]
    return [sum(float(values[c, y, x]) ** 2 for y, x in places) / len(places) for c in range(channels)]


def slow_pooled(ours: np.ndarray, theirs: np.ndarray, pool: Callable[[np.ndarray], list[float]]) -> float:
    return apart(unit(pool(ours)), unit(pool(theirs)))


def slow_whole(ours: np.ndarray, theirs: np.ndarray) -> float:
    return apart(unit(ours.ravel().tolist()), unit(theirs.ravel().tolist())) ** 2 / ours.size


def slow_gram(ours: np.ndarray, theirs: np.ndarray) -> float:
    channels, height, width = ours.shape

    def entry(values: np.ndarray, c: int, d: int) -> float:
        places = [(y, x) for y in range(height) for x in range(width)]
        return sum(float(values[c, y, x]) * float(values[d, y, x]) for y, x in places) / (channels * height * width)

    pairs = [(c, d) for c in range(channels) for d in range(channels)]
    return sum((entry(ours, c, d) - entry(theirs, c, d)) ** 2 for c, d in pairs)


FastDistance = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
SlowDistance = Callable[[np.ndarray, np.ndarray], float]
DISTANCES: dict[str, tuple[FastDistance, SlowDistance]] = {
    "spatial": (partial(pooled_distance, pool=over_rows_and_columns), partial(slow_pooled, pool=slow_rows_and_columns)),
    "channel": (partial(pooled_distance, pool=over_channels), partial(slow_pooled, pool=slow_channels)),
    "gap": (partial(pooled_distance, pool=over_pixels), partial(slow_pooled, pool=slow_pixels)),
    "whole": (whole_map_distance, slow_whole),
    "gram": (gram_distance, slow_gram),
}
distances = pytest.mark.parametrize("name", list(DISTANCES))


def slow_mean(slow: SlowDistance, student: Sequence[np.ndarray], teacher: Sequence[np.ndarray]) -> float:
    """The mean over the samples of each map, and then over the maps."""
    of_map = [
        sum(slow(a, b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return sum(of_map) / len(of_map)


# Maps against maps


@pytest.mark.parametrize("seed", SEEDS)
@distances
def test_a_distance_is_its_formula(name: str, seed: int) -> None:
    fast, slow = DISTANCES[name]
    case = random_step(seed)
    found = fast([torch.tensor(value) for value in case.student], [torch.tensor(value) for value in case.teacher])
    assert found.shape == ()
    # The maps are brought to float32.
    assert found.item() == pytest.approx(slow_mean(slow, case.student, case.teacher), rel=1e-5)


@pytest.mark.parametrize("seed", range(2))
@distances
def test_the_gradient_of_a_distance(name: str, seed: int) -> None:
    fast, slow = DISTANCES[name]
    case = random_step(seed, batch=2)
    student = [torch.tensor(value, requires_grad=True) for value in case.student]
    gradients = torch.autograd.grad(fast(student, [torch.tensor(value) for value in case.teacher]), student)
    for i, gradient in enumerate(gradients):

        def moved(values: np.ndarray, i: int = i) -> float:
            return slow_mean(slow, [*case.student[:i], values, *case.student[i + 1 :]], case.teacher)

        numeric = numeric_gradient(moved, case.student[i])
        np.testing.assert_allclose(gradient.numpy(), numeric, rtol=2e-3, atol=1e-3 * np.abs(numeric).max())


@distances
def test_student_equal_to_teacher_is_no_distance_apart_and_has_no_gradient(name: str) -> None:
    student = [torch.tensor(value, requires_grad=True) for value in random_step(3).student]
    loss = DISTANCES[name][0](student, [ours.detach().clone() for ours in student])
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, student):
        assert (gradient == 0).all()


@distances
@pytest.mark.parametrize("silent", ["student", "teacher", "both"])
def test_maps_that_are_zero_everywhere_give_no_nan(name: str, silent: str) -> None:
    case = random_step(4)
    student = [torch.tensor(value * (silent == "teacher"), requires_grad=True) for value in case.student]
    teacher = [torch.tensor(value * (silent == "student")) for value in case.teacher]
    loss = DISTANCES[name][0](student, teacher)
    assert math.isfinite(loss.item())
    assert (loss.item() == 0) == (silent == "both")
    for gradient in torch.autograd.grad(loss, student):
        assert gradient.isfinite().all()


@distances
def test_the_teacher_gets_no_gradient(name: str) -> None:
    case = random_step(5)
    student = [torch.tensor(value, requires_grad=True) for value in case.student]
    teacher = [torch.tensor(value, requires_grad=True) for value in case.teacher]
    DISTANCES[name][0](student, teacher).backward()
    assert all(theirs.grad is None for theirs in teacher)
    assert all(ours.grad is not None and ours.grad.any() for ours in student)


@distances
def test_bf16_maps_are_measured_in_float32(name: str) -> None:
    case = random_step(6)
    student = [torch.tensor(value).bfloat16() for value in case.student]
    teacher = [torch.tensor(value).bfloat16() for value in case.teacher]
    fast, slow = DISTANCES[name]
    found = fast(student, teacher)
    assert found.dtype == torch.float32
    rounded = [[value.double().numpy() for value in maps] for maps in (student, teacher)]
    assert found.item() == pytest.approx(slow_mean(slow, *rounded), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "what", "seen"),
    [
        ("spatial", "sign", False),
        ("channel", "sign", False),
        ("gap", "sign", False),
        ("whole", "sign", True),
        ("gram", "sign", False),
        ("spatial", "size", False),
        ("gram", "size", True),
        ("spatial", "channels", True),
        ("channel", "channels", False),
        ("gap", "channels", True),
        ("gram", "channels", True),
        ("spatial", "places", True),
        ("channel", "places", True),
        ("gap", "places", False),
        ("gram", "places", False),
        ("whole", "places", True),
    ],
)
def test_what_each_distance_sees(name: str, what: str, seen: bool) -> None:
    student = [torch.tensor(value) for value in random_step(7).student]
    changed = {
        "sign": lambda maps: -maps,
        "size": lambda maps: 2 * maps,
        "channels": lambda maps: maps.roll(1, dims=1),
        "places": lambda maps: maps.flatten(2).flip(2).view(maps.shape),
    }[what]
    distance = DISTANCES[name][0]([changed(maps) for maps in student], student).item()
    assert (distance > 1e-4) == seen


def test_the_spatial_distance_leaves_rows_and_columns_free_inside() -> None:
    energy = torch.tensor([[4.0, 1.0], [1.0, 4.0]])
    ours, theirs = energy.sqrt().view(1, 1, 2, 2), energy.flip(0).sqrt().view(1, 1, 2, 2)
    assert pooled_distance([ours], [theirs], over_rows_and_columns).item() == pytest.approx(0, abs=1e-6)
    assert pooled_distance([ours], [theirs], over_channels).item() > 0.5


# Embeddings


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cosine_distance_is_its_formula(seed: int) -> None:
    random = np.random.default_rng(seed)
    ours, theirs = random.normal(size=(5, 7)), random.normal(size=(5, 7))

    def slow(values: np.ndarray) -> float:
        cosines = [
            sum(a * b for a, b in zip(unit(list(x)), unit(list(y)), strict=True))
            for x, y in zip(values, theirs, strict=True)
        ]
        return sum(1 - cosine for cosine in cosines) / len(cosines)

    student = torch.tensor(ours, requires_grad=True)
    loss = cosine_distance(student, torch.tensor(theirs))
    assert loss.item() == pytest.approx(slow(ours), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, student)
    np.testing.assert_allclose(gradient.numpy(), numeric_gradient(slow, ours), rtol=1e-3, atol=1e-6)


def test_the_cosine_distance_of_equal_or_silent_embeddings_gives_no_nan() -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for ours, theirs in ((values, values), (values * 0, values), (values, values * 0), (values * 0, values * 0)):
        student = ours.clone().requires_grad_()
        loss = cosine_distance(student, theirs)
        assert loss.item() == pytest.approx(float(ours is not theirs), abs=1e-6)
        assert torch.autograd.grad(loss, student)[0].isfinite().all()


# Attention


def network_of_five(seed: int) -> Network:
    """A network that has seen five classes and has room for two more."""
    generator = torch.Generator().manual_seed(seed)
    head = LSCHead(64, capacity=7, proxies=4)
    head.grow(5, generator)
    network = Network(resnet10(generator), head, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    for name, parameter in network.named_parameters():  # blocks that start as their shortcut would hide a mistake
        if "bn" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return network


def test_the_top_old_class_is_the_students_best_that_the_teacher_knows() -> None:
    minus = -math.inf
    student = torch.tensor([[0.1, 0.3, 0.2, 9.0, minus], [0.5, 0.3, 0.9, 0.4, minus]])
    teacher = torch.tensor([[0.0, -5.0, 4.0, minus, minus], [0.0, 1.0, -2.0, minus, minus]])
    assert top_old_class(student, teacher).tolist() == [1, 2]
    teacher[:, 1:] = minus
    assert top_old_class(student, teacher).tolist() == [0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_at_the_embedding_is_that_at_the_map(seed: int) -> None:
    """GradCAM's weights are the spatial mean of the score's gradient at the map; both ways give the same."""
    output = network_of_five(seed)(torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(seed)))
    classes = torch.tensor([2, 0, 4])
    chosen = output.scores[torch.arange(3), classes].sum()
    (at_map,) = torch.autograd.grad(chosen, output.maps[-1], retain_graph=True)
    pixels = at_map.shape[2] * at_map.shape[3]
    found = class_gradient(output.scores, classes, output.embedding)
    assert not found.requires_grad
    torch.testing.assert_close(found / pixels, at_map.mean(dim=(2, 3)), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", [True, False])
def test_the_gradient_at_the_embedding_by_differences(seed: int, scale: bool) -> None:
    head = LSCHead(5, capacity=4, proxies=3, sharpness=1.0 if scale else 3.0, learned_scale=scale).double()
    generator = torch.Generator().manual_seed(seed)
    head.grow(4, generator)
    embedding = torch.randn(2, 5, generator=generator).double().requires_grad_()
    classes = torch.tensor([3, 1])
    found = class_gradient(head(embedding), classes, embedding)

    def total(values: np.ndarray) -> float:
        with torch.no_grad():
            scores = head(torch.tensor(values))
        return float(scores[0, 3] + scores[1, 1])

    numeric = numeric_gradient(total, embedding.detach().numpy())
    np.testing.assert_allclose(found.numpy(), numeric, rtol=1e-5, atol=1e-7)


def slow_attention(values: np.ndarray, weight: np.ndarray, summed: bool) -> list[float]:
    channels, height, width = values.shape
    places = [(y, x) for y in range(height) for x in range(width)]
    if summed:
        found = [max(0.0, sum(float(weight[c]) * float(values[c, y, x]) for c in range(channels))) for y, x in places]
    else:
        found = [max(0.0, float(weight[c]) * float(values[c, y, x])) for c in range(channels) for y, x in places]
    return unit(found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("summed", [False, True])
def test_the_attention_distance_is_its_formula(seed: int, summed: bool) -> None:
    case, random = random_step(seed, batch=2), np.random.default_rng(100 + seed)
    ours, theirs = case.student[1], case.teacher[1]
    our_weight, their_weight = random.normal(size=(2, *ours.shape[:2]))

    def slow(values: np.ndarray) -> float:
        total = 0.0
        for b in range(len(values)):
            mine = slow_attention(values[b], our_weight[b], summed)
            total += sum(
                abs(p - q) for p, q in zip(mine, slow_attention(theirs[b], their_weight[b], summed), strict=True)
            )
        return total / len(values)

    student = torch.tensor(ours, requires_grad=True)
    weights = (torch.tensor(our_weight, requires_grad=True), torch.tensor(their_weight, requires_grad=True))
    teacher = torch.tensor(theirs, requires_grad=True)
    loss = attention_distance(student, teacher, *weights, summed)
    assert loss.item() == pytest.approx(slow(ours), rel=1e-5)
    loss.backward()
    assert teacher.grad is None
    assert all(weight.grad is None for weight in weights)  # they are numbers: no second backward
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), numeric_gradient(slow, ours), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("summed", [False, True])
def test_attention_of_equal_or_silent_maps_gives_no_nan(summed: bool) -> None:
    case = random_step(8)
    maps = torch.tensor(case.student[0], dtype=torch.float32)
    weight = torch.ones(maps.shape[:2])

    def cases() -> Iterator[tuple[Tensor, Tensor]]:
        yield maps, maps
        yield maps * 0, maps
        yield maps, maps * 0
        yield maps * 0, maps * 0

    for ours, theirs in cases():
        student = ours.clone().requires_grad_()
        loss = attention_distance(student, theirs, weight, weight, summed)
        assert math.isfinite(loss.item())
        assert (loss.item() == 0) == torch.equal(ours, theirs)
        assert torch.autograd.grad(loss, student)[0].isfinite().all()
