"""Predictions for many requests at once: images of all requests that wait are predicted in one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F

from engram.contract.predictors import ImageOutputs
from engram.core.errors import EngramError
from engram.data.decode.image import Images
from engram.models.inputs import file_side
from engram.models.model import Model, refuse_not_finite
from engram.models.prediction import default_batch
from engram.models.store.generations import Pointer
from engram.serve.counters import Metrics
from engram.serve.limits import Limits, busy

UNKNOWN_RATE = 0.05
MOST_PREDICTORS = 4
FEW, LINGER_SECONDS = 8, 0.02  # images that are not worth a batch of their own yet, and how long they wait for others


@dataclass(frozen=True, eq=False)
class Generation:
    """A model that is open for prediction, and the generation it was read from."""

    name: str
    model: Model
    pointer: Pointer

    @cached_property
    def names(self) -> list[str]:
        """Names of the classes, in the order of the scores."""
        return [str(label) for label in self.model.labels]

    @cached_property
    def side(self) -> int:
        """Side that images are resized to."""
        return file_side(self.model.config.image_size)

    @cached_property
    def read(self) -> Callable[[np.ndarray], tuple[torch.Tensor, ImageOutputs]]:
        """From images to the logits of the method's predictor, and the outputs they come from."""
        return self.model.score_reader()

    @property
    def can_doubt(self) -> bool:
        """Whether the model can tell unknown images."""
        return bool(self.model.classes) and self.model.predictor(None) in self.model.doubts

    def threshold(self, rate: float | None) -> float | None:
        """Return the familiarity below which an image is unknown; None if it is not asked for."""
        return None if rate is None else self.model.doubt_of().threshold(rate)

    def default_rate(self) -> float | None:
        """Return the rate for requests that give none; None if the model cannot tell unknown images."""
        try:
            self.threshold(UNKNOWN_RATE)
        except EngramError:
            return None
        return UNKNOWN_RATE


@dataclass(frozen=True, eq=False)
class Answers:
    """Predictions of some images: probabilities (N, K), familiarity (N,) and unit embeddings (N, D) if asked for."""

    shares: np.ndarray
    familiarity: np.ndarray | None
    embedding: np.ndarray | None


@dataclass(eq=False)
class _Job:
    generation: Generation
    images: Images
    doubt: bool
    embed: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Answers] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()

    def answer(self, found: Answers | Exception) -> None:
        """Set the result, in the thread of the event loop."""
        if self.future.done():  # the client has gone
            return
        if isinstance(found, Exception):
            self.future.set_exception(found)
        else:
            self.future.set_result(found)


