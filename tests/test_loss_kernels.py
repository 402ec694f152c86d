"""The GPU kernels of heads and losses against slow, obvious references in float64.

They run natively where there is a GPU, and elsewhere in Triton's interpreter, which is why the problems are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # triton looks when it is first imported, and again at each launch
pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from engram.kernels import availability as kernels  # noqa: E402
from engram.kernels import pooled_sums as pod  # noqa: E402
from engram.kernels import proxies  # noqa: E402
from engram.kernels import sample_losses as rows  # noqa: E402
from engram.kernels.distance import BLOCK_C, weighted_distance  # noqa: E402
from engram.kernels.distance import ELEMENTS as DISTANCE_ELEMENTS  # noqa: E402
from engram.methods.blocks import losses  # noqa: E402
from engram.nn.heads import LSCHead  # noqa: E402

# The error of a gradient, relative to the largest of its map, by what it is stored in. Of bf16 one step of its 8 bits,
# which a GPU rounds and the interpreter cuts off.
SPREAD = {torch.bfloat16: 2**-7, torch.float32: 1e-4}
every_dtype = pytest.mark.parametrize("dtype", SPREAD, ids=["bf16", "float32"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random float32 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def leaf(values: Tensor) -> Tensor:
    """A copy that takes a gradient."""
    return values.detach().clone().requires_grad_()


def assert_gradient(got: Tensor, exact: Tensor, rtol: float = 1e-4) -> None:
    """The two leaves' gradients agree, relative to the largest of them."""
    assert got.grad is not None
    assert exact.grad is not None
    assert got.grad.dtype is got.dtype
    atol = 1e-7 + rtol * float(exact.grad.abs().max())
    torch.testing.assert_close(got.grad.double(), exact.grad, rtol=rtol, atol=atol)


# The local similarity classifier


def exact_scores(embedding: Tensor, weight: Tensor, factor: float, shift: float) -> Tensor:
    unit, unit_proxies = F.normalize(embedding, dim=1), F.normalize(weight, dim=2)
    similarity = factor * (torch.einsum("bd,kpd->bkp", unit, unit_proxies) - shift)
    return (similarity.softmax(dim=2) * similarity).sum(dim=2)


@pytest.mark.parametrize(("factor", "shift"), [(2.0, 1.0), (9.0, 0.0)], ids=["distance", "cosine"])
@pytest.mark.parametrize(
    ("batch", "classes", "count", "features"),
    [(5, 3, 10, 64), (35, 2, 1, 20), (33, 9, 17, 33)],
    ids=["as on CIFAR-100", "one proxy", "nothing fits a block"],
)
def test_the_scores_of_proxies(
    batch: int, classes: int, count: int, features: int, factor: float, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "TILE", 1024)  # several rounds over the proxies
    embedding, weight = normal(batch, features), normal(classes, count, features, seed=1)
    weight[-1] = 0  # a row without a class
    embedding[-1] = 0
    ours, theirs = (leaf(embedding), leaf(weight)), (leaf(embedding.double()), leaf(weight.double()))
    got, exact = proxies.proxy_scores(*ours, factor, shift), exact_scores(*theirs, factor, shift)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    upstream = normal(batch, classes, seed=2)
    upstream[:, -1] = 0  # as a row without a class has it, for its scores are masked
    upstream[-1] = 0
    got.backward(upstream)
    exact.backward(upstream.double())
    for mine, reference in zip(ours, theirs, strict=True):
        assert_gradient(mine, reference)
    assert (ours[1].grad[-1] == 0).all()  # pyright: ignore[reportOptionalSubscript]


def test_the_scores_need_no_gradient_at_the_embedding() -> None:
    weight = leaf(normal(3, 4, 16))
    proxies.proxy_scores(normal(2, 16), weight, 2.0, 1.0).sum().backward()
    assert weight.grad is not None
    again = leaf(weight)
    embedding = leaf(normal(2, 16))
    proxies.proxy_scores(embedding, again, 2.0, 1.0).sum().backward()
    assert embedding.grad is not None
    assert torch.equal(weight.grad, again.grad)  # pyright: ignore[reportArgumentType]


def test_what_is_too_large_for_the_kernels_is_left_to_torch() -> None:
    assert proxies.fits(10, 64)
    assert proxies.fits(32, 64)
    assert not proxies.fits(33, 64)
    assert proxies.fits(1, 128)
    assert not proxies.fits(10, 512)
    small, wide = torch.empty(1, 16, 32, 32), torch.empty(1, 512, 14, 33)
    assert pod.fits([small, small])
    assert not pod.fits([small, wide])


# Samples one by one


def exact_nca(logits: Tensor, labels: Tensor) -> Tensor:
    each = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        others = torch.cat([row[:label], row[label + 1 :]])
        each.append(torch.log(others.exp().sum() + row.amax().exp()) - row[label])
    return torch.stack(each)


