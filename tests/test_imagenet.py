"""ImageNet: reading its folders, the decoded images on disk, what does not fit, and the recipes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from engram import EngramError, recipe, recipe_names
from engram.contract import Training
from engram.core import memory_limits as room
from engram.core.io import data_home, lock
from engram.core.serialize import to_plain
from engram.data import store
from engram.data.decode.image import unreadable_error
from engram.data.sources import decoding, imagenet
from engram.data.sources import image_cache as imagecache
from engram.data.sources.image_cache import Description, ImageCache, UnfinishedImages
from engram.data.sources.imagenet import CACHE, IMAGENET, MEAN, STD, decode_square, published_wnids, read_imagenet
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import Images
from engram.data.stream import class_order
from engram.engine import buffers
from engram.engine.buffers import DeviceBuffers
from engram.experiment.base_cache import StageCache
from engram.experiment.recipes import IMAGENET_BASE, IMAGENET_STAGES
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.methods import METHODS
from helpers import Engram, learn_stage, make_stage, parameters_of, tiny_config, tiny_session, toy_store

CPU = torch.device("cpu")
SIDE = 8  # that the tests decode to


def write_jpeg(path: Path, seed: int, size: tuple[int, int] = (14, 10)) -> None:
    """A small JPEG of its own colours, wider than high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, 3) * 0.5 + random.integers(0, 128, (size[1], size[0], 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path, "JPEG", quality=95)


def write_imagenet(root: Path, wnids: tuple[str, ...], train: int = 2, val: int = 1) -> Path:
    """ImageNet's folders with so many images a class."""
    for number, wnid in enumerate(wnids):
        for i in range(train):
            write_jpeg(root / "train" / wnid / f"{wnid}_{i}.JPEG", 10 * number + i)
        for i in range(val):
            write_jpeg(root / "val" / wnid / f"ILSVRC2012_val_{number:04}{i}.JPEG", 10 * number + 5 + i)
    return root


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet-100 in small."""
    return write_imagenet(tmp_path_factory.mktemp("imagenet"), published_wnids())


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ImageNet that has three classes in all."""
    monkeypatch.setitem(imagenet.IMAGENET, "imagenet1000", 3)
    return write_imagenet(tmp_path / "three", ("n00000001", "n00000002", "n00000003"), train=3, val=2)


def read_three(root: Path, **options: Any) -> store.ImageStore:
    return read_imagenet("imagenet1000", root, **{"side": SIDE, **options})


# Reading


def test_imagenet100_has_its_hundred_classes_in_order(hundred: Path) -> None:
    images = read_imagenet("imagenet100", hundred, side=SIDE)
    assert images.class_names == published_wnids()
    assert list(images.class_names) == sorted(images.class_names)
    assert (len(images.train), len(images.test), images.image_size) == (200, 100, (SIDE, SIDE))
    assert images.train.class_ids.tolist() == [i for i in range(100) for _ in range(2)]
    assert (images.mean, images.std, images.origin, images.name) == (MEAN, STD, "imagenet100", "imagenet100")
    for row, path in (
        (5, f"train/{published_wnids()[2]}/{published_wnids()[2]}_1.JPEG"),
        (0, f"train/{published_wnids()[0]}/{published_wnids()[0]}_0.JPEG"),
    ):
        assert np.array_equal(images.train.images[row], decode_square(hundred / path, SIDE))
    assert len(set(class_order("1", "imagenet100", images.class_names))) == 100
    assert class_order("1", "imagenet100", images.class_names)[:3] == (68, 56, 78)


def test_other_folders_beside_the_hundred_are_left_alone(hundred: Path, tmp_path: Path) -> None:
    root = tmp_path / "all"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for wnid in published_wnids():
            (root / split / wnid).symlink_to(hundred / split / wnid)
        write_jpeg(root / split / "n99999999" / "x.JPEG", 1)
    assert read_imagenet("imagenet100", root, side=SIDE).num_classes == 100


def test_a_square_is_the_centre_of_the_image_with_its_shorter_side_brought_to_size(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (40, 20, 3), dtype=np.uint8)).resize((90, 60))
    noise.save(tmp_path / "x.JPEG", quality=95)
    with Image.open(tmp_path / "x.JPEG") as photograph:
        whole = np.asarray(photograph.resize((48, 32), Image.Resampling.BILINEAR)).astype(int)
    square = decode_square(tmp_path / "x.JPEG", 32).astype(int)
    assert square.shape == (32, 32, 3)
    assert np.abs(square - whole[:, 8:40]).max() <= 1


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_every_kind_of_official_file_is_read(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "x.JPEG"
    Image.new(mode, (20, 12)).save(path, "PNG" if mode == "RGB" else "JPEG")  # one of them is a PNG
    assert decode_square(path, 9).shape == (9, 9, 3)


def test_what_is_no_image_is_refused_at_once(tmp_path: Path) -> None:
    large, text, pipe = (tmp_path / f"{name}.JPEG" for name in ("large", "text", "pipe"))
    write_jpeg(large, 1)
    os.truncate(large, 2 * 2**30)  # of nothing: it takes no space
    text.write_text("dear reader")
    os.mkfifo(pipe)
    for file, reason in (
        (large, "MiB are more than"),
        (text, "it is not a PNG, JPEG"),
        (pipe, "it is not a regular file"),
    ):
        with pytest.raises(EngramError, match=rf"{file.name} cannot be read \(.*{reason}"):
            decode_square(file, SIDE)


def test_imagenet1000_takes_every_class_of_the_folder(three: Path) -> None:
    write_jpeg(three / "train" / "notes" / "x.JPEG", 1)  # no wnid
    images = read_three(three)
    assert images.class_names == ("n00000001", "n00000002", "n00000003")
    assert np.bincount(images.train.class_ids).tolist() == [3, 3, 3]
    assert np.bincount(images.test.class_ids).tolist() == [2, 2, 2]


# The decoded images on disk


def test_images_are_mapped_from_a_file_and_decoded_once(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    first = read_three(three, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 15) for i in range(1, 16)]
    base = first.train.images.base
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not first.train.images.flags.writeable
    monkeypatch.setattr(imagenet, "decode_square", lambda *_: pytest.fail("decoded again"))
    again = read_three(three)
    assert np.array_equal(first.train.images, again.train.images)
    assert np.array_equal(first.test.images, again.test.images)
    computed = store.ImageStore("x", again.train, again.test, again.class_names).fingerprint()
    assert again.known_fingerprint == again.fingerprint() == first.fingerprint() == computed


def test_changed_files_and_other_sizes_are_decoded_anew(three: Path) -> None:
    before = read_three(three)
    assert read_three(three, side=9).image_size == (9, 9)
    path = three / "train" / "n00000002" / "n00000002_1.JPEG"
    write_jpeg(path, 99)
    os.utime(path, ns=(1, 1))
    after = read_three(three)
    assert after.fingerprint() != before.fingerprint()
    differ = [i for i in range(9) if not np.array_equal(before.train.images[i], after.train.images[i])]
    assert differ == [4]
    assert len(ImageCache(data_home() / CACHE).entries()) == 3


@pytest.mark.parametrize("damage", ["cut", "no pixels", "no JSON", "half a JSON"])
def test_damaged_entries_are_decoded_anew(damage: str, three: Path) -> None:
    before = read_three(three)
    pixels, about = (next((data_home() / CACHE).glob(f"*{kind}")) for kind in (".pixels", ".json"))
    if damage == "cut":
        os.truncate(pixels, 100)
    elif damage == "half a JSON":
        about.write_text(about.read_text()[:30])
    else:
        (pixels if damage == "no pixels" else about).unlink()
    again = read_three(three)
    assert again.fingerprint() == before.fingerprint()
    assert np.array_equal(again.test.images[-1], decode_square(three / "val/n00000003/ILSVRC2012_val_00021.JPEG", SIDE))


def test_an_unreadable_image_is_named_and_can_be_skipped_from_there(three: Path) -> None:
    bad = three / "train" / "n00000002" / "n00000002_1.JPEG"
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(
        EngramError, match=r"n00000002_1\.JPEG cannot be read \(.+\); repair or remove it, or .*skip_bad"
    ):
        read_three(three)
    assert [path.suffix for path in (data_home() / CACHE).glob("*.unfinished")], "what was decoded before it stays"
    images = read_three(three, skip_bad=True)
    assert images.skipped == ("train/n00000002/n00000002_1.JPEG",)
    assert np.bincount(images.train.class_ids).tolist() == [3, 2, 3]
    assert np.array_equal(images.train.images[5], decode_square(three / "train/n00000003/n00000003_0.JPEG", SIDE))
    assert read_three(three, skip_bad=True).skipped == images.skipped
    with pytest.raises(EngramError, match=r"n00000002_1\.JPEG cannot be read"):
        read_three(three)


def test_a_set_that_was_decoded_stays_when_its_bad_files_are_not_to_be_skipped(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, refused, tried = imagenet.decode_square, [three / "train/n00000002/n00000002_1.JPEG"], list[Path]()

    def attempt(file: Path, side: int) -> Images:
        tried.append(file)
        if file in refused:
            raise unreadable_error(file, "for now")
        return decode(file, side)

    monkeypatch.setattr(imagenet, "decode_square", attempt)
    monkeypatch.setattr(ImageCache.__init__, "__defaults__", (15 * SIDE**2 * 3,))  # room for one set
    before = read_three(three, skip_bad=True)
    tried.clear()
    with pytest.raises(EngramError, match=r"n00000002_1\.JPEG cannot be read \(for now\); repair .*skip_bad"):
        read_three(three)
    assert tried == refused, "no other file is decoded to find that out"
    assert read_three(three, skip_bad=True).fingerprint() == before.fingerprint()
    assert tried == refused, "nor is the set decoded anew"
    bad = refused.pop()
    assert (len(read_three(three).train), bad in tried) == (9, True), "it can be read now"
    assert len([*(data_home() / CACHE).glob("*.pixels"), *(data_home() / CACHE).glob("*.json")]) == 2


ONE = Description(1, 8, {"train": (1,)})


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[" * 10**5,
        b'{"images": 15, "side": 8}',
        b'{"images": 15, "side": "8", "counts": {}}',
        b'{"images": 15, "side": 8, "counts": {"train": [9], "val": [6]}}',
        b'{"images": 15, "side": 8, "counts": {"train": [3, 3, 9]}}',
    ],
)
def test_a_damaged_description_is_made_again(damage: bytes, three: Path) -> None:
    wanted = read_three(three).fingerprint()
    file = next((data_home() / CACHE).glob("*.json"))
    whole = file.read_bytes()
    file.write_bytes(damage)
    again = read_three(three)
    assert (again.fingerprint(), again.train.images.shape, file.read_bytes()) == (wanted, (9, SIDE, SIDE, 3), whole)


def put(cache: ImageCache, key: str, images: int = 1) -> None:
    """Write a set of blank images into the cache."""
    with cache.locked(key):
        with cache.unfinished(key, 192, 192 * images) as into:
            for _ in range(images):
                into.append(np.zeros((8, 8, 3), np.uint8))
        cache.finish(key, Description(images, 8, {"train": (images,)}))


def test_a_set_stays_until_it_is_replaced(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", limit_bytes=400)
    for key in ("other", "same"):
        put(cache, key)
    with cache.locked("same"), suppress(EngramError), cache.unfinished("same", 192, 192) as into:
        into.append(np.zeros((8, 8, 3), np.uint8))
        raise EngramError("it broke off")
    assert cache.description("same") is not None
    assert cache.description("other") is not None, "there is room for it beside what is to be replaced"


def test_the_longest_unused_set_makes_room(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", limit_bytes=500)
    for number, key in enumerate(("a", "b")):
        put(cache, key)
        os.utime(cache.folder / f"{key}.pixels", (number, number))
    cache.images("a", 1, 8)  # used again
    put(cache, "c")
    assert {entry.key for entry in cache.entries()} == {"a", "c"}
    assert cache.description("b") is None
    assert cache.description("a") == ONE
    put(cache, "d", 4)  # more than the limit: it is kept alone
    assert [entry.key for entry in cache.entries()] == ["d"]


def test_a_stopped_decoding_is_continued_and_its_hash_is_that_of_all(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, tried = imagenet.decode_square, list[str]()
    monkeypatch.setattr(decoding, "CHUNK", 2)

    def attempt(file: Path, side: int) -> Images:
        if len(tried) == limit:
            raise KeyboardInterrupt
        tried.append(file.name)
        return decode(file, side)

    monkeypatch.setattr(imagenet, "decode_square", attempt)
    monkeypatch.setattr(decoding.os, "cpu_count", lambda: 1)
    limit = 7
    with pytest.raises(KeyboardInterrupt):
        read_three(three)
    unfinished = next((data_home() / CACHE).glob("*.unfinished"))
    assert unfinished.stat().st_size == 7 * SIDE**2 * 3
    with unfinished.open("ab") as file:
        file.write(b"half an image")  # a kill may leave more than was recorded
    outlined = imagenet.outline_imagenet("imagenet1000", three, SIDE, False)
    assert outlined is not None, "it is not complete"
    limit, seen = 100, list[int]()
    tried.clear()
    images = read_three(three, progress=lambda done, _: seen.append(done))
    assert (len(tried), seen) == (8, [*range(8, 16)])
    computed = store.ImageStore("x", images.train, images.test, images.class_names).fingerprint()
    assert images.known_fingerprint == computed
    assert sorted(path.suffix for path in (data_home() / CACHE).iterdir()) == [".folder", ".json", ".pixels"]


def test_a_full_disk_loses_nothing(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, written = UnfinishedImages.append, list[int]()

    def full(self: UnfinishedImages, image: Images) -> None:
        if len(written) == 5:
            self._file.write(b"half an image")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(1)
        append(self, image)

    monkeypatch.setattr(UnfinishedImages, "append", full)
    with pytest.raises(EngramError, match=r"disk of .* is full; 5 of 15 files are decoded and kept: free some space"):
        read_three(three)
    monkeypatch.setattr(UnfinishedImages, "append", append)
    seen: list[int] = []
    images = read_three(three, progress=lambda done, _: seen.append(done))
    assert seen == [*range(6, 16)]
    assert np.array_equal(images.train.images[5], decode_square(three / "train/n00000002/n00000002_2.JPEG", SIDE))


def test_a_second_process_waits_for_the_first(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = read_three(three).fingerprint()
    folder = data_home() / CACHE
    (folder / f"{next(folder.glob('*.json')).stem}.json").unlink()
    handle = lock(folder / f"{next(folder.glob('*.pixels')).stem}.lock")
    assert handle is not None
    monkeypatch.setattr(imagecache, "WAIT_SECONDS", 0.001)
    told: list[str] = []

    def notice(text: str) -> None:
        told.append(text)
        os.close(handle)

    assert read_three(three, notice=notice).fingerprint() == wanted
    assert len(told) == 1
    assert "another process is decoding these images; waiting" in told[0]


def test_a_decoded_folder_is_recognised_without_listing_it(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_three(three)
    with monkeypatch.context() as patched:
        patched.setattr(imagenet, "_list_all", lambda *_: pytest.fail("listed"))
        assert np.array_equal(read_three(three).train.images, before.train.images)
        assert imagenet.outline_imagenet("imagenet1000", three, SIDE, False) is None
    write_jpeg(three / "val" / "n00000001" / "more.JPEG", 7)
    assert len(read_three(three).test) == len(before.test) + 1


def test_a_full_disk_is_told_before_it_is_full(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(imagecache.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**3))
    with pytest.raises(
        EngramError, match=r"need 0\.0 GB in .*images, where 0\.0 GB are free; free some space, .*ENGRAM_DATA"
    ):
        read_three(three)


# What is refused


def test_validation_images_side_by_side_are_refused_with_what_to_do(three: Path) -> None:
    shutil.rmtree(three / "val")
    for i in range(3):
        write_jpeg(three / "val" / f"ILSVRC2012_val_{i:08}.JPEG", i)
    with pytest.raises(
        EngramError, match=r"directly inside instead of in class folders; move each .*valprep\.sh.*wnid"
    ):
        read_three(three)


def test_other_layouts_are_refused(three: Path, hundred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngramError, match=r"has no folder train/; give the folder of ImageNet with train/ and val/"):
        read_three(three / "train")
    with pytest.raises(
        EngramError, match=r"lacks 100 of the 100 class folders of imagenet100: 'n01440764', .* and 97 more"
    ):
        read_imagenet("imagenet100", three)
    monkeypatch.setitem(imagenet.IMAGENET, "imagenet1000", 1000)
    with pytest.raises(
        EngramError, match=r"has 100 class folders with names like n01440764, and imagenet1000 has 1,000"
    ):
        read_imagenet("imagenet1000", hundred)
    shutil.rmtree(three / "val" / "n00000002")
    monkeypatch.setitem(imagenet.IMAGENET, "imagenet1000", 3)
    with pytest.raises(EngramError, match=r"val lacks 1 of the 3 class folders of imagenet1000: 'n00000002'"):
        read_three(three)
    (three / "val" / "n00000002").mkdir()
    with pytest.raises(EngramError, match=r"n00000002 has no image; unpack ImageNet's val set again"):
        read_three(three)
    with pytest.raises(EngramError, match=r"imagenet100 needs the folder with ImageNet's train/ and val/: give data"):
        load_store(DataConfig("imagenet100"))


def test_a_share_held_out_has_a_fingerprint_of_its_own_and_must_fit(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_three(three)
    held = load_store(DataConfig("imagenet1000", str(three), image_size=SIDE, holdout=0.3))
    assert (len(held.train), len(held.test)) == (6, 3)
    assert held.fingerprint() != whole.fingerprint()
    monkeypatch.setattr(room, "UNCHECKED_BYTES", 100)
    monkeypatch.setattr(room, "free_memory", lambda: 1000)
    with pytest.raises(EngramError, match=r"copies of the training images, .* need 0\.0 GB of memory, and 0\.0 GB are"):
        whole.holdout(0.3, seed=0)


def test_free_memory_is_what_the_machine_says() -> None:
    assert 2**24 < room.free_memory() < 2**50
    assert room.free_device_memory(CPU) == pytest.approx(room.free_memory(), rel=0.5)


def test_a_pool_is_the_same_brought_here_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "PART", 3 * 12 * 12 * 3)
    here, stage = DeviceBuffers(CPU, 2), make_stage(0, 0, [0, 1, 1, 0, 1, 0, 0])
    pool = here.pool(stage)
    assert torch.equal(pool.padded[:, 2:10, 2:10], stage.pool.pixels)
    assert pool.padded.long().sum() == stage.pool.pixels.long().sum()
    assert here.image_bytes == 7 * 12 * 12 * 3


# Recipes


def test_the_methods_of_the_papers_table_have_recipes() -> None:
    rows = {"afc", "podnet", "podnet-dde", "ucir", "ucir-dde", "mnemonics", "icarl", "bic", "geodl"}
    offering = {method: info.recipes.imagenet for method, info in METHODS.items() if info.recipes.imagenet}
    assert rows <= {method for method, datasets in offering.items() if set(datasets) == set(IMAGENET_BASE)}
    for method, datasets in offering.items():
        for dataset in datasets:
            base = IMAGENET_BASE[dataset]
            for stages, new in IMAGENET_STAGES[dataset].items():
                config = recipe(f"{method}-{dataset}-b{base}-s{stages}")
                assert (config.base, config.increment) == (base, new)
                assert base + stages * new == IMAGENET[dataset]
                assert config.memory.selection == METHODS[method].selection
                assert (str(config.memory), config.backbone, config.data.name) == ("per_class=20", "resnet18", dataset)
                assert config.augmentation.view_size((256, 256)) == (224, 224)
                assert config.augmentation.brightness == (63 / 255 if METHODS[method].brightened else 0)
    offered = sum(len(IMAGENET_STAGES[dataset]) for datasets in offering.values() for dataset in datasets)
    assert len([name for name in recipe_names() if "-imagenet" in name]) == offered >= 40


def training(name: str, phase: str = "train") -> Training:
    return getattr(recipe(name).settings, phase)


def test_the_settings_are_the_published_ones() -> None:
    afc: Any = recipe("afc-imagenet100-b50-s50").settings
    assert (afc.lambda_disc, afc.finetune.lr, afc.finetune.epochs, afc.finetune.weight_decay) == (10, 0.02, 20, 1e-4)
    assert afc.train == Training(90, 128, 0.1, "cosine", weight_decay=1e-4)
    assert recipe("afc-imagenet1000-b500-s5").settings == afc
    podnet: Any = recipe("podnet-imagenet100-b50-s10").settings
    assert (podnet.lambda_flat, podnet.lambda_spatial) == (10, 8)
    assert podnet.train == Training(90, 64, 0.05, "cosine", weight_decay=5e-4)
    assert (podnet.finetune.lr, podnet.finetune.batch_size) == (0.01, 64)
    assert training("podnet-imagenet1000-b500-s10").weight_decay == 1e-4
    for dataset, base in IMAGENET_BASE.items():
        protocol = f"{dataset}-b{base}-s5"
        hosted = to_plain(recipe(f"podnet-dde-{protocol}").settings)
        assert {name: value for name, value in hosted.items() if name != "dde"} == to_plain(
            recipe(f"podnet-{protocol}").settings
        )
        hosted: Any = recipe(f"ucir-dde-{protocol}").settings
        assert hosted.lambda_embedding == (5 if dataset == "imagenet100" else 10)
    cosine = (("ucir", "lambda_embedding"), ("mnemonics", "lambda_embedding"), ("geodl", "lambda_geodesic"))
    for method, weight in (*cosine, ("ucir-dde", "lambda_embedding")):
        name = f"{method}-imagenet1000-b500-s10"
        assert getattr(recipe(name).settings, weight) == 10
        assert training(name).milestones == (30 / 90, 60 / 90)
        assert (training(name).epochs, training(name).lr, training(name).weight_decay) == (90, 0.1, 1e-4)
    icarl = training("icarl-imagenet100-b50-s5")
    assert (icarl.epochs, icarl.lr, icarl.batch_size, icarl.weight_decay, icarl.factor) == (60, 1.0, 64, 1e-5, 0.2)
    assert [share * 60 for share in icarl.milestones] == [20, 30, 40, 50]
    bic = training("bic-imagenet100-b50-s5")
    assert (bic.epochs, bic.lr, bic.batch_size, bic.weight_decay, bic.factor) == (100, 0.025, 64, 1e-4, 0.1)
    assert [share * 100 for share in bic.milestones] == [30, 60, 80, 90]
    ssil = training("ssil-imagenet1000-b500-s10")
    assert (ssil.epochs, ssil.lr, ssil.milestones, ssil.weight_decay) == (100, 0.1, (0.4, 0.8), 1e-4)
    assert training("gdumb-imagenet100-b50-s5").epochs == 128
    assert training("gdumb-imagenet100-b50-s5", "rehearse").epochs == 16


def test_resnet18_learns_two_stages_of_resized_parts() -> None:
    config = tiny_config(epochs=1, backbone="resnet18", augmentation=recipe("afc-imagenet100-b50-s5").augmentation)
    session = tiny_session(config, toy_store(num_classes=4, per_class=4, size=37))
    assert session.engine.image_size == (32, 32)
    before = parameters_of(session.learner.network.backbone)
    for index in range(2):
        learn_stage(session, index)
    after = parameters_of(session.learner.network.backbone)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [len(session.learner.buffers[f"importance.{i}"]) for i in range(4)] == [64, 128, 256, 512]
    accuracy, _, _ = session.evaluate(1)
    assert set(accuracy) == {"cnn", "nme"}


def test_a_recipe_runs_stops_and_resumes_to_the_same_numbers(hundred: Path, tmp_path: Path) -> None:
    data = DataConfig("imagenet100", str(hundred), image_size=40)
    config = recipe("afc-imagenet100-b50-s5").with_settings(
        train__epochs=1, train__batch_size=2, finetune__epochs=1, finetune__batch_size=2, proxies=2
    )
    config = config.with_value("base", 2).with_value("increment", 2).with_value("device", "cpu")
    config = config.with_value("memory.size", 1).with_value("data", data).with_value("backbone", "resnet10")
    assert Session(config, load_store(data)).engine.image_size == (35, 35)

    def stages(directory: Path) -> list[Any]:
        done = json.loads((directory / "result.json").read_text())["stages"]
        return [stage["accuracy_by_stage"] for stage in done]

    list(run(config, None, tmp_path / "whole", stop_after_stage=1))
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == 3  # in the main phase of stage 1

    list(run(config, None, tmp_path / "cut", stop=stop))
    list(resume(tmp_path / "cut", stop_after_stage=1))
    assert len(stages(tmp_path / "whole")) == 2
    assert stages(tmp_path / "cut") == stages(tmp_path / "whole")
    for stage in ("000", "001"):
        ours, theirs = (tmp_path / which / "stages" / f"{stage}.safetensors" for which in ("cut", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


# The command line


def test_a_dry_run_shows_what_is_stored_and_what_is_seen_and_decodes_nothing(
    hundred: Path, engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, side: int) -> NoReturn:
        raise AssertionError(f"{file} was decoded")

    monkeypatch.setenv("ENGRAM_DATA", str(tmp_path / "data"))
    run = ("run", "ucir-imagenet100-b50-s25", "--data", hundred, "--image-size", "16", "--dry-run")
    with monkeypatch.context() as patch:
        patch.setattr(imagenet, "decode_square", refuse)
        outcome, several = engram(*run, "--json"), engram(*run, "--seeds", "1,2")
        held_out = engram(*run, "--set", "data.holdout=0.5")
    assert (outcome.status, several.status, held_out.status) == (0, 0, 0)
    assert outcome.err == several.err == held_out.err
    assert outcome.err == (
        "engram: imagenet100 is not decoded yet; the first run decodes 300 images of 16x16 pixels into "
        f"{tmp_path / 'data' / 'images'}, about 0.00023 GB\n"
    )
    assert list(tmp_path.iterdir()) == [], "nothing was written"
    read_imagenet("imagenet100", hundred, side=16)
    decoded = engram(*run, "--json")
    assert (decoded.out, decoded.err) == (outcome.out, "")
    plan = json.loads(outcome.out)
    (tmp_path / plan["directory"]).mkdir(parents=True)
    shutil.rmtree(tmp_path / "data")
    assert "cannot be compared with their images: imagenet100 is not decoded" in engram(*run, "--seeds", "1,2").err
    assert plan["config"]["data"]["name"] == "imagenet100"
    assert plan["card"]["Data set"].endswith("200 training and 100 test images, 16x16, of which 14x14 are seen")
    assert plan["card"]["Class order"] == "1 (published)"
    assert len(plan["stages"]) == 26


def test_flags_and_commands_know_imagenet(hundred: Path, engram: Engram) -> None:
    for arguments, words in (
        (["run", "afc-imagenet100-b50-s5", "--data", hundred, "--test-fraction", "0.5"], "is for a folder of images"),
        (["run", "afc-imagenet1000-b500-s5", "--dry-run"], "give --data PATH"),
        (["prepare", "imagenet100"], "cannot be downloaded: get ImageNet from https://image-net.org"),
    ):
        outcome = engram(*arguments)
        assert outcome.status == 2
        assert words in outcome.err
    datasets = engram("list", "datasets").out.split()
    assert {"imagenet100", "imagenet1000"} <= set(datasets)
    assert "resnet18" in engram("list", "backbones").out


def test_decoded_images_are_listed_beside_base_stages(three: Path, engram: Engram) -> None:
    assert (
        engram("list", "cache").out
        == f"0 trained base stages in {data_home() / 'stages'}; you can delete any of them\n"
    )
    read_three(three)
    stages = StageCache(data_home() / "stages")
    stages.save("base", {"x": torch.zeros(3)}, "afc-mini-b10-s5-order1-seed1")
    stage, decoded = json.loads(engram("list", "cache", "--json").out)
    (pixels,) = (data_home() / CACHE).glob("*.pixels")
    assert (stage["kind"], decoded["kind"]) == ("base stage", "decoded images")
    assert stage["path"] == str(stages.entries()[0].path)
    assert (stage["trained by"], decoded["trained by"]) == ("afc-mini-b10-s5-order1-seed1", None)
    assert (decoded["path"], decoded["file"]) == (str(pixels), pixels.name)
    assert decoded["megabytes"] == f"{15 * SIDE**2 * 3 / 1e6:.1f}"
    shown = engram("list", "cache").out
    assert "1 trained base stages in" in shown
    assert f"1 set of decoded images in {data_home() / CACHE}; you can delete any of them" in shown
    assert shown.index(stage["trained by"]) < shown.index(stage["file"]) < shown.index(pixels.name)
    pixels.unlink()
    assert "of decoded images" not in engram("list", "cache").out
    read_three(three)  # decoded again
    assert pixels.exists()
