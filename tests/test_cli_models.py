"""`engram learn | predict | info | evaluate | remove` as a user types them, and what they say to a wrong input."""

from __future__ import annotations

import glob
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from engram import EngramError, IncrementalClassifier, read_manifest
from engram.cli import text
from engram.cli.commands.evaluate import matrix_table
from engram.cli.commands.predict import expand
from engram.cli.main import main
from engram.core.checkpoint import Checkpoint
from engram.data.decode.formats import EXTENSIONS
from engram.experiment.stage_work import StageWork
from engram.models.edit import save_model
from engram.models.model_config import default_epochs
from engram.models.prediction import best_positions
from engram.models.store.generations import Pointer
from engram.models.store.writer import Writer
from helpers import Engram, assert_refused, not_text, unpack_archive
from model_helpers import NAMES, everything, opened, pictures, same

FIRST, SECOND = NAMES[:3], NAMES[3:5]
OTHERS = f"engram: left out files that are not {', '.join(EXTENSIONS)}: "
QUICK = ("--epochs", "2", "--threads", "1", "--device", "cpu")


def folder(path: Path, names: tuple[str, ...], count: int = 10, seed: int = 0) -> Path:
    """A folder of class folders of PNG files."""
    images, labels = pictures(names, count, seed, size=16)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (path / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path / label / f"{number % count:03d}.png")
    return path


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """first/, second/ and test/."""
    root = tmp_path_factory.mktemp("photos")
    folder(root / "first", FIRST)
    folder(root / "second", SECOND)
    folder(root / "test", NAMES[:5], count=4, seed=7)
    return root


