"""Models as directories: what is written is what is read, whole or not at all, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import engram.models.store.writer as writer
from engram import EngramError
from engram.core.checkpoint import Checkpoint
from engram.core.events import Checkpointed, EpochFinished, Learned, Stopped, Warned
from engram.core.safe_folder import digest
from engram.core.serialize import replace_at
from engram.data.stage import Samples
from engram.models import lesson_plan as fitting
from engram.models.edit import remove_class, save_model
from engram.models.learning import has_learning, learn_into
from engram.models.lesson import CheckpointPolicy, Lesson, LessonOptions
from engram.models.lesson_plan import LearnedBefore, LessonNotice
from engram.models.model import Model
from engram.models.model_config import LATER_LEAST, ModelConfig
from engram.models.store.codec import read_manifest
from engram.models.store.generations import NoModelYet
from helpers import varied_methods
from model_helpers import NAMES, everything, learn, make, memory_of, opened, pictures, png, same, scores, tiny


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five classes, learned in two lessons; not to be changed."""
    return make(tmp_path_factory.mktemp("models") / "taught", NAMES[:3], NAMES[3:5])


def in_memory(config: ModelConfig, *lessons: tuple[str, ...], options: LessonOptions | None = None) -> Model:
    """A model that learned without any file."""
    model = Model(config, "cpu")
    for names in lessons:
        model = next_lesson(model, *pictures(names), options)
    return model


def next_lesson(model: Model, images: np.ndarray, labels: list[Any], options: LessonOptions | None = None) -> Model:
    work = Lesson(model, images, labels, options or LessonOptions()).take(CheckpointPolicy())
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def test_the_phases_after_the_main_one_are_never_too_short_to_matter() -> None:
    config = ModelConfig.choose("afc", image_size=16, images=30, epochs=3)
    assert config.settings.finetune.epochs < LATER_LEAST  # pyright: ignore[reportAttributeAccessIssue]
    for epochs, expected in ((None, LATER_LEAST), (2, LATER_LEAST), (90, 30)):
        lesson = config.lesson_settings(epochs)
        assert lesson.finetune.epochs == expected  # pyright: ignore[reportAttributeAccessIssue]
        assert lesson.train.epochs == (epochs or 3)  # pyright: ignore[reportAttributeAccessIssue]
    without = ModelConfig.choose("afc", image_size=16, images=30, settings={"finetune.epochs": 0})
    assert without.lesson_settings(3).finetune.epochs == 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("took", "epochs"), [(0.0, 100), (30.0, 50), (75.0, 1)])
