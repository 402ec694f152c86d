"""Held-out images do not leak: near-duplicates and groups stay on one side, and a folder can be given."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from engram.cli.main import main
from engram.core.errors import EngramError
from engram.models.file_groups import check_grouping, group_keys
from engram.models.hold_out import HoldOut
from engram.models.lesson_plan import LessonNotice
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.models.near_duplicates import Details, DisjointSets
from engram.models.split import LessonSplit
from model_helpers import learn, opened, pictures, tiny

SIDE = 48


def scene(seed: int, side: int = 96) -> Image.Image:
    """A picture of random shapes."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def burst(seed: int, frames: int) -> list[np.ndarray]:
    """Frames of a scene: shifted, brightened and compressed again."""
    rng, whole = np.random.default_rng(seed), scene(seed)
    found: list[np.ndarray] = []
    for _ in range(frames):
        left, top = rng.uniform(0, 5, 2)
        frame = whole.resize((SIDE, SIDE), box=(left, top, left + 90, top + 90))
        frame = ImageEnhance.Brightness(frame).enhance(rng.uniform(0.8, 1.2))
        buffer = io.BytesIO()
        frame.save(buffer, "JPEG", quality=60)
        found.append(np.asarray(Image.open(buffer)))
    return found


def groups_of(images: np.ndarray) -> list[int]:
    sets = DisjointSets(len(images))
    for one, other in Details(images).pairs():
        sets.join(one, other)
    return [sets.find(number) for number in range(len(images))]