class Batcher:
    """Threads that predict whatever waits, up to a full batch at a time.

    A batch that is alone gets all of torch's threads; otherwise they are divided. Threads that work on different
    batches need not wait for each other; those that share a batch do at every layer, and a core that is busy with
    something else (decoding, requests) then holds up all of them. Each image of a very small batch takes longer; so a
    few images wait a moment for others while another batch is being predicted.

    Batches have one of few sizes (`batch_size`): torch keeps kernels for every size that it has met, megabytes each.

    predictors: number of threads; None chooses it by torch's number of threads, and is 1 on a GPU.
    """

    def __init__(self, limits: Limits, metrics: Metrics, predictors: int | None = None) -> None:
        self._limit, self._metrics = limits.waiting_images, metrics
        self._jobs: deque[_Job] = deque()
        self._waiting = 0
        self._wake = threading.Condition()
        self._closed = False
        self._busy = 0  # threads that predict
        self._all = torch.get_num_threads()
        count = predictors or (1 if torch.cuda.is_available() else min(MOST_PREDICTORS, self._all))
        self._each = max(1, self._all // count)
        self._threads = [
            threading.Thread(target=self._run, name=f"predict-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of images that are not answered yet."""
        return self._waiting

    @contextmanager
    def admit(self, images: int) -> Iterator[None]:
        """Count images of a request until it is answered; refuse them if too many wait already."""
        with self._wake:
            if self._waiting and self._waiting + images > self._limit:
                raise busy(f"{self._waiting} images wait for a prediction already; try again")
            self._waiting += images
        try:
            yield
        finally:
            with self._wake:
                self._waiting -= images

    async def predict(self, generation: Generation, images: Images, doubt: bool, embed: bool) -> Answers:
        """Return the predictions of some images, which were admitted."""
        loop, batch = asyncio.get_running_loop(), batch_size(default_batch(generation.model))
        jobs = [_Job(generation, images[at : at + batch], doubt, embed, loop) for at in range(0, len(images), batch)]
        with self._wake:
            self._jobs += jobs
            self._wake.notify(len(jobs))
        return _joined(await asyncio.gather(*(job.future for job in jobs)))

    def close(self) -> None:
        """End the threads after the jobs that wait."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()
        torch.set_num_threads(self._all)

    def _take(self) -> list[_Job]:
        """Wait for jobs; return those of the same generation that make a batch, in their order. Nothing: closed."""
        with self._wake:
            while not self._jobs:
                if self._closed:
                    return []
                self._wake.wait_for(lambda: self._jobs or self._closed)
                self._wake.wait_for(self._is_worth_it, LINGER_SECONDS)
            first = self._jobs[0].generation
            waiting = sum(len(job.images) for job in self._jobs if job.generation is first)
            room, taken, left = batch_size(min(waiting, default_batch(first.model))), [], deque[_Job]()
            for job in self._jobs:
                if job.generation is first and (not taken or len(job.images) <= room):
                    taken.append(job)
                    room -= len(job.images)
                else:
                    left.append(job)
            self._jobs = left
            torch.set_num_threads(self._each if left or self._busy else self._all)  # for what this thread computes
            self._busy += 1
            return taken

    def _is_worth_it(self) -> bool:
        """Whether what waits should be predicted now; another thread may have taken it."""
        if not self._jobs or not self._busy or self._closed:
            return True
        few = min(FEW, default_batch(self._jobs[0].generation.model))
        return sum(len(job.images) for job in islice(self._jobs, few)) >= few

    def _run(self) -> None:
        while jobs := self._take():
            try:
                found: list[Answers | Exception] = [*_predict(jobs)]
                self._metrics.batch(jobs[0].generation.name, sum(len(job.images) for job in jobs))
            except Exception as error:  # each request gets it; the thread continues
                found = [error] * len(jobs)
            with self._wake:
                self._busy -= 1
            by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Answers | Exception]]] = {}
            for job, each in zip(jobs, found, strict=True):
                by_loop.setdefault(job.loop, []).append((job, each))
            for loop, pairs in by_loop.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_deliver, pairs)


def batch_size(most: int) -> int:
    """Return the largest of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... that is not more than `most`."""
    power = 1 << (most.bit_length() - 1)
    return power + power // 2 if power + power // 2 <= most else power


def filled(images: Images) -> Images:
    """Return the images with black ones behind them, so that their number is the size of a batch."""
    size = len(images)
    while batch_size(size) != size:
        size += 1
    return images if size == len(images) else np.pad(images, ((0, size - len(images)), (0, 0), (0, 0), (0, 0)))


def _deliver(pairs: list[tuple[_Job, Answers | Exception]]) -> None:
    for job, found in pairs:
        job.answer(found)


def _joined(parts: Sequence[Answers]) -> Answers:
    """Return the predictions of all images of a request."""
    if len(parts) == 1:
        return parts[0]

    def together(values: list[np.ndarray | None]) -> np.ndarray | None:
        found = [value for value in values if value is not None]
        return np.concatenate(found) if found else None

    return Answers(
        np.concatenate([part.shares for part in parts]),
        together([part.familiarity for part in parts]),
        together([part.embedding for part in parts]),
    )


def _predict(jobs: Sequence[_Job]) -> list[Answers]:
    generation = jobs[0].generation
    model = generation.model
    images = np.concatenate([job.images for job in jobs]) if len(jobs) > 1 else jobs[0].images
    logits, outputs = generation.read(filled(images))
    shares = refuse_not_finite(logits.softmax(dim=1).cpu().numpy())
    familiarity = None
    if any(job.doubt for job in jobs):
        familiarity = model.doubt_of().familiarity_of(logits, outputs).cpu().numpy()
    answers: list[Answers] = []
    at = 0
    for job in jobs:
        own = slice(at, at + len(job.images))
        at = own.stop
        embedding = unit_embeddings(model, job.images) if job.embed else None
        answers.append(
            Answers(shares[own], familiarity[own] if familiarity is not None and job.doubt else None, embedding)
        )
    return answers


def unit_embeddings(model: Model, images: np.ndarray) -> np.ndarray:
    """Return the embeddings (N, D) of images with length 1."""
    assert model.learner is not None
    tensor = torch.from_numpy(np.require(filled(images), requirements=["C", "W"]))
    return F.normalize(model.engine.embed(model.learner.network, tensor).float(), dim=1)[: len(images)].cpu().numpy()