def test_the_time_that_measuring_took_is_no_time_to_learn(
    took: float, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = Lesson(Model(tiny(), "cpu"), *pictures(NAMES[:2]), LessonOptions())
    clock = [0.0]

    def measure(*_: object) -> float:
        clock[0] += took
        return 0.6 / fitting._work(lesson, 1)  # seconds of a unit of work, so that an epoch takes 0.6

    monkeypatch.setattr(fitting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(fitting, "_seconds_per_work", measure)
    chosen = fitting.epochs_that_fit(lesson, minutes=1)
    assert chosen.epochs == max(1, epochs - fitting.AFTER)
    assert chosen.fits == (took < 60)


def test_the_history_has_the_epochs_that_were_trained() -> None:
    model = in_memory(tiny("gdumb", epochs=5), NAMES[:2], NAMES[2:4])
    assert [entry.epochs for entry in model.history] == [5, 5]
    events = list(Lesson(model, *pictures(NAMES[4:5]), LessonOptions(epochs=3)).take(CheckpointPolicy()))
    assert sum(isinstance(event, EpochFinished) for event in events) == 3, "as many as asked for"
    own = model.config.with_epochs(2)
    own = replace(own, settings=replace_at(own.settings, "rehearse.epochs", 4))
    assert [entry.epochs for entry in in_memory(own, NAMES[:2], NAMES[2:4]).history] == [2, 4]


@pytest.mark.parametrize(
    ("name", "dtype"), [("running-mean", torch.float32), ("x" * 201, torch.float32), ("moments", torch.complex64)]
)
def test_tensors_that_could_not_be_opened_again_are_not_saved(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = in_memory(tiny(), NAMES[:2])
    assert model.learner is not None
    model.learner.store(name, torch.ones(2, dtype=dtype))
    with pytest.raises(EngramError, match=f"afc keeps 'buffers.{name[:20]}"):
        save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_epochs_that_fit_are_the_most_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_memory(tiny(), NAMES[:3])
    lesson = Lesson(model, *pictures(NAMES[3:5]), LessonOptions())
    rate = 1 / fitting._work(lesson, fitting.MOST_EPOCHS)
    monkeypatch.setattr(fitting, "_seconds_per_work", lambda *_: rate)
    assert (
        rate * fitting._work(lesson, 1) > 1.25 / fitting.MOST_EPOCHS
    )  # what follows the main phase has a least length
    for epochs in (1, 2, 20, 150):
        needed = rate * fitting._work(lesson, epochs) + fitting.AFTER / fitting.MOST_EPOCHS
        fit = fitting.epochs_that_fit(lesson, (needed + 1e-3) / 60)  # less than another epoch more
        assert fit.epochs == epochs
        assert fit.seconds == pytest.approx(needed)
    assert fitting.epochs_that_fit(lesson, 1e-9).epochs == 1
    assert fitting.epochs_that_fit(lesson, 1e9).epochs == fitting.MOST_EPOCHS


@pytest.mark.parametrize("method", varied_methods())
def test_a_model_that_went_through_files_is_the_one_that_did_not(method: str, tmp_path: Path) -> None:
    config = tiny(method, epochs=1, memory=memory_of(method), validation=0.25)
    straight = in_memory(config, NAMES[:3], NAMES[3:5])
    make(tmp_path / "m", NAMES[:3], NAMES[3:5], config=config)
    found = opened(tmp_path / "m")
    assert same(straight, found)
    assert found.labels == list(NAMES[:5])
    assert found.config == config
    assert straight.learner is not None
    assert found.learner is not None
    ours, theirs = straight.learner.state_dict(), found.learner.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert name == "memory.sources" or torch.equal(value, theirs[name]), name
    assert [known.accuracy for known in found.classes] == [known.accuracy for known in straight.classes]


def test_it_predicts_without_its_images_and_says_what_it_knows(taught: Path) -> None:
    assert same(opened(taught), opened(taught, images=False))
    told = read_manifest(taught)
    assert [known["label"] for known in told["classes"]] == list(NAMES[:5])
    assert [known["stage"] for known in told["classes"]] == [0, 0, 0, 1, 1]
    assert [known["images"] for known in told["classes"]] == [6] * 5
    assert all(known["exemplars"] == 3 and known["heldout"] == 2 for known in told["classes"])
    assert all(set(known["accuracy"]) == {"cnn", "nme"} for known in told["classes"])
    assert [entry["what"] for entry in told["history"]] == ["learned", "learned"]
    assert told["history"][0]["before"] == {}
    assert set(told["history"][1]["before"]) == {"cnn", "nme"}
    assert told["bytes"]["exemplars"] > 0


def test_events_end_with_what_was_learned_and_forgotten(tmp_path: Path) -> None:
    make(tmp_path / "m", NAMES[:3])
    last = learn(tmp_path / "m", NAMES[3:5])[-1]
    assert isinstance(last, Learned)
    assert last.new == list(NAMES[3:5])
    assert last.num_classes == 5
    assert last.exemplars == 15
    assert last.path == str(tmp_path / "m")
    assert [entry["class"] for entry in last.by_class] == list(NAMES[:5])
    assert [entry["before"] is None for entry in last.by_class] == [False] * 3 + [True] * 2
    old = np.mean([entry["after"]["cnn"] for entry in last.by_class[:3]])
    assert last.after["cnn"] == pytest.approx(old)
    assert last.new_accuracy["nme"] == pytest.approx(np.mean([entry["after"]["nme"] for entry in last.by_class[3:]]))


def test_held_out_images_are_never_trained_on(taught: Path) -> None:
    model = opened(taught)
    assert model.learner is not None
    exemplars = {image.numpy().tobytes() for label in range(5) for image in model.learner.memory.of(label).pixels}
    held = [image.numpy().tobytes() for label in range(5) for image in model.heldout.of(label).pixels]
    assert len(exemplars) == 15
    assert len(held) == 10
    assert not exemplars & set(held)
    lesson = Lesson(opened(taught), *pictures(NAMES[5:]), LessonOptions())
    trained = {image.numpy().tobytes() for image in lesson.stage.pool.pixels}
    assert not trained & set(held)
    assert not trained & {
        image.numpy().tobytes() for label in (5, 6) for image in lesson.model.heldout.of(label).pixels
    }


def contents(samples: Samples) -> list[bytes]:
    """The pixels of each image, in order."""
    return sorted(image.numpy().tobytes() for image in samples.pixels)


def trained_on(lesson: Lesson, label: int) -> list[bytes]:
    """The images of a class that a lesson trains on."""
    return contents(lesson.stage.pool[lesson.stage.pool.rows_of(label)])


def test_what_was_held_out_is_not_learned_when_the_same_images_come_again(taught: Path) -> None:
    before = opened(taught)
    assert before.learner is not None
    held, exemplars = contents(before.heldout.of(0)), contents(before.learner.memory.of(0))
    images, labels = pictures(NAMES[:1], 10)  # the 8 of before and 2 more
    lesson = Lesson(before, images, labels, LessonOptions("refresh"))
    assert contents(lesson.model.heldout.of(4)) == held  # it comes last now
    given = {image.tobytes() for image in images}
    assert trained_on(lesson, 4) == sorted(given - set(held))
    only_held = np.stack([np.frombuffer(image, np.uint8).reshape(8, 8, 3) for image in held])
    assert trained_on(Lesson(before, only_held, ["apple"] * 2, LessonOptions("refresh")), 4) == exemplars


def test_a_class_keeps_no_more_held_out_images_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.models.split.VALIDATION_MOST", 3)
    model = opened(make(tmp_path / "m", NAMES[:2]))
    lesson = Lesson(model, *pictures(NAMES[:1], 8, seed=9), LessonOptions("refresh"))
    assert len(model.heldout.of(0)) == 2
    assert len(lesson.model.heldout.of(1)) == 3


def test_a_class_of_which_all_is_held_out_already_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2], config=tiny("naive", memory="none", validation=0.25))
    held = opened(path).heldout.of(0).pixels.numpy()
    with pytest.raises(EngramError, match="nothing new of the class 'apple'"):
        Lesson(opened(path), held, ["apple"] * len(held), LessonOptions("refresh"))


@pytest.mark.parametrize(("count", "share", "held"), [(8, 0.2, 2), (7, 0.2, 1), (10, 0.25, 3), (8, 0.02, 1)])
def test_the_share_held_out_is_the_nearest_whole_number_and_one_at_least(count: int, share: float, held: int) -> None:
    lesson = Lesson(Model(tiny(validation=share), "cpu"), *pictures(NAMES[:2], count), LessonOptions())
    assert [len(lesson.model.heldout.of(place)) for place in (0, 1)] == [held, held]
    assert [known.images for known in lesson.model.classes] == [count - held] * 2


def test_a_lesson_that_the_memory_has_no_room_for_is_refused() -> None:
    model = in_memory(tiny(epochs=1, memory="total=3"), NAMES[:2])
    with pytest.raises(EngramError, match="less than one for each of 4 classes; give at least total=4"):
        Lesson(model, *pictures(NAMES[2:4]), LessonOptions())


def test_the_shares_of_the_nearest_mean_are_a_softmax_of_ten_times_the_cosines(taught: Path) -> None:
    model = opened(taught)
    assert model.temperatures == {}
    images, _ = pictures(NAMES, 2, seed=9)
    powers = np.exp(10 * scores(model, images)["nme"].astype(np.float64))
    np.testing.assert_allclose(
        model.probabilities(images, "nme"), powers / powers.sum(axis=1, keepdims=True), rtol=1e-5
    )


def test_copies_of_an_image_are_all_learned_or_held_out_once() -> None:
    images, labels = pictures(NAMES[:2], 8)
    model = Model(tiny(validation=0.25), "cpu")
    lesson = Lesson(model, np.concatenate([images, images]), labels + labels, LessonOptions())
    for label in range(2):
        trained, held = trained_on(lesson, label), contents(lesson.model.heldout.of(label))
        assert len(held) == len(set(held)) == 2
        assert trained == sorted([*set(trained)] * 2)
        assert len(trained) == 12
        assert not set(trained) & set(held)
    alike = Lesson(model, images[:1].repeat(4, axis=0), ["x"] * 4, LessonOptions())
    assert len(alike.stage.pool) == 4
    assert not len(alike.model.heldout)


def test_pictures_that_were_learned_and_not_kept_are_never_held_out(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2], NAMES[2:3], config=tiny(epochs=1, memory=1, validation=0.25))
    before = opened(path)
    assert before.learner is not None
    images, labels = pictures(NAMES[:1])
    kept = {*contents(before.learner.memory.of(0)), *contents(before.heldout.of(0))}
    rest = images[[image.tobytes() not in kept for image in images]]
    assert len(rest) == 5
    lesson = Lesson(before, rest, labels[:5], LessonOptions("refresh"))
    assert len(lesson.model.heldout.of(2)) == 2, "those of before"
    assert len(trained_on(lesson, 2)) == 6
    fresh = pictures(NAMES[:1], seed=4)
    again = next_lesson(before, *fresh, LessonOptions("refresh"))
    assert len(again.classes[2].digests) == 8 * (6 + 6), "of both lessons"
    assert 3 not in Lesson(again, rest, ["new"] * 5, LessonOptions()).model.heldout.labels
    remove_class(path, "apple")
    assert [len(known.digests) for known in opened(path).classes] == [8 * 6] * 2
    manifest = (path / "generations" / "000003" / "model.json").read_text()
    assert len(before.classes[0].digests) == 8 * 6
    assert b64encode(before.classes[0].digests).decode() not in manifest
    assert b64encode(before.classes[1].digests).decode() in manifest
    assert "digests" not in read_manifest(path)["classes"][0]


