"""Bedrock: the base stage twice, features of all levels, ridge regression on random features, views."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engram.core.errors import EngramError
from engram.data.store import ImageStore
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.experiment.stage_work import class_scores
from engram.methods.bedrock import PRODUCTS, SUMS, VIEWS, BedrockHead, level_features
from engram.methods.blocks.closed_form import pack_symmetric, unpack_symmetric
from engram.nn.views import PLAIN, View, seen_as
from helpers import last_state, learn_stage, tiny_config, tiny_session, toy_store

CLASSES, BASE, WIDTH = 7, 2, 24


def learned(store: ImageStore, increment: int, views: str = "mirror", gamma: float = 2.0) -> Session:
    config = tiny_config("bedrock", base=BASE, increment=increment, epochs=1)
    session = tiny_session(config.with_settings(gamma=gamma, views=views, width=WIDTH), store)
    for index in range(len(session.stream)):
        learn_stage(session, index)
    return session


def slow_view(image: np.ndarray, view: View) -> np.ndarray:
    """The image (H, W, 3), pixel by pixel."""
    height, width, _ = image.shape
    out = np.empty_like(image)
    for y in range(height):
        for x in range(width):
            column = width - 1 - x if view.mirror else x
            row, column = y - view.down, column - view.right
            row = -row if row < 0 else 2 * (height - 1) - row if row >= height else row
            column = -column if column < 0 else 2 * (width - 1) - column if column >= width else column
            out[y, x] = image[row, column]
    return out


@pytest.mark.parametrize("view", [View(True), View(False, 1, 0), View(True, 0, -1), View(False, -2, 2)])
def test_a_view_is_mirrored_and_moved(view: View) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 6, 3), dtype=np.uint8)
    seen = seen_as(torch.from_numpy(images).permute(0, 3, 1, 2).float(), view)
    for image, ours in zip(images, seen.permute(0, 2, 3, 1).numpy(), strict=True):
        np.testing.assert_array_equal(ours, slow_view(image, view))


def slow_scores(session: Session, gamma: float, views: str) -> np.ndarray:
    """The scores of the test images by the solution over all training images, one image and view at a time."""
    network, store = session.learner.network, session.store
    head = network.head
    assert isinstance(head, BedrockHead)
    assert head.projection is not None
    assert head.offset is not None

    def random_features(image: np.ndarray, view: View) -> np.ndarray:
        unit = torch.from_numpy(slow_view(image, view).copy()).permute(2, 0, 1)[None].float() / 255
        with torch.no_grad():
            output = network(unit)
        means = [each.relu().mean(dim=(2, 3))[0] for each in output.maps[1:]]
        x = torch.cat([output.embedding[0], *means]).double()
        assert head.projection is not None
        assert head.offset is not None
        return torch.nn.functional.gelu(x @ head.projection.double() + head.offset.double()).numpy()

    products, targets = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, CLASSES))
    for image, label in zip(store.train.images, store.train.class_ids, strict=True):
        for view in VIEWS[views]:
            h = random_features(image, view)
            products += np.outer(h, h)
            targets += np.outer(h, np.eye(CLASSES)[session.stream.labels_of(np.array([label]))[0]])
    weights = np.linalg.solve(products + gamma * len(VIEWS[views]) * np.eye(WIDTH), targets)
    return np.stack(
        [np.mean([random_features(x, v) @ weights for v in VIEWS[views]], axis=0) for x in store.test.images]
    )


@pytest.mark.parametrize("views", ["mirror", "shifts"])
def test_predictions_are_the_solution_over_all_images_and_views(views: str) -> None:
    session = learned(toy_store(CLASSES), 2, views)
    images = torch.from_numpy(session.store.test.images)
    _, scores = session.engine.infer(session.learner.network, images)
    np.testing.assert_allclose(scores.numpy(), slow_scores(session, 2.0, views), rtol=1e-3, atol=2e-4)
    measured = class_scores(session.learner, session.engine, images, ["cnn"])["cnn"]  # as runs are evaluated
    assert torch.equal(measured, scores[:, :CLASSES])


def test_how_classes_are_divided_into_stages_makes_no_difference() -> None:
    store = toy_store(CLASSES)
    one, five = learned(store, 1).learner, learned(store, 5).learner
    for name in (PRODUCTS, SUMS):
        torch.testing.assert_close(one.buffers[name], five.buffers[name], rtol=1e-5, atol=1e-5)
    weights = [learner.network.head.weight for learner in (one, five)]
    assert isinstance(weights[0], torch.Tensor)
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_the_features_are_those_of_the_last_maps_and_the_embedding() -> None:
    maps = [torch.randn(2, channels, 3, 3) for channels in (4, 5, 6, 7)]
    features = level_features(torch.ones(2, 7), maps)
    assert features.shape == (2, 7 + 5 + 6 + 7)
    torch.testing.assert_close(features[:, 7:12], maps[1].clamp(min=0).mean(dim=(2, 3)))


def test_it_trains_in_the_base_stage_only_and_resumes_exactly(tmp_path: Path) -> None:
    config = tiny_config("bedrock", epochs=2).with_settings(width=WIDTH)
    store, steps = toy_store(5), 0
    list(run(config, store, tmp_path / "whole"))

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == 3

    list(run(config, store, tmp_path / "stopped", stop=stop))
    assert steps == 3
    list(resume(tmp_path / "stopped", store))
    ours, theirs = last_state(tmp_path / "stopped"), last_state(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    session = tiny_session(config)
    assert [len(session.method.phases(session.learner, session.stage(i), session.engine)) for i in (0, 1)] == [1, 0]


def test_symmetric_matrices_are_kept_by_half() -> None:
    matrix = torch.randn(5, 5)
    matrix = matrix + matrix.T
    packed = pack_symmetric(matrix)
    assert len(packed) == 15
    assert torch.equal(unpack_symmetric(packed, 5), matrix)


def test_wrong_settings_are_refused() -> None:
    config = tiny_config("bedrock")
    for settings, message in (({"gamma": 0}, "gamma must be above 0"), ({"views": "all"}, "views must")):
        with pytest.raises(EngramError, match=message):
            config.with_settings(**settings)
    assert View() == PLAIN
