"""A model in a service: threads ask it at once, also while it learns; uploads are taken as files are."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from conftest import make_config, make_store
from engram import EngramError, IncrementalClassifier
from engram.data.decode import image as decode
from engram.experiment.session import Session
from engram.models.model import Model
from model_helpers import NAMES, make, opened, pictures, png, same


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four classes; not to be changed."""
    return make(tmp_path_factory.mktemp("served") / "m", NAMES[:4])


def state(model: Model) -> dict[str, Tensor]:
    """A copy of all that the model holds."""
    assert model.learner is not None
    return {name: value.clone() for name, value in model.learner.state_dict().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


class Overlapping:
    """Two calls whose passes overlap: the second is inside its own from before the first's end until after it."""

    def __init__(self, model: Model) -> None:
        assert model.learner is not None
        self._entered = [threading.Event(), threading.Event()]
        self._first_ended = threading.Event()
        self._calls = 0
        self._hook = model.learner.network.backbone.get_submodule("conv").register_forward_pre_hook(self._inside)

    def _inside(self, *_: object) -> None:
        self._calls += 1
        if self._calls == 1:
            self._entered[0].set()
            assert self._entered[1].wait(20)
        else:
            self._entered[1].set()
            assert self._first_ended.wait(20)

    def run(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(call)
            first.add_done_callback(lambda _: self._first_ended.set())
            assert self._entered[0].wait(20)
            second = pool.submit(call)
            found = first.result(), second.result()
        self._hook.remove()
        return found


@pytest.mark.parametrize("images", [True, False])
def test_a_pass_inside_another_changes_neither_it_nor_the_model(served: Path, images: bool) -> None:
    model, asked = opened(served, images=images), pictures(NAMES[:4], 3, seed=5)[0]
    before, alone = state(model), opened(served).probabilities(asked)
    for found in Overlapping(model).run(lambda: model.probabilities(asked)):
        assert np.array_equal(found, alone)
    assert equal(state(model), before)
    assert np.array_equal(model.probabilities(asked), alone)


def test_many_threads_get_what_one_gets(served: Path, tmp_path: Path) -> None:
    classifier, images = IncrementalClassifier.load(served, device="cpu"), pictures(NAMES[:4], 4, seed=5)[0]
    before = state(classifier.model_)
    alone = [classifier.predict_proba(images[row : row + 1]) for row in range(len(images))]

    def ask(turn: int) -> bool:
        torch.set_num_threads(1)  # a thread's own: sums depend on it
        row = turn % len(images)
        return np.array_equal(classifier.predict_proba(images[row : row + 1]), alone[row])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(300)))
    assert equal(state(classifier.model_), before)
    classifier.save(tmp_path / "again")
    assert same(opened(tmp_path / "again"), opened(served))


def test_the_engine_reads_without_a_trace_too() -> None:
    session = Session(make_config(), make_store())
    network, images = session.learner.network, session.stage(0).pool.images
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert not network.training
    session.engine.infer(network, images)
    assert equal(dict(network.state_dict()), before)
    with network.in_training(), pytest.raises(AssertionError, match="in training"):
        session.engine.infer(network, images)
    assert not network.training


@pytest.mark.parametrize("method", ["afc", "der", "bic", "mas"])
def test_who_asks_while_it_learns_gets_one_model_or_the_other(method: str) -> None:
    classifier = IncrementalClassifier(method, epochs=2, memory=3, backbone="resnet10", device="cpu")
    classifier.fit(*pictures(NAMES[:3]))
    images = pictures(NAMES[:4], 1, seed=5)[0]
    before, held = classifier.predict_proba(images), state(classifier.model_)
    model, found = classifier.model_, []
    ended = threading.Event()

    def ask() -> None:
        torch.set_num_threads(1)
        while not ended.is_set():
            found.append(classifier.predict_proba(images))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        try:
            classifier.partial_fit(*pictures(NAMES[3:5]))
        finally:
            ended.set()
        for thread in asked:
            thread.result()
    after = classifier.predict_proba(images)
    assert found
    assert all(np.array_equal(shares, before if shares.shape == before.shape else after) for shares in found)
    assert equal(state(model), held)
    alone = IncrementalClassifier(method, epochs=2, memory=3, backbone="resnet10", device="cpu")
    alone.fit(*pictures(NAMES[:3])).partial_fit(*pictures(NAMES[3:5]))
    assert equal(state(classifier.model_), state(alone.model_))