@pytest.mark.parametrize("classes", [1, 10, 100, 300])
def test_the_nca_loss(classes: int) -> None:
    batch, seen = 6, max(1, classes - 2)
    logits = 3 * normal(batch, classes)
    logits[:, seen:] = -torch.inf
    labels = torch.arange(batch, device=DEVICE) % seen
    logits[0, 0] = logits[0, :seen].amax() + 1  # its own class is the highest
    if seen > 3:
        logits[1, 2] = logits[1, 3] = logits[1, :seen].amax() + 1  # two are
    ours, exact_logits = leaf(logits), leaf(logits.double())
    got, exact = rows.nca(ours, labels), exact_nca(exact_logits, labels)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    upstream = normal(batch, seed=1)
    got.backward(upstream)
    exact.backward(upstream.double())
    assert_gradient(ours, exact_logits)
    assert (ours.grad[:, seen:] == 0).all()  # pyright: ignore[reportOptionalSubscript]


def test_the_nca_loss_of_large_logits_is_finite() -> None:
    logits = leaf(torch.tensor([[500.0, -500.0, 499.0], [-500.0, 500.0, -torch.inf]], device=DEVICE))
    labels = torch.tensor([0, 0], device=DEVICE)
    loss = rows.nca(logits, labels)
    torch.testing.assert_close(loss, losses.nca_released(logits.cpu(), labels.cpu()).detach().to(DEVICE))
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("features", [8, 64, 300])
def test_the_cosine_of_embeddings(features: int) -> None:
    ours, theirs = normal(5, features), normal(5, features, seed=1)
    ours[1] = 0
    theirs[2] = 0
    mine, reference, fixed = leaf(ours), leaf(ours.double()), leaf(theirs)
    got = rows.cosine(mine, fixed)
    exact = (F.normalize(reference, dim=1) * F.normalize(theirs.double(), dim=1)).sum(dim=1)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    upstream = normal(5, seed=2)
    upstream[1] = 0  # at no length the gradient is without bounds
    got.backward(upstream)
    exact.backward(upstream.double())
    assert_gradient(mine, reference)
    assert fixed.grad is None


# Maps


def two_maps(
    *shapes: tuple[int, int, int], batch: int = 3, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], list[Tensor]]:
    """Maps of student and teacher that are near each other, in channels-last order as the backbone's are."""
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for number, shape in enumerate(shapes):
        maps = normal(batch, *shape, seed=number)
        near = maps + 0.1 * normal(batch, *shape, seed=100 + number)
        theirs.append(maps.to(dtype).contiguous(memory_format=torch.channels_last))
        ours.append(near.to(dtype).contiguous(memory_format=torch.channels_last))
    return ours, theirs


SHAPES = {
    "full blocks": ((16, 4, 4), (32, 2, 2)),
    "part of a block": ((24, 3, 5), (7, 2, 9)),
    "two blocks of pixels": ((7, 33, 32), (16, 3, 3)),
}
every_shape = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())


