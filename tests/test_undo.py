"""Changing a model without teaching it: the last lesson is taken back, classes get other names, pictures go."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engram.models.store.writer as writer
from engram import EngramError, IncrementalClassifier, read_manifest, remove_class, remove_images, rename_class, undo
from engram.contract.exemplars import class_means
from engram.core.events import Stopped
from engram.models.digests import digest_of, digests_in
from engram.models.edit import merge_classes, save_model
from engram.models.edit_images import move_images
from engram.models.learning import has_learning, learn_into
from engram.models.store.codec import open_model
from helpers import Engram, assert_refused, unpack_archive
from model_helpers import NAMES, everything, learn, make, opened, pictures, png, same, scores, tiny

FIRST, SECOND = NAMES[:3], NAMES[3:5]
GENERATIONS = ["000001", "000002"]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three classes; not to be changed."""
    return make(tmp_path_factory.mktemp("models") / "before", FIRST)


@pytest.fixture(scope="module")
def after(before: Path) -> Path:
    """The same after a second lesson; not to be changed."""
    path = copy(before, before.with_name("after"))
    learn(path, SECOND)
    return path


@pytest.fixture
def model(after: Path, tmp_path: Path) -> Path:
    return copy(after, tmp_path / "model")


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def generations(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "generations").iterdir())


def files_of(files: dict[str, bytes], generation: str) -> dict[str, bytes]:
    start = f"generations/{generation}/"
    return {name.removeprefix(start): content for name, content in files.items() if name.startswith(start)}


def damage(file: Path) -> Path:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return file


