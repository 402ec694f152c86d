"""Bedrock: the base stage twice, features of all levels, ridge regression on random features, views."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engram.contract.learner import Learner
from engram.core.errors import EngramError
from engram.core.events import BaseReused
from engram.data.store import ImageStore
from engram.experiment.base_cache import StageCache
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.experiment.stage_work import class_scores
from engram.methods.bedrock import CLASSES as CLASS_OF_ROW
from engram.methods.bedrock import (
    ROWS,
    SCALE,
    SIZES,
    VIEWS,
    Bedrock,
    BedrockHead,
    level_features,
    pack_signs,
    unpack_signs,
)
from engram.methods.blocks.feature_codes import decode, encode, make_codebook
from engram.models.edit import merge_classes, remove_class
from engram.models.learning import learn_into
from engram.nn.views import PLAIN, View, seen_as
from helpers import last_state, learn_stage, tiny_config, tiny_session, toy_store
from model_helpers import NAMES, make, opened, pictures, tiny

CLASSES, BASE, WIDTH = 7, 2, 24


def learned(store: ImageStore, increment: int, views: str = "mirror", **changes: float) -> Session:
    config = tiny_config("bedrock", base=BASE, increment=increment, epochs=1)
    session = tiny_session(config.with_settings(**{"gamma": 2.0, "views": views, "width": WIDTH, **changes}), store)
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


def test_the_centre_is_enlarged() -> None:
    """Of a ramp, every pixel has the place that it shows."""
    down = torch.arange(8.0).view(8, 1).expand(1, 1, 8, 12)
    across = torch.arange(12.0).expand(1, 1, 8, 12)
    for image, size, dim in ((down, 8, 2), (across, 12, 3)):
        seen = seen_as(image, View(part=0.5)).movedim(dim, -1)
        expected = (torch.arange(size) + 0.5) / 2 + size / 4 - 0.5
        torch.testing.assert_close(seen, expected.expand_as(seen))


def slow_features(session: Session, image: np.ndarray, views: str) -> np.ndarray:
    """The random features (M,) of an image, one view at a time."""
    network = session.learner.network
    head = network.head
    assert isinstance(head, BedrockHead)
    seen = []
    for view in VIEWS[views]:
        unit = torch.from_numpy(slow_view(image, view).copy()).permute(2, 0, 1)[None].float() / 255
        with torch.no_grad():
            output = network(unit)
        maps = [each[0].double().numpy() for each in output.maps[1:]]
        positive = [each.clip(min=0) for each in maps]
        parts = [each.mean(axis=(1, 2)) for each in positive] + [each.std(axis=(1, 2)) for each in positive]
        seen.append(np.concatenate([output.embedding[0].numpy(), *parts, *(each.mean(axis=(1, 2)) for each in maps)]))
    z = (np.mean(seen, axis=0) - head.centre.numpy()) / head.spread.numpy()
    assert head.signs is not None
    matrix = unpack_signs(head.signs, WIDTH).numpy() * SCALE / np.sqrt(len(z))
    return torch.nn.functional.gelu(torch.from_numpy(z @ matrix + head.offset.numpy())).numpy()


def slow_scores(session: Session, gamma: float, views: str) -> np.ndarray:
    """The scores of the test images by the solution over all training images, one image and view at a time."""
    store = session.store
    products, targets = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, CLASSES))
    for image, label in zip(store.train.images, store.train.class_ids, strict=True):
        h = slow_features(session, image, views)
        products += np.outer(h, h)
        targets += np.outer(h, np.eye(CLASSES)[session.stream.labels_of(np.array([label]))[0]])
    weights = np.linalg.solve(products + gamma * np.eye(WIDTH), targets)
    return np.stack([slow_features(session, image, views) @ weights for image in store.test.images])


def test_predictions_are_the_solution_over_all_images_and_views() -> None:
    views = "mirror"
    session = learned(toy_store(CLASSES), 2, views)
    images = torch.from_numpy(session.store.test.images)
    _, scores = session.engine.infer(session.learner.network, images)
    np.testing.assert_allclose(
        scores.numpy(), slow_scores(session, 2.0, views), rtol=5e-3, atol=2e-3
    )  # rows in half precision
    measured = class_scores(session.learner, session.engine, images, ["cnn"])["cnn"]  # as runs are evaluated
    assert torch.equal(measured, scores[:, :CLASSES])


def test_how_classes_are_divided_into_stages_makes_no_difference() -> None:
    store = toy_store(CLASSES)
    one, five = learned(store, 1).learner, learned(store, 5).learner
    assert one.buffers[SIZES].numel() > five.buffers[SIZES].numel()
    for learner in (one, five):  # computed again from the rows, the sums have the same bits
        before = weight_of(learner)
        learner.scratch.clear()
        session_method(learner).solve(learner)
        assert torch.equal(weight_of(learner), before)
    torch.testing.assert_close(weight_of(one), weight_of(five), rtol=1e-3, atol=1e-4)


def session_method(learner: Learner) -> Bedrock:
    method = tiny_session(tiny_config("bedrock").with_settings(gamma=2.0, views="mirror", width=WIDTH)).method
    assert isinstance(method, Bedrock)
    return method


def weight_of(learner: Learner) -> torch.Tensor:
    head = learner.network.head
    assert isinstance(head, BedrockHead)
    return head.weight.detach().clone()


def test_a_removed_class_leaves_nothing_in_the_head() -> None:
    store = toy_store(CLASSES)
    session, other = learned(store, 1), learned(store, 1)
    learner, gone = session.learner, [3, 5]  # both came after the base stage
    learner.drop(gone, session.method.class_buffers)
    session.method.remove(learner, gone)
    stays = [label for label in range(CLASSES) if label not in gone]
    held = other.learner.buffers
    kept = torch.isin(held[CLASS_OF_ROW], torch.tensor(stays))
    assert torch.equal(learner.buffers[ROWS], held[ROWS][kept])
    assert sorted(set(learner.buffers[CLASS_OF_ROW].tolist())) == list(range(len(stays)))
    # As if the two had never come: the same rows, with the same labels, and the solution over them.
    weight = weight_of(learner)
    learner.scratch.clear()
    session_method(learner).solve(learner)
    assert torch.equal(weight, weight_of(learner))
    assert not weight[len(stays) :].any()
    with_both = weight_of(other.learner)[stays]
    assert not torch.allclose(weight[: len(stays)], with_both)  # their images did matter for the others


def test_features_as_bytes_take_less_and_predict_alike() -> None:
    store = toy_store(CLASSES)
    exact, coded = learned(store, 2), learned(store, 2, code_bytes=16)
    rows = coded.learner.buffers[ROWS]
    assert rows.dtype == torch.uint8
    assert rows.shape == (len(store.train.images), 16)
    assert exact.learner.buffers[ROWS].dtype == torch.float16
    images = torch.from_numpy(store.test.images)
    labels = [session.engine.infer(session.learner.network, images)[1].argmax(dim=1) for session in (exact, coded)]
    assert (labels[0] == labels[1]).float().mean() > 0.8


def test_a_codebook_gives_back_what_it_was_made_of() -> None:
    rows = torch.randn(300, 10, generator=torch.Generator().manual_seed(0))
    few, many = (make_codebook(rows, parts, torch.Generator().manual_seed(1)) for parts in (2, 10))
    errors = [(decode(encode(rows, book), book) - rows).square().mean() for book in (few, many)]
    assert errors[1] < 0.01 < errors[0] < 0.6
    tiny = make_codebook(rows[:3], 4, torch.Generator().manual_seed(1))  # fewer rows than centres
    torch.testing.assert_close(decode(encode(rows[:3], tiny), tiny), rows[:3], rtol=1e-4, atol=1e-4)
    assert encode(rows[:0], few).shape == (0, 2)


def test_the_features_are_statistics_of_the_last_maps_and_the_embedding() -> None:
    maps = [torch.randn(2, channels, 3, 3) for channels in (4, 5, 6, 7)]
    features = level_features(torch.ones(2, 7), maps)
    assert features.shape == (2, 7 + 3 * (5 + 6 + 7))
    torch.testing.assert_close(features[:, 7:12], maps[1].clamp(min=0).mean(dim=(2, 3)))
    torch.testing.assert_close(features[:, 25:30], maps[1].clamp(min=0).flatten(2).std(dim=2, correction=0))
    torch.testing.assert_close(features[:, 43:48], maps[1].mean(dim=(2, 3)))
    assert level_features(torch.ones(2, 7), []).shape == (2, 7)  # a backbone without maps


def test_signs_are_kept_as_bits() -> None:
    signs = torch.rand(3, 21) < 0.5
    packed = pack_signs(signs)
    assert packed.shape == (3, 3)
    assert torch.equal(unpack_signs(packed, 21) > 0, signs)


def test_what_an_earlier_version_saved_is_refused() -> None:
    head = learned(toy_store(CLASSES), 5).learner.network.head
    with pytest.raises(EngramError, match="earlier version of bedrock"):
        head.prepare_for_state({"projection": torch.zeros(3, WIDTH)})


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


def test_wrong_settings_are_refused() -> None:
    config = tiny_config("bedrock")
    for settings, message in (({"gamma": 0}, "gamma must be above 0"), ({"views": "all"}, "views must")):
        with pytest.raises(EngramError, match=message):
            config.with_settings(**settings)
    assert View() == PLAIN


def test_a_base_stage_from_the_cache_gives_the_same_run(tmp_path: Path) -> None:
    config, store, cache = tiny_config("bedrock").with_settings(width=WIDTH), toy_store(5), StageCache(tmp_path / "c")
    for name in ("trained", "reused"):
        list(run(config, store, tmp_path / name, cache=cache))
    ours, theirs = last_state(tmp_path / "reused"), last_state(tmp_path / "trained")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    other = config.with_settings(width=WIDTH + 8, code_bytes=4)  # these have no effect on the base stage
    events = list(run(other, store, tmp_path / "other", cache=cache))
    assert any(isinstance(event, BaseReused) for event in events)


def test_a_model_learns_its_held_out_images_and_forgets_a_removed_class(tmp_path: Path) -> None:
    config = tiny("bedrock", validation=0.25)
    path = make(tmp_path / "model", NAMES[:3], NAMES[3:5], NAMES[5:], config=config)
    remove_class(path, *NAMES[5:])
    ours, theirs = (opened(place) for place in (path, make(tmp_path / "two", NAMES[:3], NAMES[3:5], config=config)))
    assert len(ours.learned_heldout) == 8 * len(ours.heldout) == 8 * 2 * 5
    rows = [weight_of(model.learner)[:5] for model in (ours, ours.measurable(), theirs) if model.learner is not None]
    torch.testing.assert_close(rows[0], rows[2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(rows[0], rows[1], rtol=1e-2)


def test_merged_classes_are_as_if_learned_as_one(tmp_path: Path) -> None:
    first, (gone, into) = NAMES[:3], NAMES[3:5]
    path, other = (make(tmp_path / name, first, config=tiny("bedrock")) for name in ("model", "other"))
    images, labels = pictures((gone, into), 8)
    list(learn_into(path, images, labels, device="cpu"))
    list(learn_into(other, images, [into] * len(labels), device="cpu"))
    merge_classes(path, gone, into)
    ours, theirs = opened(path), opened(other)
    assert ours.labels == theirs.labels == [*first, into]
    assert [known.images for known in ours.classes] == [8, 8, 8, 16]
    rows = [weight_of(model.learner)[:4] for model in (ours, theirs) if model.learner is not None]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
