"""GeoDL: the geodesic flow against its integral and its closed form, the losses through it, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import EngramError, recipe
from engram.methods.geodl import (
    GeoDLSettings,
    geodesic_distance,
    geodesic_flow,
    geodesic_similarity,
    polar_factor,
    pool_quarters,
)
from helpers import drift, learn_stage, parameters_of, tiny_config, tiny_session


def random_features(seed: int, batch: int = 7, dim: int = 20, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Unit features of a teacher and of a student near it, some directions far weaker than others."""
    random = np.random.default_rng(seed)
    theirs = random.normal(size=(batch, dim)) * np.logspace(0, -2, dim)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    ours = theirs + noise * random.normal(size=(batch, dim)) / np.sqrt(dim)
    return torch.tensor(theirs), torch.tensor(ours / np.linalg.norm(ours, axis=1, keepdims=True))


def basis(rows: np.ndarray) -> np.ndarray:
    """(D, B - 1): an orthonormal basis of what the rows differ in from their mean."""
    return np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2][: len(rows) - 1].T


def ends(theirs: Tensor, ours: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E and N (D, k) and the principal angles (k,): the geodesic is E cos(t theta) + N sin(t theta)."""
    one, other = basis(theirs.numpy()), basis(ours.numpy())
    left, cosine, right = np.linalg.svd(one.T @ other)
    theta = np.arccos(cosine.clip(-1, 1))
    start = one @ left
    return start, (other @ right.T - start * cosine) / np.sin(theta), theta


def slow_flow(theirs: Tensor, ours: Tensor, points: int = 400) -> np.ndarray:
    """The mean of the projections on the subspaces along the geodesic, by the midpoint rule."""
    start, away, theta = ends(theirs, ours)
    total = np.zeros((len(start), len(start)))
    for i in range(points):
        at = (i + 0.5) / points
        frame = start * np.cos(at * theta) + away * np.sin(at * theta)
        total += frame @ frame.T / points
    return total


def closed_flow(theirs: Tensor, ours: Tensor) -> np.ndarray:
    """The paper's closed form, with its three diagonal matrices."""
    e, n, theta = ends(theirs, ours)
    ratio = np.sin(2 * theta) / (2 * theta)
    cross = (e * (np.sin(theta) ** 2 / (2 * theta))) @ n.T
    return (e * (1 + ratio) / 2) @ e.T + cross + cross.T + (n * (1 - ratio) / 2) @ n.T


def as_matrix(theirs: Tensor, ours: Tensor) -> np.ndarray:
    start, end, squares, products = geodesic_flow(theirs, ours)
    return (
        start.T @ squares @ start + start.T @ products @ end + end.T @ products @ start + end.T @ squares @ end
    ).numpy()


@pytest.mark.parametrize("noise", [0.05, 0.5, 4.0])
@pytest.mark.parametrize(("batch", "dim"), [(7, 20), (3, 8), (32, 64)])
def test_flow_is_the_mean_of_the_projections_along_the_geodesic(noise: float, batch: int, dim: int) -> None:
    pair = random_features(1, batch, dim, noise)
    np.testing.assert_allclose(as_matrix(*pair), closed_flow(*pair), atol=1e-8)
    np.testing.assert_allclose(as_matrix(*pair), slow_flow(*pair), atol=1e-5)


def test_flow_between_a_subspace_and_itself_is_its_projection() -> None:
    theirs, _ = random_features(2)
    span = basis(theirs.numpy())
    np.testing.assert_allclose(as_matrix(theirs, theirs), span @ span.T, atol=1e-8)


def test_flow_is_the_identity_where_the_batch_spans_everything() -> None:
    pair = random_features(3, batch=30, dim=6)
    np.testing.assert_allclose(as_matrix(*pair), np.eye(6), atol=1e-8)


def test_flow_does_not_see_a_shift_of_the_whole_batch() -> None:
    """The mean taken away is the batch's."""
    theirs, ours = random_features(4)
    shift = torch.tensor(np.random.default_rng(5).normal(size=theirs.shape[1]))
    np.testing.assert_allclose(as_matrix(theirs + shift, ours), as_matrix(theirs, ours), atol=1e-8)


def test_centred_by_sample_the_distance_is_through_the_span_of_the_samples_less_their_own_means() -> None:
    """As in the public code. A shift of the whole batch then counts, but for one of all dimensions alike."""
    theirs, ours = (rows - rows.mean(dim=1, keepdim=True) for rows in random_features(4))
    around_nothing = [torch.cat([rows, -rows]) for rows in (theirs, ours)]  # so that the batch's own mean is 0
    q = as_matrix(*around_nothing)
    expected = np.mean([(u - v) @ q @ (u - v) for u, v in zip(theirs.numpy(), ours.numpy(), strict=True)])
    ahead, behind = ours + 0.3, theirs - 0.2
    for one, other in ((ours, theirs), (ahead, behind)):
        assert geodesic_distance(one, other, "sample").item() == pytest.approx(expected, rel=1e-6)
    everywhere = torch.linspace(-1, 1, theirs.shape[1])
    by_sample, by_batch = (geodesic_distance(theirs + everywhere, theirs, centre) for centre in ("sample", "batch"))
    assert by_sample.item() > 1.5 * by_batch.item()


def test_orthonormal_brings_singular_values_to_one_and_leaves_zero() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 9, generator=random, dtype=torch.float64)
    matrix[5] = matrix[:5].sum(dim=0)
    values = torch.linalg.svdvals(polar_factor(matrix))
    np.testing.assert_allclose(values, [1, 1, 1, 1, 1, 0], atol=1e-8)