def full_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for so many files."""
    write, left = writer.write_new, [writes]

    def full(place: Path, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            place.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        write(place, content)

    monkeypatch.setattr(writer, "write_new", full)


def remove_boat(path: Path) -> None:
    remove_class(path, "boat")


def rename_boat(path: Path) -> None:
    rename_class(path, "boat", "ship")


def remove_pictures(path: Path) -> None:
    remove_images(path, kept_of(path, 0)[0][:1])


def move_pictures(path: Path) -> None:
    move_images(path, kept_of(path, 0)[0][:1], "boat")


CHANGES = [undo, remove_boat, rename_boat, remove_pictures, move_pictures]


# Undo


def test_a_lesson_can_be_taken_back(before: Path, after: Path, model: Path) -> None:
    told = read_manifest(model)
    assert told["undo"] == {
        "lesson": 1,
        "date": told["history"][0]["date"],
        "classes": 3,
        "bytes": pytest.approx(read_manifest(before)["bytes"]["weights"], rel=0.01),
        "steps": 1,
    }
    assert told["why_no_undo"] is None
    done = undo(model)
    assert (done.gone, done.again, done.classes, done.lesson) == ([*SECOND], [], 3, 1)
    assert done.date == told["history"][0]["date"]
    assert same(opened(model), opened(before))
    ours, theirs = everything(model), everything(before)
    assert {name for name, content in theirs.items() if ours.get(name) != content} <= {"current"}
    assert ours.keys() == theirs.keys()
    with pytest.raises(EngramError, match="nothing to undo: there was no model before its first lesson"):
        undo(model)
    learn(model, SECOND)
    assert same(opened(model), opened(after)), "and learned again it is the same"
    assert undo(model).gone == [*SECOND]


def test_a_generation_that_comes_again_has_another_digest(model: Path) -> None:
    first = read_manifest(model)
    undo(model)
    learn(model, NAMES[5:6])
    now = read_manifest(model)
    assert now["generation"] == first["generation"]
    assert now["digest"] != first["digest"]


def test_the_pictures_that_are_kept_are_links(after: Path, tmp_path: Path) -> None:
    path = make(tmp_path / "m", FIRST, SECOND)
    files = [file.stat().st_ino for file in path.rglob("*.png")]
    assert len(files) == 3 * 5 + 5 * 5
    assert len(set(files)) == 5 * 5


def test_several_changes_are_undone_one_after_the_other(before: Path, after: Path, model: Path) -> None:
    learn(model, NAMES[5:6])
    third = opened(model)
    remove_class(model, "apple")
    assert generations(model) == ["000001", "000002", "000003", "000004"]
    assert read_manifest(model)["undo"]["steps"] == 3
    done = undo(model)
    assert (done.what, done.gone, done.back, done.lesson, done.steps) == ("removed", [], ["apple"], 3, 2)
    assert same(opened(model), third)
    assert undo(model).gone == ["falcon"]
    assert same(opened(model), opened(after))
    done = undo(model)
    assert (done.gone, done.classes, done.steps) == ([*SECOND], 3, 0)
    assert same(opened(model), opened(before))
    assert generations(model) == ["000001"]
    with pytest.raises(EngramError, match="nothing to undo: there was no model before its first lesson"):
        undo(model)


def test_only_the_last_states_are_kept(model: Path) -> None:
    for number in range(3):
        rename_class(model, f"boat{number}" if number else "boat", f"boat{number + 1}")
    assert generations(model) == ["000002", "000003", "000004", "000005"]
    for _ in range(3):
        undo(model)
    assert opened(model).labels[1] == "boat"
    with pytest.raises(EngramError, match="nothing to undo: the states before this one are not kept any more"):
        undo(model)
    learn(model, NAMES[5:6], undo_steps=1)
    rename_class(model, "boat", "ship")
    assert read_manifest(model)["undo"]["steps"] == 2
    for steps in (0, 21):
        with pytest.raises(EngramError, match="undo_steps must be 1 to 20"):
            learn(model, NAMES[6:], undo_steps=steps)


def test_a_chain_of_states_that_is_too_long_is_damaged(model: Path) -> None:
    pointer = json.loads((model / "current").read_text())
    del pointer["checksum"]
    for _ in range(30):
        pointer["previous"] = {**pointer["previous"], "previous": pointer["previous"]}
    (model / "current").write_text(json.dumps(pointer))
    with pytest.raises(EngramError, match="is damaged"):
        opened(model)


def test_classes_that_were_learned_again_are_what_they_were(after: Path, model: Path) -> None:
    learn(model, ("boat", "goose"), seed=4, known="refresh")
    done = undo(model)
    assert (done.gone, done.again, done.lesson) == (["goose"], ["boat"], 2)
    assert same(opened(model), opened(after))


def test_the_first_lesson_has_nothing_before_it(before: Path, tmp_path: Path) -> None:
    path = copy(before, tmp_path / "m")
    with pytest.raises(EngramError, match="nothing to undo: there was no model before its first lesson"):
        undo(path)
    assert everything(path) == everything(before)
    with pytest.raises(EngramError, match="no model at"):
        undo(tmp_path / "nowhere")
    assert isinstance(learn(tmp_path / "new", FIRST, config=tiny(), stop=lambda: True)[-1], Stopped)
    with pytest.raises(EngramError, match=r"no model at .* yet"):
        undo(tmp_path / "new")


def test_it_need_not_be_kept(model: Path) -> None:
    learn(model, NAMES[5:6], undoable=False)
    assert generations(model) == ["000003"]
    assert read_manifest(model)["undo"] is None
    with pytest.raises(EngramError, match=r"nothing to undo: .* was not kept, as asked for"):
        undo(model)


def test_nothing_of_a_class_that_was_removed_for_good_is_kept(model: Path) -> None:
    own = {content for name, content in everything(model).items() if "/00001/" in name}
    remove_class(model, "boat", undoable=False)
    assert generations(model) == ["000003"]
    assert not own & set(everything(model).values())
    assert b"boat" not in b"".join(everything(model).values())
    with pytest.raises(EngramError, match="nothing to undo: something was removed from it permanently"):
        undo(model)
    learn(model, NAMES[5:6])
    assert undo(model).gone == ["falcon"]
    assert opened(model).labels == ["apple", "camel", "dingo", "easel"]


def test_a_lesson_in_progress_is_finished_or_dropped_first(model: Path, before: Path) -> None:
    assert isinstance(learn(model, NAMES[5:6], stop=lambda: True)[-1], Stopped)
    with pytest.raises(EngramError, match=r"interrupted; finish it first, or drop it with drop_learning=True"):
        undo(model)
    undo(model, drop_learning=True)
    assert not has_learning(model)
    assert same(opened(model), opened(before))


def test_what_a_kill_left_of_the_lesson_does_not_come_back(before: Path, tmp_path: Path) -> None:
    path = copy(before, tmp_path / "m")
    learn(path, SECOND, stop=lambda: True)
    copy(path / "learning", tmp_path / "learning")
    learn(path, SECOND)
    copy(tmp_path / "learning", path / "learning")  # as a kill after the switch leaves it
    learn(path, SECOND, known="ignore")  # which is done already
    assert not has_learning(path)
    copy(tmp_path / "learning", path / "learning")
    undo(path)
    assert not has_learning(path)


@pytest.mark.parametrize("name", ["model.json", "weights.safetensors", "exemplars/00001/00002.png"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_damaged_state_before_harms_nobody_and_is_not_gone_back_to(
    name: str, how: str, after: Path, model: Path
) -> None:
    file = model / "generations" / "000001" / name
    damage(file) if how == "damaged" else file.unlink()
    assert same(opened(model), opened(after))
    known = read_manifest(model)
    assert (known["undo"] is None) == (name == "model.json")
    with pytest.raises(EngramError, match=f"{Path(name).name} is {how}"):
        undo(model)
    assert same(opened(model), opened(after))
    learn(model, NAMES[5:6])
    assert same(opened(copy(model, model.with_name("again"))), opened(model))
    assert undo(model).classes == 5


def test_a_damaged_model_can_go_back(before: Path, model: Path) -> None:
    damage(model / "generations" / "000002" / "model.json")
    with pytest.raises(EngramError, match="damaged"):
        opened(model)
    assert undo(model).classes == 3
    assert same(opened(model), opened(before))


@pytest.mark.parametrize("previous", [3, [], {}, {"generation": "../x", "digest": "0" * 32}, {"generation": "000001"}])
def test_a_pointer_that_lies_about_the_state_before_is_refused(previous: Any, model: Path) -> None:
    pointer = json.loads((model / "current").read_text())
    del pointer["checksum"]  # as early versions wrote it
    (model / "current").write_text(json.dumps({**pointer, "previous": previous}))
    for call in (opened, undo, read_manifest):
        with pytest.raises(EngramError, match="is damaged"):
            call(model)


@pytest.mark.parametrize("is_old", [False, True], ids=["with a checksum", "as early versions wrote it"])
def test_one_flipped_bit_of_the_pointer_deletes_nothing(is_old: bool, model: Path) -> None:
    pointer = json.loads((model / "current").read_text())
    if is_old:
        del pointer["checksum"]
    content, kept, read = json.dumps(pointer).encode(), generations(model), read_manifest(model)
    read_as_whole = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        (model / "current").write_bytes(flipped)
        with suppress(EngramError):
            writer.Writer(model, create=True).close()
        assert generations(model) == kept, bytes(flipped)
        with suppress(EngramError):
            found = read_manifest(model)
            assert {**found, "undo": None, "why_no_undo": None} == {**read, "undo": None, "why_no_undo": None}
            read_as_whole += 1
    # In an early pointer, damage in the name or checksum of the previous generation is found by undo only.
    assert read_as_whole <= (len(pointer["previous"]["generation"] + pointer["previous"]["digest"]) if is_old else 0)


@pytest.mark.parametrize("change", [{"generation": None}, {"generation": None, "digest": None}])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_pointer_that_names_no_generation_is_damaged_if_there_is_one(
    change: dict[str, Any], is_old: bool, model: Path
) -> None:
    pointer = json.loads((model / "current").read_text()) | change
    if is_old:
        pointer = {key: value for key, value in pointer.items() if key not in ("checksum", "previous")}
    (model / "current").write_text(json.dumps(pointer))
    for call in (opened, undo, lambda path: learn(path, NAMES[5:6])):
        with pytest.raises(EngramError, match="current is damaged"):
            call(model)
    assert generations(model) == ["000001", "000002"]


@pytest.mark.parametrize("make_stray", [Path.touch, Path.mkdir], ids=["file", "folder"])
@pytest.mark.parametrize("names", [("000003.part", "notes", "000003.0a1b2c3d.part"), ("000003",)])
def test_something_stray_beside_the_generations_stops_no_lesson(
    make_stray: Callable[[Path], None], names: tuple[str, ...], model: Path
) -> None:
    for name in names:
        make_stray(model / "generations" / name)
    learn(model, NAMES[5:6])
    assert len(opened(model).labels) == 6
    for name in names:
        is_ours = make_stray is Path.mkdir and name != "notes"
        assert (model / "generations" / name).exists() != is_ours or name == "000003"


def test_a_reader_whose_generation_was_made_anew_begins_again(
    model: Path, after: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram.models.store import generations as directory

    read, changed = directory.read_pointer, []

    def slowly(folder: Any) -> Any:
        found = read(folder)
        if not changed:
            changed.append(True)
            undo(model)
            learn(model, NAMES[5:6])
        return found

    monkeypatch.setattr(directory, "read_pointer", slowly)
    assert opened(model).labels == [*FIRST, "falcon"]
    assert generations(model) == GENERATIONS, "the number is used again"


def test_models_of_earlier_versions_have_nothing_to_undo_until_they_learn(tmp_path: Path) -> None:
    unpack_archive(Path(__file__).parent / "fixtures" / "model-format1.tar.xz", tmp_path)
    with pytest.raises(EngramError, match="nothing to undo: the version of engram that wrote it"):
        undo(tmp_path)
    kept = opened(tmp_path)
    images, labels = pictures(NAMES[:1], 4, size=16)
    classifier = IncrementalClassifier.load(tmp_path, device="cpu").set_params(epochs=1)
    classifier.partial_fit(images, labels).save(tmp_path)
    assert undo(tmp_path).gone == ["apple"]
    assert same(opened(tmp_path), kept)


def test_saving_keeps_what_a_lesson_can_go_back_from(model: Path, after: Path) -> None:
    images, labels = pictures(NAMES[5:6])
    classifier = IncrementalClassifier.load(model, device="cpu").set_params(epochs=1)
    classifier.partial_fit(images, labels).save(model)
    classifier.save(model)  # nothing happened since, and nothing is lost
    assert undo(model).gone == ["falcon"]
    assert same(opened(model), opened(after))
    classifier = IncrementalClassifier.load(model, device="cpu").set_params(epochs=1)
    classifier.partial_fit(images, labels).remove("apple").save(model)
    assert undo(model).back == ["apple"]
    assert same(opened(model), opened(after))
    classifier = IncrementalClassifier.load(model, device="cpu")
    classifier.remove("apple").save(model, undoable=False)
    assert len(generations(model)) == 1
    with pytest.raises(EngramError, match="something was removed"):
        undo(model)


def test_saving_something_else_keeps_nothing(model: Path, before: Path) -> None:
    other, _ = open_model(before, "cpu")
    save_model(other, model, overwrite=True)
    assert len(generations(model)) == 1
    with pytest.raises(EngramError, match="nothing to undo: it was saved as a whole"):
        undo(model)


class Killed(BaseException):
    """The end of a process, at which nothing more is done to its files."""


def killed_at(step: int, call: Callable[[], object]) -> bool:
    """Whether the call was killed, before the file system was asked to do something for that many times."""
    asked = 0

    def counting(do: Any) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked >= step:
                raise Killed
            return do(*given, **options)

        return counted

    changing = {writer: ("write_new", "sync_folder"), os: ("replace", "rename", "link"), shutil: ("rmtree",)}
    with pytest.MonkeyPatch.context() as patch:
        for place, names in changing.items():
            for name in names:
                patch.setattr(place, name, counting(getattr(place, name)))
        try:
            call()
        except Killed:
            return True
    return False


def known_and_scored(path: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The classes that a model knows, and its scores bit for bit."""
    found = opened(path)
    return found.labels, {by: values.tobytes() for by, values in scores(found).items()}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_kill_at_any_step_leaves_the_model_before_or_after(
    change: Callable[[Path], object], after: Path, tmp_path: Path
) -> None:
    whole = copy(after, tmp_path / "whole")
    change(whole)
    old, new, seen, step = known_and_scored(after), known_and_scored(whole), set(), 0
    is_killed = True
    while is_killed:
        step += 1 if step < 4 else 3
        path = copy(after, tmp_path / str(step))
        is_killed = killed_at(step, lambda path=path: change(path))
        found = known_and_scored(path)
        is_new = found == new
        assert is_new or found == old, step
        with writer.Writer(path):
            pass  # which cleans up
        assert generations(path) == (generations(whole) if is_new else GENERATIONS), step
        shutil.rmtree(path)
        seen.add((is_new, is_killed))
    assert {(False, True), (True, False)} <= seen


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_full_disk_changes_nothing(
    change: Callable[[Path], object], after: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0
    while True:
        path = copy(after, tmp_path / str(writes))
        with monkeypatch.context() as patch:
            full_after(writes, patch)
            try:
                change(path)
                break
            except EngramError as error:
                message = str(error)
        assert "the disk is full" in message
        assert everything(path) == everything(after)
        writes += 1
    assert writes >= 1


# Rename


def test_a_renamed_class_is_the_same_class(after: Path, model: Path) -> None:
    rename_class(model, "boat", "ship")
    ours, theirs = everything(model), everything(after)
    found, kept = files_of(ours, "000003"), files_of(theirs, "000002")
    assert found.keys() == kept.keys()
    assert [file for file in kept if found[file] != kept[file]] == ["model.json"]
    assert b"boat" not in found["model.json"]
    old, new = read_manifest(after), read_manifest(model)
    assert [known["label"] for known in new["classes"]] == ["apple", "ship", "camel", *SECOND]
    for known in old["classes"]:
        known["label"] = {"boat": "ship"}.get(known["label"], known["label"])
    for key in ("classes", "history", "stage_sizes", "config", "bytes"):
        assert new[key] == old[key], key
    done = undo(model)
    assert (done.what, done.gone, done.back, done.steps) == ("renamed", ["ship"], ["boat"], 1)
    assert same(opened(model), opened(after))
    assert undo(model).gone == [*SECOND]
    assert opened(model).labels == [*FIRST]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("boot", "ship", r"no class 'boot': did you mean 'boat'\?"),
        ("boat", "apple", "has a class 'apple' already"),
        ("boat", "Apple ", "has a class 'apple' already"),
        ("boat", "boat", "is called 'boat' already"),
        ("boat", b"ship", "cannot be saved"),
        ("boat", "\udc80", "cannot be saved"),
        ("boat", ["ship"], "must be hashable"),
    ],
)
def test_a_name_that_cannot_be_is_refused(old: Any, new: Any, sentence: str, after: Path, model: Path) -> None:
    with pytest.raises(EngramError, match=sentence):
        rename_class(model, old, new)
    assert everything(model) == everything(after)


