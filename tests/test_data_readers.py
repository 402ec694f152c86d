"""The readers: every source gives the same kind of store, and a wrong input gets one clear sentence."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import zlib
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engram.core.errors import EngramError
from engram.data.sources import cifar, folder, mini
from engram.data.sources.cifar import OFFICIAL_NAMES, published_orders, read_cifar100
from engram.data.sources.folder import read_folder
from engram.data.sources.load import DataConfig, load_store
from engram.data.sources.mini import read_mini
from engram.data.store import DataSplit, ImageStore, stratified_split
from helpers import SAMPLE, SHARED, decode_image, memory_grown, unpack_archive

ROOT = Path(__file__).resolve().parent.parent


def random_images(count: int, seed: int = 0, height: int = 4, width: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def make_split(ids: list[int], seed: int = 0, height: int = 4) -> DataSplit:
    return DataSplit(random_images(len(ids), seed, height), np.array(ids, dtype=np.int64))


def make_store(**changes: Any) -> ImageStore:
    fields: dict[str, Any] = {
        "name": "tiny",
        "train": make_split([0, 1, 2, 0, 1, 2]),
        "test": make_split([0, 1, 2], seed=1),
        "class_names": ("ant", "bee", "cat"),
    }
    return ImageStore(**(fields | changes))


# The store


def test_store_knows_its_classes_and_size() -> None:
    store = make_store(train=make_split([0, 1, 2], height=5), test=make_split([2, 1, 0], height=5))
    assert (store.num_classes, store.image_size, len(store.train), len(store.test)) == (3, (5, 4), 3, 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"class_names": ("ant",)}, "has 1 class; learning"),
        ({"class_names": ()}, "has 0 classes"),
        ({"class_names": ("ant", "bee", "ant")}, "'ant' occurs more than once"),
        ({"class_names": ("ant", " ", "cat")}, "class 1 has the empty name ' '"),
        ({"class_names": ("ant", "\udcff", "cat")}, "not valid Unicode"),
        ({"class_names": ["ant", "bee", "cat"]}, "must be a tuple of strings"),
        ({"train": make_split([])}, "'tiny' has no training image"),
        ({"test": make_split([])}, "'tiny' has no test image"),
        ({"train": make_split([0, 1, 2, 3])}, "class id 3 of a training image is out of range"),
        ({"test": make_split([0, 1, -1])}, "class id -1 of a test image is out of range"),
        ({"test": make_split([0, 1, 2], height=6)}, "training images are 4x4 pixels and test images 6x4"),
        ({"train": make_split([0, 1])}, "class 'cat' has test images but no training image"),
        ({"train": make_split([0, 1]), "test": make_split([0, 1])}, "class 'cat' has no training image"),
        ({"train": make_split([0])}, r"class 'bee' \(and 1 more\) has test images but no training image"),
        (
            {"test": make_split([0, 2])},
            "class 'bee' has no test image, so its accuracy could not be measured",
        ),
        ({"mean": (0.5, 0.5, 0.5)}, "give both mean and std"),
        ({"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.0, 0.5)}, "std positive"),
    ],
)
def test_store_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        make_store(**changes)


@pytest.mark.parametrize(
    ("images", "ids", "sentence"),
    [
        (np.zeros((2, 4, 4, 3)), np.zeros(2, np.int64), "must be a NumPy array of uint8, not float64"),
        ([[1]], np.zeros(1, np.int64), "must be a NumPy array of uint8, not list"),
        (np.zeros((2, 4, 4), np.uint8), np.zeros(2, np.int64), r"the shape \(N, height, width, 3\)"),
        (np.zeros((2, 0, 4, 3), np.uint8), np.zeros(2, np.int64), r"not \(2, 0, 4, 3\)"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(2, np.int32), "must be a NumPy array of int64"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(3, np.int64), "2 images need 2 class ids"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros((2, 1), np.int64), "in one dimension"),
    ],
)
def test_split_refuses(images: Any, ids: Any, sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        DataSplit(images, ids)


def test_fingerprint_changes_with_every_part_and_only_with_it() -> None:
    store = make_store()
    pixels = store.train.images.copy()
    pixels[3, 1, 2, 0] ^= 1
    others = [
        make_store(train=DataSplit(pixels, store.train.class_ids)),
        make_store(train=DataSplit(store.train.images, np.array([0, 1, 2, 0, 2, 1]))),
        make_store(test=DataSplit(store.test.images[::-1], store.test.class_ids)),
        make_store(class_names=("ant", "bee", "cow")),
        make_store(class_names=("an", "tbee", "cat")),
    ]
    digests = [item.fingerprint() for item in [store, *others]]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 for digest in digests)
    strided = np.asfortranarray(store.train.images)
    assert make_store(name="copy", train=DataSplit(strided, store.train.class_ids)).fingerprint() == digests[0]


def test_holdout_uses_the_training_split_alone() -> None:
    store = make_store(train=make_split([0, 1, 2] * 10), mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    share = store.holdout(0.2, seed=3)
    assert (share.name, share.mean, len(share.train), len(share.test)) == (
        "tiny:holdout0.2",
        store.mean,
        24,
        6,
    )
    assert Counter(share.test.class_ids.tolist()) == {0: 2, 1: 2, 2: 2}
    parts = [image.tobytes() for split in (share.train, share.test) for image in split.images]
    assert sorted(parts) == sorted(image.tobytes() for image in store.train.images)
    assert share.fingerprint() == store.holdout(0.2, seed=3).fingerprint() != store.holdout(0.2, seed=4).fingerprint()
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        with pytest.raises(EngramError, match="between 0 and 1"):
            store.holdout(fraction, seed=0)


@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(-(2**40), 2**40),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_stratified_split_is_a_fair_partition(
    counts: list[int], fraction: float, seed: int, data: st.DataObject
) -> None:
    names = [f"class {i}" for i in range(len(counts))]
    ids = np.array(data.draw(st.permutations(np.repeat(np.arange(len(counts)), counts).tolist())), dtype=np.int64)
    kept, held = stratified_split(ids, names, fraction, seed)
    assert sorted([*kept, *held]) == list(range(len(ids)))
    assert (np.diff(kept) > 0).all()
    assert (np.diff(held) > 0).all()
    for class_id, count in enumerate(counts):
        taken = int((ids[held] == class_id).sum())
        assert 1 <= taken <= count - 1
        assert abs(taken - count * fraction) <= 0.5 or taken in (1, count - 1)
    again = stratified_split(ids, names, fraction, seed)
    assert np.array_equal(again[0], kept)
    # What is drawn of one class does not depend on the others.
    alone = np.flatnonzero(ids == 0)
    _, held_alone = stratified_split(np.zeros(len(alone), np.int64), names[:1], fraction, seed)
    assert np.array_equal(alone[held_alone], held[ids[held] == 0])


def test_stratified_split_draws_the_same_forever() -> None:
    # Ranks by the definition: eight bytes of SHAKE-128 of "seed/name" for each image, the lowest held out.
    stream = hashlib.shake_128(b"7/ant").digest(80)
    ranks = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(10)]
    _, held = stratified_split(np.zeros(10, np.int64), ["ant"], 0.3, 7)
    assert held.tolist() == sorted(sorted(range(10), key=ranks.__getitem__)[:3])


# Arrays


def test_from_arrays_keeps_a_given_test_set_and_owns_its_images() -> None:
    x, x_test = random_images(6), random_images(3, seed=1)
    store = ImageStore.from_arrays(x, [10, 2, 10, 2, 33, 33], x_test, [2, 10, 33], name="mine")
    assert (store.name, store.class_names) == ("mine", ("2", "10", "33"))
    assert store.train.class_ids.tolist() == [1, 0, 1, 0, 2, 2]
    assert store.test.class_ids.tolist() == [0, 1, 2]
    before = store.train.images.copy()
    x[:] = 0
    assert np.array_equal(store.train.images, before)
    assert store.train.images.flags.writeable
    assert store.train.images.flags.c_contiguous


@pytest.mark.parametrize("labels", [["b", "a"] * 5, np.array(["b", "a"] * 5, dtype=object)])
def test_from_arrays_holds_out_a_share_of_string_labels(labels: Any) -> None:
    store = ImageStore.from_arrays(random_images(10), labels, test_fraction=0.4, seed=5)
    assert store.class_names == ("a", "b")
    assert Counter(store.train.class_ids.tolist()) == {0: 3, 1: 3}
    assert Counter(store.test.class_ids.tolist()) == {0: 2, 1: 2}


@pytest.mark.parametrize("shape", [(8, 5, 6), (8, 5, 6, 1)])
def test_from_arrays_makes_grey_images_colour(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    store = ImageStore.from_arrays(x, [0, 1] * 4, x[:2], [0, 1])
    assert store.train.images.shape == (8, 5, 6, 3)
    for channel in range(3):
        assert np.array_equal(store.train.images[..., channel], x.reshape(8, 5, 6))


def test_from_arrays_class_names_give_ids_their_names() -> None:
    names = ["zebra", "ant", "cow"]
    ids = [2, 0, 1, 1, 0, 2]
    by_id = ImageStore.from_arrays(random_images(6), np.array(ids, float), class_names=names)
    by_name = ImageStore.from_arrays(random_images(6), [names[i] for i in ids], class_names=names)
    assert by_id.class_names == tuple(names)
    assert by_id.fingerprint() == by_name.fingerprint()


def test_floats_and_data_sets_give_the_same_store() -> None:
    x, y = random_images(8), [0, 1] * 4
    wanted = ImageStore.from_arrays(x, y).fingerprint()
    assert ImageStore.from_arrays(x / 255, y).fingerprint() == wanted
    assert ImageStore.from_arrays((x / 255).astype(np.float32), y).fingerprint() == wanted
    assert ImageStore.from_arrays([Image.fromarray(image) for image in x], y).fingerprint() == wanted
    pairs = deque(zip(x, y, strict=True))  # a length and items
    assert ImageStore.from_dataset(pairs).fingerprint() == wanted
    both = ImageStore.from_dataset(pairs, pairs, name="mine", class_names=["a", "b"])
    assert (both.name, both.class_names, len(both.test)) == ("mine", ("a", "b"), 8)
    with pytest.raises(EngramError, match=r"x_train is a data set \(deque\), not one array; give it to ImageStore"):
        ImageStore.from_arrays(pairs, y)
    with pytest.raises(EngramError, match=r"the images of train differ in size: one has 4x4 .* train\[8\] 3x4"):
        ImageStore.from_dataset(deque([*pairs, (x[0][:, :3], 1)]))


def test_from_arrays_takes_tensors_without_importing_torch() -> None:
    torch = pytest.importorskip("torch")
    x, y = random_images(8), [0, 1] * 4
    tensors = ImageStore.from_arrays(torch.from_numpy(x), torch.tensor(y))
    assert tensors.fingerprint() == ImageStore.from_arrays(x, y).fingerprint()
    needed = torch.from_numpy(x).float().div(255).requires_grad_()
    assert ImageStore.from_arrays(needed, torch.tensor(y)).fingerprint() == tensors.fingerprint()
    code = "import sys, engram.data.store, engram.data.sources.cifar, engram.data.sources.folder\n"
    code += "import engram.data.sources.mini, engram.data.sources.download; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )


X = random_images(4)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((X / 128.0, [0, 1, 0, 1]), {}, r"x_train holds floats from 0.* to 1\.9.*; images are uint8, or floats"),
        ((X / 255 - np.float32(0.5), [0, 1, 0, 1]), {}, r"x_train holds floats from -0\.5"),
        ((X * np.nan, [0, 1, 0, 1]), {}, "x_train holds NaN or inf"),
        ((X.astype(np.int64), [0, 1, 0, 1]), {}, r"x_train holds int64 values.*x.astype\('uint8'\)"),
        ((X.transpose(0, 3, 1, 2), [0, 1, 0, 1]), {}, r"channels first \(4, 3, 4, 4\); move them last"),
        ((np.zeros((4, 4, 4, 4), np.uint8), [0, 1, 0, 1]), {}, "drop the alpha channel"),
        ((np.zeros((4, 5, 5, 2), np.uint8), [0, 1, 0, 1]), {}, "has 2 channels"),
        ((X.reshape(4, -1), [0, 1, 0, 1]), {}, r"x_train has the shape \(4, 48\)"),
        ((X[:0], []), {}, "holds no image"),
        (([X[0], X[1][:2]], [0, 1]), {}, r"could not be read as one array \(the images differ in size\)"),
        ((list(zip(X, [0, 1, 0, 1], strict=True)), [0, 1, 0, 1]), {}, "x_train could not be read as one array"),
        ((X, [0, 1, 0]), {}, "x_train has 4 images and y_train has 3 labels"),
        ((X, [[0], [1], [0], [1]]), {}, r"y_train has the shape \(4, 1\)"),
        ((X, [0.5, 1, 0, 1]), {}, "y_train holds 0.5; labels are whole numbers or strings"),
        ((X, [float("nan"), 1, 0, 1]), {}, "y_train holds nan"),
        ((X, [b"a", b"b", b"a", b"b"]), {}, "labels are whole numbers or strings"),
        ((X, [None, 1, 0, 1]), {}, "labels are whole numbers or strings"),
        ((X, [0, 0, 0, 0]), {}, "has 1 class; learning"),
        ((X, [0, 0, 0, 1]), {}, "class '1' has only one image"),
        ((X, [0, 1, 0, 1], X), {}, "x_test was given without y_test"),
        ((X, [0, 1, 0, 1], None, [0]), {}, "y_test was given without x_test"),
        ((X, [0, 1, 0, 1], X, [0, 1, 0, 7]), {}, "class '7' of y_test is not in y_train"),
        ((X, [0, 1, 0, 1], X[:, :2], [0, 1, 0, 1]), {}, "test images 2x4"),
        ((X, [0, 1, 0, 1]), {"test_fraction": 1.0}, "between 0 and 1"),
        ((X, [0, 1, 0, 2]), {"class_names": ["ant", "bee"]}, "label 2 of y_train is out of range"),
        ((X, [0, 1, 0, -1]), {"class_names": ["ant", "bee"]}, "label -1 of y_train is out of range"),
        ((X, [0, 1, 0, 1]), {"class_names": ["ant", "bee", "cat"]}, "class 'cat' has no training image"),
        ((X, [0, 1, 0, 1]), {"class_names": ["ant", "ant"]}, "'ant' occurs more than once"),
        ((X, [0, 1, 0, 1]), {"class_names": "ab"}, "must be a list of names"),
        ((X, ["ant", "be", "ant", "be"]), {"class_names": ["ant", "bee"]}, "did you mean 'bee'"),
    ],
)
def test_from_arrays_refuses(arguments: tuple[Any, ...], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        ImageStore.from_arrays(*arguments, **options)


# CIFAR-100


def fake_cifar(changes: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """The content of the three files with two training images and one test image of each class."""
    rng = np.random.default_rng(0)
    content: dict[str, dict[str, Any]] = {
        "meta": {"fine_label_names": [f"thing_{i:02d}" for i in range(100)], "coarse_label_names": ["all"]}
    }
    for name, count in (("train", 200), ("test", 100)):
        labels = rng.permutation(np.arange(count) % 100).tolist()
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        content[name] = {"data": pixels, "fine_labels": labels, "coarse_labels": [0] * count}
    for name, replaced in (changes or {}).items():
        content[name] |= replaced
    return content


def write_cifar(parent: Path, content: dict[str, dict[str, Any]]) -> Path:
    place = parent / "cifar-100-python"
    place.mkdir(parents=True)
    for name, value in content.items():
        (place / name).write_bytes(pickle.dumps(value, protocol=2))
    return place


def pack(place: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
        tar.add(place, arcname="cifar-100-python")
    return archive


FAKE_COUNTS = (200, 100)


def python2_pickle(value: dict[str, Any]) -> bytes:
    """A batch as Python 2 wrote it: str keys, numbers as flags of the dtype, numpy.core by its old name."""

    def text(data: bytes) -> bytes:
        return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + len(data).to_bytes(4, "little") + data

    pixels: np.ndarray = value["data"]
    shape = b"".join(b"M" + n.to_bytes(2, "little") for n in pixels.shape) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape
    array += b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    array += text(pixels.tobytes()) + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in value["fine_labels"]) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"fine_labels") + labels + b"u."


def test_cifar_reads_archive_folder_and_parent_alike(tmp_path: Path) -> None:
    content = fake_cifar()
    place = write_cifar(tmp_path / "data", content)
    (tmp_path / "alone").mkdir()
    paths = [
        place,
        place.parent,
        pack(place, tmp_path / "alone" / "cifar-100-python.tar.gz"),
        tmp_path / "alone",
        pack(place, tmp_path / "unzipped.tar"),
    ]
    stores = [read_cifar100(path, counts=FAKE_COUNTS) for path in [*paths, str(place)]]
    assert len({store.fingerprint() for store in stores}) == 1
    store = stores[0]
    assert (store.name, store.num_classes, store.image_size) == ("cifar100", 100, (32, 32))
    assert (store.mean, store.std) == ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
    assert store.class_names[7] == "thing_07"
    assert store.train.class_ids.tolist() == content["train"]["fine_labels"]
    row = content["test"]["data"][5]
    for y, x, channel in [(0, 0, 0), (0, 31, 2), (17, 4, 1), (31, 31, 2)]:
        assert store.test.images[5, y, x, channel] == row[channel * 1024 + y * 32 + x]


def test_cifar_reads_what_python_2_wrote(tmp_path: Path) -> None:
    content = fake_cifar()
    expected = read_cifar100(write_cifar(tmp_path / "a", content), counts=FAKE_COUNTS)
    place = write_cifar(tmp_path / "b", content)
    for name in ("train", "test"):
        (place / name).write_bytes(python2_pickle(content[name]))
    assert read_cifar100(place, counts=FAKE_COUNTS).fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"meta": {"fine_label_names": ["a"]}}, "meta has 1 fine class names where CIFAR-100 has 100"),
        ({"meta": {"fine_label_names": None}}, "meta has no fine class names"),
        (
            {"train": {"data": np.zeros((200, 3071), np.uint8)}},
            r"train has pixels of the form uint8 \(200, 3071\)",
        ),
        ({"train": {"data": np.zeros((200, 3072))}}, "train has pixels of the form float64"),
        ({"train": {"data": None}}, "train has pixels of the form NoneType"),
        ({"test": {"data": np.zeros((99, 3072), np.uint8)}}, "test has 99 images where CIFAR-100 has 100"),
        ({"test": {"fine_labels": [0] * 99}}, "test has 99 fine labels for 100 images"),
        ({"test": {"fine_labels": [100] * 100}}, "test has a fine label that is not 0 to 99"),
        ({"test": {"fine_labels": ["x"] * 100}}, "test has a fine label that is not 0 to 99"),
        ({"test": {"fine_labels": [0] * 100}}, "has no test image"),
    ],
)
def test_cifar_refuses_wrong_content(tmp_path: Path, changes: dict[str, dict[str, Any]], sentence: str) -> None:
    place = write_cifar(tmp_path, fake_cifar(changes))
    with pytest.raises(EngramError, match=sentence):
        read_cifar100(place, counts=FAKE_COUNTS)


def test_cifar_with_a_part_missing_does_not_pass_for_the_benchmark(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, fake_cifar())
    with pytest.raises(EngramError, match="train has 200 images where CIFAR-100 has 50000"):
        read_cifar100(place)
    assert len(read_cifar100(place, counts=None).train) == 200


def test_cifar_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"there is no file or folder .*nowhere"):
        read_cifar100(tmp_path / "nowhere")
    with pytest.raises(EngramError, match=r"has neither cifar-100-python.tar.gz nor"):
        read_cifar100(tmp_path)
    place = write_cifar(tmp_path, fake_cifar())
    (place / "test").unlink()
    with pytest.raises(EngramError, match="test is missing; extract"):
        read_cifar100(place)
    with pytest.raises(EngramError, match="has no file cifar-100-python/test"):
        read_cifar100(pack(place, tmp_path / "a.tar.gz"))


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("harmful", [Harmful(), np.float64, eval, io.BytesIO(), Path("x"), np.random.default_rng(0)])
def test_cifar_runs_no_program_from_a_pickle(tmp_path: Path, harmful: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = write_cifar(tmp_path, fake_cifar({"train": {"extra": harmful}}))
    for path in (place, pack(place, tmp_path / "a.tar.gz")):
        with pytest.raises(EngramError, match=r"train was refused: it asks for .*, which no CIFAR-100 file needs"):
            read_cifar100(path, counts=FAKE_COUNTS)
    assert not (tmp_path / "harm").exists()


READ_CIFAR = """
from engram import EngramError, read_cifar100
def work():
    try:
        return read_cifar100(sys.argv[1])
    except EngramError as error:
        return error
