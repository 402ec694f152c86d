"""The plain loop: the same training as one would write it first in PyTorch, to compare engram's step with.

A data set of NumPy images augmented one by one, a DataLoader with workers, engram's network and losses as ordinary
modules and functions in eager float32, torch.optim.SGD, and the loss read after every step.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.ground import Prepared, lengthened
from benchmarks.timing import synchronise
from engram.contract import Phase, Step
from engram.data.augment import Augmentation
from engram.data.stage import Samples
from engram.nn.network import Network

Item = tuple[Tensor, int, bool]


class PlainImages(Dataset[Item]):
    """Images cropped, mirrored, brightened and normalised one at a time on the CPU; with label and exemplar flag."""

    def __init__(self, samples: Samples, augmentation: Augmentation, mean: np.ndarray, std: np.ndarray) -> None:
        self.images = samples.pixels.numpy()
        self.labels = samples.labels.tolist()
        self.exemplar = samples.exemplar.tolist()
        self.augmentation = augmentation
        self.mean, self.std = mean.astype(np.float32), std.astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Item:
        image = self._augmented(self.images[row])
        normalised = (image - self.mean) / self.std
        return torch.from_numpy(normalised.transpose(2, 0, 1).copy()), self.labels[row], self.exemplar[row]

    def _augmented(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W, 3) as floats in [0, 1], cropped from its padding, mirrored by chance, brightened."""
        height, width, _ = image.shape
        pad, change = self.augmentation.pad, self.augmentation.brightness
        padded = np.zeros((height + 2 * pad, width + 2 * pad, 3), dtype=np.uint8)
        padded[pad : pad + height, pad : pad + width] = image
        top, left = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
        cropped = padded[top : top + height, left : left + width]
        if self.augmentation.flip and random.random() < 0.5:
            cropped = cropped[:, ::-1]
        bright = cropped.astype(np.float32) * np.float32(random.uniform(1 - change, 1 + change) / 255)
        return np.minimum(bright, 1.0)


def plain_loader(prepared: Prepared, workers: int) -> DataLoader[Item]:
    """Shuffled batches of the stage's pool, the remainder dropped, made by so many workers (0: in this process)."""
    session, training = prepared.session, prepared.phase.training
    mean, std = (np.asarray(values) for values in session.normalisation)
    images = PlainImages(prepared.stage.pool, session.engine.augmentation, mean, std)
    return DataLoader(
        images,
        batch_size=min(training.batch_size, len(images)),
        shuffle=True,
        drop_last=training.remainder == "drop",
        num_workers=workers,
        pin_memory=session.engine.device.type == "cuda",
        persistent_workers=workers > 0,
    )


def usable_workers(asked: int) -> int:
    """The workers asked for, but no more than this process may use cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(asked, cores)


class PlainModel:
    """Copies of a prepared session's networks, and the loss of its phase."""

    def __init__(self, prepared: Prepared, steps: int) -> None:
        learner = prepared.session.learner
        self.device = prepared.session.engine.device
        self.network = _normalised_outside(learner.network).train()
        self.teacher = _normalised_outside(learner.teacher).eval().requires_grad_(False)
        self.buffers = {name: value.clone() for name, value in learner.buffers.items()}
        self.phase = lengthened(prepared.phase, steps)
        self.num_old = prepared.stage.num_old

    def losses(self, images: Tensor, labels: Tensor, exemplar: Tensor) -> dict[str, Tensor]:
        """The loss terms of a batch of normalised images: the method's own loss of student and teacher."""
        student = self.network(images)
        teacher = None
        if self.phase.teacher:
            with torch.no_grad():
                teacher = self.teacher(images)
        weights = {name: torch.tensor(value, device=self.device) for name, value in self.phase.weights.items()}
        return self.phase.loss(Step(labels, exemplar, student, teacher, weights, self.buffers))


def train_plainly(model: PlainModel, loader: DataLoader[Item]) -> Iterator[float]:
    """The value of the loss at every step of the phase."""
    network, training = model.network, model.phase.training
    optimiser = torch.optim.SGD(
        network.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    schedule = _schedule(optimiser, model.phase, len(loader))
    # The old classes' proxies are frozen in this phase; weight decay and momentum must not move them either.
    proxies = network.head.get_parameter("weight")
    frozen = proxies[: model.num_old].detach().clone()
    for _ in range(training.epochs):
        for batch in loader:
            images, labels, exemplar = (part.to(model.device, non_blocking=True) for part in batch)
            loss = torch.stack(list(model.losses(images, labels, exemplar).values())).sum()
            optimiser.zero_grad()
            loss.backward()
            if training.clip is not None:
                torch.nn.utils.clip_grad_value_(network.parameters(), training.clip)
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                proxies[: model.num_old] = frozen
            yield loss.item()


class PlainSteps:
    """The steps of a prepared phase by the plain loop.

    Nothing here refers to itself, so that the workers end with the last reference; a collector that finds them in a
    cycle ends them in an order that makes each wait for seconds.
    """

    def __init__(self, prepared: Prepared, workers: int, steps: int) -> None:
        self.model = PlainModel(prepared, steps)
        self.loader = plain_loader(prepared, workers)
        self.loss = math.nan
        self._steps = train_plainly(self.model, self.loader)

    def take(self, count: int) -> None:
        for _ in range(count):
            self.loss = next(self._steps)

    def wait(self) -> None:
        synchronise(self.model.device)


def _schedule(optimiser: torch.optim.Optimizer, phase: Phase, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The phase's learning rate, step by step."""
    total = phase.training.epochs * steps

    def share(step: int) -> float:
        return 1.0 if phase.training.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / total))

    return torch.optim.lr_scheduler.LambdaLR(optimiser, share)


def _normalised_outside(network: Network) -> Network:
    """A copy that takes images as the data set gives them: normalised already."""
    plain = copy.deepcopy(network)
    plain.mean.zero_()
    plain.std.fill_(1)
    return plain