def test_a_class_may_be_written_otherwise_or_be_of_another_kind(model: Path) -> None:
    for old, new in (("boat", "Boat"), ("apple", 3), (3, "3"), ("camel", ("x", None))):
        rename_class(model, old, new)
    assert opened(model).labels == ["3", "Boat", ("x", None), *SECOND]


def test_a_class_is_renamed_whatever_the_state_before(model: Path) -> None:
    damage(model / "generations" / "000001" / "weights.safetensors")
    rename_class(model, "boat", "ship")
    assert undo(model).back == ["boat"]
    with pytest.raises(EngramError, match=r"weights.safetensors is damaged"):
        undo(model)
    damage(model / "generations" / "000002" / "weights.safetensors")
    with pytest.raises(EngramError, match=r"weights.safetensors is damaged"):
        rename_class(model, "boat", "ship")


# Single images


def kept_of(path: Path, place: int) -> tuple[np.ndarray, np.ndarray]:
    """The exemplars and the held-out images of a class."""
    model = opened(path)
    assert model.learner is not None
    return model.learner.memory.of(place).pixels.numpy(), model.heldout.of(place).pixels.numpy()


def test_images_are_taken_out_of_a_model(after: Path, model: Path) -> None:
    (exemplars, held), others = kept_of(model, 1), pictures(NAMES[5:6], 2)[0]
    given = np.concatenate([exemplars[1:2], held[:1], others])
    done = remove_images(model, given)
    assert (done.given, done.found, done.exemplars, done.heldout) == (4, 2, {"boat": 1}, {"boat": 1})
    assert done.learned == {"boat": 1}
    assert not done.before, "what was before had nothing that is not there now"
    content = set(everything(model).values())
    assert not content & {png(image) for image in given}
    assert generations(model) == ["000003"], "what was before had them too"
    left = opened(model)
    assert [len(part) for part in kept_of(model, 1)] == [2, 1]
    assert np.array_equal(kept_of(model, 1)[0], exemplars[[0, 2]]), "best first, as before"
    was, now = scores(opened(after)), scores(left)
    assert np.array_equal(now["cnn"], was["cnn"])
    assert np.array_equal(np.delete(now["nme"], 1, axis=1), np.delete(was["nme"], 1, axis=1))
    assert left.learner is not None
    assert left.learner.class_means is not None
    slow = class_means(left.learner, left.engine)
    assert slow is not None
    assert torch.allclose(left.learner.class_means[1], slow[1], atol=1e-6)
    assert not np.array_equal(now["nme"][:, 1], was["nme"][:, 1])
    with pytest.raises(EngramError, match="nothing to undo: something was removed"):
        undo(model)
    learn(model, NAMES[5:6])


