"""Random crops of the original photographs: which they are, runs with them, and what is refused."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engram import EngramError, run
from engram.contract import Training
from engram.core.events import ImagesPlaced
from engram.core.rng import generator
from engram.data.augment import CENTRE, Augmentation
from engram.data.photographs import NUMBERS, Photographs, choose_crop
from engram.data.planned_crops import draw_numbers
from engram.data.sources import imagenet
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.engine.image_feed import ImageRing
from engram.engine.planning import plan_epochs, plan_sweep
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import resume, settle
from engram.experiment.session import Session
from engram.methods.bounds import Replay
from helpers import (
    Engram,
    assert_resumes_to,
    begin_stage,
    last_state,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    toy_store,
)
from process_helpers import Group, values

SIDE, SEEN = 16, 14  # stored, and seen by the network
SIZES = ((30, 20), (18, 26), (80, 6), (24, 24))  # of the photographs; the third has no part with an allowed ratio
VIEW = Augmentation(pad=0, view=SEEN / SIDE)


def write_photographs(root: Path, classes: int = 4, train: int = 5, test: int = 2) -> Path:
    """ImageNet's folders with photographs of several sizes, each of its own colours."""
    for label in range(classes):
        for split, count in (("train", train), ("val", test)):
            folder = root / split / f"n{label:08}"
            folder.mkdir(parents=True)
            for number in range(count):
                random = np.random.default_rng([label, number, count])
                width, height = SIZES[number % len(SIZES)]
                pixels = random.integers(60 * label, 60 * label + 70, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.JPEG", "JPEG", quality=95)
    return root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ImageNet of four classes."""
    monkeypatch.setitem(imagenet.IMAGENET, "imagenet1000", 4)
    return write_photographs(tmp_path / "imagenet")


def data_of(folder: Path, **changes: Any) -> DataConfig:
    given = {"image_size": SIDE, "crops": "photograph", **changes}
    return DataConfig("imagenet1000", str(folder), **given)


def config_of(folder: Path, method: str = "afc", **changes: Any) -> RunConfig:
    return tiny_config(method, **{"data": data_of(folder), "augmentation": VIEW, **changes})


def slow_crop(file: Path, numbers: list[float]) -> tuple[np.ndarray, bool]:
    """The resized crop of a file as torchvision's RandomResizedCrop makes it, and whether a drawn part fitted."""
    with Image.open(file) as opened:
        photograph = opened.convert("RGB")
    (width, height), fits = photograph.size, False
    for i in range(10):
        target = width * height * (0.08 + 0.92 * numbers[i])
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * numbers[10 + i])
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        fits = 0 < w <= width and 0 < h <= height
        if fits:
            x, y = math.floor(numbers[20] * (width - w + 1)), math.floor(numbers[21] * (height - h + 1))
            break
    else:
        w, h = width, height
        if width / height < 3 / 4:
            h = round(width / (3 / 4))
        elif width / height > 4 / 3:
            w = round(height * (4 / 3))
        x, y = (width - w) // 2, (height - h) // 2
    part = photograph.crop((x, y, x + w, y + h)).resize((SEEN, SEEN), Image.Resampling.BILINEAR)
    return np.asarray(part), fits


def files_of(store: ImageStore) -> list[Path]:
    assert store.photographs is not None
    return [store.photographs.folder / path for path in store.photographs.paths]