"""
_LARGE_TEXT = b"X" + (2**20).to_bytes(4, "little") + b"a" * 2**20 + b"q\x00"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r" + (150_000_000).to_bytes(4, "little") + b".",
        b"\x80\x02}p150000000\n.",
        b"\x80\x05\x96" + (2**31).to_bytes(8, "little") + b".",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\x00\x00\x00\x7f\x85U\x01b\x87R.",
        b"\x80\x02cnumpy\nndarray\nJ\x00\x00\x00\x7f\x85\x85R.",
        b"\x80\x02](" + b"\x8f" * (2**20 + 10) + b"e.",
        b"\x80\x02("
        + _LARGE_TEXT
        + b"c_codecs\nencode\nq\x01h\x00U\x06latin1\x86R"
        + b"h\x01h\x00U\x06latin1\x86R" * 999
        + b"t.",
        b"\x80\x02}" + b"q\x00" + b"](h\x00h\x00e" * 200 + b"s.",
    ],
    ids=["memo", "memo as text", "bytearray", "array", "array called", "sets", "texts encoded again", "nested"],
)
def test_a_small_pickle_takes_little_memory(content: bytes, tmp_path: Path) -> None:
    place = write_cifar(tmp_path, fake_cifar())
    (place / "meta").write_bytes(content)
    said, grown = memory_grown(READ_CIFAR, place)
    assert re.search("meta (was refused|is truncated or damaged|holds a)", said), said
    assert grown < 300, said


def test_cifar_names_a_truncated_or_foreign_file(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, fake_cifar())
    whole = (place / "train").read_bytes()
    for content in (
        b"",
        b"not a pickle",
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:20],
        gzip.compress(whole),
    ):
        (place / "train").write_bytes(content)
        with pytest.raises(EngramError, match=r"cifar-100-python/train is truncated or damaged \(.+\)"):
            read_cifar100(place)
    (place / "train").write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(EngramError, match="holds a list where CIFAR-100 has a table"):
        read_cifar100(place)


def test_cifar_names_a_truncated_archive_wherever_it_ends(tmp_path: Path) -> None:
    archive = pack(write_cifar(tmp_path, fake_cifar()), tmp_path / "a.tar.gz")
    whole = archive.read_bytes()
    for end in (
        0,
        1,
        10,
        100,
        len(whole) // 3,
        len(whole) // 2,
        len(whole) - 2000,
        len(whole) - 5,
        len(whole) - 1,
    ):
        archive.write_bytes(whole[:end])
        with pytest.raises(EngramError, match=r"a.tar.gz is truncated, damaged or no tar archive"):
            read_cifar100(archive, counts=FAKE_COUNTS)
    for position in (
        len(whole) // 2,
        len(whole) - 6,
    ):  # one bit wrong, once in the data, once in the checksum
        archive.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(EngramError, match=r"a.tar.gz"):
            read_cifar100(archive, counts=FAKE_COUNTS)
    plain = pack(tmp_path / "cifar-100-python", tmp_path / "a.tar")
    plain.write_bytes(plain.read_bytes()[:50_000])
    with pytest.raises(EngramError, match=r"a.tar is truncated"):
        read_cifar100(plain, counts=FAKE_COUNTS)


def test_cifar_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_cifar(tmp_path, fake_cifar())
    archive = pack(place, tmp_path / "a.tar.gz")

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    for path in (place, archive):
        with pytest.raises(EngramError, match=r"cannot be read \(Permission denied\); check the file"):
            read_cifar100(path, counts=FAKE_COUNTS)


def test_cifar_reads_only_its_own_files_from_an_odd_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_cifar(tmp_path / "in", fake_cifar())
    expected = read_cifar100(place, counts=FAKE_COUNTS).fingerprint()
    monkeypatch.chdir(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    archive = tmp_path / "odd.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("../escape", "/tmp/engram-escape", "cifar-100-python/train/x", "train"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"bad"))
        link = tarfile.TarInfo("cifar-100-python/train")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.add(place, arcname="./cifar-100-python")
    assert read_cifar100(archive, counts=FAKE_COUNTS).fingerprint() == expected
    assert sorted(tmp_path.rglob("*")) == sorted([*before, archive])
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(place, arcname="cifar-100-python")
        tar.add(place / "meta", arcname="cifar-100-python/meta")
    with pytest.raises(EngramError, match="holds cifar-100-python/meta twice"):
        read_cifar100(archive, counts=FAKE_COUNTS)
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(link)
    with pytest.raises(EngramError, match="has no file cifar-100-python/meta"):
        read_cifar100(archive, counts=FAKE_COUNTS)


def test_published_orders() -> None:
    orders = published_orders("cifar100")
    assert orders == published_orders("cifar100:holdout0.1")
    assert [sorted(order) for order in orders] == [list(range(100))] * 3
    assert orders[0][:5] == (87, 0, 52, 58, 44)
    assert [len(published_orders(name)[0]) for name in ("imagenet100", "imagenet1000")] == [100, 1000]
    assert published_orders("mini") == ()
    misspelt = "CIFAR10_ORDERS"
    with pytest.raises(AttributeError, match=misspelt):
        getattr(cifar, misspelt)


def real_cifar100() -> Path:
    """Where the real set is, or a skipped test."""
    names = ("cifar-100-python", "cifar-100-python.tar.gz")
    places = [base / name for base in (SHARED, SHARED / "data") for name in names]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        pytest.skip(f"the real CIFAR-100 is not in {SHARED} (set ENGRAM_TEST_DATA)")
    return found


def test_real_cifar100() -> None:
    store = read_cifar100(real_cifar100())
    assert store.class_names[:3] == ("apple", "aquarium_fish", "baby")
    assert store.class_names == OFFICIAL_NAMES
    assert (np.bincount(store.train.class_ids) == 500).all()
    assert (np.bincount(store.test.class_ids) == 100).all()
    mean = store.train.images.mean(axis=(0, 1, 2)) / 255
    assert store.mean is not None
    assert np.abs(mean - store.mean).max() < 1e-3


# Folders


def save(path: Path, image: Image.Image | np.ndarray | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(image, Image.Image):
        name_hash = int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:4], "little")
        image = Image.fromarray(random_images(1, name_hash, 6, 6)[0] if image is None else image)
    image.save(path, **options)
    return path


def make_folder(root: Path, classes: str = "ant bee", count: int = 5) -> Path:
    for name in classes.split():
        for i in range(count):
            save(root / name / f"{name}{i}.png")
    return root


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_folder_with_splits(tmp_path: Path, test_name: str) -> None:
    make_folder(tmp_path / "train", "cat ant bee", 3)
    make_folder(tmp_path / test_name, "bee cat ant", 2)
    calls: list[tuple[int, int]] = []
    store = read_folder(tmp_path, name="pets", progress=lambda done, total: calls.append((done, total)))
    assert (store.name, store.class_names, store.mean) == ("pets", ("ant", "bee", "cat"), None)
    assert store.train.class_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert store.test.class_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(store.train.images[4], np.asarray(Image.open(tmp_path / "train/bee/bee1.png")))
    assert calls == [(i, 15) for i in range(1, 16)]


def test_folder_prefers_test_to_val(tmp_path: Path) -> None:
    make_folder(tmp_path / "train")
    make_folder(tmp_path / "val", count=2)
    make_folder(tmp_path / "test", count=3)
    assert len(read_folder(tmp_path).test) == 6


def test_folder_split_depends_on_names_not_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "photos", count=10)
    store = read_folder(tmp_path / "photos", test_fraction=0.3, seed=1)
    assert (store.name, len(store.train), len(store.test)) == ("photos", 14, 6)
    real_scandir = os.scandir

    class Backwards:
        def __init__(self, path: Any) -> None:
            with real_scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(folder.os, "scandir", Backwards)
    assert read_folder(tmp_path / "photos", test_fraction=0.3, seed=1).fingerprint() == store.fingerprint()
    assert read_folder(tmp_path / "photos", test_fraction=0.3, seed=2).fingerprint() != store.fingerprint()


def test_a_configuration_says_the_share_of_test_images(tmp_path: Path) -> None:
    make_folder(tmp_path, "bus car")
    half = load_store(DataConfig("folder", str(tmp_path), test_fraction=0.5))
    assert half.fingerprint() == read_folder(tmp_path, test_fraction=0.5).fingerprint()
    assert half.fingerprint() != read_folder(tmp_path).fingerprint()


def test_folder_class_called_train_is_a_class(tmp_path: Path) -> None:
    make_folder(tmp_path, "bus train test")
    assert read_folder(tmp_path).class_names == ("bus", "test", "train")


def test_folder_formats_suffixes_and_what_is_ignored(tmp_path: Path) -> None:
    for i, (suffix, kind) in enumerate(
        [
            (".png", "PNG"),
            (".JPG", "JPEG"),
            (".jpeg", "JPEG"),
            (".WebP", "WEBP"),
            (".bmp", "BMP"),
            (".png", "JPEG"),
        ]
    ):
        for name in ("ant", "bee"):
            save(tmp_path / name / f"{i}{suffix}", format=kind)
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "ant" / "clip.svg").write_bytes(b"<svg")
    (tmp_path / "ant" / ".hidden.png").write_bytes(b"junk")
    (tmp_path / ".git").mkdir()
    (tmp_path / "readme.md").write_text("no class")
    save(tmp_path / "bee" / "deeper" / "still" / "x.png")
    store = read_folder(tmp_path)
    assert store.class_names == ("ant", "bee")
    assert np.bincount(np.concatenate([store.train.class_ids, store.test.class_ids])).tolist() == [6, 7]


def grey16() -> Image.Image:
    values = np.array([[0, 257, 32768], [40000, 65278, 65535]], dtype=np.uint16)
    return Image.fromarray(values)


def palette(transparent: bool) -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    if transparent:
        image.info["transparency"] = bytes([255, 0])
    return image


@pytest.mark.parametrize(
    ("image", "suffix", "options", "expected"),
    [
        (Image.new("L", (1, 1), 77), ".png", {}, [[[77, 77, 77]]]),
        (Image.new("1", (1, 1), 1), ".png", {}, [[[255, 255, 255]]]),
        (grey16(), ".png", {}, [[[v] * 3 for v in (0, 1, 128)], [[v] * 3 for v in (156, 254, 255)]]),
        (palette(False), ".png", {}, [[[255, 0, 0], [0, 0, 255]]]),
        (palette(True), ".png", {"transparency": bytes([255, 0])}, [[[255, 0, 0], [255, 255, 255]]]),
        (Image.new("RGBA", (1, 1), (10, 20, 30, 0)), ".png", {}, [[[255, 255, 255]]]),
        (Image.new("RGBA", (1, 1), (10, 20, 30, 255)), ".webp", {"lossless": True}, [[[10, 20, 30]]]),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 51)), ".png", {}, [[[204, 204, 204]]]),
        (Image.new("LA", (1, 1), (40, 255)), ".png", {}, [[[40, 40, 40]]]),
        (Image.new("RGB", (1, 1), (1, 2, 3)), ".png", {"transparency": (1, 2, 3)}, [[[255, 255, 255]]]),
    ],
    ids=[
        "grey",
        "bits",
        "grey16",
        "palette",
        "palette+alpha",
        "clear",
        "opaque",
        "half",
        "grey+alpha",
        "colour key",
    ],
)
def test_every_kind_of_image_becomes_rgb(
    tmp_path: Path, image: Image.Image, suffix: str, options: dict[str, Any], expected: list[Any]
) -> None:
    assert decode_image(save(tmp_path / f"x{suffix}", image, **options)).tolist() == expected


def test_cmyk_jpeg_becomes_rgb(tmp_path: Path) -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixels = decode_image(save(tmp_path / "x.jpg", red, quality=100)).astype(int)
    assert pixels.shape == (16, 16, 3)
    assert np.abs(pixels - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(tmp_path: Path, orientation: int) -> None:
    upright = random_images(1, 0, 4, 6)[0]
    # How a camera held in each of the eight ways stores the upright picture.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "x.png", np.ascontiguousarray(stored), exif=exif)
    assert np.array_equal(decode_image(path), upright)


def test_folder_of_mixed_sizes_asks_for_a_size(tmp_path: Path) -> None:
    make_folder(tmp_path)
    odd = save(tmp_path / "bee" / "z.png", random_images(1, 0, 12, 24)[0])
    with pytest.raises(EngramError, match=r"ant0.png has 6x6 pixels and .*z.png 24x12; give image_size"):
        read_folder(tmp_path)
    store = read_folder(tmp_path, size=6)
    assert store.image_size == (6, 6)
    small = decode_image(odd, 6).astype(int)
    with Image.open(odd) as image:
        reference = np.asarray(image.resize((12, 6), Image.Resampling.BICUBIC))[:, 3:9].astype(int)
    assert np.abs(small - reference).max() <= 1
    with pytest.raises(EngramError, match="image size must be at least 1 pixel, not 0"):
        read_folder(tmp_path, size=0)


def test_files_decoded_some_at_a_time_keep_their_order_and_their_class(tmp_path: Path) -> None:
    """More files than a batch has, some of them bad, at the borders of batches too."""
    bad = {0, 7, 255, 256, 257, 299}
    for number in range(600):
        path = tmp_path / ("ant" if number < 300 else "bee") / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        if number % 300 in bad:
            path.write_bytes(b"junk")
        else:
            save(path, np.full((3, 4, 3), number % 256, np.uint8))
    calls: list[int] = []
    store = read_folder(tmp_path, size=2, skip_bad=True, progress=lambda done, total: calls.append(done))
    assert calls == [*range(1, 601)]
    names = [f"{'ant' if number < 300 else 'bee'}/{number:03d}.png" for number in range(600) if number % 300 in bad]
    assert list(store.skipped) == names
    for label in range(2):
        own = [split.images[split.class_ids == label][:, 0, 0, 0] for split in (store.train, store.test)]
        numbers = [number for number in range(300 * label, 300 * label + 300) if number % 300 not in bad]
        assert sorted(np.concatenate(own).tolist()) == sorted(number % 256 for number in numbers)
    with pytest.raises(EngramError, match=r"ant/000.png cannot be read .*skip_bad"):
        read_folder(tmp_path, size=2)


def test_a_very_long_image_is_cropped_without_making_it_large(tmp_path: Path) -> None:
    path = save(tmp_path / "x.png", np.full((1, 30_000, 3), 9, np.uint8))
    assert (decode_image(path, 64) == 9).all()


def png_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def bad_files() -> dict[str, bytes]:
    noise = Image.fromarray(random_images(1, 0, 64, 64)[0])
    jpeg = io.BytesIO()
    noise.save(jpeg, "JPEG")
    header = png_bytes(Image.new("RGB", (1, 1)))
    # A header that claims 40000 x 40000 pixels, with the right checksum.
    claim = b"IHDR" + (40_000).to_bytes(4, "big") * 2 + header[24:29]
    bomb = header[:12] + claim + zlib.crc32(claim).to_bytes(4, "big") + header[33:]
    claim = b"IHDR" + (11_000).to_bytes(4, "big") * 2 + header[24:29]
    warned = header[:12] + claim + zlib.crc32(claim).to_bytes(4, "big") + header[33:]
    return {
        "empty": b"",
        "text": b"this is no image",
        "gif": b"GIF89a\x01\x00\x01\x00\x00\x00\x00;",
        "truncated png": png_bytes(noise)[:4000],
        "truncated jpeg": jpeg.getvalue()[:1500],
        "flipped bit": png_bytes(noise)[:200] + b"\xff" + png_bytes(noise)[201:],
        "bomb": bomb,
        "large enough to warn": warned,
    }


@pytest.mark.parametrize("kind", bad_files())
def test_a_bad_image_is_named_or_skipped(tmp_path: Path, kind: str) -> None:
    make_folder(tmp_path)
    bad = tmp_path / "bee" / "bad.png"
    bad.write_bytes(bad_files()[kind])
    with pytest.raises(EngramError, match=r"the image .*bee/bad.png cannot be read \(.+\); .*skip_bad") as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)
    store = read_folder(tmp_path, skip_bad=True)
    assert store.skipped == ("bee/bad.png",)
    assert len(store.train) + len(store.test) == 10
    bad.unlink()
    assert read_folder(tmp_path).fingerprint() == store.fingerprint()


@pytest.mark.parametrize(("limit", "told"), [(10, 20), (30, 30)], ids=["Pillow's", "ours"])
def test_an_image_beyond_the_limit_of_pixels_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, told: int
) -> None:
    path = save(tmp_path / "x.png")
    assert decode_image(path).shape == (6, 6, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)  # Pillow warns above it, and refuses above twice it
    with pytest.raises(EngramError, match=f"x.png cannot be read .it claims more pixels than the {told} allowed"):
        decode_image(path)


def test_skipping_every_image_of_a_class_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, count=2)
    for file in (tmp_path / "bee").iterdir():
        file.write_bytes(b"junk")
    with pytest.raises(EngramError, match="class 'bee' has no training image"):
        read_folder(tmp_path, skip_bad=True)
    for file in (tmp_path / "ant").iterdir():
        file.write_bytes(b"junk")
    with pytest.raises(EngramError, match="none of the 4 images"):
        read_folder(tmp_path, skip_bad=True)


def test_folder_refuses_what_cannot_be_learned_from(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="there is no folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(EngramError, match="has no class folder"):
        read_folder(tmp_path)
    make_folder(tmp_path / "one", "ant")
    with pytest.raises(EngramError, match="has 1 class; learning"):
        read_folder(tmp_path / "one")
    (make_folder(tmp_path / "hollow") / "cow").mkdir()
    with pytest.raises(EngramError, match=r"the class folder .*cow has no image"):
        read_folder(tmp_path / "hollow")
    save(make_folder(tmp_path / "single") / "cow" / "only.png")
    with pytest.raises(EngramError, match="class 'cow' has only one image"):
        read_folder(tmp_path / "single")
    with pytest.raises(EngramError, match="between 0 and 1, not 2"):
        read_folder(make_folder(tmp_path / "share"), test_fraction=2)


def test_folder_splits_must_agree(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", "ant bee")
    with pytest.raises(EngramError, match="has train/ but neither test/ nor val/"):
        read_folder(tmp_path)
    make_folder(tmp_path / "test", "ant bee cow")
    with pytest.raises(EngramError, match=r"class 'cow' is in .*test but not in .*train"):
        read_folder(tmp_path)
    make_folder(tmp_path / "train", "cow dog")
    with pytest.raises(EngramError, match=r"class 'dog' is in .*train but not in .*test, so its accuracy"):
        read_folder(tmp_path)
    (tmp_path / "test" / "dog").mkdir()
    with pytest.raises(EngramError, match=r"the class folder .*test/dog has no image"):
        read_folder(tmp_path)


def test_images_are_found_by_the_same_rules_whatever_they_are_for(tmp_path: Path) -> None:
    for name in ("cat/2024/a.png", "cat/b.png", "cat/a/c.png", "dog/d.png", "other/e.png"):
        save(tmp_path / "set" / name)
    (tmp_path / "set/cat/2024/notes.txt").touch()
    (tmp_path / "set/other/more.txt").touch()
    (tmp_path / "set/cat/newest").symlink_to(tmp_path / "set/cat/2024")
    (tmp_path / "set/cat/up").symlink_to(tmp_path / "set")
    (tmp_path / "set/dog/too").symlink_to(tmp_path / "set/other")
    (tmp_path / "set/dog/circle").symlink_to("circle")
    images = {
        "cat": ["cat/2024/a.png", "cat/a/c.png", "cat/b.png"],
        "dog": ["dog/d.png", "dog/too/e.png"],
        "other": ["other/e.png"],
    }
    listed, classes = folder.list_classes(tmp_path / "set")
    for name, files in images.items():
        found = [str(tmp_path / "set" / file) for file in files]
        assert [file for file, its in zip(listed, classes, strict=True) if its == name] == found
        assert list(folder.walk_images(tmp_path / "set" / name)) == found
    others = ["cat/2024/notes.txt", "dog/circle", "dog/too/more.txt", "other/more.txt"]
    assert folder.list_ignored(tmp_path / "set") == (others, [])


def test_folder_links(tmp_path: Path) -> None:
    make_folder(tmp_path / "set")
    expected = read_folder(tmp_path / "set").fingerprint()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set" / "ant")
    (tmp_path / "set" / "ant" / "up").symlink_to("..")
    (tmp_path / "set" / "ant" / "self").symlink_to(".")
    (tmp_path / "set" / "ant" / "out").symlink_to(tmp_path / "elsewhere")
    assert read_folder(tmp_path / "set").fingerprint() == expected
    (tmp_path / "linked").mkdir()
    for name in ("ant", "bee"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "set" / name)
    assert read_folder(tmp_path / "linked").fingerprint() == expected
    loop = tmp_path / "linked" / "cow"
    loop.symlink_to(loop)
    with pytest.raises(EngramError, match="cow is a broken link"):
        read_folder(tmp_path / "linked")
    with pytest.raises(EngramError, match="there is no folder"):
        read_folder(loop)


def test_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    real_scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied", str(path))
        return real_scandir(path)

    with monkeypatch.context() as patch:  # pytest removes the folder while monkeypatch still holds
        patch.setattr(folder.os, "scandir", refuse)
        with pytest.raises(EngramError, match=r"bee cannot be read \(Permission denied\)"):
            read_folder(tmp_path)


def test_real_photographs_in_folders(tmp_path: Path) -> None:
    if not SAMPLE.is_file():
        pytest.skip(f"there is no sample of real images in {SHARED} (set ENGRAM_TEST_DATA)")
    unpack_archive(SAMPLE, tmp_path)
    store = read_folder(tmp_path / "cifar100-sample")
    assert (store.num_classes, store.image_size, len(store.train), len(store.test)) == (
        10,
        (32, 32),
        1000,
        200,
    )
    assert "train" in store.class_names  # a class of that name among the splits
    assert 0.3 < store.train.images.mean() / 255 < 0.7


# The embedded set


def test_mini_is_what_the_page_says() -> None:
    store = read_mini()
    assert (store.name, store.num_classes, store.image_size) == ("mini", 20, (16, 16))
    assert np.bincount(store.train.class_ids).tolist() == [250] * 20
    assert np.bincount(store.test.class_ids).tolist() == [100] * 20
    assert (store.mean, store.std) == (cifar.MEAN, cifar.STD)
    assert read_mini().fingerprint() == store.fingerprint()
    unique = {image.tobytes() for split in (store.train, store.test) for image in split.images}
    assert len(unique) > 6_990  # a handful of CIFAR-100's own images occur twice
    assets = Path(mini.__file__).parents[1] / "assets" / "mini"
    assert sum(file.stat().st_size for file in assets.iterdir()) < 4e6
    meta = json.loads((assets / "meta.json").read_text())
    assert "Krizhevsky" in meta["attribution"]
    assert meta["class_names"] == list(store.class_names)


@pytest.mark.parametrize("damage", ["pixels", "meta", "missing", "truncated"])
def test_a_damaged_mini_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    source = Path(mini.__file__).parents[1] / "assets" / "mini"
    place = tmp_path / "assets" / "mini"
    place.mkdir(parents=True)
    for file in source.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(mini.resources, "files", lambda _: tmp_path)
    assert read_mini().num_classes == 20
    if damage == "pixels":
        with Image.open(source / "test.webp") as mosaic:
            changed = np.array(mosaic.convert("RGB"))
        changed[0, 0, 0] ^= 1
        Image.fromarray(changed).save(place / "test.webp", lossless=True, quality=0, method=0)
    elif damage == "meta":
        (place / "meta.json").write_text("{")
    elif damage == "missing":
        (place / "train.webp").unlink()
    else:
        (place / "train.webp").write_bytes((source / "train.webp").read_bytes()[:100_000])
    with pytest.raises(EngramError, match=r"the embedded data set .*reinstall engram"):
        read_mini()


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("make_mini", ROOT / "tools" / "make_mini.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mini_images_are_half_size_and_do_not_depend_on_the_order_of_the_archive() -> None:
    tool = load_tool()
    images = random_images(30, height=32, width=32)
    ids = np.arange(30, dtype=np.int64) % 3
    picked = tool.pick_images(DataSplit(images, ids), 1, 4)
    order = np.random.default_rng(1).permutation(30)
    assert np.array_equal(picked, tool.pick_images(DataSplit(images[order], ids[order]), 1, 4))
    means = [image.astype(float).reshape(16, 2, 16, 2, 3).mean(axis=(1, 3)) for image in images[ids == 1]]
    candidates = {np.floor(mean + 0.5).astype(np.uint8).tobytes() for mean in means}
    assert len({image.tobytes() for image in picked} & candidates) == 4


def test_mini_mosaic_can_be_cut_into_its_images(tmp_path: Path) -> None:
    tool, images = load_tool(), random_images(12, height=16, width=16)
    tool.save_mosaic(images, 3, tmp_path / "x.webp")
    assert [file.name for file in tmp_path.iterdir()] == ["x.webp"]
    with Image.open(tmp_path / "x.webp") as mosaic:
        assert mosaic.size == (64, 48)
        assert np.array_equal(mini.cut(np.asarray(mosaic.convert("RGB")), 16), images)


def test_mini_can_be_made_again_from_cifar100() -> None:
    classes, images = load_tool().select(real_cifar100())
    store = read_mini()
    assert tuple(classes.values()) == store.class_names
    assert np.array_equal(images["train"], store.train.images)
    assert np.array_equal(images["test"], store.test.images)


def test_a_store_says_what_it_is_in_one_line() -> None:
    assert repr(read_mini()) == "ImageStore('mini': 20 classes, 5000 training and 2000 test images of 16x16 pixels)"