def test_what_the_model_has_not_kept_changes_nothing(after: Path, model: Path) -> None:
    done = remove_images(model, pictures(NAMES[5:6], 3)[0])
    assert (done.given, done.found, done.exemplars, done.heldout) == (3, 0, {}, {})
    assert everything(model) == everything(after)
    for wrong, sentence in ((np.zeros((1, 9, 9, 3), np.uint8), "this model's are 8x8"), ([], "at least one image")):
        with pytest.raises(EngramError, match=sentence):
            remove_images(model, wrong)
    assert everything(model) == everything(after)


def test_an_image_that_was_learned_and_not_kept_is_not_noted_any_more(after: Path, model: Path) -> None:
    kept = {image.tobytes() for part in kept_of(model, 1) for image in part}
    other = next(image for image in pictures(("boat",))[0] if image.tobytes() not in kept)
    was = opened(model).classes[1].digests
    done = remove_images(model, other[None])
    assert (done.found, done.exemplars, done.heldout, done.learned) == (1, {}, {}, {"boat": 1})
    now = opened(model).classes[1].digests
    assert digests_in(was) - digests_in(now) == {digest_of(other)}
    assert len(now) == len(was) - 8
    assert same(opened(model), opened(after))
    assert remove_images(model, other[None]).found == 0