def brought(session: Session, augmented: bool = True) -> tuple[Any, list[np.ndarray]]:
    """A plan of the base stage, and what its steps find on the device."""
    stage, buffers = begin_stage(session, 0), session.engine.buffers
    training = Training(epochs=2, batch_size=4, remainder="keep")
    size = session.engine.image_size
    plan = plan_epochs(training, VIEW, stage.all_rows, range(2), (0, 0), 1, augmented, (), size, photographs=True)
    parts = [slice(0, min(4, len(stage.pool) - 4 * step)) for step in range(len(plan) // 2)] * 2
    pool, found = buffers.pool(stage, 4), []
    on_device = buffers.plan(len(plan), 4)
    on_device.load(plan)
    with buffers.feeding(stage, on_device, plan, parts) as next_images:
        for step, part in enumerate(parts):
            with next_images():
                found.append(pool.padded[on_device.image_places[step, part]].numpy().copy())
    return plan, found


def test_crops_are_those_of_a_slow_loop_over_the_files(folder: Path) -> None:
    config = config_of(folder)
    store = load_store(config.data)
    files, seen = files_of(store), Counter[bool]()
    plan, found = brought(Session(config, store))
    assert plan.crops.shape == (6, 4, NUMBERS)
    for step, images in enumerate(found):
        assert images.shape == (len(images), SEEN, SEEN, 3)
        for column, image in enumerate(images):
            expected, fitted = slow_crop(files[plan.rows[step, column]], plan.crops[step, column].tolist())
            assert np.array_equal(image, expected)
            seen[fitted] += 1
    assert (seen.total(), seen[False] > 0, seen[True] > 9) == (20, True, True)
    assert bool((plan.draws.top == CENTRE).all()), "what is on the device is not cropped again"


def test_shares_of_the_area_and_ratios_are_those_of_the_protocol() -> None:
    numbers = draw_numbers((4000,), generator(1, "crops")).tolist()
    boxes = np.array([choose_crop(each, 500, 375) for each in numbers])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes.min() >= 0, boxes[:, 2].max() <= 500, boxes[:, 3].max() <= 375) == (True, True, True)
    share = width * height / (500 * 375)
    assert 0.075 < share.min() < 0.09
    assert 0.97 < share.max() <= 1
    assert 0.74 < (width / height).min() < 0.78
    assert 1.30 < (width / height).max() < 1.35
    assert boxes[:, 0].min() == boxes[:, 1].min() == 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) == (500, 375)
    assert choose_crop([1.0] * NUMBERS, 400, 10) == (193, 0, 206, 10), "no part fits: the largest in the middle"
    assert choose_crop([1.0] * NUMBERS, 10, 400) == (0, 193, 10, 206)


def test_what_is_left_and_right_of_the_square_is_seen_in_training_only(folder: Path) -> None:
    for file in (folder / "train").rglob("*.JPEG"):
        pixels = np.zeros((20, 60, 3), np.uint8)
        pixels[:, :8] = (255, 0, 0)
        Image.fromarray(pixels).save(file, "PNG")
    config = config_of(folder)
    store = load_store(config.data)
    assert store.train.images.max() == 0, "no square has any red"
    _, crops = brought(Session(config, store))
    assert max(batch[..., 0].max() for batch in crops) == 255
    _, centres = brought(Session(config, store), augmented=False)
    assert max(batch.max() for batch in centres) == 0


def test_phases_without_augmentation_see_the_centres_of_the_squares(folder: Path) -> None:
    config = config_of(folder)
    store = load_store(config.data)
    plan, found = brought(Session(config, store), augmented=False)
    assert plan.crops is None
    for step, images in enumerate(found):
        rows = plan.rows[step, : len(images)].numpy()
        assert np.array_equal(images, store.train.images[rows][:, 1:15, 1:15])


def test_a_sweep_draws_crops_for_each_image_once() -> None:
    plan = plan_sweep(VIEW, torch.arange(7), 4, 2, 1, (SEEN, SEEN), photographs=True)
    assert plan.crops is not None
    numbers = draw_numbers((7,), generator(1, "crops", "sweep", 2))
    for row, own in zip(plan.rows.flatten()[:7], plan.crops.flatten(0, 1), strict=False):
        assert torch.equal(own, numbers[row])
    plain = plan_sweep(VIEW, torch.arange(7), 4, 2, 1, (SEEN, SEEN))
    assert torch.equal(plain.draws.mirror, plan.draws.mirror)
    assert torch.equal(plain.rows, plan.rows)


def test_plans_of_several_epochs_have_the_numbers_of_each_alone() -> None:
    training, rows = Training(epochs=3, batch_size=2), torch.arange(5)
    given = (VIEW, rows)
    both = plan_epochs(training, *given, range(1, 3), (0, 0), 1, image_size=(SEEN, SEEN), photographs=True)
    alone = plan_epochs(training, *given, range(2, 3), (0, 0), 1, image_size=(SEEN, SEEN), photographs=True)
    assert both.crops is not None
    assert alone.crops is not None
    assert torch.equal(both.crops[len(alone) :], alone.crops)
    assert not torch.equal(both.crops[: len(alone)], alone.crops)