def test_a_weak_direction_counts_whole_and_one_that_is_hardly_there_less() -> None:
    values = torch.linalg.svdvals(polar_factor(torch.diag(torch.tensor([1.0, 1e-4, 1e-7], dtype=torch.float64))))
    np.testing.assert_allclose(values[:2], 1, atol=1e-8)
    assert 0 < values[2] < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_both_distances_are_their_formulas(seed: int) -> None:
    theirs, ours = random_features(seed)
    q = closed_flow(theirs, ours)
    quadratic, cosine = 0.0, 0.0
    for u, v in zip(theirs.numpy(), ours.numpy(), strict=True):
        quadratic += (u - v) @ q @ (u - v)
        cosine += 1 - u @ q @ v / np.sqrt((u @ q @ u) * (v @ q @ v))
    assert geodesic_distance(ours, theirs).item() == pytest.approx(quadratic / len(ours), rel=1e-6)
    assert geodesic_similarity(ours, theirs).item() == pytest.approx(cosine / len(ours), rel=1e-6)


def test_gradient_is_that_of_the_distance_with_the_flow_held_and_goes_to_the_student_alone() -> None:
    theirs, ours = random_features(0)
    theirs.requires_grad_()
    ours.requires_grad_()
    geodesic_distance(ours, theirs).backward()
    q = closed_flow(theirs.detach(), ours.detach())
    expected = 2 * (ours - theirs).detach().numpy() @ q / len(ours)
    assert ours.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), expected, atol=1e-9)
    assert theirs.grad is None


@pytest.mark.parametrize("measure", [geodesic_distance, geodesic_similarity])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_smallest_batches_and_equal_features_stay_finite(
    measure: Callable[[Tensor, Tensor], Tensor], batch: int
) -> None:
    theirs, ours = random_features(1, batch)
    for features_ in (ours, theirs.clone(), theirs[:1].expand(batch, -1).clone()):
        features_.requires_grad_()
        loss = measure(features_, theirs)
        loss.backward()
        assert torch.isfinite(loss)
        assert features_.grad is not None
        assert features_.grad.isfinite().all()


def test_equal_features_are_at_no_distance() -> None:
    theirs, _ = random_features(1)
    assert geodesic_distance(theirs.clone(), theirs).item() == 0
    assert geodesic_similarity(theirs.clone(), theirs).item() == pytest.approx(0, abs=1e-9)


def test_features_are_the_means_of_the_quarters() -> None:
    maps = np.random.default_rng(0).normal(size=(2, 3, 4, 6))
    slow: list[list[float]] = []
    for image in maps:
        row = [
            float(channel[top : top + 2, left : left + 3].mean())
            for channel in image
            for top in (0, 2)
            for left in (0, 3)
        ]
        slow.append([value / np.sqrt(sum(v * v for v in row)) for value in row])
    np.testing.assert_allclose(pool_quarters(torch.tensor(maps)).numpy(), slow, rtol=1e-5)


def test_a_larger_lambda_holds_the_features() -> None:
    config = tiny_config("geodl", epochs=6)
    free = drift(config.with_settings(lambda_geodesic=0.0))
    assert drift(config.with_settings(lambda_geodesic=30.0)) < 0.8 * free
    assert drift(config.with_settings(lambda_geodesic=30.0, distance="paper")) < 0.8 * free
    assert drift(config.with_settings(lambda_geodesic=30.0, centre="sample")) < 0.8 * free


def test_one_class_a_stage_and_batches_of_two_train_to_finite_numbers() -> None:
    session = tiny_session(replace(tiny_config("geodl", batch_size=2, epochs=1), increment=1))
    for index in range(3):
        learn_stage(session, index)
    assert all(bool(value.isfinite().all()) for value in parameters_of(session.learner.network).values())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(EngramError, match="lambda_geodesic must be at least 0, got -1"):
        GeoDLSettings(lambda_geodesic=-1)
    with pytest.raises(EngramError, match="did you mean 'paper'"):
        GeoDLSettings(distance="papr")  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngramError, match="did you mean 'sample'"):
        GeoDLSettings(centre="samples")  # pyright: ignore[reportArgumentType]


def test_recipes_have_ucir_s_schedule() -> None:
    for name in ("cifar100-b50-s10", "mini-b10-s5", "folder"):
        assert recipe(f"geodl-{name}").settings.train == recipe(f"ucir-{name}").settings.train  # pyright: ignore[reportAttributeAccessIssue]