def test_the_last_exemplar_of_a_class_stays(after: Path, model: Path) -> None:
    with pytest.raises(EngramError, match="all the exemplars of 'boat'; nothing was removed; remove the class"):
        remove_images(model, kept_of(model, 1)[0])
    assert everything(model) == everything(after)
    assert remove_images(model, kept_of(model, 1)[1]).heldout == {"boat": 2}
    assert read_manifest(model)["classes"][1]["accuracy"] == {}


@pytest.mark.parametrize("noted", [True, False], ids=["noted as learned", "of a version that noted nothing"])
def test_an_image_that_only_the_state_before_has_is_found(noted: bool, tmp_path: Path) -> None:
    path = make(tmp_path / "m", FIRST, config=tiny(memory="total=9"))
    if not noted:
        model = opened(path)
        model.classes = tuple(replace(known, digests=b"") for known in model.classes)
        save_model(model, path, overwrite=True)
    (before,) = generations(path)
    learn(path, SECOND)
    gone = pictures(FIRST)[0]
    model = opened(path)
    assert model.learner is not None
    samples = model.learner.memory.samples()
    assert samples is not None
    now = {image.numpy().tobytes() for image in samples.pixels}
    then = {content for name, content in everything(path).items() if f"/{before}/exemplars/" in name}
    only = np.stack([image for image in gone if image.tobytes() not in now and png(image) in then])
    done = remove_images(path, only[:1])
    assert (done.found, done.exemplars, done.learned, done.before) == (1, {}, {"apple": 1} if noted else {}, True)
    assert len(generations(path)) == 1
    assert same(opened(path), model)