@pytest.mark.parametrize(
    ("method", "phase"),
    [
        ("afc", "balance"),  # a sweep after the stage, a balanced phase
        ("bic", "correct"),  # a phase without augmentation
        ("ssil", "main"),  # a second stream of images
        ("gdumb", "main"),  # CutMix
    ],
)
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(method: str, phase: str, folder: Path) -> None:
    config = config_of(folder, method, epochs=1)
    config = config.with_settings(correction__epochs=1) if method == "bic" else config
    store = load_store(config.data)
    whole = run_whole(config, store, folder.parent / "whole")
    begins = starts(1, None if method == "gdumb" else phase)
    run_stopped(config, store, folder.parent / "cut", 1, begins)
    assert_resumes_to(whole, folder.parent / "cut", load_store(config.data))
    assert "memory.images" not in whole, "exemplars are rows of the decoded file"


def test_files_are_those_of_the_rows_also_of_held_out_and_of_skipped_images(folder: Path) -> None:
    bad = folder / "train" / "n00000001" / "2.JPEG"
    bad.write_bytes(bad.read_bytes()[:100])
    store = load_store(data_of(folder, skip_bad=True))
    held = load_store(data_of(folder, skip_bad=True, holdout=0.4))
    assert bad not in files_of(store)
    for each in (store, held):
        assert len(files_of(each)) == len(each.train)
        for file, square in zip(files_of(each), each.train.images, strict=True):
            assert np.array_equal(imagenet.decode_square(file, SIDE), square)


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA"])
def test_files_of_other_kinds_are_converted_as_in_the_protocol(mode: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8)).convert(mode)
    options = {"transparency": b"\0" * 256} if mode == "P" else {}
    image.save(tmp_path / "x.JPEG", "JPEG" if mode in ("L", "CMYK") else "PNG", **options)
    numbers, out = random.random(NUMBERS).tolist(), np.zeros((SEEN, SEEN, 3), np.uint8)
    Photographs(tmp_path, ("x.JPEG",), "").crop_into(0, numbers, out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the transparency of the palette
        assert np.array_equal(out, slow_crop(tmp_path / "x.JPEG", numbers)[0])


# Several processes


def share_run(place: Path) -> tuple[list[str], list[int]]:
    """The files that this process decodes in the base stage, and for how many images a batch its rings are."""
    decoded: list[str] = []
    rings: list[int] = []
    crop_into, make_ring = Photographs.crop_into, ImageRing.__init__

    def watch(self: Photographs, position: int, *given: Any) -> None:
        decoded.append(self.paths[position])
        crop_into(self, position, *given)

    def count(self: ImageRing, device: torch.device, batch_size: int, *given: Any) -> None:
        rings.append(batch_size)
        make_ring(self, device, batch_size, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGRAM_DATA", str(place / "data"))
        patch.setitem(imagenet.IMAGENET, "imagenet1000", 4)
        patch.setattr(Photographs, "crop_into", watch)
        patch.setattr(ImageRing, "__init__", count)
        config = config_of(place / "imagenet", "replay", epochs=1, finetune=0)
        list(run(config, None, place / os.environ["WORLD_SIZE"], stop_after_stage=0))
    return decoded, rings


def test_each_of_two_processes_decodes_its_part_and_both_learn_what_one_does(folder: Path) -> None:
    ((all_files, rings),) = values(Group(1, share_run, folder.parent))
    assert (len(all_files), rings) == (10, [8])
    (first, first_rings), (second, second_rings) = values(Group(2, share_run, folder.parent))
    assert first_rings == second_rings == [4]
    assert len(first) == len(second) == 4 + 2, "the last batch, of two images, is not divided"
    assert set(first) | set(second) == set(all_files)
    one, two = (last_state(folder.parent / count) for count in "12")
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=1e-9, atol=1e-9), name


# What is refused


def refused(config: RunConfig, match: str, store: ImageStore | None = None, **given: Any) -> None:
    with pytest.raises(EngramError, match=match):
        list(run(config, store or load_store(config.data), **given))


def test_what_cannot_be_trained_on_photographs_is_refused_before_it_trains(folder: Path) -> None:
    with pytest.raises(EngramError, match=r"crops=photograph is for imagenet100 and imagenet1000, not for .* mini;"):
        DataConfig("mini", crops="photograph")
    with pytest.raises(EngramError, match="no crops 'film': valid names: photograph, square"):
        DataConfig("imagenet100", crops="film")  # pyright: ignore[reportArgumentType]
    config = config_of(folder)
    refused(config, "decodes the images of every batch, .* leave out images=resident", images="resident")
    refused(config, "needs the files of the images, which", toy_store())
    refused(config, "needs the files", load_store(data_of(folder, crops="square")))
    refused(replace(config, augmentation=Augmentation(pad=1)), r"resizes its crops, but augmentation\.view is none")
    refused(config_of(folder, "ucir-dde"), "neighbours .* crops cannot come from the photographs; leave out crops=")
    refused(
        config_of(folder, "mnemonics"), "Mnemonics changes the pixels of its exemplars.* leave out crops=photograph"
    )


def test_images_of_another_data_set_keep_the_crops_that_were_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(imagenet.IMAGENET, "imagenet100", 4)
    store, asked = load_store(data_of(folder)), DataConfig("imagenet100", str(folder), crops="photograph")
    assert settle(config_of(folder, data=asked), store).data == DataConfig("imagenet1000", crops="photograph")


def test_changed_exemplars_that_a_method_did_not_announce_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replay, "exemplars", lambda _, __, stage, ___: {0: stage.pool[stage.rows_of(0)]})
    refused(config_of(folder, "replay", epochs=1), "Replay changes the pixels of its exemplars")


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"no picture")])
def test_a_photograph_that_cannot_be_read_any_more_ends_the_run_and_is_named(
    damage: Callable[[Path], None], folder: Path
) -> None:
    config = config_of(folder, "replay", epochs=1)
    store = load_store(config.data)
    damage(folder / "train" / "n00000001" / "1.JPEG")
    refused(config, r"photograph .*n00000001/1\.JPEG cannot be read any more \(.+\); put it back and resume", store)