def test_labels_are_those_of_the_model_that_was_asked(served: Path) -> None:
    classifier, images = IncrementalClassifier.load(served, device="cpu"), pictures(NAMES[:4], 2, seed=5)[0]
    alone, other = classifier.predict(images), copy.deepcopy(classifier).remove("apple")
    learner = classifier.model_.learner
    assert learner is not None
    # Another thread's change comes in the midst of the pass.
    hook = learner.network.head.register_forward_hook(lambda *_: classifier._adopt(other.model_))
    assert classifier.predict(images).tolist() == alone.tolist()
    hook.remove()
    assert "apple" not in classifier.predict(images)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files that need what files get: a square of them, their EXIF data, white behind them, all of 16 bits."""
    folder = tmp_path_factory.mktemp("files")
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 150, 3), dtype=np.uint8))
    photo = photo.resize((600, 400))
    turned = Image.Exif()
    turned[0x0112] = 6
    photo.save(folder / "0.jpg", exif=turned)
    faded = photo.convert("RGBA")
    faded.putalpha(photo.convert("L"))
    faded.save(folder / "1.png")
    Image.fromarray(np.random.default_rng(2).integers(0, 65536, (40, 30), dtype=np.uint16)).save(folder / "2.png")
    photo.convert("P").save(folder / "3.png", transparency=3)
    photo.convert("CMYK").save(folder / "4.jpg", progressive=True)
    photo.save(folder / "5.webp")
    photo.crop((0, 0, 20, 30)).save(folder / "6.bmp")
    return sorted(folder.iterdir())


def forms(files: list[Path]) -> dict[str, list[Any]]:
    """The files in every form that an upload may come in."""
    contents = [file.read_bytes() for file in files]
    return {
        "bytes": contents,
        "bytearrays": [bytearray(content) for content in contents],
        "files in memory": [io.BytesIO(content) for content in contents],
        "open files": [file.open("rb") for file in files],
        "pictures": [Image.open(io.BytesIO(content)) for content in contents],
        "all kinds": [contents[0], Image.open(files[1]), *(file.open("rb") for file in files[2:])],
    }


def close(given: list[Any]) -> None:
    for item in given:
        if hasattr(item, "close"):
            item.close()


def test_uploads_are_taken_as_the_files_are(served: Path, files: list[Path]) -> None:
    classifier, labels = IncrementalClassifier.load(served, device="cpu"), [NAMES[i % 4] for i in range(len(files))]
    wanted, score = classifier.predict_proba(files), classifier.score(files, labels)
    for name, given in forms(files).items():
        for _ in range(2):  # nothing is used up
            assert np.array_equal(classifier.predict_proba(given), wanted), name
        assert classifier.predict(given).tolist() == classifier.predict(files).tolist()
        assert classifier.score(given, labels) == score
        close(given)


def test_a_photograph_is_left_as_it_is(served: Path, files: list[Path]) -> None:
    classifier = IncrementalClassifier.load(served, device="cpu")
    with Image.open(files[0]) as photo, Image.open(files[0]) as other:
        wanted = classifier.predict_proba([photo])
        assert photo.size == (600, 400)
        assert np.array_equal(np.asarray(photo), np.asarray(other))
        assert np.allclose(classifier.predict_proba([photo]), wanted, atol=0.05), "from all of its pixels now"


def test_uploads_are_learned_as_the_files_are(served: Path, files: list[Path]) -> None:
    def taught(given: list[Any], **options: Any) -> IncrementalClassifier:
        classifier = IncrementalClassifier("replay", epochs=1, memory=3, backbone="resnet10", device="cpu", **options)
        return classifier.fit(given, [*"abcabca"])

    for options in ({}, {"image_size": 12}):
        wanted = taught(files, **options)
        for name, given in forms(files).items():
            found = taught(given, **options)
            close(given)
            assert found.model_.config.image_size == wanted.model_.config.image_size, name
            assert equal(state(found.model_), state(wanted.model_)), name
    alike = [Image.fromarray(image) for image in pictures(NAMES[:3], 2, size=20)[0]]
    classifier = IncrementalClassifier("replay", epochs=1, backbone="resnet10", device="cpu").fit(alike, [*"abcabc"])
    assert classifier.model_.config.image_size == (20, 20), "as large as they are"


def test_large_uploads_are_in_memory_one_at_a_time(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, content = IncrementalClassifier.load(served, device="cpu"), png(np.zeros((99, 99, 3), np.uint8))
    wanted, load, here, most = classifier.predict_proba([content]), decode._load, [], []

    def watched(*given: Any) -> np.ndarray:
        here.append(True)
        most.append(len(here))
        time.sleep(0.01)
        here.pop()
        return load(*given)

    monkeypatch.setattr(decode, "_LARGE_PIXELS", 1000)
    monkeypatch.setattr(decode, "_load", watched)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: classifier.predict_proba([content]), range(12)))
    assert all(np.array_equal(shares, wanted) for shares in found)
    assert max(most) == 1


def unread() -> Image.Image:
    return Image.open(io.BytesIO(png(np.zeros((300, 300, 3), np.uint8))[:-40]))


class Stream:
    """An open file that can be read once, a little at a time, and gives what it gives."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def read(self, size: int) -> Any:
        found, self.content = self.content[: min(size, 100)], self.content[100:]
        return found


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: b"no image", "it is not a PNG, JPEG, WebP, BMP"),
        (lambda: b"", "it is not a PNG, JPEG, WebP, BMP"),
        (lambda: png(np.zeros((300, 300, 3), np.uint8))[:-40], "truncated"),
        (unread, "truncated"),
        (lambda: io.StringIO("text"), "reading it gives str, not bytes"),
        (lambda: png(np.zeros((9, 9, 3), np.uint8)) + bytes(3000), "its 0 MiB are more than the 0 allowed"),
        (lambda: Stream(bytes(3000)), "its 0 MiB are more than the 0 allowed"),
        (lambda: png(np.zeros((400, 400, 3), np.uint8)), "it claims more pixels than the 100000 allowed"),
        (lambda: Image.new("RGB", (400, 400)), "it claims more pixels than the 100000 allowed"),
    ],
)
def test_a_bad_upload_is_refused_by_its_place(
    bad: Callable[[], Any], reason: str, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "FILE_BYTES", 2000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    monkeypatch.setattr("engram.models.inputs.BATCH", 2)
    classifier, good = IncrementalClassifier.load(served, device="cpu"), png(pictures(NAMES[:1], 1)[0][0])
    with pytest.raises(
        EngramError, match=rf"^the image X\[3\] cannot be read \(.*{reason}.*\); repair it or leave it out$"
    ):
        classifier.predict([good, good, good, bad()])


def test_a_stream_that_cannot_go_back_is_read_once(served: Path) -> None:
    classifier, content = IncrementalClassifier.load(served, device="cpu"), png(pictures(NAMES[:1], 1)[0][0])
    assert classifier.predict([Stream(content)]).tolist() == classifier.predict([content]).tolist()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (b"bytes", r"X is a single image \(bytes\); give a list of images"),
        (io.BytesIO(b"bytes"), r"X is a single image \(BytesIO\); give a list of images"),
        (Image.new("RGB", (8, 8)), r"X is a single image \(Image\); give a list of images"),
        ([b"bytes", "path.png"], "X holds b'bytes' among others"),
        (["path.png", b"bytes"], "X begins with a path, but holds b'bytes' too"),
        ([np.zeros((8, 8, 3), np.uint8), b"bytes"], "X holds b'bytes' among others"),
    ],
)
def test_what_is_no_list_of_uploads_is_refused(given: Any, sentence: str, served: Path) -> None:
    with pytest.raises(EngramError, match=sentence):
        IncrementalClassifier.load(served, device="cpu").predict(given)