def test_bursts_are_found_and_other_pictures_are_not() -> None:
    images = np.stack([frame for seed in range(20) for frame in burst(seed, 4)])
    assert groups_of(images) == [4 * (number // 4) for number in range(80)]
    plain = np.full((3, SIDE, SIDE, 3), 128, np.uint8)
    plain[1] += 50
    assert Details(plain).pairs() == {}  # nothing to compare
    assert Details(pictures(["apple"])[0]).pairs() == {}  # 8 pixels are too few


def split(images: np.ndarray, hold_out: HoldOut | None = None, validation: float = 0.2) -> LessonSplit:
    config = ModelConfig.choose("afc", image_size=SIDE, images=len(images), validation=validation, device="cpu")
    given = HoldOut() if hold_out is None else hold_out
    rows: dict[Any, np.ndarray] = {"a": np.arange(len(images))}
    return LessonSplit(Model(config, "cpu"), torch.from_numpy(given.with_given(images)), rows, given)


def test_a_burst_is_held_out_as_a_whole_or_not_at_all() -> None:
    images = np.stack([frame for seed in range(10) for frame in burst(seed, 3)])
    drawn = split(images)
    part = drawn.of("a")
    assert 3 <= len(part.heldout) <= 9
    assert {row // 3 for row in part.heldout}.isdisjoint(row // 3 for row in part.learned)
    assert len(part.heldout) + len(part.learned) == 30
    assert drawn.notes() == [
        "near-duplicates are held out together or not at all: 30 images in 10 groups (the largest: 3 of 'a')"
    ]
    assert split(images).of("a").heldout.tolist() == part.heldout.tolist()
    apart = split(images, HoldOut(near=False)).of("a")
    assert len(apart.heldout) == 6


def test_without_bursts_the_wanted_share_is_held_out() -> None:
    images = np.stack([burst(seed, 1)[0] for seed in range(20)])
    drawn = split(images)
    assert len(drawn.of("a").heldout) == 4
    assert drawn.notes() == []


def test_a_class_that_is_one_burst_holds_out_nothing_and_says_so() -> None:
    drawn = split(np.stack(burst(1, 10)))
    assert len(drawn.of("a").heldout) == 0
    assert "no image is held out of 'a'" in drawn.notes()[1]


def test_two_large_groups_hold_out_the_smaller_one() -> None:
    images = np.stack([burst(seed, 1)[0] for seed in range(20)])
    drawn = split(images, HoldOut(groups=["x"] * 9 + ["y"] * 11))
    assert drawn.of("a").heldout.tolist() == list(range(9))
    assert "images that belong together" in drawn.notes()[0]


def test_given_images_are_held_out_without_those_that_are_learned() -> None:
    images = np.stack([burst(seed, 1)[0] for seed in range(12)])
    similar, new = burst(3, 2)[1], burst(50, 1)[0]
    given = HoldOut(images=np.stack([images[0], similar, new]), labels=["a", "a", "a"])
    drawn = split(images, given)
    part = drawn.of("a")
    assert part.heldout.tolist() == [14]
    assert len(part.learned) == 12
    assert drawn.notes() == ["left out 2 of the images to hold out: they are, or resemble, images to learn"]


def test_more_of_a_held_out_burst_is_not_learned(tmp_path: Path) -> None:
    names, images = ["a"] * 10 + ["b"] * 10, np.stack([burst(seed, 1)[0] for seed in range(20)])
    config = ModelConfig.choose(
        "afc", image_size=SIDE, images=20, epochs=1, backbone="resnet10", validation=0.2, memory=2, device="cpu"
    )
    from engram.models.learning import learn_into

    list(learn_into(tmp_path / "m", images, names, config=config, device="cpu"))
    held = opened(tmp_path / "m").heldout.of(0).pixels.numpy()
    first = next(row for row in range(10) if (images[row] == held[0]).all())
    more = np.stack([burst(first, 3)[2], *(burst(seed, 1)[0] for seed in range(30, 33))])
    events = list(learn_into(tmp_path / "m", more, ["a"] * 4, known="refresh", epochs=1, device="cpu"))
    said = [event.message for event in events if isinstance(event, LessonNotice)]
    assert "left out 1 near-duplicate of held-out images" in said
    assert opened(tmp_path / "m").classes[-1].images == 3 + 2  # and two exemplars


def test_learning_takes_groups_and_images_to_hold_out(tmp_path: Path) -> None:
    images, labels = pictures(("apple", "boat"), 3, seed=5)
    learn(tmp_path / "m", ("apple", "boat"), config=tiny(validation=0.25), groups=[0, 0, 1, 1, 2, 2, 3, 3] * 2)
    assert [len(opened(tmp_path / "m").heldout.of(place)) for place in (0, 1)] == [2, 2]
    events = learn(tmp_path / "n", ("apple", "boat"), config=tiny(), validate=(images, labels))
    assert [len(opened(tmp_path / "n").heldout.of(place)) for place in (0, 1)] == [3, 3]
    assert not any(isinstance(event, LessonNotice) for event in events)
    with pytest.raises(EngramError, match="16 images need 16 groups, got 1"):
        learn(tmp_path / "o", ("apple", "boat"), config=tiny(), groups=[1])
    with pytest.raises(EngramError, match="validate has no image of 'apple'"):
        learn(tmp_path / "o", ("apple",), config=tiny(), validate=(images[3:], labels[3:]))


def save(path: Path, seed: int, taken: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if taken is not None:
        exif.get_ifd(0x8769)[0x9003] = taken
    scene(seed).save(path, exif=exif)


def test_files_are_grouped_by_folder_pattern_and_time(tmp_path: Path) -> None:
    files = ["cat/s1/a.jpg", "cat/s1/b.jpg", "cat/c.jpg", "dog/12_x.jpg", "dog/12_y.jpg"]
    paths, labels = [str(tmp_path / file) for file in files], ["cat"] * 3 + ["dog"] * 2
    assert group_keys(paths, labels, "folder", str(tmp_path)) == ["cat/s1", "cat/s1", None, None, None]
    assert group_keys(paths, labels, r"(\d+)_", str(tmp_path)) == [None, None, None, "12", "12"]
    assert group_keys(paths, labels, "none", str(tmp_path)) == [None] * 5
    for number, second in enumerate(("00", "05", "30", None, "31")):
        save(Path(paths[number]), number, second and f"2024:06:01 12:00:{second}")
    assert group_keys(paths, labels, "time=5", str(tmp_path)) == [0, 0, 2, None, 4]
    with pytest.raises(EngramError, match="groups none of the 5 images"):
        group_keys(paths, labels, "(zebra)", str(tmp_path))


@pytest.mark.parametrize(
    ("how", "why"),
    [("time=soon", "takes a number of seconds"), ("([", "not a regular expression"), ("ab", "with one group")],
)
def test_a_wrong_grouping_is_refused(how: str, why: str) -> None:
    with pytest.raises(EngramError, match=why):
        check_grouping(how)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(24):
        save(tmp_path / "photos" / "ab"[number % 2] / f"s{number // 6}" / f"{number}.jpg", number)
        save(tmp_path / "more" / "ab"[number % 2] / f"{number}.jpg", 100 + number)
    words = ["--backbone", "resnet10", "--epochs", "1", "--device", "cpu", "--threads", "1", "--image-size", "24"]
    assert main(["learn", str(tmp_path / "m"), str(tmp_path / "photos"), "--group-by", "folder", *words]) == 0
    assert "24 images in 8 groups" in capsys.readouterr().err
    assert len(opened(tmp_path / "m").heldout.of(0)) == 3
    words += ["--validate", str(tmp_path / "more")]
    assert main(["learn", str(tmp_path / "n"), str(tmp_path / "photos"), *words]) == 0
    assert len(opened(tmp_path / "n").heldout.of(0)) == 12
    assert main(["learn", str(tmp_path / "o"), str(tmp_path / "photos"), "--group-by", "x", *words]) == 2
