"""The order of copies and steps on a GPU's streams, with streams and events that threads imitate."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.engine import image_feed
from engram.engine.image_feed import STAGED_BATCHES, ImageFeed, ImageRing

BATCH, SLOTS = 6, 12


class FakeStream:
    """Does its work in order, in a thread of its own."""

    def __init__(self, _: object = None) -> None:
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_event(self, event: FakeEvent) -> None:
        self.put(event.reached.wait)

    def synchronize(self) -> None:
        done = threading.Event()
        self.put(done.set)
        done.wait()


class FakeEvent:
    """As torch.cuda.Event: one that was never recorded does not wait."""

    def __init__(self, blocking: bool = False) -> None:
        self.reached = threading.Event()
        self.reached.set()

    def record(self, stream: FakeStream | None = None) -> None:
        self.reached = threading.Event()
        (stream or FakeCuda.current.stream).put(self.reached.set)

    def synchronize(self) -> None:
        self.reached.wait()


class FakeCuda:
    """The part of torch.cuda that is used. main: the stream of the steps."""

    Stream, Event = FakeStream, FakeEvent
    current = threading.local()

    def __init__(self) -> None:
        self.main = FakeStream()

    def current_stream(self, _: object = None) -> FakeStream:
        return self.main

    @contextmanager
    def stream(self, chosen: FakeStream) -> Iterator[None]:
        FakeCuda.current.stream = chosen
        yield


class Rows:
    """Images whose pixels are the numbers of their rows."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.rows[rows])

    def read_into(self, out: np.ndarray) -> None:
        out[:] = self.rows.numpy()[:, None, None, None]


def make_ring(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, seconds: float) -> ImageRing:
    """A ring that is used as one on a GPU; copies to it take that many seconds."""
    names = {name: getattr(torch, name) for name in ("arange", "tensor", "zeros", "uint8")}
    monkeypatch.setattr(image_feed, "torch", SimpleNamespace(cuda=cuda, **names))
    monkeypatch.setattr(image_feed, "RING_BATCHES", {"cpu": SLOTS})
    part_of = ImageFeed._part_of

    def delayed(self: ImageFeed, images: Tensor, slot: int, number: int) -> Any:
        part = part_of(self, images, slot, number)

        def copy(source: Tensor, non_blocking: bool) -> None:
            FakeCuda.current.stream.put(lambda: (time.sleep(seconds), part.copy_(source)))

        return SimpleNamespace(copy_=copy) if images is self._ring.images else part

    monkeypatch.setattr(ImageFeed, "_part_of", delayed)
    ring = ImageRing(torch.device("cpu"), BATCH, (1, 1), pad=0)
    staging = torch.zeros(STAGED_BATCHES * BATCH, 1, 1, 3, dtype=torch.uint8)
    for name, value in {"is_cuda": True, "staging": staging, "copying": FakeStream()}.items():
        setattr(ring, name, value)
    return ring


@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize(("copy", "step"), [(0.004, 0.0), (0.0, 0.004)], ids=["slow copies", "slow steps"])
def test_every_step_finds_its_images_however_slow_the_device_is(
    copy: float, step: float, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, chance, first, found = FakeCuda(), random.Random(0), 0, list[bool]()
    ring = make_ring(cuda, monkeypatch, copy)
    for count, taken, size in ((20, 20, 6), (15, 9, 6), (25, 14, 6), (20, 20, 3)):
        ring.divide(size)
        lengths = [size - chance.randrange(2) for _ in range(count)]
        batches = [first + size * number + torch.arange(length) for number, length in enumerate(lengths)]
        places = ring.places(ring.next, [slice(0, size)] * count, size)
        feed, first = ImageFeed(ring, Rows(torch.arange(256)), batches, threads), (first + size * count) % 100
        for number in range(taken):
            place, rows = places[number, : lengths[number]], batches[number]

            def compare(place: Tensor = place, rows: Tensor = rows) -> None:
                found.append(torch.equal(ring.images[place, 0, 0, 0], rows.to(torch.uint8)))
                time.sleep(step)
                found.append(torch.equal(ring.images[place, 0, 0, 0], rows.to(torch.uint8)))

            with feed.next_batch():
                cuda.main.put(compare)
        feed.close()
    cuda.main.synchronize()
    assert (len(found), all(found)) == (2 * (20 + 9 + 14 + 20), True)


def test_fewer_batches_are_decoded_at_once_than_have_a_place_in_the_staging_memory() -> None:
    assert image_feed.DECODED_BATCHES < STAGED_BATCHES, "the copy from that place is only waited for once it began"