@every_shape
@pytest.mark.parametrize(("square", "power"), [(True, 1), (False, 2), (False, 1)], ids=["released", "paper", "values"])
@every_dtype
def test_the_weighted_distance_of_channels(
    shapes: tuple[tuple[int, int, int], ...], square: bool, power: int, dtype: torch.dtype
) -> None:
    ours, theirs = two_maps(*shapes, dtype=dtype)
    ours[0][0, 0] = 0  # of no length
    ours[0][0, 1] = theirs[0][0, 1]  # the same
    ours[0][0, 2], theirs[0][0, 2] = 0, 0  # neither has a length
    weights = [normal(shape[0], seed=7).abs() for shape in shapes]
    factors = [0.5, 2.0]
    mine, reference = [leaf(maps) for maps in ours], [leaf(maps.double()) for maps in ours]
    got = weighted_distance(mine, theirs, weights, factors, square=square, power=power)

    def unit(maps: Tensor) -> Tensor:
        return F.normalize((maps.square() if square else maps).flatten(2), dim=2)

    exact = sum(
        factor * (weight.double() * torch.linalg.vector_norm(unit(a) - unit(b.double()), dim=2) ** power).sum(dim=1)
        for a, b, weight, factor in zip(reference, theirs, weights, factors, strict=True)
    )
    assert isinstance(exact, Tensor)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    upstream = normal(3, seed=9)
    got.backward(upstream)
    exact.backward(upstream.double())
    for one, other in zip(mine, reference, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        reach = other.grad.abs().flatten(2).amax(dim=2)[:, :, None, None]
        assert ((one.grad.double() - other.grad).abs() <= SPREAD[dtype] * reach).all()
    assert mine[0].grad is not None
    assert (mine[0].grad[0, 1] == 0).all()
    assert (mine[0].grad[0, 2] == 0).all()


def test_the_distance_tests_reach_a_second_block() -> None:
    assert DISTANCE_ELEMENTS // BLOCK_C < 33 * 32
    assert 24 % BLOCK_C


@every_shape
@pytest.mark.parametrize("elements", [16384, 64], ids=["whole maps", "some rows at a time"])
@every_dtype
def test_the_distance_of_rows_and_columns(
    shapes: tuple[tuple[int, int, int], ...], elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "ELEMENTS", elements)
    ours, theirs = two_maps(*shapes, dtype=dtype)
    ours[0][1] = theirs[0][1]  # the same
    ours[1][2] = 0  # of no length
    mine, reference = [leaf(maps) for maps in ours], [leaf(maps.double()) for maps in ours]
    got = pod.pod_distances(mine, theirs)

    def unit(maps: Tensor) -> Tensor:
        return F.normalize(losses.over_rows_and_columns(maps.double().square()), dim=1)

    exact = torch.stack(
        [torch.linalg.vector_norm(unit(a) - unit(b), dim=1) for a, b in zip(reference, theirs, strict=True)]
    )
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    upstream = normal(2, 3, seed=9)
    got.backward(upstream)
    exact.backward(upstream.double())
    for one, other in zip(mine, reference, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        reach = other.grad.abs().flatten(1).amax(dim=1)[:, None, None, None]
        assert ((one.grad.double() - other.grad).abs() <= SPREAD[dtype] * reach).all()
    assert mine[0].grad is not None
    assert (mine[0].grad[1] == 0).all()


def test_the_same_input_gives_the_same_bits() -> None:
    ours, theirs = two_maps((16, 4, 4))
    embedding, weight = normal(4, 16), normal(3, 4, 16, seed=1)

    def once() -> list[Tensor]:
        mine, fresh = leaf(ours[0]), (leaf(embedding), leaf(weight))
        distance = weighted_distance([mine], theirs, [torch.ones(16, device=DEVICE)], [1.0], square=True, power=1)
        loss = rows.nca(proxies.proxy_scores(*fresh, 2.0, 1.0), torch.tensor([0, 1, 2, 0], device=DEVICE))
        (loss.sum() + distance.sum() + pod.pod_distances([mine], theirs).sum()).backward()
        assert mine.grad is not None
        return [loss.detach(), distance.detach(), mine.grad, *(each.grad for each in fresh if each.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


# Where heads and losses take them


def both_ways(monkeypatch: pytest.MonkeyPatch, function: Callable[[], tuple[Tensor, list[Tensor]]]) -> None:
    """What a function gives, and the gradients at the leaves it names, is the same with the kernels and without."""
    found = []
    for use in (False, True):
        monkeypatch.setattr(kernels, "is_available_for", lambda tensor, use=use: use)
        value, leaves = function()
        value.sum().backward()
        found.append([value.detach(), *(each.grad for each in leaves)])
    for without, with_ in zip(*found, strict=True):
        assert with_.dtype == without.dtype
        spread = SPREAD[with_.dtype]
        reach = float(without.abs().max())
        torch.testing.assert_close(with_, without, rtol=spread, atol=spread * reach)


@pytest.mark.parametrize("similarity", ["distance", "cosine"])
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_a_head_scores_alike(
    monkeypatch: pytest.MonkeyPatch, similarity: Literal["distance", "cosine"], sharpness: float
) -> None:
    head = LSCHead(24, 6, proxies=5, sharpness=sharpness, similarity=similarity)
    head.grow(6, torch.Generator().manual_seed(1))
    head.to(DEVICE)

    def scores() -> tuple[Tensor, list[Tensor]]:
        head.weight.grad = None
        embedding = leaf(normal(7, 24))
        return head(embedding) * normal(7, 6, seed=1), [embedding, head.weight]

    both_ways(monkeypatch, scores)


def test_losses_of_embeddings_and_logits_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([0, 3, 1], device=DEVICE)

    def nca() -> tuple[Tensor, list[Tensor]]:
        logits = leaf(normal(3, 5))
        return losses.nca_released(logits, labels), [logits]

    def cosine() -> tuple[Tensor, list[Tensor]]:
        ours = leaf(normal(3, 16))
        return losses.cosine_distance(ours, normal(3, 16, seed=1)), [ours]

    both_ways(monkeypatch, nca)
    both_ways(monkeypatch, cosine)


@pytest.mark.parametrize("counted", [None, (True, False, True)], ids=["all", "some"])
@pytest.mark.parametrize("reading", ["released", "paper", "pod", "one number for all channels"])
def test_losses_of_maps_are_alike(
    monkeypatch: pytest.MonkeyPatch, reading: str, counted: tuple[bool, ...] | None
) -> None:
    ours, theirs = two_maps((16, 4, 4), (24, 3, 5))
    importance = [normal(maps.shape[1], seed=5).abs() for maps in ours]
    if reading == "one number for all channels":
        behind = torch.tensor([1.0, *(40 * [7.0])], device=DEVICE)  # what a kernel finds that reads on
        importance = [behind[0] for _ in ours]
    some = None if counted is None else torch.tensor(counted, device=DEVICE)

    def distance() -> tuple[Tensor, list[Tensor]]:
        mine = [leaf(maps) for maps in ours]
        if reading == "pod":
            return losses.pooled_distance(mine, theirs, losses.over_rows_and_columns), mine
        measure = losses.discrepancy_paper if reading == "paper" else losses.discrepancy_released
        return measure(mine, theirs, importance, some), mine

    both_ways(monkeypatch, distance)