def told(lesson: Lesson) -> str:
    """What a lesson warns of before it begins."""
    work = lesson.take(CheckpointPolicy())
    next(work)
    warned = next(work)
    work.close()
    return warned.message if isinstance(warned, Warned) else ""


def test_a_picture_that_is_held_out_is_not_learned_under_another_name(taught: Path) -> None:
    before = opened(taught)
    held = contents(before.heldout.of(0))
    images, _ = pictures(NAMES[:1])
    renamed = Lesson(before, images, ["apfel"] * 8, LessonOptions())
    assert trained_on(renamed, 5) == sorted({image.tobytes() for image in images} - set(held))
    assert told(renamed) == (
        "the same pictures in two classes (a folder renamed?): 8 images of 'apfel' also in 'apple'; "
        "2 held out before and not learned from, 6 learned under each name and not held out"
    )
    others = Lesson(before, *pictures(NAMES[5:6]), LessonOptions())
    assert not told(others)
    with pytest.raises(EngramError, match="nothing new of the class 'apfel'"):
        Lesson(before, before.heldout.of(0).pixels.numpy(), ["apfel"] * 2, LessonOptions())


def test_pictures_with_two_names_in_one_lesson_are_learned_and_not_held_out() -> None:
    images, _ = pictures(NAMES[:2])
    given = np.concatenate([images, images[4:8]])  # the second half of the apples are pears too
    labels = ["apple"] * 8 + ["boat"] * 8 + ["pear"] * 4
    lesson = Lesson(Model(tiny(validation=0.5), "cpu"), given, labels, LessonOptions())
    held = [contents(lesson.model.heldout.of(label)) for label in lesson.model.heldout.labels]
    assert [len(own) for own in held] == [4, 4], "of the pears none"
    shared = {image.tobytes() for image in images[4:8]}
    assert not shared & {*held[0], *held[1]}
    assert shared == set(trained_on(lesson, 0)) == set(trained_on(lesson, 2))
    assert told(lesson) == (
        "the same pictures in two classes (a folder renamed?): 4 images of 'pear' also in 'apple'; "
        "4 learned under each name and not held out"
    )


@pytest.mark.parametrize(("wrong", "right"), [("apple", "boat"), ("boat", "apple")])
def test_pictures_that_the_model_has_under_another_name_are_named(taught: Path, wrong: str, right: str) -> None:
    """Both classes are learned again, and the model has the pictures under the name that was wrong."""
    images, names = pictures(("apple", "boat"))
    moved = [place for place, name in enumerate(names) if name == wrong][4:]
    labels = [right if place in moved else name for place, name in enumerate(names)]
    said = told(Lesson(opened(taught), images, labels, LessonOptions(known="refresh")))
    assert f"4 images of {right!r} also in {wrong!r}" in said


def test_exemplars_are_pictures_anyone_can_open(taught: Path) -> None:
    files = {name: content for name, content in everything(taught).items() if "/000002/exemplars/" in name}
    images, _ = pictures(NAMES[:5])
    assert len(files) == 15
    assert set(files.values()) <= {png(image) for image in images}
    assert not any(name in path for path in everything(taught) for name in NAMES)


# Refusing and refreshing classes that are known