def test_other_photographs_of_the_same_squares_are_another_run(folder: Path) -> None:
    config = config_of(folder, "replay")
    store, place = load_store(config.data), folder.parent / "run"
    run_stopped(config, store, place, 1)
    assert store.photographs is not None
    others = replace(store, photographs=replace(store.photographs, digest="0" * 32))
    with pytest.raises(EngramError, match=r"the photographs are not those that the run in .* started with"):
        list(resume(place, others))
    squares = replace(config, data=data_of(folder, crops="square"))
    keys = {Session(*each).base_key() for each in ((config, store), (config, others), (squares, store))}
    assert (len(keys), None in keys) == (3, False)
    assert config.fingerprint() != squares.fingerprint()
    assert config.to_plain()["data"]["crops"] == "photograph"
    assert "crops" not in squares.to_plain()["data"], "as before there was a choice"


def test_the_command_line_says_that_images_are_decoded_in_every_epoch(
    folder: Path, engram: Engram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.data.photographs.os.sched_getaffinity", lambda _: range(3))
    typed = ["run", "replay-imagenet1000-b500-s10", "--data", str(folder), "--image-size", str(SIDE), "--base", "2"]
    typed += ["--increment", "2", "--order", "natural", "--crops", "photograph", "--backbone", "resnet10"]
    typed += ["--device", "cpu", "--epochs", "1"]
    for _ in range(2):  # decoded or not
        planned = engram(*typed, "--dry-run")
        assert planned.status == 0, planned.err
        assert "crops come from the photographs, which are decoded in every epoch, by 3 threads" in planned.out
        load_store(data_of(folder))
    assert engram(*typed, "--dry-run", "--images", "streamed").status == 0
    outcome = engram("run", "afc-mini-b10-s5", "--crops", "photograph")
    assert (outcome.status, "--crops is for ImageNet, but afc-mini-b10-s5 reads mini" in outcome.err) == (2, True)
    config = config_of(folder, "replay", epochs=1)
    events = run(config, load_store(config.data), stop_after_stage=0)
    (placed,) = (event for event in events if isinstance(event, ImagesPlaced))
    assert placed.message == (
        "stage 0: 10 photographs are streamed batch by batch and decoded in every epoch, by 3 threads"
    )
    manifest = engram(*typed, "--dry-run", "--json")
    assert json.loads(manifest.out)["config"]["data"]["crops"] == "photograph"