def test_a_damaged_picture_stops_no_one_who_only_predicts(served: Path, tmp_path: Path) -> None:
    path, images = tmp_path / "m", pictures(NAMES[:4], 2, seed=5)[0]
    shutil.copytree(served, path)
    next(path.rglob("exemplars/*/*.png")).write_bytes(b"damaged")
    with pytest.raises(EngramError, match="is damaged"):
        IncrementalClassifier.load(path, device="cpu")
    classifier = IncrementalClassifier.load(path, device="cpu", images=False)
    assert np.array_equal(classifier.predict_proba(images), opened(served).probabilities(images))
    for change in (
        lambda: classifier.partial_fit(*pictures(NAMES[4:5])),
        lambda: classifier.remove("apple"),
        lambda: classifier.save(tmp_path / "other"),
        lambda: classifier.save(path, overwrite=True),
        lambda: pickle.loads(pickle.dumps(classifier)).save(tmp_path / "other"),
    ):
        with pytest.raises(EngramError, match=r"for prediction only \(images=False\); open it with its images"):
            change()
    assert classifier.classes_.tolist() == list(NAMES[:4])
    assert not (tmp_path / "other").exists()
    assert classifier.fit(*pictures(NAMES[:2])).classes_.tolist() == list(NAMES[:2]), "which forgets all"