def test_a_state_before_that_cannot_be_read_goes_whatever_image_does(model: Path) -> None:
    (model / "generations" / "000001" / "model.json").write_text("{}")
    done = remove_images(model, pictures(NAMES[6:7], 1)[0])
    assert (done.exemplars, done.heldout, done.learned, done.before) == ({}, {}, {}, True)
    assert generations(model) == ["000002"]


@pytest.mark.parametrize("kind", ["exemplars", "heldout"])
def test_a_damaged_picture_can_be_named_and_taken_out(kind: str, after: Path, model: Path) -> None:
    file = damage(model / "generations" / "000002" / kind / "00001" / "00001.png")
    with pytest.raises(EngramError, match="remove this image from the model with remove_images"):
        opened(model)
    done = remove_images(model, [file])
    assert (done.given, done.found) == (1, 1)
    assert {"exemplars": done.exemplars, "heldout": done.heldout}[kind] == {"boat": 1}
    assert np.array_equal(scores(opened(model))["cnn"], scores(opened(after))["cnn"])
    learn(model, NAMES[5:6])


def test_exemplars_whose_pixels_were_changed_cannot_be_found(tmp_path: Path) -> None:
    path = make(tmp_path / "m", FIRST, config=tiny("mnemonics", validation=0.25))
    with pytest.raises(EngramError, match="mnemonics changes the pixels of its exemplars"):
        remove_images(path, pictures(FIRST)[0])
    assert remove_images(path, [path / "generations/000001/exemplars/00000/00000.png"]).exemplars == {"apple": 1}