@pytest.fixture(scope="session")
def taught(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five classes; tests copy it."""
    place = tmp_path_factory.mktemp("taught") / "model"
    for lesson in ("first", "second"):
        assert main(["learn", str(place), str(photos / lesson), *QUICK[2:], "--epochs", "8", "--quiet"]) == 0
    return place


@pytest.fixture
def model(taught: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(taught, tmp_path / "model"))


# learn


def test_learn_makes_a_model_and_teaches_it_more(engram: Engram, photos: Path) -> None:
    made = engram("learn", "model", photos / "first", *QUICK)
    assert made.status == 0, made
    assert "30 images of 3 classes: apple, boat, camel" in made.out
    assert "a new model in model: afc, resnet10, 16x16 pixels, memory per_class=20, 20 % held out" in made.out
    assert "classes learned now" in made.out
    assert "of these cnn" not in made.out, "the table says it"
    assert "balanced" in made.out
    assert "forgotten" not in made.out

    more = engram("learn", "model", photos / "second", *QUICK, "--by-class")
    assert more.status == 0, more
    assert more.out.endswith("\nnext: engram predict model PATH\n")
    for words in ("old classes, before", "old classes, now", "forgotten, points", "before %", "dingo"):
        assert words in more.out
    manifest = read_manifest("model")
    assert [known["label"] for known in manifest["classes"]] == [*FIRST, *SECOND]
    assert [(known["images"], known["heldout"]) for known in manifest["classes"]] == [(8, 2)] * 5
    assert [entry["epochs"] for entry in manifest["history"]] == [2, 2]


def test_learn_tells_programs_what_it_tells_people(engram: Engram, photos: Path, model: Path) -> None:
    folder(photos.parent / "sixth", ("apple", "falcon"), count=4)
    outcome = engram("learn", model, photos.parent / "sixth", *QUICK, "--json")
    assert outcome.status == 0
    assert outcome.err == (
        "engram: left out what the model knows already: 'apple' (--more-of-known)\n"
        "engram: classes with fewer than 5 images are learned badly, and none of them is held out to measure "
        "accuracy: 'falcon' (4)\n"
    )
    last = outcome.events()[-1]
    assert (last["event"], last["new"], last["num_classes"]) == ("learned", ["falcon"], 6)
    assert last["before"].keys() == last["after"].keys() == {"cnn", "nme"}
    assert last["new_accuracy"] == last["by_class"][-1]["after"] == {}
    quiet = engram("learn", "other", photos / "first", *QUICK, "--quiet")
    assert quiet.out.count("\n") == 1
    assert quiet.out.startswith("learned apple, boat, camel in ")


def test_the_number_of_images_decides_the_epochs(engram: Engram, tmp_path: Path) -> None:
    few, more = folder(tmp_path / "few", FIRST[:2], count=2), folder(tmp_path / "more", SECOND[:1], count=2)
    flags = ("--device", "cpu", "--threads", "1", "--quiet")
    assert engram("learn", "model", few, *flags, "--image-size", "8").status == 0
    assert engram("learn", "model", more, *flags).status == 0
    assert [entry["epochs"] for entry in read_manifest("model")["history"]] == [60, 60]
    assert [default_epochs(count, (32, 32), "cpu") for count in (2_000, 4_000, 50_000)] == [60, 30, 15]
    assert default_epochs(2_000, (64, 64), "cpu") == 15


def test_a_lesson_given_again_is_done_already(engram: Engram, photos: Path, model: Path, tmp_path: Path) -> None:
    """As by a command that was killed once its lesson was in the model, or that is given every night."""
    before = everything(model)
    again = engram("learn", model, photos / "second", *QUICK)
    assert (again.status, again.err) == (0, "")
    assert re.fullmatch(
        r"dingo, easel: learned before \(the last lesson was on \S+ \S+\); nothing was done\n", again.out
    )
    told = engram("learn", model, photos / "second", *QUICK, "--json").events()
    assert [(event["event"], event["classes"]) for event in told] == [("learned_before", ["dingo", "easel"])]
    assert engram("learn", model, photos / "first", *QUICK).out.startswith("apple, boat, camel: learned before (")
    other = Path(shutil.copytree(photos / "second", tmp_path / "other"))
    shutil.copytree(photos / "first", other, dirs_exist_ok=True)
    assert engram("learn", model, other, *QUICK).out.startswith("apple, boat, camel, dingo, easel: learned before (")
    assert everything(model) == before
    Image.new("RGB", (16, 16), (9, 99, 199)).save(other / "dingo" / "003.png")
    assert_refused(
        engram("learn", model, other, *QUICK), "knows 'apple', 'boat', 'camel', 'dingo', 'easel'", "--more-of-known"
    )
    (other / "dingo" / "003.png").write_bytes(b"")
    assert_refused(engram("learn", model, other, *QUICK), "dingo/003.png cannot be read", "--skip-bad")
    for file in (other / "easel").iterdir():
        file.write_bytes(b"")
    compared = engram("learn", model, other, *QUICK, "--skip-bad")
    assert (compared.status, compared.out.split(":")[0]) == (0, "apple, boat, camel, dingo"), "of easel it saw nothing"
    assert "easel/000.png cannot be read" in compared.err


def test_what_a_kill_left_goes_with_the_same_command(engram: Engram, photos: Path, model: Path) -> None:
    generations = model / "generations"
    assert engram("remove", model, "boat", "--yes", "--no-undo").status == 0
    (left,) = generations.iterdir()
    again = ["learn", model, photos / "second", *QUICK]
    for command, status in ((["remove", model, "boat", "--yes"], 2), (["undo", model, "--yes"], 2), (again, 0)):
        stray = Path(shutil.copytree(left, generations / "000099"))  # as if the kill came before it was deleted
        (stray / "boat").write_text("what was removed")
        assert engram(*command).status == status
        assert list(generations.iterdir()) == [left], command[0]


def test_known_classes_are_left_out_or_learned_again(engram: Engram, model: Path, tmp_path: Path) -> None:
    before = opened(model)
    others = folder(tmp_path / "others", FIRST, count=6, seed=4)
    assert_refused(engram("learn", model, others, *QUICK), "'apple', 'boat', 'camel'", "--more-of-known")
    assert same(opened(model), before)
    both = folder(tmp_path / "both", ("apple", "goose"), count=6, seed=3)
    outcome = engram("learn", model, both, *QUICK)
    assert outcome.status == 0
    assert "left out what the model knows already: 'apple'" in outcome.err
    assert opened(model).labels == [*NAMES[:5], "goose"]
    again = engram("learn", model, both, *QUICK, "--more-of-known")
    assert again.status == 0
    assert "learned again apple, goose" in again.out
    for words in ("learned again, before", "learned again, now"):
        assert words in again.out
    assert "classes learned now" not in again.out
    assert opened(model).labels == [*NAMES[1:5], "apple", "goose"]


def test_a_lesson_that_costs_old_classes_much_says_so(engram: Engram, photos: Path, tmp_path: Path) -> None:
    flags = ("--epochs", "8", "--threads", "1", "--device", "cpu", "--quiet")
    assert engram("learn", "model", photos / "first", "--method", "naive", *flags).err == ""
    told = engram("learn", "model", photos / "second", *flags)
    entry = read_manifest("model")["history"][1]
    said = f"cnn from {entry['before']['cnn']:.1f} to {entry['after']['cnn']:.1f} %"
    assert told.status == 0
    assert f"engram: the lesson lowered the held-out accuracy of the old classes ({said}" in told.err
    assert " held-out images); take it back" in told.err
    assert "with more --epochs, or start a model with more --memory\n" in told.err
    few = folder(tmp_path / "few", SECOND[:1], count=4, seed=3)
    again = engram("learn", "model", few, "--more-of-known", *flags, "--no-undo")
    assert again.status == 0
    assert "none of them is held out" not in again.err, "they have held-out images from before"
    assert "take it back" not in again.err


def test_a_lesson_that_is_running_is_not_called_interrupted(engram: Engram, model: Path, photos: Path) -> None:
    with Writer(model) as writer:
        writer.save_learning(Checkpoint({}, {}))
        said = engram("info", model).out
        assert "another process is learning here now" in said
        assert "interrupted" not in said
        plain = json.loads(engram("info", model, "--json").out)
        assert (plain["changing_now"], plain["learning_interrupted"]) == (True, False)
    assert "learning was interrupted here" in engram("info", model).out


def test_a_run_directory_is_not_called_a_damaged_model(
    engram: Engram, model: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    for command in (["info", "run"], ["undo", "run"]):
        assert_refused(engram(*command), "run is a run directory, not a model", "engram report run", "--from run")
    for command in (["predict", "run", photos], ["export", "run", "x.onnx"]):  # which take a run, but not a damaged one
        assert_refused(engram(*command), "run/run.json cannot be used: format is missing")
    assert_refused(engram("learn", "run", photos / "first"), "run is a run directory, not a model")
    assert_refused(engram("export", tmp_path, "x.onnx"), f"{tmp_path} is a folder of runs", f"such as {tmp_path}/run")
    for command in ("report", "resume"):
        assert_refused(engram(command, model), "is a model, not a run directory", f"engram info {model}")


def test_names_of_classes_cannot_write_on_the_terminal(engram: Engram, tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", FIRST[:2], count=4)
    (root / "apple").rename(root / "a\x1b[31m")
    said = engram("learn", "model", "photos", *QUICK, "--by-class")
    assert said.status == 0
    assert "\x1b" not in said.out + said.err
    assert "learned a\\x1b[31m, boat" in said.out
    again = engram("learn", "model", "photos", *QUICK)
    assert "\x1b" not in again.out + again.err


def test_epochs_that_were_set_for_good_are_those_of_every_lesson(engram: Engram, photos: Path, tmp_path: Path) -> None:
    small = ["--backbone", "resnet10", "--method", "replay", "--set", "train.epochs=2", "--quiet"]
    assert engram("learn", "model", photos / "first", *small).status == 0
    assert engram("learn", "model", folder(tmp_path / "more", ("goose",), count=4), "--quiet").status == 0
    assert [entry["epochs"] for entry in read_manifest("model")["history"]] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--method", "icarl"], "--method afc"),
        (["--backbone", "resnet32"], "--backbone resnet10"),
        (["--image-size", "32"], "--image-size 16"),
        (["--memory", "total=50"], "--memory per_class=20"),
        (["--holdout", "0.5"], "--holdout 0.2"),
        (["--seed", "4"], "--seed 1"),
        (["--no-mirror"], "--no-mirror"),
        (["--set", "train.lr=0.2"], "--set"),
    ],
)
def test_what_was_chosen_once_is_kept(
    flags: list[str], word: str, engram: Engram, taught: Path, photos: Path, tmp_path: Path
) -> None:
    more = folder(tmp_path / "more", ("goose",), count=4)
    assert_refused(engram("learn", taught, more, *flags), word, "cannot be changed")


def test_flags_reach_a_new_model(engram: Engram, photos: Path) -> None:
    flags = ["--method", "icarl", "--backbone", "resnet10", "--image-size", "8", "--memory", "total=9", "--seed", "3"]
    flags += ["--holdout", "0", "--no-mirror", "--set", "train.lr=0.5"]
    assert engram("learn", "model", photos / "first", *QUICK, *flags).status == 0
    config = read_manifest("model")["config"]
    assert (config["method"], config["image_size"], config["seed"], config["validation"]) == ("icarl", [8, 8], 3, 0)
    assert (config["memory"]["budget"], config["memory"]["size"]) == ("total", 9)
    assert config["settings"]["train"]["lr"] == 0.5
    assert not config["augmentation"]["flip"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["learn", "model"], ["needs IMAGES"]),
        (["learn", "model", "nowhere"], ["no folder nowhere"]),
        (["learn", "model", "FIRST", "--epochs", "2", "--minutes", "1"], ["--epochs and --minutes"]),
        (["learn", "model", "FIRST", "--epochs", "0"], ["--epochs", "0"]),
        (["learn", "model", "FIRST", "--minutes", "0"], ["--minutes", "0"]),
        (["learn", "model", "FIRST", "--holdout", "1"], ["--holdout", "1"]),
        (["learn", "model", "FIRST", "--image-size", "4"], ["--image-size", "4"]),
        (["learn", "model", "FIRST", "--image-size", "5000"], ["--image-size must be 8 to 1024 pixels"]),
        (["learn", "model", "FIRST", "--seed", "99999999999999999999"], ["too large for a model"]),
        (["learn", "model", "FIRST", "--memory", "total=99999999999999999999"], ["too large for a model"]),
        (["learn", "model", "FIRST", "--method", "afd"], ["did you mean 'afc'?"]),
        (["learn", "model", "FIRST", "--method", "AFC"], ["did you mean 'afc'?"]),
        (["learn", "model", "FIRST", "--backbone", "resnet11"], ["did you mean"]),
        (["learn", "model", "FIRST", "--memory", "lots"], ["per_class=K"]),
        (["learn", "model", "FIRST", "--set", "train.rl=1"], ["'train.rl'", "valid names: ", " train.lr,"]),
        (["learn", "model", "FIRST", "--set", "train.epochs=0"], ["train.epochs must be at least 1, got 0"]),
        (["learn", "model", "FIRST", "--set", "train.lr"], ["KEY=VALUE"]),
        (["learn", "model", "FIRST", "--quiet", "--json"], ["--quiet and --json"]),
        (["learn", "FIRST", "FIRST"], ["not a model directory"]),
        (["learn", "MODEL/current", "FIRST"], ["is a file, and a model is a directory"]),
        (["predict", "nowhere", "x.png"], ["x.png"]),
        (["predict", "nowhere", "FIRST"], ["no model at nowhere"]),
        (["predict", "MODEL"], ["needs PATH"]),
        (["predict", "MODEL", "FIRST", "--top", "0"], ["--top"]),
        (["predict", "MODEL", "FIRST", "--by", "knn"], ["--by", "did you mean 'cnn'?"]),
        (["predict", "MODEL", "nothing/*.png"], ["nothing matches"]),
        (["info", "FIRST"], ["not a model directory"]),
        (["evaluate", "MODEL", "FIRST", "--report", "x.txt"], [".html"]),
        (["remove", "MODEL"], ["needs CLASS"]),
        (["remove", "MODEL", "--", "--yes"], ["no class '--yes'"]),
        (["learn", "model", ""], ["IMAGES is empty"]),
        (["predict", "", "FIRST"], ["MODEL is empty"]),
        (["remove", "MODEL", "appel"], ["did you mean 'apple'?"]),
        (["export", "MODEL", "x.onyx"], [".onnx"]),
        (["predict", "MODEL", "FIRST", "--threads", "99999"], ["--threads must be at least 1 and at most 1024"]),
    ],
)
def test_a_wrong_input_gets_one_sentence(
    arguments: list[str], words: list[str], engram: Engram, taught: Path, photos: Path, tmp_path: Path
) -> None:
    before = everything(taught)
    places = {"FIRST": str(photos / "first"), "MODEL": str(taught)}
    typed = [re.sub("FIRST|MODEL", lambda match: places[match[0]], text) for text in arguments]
    assert_refused(engram(*typed), *words)
    assert everything(taught) == before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_splits_says_which_to_give(engram: Engram, tmp_path: Path) -> None:
    folder(tmp_path / "data" / "train", FIRST)
    folder(tmp_path / "data" / "test", FIRST)
    assert_refused(engram("learn", "model", "data"), "give", "such as data/train")


@pytest.mark.parametrize(
    ("places", "meant"),
    [
        (["set"], "photos/set"),
        (["set/train", "set/test"], "photos/set/train"),
        (["deep/er/Train", "deep/er/val"], "photos/deep/er/Train"),
        (["test", "training"], "photos/training"),
    ],
)
def test_folders_of_class_folders_are_not_taken_for_classes(
    places: list[str], meant: str, engram: Engram, model: Path, tmp_path: Path
) -> None:
    for place in places:
        folder(tmp_path / "photos" / place, FIRST, count=2)
    for name in ("new", model):
        assert_refused(engram("learn", name, "photos", *QUICK), "folder of class folders", f"give {meant},")
    assert not (tmp_path / "new").exists()


def test_folders_of_lessons_are_not_taken_for_classes(engram: Engram, model: Path, tmp_path: Path) -> None:
    folder(tmp_path / "photos" / "first", NAMES[:3], count=2)
    folder(tmp_path / "photos" / "later", NAMES[3:4], count=2)
    for name in ("new", model):
        refused = engram("learn", name, "photos", *QUICK)
        assert_refused(refused, "photos/first,", "or, if they are groups of its images, give --group-by folder")
    for of in ("none", model):
        assert "folder of class folders" in engram("check", of, "photos").err
    assert_refused(engram("evaluate", model, "photos"), "folder of class folders", "give photos/first,")
    assert engram("learn", "new", "photos", "--group-by", "folder", *QUICK).status == 0
    assert opened(tmp_path / "new").labels == ["first", "later"]


def test_a_model_is_not_taken_for_images(engram: Engram, photos: Path, taught: Path, tmp_path: Path) -> None:
    for command in ("learn", "evaluate"):
        assert_refused(engram(command, photos / "first", taught), "is a model", f"engram {command} MODEL IMAGES")
    root = Path(shutil.copytree(photos / "first", tmp_path / "photos"))
    for place in ("photos/model", "photos/apple/model"):
        assert_refused(engram("learn", place, "photos", *QUICK), place, "choose a path outside")
        assert not (tmp_path / place).exists()
    assert engram("learn", "photos/.model", "photos", *QUICK).status == 0
    assert opened(root / ".model").labels == [*FIRST]
    shutil.copytree(taught, root / "old")
    assert_refused(engram("learn", "new", "photos", *QUICK), "photos/old is a model, not a class folder")


def test_classes_may_have_their_images_by_year(engram: Engram, tmp_path: Path) -> None:
    for name in FIRST:
        for year in ("2025", "2026"):
            folder(tmp_path / "years" / year, FIRST, count=3)
            (tmp_path / "years" / year / name).rename(tmp_path / "images")
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "images").rename(tmp_path / "photos" / name / year)
    assert engram("learn", "model", "photos", *QUICK).status == 0
    assert opened(tmp_path / "model").labels == [*FIRST]


def test_a_class_may_have_its_images_in_a_folder_within(engram: Engram, tmp_path: Path) -> None:
    folder(tmp_path / "photos", FIRST)
    for name in FIRST:  # as Tiny-ImageNet has them
        (tmp_path / "photos" / name).rename(tmp_path / "images")
        (tmp_path / "photos" / name).mkdir()
        (tmp_path / "images").rename(tmp_path / "photos" / name / "images")
    assert engram("learn", "model", "photos", *QUICK).status == 0
    assert opened(tmp_path / "model").labels == [*FIRST]


def test_learn_says_what_a_lesson_lacks(engram: Engram, tmp_path: Path) -> None:
    alone = engram("learn", "model", folder(tmp_path / "alone", FIRST[:1], count=6), *QUICK)
    assert alone.status == 0
    assert alone.err == "engram: with a single class there is nothing to tell apart; learn a second one too\n"
    assert "; 1 class known, " in alone.out
    few = folder(tmp_path / "few", NAMES[1:7], count=2)
    folder(few, ("dingo",), count=5)
    more = engram("learn", "model", few, *QUICK)
    assert more.err == (
        "engram: classes with fewer than 5 images are learned badly, and none of them is held out to measure "
        "accuracy: 'boat' (2), 'camel' (2), 'easel' (2), 'falcon' (2), 'goose' (2)\n"
    )
    classes = read_manifest("model")["classes"]
    counts = {known["label"]: (known["images"], known["heldout"], bool(known["accuracy"])) for known in classes}
    assert counts["boat"] == (2, 0, False)
    assert counts["dingo"] == (4, 1, True)
    assert read_manifest("model")["history"][1]["new"] == classes[3]["accuracy"], "the mean of what was measured"
    assert " boat 2 2 2 0 - -" in " ".join(engram("info", "model").out.split())
    folder(tmp_path / "six", NAMES[:6], count=1)
    six = engram("learn", "other", "six", *QUICK)
    assert "'easel' (1) and 1 more\n" in six.err


def test_a_class_folder_that_was_renamed_is_noticed(engram: Engram, photos: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "first" / "apple", tmp_path / "more" / "apfel")
    quiet = engram("learn", model, "more", *QUICK, "--quiet")
    assert quiet.status == 0
    assert quiet.err.startswith(
        "engram: the same pictures in two classes (a folder renamed?): 10 images of 'apfel' also in 'apple'; "
        "2 held out before and not learned from, 8 learned under each name and not held out: "
        "'more/apfel/000.png', 'more/apfel/001.png', 'more/apfel/002.png' and 7 more\n"
    )
    assert "apfel" in engram("info", model).out
    known = read_manifest(model)["classes"][-1]
    assert (known["images"], known["heldout"], known["accuracy"]) == (8, 0, {})


def test_what_is_passed_over_is_named(engram: Engram, taught: Path, tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", FIRST, count=5, seed=1)
    for name in ("apple/moving.svg", "boat/deep/phone.HEIC", "camel/.hidden", "notes.txt", "loose.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    said = (
        f"{OTHERS}apple/moving.svg, boat/deep/phone.HEIC; to read HEIC, pip install pillow-heif\n"
        "engram: left out images that are not in a class folder: loose.png\n"
    )
    assert engram("learn", "model", "photos", *QUICK).err == said
    assert engram("evaluate", taught, "photos", "--quiet").err == said


def test_predict_counts_what_it_passes_over_in_folders(engram: Engram, taught: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    picture = Image.fromarray(pictures(("apple",), 1)[0][0])
    for name in ("a.jpg", "b.jfif", "c.JPE", "noext"):
        picture.save(inbox / name, "JPEG")
    for name in ("anim.svg", "t.raw", "u.RAW", ".hidden.svg"):
        (inbox / name).write_bytes(b"x")
    outcome = engram("predict", taught, "inbox")
    assert (outcome.status, outcome.err) == (0, f"{OTHERS}2 .raw, 1 .svg, 1 without an extension\n")
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == ["inbox/a.jpg", "inbox/b.jfif", "inbox/c.JPE"]
    assert engram("predict", taught, "inbox/noext", "inbox/a.jpg").err == "", "a file that is named is read"
    for name in ("a.jpg", "b.jfif", "c.JPE"):
        (inbox / name).unlink()
    nothing = engram("predict", taught, "inbox")
    assert (nothing.status, nothing.err.splitlines()[1]) == (2, "engram: no images found in inbox")


def test_names_that_look_alike_are_told(engram: Engram, tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", FIRST, count=5)
    (root / "camel").rename(root / "caf\u00e9")
    (root / "boat").rename(root / "Apple")
    said = "engram: {} are different classes; if they should be one, give them one name\n"
    assert engram("learn", "model", "photos", *QUICK).err == said.format("'Apple' and 'apple'")
    more = folder(tmp_path / "more", FIRST[:1], count=5)
    (more / "apple").rename(more / "cafe\u0301")
    assert engram("learn", "model", "more", *QUICK).err == said.format(r"'caf\xe9' and 'cafe\u0301'")
    spaced = folder(tmp_path / "spaced", FIRST[1:2], count=5)
    (spaced / "boat").rename(spaced / "apple ")
    assert said.format("'Apple' and 'apple' and 'apple '") in engram("learn", "model", "spaced", *QUICK).err


def test_a_name_of_two_classes_is_refused(engram: Engram, tmp_path: Path) -> None:
    images, names = pictures(FIRST, 4, size=16)
    labels = [{"apple": 1, "boat": "1", "camel": "dog"}[name] for name in names]
    with pytest.warns(UserWarning, match="1 and '1' are different classes; if they should be one"):
        IncrementalClassifier(epochs=1, memory=2, device="cpu").fit(images, labels).save("m")
    assert_refused(
        engram("remove", "m", "1"), "'1' is the name of 2 classes", "remove_class('m', 1) or remove_class('m', '1')"
    )
    assert opened(tmp_path / "m").labels == [1, "1", "dog"]
    with pytest.warns(UserWarning, match="'dog' and 'Dog' are different"):
        IncrementalClassifier.load("m", device="cpu").partial_fit(images[:4], ["Dog"] * 4)


def test_folders_beside_labels_that_are_numbers_are_text(engram: Engram, tmp_path: Path) -> None:
    images, names = pictures(FIRST, 6, size=16)
    numbers = [FIRST.index(name) for name in names]
    IncrementalClassifier(epochs=1, memory=2, device="cpu").fit(images, numbers).save("m")
    folder(tmp_path / "photos", ("camel", "dingo"), count=6)
    for name, number in (("camel", "2"), ("dingo", "7")):
        (tmp_path / "photos" / name).rename(tmp_path / "photos" / number)
    outcome = engram("learn", "m", "photos", "--epochs", "1", "--device", "cpu", "--quiet")
    assert outcome.status == 0
    assert "engram: the model's labels are not text, but these are: '7'" in outcome.err.splitlines()
    assert opened(tmp_path / "m").labels == [0, 1, 2, "7"]
    folder(tmp_path / "more", ("easel",), count=6)
    assert "not text" not in engram("learn", "m", "more", "--epochs", "1", "--device", "cpu", "--quiet").err


def test_skip_bad_passes_over_empty_class_folders(engram: Engram, tmp_path: Path) -> None:
    folder(tmp_path / "photos", FIRST, count=6)
    (tmp_path / "photos" / "goose").mkdir()
    (tmp_path / "photos" / "goose" / "notes.txt").write_text("none yet")
    refused = engram("learn", "model", "photos", *QUICK)
    assert_refused(refused, "goose has files of other kinds only (.txt)", "(.png, .jpg", "--skip-bad")
    outcome = engram("learn", "model", "photos", *QUICK, "--skip-bad")
    assert outcome.status == 0
    assert outcome.err.splitlines()[1:] == ["engram: left out class folders that have no image: goose"]
    assert opened(tmp_path / "model").labels == [*FIRST]
    (tmp_path / "none" / "goose").mkdir(parents=True)
    assert_refused(engram("learn", "other", "none", *QUICK, "--skip-bad"), "goose has no image")


def test_folders_without_images_do_not_stop_a_lesson(engram: Engram, tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", FIRST, count=6)
    for name in ("__MACOSX/apple/._000.png", ".thumbnails/000.png", "boat/__MACOSX/000.png"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x")
    (root / "goose").mkdir()
    outcome = engram("learn", "model", "photos", *QUICK)
    assert (outcome.status, outcome.err) == (0, "engram: left out class folders that have no image: goose\n")
    assert opened(tmp_path / "model").labels == [*FIRST]


def test_what_is_not_a_folder_of_images_is_said_to_be(engram: Engram, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a.png,cat")
    assert_refused(engram("learn", "model", "labels.txt"), "labels.txt is a file; give a folder with one folder")
    (tmp_path / "labels.xlsx").write_text("PK")
    assert_refused(engram("learn", "model", "labels.xlsx"), "labels.xlsx is a file; give a folder", "saved as CSV")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for name in ("a.JXL", "b.svg", "c.raw", "d"):
        (tmp_path / "photos" / "cat" / name).write_bytes(b"x")
    for command in (["learn", "model", "photos"], ["evaluate", "model", "photos"]):
        assert_refused(engram(*command), "files of other kinds only (no extension, .jxl, .raw, .svg)", ".png, .jpg")
    assert not (tmp_path / "model").exists()


def test_an_exported_file_is_not_taken_for_a_model(engram: Engram, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"x")
    for command in (["info", "m.onnx"], ["evaluate", "m.onnx", photos / "test"]):
        assert_refused(engram(*command), "m.onnx is a file, and a model is a directory; only 'engram predict' takes")


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    engram: Engram, taught: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: object) -> None:
        raise AssertionError("worked")

    monkeypatch.setattr("engram.cli.commands.evaluate._evaluate", too_early)
    monkeypatch.setattr("engram.cli.commands.check.check_images", too_early)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    for command in ("evaluate", "check"):
        for page in ("file/page.html", "folder.html"):
            refused = engram(command, taught, photos / "test", "--report", page)
            assert_refused(refused, f"the report {page} cannot be written")


def test_minutes_that_are_too_few_are_said_to_be(engram: Engram, photos: Path) -> None:
    flags = ("--minutes", "0.000001", "--threads", "1", "--device", "cpu", "--image-size", "8")
    outcome = engram("learn", "model", photos / "first", *flags)
    assert outcome.status == 0
    said = r"even one epoch does not fit into 1e-06 minutes: it takes about \d+\.\d s and is done anyway"
    assert re.search(said, outcome.out)
    quiet = engram("learn", "other", photos / "first", *flags, "--quiet")
    assert re.fullmatch(f"engram: {said}\n", quiet.err)


def test_minutes_become_epochs_that_fit(engram: Engram, photos: Path) -> None:
    started = time.monotonic()
    outcome = engram("learn", "model", photos / "first", "--minutes", "0.1", "--threads", "1", "--device", "cpu")
    assert outcome.status == 0, outcome
    assert "fit into 0.1 minutes" in outcome.out
    (entry,) = read_manifest("model")["history"]
    assert 1 <= entry["epochs"] <= 300
    assert entry["seconds"] < 12  # twice the time there was: the machine may be busy with other things
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("length", [("--epochs", "60"), ("--minutes", "0.1")], ids=["epochs", "minutes"])
def test_ctrl_c_saves_and_the_same_command_goes_on(
    length: tuple[str, str], engram: Engram, photos: Path, tmp_path: Path
) -> None:
    command = ["learn", "model", str(photos / "first"), *length, "--threads", "1", "--device", "cpu"]
    program = [sys.executable, "-m", "engram", *command, "--json"]
    process = subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "progress":
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert json.loads(rest.splitlines()[-1])["event"] == "stopped"
    again = engram(*command)
    assert again.status == 0, again
    assert "learning was interrupted here; it continues from its checkpoint" in again.out
    if length[0] == "--epochs":
        assert engram(command[0], "whole", *command[2:]).status == 0
        assert same(opened(tmp_path / "model"), opened(tmp_path / "whole"))


def on_terminal(command: list[str], cwd: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a terminal of its own, and the other end of that; it is training."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    while b"epoch" not in seen:
        seen += os.read(ours, 4096)
    return process, ours


@pytest.mark.parametrize("late", [False, True], ids=["told at once", "told late"])
def test_a_terminal_that_closes_has_the_lesson_saved(
    engram: Engram, photos: Path, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["learn", "model", str(photos / "first"), "--epochs", "300", "--threads", "1", "--device", "cpu"]
    command += ["--method", "afc"]  # without, a line about pretrained weights names --epochs before training begins
    process, terminal = on_terminal([sys.executable, "-m", "engram", *command], tmp_path)
    if not late:
        process.send_signal(signal.SIGHUP)
    os.close(terminal)
    if late:
        time.sleep(0.5)  # what it shows meanwhile has nowhere to go
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGHUP)  # of the shell, and of the system
    assert process.wait(60) == 129
    monkeypatch.setattr("engram.cli.signals.Interrupt.__call__", lambda self: True)  # a step of the rest is enough
    again = engram(*command)
    assert again.status == 130, again
    assert "learning was interrupted here; it continues from its checkpoint" in again.out


def test_nohup_has_a_lesson_go_on_to_its_end(photos: Path, tmp_path: Path) -> None:
    command = ["learn", "model", str(photos / "first"), "--epochs", "60", "--threads", "1", "--device", "cpu"]
    command += ["--method", "afc"]
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    ignoring += "from engram.__main__ import program; program()"
    process, terminal = on_terminal([sys.executable, "-c", ignoring, *command], tmp_path)
    process.send_signal(signal.SIGHUP)
    with suppress(OSError):  # all there is to read, until it ends
        while os.read(terminal, 4096):
            pass
    os.close(terminal)
    assert process.wait(120) == 0


def test_other_images_are_refused_until_the_lesson_is_finished_or_dropped(
    engram: Engram, photos: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sixth, seventh = folder(tmp_path / "sixth", ("falcon",)), folder(tmp_path / "seventh", ("goose",))
    monkeypatch.setattr("engram.cli.signals.Interrupt.__call__", lambda self: True)
    stopped = engram("learn", model, sixth, *QUICK)
    assert stopped.status == 130
    assert "saved; the model did not change. To continue, run the same command:" in stopped.out
    assert f"engram learn {model} {sixth} --epochs 2" in stopped.out
    begun = engram("learn", model, sixth, *QUICK, "--restart")
    assert f"without --restart:\nengram learn {model} {sixth} {' '.join(QUICK)}\n" in begun.out
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "learning was interrupted here" in engram("info", model).out
    assert_refused(
        engram("learn", model, seventh, *QUICK), "not the same images", "drop it with --restart to start again"
    )
    assert_refused(engram("remove", model, "apple"), "interrupted", "or drop it with --drop-learning\n")
    assert engram("learn", model, seventh, *QUICK, "--restart").status == 0
    assert opened(model).labels == [*NAMES[:5], "goose"]


def test_a_first_lesson_that_goes_on_with_other_options_is_told_what_it_began_with(
    engram: Engram, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as asking:
        asking.setattr("engram.cli.signals.Interrupt.__call__", lambda self: True)
        assert engram("learn", "fresh", photos / "first", *QUICK).status == 130
    again = engram("learn", "fresh", photos / "first", *QUICK, "--epochs", "3")
    assert again.status == 2
    assert "a new model" not in again.out
    assert "options (epochs: 2 then, 3 now); give the same" in again.err


def test_a_model_whose_scores_are_not_finite_is_refused(engram: Engram, model: Path, photos: Path) -> None:
    broken = opened(model)
    assert broken.learner is not None
    next(broken.learner.network.parameters()).data.fill_(float("nan"))
    save_model(broken, model, overwrite=True)
    for command in (["predict", model, photos / "test"], ["evaluate", model, photos / "test", "--json"]):
        assert_refused(engram(*command), "scores are not finite", "restore it from a copy")
    with pytest.raises(EngramError, match="scores are not finite"):
        IncrementalClassifier.load(model, device="cpu").predict(pictures(FIRST, 1, size=16)[0])


def test_a_lesson_that_diverges_in_its_last_step_is_not_kept(
    engram: Engram, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(model)
    more = folder(tmp_path / "more", ("goose",), count=6)
    finish = StageWork.finish

    def diverge(work: StageWork) -> Any:
        yield from finish(work)
        next(work.learner.network.backbone.parameters()).data.fill_(float("inf"))

    monkeypatch.setattr(StageWork, "finish", diverge)
    refused = engram("learn", model, more, *QUICK)
    assert_refused(refused, "training diverged", "are not finite; the model did not change", "lower learning rate")
    assert everything(model) == before


# predict


def test_predictions_are_those_of_the_classifier(engram: Engram, taught: Path, photos: Path) -> None:
    classifier = IncrementalClassifier.load(taught, device="cpu")
    paths = sorted(str(path) for path in (photos / "test").rglob("*.png"))
    for by in ("cnn", "nme"):
        shares = classifier.predict_proba(paths, by=by)
        outcome = engram("predict", taught, photos / "test", "--json", "--top", "2", "--by", by, "--batch", "7")
        assert outcome.status == 0
        found = outcome.events()
        assert [line["path"] for line in found] == paths
        for line, row in zip(found, shares, strict=True):
            best = np.argsort(-row)[:2]
            assert [item["class"] for item in line["top"]] == classifier.classes_[best].tolist()
            assert [item["probability"] for item in line["top"]] == pytest.approx(row[best].tolist(), abs=1e-6)
            assert (line["class"], line["probability"]) == (line["top"][0]["class"], line["top"][0]["probability"])
    assert (classifier.predict(paths) == [Path(path).parent.name for path in paths]).mean() > 0.6  # it did learn


def test_the_best_places_are_in_order_whatever_their_number() -> None:
    shares = np.random.default_rng(0).integers(0, 4, (200, 7)) / 4  # with many equal ones
    for row, (single, several) in enumerate(zip(best_positions(shares, 1), best_positions(shares, 4), strict=True)):
        expected = sorted(range(7), key=lambda place, row=row: (-shares[row, place], place))
        assert several.tolist() == expected[:4]
        assert single.tolist() == expected[:1]


def test_predict_takes_files_folders_patterns_and_standard_input(
    engram: Engram, taught: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apple, boat = photos / "test" / "apple", photos / "test" / "boat"
    outcome = engram("predict", taught, apple / "000.png", boat, f"{photos}/test/c*/00[12].png")
    found = [line.split("\t") for line in outcome.out.splitlines()]
    assert [Path(row[0]).relative_to(photos / "test").as_posix() for row in found] == [
        "apple/000.png",
        *(f"boat/00{i}.png" for i in range(4)),
        *sorted(f"camel/00{i}.png" for i in (1, 2)),
    ]
    assert all(row[1] in NAMES and 0 < float(row[2]) <= 1 for row in found)
    monkeypatch.setattr("sys.stdin", iter([f"{apple}/001.png\n", "\n", f"{boat}\n"]))
    piped = engram("predict", taught, "-")
    assert piped.status == 0
    assert piped.out.count("\n") == 5
    monkeypatch.setattr("sys.stdin", iter([]))
    assert_refused(engram("predict", taught, "-"), "standard input named no image")


def test_patterns_are_sorted_and_name_each_file_once(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["b10.png", "b9.png", "a/deep/c.png", "a/z.png", "a.png", "c/notes.txt"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    for place in ("in/loop", "in/a/deep/loop", "in/a/up"):  # each leads to a folder that contains it
        (tmp_path / place).symlink_to(tmp_path / "in")
    monkeypatch.setattr("glob.iglob", lambda pattern, made=glob.iglob: iter(sorted(made(pattern), reverse=True)))
    images = ["in/a/deep/c.png", "in/a/z.png", "in/a.png", "in/b10.png", "in/b9.png"]
    assert list(expand(["in"])) == images
    assert list(expand(["in/**/*.png"])) == images
    assert list(expand(["**/*.png"])) == images
    assert list(expand([f"{tmp_path}/**/*.png"])) == [str(tmp_path / name) for name in images]
    assert list(expand(["in/**", "in/**/"])) == images * 2, "a folder, so the notes are left out"
    assert list(expand(["i?/**/deep", "in/**/deep/**/c.*"])) == ["in/a/deep/c.png"] * 2
    assert list(expand(["in/**/*.txt"])) == ["in/c/notes.txt"], "a file that is named is read"
    assert list(expand(["in/b*.png", "in/[ac]/*.png"])) == ["in/b10.png", "in/b9.png", "in/a/z.png"]
    (tmp_path / "in" / "lost").symlink_to("lost")
    assert list(expand(["in/lo*"])) == ["in/lost"], "to be named as unreadable"
    (tmp_path / "in" / "lost").unlink()
    (tmp_path / "in" / "same").symlink_to("a")
    assert list(expand(["in/*/**/*.png"])) == images[:2], "same and loop lead to nothing else"
    assert list(expand(["in/[al]*"])) == images[:3]


def test_predict_knows_the_home_folder(
    engram: Engram, taught: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(taught)
    (tmp_path / "a.png").symlink_to(photos / "test" / "apple" / "000.png")
    outcome = engram("predict", "~/model", "~/a.png", "~/*.png")
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == 2 * [str(tmp_path / "a.png")]
    assert_refused(engram("predict", "~/model", "~/b.png"), f"there is no file or folder {tmp_path / 'b.png'}")
    Path("~here").symlink_to(taught)
    assert engram("predict", "~here", "~/a.png").status == 0, "something of that very name"
    assert_refused(engram("predict", "~nobody-of-that-name", "~/a.png"), "there is no model at ~nobody-of-that-name")


def test_a_closed_standard_input_names_nothing(engram: Engram, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(engram("predict", model, "-"), "standard input named no image")
    assert engram("remove", model, "apple").status == 0


def test_lines_do_not_depend_on_the_batches(engram: Engram, taught: Path, photos: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    shutil.copytree(photos / "test" / "boat", inbox)
    for name in ("000.png", "zzz.png"):  # a whole batch that cannot be read, first and last
        (inbox / name).write_bytes(b"no image")
    whole = engram("predict", taught, inbox)
    for batch in (1, 2, 3):
        parts = engram("predict", taught, inbox, "--batch", batch)
        assert (parts.status, parts.err) == (whole.status, whole.err)
        ours, theirs = ([line.split("\t") for line in each.out.splitlines()] for each in (parts, whole))
        assert [row[:2] for row in ours] == [row[:2] for row in theirs]
        assert [float(row[2]) for row in ours] == pytest.approx([float(row[2]) for row in theirs], abs=2e-4)
    assert whole.out.count("\n") == 3


def test_paths_are_asked_for_as_they_are_needed(photos: Path) -> None:
    def lines() -> Any:
        yield f"{photos}/test/apple/000.png\n"
        raise AssertionError("not yet")

    assert next(expand(["-"], lines=lines())) == f"{photos}/test/apple/000.png"
    assert list(expand(["-"], lines=["\ufeffa.png\n", "\ufeffb.png\n"])) == ["a.png", "\ufeffb.png"], (
        "a mark begins a file"
    )


def test_predict_answers_while_its_standard_input_stays_open(taught: Path, photos: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    shutil.copy(photos / "test" / "apple" / "000.png", os.fsdecode(odd))
    command = [sys.executable, "-m", "engram", "predict", str(taught), "-", "--threads", "1", "--device", "cpu"]
    pipe, quiet, strict = subprocess.PIPE, subprocess.DEVNULL, os.environ | {"PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, 0, stdin=pipe, stdout=pipe, stderr=quiet, env=strict) as process:
        asks, told = process.stdin, process.stdout
        assert asks is not None
        assert told is not None

        def next_name() -> str:
            assert select.select([told], [], [], 60)[0], "no answer"
            return os.fsdecode(told.readline()).split("\t")[0].removeprefix(f"{photos}/test/")

        try:
            asks.write(f"{photos}/test/apple/000.png\n".encode())
            assert next_name() == "apple/000.png"
            asks.write(f"{photos}/test/boat/001.png\n{photos}/test/camel\n".encode())
            assert [next_name() for _ in range(5)] == ["boat/001.png", *(f"camel/00{i}.png" for i in range(4))]
            asks.write(odd + b"\r\n")  # a path may be of any bytes
            assert "caf" in next_name()
            asks.write(f"{photos}/test/dingo/003.png".encode())  # a last line without an end
            asks.close()
            assert next_name() == "dingo/003.png"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_name_cannot_write_on_the_terminal(engram: Engram, taught: Path, photos: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    shutil.copy(photos / "test" / "apple" / "000.png", odd / "a\tb\x1b[31m\n.png")
    (odd / "bad\x1b.png").write_bytes(b"")
    outcome = engram("predict", taught, odd)
    assert outcome.status == 3
    assert outcome.out.count("\n") == 1
    assert outcome.out.count("\t") == 2
    assert "\x1b" not in outcome.out + outcome.err


@pytest.mark.parametrize("lines_on", ["a pipe", "the terminal"])
def test_the_bar_is_on_stderr_and_the_lines_are_on_stdout(lines_on: str, taught: Path, photos: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.Popen(
        [sys.executable, "-m", "engram", "predict", str(taught), str(photos / "test"), "--threads", "1"],
        stdout=subprocess.PIPE if lines_on == "a pipe" else theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the terminal's other end was closed
        while part := os.read(ours, 65536):
            shown += part
    rest, _ = done.communicate(timeout=60)
    lines = shown if rest is None else rest
    assert done.returncode == 0
    os.close(ours)
    assert lines.count(b"\n") == lines.count(b".png\t") == 20
    assert (b"predicting" in shown) == (lines_on == "a pipe")
    assert b"\x1b" not in lines


def test_a_closed_pipe_is_no_error(taught: Path, photos: Path) -> None:
    command = f"{sys.executable} -m engram predict {taught} {photos}/test --batch 1 --threads 1 | head -1"
    done = subprocess.run(
        ["bash", "-c", command + "; exit ${PIPESTATUS[0]}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, 141)
    assert done.stderr == ""


RSS = """
import resource, sys
from engram.cli import text
from engram.cli.main import main
from engram.core.checkpoint import Checkpoint
from engram.experiment.stage_work import StageWork
from engram.models.edit import save_model
model, *folders = sys.argv[1:]
for folder in folders:
    assert main(["predict", model, folder, "--threads", "1", "--batch", "64"]) == 0
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def test_predicting_many_files_takes_no_more_memory(taught: Path, photos: Path, tmp_path: Path) -> None:
    source = tmp_path / "large.png"
    Image.fromarray(pictures(("apple",), 1, size=200)[0][0]).save(source)

    for count in (200, 700):
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            os.link(source, tmp_path / str(count) / f"{number:06d}.png")
    command = [sys.executable, "-c", RSS, str(taught), str(tmp_path / "200"), str(tmp_path / "700")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 900
    few, many = (int(peak) / (1024 if sys.platform == "linux" else 2**20) for peak in done.stderr.split())
    assert many < few + 16, (few, many)  # MiB; the 500 more are 57 MiB decoded


# Images from anywhere


def hostile(path: Path) -> dict[str, str]:
    """Files that mean harm, and what should be said of each."""
    path.mkdir(parents=True, exist_ok=True)
    good = Image.fromarray(pictures(("apple",), 1, size=16)[0][0])
    good.save(path / "whole.png")
    content = (path / "whole.png").read_bytes()
    (path / "whole.png").unlink()
    (path / "truncated.png").write_bytes(content[: len(content) // 2])
    (path / "text.jpg").write_text("not a picture")
    (path / "empty.webp").write_bytes(b"")
    claims = bytearray(content)
    claims[16:24] = (60_000).to_bytes(4, "big") * 2
    claims[29:33] = zlib.crc32(bytes(claims[12:29])).to_bytes(4, "big")
    (path / "bomb.png").write_bytes(claims)
    os.mkfifo(path / "pipe.png")
    (path / "loop.png").symlink_to("loop.png")
    (path / "device.png").symlink_to("/dev/zero")
    with (path / "sparse.bmp").open("wb") as file:
        file.truncate(3 * 2**30)
    return {
        "truncated.png": "truncated",
        "text.jpg": "not a PNG",
        "empty.webp": "not a PNG",
        "bomb.png": "more pixels",
        "pipe.png": "not a regular file",
        "loop.png": "symbolic links",
        "device.png": "not a regular file",
        "sparse.bmp": "MiB",
    }


def test_hostile_images_are_named_and_passed_over_by_predict(engram: Engram, taught: Path, tmp_path: Path) -> None:
    expected = hostile(tmp_path / "inbox")
    Image.fromarray(pictures(("boat",), 1, size=16)[0][0]).save(tmp_path / "inbox" / "good.png")
    (tmp_path / "inbox" / "circle").symlink_to(tmp_path / "inbox")
    started = time.monotonic()
    outcome = engram("predict", taught, "inbox")
    assert time.monotonic() - started < 30
    assert outcome.status == 3
    assert outcome.out.startswith("inbox/good.png\tboat\t")
    for name, reason in expected.items():
        (line,) = [line for line in outcome.err.splitlines() if f"/{name} " in line]
        assert reason in line
    assert f"{len(expected)} of {len(expected) + 1} images could not be read" in outcome.err
    answers = engram("predict", taught, "inbox", "--json").events()
    errors = {Path(answer["path"]).name: answer["error"] for answer in answers if "error" in answer}
    assert errors.keys() == expected.keys(), "an answer to each path"
    assert all(expected[name] in reason for name, reason in errors.items())
    assert [answer["class"] for answer in answers if "error" not in answer] == ["boat"]


def test_hostile_images_are_refused_or_passed_over_by_learn(engram: Engram, tmp_path: Path) -> None:
    folder(tmp_path / "photos", FIRST)
    expected = hostile(tmp_path / "photos" / "apple")
    (tmp_path / "photos" / "boat" / "circle").symlink_to(tmp_path / "photos")
    assert_refused(engram("learn", "model", "photos", *QUICK), "cannot be read", "--skip-bad")
    assert not (tmp_path / "model").exists()
    outcome = engram("learn", "model", "photos", *QUICK, "--skip-bad")
    assert outcome.status == 0
    assert all(name in outcome.err for name in expected)
    assert [known["images"] + known["heldout"] for known in read_manifest("model")["classes"]] == [10, 10, 10]
    folder(tmp_path / "more", ("dingo",), count=1)
    (tmp_path / "more" / "dingo" / "000.png").write_bytes(b"")
    lost = engram("learn", "model", "more", *QUICK, "--skip-bad")
    assert lost.status == 2
    assert "no image could be read of 'dingo'" in lost.err.splitlines()[-1]
    folder(tmp_path / "more", ("easel",))
    left = engram("learn", "model", "more", *QUICK, "--skip-bad")
    assert left.status == 0
    assert "engram: left out classes of which no image could be read: 'dingo'" in left.err.splitlines()
    assert opened(tmp_path / "model").labels == [*FIRST, "easel"]


# info, evaluate, remove


def test_info_says_what_the_model_knows(engram: Engram, taught: Path) -> None:
    outcome = engram("info", taught)
    assert outcome.status == 0
    for words in (
        "5 classes",
        "afc",
        "resnet10",
        "16x16",
        "per_class=20: 40 exemplars",
        "learned from  40 images",
        "2026",
        "8",
    ):
        assert words in outcome.out, words
    plain = json.loads(engram("info", taught, "--json").out)
    assert [known["label"] for known in plain["classes"]] == [*NAMES[:5]]
    assert plain["bytes"]["exemplars"] > 0
    assert plain["learning_interrupted"] is False
    assert [entry["what"] for entry in plain["history"]] == ["learned", "learned"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_breaks_no_name_and_no_date(
    width: int, engram: Engram, taught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    manifest = read_manifest(taught)
    out = engram("info", taught).out
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(line.split()[:1] == [name] for line in lines) for name in NAMES[:5]), out
    assert sum(manifest["history"][0]["date"][:10] in line for line in lines) == 3, out  # two lessons, and undo's
    for words in ("lesson", "exemplars", "cnn %", "epochs", "learned apple", "held-out accuracy by cnn"):
        assert words in out, out


def test_rows_of_a_table_that_is_too_wide_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["name", "images\nread", "a very long heading of numbers"]
    for width, spaced in ((80, True), (30, False)):
        table = text.make_table(columns, right=columns[1:], title="counted")
        table.add_row("a name of many words", "1,234", "-")
        text.print_table(Console(width=width), table)
        out = capsys.readouterr().out
        assert ("a name of many words\n    images read 1,234" in out) is not spaced, out
        assert "counted" in out


def test_info_says_what_of_a_lesson_is_gone(
    engram: Engram, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    today = read_manifest(model)["history"][0]["date"][:10]

    def rows() -> list[str]:
        lines = engram("info", model).out.splitlines()
        assert max(map(len, lines)) <= 100
        return [" ".join(line.split()) for line in lines if f" {today} " in line]

    assert rows()[0].startswith(f"1 {today} learned apple, boat, camel 30 8 ")
    assert engram("remove", model, "boat", "camel").status == 0
    found = rows()
    assert found[0].startswith(f"1 {today} learned 3 classes (2 since removed) 30 8 ")
    assert found[1].startswith(f"2 {today} learned dingo, easel 20 8 ")
    assert found[2:] == [f"3-4 {today} removed 2 classes - - -"]
    again = folder(tmp_path / "again", ("dingo",), seed=4)
    assert engram("learn", model, again, "--more-of-known", *QUICK).status == 0
    assert "learned 2 classes (1 gone since)" in rows()[1]
    entry = read_manifest(model)["history"][-1]
    shares = " ".join(f"{entry[when]['cnn']:.1f}" for when in ("refreshed_before", "refreshed_after"))
    assert f" those learned again {shares}" in " ".join(engram("info", model).out.split())
    for name in ("apple", "easel"):
        assert engram("remove", model, name).status == 0
        assert rows()[-1].endswith(" removed 1 class - - -" if name == "apple" else " removed 2 classes - - -")
    assert engram("info", "model").out.startswith("model: 1 class\n")


def test_evaluate_counts_what_is_taken_for_what(engram: Engram, taught: Path, photos: Path, tmp_path: Path) -> None:
    test = Path(shutil.copytree(photos / "test", tmp_path / "test"))
    folder(test, ("goose",), count=2)
    outcome = engram("evaluate", taught, "test", "--json", "--report", "page.html", "--by", "cnn")
    assert outcome.status == 0
    assert "left out what the model does not know: goose" in outcome.err
    found = json.loads(outcome.out)
    counts = np.array(found["confusion"])
    paths = sorted(str(path) for path in (photos / "test").rglob("*.png"))
    predicted = IncrementalClassifier.load(taught, device="cpu").predict(paths, by="cnn")
    slow = np.zeros((5, 5), dtype=int)
    for path, name in zip(paths, predicted.tolist(), strict=True):
        slow[NAMES.index(Path(path).parent.name), NAMES.index(name)] += 1
    assert counts.tolist() == slow.tolist()
    assert found["accuracy"] == 100 * np.trace(slow) / 20
    assert found["left_out"] == [{"class": "goose", "images": 2}]
    assert [entry["right"] for entry in found["classes"]] == np.diag(slow).tolist()
    page = (tmp_path / "page.html").read_text()
    assert f"{found['accuracy']:.1f} %" in page
    assert "the model does not know it: goose (2 images)." in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert engram("evaluate", taught, "test", "--report", "page.html").out.endswith("\nreport: page.html\n")
    said = engram("evaluate", taught, "test", "--by", "cnn").out
    assert said.startswith(f"balanced accuracy {found['accuracy']:.1f} % (mean over 5 classes), plain ")
    assert f"{found['accuracy_of_images']:.1f} % (of 20 images), by cnn\n" in said
    assert "predicted class" in said


def test_evaluate_averages_over_classes_as_a_lesson_does(
    engram: Engram, taught: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos / "test" / "apple", tmp_path / "test" / "apple")
    for place, picture in (("boat", "dingo"), ("camel", "camel")):
        (tmp_path / "test" / place).mkdir()
        shutil.copy(photos / "test" / picture / "000.png", tmp_path / "test" / place)
    found = json.loads(engram("evaluate", taught, "test", "--json", "--report", "page.html", "--by", "cnn").out)
    shares = [entry["accuracy"] for entry in found["classes"] if entry["images"]]
    assert found["accuracy"] == np.mean(shares) != found["accuracy_of_images"]
    assert found["accuracy_of_images"] == 100 * np.trace(found["confusion"]) / 6
    plain = f"{found['accuracy_of_images']:.1f} %"
    said = f"balanced accuracy {found['accuracy']:.1f} % (mean over 3 classes), plain accuracy {plain} (of 6 images)"
    assert engram("evaluate", taught, "test", "--by", "cnn", "--quiet").out == f"{said}, by cnn\n"
    page = (tmp_path / "page.html").read_text()
    assert f"Balanced accuracy {found['accuracy']:.1f} %, the mean over 3 classes; plain accuracy {plain} of" in page
    wrong = found["mistakes"]
    assert len(wrong) == found["images"] - np.trace(found["confusion"]) > 0
    assert all(Path(each["path"]).parent.name == each["class"] != each["predicted"] for each in wrong)
    assert page.count("<img src=") == len(wrong)
    assert f"<strong>{wrong[0]['class']}</strong> taken for <strong>{wrong[0]['predicted']}</strong>" in page


def test_a_name_that_is_not_text_does_not_stop_the_report_of_evaluate(
    engram: Engram, photos: Path, taught: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos / "test", tmp_path / "test")
    shutil.copytree(tmp_path / "test" / "apple", not_text(tmp_path / "test"))
    outcome = engram("evaluate", taught, "test", "--report", "page.html")
    assert outcome.status == 0, outcome
    assert "caf\\udce9" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_evaluate_says_how_many_images_were_learned_from(kind: str, engram: Engram, tmp_path: Path) -> None:
    images, labels = pictures(FIRST, 10, size=40)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / ("new" if number % 10 == 9 else "given") / label
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.{kind}")
    assert engram("learn", "model", "given", *QUICK, "--image-size", "16").status == 0
    shutil.copytree("new", "given", dirs_exist_ok=True)
    outcome = engram("evaluate", "model", "given", "--json", "--report", "page.html")
    assert json.loads(outcome.out)["learned_from"] == 21
    assert outcome.err == (
        "engram: the model was trained on 21 of these 30 images, so the accuracy on new images may be lower; "
        "evaluate on images that no lesson used\n"
    )
    assert "learned from 21 of these images" in (tmp_path / "page.html").read_text()
    fresh = engram("evaluate", "model", "new", "--json", "--report", "page.html")
    assert (fresh.err, json.loads(fresh.out)["learned_from"]) == ("", 0)
    assert '<ul class="notes">' not in (tmp_path / "page.html").read_text()


def test_evaluate_of_a_model_that_kept_no_note_does_not_say_none(engram: Engram, tmp_path: Path) -> None:
    unpack_archive(Path(__file__).parent / "fixtures" / "model-format1.tar.xz", tmp_path / "old")
    place = tmp_path / "photos" / str(opened(tmp_path / "old").labels[0])
    place.mkdir(parents=True)
    Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(place / "0.png")
    outcome = engram("evaluate", "old", "photos", "--json", "--report", "page.html")
    assert json.loads(outcome.out)["learned_from"] is None
    assert "learned from" not in outcome.err + (tmp_path / "page.html").read_text()


def test_every_column_of_what_is_taken_for_what_has_a_name() -> None:
    names = ["apple", "boat", "camel", "dingo"]
    confusion = [[3, 0, 0, 2], [0] * 4, [1, 0, 4, 0], [0] * 4]
    table, unseen = matrix_table({"classes": [{"class": name} for name in names], "confusion": confusion})
    assert [column.header for column in table.columns] == ["true class", "1", "3", "4"]
    assert [list(column.cells) for column in table.columns] == [
        ["1 apple", "3 camel"],
        ["3", "1"],
        ["", "4"],
        ["2", ""],
    ]
    assert unseen.endswith(": 4 dingo")
    assert [text.fits(Console(width=width), table) for width in (23, 24)] == [False, True]


def test_evaluate_says_which_classes_have_columns_alone(
    engram: Engram, taught: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "some" / "apple").mkdir(parents=True)
    shutil.copytree(photos / "test" / "boat", tmp_path / "some" / "apple", dirs_exist_ok=True)
    said = engram("evaluate", taught, "some", "--by", "cnn").out
    assert "predicted class" in said
    assert said.endswith("no images of these classes: 2 boat\n")


def test_evaluate_names_unreadable_images_and_unknown_classes(engram: Engram, taught: Path, tmp_path: Path) -> None:
    folder(tmp_path / "test", ("apple",), count=3)
    (tmp_path / "test" / "apple" / "001.png").write_bytes(b"")
    outcome = engram("evaluate", taught, "test")
    assert outcome.status == 3
    assert "001.png cannot be read" in outcome.err
    assert "of 2 images" in outcome.out
    folder(tmp_path / "strange", ("goose",), count=1)
    assert_refused(engram("evaluate", taught, "strange"), "goose")


def test_a_page_shows_names_as_text(engram: Engram, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", ("apple", "boat"), count=4)
    (source / "apple").rename(source / "<b>$x$ & 'y'")
    assert engram("learn", "model", "source", *QUICK).status == 0
    assert engram("evaluate", "model", "source", "--report", "page.html").status == 0
    page = (tmp_path / "page.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


def test_a_removed_class_is_gone_from_the_files(engram: Engram, model: Path) -> None:
    outcome = engram("remove", model, "boat", "dingo", "--no-undo")
    assert outcome.status == 0
    assert "removed boat with 8 exemplars and 2 held-out images\n" in outcome.out
    assert outcome.out.endswith("3 classes left\n")
    assert opened(model).labels == ["apple", "camel", "easel"]
    assert b"boat" not in b"".join(everything(model).values())
    assert json.loads(engram("remove", model, "apple", "--json").out) == {"removed": "apple", "classes": 2}
    assert engram("remove", model, "camel").out.endswith("kept for 'engram undo' (--no-undo deletes it)\n")
    assert engram("undo", model).out.startswith("the removal was undone; back: camel; back to ")


def test_several_classes_go_in_one_transaction(engram: Engram, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, generations = everything(model), []
    write = Writer.commit

    def commit(self: Writer, *arguments: Any, **options: Any) -> Pointer:
        generations.append(write(self, *arguments, **options))
        return generations[-1]

    monkeypatch.setattr(Writer, "commit", commit)
    assert_refused(engram("remove", model, "boat", "goose"), "no class 'goose'")
    assert everything(model) == before
    assert engram("remove", model, "boat", "dingo").status == 0
    assert len(generations) == 1
    assert opened(model).labels == ["apple", "camel", "easel"]


@pytest.mark.parametrize(
    ("typed", "flags", "left"),
    [("y\n", [], 4), ("\n", [], 5), ("n\n", [], 5), ("", [], 5), ("", ["--yes"], 4), ("", ["--json"], 4)],
)
def test_remove_asks_a_person(
    typed: str, flags: list[str], left: int, engram: Engram, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard = io.StringIO(typed)
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    outcome = engram("remove", model, "boat", *flags)
    assert len(opened(model).labels) == left
    question = "" if flags else f"remove boat from {model} ('engram undo' brings it back)? [y/N] "
    refused = "engram: nothing was removed\n" if left == 5 else ""
    assert (outcome.status, outcome.err) == (int(left == 5), question + refused)


def test_a_folder_is_the_class_that_is_written_like_its_name(engram: Engram, tmp_path: Path) -> None:
    images, labels = pictures(FIRST, 6, size=16)
    numbers = [FIRST.index(label) for label in labels]
    IncrementalClassifier(epochs=30, backbone="resnet10", device="cpu").fit(images, numbers).save("model")
    root = folder(tmp_path / "photos", FIRST[:1], count=6, seed=4)
    (root / "apple").rename(root / "0")
    assert json.loads(engram("evaluate", "model", "photos", "--json").out)["accuracy"] > 80
    assert_refused(engram("learn", "model", "photos", *QUICK), "the model knows '0' already")
    folder(root, SECOND[:1], count=6)
    assert engram("learn", "model", "photos", *QUICK, "--more-of-known").status == 0
    assert opened(tmp_path / "model").labels == [1, 2, 0, "dingo"]


def test_a_folder_in_the_place_of_an_onnx_file_is_not_replaced(engram: Engram, taught: Path, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").mkdir()
    assert_refused(engram("export", taught, "x.onnx", "--overwrite"), "x.onnx is a folder; choose another name")


def test_names_that_begin_with_a_dash_can_be_typed(engram: Engram, tmp_path: Path) -> None:
    folder(tmp_path / "photos", FIRST[:2], count=4)
    (tmp_path / "photos" / "apple").rename(tmp_path / "photos" / "-apple")
    assert engram("learn", "model", "photos", *QUICK).status == 0
    (tmp_path / "-x.png").symlink_to("photos/boat/000.png")
    assert engram("predict", "model", "--quiet", "--", "-x.png").out.startswith("-x.png\t")
    assert engram("remove", "model", "--yes", "--", "-apple").status == 0
    assert opened(tmp_path / "model").labels == ["boat"]


def test_classes_that_are_no_text_can_be_typed(engram: Engram, tmp_path: Path) -> None:
    images, _ = pictures(NAMES[:4], 4, size=16)
    labels = [label for label in (1, 2, None, ("x", 3)) for _ in range(4)]
    IncrementalClassifier(epochs=1, memory=2, device="cpu").fit(images, labels).save("m")
    assert engram("remove", "m", "2").status == 0
    assert opened(tmp_path / "m").labels == [1, None, ("x", 3)]
    folder(tmp_path / "test", ("apple", "boat"), count=2)
    (tmp_path / "test" / "apple").rename(tmp_path / "test" / "1")
    (tmp_path / "test" / "boat").rename(tmp_path / "test" / "('x', 3)")
    found = json.loads(engram("evaluate", "m", "test", "--json", "--report", "page.html").out)
    assert found["images"] == 4
    assert [entry["class"] for entry in found["classes"]] == [1, None, ["x", 3]]
    assert "(&#39;x&#39;, 3)" in (tmp_path / "page.html").read_text()
    assert "('x', 3)" in engram("evaluate", "m", "test").out