def test_known_classes_are_refused_ignored_or_learned_again(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:3])
    before = everything(path)
    with pytest.raises(EngramError, match="knows the class 'camel' already"):
        learn(path, NAMES[2:4])
    with pytest.raises(EngramError, match="nothing to learn"):
        learn(path, NAMES[:2], known="ignore", seed=1)
    for known in ("refuse", "ignore"):  # the same images once more, as by a command that is given every night
        (event,) = learn(path, NAMES[:2], known=known)
        assert isinstance(event, LearnedBefore)
        assert event.classes == ["apple", "boat"]
    with pytest.raises(EngramError, match="known must be refuse, ignore or refresh, got 'never'"):
        learn(path, NAMES[3:4], known="never")
    assert everything(path) == before
    told = [event.message for event in learn(path, NAMES[1:4], known="ignore") if isinstance(event, LessonNotice)]
    assert told == ["left out what the model knows already: 'boat', 'camel' (known=refresh)"]
    assert opened(path).labels == list(NAMES[:4])
    learn(path, ["boat", "easel"], seed=5, known="refresh")
    model = opened(path)
    assert model.labels == ["apple", "camel", "dingo", "boat", "easel"]
    assert model.sizes == (2, 1, 2)
    boat = model.classes[3]
    assert (boat.stage, boat.images) == (2, 9)  # 6 of the 8 images, 2 being held out, and its 3 exemplars
    assert len(model.heldout.of(3)) == 4


@pytest.mark.parametrize("again", [NAMES[:1], NAMES[:3], (*NAMES[:2], NAMES[4])])
def test_before_and_after_of_a_class_learned_again_are_of_the_same_images(
    again: tuple[str, ...], tmp_path: Path
) -> None:
    path = make(tmp_path / "m", NAMES[:3], config=tiny(epochs=1, validation=0.25))
    old = opened(path)
    images, _ = pictures(NAMES[4 : 4 + len(again)])  # which it cannot know yet
    labels = [name for name in again for _ in range(8)]
    learned = list(learn_into(path, images, labels, known="refresh", device="cpu"))[-1]
    assert isinstance(learned, Learned)
    new = opened(path)
    by_class = {entry["class"]: entry for entry in learned.by_class}
    known = [name for name in again if name in NAMES[:3]]
    assert learned.refreshed == known
    for name in known:
        held = new.heldout.of(new.position(name)).pixels
        assert len(held) == 4
        for by in ("cnn", "nme"):
            for model, when in ((old, "before"), (new, "after")):
                right = model.probabilities(held, by).argmax(axis=1) == model.position(name)
                assert by_class[name][when][by] == 100 * right.mean()
    for by in ("cnn", "nme"):
        assert learned.refreshed_before[by] == np.mean([by_class[name]["before"][by] for name in known])
        assert learned.refreshed_after[by] == np.mean([by_class[name]["after"][by] for name in known])
    entry = new.history[-1]
    assert (entry.refreshed_before, entry.refreshed_after) == (learned.refreshed_before, learned.refreshed_after)
    assert bool(learned.before) == (len(known) < 3)
    if len(again) > len(known):
        assert by_class["easel"]["before"] is None


def test_a_class_learned_again_changes_nothing_of_the_model_before() -> None:
    before = in_memory(tiny(epochs=1, validation=0.25), NAMES[:2])
    before.classes = tuple(replace(known, accuracy={"cnn": -1.0, "nme": -1.0}) for known in before.classes)
    next_lesson(before, *pictures(NAMES[:1], seed=3), LessonOptions("refresh"))
    assert [known.accuracy for known in before.classes] == [{"cnn": -1.0, "nme": -1.0}] * 2


@pytest.mark.parametrize("method", ["afc", "der", "mnemonics", "foster", "memo"])
def test_all_classes_learned_again_are_a_new_beginning(method: str, tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2], NAMES[2:3], config=tiny(method, epochs=1))
    learn(path, NAMES[:3], seed=3, known="refresh")
    assert opened(path).sizes == (3,)
    learn(path, NAMES[3:4])
    assert opened(path).sizes == (3, 1)


# The transaction


def test_a_full_disk_at_any_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    before = everything(path)
    changed = next_lesson(opened(path), *pictures(NAMES[2:3], 5))
    write, calls = writer.write_new, [0, 0]  # made, and the one that fails

    def full(place: Path, content: bytes) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            place.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        write(place, content)

    monkeypatch.setattr(writer, "write_new", full)
    for fails_at in range(1, 3 + 4 + 1):  # weights, model.json, current, and the pictures of the new class
        calls[:] = [0, fails_at]
        with pytest.raises(EngramError, match="the disk is full"):
            save_model(changed, path, overwrite=True)
        assert everything(path) == before
    calls[:] = [0, 0]
    save_model(changed, path, overwrite=True)
    assert calls[0] == 3 + 4
    assert same(opened(path), changed)


def test_everything_is_on_disk_before_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    synced: set[tuple[int, int]] = set()
    seen_at_switch: list[set[tuple[int, int]]] = []
    fsync, rename = os.fsync, os.replace

    def note(handle: int) -> None:
        status = os.fstat(handle)
        synced.add((status.st_dev, status.st_ino))
        fsync(handle)

    def switch(source: Any, target: Any) -> None:
        if Path(target) == path / "current":
            seen_at_switch.append(set(synced))
        rename(source, target)

    old = {(file.stat().st_dev, file.stat().st_ino) for file in path.rglob("*")}
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", switch)
    learn(path, NAMES[2:3])
    (done,) = seen_at_switch
    generation = path / "generations" / "000002"
    for file in [generation, *generation.rglob("*")]:
        key = (file.stat().st_dev, file.stat().st_ino)
        assert key in done or (key in old and file.suffix == ".png"), file