def test_kept_images_are_moved(after: Path, model: Path) -> None:
    (exemplars, held), others = kept_of(model, 0), kept_of(model, 1)
    done = move_images(model, np.concatenate([exemplars[1:2], held[:1], pictures(NAMES[5:6], 1)[0]]), "boat")
    assert (done.given, done.found) == (3, 2)
    assert (done.exemplars, done.heldout, done.learned) == ({"apple": 1}, {"apple": 1}, {"apple": 1})
    assert np.array_equal(kept_of(model, 0)[0], exemplars[[0, 2]])
    assert np.array_equal(kept_of(model, 1)[0], np.concatenate([others[0], exemplars[1:2]]))
    assert np.array_equal(kept_of(model, 1)[1], np.concatenate([others[1], held[:1]]))
    left, was = opened(model), opened(after)
    assert np.array_equal(scores(left)["cnn"], scores(was)["cnn"])
    assert left.learner is not None
    assert left.learner.class_means is not None
    slow = class_means(left.learner, left.engine)
    assert slow is not None
    assert torch.allclose(left.learner.class_means, slow, atol=1e-6)
    assert digest_of(exemplars[1]) in digests_in(left.classes[1].digests) - digests_in(left.classes[0].digests)
    learn(model, NAMES[5:6])
    for _ in range(2):
        undo(model)
    assert same(opened(model), was)


def test_what_cannot_be_moved_or_merged_is_refused_with_the_way(after: Path, model: Path) -> None:
    kept = {image.tobytes() for part in kept_of(model, 1) for image in part}
    other = next(image for image in pictures(("boat",))[0] if image.tobytes() not in kept)
    with pytest.raises(EngramError, match="kept no copy of 1 of these images"):
        move_images(model, other[None], "apple")
    with pytest.raises(EngramError, match="these are all the exemplars of 'apple'"):
        move_images(model, kept_of(model, 0)[0], "boat")
    with pytest.raises(EngramError, match="knows no class 'x'"):
        move_images(model, other[None], "x")
    with pytest.raises(EngramError, match="afc cannot merge classes that it has learned to tell apart; remove both"):
        merge_classes(model, "apple", "boat")
    assert everything(model) == everything(after)


def test_images_stay_while_a_lesson_is_in_progress(model: Path) -> None:
    learn(model, NAMES[5:6], stop=lambda: True)
    given = kept_of(model, 0)[1]
    with pytest.raises(EngramError, match="interrupted; finish it first"):
        remove_images(model, given)
    assert remove_images(model, given, drop_learning=True).found == 2
    assert not has_learning(model)


# On the command line


