"""Session: the parts of one run, made from its configuration and its images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from engram.contract.learner import Learner
from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.memory_limits import check_pool
from engram.core.provenance import code_digest, processor_name
from engram.core.rng import generator
from engram.core.serialize import to_plain
from engram.data.memory import Memory
from engram.data.stage import Samples, Stage
from engram.data.store import ImageStore, pixel_statistics
from engram.engine import Engine
from engram.experiment.learner_config import resolve_device
from engram.experiment.run_config import RunConfig
from engram.experiment.stage_work import PhasePlan, predict
from engram.methods import Method, Phase, find_method
from engram.nn.backbones import build_backbone
from engram.nn.network import Network

MAIN = "main"
CALLED = {"balance": "balanced fine-tuning", "correct": "correction"}  # phases, in the protocol card


@dataclass(frozen=True)
class StagePlan:
    """A stage as it will be."""

    stage: int
    new_classes: tuple[str, ...]
    num_seen: int
    images: int
    exemplars: int
    phases: tuple[PhasePlan, ...]


class Session:
    """Everything a run works with: stream, method, learner, engine.

    The test images stay here: nothing that trains takes them as an argument.
    """

    def __init__(self, config: RunConfig, store: ImageStore) -> None:
        self.config = config
        self.store = store
        self.stream = config.stream(store)
        if min(store.image_size) < 8:
            height, width = store.image_size
            raise EngramError(f"images must be at least 8 pixels on each side, got {width}x{height}")
        self.method: Method = find_method(config.method).make(config.settings)
        self._train_labels = self.stream.labels_of(store.train.class_ids)
        self._test_labels = self.stream.labels_of(store.test.class_ids)
        device, precision = resolve_device(config.device, config.precision)
        seen = config.augmentation.seen(store.image_size)
        self.engine = Engine(torch.device(device), precision, config.augmentation, seen)
        memory = Memory(config.memory)
        made = (config, self.method, store.num_classes, *self.normalisation)
        networks = (make_network(*made).to(device), make_network(*made).to(device))
        self.learner = Learner(*networks, memory, config.seed, self.method.taught)

    @property
    def device_name(self) -> str:
        """The processor or graphics card, as it calls itself."""
        if self.engine.device.type == "cuda":
            return torch.cuda.get_device_name(self.engine.device)
        return processor_name()

    @cached_property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Each channel's mean and standard deviation: the published ones, or the base stage's training images'."""
        if self.store.mean is not None and self.store.std is not None:
            return self.store.mean, self.store.std
        rows = np.flatnonzero(self._train_labels < self.stream.sizes[0])
        return pixel_statistics(self.store.train.images, rows)

    @cached_property
    def fingerprint(self) -> str:
        """The store's; finding it out reads every image."""
        return self.store.fingerprint()

    def base_key(self, fingerprint: str | None = None) -> str | None:
        """A name for the trained base stage, made of everything that determines it; None if it is not shared.

        fingerprint: the store's, where it is known already.
        """
        method_key, code = find_method(self.config.method).base_key(self.method), code_digest(self.method)
        if method_key is None or code is None:
            return None
        base = self.stream.sizes[0]
        key = {
            "code": code,
            "torch": torch.__version__,
            "device": [self.engine.device.type, self.device_name],
            "precision": self.engine.precision,
            # On a CPU sums depend on it in their last bits.
            "threads": torch.get_num_threads() if self.engine.device.type == "cpu" else None,
            "data": fingerprint or self.fingerprint,
            "classes": list(self.stream.order[:base]),
            "capacity": self.store.num_classes,
            "normalisation": self.normalisation,
            "backbone": self.config.backbone,
            "augmentation": to_plain(self.config.augmentation),
            "seed": self.config.seed,
            "method": method_key,
        }
        return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()

    def stage(self, index: int) -> Stage:
        """A stage to train on: the images of its new classes, and the memory as it is now."""
        labels = self.stream.new_labels(index)
        rows = np.flatnonzero((self._train_labels >= labels.start) & (self._train_labels < labels.stop))
        count, engine = len(rows) + len(self.learner.memory), self.engine
        check_pool(index, count, self.store.image_size, engine.device, engine.space.held_bytes)
        new = Samples(
            torch.from_numpy(np.ascontiguousarray(self.store.train.images[rows])),
            torch.from_numpy(self._train_labels[rows]),
            torch.from_numpy(rows.astype(np.int64)),
            torch.zeros(len(rows), dtype=torch.bool),
        )
        kept = self.learner.memory.samples()
        pool = new if kept is None else Samples.concatenate([new, kept])
        return Stage(index, labels.start, len(labels), pool, self.stream.sizes[: index + 1])

    def plan(self) -> list[StagePlan]:
        """What the run will do, stage by stage, without doing any of it."""
        counts = np.bincount(self._train_labels, minlength=self.store.num_classes)
        plans: list[StagePlan] = []
        for index in range(len(self.stream)):
            new = self.stream.new_labels(index)
            quota = self.config.memory.per_class(new.start) if new.start else 0
            kept = [int(min(counts[label], counts[label] if quota is None else quota)) for label in range(new.start)]
            phases = self._planned_phases(_outline(index, new, counts, kept))
            names = tuple(self.store.class_names[self.stream.order[label]] for label in new)
            images = int(counts[new.start : new.stop].sum()) + sum(kept)
            planned = tuple(PhasePlan.of(phase) for phase in phases)
            plans.append(StagePlan(index, names, new.stop, images, sum(kept), planned))
        return plans

    def _planned_phases(self, outline: Stage) -> list[Phase]:
        try:
            return self.method.phases(self.learner, outline, self.engine)
        except EngramError:
            raise
        except Exception as error:
            raise EngramError(
                f"{self.config.method} cannot be planned: its phases() failed ({type(error).__name__}: {error}). It is "
                "also asked before anything is learned, with no tensors of the method in the learner and no images in "
                "the stage: read those in the loss (step.buffers), or in the rows or start of a phase; ENGRAM_DEBUG=1 "
                "shows where"
            ) from error

    def card(self) -> dict[str, str]:
        """The protocol card, with the epochs that the plan has."""
        on = " on the memory" if hasattr(self.config.settings, "rehearse") else ""
        return self.config.card(self.store, describe_epochs(self.plan(), on))

    def evaluate(self, index: int) -> tuple[dict[str, float], dict[str, list[float]], dict[str, np.ndarray]]:
        """Accuracy over the classes seen, accuracy by stage, and the arrays to keep (predictions, importance, ...)."""
        rows = np.flatnonzero(self._test_labels < self.stream.num_seen(index))
        targets = self._test_labels[rows].astype(np.int16)
        images = torch.from_numpy(np.ascontiguousarray(self.store.test.images[rows]))
        predictions = predict(self.learner, self.engine, images)
        predictions = {name: predictions[name] for name in self.method.predictors}
        sizes = self.stream.sizes[: index + 1]
        arrays = {"targets": targets} | {f"predictions.{name}": labels for name, labels in predictions.items()}
        told = self.method.told_buffers
        buffers = {name: value for name, value in self.learner.buffers.items() if name.startswith(told)}
        arrays |= {name: value.float().cpu().numpy() for name, value in buffers.items()}
        accuracy = {name: metrics.accuracy(targets, labels) for name, labels in predictions.items()}
        by_stage = {name: metrics.accuracy_by_stage(targets, labels, sizes) for name, labels in predictions.items()}
        return accuracy, by_stage, arrays