def test_pictures_that_stay_are_linked(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    before = {file.stat().st_ino for file in path.rglob("*.png")}
    learn(path, NAMES[2:3])
    after = {file.stat().st_ino for file in path.rglob("*.png")}
    assert before < after


def test_where_links_cannot_be_had_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "m", NAMES[:2])

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    learn(path, NAMES[2:3])
    assert opened(path).labels == list(NAMES[:3])


def test_a_second_writer_is_refused_and_readers_are_not(taught: Path, tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    before = opened(path)
    with writer.Writer(path):
        for change in (
            lambda: learn(path, NAMES[2:3]),
            lambda: remove_class(path, "apple"),
            lambda: save_model(before, path, overwrite=True),
        ):
            with pytest.raises(EngramError, match="another process is changing the model"):
                change()
        assert same(opened(path), before)
        assert read_manifest(path)["classes"]
    learn(path, NAMES[2:3])


def test_readers_see_one_model_or_the_other_while_it_changes(taught: Path, tmp_path: Path) -> None:
    one = opened(taught)
    other = one.copy()
    other.remove(["apple"])
    path = tmp_path / "m"
    save_model(one, path)
    wrong: list[object] = []
    stop = threading.Event()
    reads = 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            try:
                found = opened(path)
            except Exception as error:
                wrong.append(error)
                return
            reads += 1
            if not same(found, one if len(found.classes) == 5 else other):
                wrong.append(found.labels)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(16):
        save_model(other if number % 2 == 0 else one, path, overwrite=True)
    stop.set()
    reader.join()
    assert not wrong
    assert reads > 1
    assert len(list((path / "generations").iterdir())) == 1


def test_a_model_loaded_before_it_changed_is_not_saved_over_it(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    from engram.models.store.codec import open_model

    model, pointer = open_model(path, "cpu")
    learn(path, NAMES[2:3])
    with pytest.raises(EngramError, match="has changed since it was loaded"):
        save_model(model, path, expected=pointer)
    save_model(model, path, overwrite=True)
    assert opened(path).labels == list(NAMES[:2])


# Learning in progress


def stop_after(steps: int) -> Any:
    left = [steps]

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return stop


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_learning_that_stopped_goes_on_to_the_same_model(steps: int, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", NAMES[:3], NAMES[3:5])
    path = make(tmp_path / "m", NAMES[:3])
    before = opened(path)
    events = learn(path, NAMES[3:5], stop=stop_after(steps))
    assert isinstance(events[-1], Stopped)
    assert any(isinstance(event, Checkpointed) for event in events)
    assert has_learning(path)
    assert same(opened(path), before)
    with pytest.raises(EngramError, match=r"not the same images.*\(images: \d+ then, \d+ now, classes: 'd"):
        learn(path, NAMES[3:6])
    with pytest.raises(EngramError, match=r"not the same images, labels and options \(epochs: 2 then, 5 now\); give"):
        learn(path, NAMES[3:5], epochs=5)
    with pytest.raises(EngramError, match="not the same images"):
        learn(path, NAMES[3:5], seed=1)
    with pytest.raises(EngramError, match="was interrupted; finish it first"):
        remove_class(path, "apple")
    assert isinstance(learn(path, NAMES[3:5])[-1], Learned)
    assert not has_learning(path)
    assert same(opened(path), opened(whole))


def test_images_whose_labels_were_exchanged_are_another_lesson() -> None:
    """Each class has as many images as before, and all images are there."""
    images, labels = pictures(NAMES[:2])
    model = Model(tiny(), "cpu")
    exchanged = [*labels]
    exchanged[0], exchanged[-1] = exchanged[-1], exchanged[0]
    prints = {Lesson(model, images, given, LessonOptions()).fingerprint() for given in (labels, exchanged, [*labels])}
    assert len(prints) == 2


@pytest.mark.parametrize("method", ["si", "der", "mnemonics", "bic", "foster", "memo"])
def test_learning_of_odd_methods_goes_on_too(method: str, tmp_path: Path) -> None:
    """A path beside the momentum, a backbone more, factors, a phase that stands still."""
    path = make(tmp_path / "m", NAMES[:2], config=tiny(method, epochs=1, memory=memory_of(method)))
    whole = copy(path, tmp_path / "whole")
    learn(whole, NAMES[2:4])
    assert isinstance(learn(path, NAMES[2:4], stop=stop_after(1))[-1], Stopped)
    learn(path, NAMES[2:4])
    assert same(opened(path), opened(whole))


@pytest.mark.parametrize(
    ("tensor", "value", "reason"),
    [
        ("phase.rows", torch.tensor([0, 1000]), "rows"),
        ("phase.rows", torch.tensor([-1, 0]), "rows"),
        ("phase.optimiser.momentum.head.weight", torch.zeros(1), "optimiser"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_lesson_is_refused(
    tensor: str, value: torch.Tensor, reason: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "m", NAMES[:2], config=tiny(epochs=1))
    learn(path, NAMES[2:3], stop=stop_after(1))
    with writer.Writer(path) as held:
        checkpoint = held.learning()
        assert checkpoint is not None
        assert tensor in checkpoint.tensors
        held.save_learning(Checkpoint({**checkpoint.tensors, tensor: value}, checkpoint.data))
    with pytest.raises(EngramError, match=rf"its checkpoint does not fit \({reason}\); drop it"):
        learn(path, NAMES[2:3])


def test_learning_in_progress_can_be_dropped(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:3])
    learn(path, NAMES[3:5], stop=stop_after(2))
    learn(path, NAMES[5:6], restart=True)
    assert opened(path).labels == [*NAMES[:3], NAMES[5]]
    assert not has_learning(path)


def test_a_first_lesson_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    learn(path, NAMES[:3], config=tiny(), stop=stop_after(2))
    with pytest.raises(NoModelYet, match=r"no model at .* yet"):
        opened(path)
    learn(path, NAMES[:3], config=tiny())
    assert same(opened(path), in_memory(tiny(), NAMES[:3]))


@pytest.mark.parametrize("damage", ["truncated", "link", "folder", "number", "epoch", "step"])
def test_a_damaged_checkpoint_is_said_and_can_be_dropped(damage: str, tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:3])
    learn(path, NAMES[3:5], stop=stop_after(2))
    state = path / "learning" / "state.safetensors"
    content = state.read_bytes()
    state.unlink()
    if damage == "truncated":
        state.write_bytes(content[:-9])
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        state.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        state.mkdir()
    else:
        words = f'"{damage}": '.replace('"', '\\\\\\"').encode()  # JSON in a text in a text
        place = content.index(words) + len(words)
        state.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(EngramError, match="cannot be resumed"):
        learn(path, NAMES[3:5])
    assert isinstance(learn(path, NAMES[3:5], restart=True)[-1], Learned)


def test_a_failed_beginning_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="need 8 labels"):
        list(learn_into(tmp_path / "m", pictures(["camel"])[0], ["camel"], device="cpu"))
    assert not (tmp_path / "m").exists()
    with pytest.raises(EngramError, match="cannot be saved"):
        list(learn_into(tmp_path / "m", pictures(["camel"])[0], [object()] * 8, device="cpu"))
    assert not (tmp_path / "m").exists()


def test_a_beginning_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(make(tmp_path / "m", NAMES[:2]))
    write, left = writer.write_new, [0]

    def full(place: Path, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            place.touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        write(place, content)

    monkeypatch.setattr(writer, "write_new", full)
    for fits in range(4):
        left[0] = fits
        with pytest.raises(EngramError, match="the disk is full"):
            save_model(model, tmp_path / "new")
        assert not (tmp_path / "new").exists(), fits
    left[0] = 1000
    save_model(model, tmp_path / "new")
    assert same(opened(tmp_path / "new"), model)


def test_a_file_in_the_place_of_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "link").symlink_to("nowhere")
    for name, sentence in (("letter.txt", "is a file, and a model is a directory"), ("link", "is a broken link")):
        with pytest.raises(EngramError, match=sentence):
            learn(tmp_path / name, NAMES[:2])
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(EngramError, match=r"is not a model directory and holds 'letter.txt'"):
        learn(tmp_path, NAMES[:2])
    assert everything(tmp_path) == {"letter.txt": b"dear"}
    for call in (opened, read_manifest):
        with pytest.raises(EngramError, match="is not a model directory"):
            call(tmp_path)
        with pytest.raises(EngramError, match="there is no model at"):
            call(tmp_path / "nowhere")


def test_a_model_keeps_its_configuration(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    with pytest.raises(EngramError, match=r"has another configuration \('seed'\)"):
        learn(path, NAMES[2:3], config=replace(opened(path).config, seed=9))
    for config, sentence in (
        ({"seed": 9}, "was made with seed=1, which cannot be changed; leave seed out"),
        ({"image_size": 16}, "was made with image_size=8,"),
        ({"memory": 5}, "was made with memory=per_class=3,"),
        ({"flip": False}, "was made with mirrored images,"),
        ({"settings": {"train.lr": 1.0}}, "the settings of the model at .* cannot be changed"),
        ({"sed": 9}, "no argument of ModelConfig.choose 'sed': did you mean 'seed'"),
    ):
        with pytest.raises(EngramError, match=sentence):
            learn(path, NAMES[2:3], config=config)
    assert isinstance(learn(path, NAMES[2:3], config={"seed": 1, "memory": 3, "backbone": None}, epochs=1)[-1], Learned)
    with pytest.raises(EngramError, match="this model's are 8x8"):
        list(learn_into(path, np.zeros((4, 9, 9, 3), np.uint8), ["x"] * 4, device="cpu"))


# Removing a class


def of_classes(model: Model) -> dict[str, np.ndarray]:
    """What the model has for each class: rows of the head, of the method's tensors, and class means."""
    learner = model.learner
    assert learner is not None
    head, count = learner.network.head, len(model.labels)
    tensors = {name: head.get_parameter(name) for name in head.class_parameters}
    tensors |= {name: learner.buffers[name] for name in model.method.class_buffers if name in learner.buffers}
    if learner.class_means is not None:
        tensors["means"] = learner.class_means
    return {name: tensor.detach().numpy()[:count].copy() for name, tensor in tensors.items()}


def assert_scores_left(found: dict[str, np.ndarray], before: dict[str, np.ndarray], place: int) -> None:
    """The scores are those from before without one class, but for the last bit of products with fewer rows."""
    assert found.keys() == before.keys()
    for by, left in found.items():
        np.testing.assert_allclose(left, np.delete(before[by], place, axis=1), rtol=1e-6, atol=1e-6, err_msg=by)


@pytest.mark.parametrize(("method", "place"), [*varied_methods(2), ("afc", 0), ("afc", 4)])
def test_a_removed_class_is_gone_and_the_others_are_as_they_were(method: str, place: int, tmp_path: Path) -> None:
    config = tiny(method, epochs=1, memory=memory_of(method), validation=0.25)
    path = make(tmp_path / "m", NAMES[:3], NAMES[3:5], config=config)
    model = opened(path)
    assert model.learner is not None
    before, others = scores(model), {name: np.delete(rows, place, 0) for name, rows in of_classes(model).items()}
    head = model.learner.network.head
    rows = [head.get_parameter(name)[place].detach().numpy().tobytes() for name in head.class_parameters]
    if model.learner.class_means is not None:
        rows.append(model.learner.class_means[place].numpy().tobytes())
    buffers, named = model.learner.buffers, model.method.class_buffers
    assert not [
        name for name in buffers if "head." in name and len(buffers[name]) == head.capacity and name not in named
    ]
    rows += [buffers[name][place].numpy().tobytes() for name in named if name in buffers and buffers[name][place].any()]
    own, _ = pictures(NAMES[place : place + 1])
    gone = [row for row in rows if len(row) > 16] + [png(image) for image in own] + [NAMES[place].encode()]
    assert any(part in content for part in gone for content in everything(path).values())

    remove_class(path, NAMES[place], undoable=False)
    assert not [name for part in gone for name, content in everything(path).items() if part in content]
    left = opened(path)
    assert left.labels == [name for name in NAMES[:5] if name != NAMES[place]]
    assert left.learner is not None
    if not left.method.keeps_statistics:  # those solve for the head again, without the class
        for name, wanted in others.items():
            assert np.array_equal(of_classes(left)[name], wanted), name
        assert_scores_left(scores(left), before, place)
    assert left.learner.teacher.head.num_classes == (4 if left.method.uses_teacher else 0)
    assert left.history[-1].what == "removed"
    learn(path, NAMES[5:7])
    again = opened(path)
    assert again.labels == [*left.labels, *NAMES[5:7]]
    assert all(np.isfinite(found).all() for found in scores(again).values())


@pytest.mark.parametrize("method", ["afc", "bic", "der", "foster"])
def test_classes_removed_at_once_are_those_removed_one_by_one(method: str, tmp_path: Path) -> None:
    config = tiny(method, epochs=1, memory=memory_of(method), validation=0.25)
    one, other = (make(tmp_path / name, NAMES[:3], NAMES[3:5], config=config) for name in ("one", "other"))
    for name in ("dingo", "apple"):
        remove_class(one, name)
    with pytest.raises(EngramError, match="knows no class 'goose'"):
        remove_class(other, "dingo", "goose")
    assert opened(other).labels == list(NAMES[:5]), "all or none"
    remove_class(other, "dingo", "apple", "dingo")
    assert same(opened(one), opened(other))
    assert [entry.what for entry in opened(other).history] == ["learned", "learned", "removed", "removed"]
    assert read_manifest(other)["generation"] == "000003"


def test_the_last_class_can_go_and_the_model_begins_again(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    remove_class(path, "apple")
    remove_class(path, "boat")
    assert opened(path).labels == []
    with pytest.raises(EngramError, match="knows no class"):
        opened(path).probabilities(pictures(["camel"])[0])
    with pytest.raises(EngramError, match="knows no class 'apple'"):
        remove_class(path, "apple")
    learn(path, NAMES[2:4])
    assert opened(path).labels == list(NAMES[2:4])


def test_a_model_that_begins_again_goes_on_with_its_backbone(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    remove_class(path, *NAMES[:2])
    model = opened(path)
    lesson = Lesson(model, *pictures(NAMES[2:4]), LessonOptions())
    assert model.learner is not None
    assert lesson.model.learner is not None
    fresh = lesson.model.learner.network.backbone.state_dict()
    for name, value in model.learner.network.backbone.state_dict().items():
        assert torch.equal(fresh[name], value), name


def damage(file: Path) -> Path:
    """The file with a bit changed, in a copy of its own: others may be links to it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.unlink()
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("kind", ["exemplars", "heldout"])
def test_a_class_with_a_damaged_picture_can_be_removed(kind: str, taught: Path, tmp_path: Path) -> None:
    path = copy(taught, tmp_path / "m")
    whole = opened(path)
    damage(path / "generations" / "000002" / kind / "00001" / "00001.png")
    with pytest.raises(EngramError, match=r"00001.png is damaged"):
        remove_class(path, "apple")
    remove_class(path, "boat")
    left = opened(path)
    assert left.labels == ["apple", *NAMES[2:5]]
    assert_scores_left(scores(left), scores(whole), 1)
    assert [known.accuracy.keys() for known in left.classes] == [{"cnn", "nme"}] * 4


# Labels


def test_labels_of_many_kinds_come_back_as_they_were(tmp_path: Path) -> None:
    labels = ["text", 3, -(2**62), 2.5, None, ("a", (1, None)), True, "", "3", "ß\n\x00"]
    images, _ = pictures(NAMES[:5], 4)
    given = [label for label in labels for _ in range(2)]
    list(learn_into(tmp_path / "m", images, given, config=tiny(epochs=1), device="cpu"))
    found = opened(tmp_path / "m").labels
    assert found == labels
    assert [type(label) for label in found] == [type(label) for label in labels]
    assert [known["label"] for known in read_manifest(tmp_path / "m")["classes"]] == labels


def test_labels_that_are_written_alike_are_told(tmp_path: Path) -> None:
    def told(labels: list[Any], **options: Any) -> list[str]:
        images, _ = pictures(NAMES[: len(labels)], 2, seed=len(str(labels)))  # others each time
        given = [label for label in labels for _ in range(2)]
        events = list(learn_into(tmp_path / "m", images, given, device="cpu", **options))
        assert isinstance(events[-1], Learned)
        return [event.message for event in events if isinstance(event, Warned) and "different" in event.message]

    alike = "are different classes; if they should be one, give them one name"
    assert told([1, "1", "x"], config=tiny(epochs=1)) == [f"1 and '1' {alike}"]
    assert told(["X "], epochs=1) == [f"'x' and 'X ' {alike}"]
    assert told(["y", 2], epochs=1) == []


@pytest.mark.parametrize("label", [b"bytes", frozenset({1}), 1j, ("x", float("inf")), 2**70, ("x", object()), "\ud800"])
def test_labels_that_json_has_not_are_refused_before_anything_is_learned(label: Any, tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"cannot be saved|is not a label"):
        list(learn_into(tmp_path / "m", pictures(["camel"])[0], [label] * 8, device="cpu"))


# Directories that somebody else made


def resign(path: Path, manifest: dict[str, Any] | None = None) -> None:
    """Makes `current` vouch for model.json as it is now."""
    generation = path / "generations" / json.loads((path / "current").read_text())["generation"]
    if manifest is not None:
        (generation / "model.json").write_text(json.dumps(manifest))
    checksum = digest((generation / "model.json").read_bytes())
    (path / "current").write_text(json.dumps({"format": 1, "generation": generation.name, "digest": checksum}))


def edited(path: Path, **changes: Any) -> None:
    generation = path / "generations" / json.loads((path / "current").read_text())["generation"]
    manifest = json.loads((generation / "model.json").read_text())
    for key, value in changes.items():
        manifest[key] = value(manifest[key]) if callable(value) else value
    resign(path, manifest)


def with_config(**changes: Any) -> Any:
    return lambda config: {
        **config,
        **{key: value for key, value in changes.items() if key != "settings"},
        "settings": {**config["settings"], **changes.get("settings", {})},
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 2}, "use a newer version of engram"),
        ({"format": "x"}, "which engram never used"),
        ({"files": {"../../x": [1, "0" * 32]}}, "not a file of a model"),
        ({"files": {"/etc/passwd": [1, "0" * 32]}}, "not a file of a model"),
        ({"files": {"weights.safetensors": [2**60, "0" * 32]}}, "an impossible size"),
        ({"classes": lambda known: known + known[:1]}, "lists a class twice"),
        ({"classes": lambda known: [{**known[0], "exemplars": 10**9}, *known[1:]]}, "lists .* files and counts"),
        ({"classes": lambda known: [{**known[0], "label": {"a": 1}}, *known[1:]]}, "label cannot be read"),
        *(
            ({"classes": lambda known, odd=odd: [{**known[0], "digests": odd}, *known[1:]]}, "digests")
            for odd in ("AAAA", "é", "A=A", None, 3, ["AAAAAAAAAAA="])
        ),
        ({"config": with_config(method="pickle")}, "no method 'pickle'"),
        ({"config": with_config(backbone="os.system")}, "no backbone"),
        ({"config": with_config(settings={"proxies": 10**12})}, "cannot be made|does not fit the head"),
        ({"config": with_config(settings={"proxies": 4})}, "does not fit the head"),
        ({"config": with_config(image_size=[10**6, 10**6])}, "8 to 1024 pixels"),
        ({"config": with_config(image_size=[16, 16])}, "not an RGB image of 16x16"),
        ({"config": []}, "must name its method"),
        ({"stage_sizes": [5, 1]}, "sizes of the stages do not add up"),
        ({"std": [0, 1, 1]}, "standard deviation"),
        ({"history": [{"what": 3, "date": ""}]}, "history"),
    ],
)
def test_a_model_json_that_lies_is_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path, taught: Path
) -> None:
    path = copy(taught, tmp_path / "m")
    edited(path, **changes)
    with pytest.raises(EngramError, match=sentence):
        opened(path)


def copy(source: Path, target: Path) -> Path:
    import shutil

    return Path(shutil.copytree(source, target, symlinks=True))


def test_a_newer_pointer_is_refused_with_a_sentence(taught: Path, tmp_path: Path) -> None:
    path = copy(taught, tmp_path / "m")
    (path / "current").write_text('{"format": 7, "anything": []}')
    for call in (opened, read_manifest):
        with pytest.raises(EngramError, match=r"has format 7, .* use a newer version"):
            call(path)


@pytest.mark.parametrize(
    "what", ["generations", "generations/000002", "generations/000002/weights.safetensors", "current"]
)
def test_links_out_of_the_directory_are_not_followed(what: str, taught: Path, tmp_path: Path) -> None:
    path = copy(taught, tmp_path / "m")
    outside = tmp_path / "outside"
    (path / what).rename(outside)
    (path / what).symlink_to(outside)
    with pytest.raises(EngramError, match="is a link"):
        opened(path)
    before = everything(outside) if outside.is_dir() else outside.read_bytes()
    with pytest.raises(EngramError):
        learn(path, NAMES[5:6])
    assert (everything(outside) if outside.is_dir() else outside.read_bytes()) == before


def test_a_lock_that_is_a_link_harms_nobody(tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:2])
    (tmp_path / "precious").write_text("precious")
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(EngramError, match="cannot write"):
        learn(path, NAMES[2:3])
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("what", ["current", "generations/000002/model.json", "generations/000002/weights.safetensors"])
def test_a_pipe_in_place_of_a_file_does_not_hang(what: str, taught: Path, tmp_path: Path) -> None:
    path = copy(taught, tmp_path / "m")
    (path / what).unlink()
    os.mkfifo(path / what)
    started = time.monotonic()
    with pytest.raises(EngramError, match="not a regular file"):
        opened(path)
    assert time.monotonic() - started < 5


def test_a_lost_pointer_loses_nothing_more(taught: Path, tmp_path: Path) -> None:
    path = copy(taught, tmp_path / "m")
    pointer = (path / "current").read_bytes()
    (path / "current").unlink()
    with pytest.raises(EngramError, match="has lost its file 'current'"):
        learn(path, NAMES[5:6])
    (path / "current").write_bytes(pointer)
    assert same(opened(path), opened(taught))


def test_deep_json_is_refused(taught: Path, tmp_path: Path) -> None:
    path = copy(taught, tmp_path / "m")
    (path / "generations" / "000002" / "model.json").write_text("[" * 100_000)
    resign(path)
    with pytest.raises(EngramError, match="is not valid JSON"):
        opened(path)


def test_bits_that_flip_are_found_and_named(taught: Path, tmp_path: Path) -> None:
    names = [name for name in sorted(everything(taught)) if name != ".lock" and "/000001/" not in name]
    for name in names[:: max(1, len(names) // 8)]:
        path = copy(taught, tmp_path / name.replace("/", "_"))
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 4
        (path / name).write_bytes(content)
        with pytest.raises(EngramError, match=Path(name).name):
            opened(path)
