"""Choosing and using exemplars: herding, class means and k-means imprinting against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engram.contract.exemplars import choose_exemplars, class_means
from engram.data.memory import HERDING_ROUNDS, SELECTIONS, MemoryConfig, at_random, closest_to_mean, herd
from engram.experiment.session import Session
from engram.nn.heads import LSCHead
from engram.nn.kmeans import kmeans
from helpers import learn_stage, make_stage, predict, tiny_config, tiny_session, toy_store


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit_rows(count: int, dim: int, seed: int) -> np.ndarray:
    """Unit vectors that lean to one side, as the embeddings of a class do."""
    rows = np.random.default_rng(seed).normal(size=(count, dim)) + 1.0
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def unit_embeddings(session: Session, images: torch.Tensor, mirror: bool = False) -> np.ndarray:
    """Unit embeddings in float64, from the network as it is in eval mode, one image at a time."""
    network = session.learner.network.eval()
    rows: list[np.ndarray] = []
    for image in images.numpy():
        values = image.transpose(2, 0, 1)[None] / np.float32(255)
        values = values[..., ::-1].copy() if mirror else values
        with torch.no_grad():
            embedding = network(torch.from_numpy(values)).embedding[0].double().numpy()
        rows.append(embedding / np.linalg.norm(embedding))
    return np.stack(rows)


# Slow implementations


def slow_herding(features: np.ndarray, count: int) -> list[int]:
    """mu = mean; w = mu; pick argmax <w, f>; w += mu - f; a repeat is not added but still updates w."""
    mean = sum(features) / len(features)
    w = mean
    picked: list[int] = []
    for _ in range(HERDING_ROUNDS):
        if len(picked) == min(count, len(features)):
            break
        products = [float(w @ f) for f in features]
        best = products.index(max(products))
        if best not in picked:
            picked.append(best)
        w = w + mean - features[best]
    return picked


def slow_lloyd(points: np.ndarray, k: int, starts: int, seed: int) -> float:
    """The least inertia that Lloyd's algorithm finds from many random starts."""
    random = np.random.default_rng(seed)
    best = np.inf
    for _ in range(starts):
        centres = points[random.choice(len(points), k, replace=False)]
        while True:
            nearest = ((points[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
            moved = np.stack(
                [points[nearest == j].mean(axis=0) if (nearest == j).any() else centres[j] for j in range(k)]
            )
            if np.allclose(moved, centres, rtol=0, atol=1e-12):
                break
            centres = moved
        best = min(best, inertia(points, centres))
    return best


def inertia(points: np.ndarray, centres: np.ndarray) -> float:
    return float(((points[:, None] - centres[None]) ** 2).sum(axis=2).min(axis=1).sum())


def assert_centres_are_means(points: np.ndarray, centres: np.ndarray, atol: float = 1e-5) -> None:
    """Each centre is the mean of the points nearest to it, and each has some."""
    nearest = ((points[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    for j, centre in enumerate(centres):
        members = points[nearest == j]
        assert len(members), f"centre {j} has no point"
        np.testing.assert_allclose(members.mean(axis=0), centre, atol=atol)


# Herding and its companions


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 30), size=st.integers(3, 40), dim=st.integers(2, 8), seed=st.integers(0, 10_000))
def test_herding_is_its_description(count: int, size: int, dim: int, seed: int) -> None:
    # Two unit vectors are equally close to their mean; from three on, random rows have no ties.
    features = unit_rows(size, dim, seed)
    rows = herd(torch.tensor(features), count).tolist()
    expected = slow_herding(features, count)
    assert rows[: len(expected)] == expected
    assert len(rows) == min(count, size)


@pytest.mark.parametrize("seed", range(3))
def test_a_repeated_pick_is_not_kept_twice_but_moves_the_target(seed: int) -> None:
    # One row close to the mean comes up again and again among rows far from it.
    features = np.concatenate([unit_rows(6, 2, seed), [[0.7071, 0.7071]]])
    picked: list[int] = []
    w = mean = features.mean(axis=0)
    for _ in range(40):
        picked.append(int((features @ w).argmax()))
        w = w + mean - features[picked[-1]]
    assert len(picked) > len(set(picked))
    expected = list(dict.fromkeys(picked))
    assert herd(torch.tensor(features), len(expected)).tolist() == expected


def test_fewer_exemplars_are_the_beginning_of_more() -> None:
    features = torch.tensor(unit_rows(50, 6, 0))
    for name in ("herding", "closest", "random", "first"):
        many = SELECTIONS.find(name)(features, 20, seeded(1)).tolist()
        for count in (1, 5, 19):
            assert SELECTIONS.find(name)(features, count, seeded(1)).tolist() == many[:count]


@pytest.mark.parametrize("name", ["herding", "closest", "random", "first"])
@settings(deadline=None)
@given(count=st.integers(1, 12), size=st.integers(1, 12), seed=st.integers(0, 999))
def test_each_selection_gives_distinct_rows_even_among_equal_images(
    name: str, count: int, size: int, seed: int
) -> None:
    features = unit_rows(size, 3, seed)
    features[size // 2 :] = features[0]
    rows = SELECTIONS.find(name)(torch.tensor(features), count, seeded(seed))
    assert rows.dtype == torch.int64
    assert len(set(rows.tolist())) == len(rows) == min(count, size)
    assert set(rows.tolist()) <= set(range(size))


@pytest.mark.parametrize("seed", range(4))
def test_closest_takes_the_nearest_first(seed: int) -> None:
    features = unit_rows(25, 5, seed)
    mean = features.mean(axis=0)
    distances = [float(((f - mean) ** 2).sum()) for f in features]
    expected = sorted(range(25), key=distances.__getitem__)
    assert closest_to_mean(torch.tensor(features), 9).tolist() == expected[:9]


def test_random_follows_its_generator() -> None:
    features = torch.tensor(unit_rows(30, 4, 0))
    assert at_random(features, 10, seeded(1)).tolist() == at_random(features, 10, seeded(1)).tolist()
    assert at_random(features, 10, seeded(1)).tolist() != at_random(features, 10, seeded(2)).tolist()


def test_first_takes_the_rows_in_order() -> None:
    assert SELECTIONS.find("first")(torch.tensor(unit_rows(30, 4, 0)), 4, seeded(1)).tolist() == [0, 1, 2, 3]


# Exemplars of a run


@pytest.mark.parametrize("text", ["per_class=5", "total=11"])
@pytest.mark.parametrize("selection", ["herding", "closest"])
def test_exemplars_are_chosen_on_unit_embeddings_of_the_network(text: str, selection: str) -> None:
    memory = MemoryConfig.parse(text, selection)
    session = tiny_session(tiny_config("replay", memory=memory))
    stage = learn_stage(session, 0)
    chosen = choose_exemplars(session.learner, stage, session.engine)
    assert list(chosen) == [0, 1]
    for label, rows in chosen.items():
        of_class = stage.rows_of(label)
        features = unit_embeddings(session, stage.pool.pixels[of_class])
        mean = features.mean(axis=0)
        if selection == "herding":
            expected = slow_herding(features, 5)
        else:
            expected = sorted(range(12), key=lambda i: float(((features[i] - mean) ** 2).sum()))[:5]
        assert rows.tolist() == of_class[expected].tolist()
        assert session.learner.memory.of(label).sources.tolist() == stage.pool.sources[rows].tolist()


def test_a_shared_memory_shrinks_to_the_beginning_of_each_list() -> None:
    session = tiny_session(tiny_config("replay", memory=MemoryConfig.parse("total=12")))
    kept: dict[int, list[int]] = {}
    for index, share in ((0, 6), (1, 3), (2, 2)):
        learn_stage(session, index)
        memory = session.learner.memory
        assert memory.labels == list(range(2 * index + 2))
        for label in memory.labels:
            sources = memory.of(label).sources.tolist()
            assert len(sources) == share
            if label in kept:
                assert sources == kept[label][:share]
            kept[label] = sources
        assert len(memory) == share * (2 * index + 2) <= 12


def test_random_exemplars_come_out_of_their_class() -> None:
    session = tiny_session(tiny_config("replay", memory=MemoryConfig.parse("per_class=4", "random")))
    stage = learn_stage(session, 0)
    places: list[list[int]] = []
    for label in (0, 1):
        samples = session.learner.memory.of(label)
        assert samples.labels.tolist() == [label] * 4
        assert samples.exemplar.all()
        own = stage.pool.sources[stage.rows_of(label)].tolist()
        places.append([own.index(source) for source in samples.sources.tolist()])
    assert places[0] != places[1], "each class has a draw of its own"


def test_a_memory_of_every_image_has_them_in_their_order() -> None:
    session = tiny_session(tiny_config("replay", memory=MemoryConfig.parse("all")))
    stage = session.stage(0)
    for label, rows in choose_exemplars(session.learner, stage, session.engine).items():
        assert torch.equal(rows, stage.rows_of(label))


def test_a_stage_trains_on_its_new_images_and_then_the_exemplars() -> None:
    session = tiny_session(tiny_config("replay"))
    learn_stage(session, 0)
    pool, kept = session.stage(1).pool, session.learner.memory.samples()
    assert kept is not None
    assert pool.exemplar.tolist() == [False] * 24 + [True] * len(kept)
    assert set(pool.labels[:24].tolist()) == {2, 3}
    assert pool.sources[24:].tolist() == kept.sources.tolist()


# Nearest mean of exemplars


def test_class_means_are_unit_means_of_exemplars_and_their_mirrors() -> None:
    session = tiny_session(tiny_config("replay"))
    for index in (0, 1):
        learn_stage(session, index)
    learner = session.learner
    means = class_means(learner, session.engine)
    assert means is not None
    assert means.shape == (4, 64)
    for label in range(4):
        images = learner.memory.of(label).pixels
        rows = [*unit_embeddings(session, images), *unit_embeddings(session, images, mirror=True)]
        mean = sum(rows) / len(rows)
        np.testing.assert_allclose(means[label].numpy(), mean / np.linalg.norm(mean), atol=1e-5)


def test_both_predictors_are_their_descriptions() -> None:
    session = tiny_session(tiny_config("replay"))
    for index in (0, 1):
        learn_stage(session, index)
    learner, images = session.learner, torch.from_numpy(session.store.test.images)
    predictions = predict(session, images)
    means = learner.class_means
    assert means is not None
    features = unit_embeddings(session, images)
    for i, feature in enumerate(features):
        distances = [float(((feature - mean) ** 2).sum()) for mean in means.double().numpy()]
        assert predictions["nme"][i] == distances.index(min(distances))
    network = learner.network.eval()
    with torch.no_grad():
        scores = network(images.permute(0, 3, 1, 2) / 255).scores
    assert predictions["cnn"].tolist() == scores[:, :4].argmax(dim=1).tolist()
    assert set(predictions) == {"cnn", "nme"}


def test_without_exemplars_of_every_class_there_are_no_class_means() -> None:
    session = tiny_session(tiny_config("naive"))
    learn_stage(session, 0)
    assert class_means(session.learner, session.engine) is None
    assert set(predict(session, torch.from_numpy(session.store.test.images))) == {"cnn"}


def test_the_class_means_follow_the_network_from_stage_to_stage() -> None:
    session = tiny_session(tiny_config("replay"))
    learn_stage(session, 0)
    assert session.learner.class_means is not None
    before = session.learner.class_means.clone()
    learn_stage(session, 1)
    assert not torch.allclose(session.learner.class_means[:2], before, atol=1e-4)


# k-means


@pytest.mark.parametrize("seed", range(4))
def test_kmeans_finds_separate_clusters(seed: int) -> None:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(5, 6)) * 10
    points = np.concatenate([centre + random.normal(size=(12, 6)) * 0.1 for centre in centres])
    found = kmeans(torch.tensor(points), 5, seeded(seed)).numpy()
    expected = np.stack([points[12 * j : 12 * j + 12].mean(axis=0) for j in range(5)])
    for centre in expected:
        assert np.linalg.norm(found - centre, axis=1).min() < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_kmeans_is_as_good_as_lloyd_from_many_starts(seed: int) -> None:
    points = unit_rows(60, 4, seed)
    found = kmeans(torch.tensor(points), 6, seeded(seed)).numpy()
    assert found.shape == (6, 4)
    assert_centres_are_means(points, found)
    # Points without clusters have many optima: ten starts come near the best of sixty.
    assert inertia(points, found) <= 1.05 * slow_lloyd(points, 6, starts=60, seed=seed)


@given(size=st.integers(1, 20), k=st.integers(1, 10), distinct=st.integers(1, 4), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_kmeans_of_equal_or_few_points_gives_points(size: int, k: int, distinct: int, seed: int) -> None:
    points = unit_rows(distinct, 3, seed)[np.arange(size) % distinct]
    centres = kmeans(torch.tensor(points), k, seeded(seed))
    assert centres.shape == (k, 3)
    assert centres.isfinite().all()
    if k >= min(size, distinct):
        assert inertia(points, centres.numpy()) < 1e-9
        assert inertia(centres.numpy(), points) < 1e-9, "no centre is anywhere else"


def test_kmeans_follows_its_generator() -> None:
    points = torch.tensor(unit_rows(40, 3, 0))
    assert torch.equal(kmeans(points, 5, seeded(1)), kmeans(points, 5, seeded(1)))


# Imprinting


def test_new_proxies_are_centres_of_the_old_models_embeddings_at_the_norm_of_the_old_proxies() -> None:
    session = tiny_session(tiny_config("afc"), toy_store(per_class=24))
    learn_stage(session, 0)
    learner = session.learner
    head = learner.network.head
    assert isinstance(head, LSCHead)
    old = head.weight.detach().clone()
    norms = [float(np.linalg.norm(proxy)) for label in range(2) for proxy in old[label].numpy()]
    norm = sum(norms) / len(norms)
    stage = session.stage(1)
    session.method.grow(learner, stage, session.engine)
    assert torch.equal(head.weight[:2], old[:2])
    assert (head.weight[4:] == 0).all()
    for label in (2, 3):
        features = unit_embeddings(session, stage.pool.pixels[stage.rows_of(label)])
        assert len(features) == 24
        centres = head.weight[label].detach().double().numpy() / norm
        assert centres.shape == (10, 64)
        assert_centres_are_means(features, centres, atol=1e-4)
        # A class without clusters has many optima: ten starts come near the best of forty.
        assert inertia(features, centres) <= 1.2 * slow_lloyd(features, 10, starts=40, seed=label)


def test_each_new_class_has_a_draw_of_its_own_for_its_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(tiny_config("afc"))
    learn_stage(session, 0)
    seeds: list[int] = []

    def remember(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
        seeds.append(generator.initial_seed())
        return kmeans(points, k, generator)

    monkeypatch.setattr("engram.methods.blocks.lsc.kmeans", remember)
    session.method.grow(session.learner, session.stage(1), session.engine)
    assert len(set(seeds)) == len(seeds) == 2


def test_base_proxies_are_random_and_not_imprinted() -> None:
    session = tiny_session(tiny_config("afc"), toy_store(num_classes=8))
    stage = make_stage(0, 0, [0, 1, 2, 3] * 3)
    session.method.grow(session.learner, stage, session.engine)
    head = session.learner.network.head
    assert head.num_classes == 4
    assert head.get_parameter("weight")[:4].std().item() == pytest.approx(1 / 8, rel=0.05)


def test_a_class_with_fewer_images_than_proxies_repeats_its_embeddings() -> None:
    session = tiny_session(tiny_config("afc"), toy_store(per_class=4))
    learn_stage(session, 0)
    head = session.learner.network.head
    assert isinstance(head, LSCHead)
    norm = head.weight[:2].detach().norm(dim=2).mean().item()
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    features = unit_embeddings(session, stage.pool.pixels[stage.rows_of(2)])
    for proxy in head.weight[2].detach().double().numpy() / norm:
        assert np.linalg.norm(features - proxy, axis=1).min() < 1e-4