def test_undo_says_what_is_gone(engram: Engram, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = read_manifest(model)["history"][0]["date"][:10]
    assert f"back to lesson 1, 3 classes, of {day}; kept for that: " in engram("info", model).out
    assert json.loads(engram("info", model, "--json").out)["undo"]["classes"] == 3
    outcome = engram("undo", model)
    expected = f"the last lesson was undone; gone: dingo, easel; back to lesson 1, 3 classes, of {day}\n"
    assert (outcome.status, outcome.out, outcome.err) == (0, expected, "")
    assert "nothing to undo: there was no model before its first" in " ".join(engram("info", model).out.split())
    assert_refused(engram("undo", model), "nothing to undo: there was no model before its first lesson")
    assert_refused(engram("undo", "nowhere"), "there is no model at nowhere")
    assert_refused(engram("undo", model, "--quiet", "--json"), "--quiet and --json")


def test_undo_tells_programs(engram: Engram, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(model, NAMES[5:6], stop=lambda: True)
    assert_refused(engram("undo", model), "or drop it with --drop-learning")
    outcome = engram("undo", model, "--json", "--drop-learning")
    found = json.loads(outcome.out)
    assert (found["gone"], found["again"], found["classes"], found["lesson"]) == ([*SECOND], [], 3, 1)


def test_a_damaged_model_goes_back_by_command(engram: Engram, model: Path) -> None:
    damage(model / "generations" / "000002" / "model.json")
    assert "back to lesson 1, 3 classes" in engram("undo", model).out


@pytest.mark.parametrize(("typed", "flags", "classes"), [("y\n", [], 3), ("\n", [], 5), ("", ["--yes"], 3)])
def test_undo_asks_a_person(
    typed: str, flags: list[str], classes: int, engram: Engram, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard = io.StringIO(typed)
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    outcome = engram("undo", model, *flags)
    assert len(opened(model).labels) == classes
    assert outcome.status == int(classes == 5)
    assert ("permanently (back to lesson 1, 3 classes, of " in outcome.err) == (not flags)
    assert ("nothing was undone" in outcome.err) == (classes == 5)


def test_rename_by_command(engram: Engram, model: Path) -> None:
    outcome = engram("rename", model, "boat", "ship")
    assert (outcome.status, outcome.out) == (0, "boat is now called ship\n")
    assert json.loads(engram("rename", "--json", model, "--", "ship", "-x").out) == {"renamed": "ship", "to": "-x"}
    assert opened(model).labels == ["apple", "-x", "camel", *SECOND]
    assert_refused(engram("rename", model, "aple", "x"), "did you mean 'apple'?")
    assert_refused(engram("rename", model, "apple", "DINGO"), "has a class 'dingo' already")
    assert_refused(engram("rename", model, "apple", ""), "NEW is empty")
    assert_refused(engram("rename", model, "apple"), "NEW")
    learn(model, NAMES[5:6], stop=lambda: True)
    assert_refused(engram("rename", model, "apple", "pear"), "or drop it with --drop-learning")
    assert engram("rename", model, "apple", "pear", "--drop-learning", "--quiet").out == ""
    rename_class(model, "dingo", 7)
    rename_class(model, "easel", "x")
    learn(model, NAMES[5:6])
    rename_class(model, "falcon", "y")
    assert opened(model).labels == ["pear", "-x", "camel", 7, "x", "y"]


def test_a_name_of_two_classes_is_not_renamed(engram: Engram, tmp_path: Path) -> None:
    images, _ = pictures(FIRST, 2)
    list(learn_into("m{x}", images, [1, 1, "1", "1", "x", "x"], config=tiny(epochs=1), device="cpu"))
    call = "rename_class('m{x}', 1, 'y') or rename_class('m{x}', '1', 'y')"
    assert_refused(engram("rename", "m{x}", "1", "y"), "'1' is the name of 2 classes", call)
    rename_class("m{x}", 1, "y")
    assert opened(tmp_path / "m{x}").labels == ["y", "1", "x"]


def test_images_are_removed_by_command(engram: Engram, model: Path, tmp_path: Path) -> None:
    exemplars, held = kept_of(model, 1)
    (tmp_path / "withdrawn").mkdir()
    for number, image in enumerate([exemplars[0], held[0], pictures(NAMES[5:6], 1)[0][0]]):
        (tmp_path / "withdrawn" / f"{number}.png").write_bytes(png(image))
    none = engram("remove", model, "--images", "withdrawn/2.png")
    assert (none.status, none.out) == (1, "")
    assert none.err == "engram: the model has none of 1 image; nothing was removed\n"
    assert_refused(engram("remove", model, "--images", "nowhere.png"), "there is no file or folder nowhere.png")
    (tmp_path / "broken.png").write_bytes(b"x")
    assert_refused(engram("remove", model, "--images", "broken.png"), "broken.png cannot be read")
    outcome = engram("remove", model, "--images", "withdrawn")
    assert outcome.status == 0
    assert outcome.out.startswith("2 of 3 images were found\nremoved 1 exemplar and 1 held-out image of boat\n")
    assert "the network keeps in its weights what it learned" in outcome.out
    (tmp_path / "more.png").write_bytes(png(held[1]))
    found = json.loads(engram("remove", model, "--images", "--json", "more.png").out)
    assert found == {
        "given": 1,
        "found": 1,
        "exemplars": [],
        "heldout": [{"class": "boat", "images": 1}],
        "learned": [],
        "before": False,
    }


def test_images_may_be_named_on_standard_input_slowly(
    engram: Engram, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, held = kept_of(model, 1)
    (tmp_path / "it.png").write_bytes(png(held[0]))
    monkeypatch.setattr("engram.cli.commands.change_model.expand", lambda typed: iter([None, "it.png", None]))
    assert engram("remove", model, "--images", "-").out.startswith("1 of 1 images were found\n")


def test_an_emptied_folder_of_a_lesson_is_deleted(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:2])
    (path / "learning").mkdir()  # as a kill leaves it while a finished lesson's checkpoint is deleted
    learn(path, NAMES[:2])  # nothing is new
    assert not (path / "learning").exists()