def make_network(
    config: RunConfig, method: Method, classes: int, mean: Sequence[float], std: Sequence[float]
) -> Network:
    """The network of such a run before it has learned anything, with room for so many classes."""
    backbone = method.backbone(build_backbone(config.backbone, generator(config.seed, "backbone")))
    return Network(backbone, method.head(backbone.dim, classes), mean, std)


def describe_epochs(plans: Sequence[StagePlan], on: str) -> str:
    """What is trained, in words: the epochs of the main phase, then those of the others, in their order.

    on: what a later stage's main phase trains on, where that is not what the base's does.
    """
    base = {phase.name: phase.epochs for phase in plans[0].phases}
    phases = base | {phase.name: phase.epochs for plan in plans[1:] for phase in plan.phases}
    parts = [f"{epochs} of {CALLED.get(name, name)}" for name, epochs in phases.items() if name != MAIN]
    if MAIN in phases:
        first, later = base.get(MAIN, 0), phases[MAIN]
        alike = first == later
        parts.insert(0, f"{later} a stage" if alike else f"{first} for the base, {later}{on} for each stage after it")
    return ", ".join(parts) or "-"


def _outline(index: int, new: range, counts: np.ndarray, kept: list[int]) -> Stage:
    """A stage of the right size and labels whose images are empty, for planning."""
    labels = np.concatenate(
        [
            np.repeat(np.arange(new.start, new.stop), counts[new.start : new.stop]),
            np.repeat(np.arange(new.start), kept),
        ]
    )
    exemplar = torch.from_numpy(labels < new.start)
    total = len(labels)
    empty = torch.empty(total, 0, 0, 3, dtype=torch.uint8)
    pool = Samples(empty, torch.from_numpy(labels.astype(np.int64)), torch.arange(total), exemplar)
    return Stage(index, new.start, len(new), pool)
