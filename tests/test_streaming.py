"""Images that are streamed to the device give the same numbers as resident ones; where images are put."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram import EngramError, model_from_run, run
from engram.core.events import ImagesPlaced
from engram.data.image_rows import ImageRows, is_mapped, read_ahead, read_pixels
from engram.data.store import ImageStore
from engram.engine import buffers
from engram.engine.buffers import DeviceBuffers
from engram.engine.image_feed import ImageFeed, ImageRing
from engram.experiment import image_placement
from engram.experiment.runner import resume
from engram.experiment.session import Session
from engram.models.from_run import open_for_prediction
from helpers import (
    assert_resumes_to,
    last_state,
    learn_stage,
    make_stage,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)
from process_helpers import Group, values

CPU = torch.device("cpu")


def mapped(store: ImageStore, folder: Path) -> ImageStore:
    """The store with its training images mapped from a file, as those of ImageNet are."""
    images = store.train.images
    images.tofile(folder / "pixels")
    there = np.memmap(folder / "pixels", dtype=np.uint8, mode="r", shape=images.shape)
    return replace(store, train=replace(store.train, images=np.asarray(there)))


def small_store() -> ImageStore:
    return toy_store(num_classes=4, per_class=10)


@pytest.mark.parametrize(
    ("method", "phase"),
    [
        ("afc", "balance"),  # a sweep after the stage, a balanced phase
        ("ssil", "main"),  # a second stream of images
        ("gdumb", "main"),  # CutMix
        ("derpp", "main"),  # tensors kept per image
        ("mnemonics", "main"),  # exemplars whose pixels are changed
    ],
)
def test_a_streamed_run_that_was_stopped_ends_with_the_bits_of_a_resident_one(
    method: str, phase: str, tmp_path: Path
) -> None:
    store = small_store()
    config = tiny_config(method)
    whole = run_whole(config, store, tmp_path / "resident")
    there = mapped(store, tmp_path)
    begins = starts(1, phase if method == "afc" else None)
    run_stopped(config, there, tmp_path / "streamed", 2, begins, images="streamed")
    if method != "mnemonics":  # the file still has the pixels
        assert torch.equal(whole.pop("memory.images"), torch.from_numpy(store.train.images)[whole["memory.sources"]])
    assert_resumes_to(whole, tmp_path / "streamed", there, images="streamed")


def test_every_pass_over_streamed_images_equals_that_over_resident_ones(tmp_path: Path) -> None:
    config, found = tiny_config("afc"), []
    there = mapped(small_store(), tmp_path)
    for images in ("resident", "streamed"):
        session = Session(config, there, images)
        stage = learn_stage(session, 0)
        passes, rows = session.engine, stage.all_rows
        network, learner = session.learner.network, session.learner
        found.append(
            [
                passes.embed(network, stage.pool.images),
                *passes.infer(network, stage.pool.images, mirror=True),
                *passes.sensitivity(learner, stage, rows, lambda step, _: step.student.logits.sum(1), 2).values(),
                *session.evaluate(0)[2].values(),
                *learner.state_dict().values(),
            ]
        )
        assert isinstance(stage.pool.images, ImageRows)
        assert session.engine.buffers.image_bytes == (20 if images == "resident" else 4 * 8) * 10 * 10 * 3
    for resident, streamed in zip(*found, strict=True):
        assert np.array_equal(np.asarray(resident), np.asarray(streamed))


def test_exemplars_in_a_mapped_file_are_saved_as_references(
    tmp_path: Path,
) -> None:
    there = mapped(small_store(), tmp_path)
    tensors = run_whole(tiny_config("replay"), there, tmp_path / "run")
    assert "memory.images" not in tensors
    with pytest.raises(EngramError, match=r"the images of its exemplars, .* give the data set as store"):
        model_from_run(tmp_path / "run")
    model = model_from_run(tmp_path / "run", store=there)
    assert model.learner is not None
    kept = model.learner.memory.samples()
    assert kept is not None
    assert torch.equal(kept.pixels, torch.from_numpy(there.train.images[tensors["memory.sources"].numpy()]))
    with pytest.raises(EngramError, match="these images are not those that the run"):
        model_from_run(tmp_path / "run", store=toy_store(seed=1))
    assert open_for_prediction(tmp_path / "run").probabilities(there.test.images[:1]).shape == (1, 4)  # needs none


def test_rows_of_several_arrays_are_read_in_order() -> None:
    one, two = (np.arange(n * 12, dtype=np.uint8).reshape(n, 2, 2, 3) for n in (4, 3))
    tensor = torch.full((2, 2, 2, 3), 7, dtype=torch.uint8)
    parts = [ImageRows([one], torch.tensor([3, 0])), tensor, ImageRows([two, one], torch.tensor([0, 4, 2]))]
    joined = ImageRows.joined(parts)
    expected = torch.cat([read_pixels(part) for part in parts])
    assert (joined.shape, len(joined.sources)) == (expected.shape, 3)
    assert torch.equal(read_pixels(joined), expected)
    assert torch.equal(read_pixels(joined[torch.tensor([6, 0])][1:]), expected[:1])
    assert torch.equal(torch.cat(list(read_ahead(joined, 3))), expected)
    assert not is_mapped(one)


def test_a_feed_passes_on_what_goes_wrong_and_ends_when_it_is_closed() -> None:
    ring = ImageRing(CPU, 2, (2, 2), pad=1)
    ring.divide(2)
    images = torch.arange(20, dtype=torch.uint8).repeat_interleave(12).view(20, 2, 2, 3)
    feed = ImageFeed(ring, ImageRows.of(images), [torch.tensor([i, i + 1]) for i in range(19)])
    for step in range(7):  # more than there are slots
        with feed.next_batch():
            places = ring.places(0, [slice(0, 2)] * 7, 2)[step]
            assert ring.images[places][:, 1:3, 1:3].flatten(1).unique(dim=1).flatten().tolist() == [step, step + 1]
    feed.close()
    assert ring.next == 7 % ring.slots, "what was not taken is brought again"
    assert not [thread for thread in threading.enumerate() if thread.name == "images"]

    class Broken(ImageRows):
        def __getitem__(self, rows: Any) -> ImageRows:
            raise EngramError("the disk is gone")

    broken = ImageFeed(ring, Broken([images.numpy()], torch.arange(20)), [torch.tensor([0, 1])])
    with pytest.raises(EngramError, match="the disk is gone"), broken.next_batch():
        pass
    broken.close()


def test_the_images_of_a_batch_are_divided_among_the_threads_that_decode() -> None:
    """A task for each image takes half as long as reading a small file, and Python runs one at a time."""
    ring, pieces = ImageRing(CPU, 10, (2, 2), pad=0), list[int]()
    ring.divide(10)
    images = torch.arange(50, dtype=torch.uint8).repeat_interleave(12).view(50, 2, 2, 3)

    class Watched:
        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows

        def __getitem__(self, rows: torch.Tensor) -> Watched:
            return Watched(self.rows[rows])

        def read_into(self, out: np.ndarray) -> None:
            pieces.append(len(self.rows))
            out[:] = images[self.rows].numpy()

    feed = ImageFeed(ring, Watched(torch.arange(50)), list(torch.arange(50).split(10)), threads=3)
    for step in range(5):
        with feed.next_batch():
            here = ring.images[ring.places(0, [slice(0, 10)] * 5, 10)[step]]
            assert torch.equal(here, images[10 * step :][:10])
    feed.close()
    assert sorted(pieces) == [2] * 5 + [4] * 10


# Several processes


def stream_and_not(place: Path) -> dict[str, tuple[int, list[int]]]:
    """Runs of some methods, resident and streamed; of the streamed ones, the images that this process reads for steps
    of the base stage, and the images for which its rings have places in a batch."""
    found: dict[str, tuple[int, list[int]]] = {}
    config = {method: tiny_config(method, epochs=1, batch_size=11) for method in ("replay", "afc", "gdumb")}
    config["gdumb"] = config["gdumb"].with_settings(rehearse__epochs=1, cutmix__probability=1.0)
    store, read, make = toy_store(num_classes=4, per_class=8), ImageFeed._read, ImageRing.__init__
    for method in config:
        counts: list[int] = []
        rings: list[int] = []

        def watch(self: ImageFeed, padded: torch.Tensor, rows: torch.Tensor, counts: list[int] = counts) -> None:
            counts.append(len(rows))
            read(self, padded, rows)

        def count(self: ImageRing, device: Any, size: int, *given: Any, rings: list[int] = rings) -> None:
            rings.append(size)
            make(self, device, size, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ImageFeed, "_read", watch)
            patch.setattr(ImageRing, "__init__", count)
            list(run(config[method], store, place / f"{method}-streamed", images="streamed", stop_after_stage=0))
            found[method] = sum(counts), list(rings)
            list(resume(place / f"{method}-streamed", store, images="streamed"))
        list(run(config[method], store, place / f"{method}-resident", images="resident"))
    return found


def test_each_of_two_processes_streams_only_what_it_needs(tmp_path: Path) -> None:
    first, second = values(Group(2, stream_and_not, tmp_path))
    # 16 images in batches of 11 and 5, of which the first process takes 5 and 2.
    assert (first["replay"], second["replay"]) == ((7, [5]), (9, [6]))
    assert first["gdumb"][0] == second["gdumb"][0], "images of the whole batch are mixed"
    assert min(first["gdumb"][1]) >= 8
    for method in first:
        streamed, resident = (last_state(tmp_path / f"{method}-{images}") for images in ("streamed", "resident"))
        assert streamed.keys() == resident.keys()
        for name, value in streamed.items():
            assert torch.equal(value, resident[name]), (method, name)


# Where they are put


def test_images_are_streamed_if_they_do_not_fit_together_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_placement, "UNCHECKED_BYTES", 1000)
    monkeypatch.setattr("engram.experiment.session.UNCHECKED_BYTES", 1000)
    session = tiny_session()
    needs = session.memory_of(session.plan()[0])
    assert needs.images == 24 * 10 * 10 * 3
    assert needs.ring == 4 * 8 * 10 * 10 * 3
    parameters = sum(parameter.numel() for parameter in session.learner.network.parameters())
    assert needs.work > 6 * 4 * parameters + 8 * 8 * 8 * 64  # a batch of one map, at the very least
    placed = {}
    for free in (2 * needs.device("resident"), needs.device("resident")):
        monkeypatch.setattr(image_placement, "free_device_memory", lambda _, free=free: free)
        session.stage(0)
        placed[session.placed[0]] = session.placed[1]
    assert "stage 0: 24 images of 8x8 pixels are all in memory" in placed["resident"]
    assert "are streamed batch by batch (0.0 GB of images and about" in placed["streamed"]
    monkeypatch.setattr(image_placement, "free_device_memory", lambda _: 100)
    with pytest.raises(EngramError, match=r"the batches that are streamed need 0\.0 GB of memory, and 0\.0 GB are"):
        session.stage(0)
    asked = Session(tiny_config(), toy_store(), "resident")
    with pytest.raises(EngramError, match=r"stage 0: 24 images of 8x8 pixels need .*; leave out images=resident to"):
        asked.stage(0)
    monkeypatch.undo()
    events = run(tiny_config(), toy_store(), images="streamed", stop_after_stage=0)
    assert [event.placement for event in events if isinstance(event, ImagesPlaced)] == ["streamed"]


def test_what_cannot_be_streamed_is_refused_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = toy_store()
    with pytest.raises(EngramError, match=r"neighbours among all images .* cannot be streamed; leave out images"):
        next(run(tiny_config("ucir-dde"), store, tmp_path / "run", images="streamed"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(EngramError, match="no placement of images 'disk'"):
        next(run(tiny_config(), store, images="disk"))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(image_placement, "UNCHECKED_BYTES", 1000)
    monkeypatch.setattr("engram.experiment.session.UNCHECKED_BYTES", 1000)
    monkeypatch.setattr(image_placement, "free_device_memory", lambda _: 20_000)
    session = tiny_session(tiny_config("ucir-dde"))
    session.stage(0)  # the base stage has no teacher to look for neighbours with
    with pytest.raises(EngramError, match="this method cannot stream them; give a smaller image_size or base"):
        session.stage(1)


def test_a_large_pool_shrinks_and_a_small_one_keeps_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [make_stage(0, 0, [0] * count) for count in (12, 4, 13)]
    held = DeviceBuffers(CPU, 0)
    rows = [len(held.pool(stage).padded) for stage in stages]
    assert rows == [12, 12, 18]
    monkeypatch.setattr(buffers, "LARGE", 4 * 8 * 8 * 3)
    rows = [len(held.pool(stage).padded) for stage in stages]
    assert rows == [18, 4, 13]
