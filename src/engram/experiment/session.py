"""Session: the objects that a run works with, made from its configuration and its images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from engram.contract import Method, Phase
from engram.contract.learner import Learner
from engram.contract.method import stage_phases
from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.memory_limits import UNCHECKED_BYTES
from engram.core.processes import ALONE, Processes
from engram.core.provenance import code_digest, processor_name
from engram.core.serialize import to_plain
from engram.data.arrivals import arrival_stages
from engram.data.image_rows import ImageRows, Pixels, Source, is_mapped
from engram.data.memory import RESERVOIR, Memory, reservoir_order
from engram.data.stage import Samples, Stage
from engram.data.store import ImageStore, pixel_statistics
from engram.engine import Engine
from engram.experiment.image_placement import (
    ImagePlacement,
    StageMemory,
    check_photographs,
    check_placement,
    count_activation_bytes,
    photographs_of,
    place_images,
    stage_memory,
)
from engram.experiment.learner_config import resolve_device
from engram.experiment.networks import check_network, make_network
from engram.experiment.run_config import RunConfig
from engram.experiment.stage_work import PhasePlan, best_label, class_scores, try_parts
from engram.methods import find_method
from engram.runs.directory import PREDICTIONS, TASK_PREDICTIONS

MAIN = "main"
PHASE_TITLES = {"balance": "balanced fine-tuning", "correct": "correction"}  # for the protocol card


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage. images: in its pool, including exemplars."""

    stage: int
    new_classes: tuple[str, ...]
    num_seen: int
    images: int
    exemplars: int
    phases: tuple[PhasePlan, ...]


class Session:
    """The stream, method, learner and engine of a run.

    The test images are used only here: nothing that trains takes them as an argument.

    images: where the images of a stage are while it is trained; it changes no result. placed: of the current stage,
    where they are and a sentence about it, if there is something to say.
    processes: those that share the run.
    """

    def __init__(
        self, config: RunConfig, store: ImageStore, images: ImagePlacement = "auto", processes: Processes = ALONE
    ) -> None:
        self.config = config
        self.processes = processes
        self.store = store
        self.images: ImagePlacement = images
        self.placed: tuple[Literal["resident", "streamed"], str | None] = ("resident", None)
        self.stream = config.stream(store)
        if min(store.image_size) < 8:
            height, width = store.image_size
            raise EngramError(f"images must be at least 8 pixels on each side, got {width}x{height}")
        self.method: Method = find_method(config.method).make(config.settings)
        self._train_labels = self.stream.labels_of(store.train.class_ids)
        self._test_labels = self.stream.labels_of(store.test.class_ids)
        # The stage in which each training image comes.
        shares = {"blurry": config.blurry, "repeat": config.repeat}
        self._arrivals = arrival_stages(self._train_labels, self.stream, config.seed, **shares)
        device, precision = resolve_device(config.device, config.precision)
        seen = config.augmentation.view_size(store.image_size)
        self.engine = Engine(torch.device(device), precision, config.augmentation, seen, processes, config.norms)
        self.photographs = self.engine.buffers.photographs = photographs_of(config, store)
        kept = store.train.images
        memory = Memory(config.memory, kept if is_mapped(kept) else None)
        mean, std = self.normalisation
        network, teacher = (
            make_network(config, self.method, store.num_classes, mean, std, start=True).to(device)
            for _ in ("student", "teacher")
        )
        check_network(config, self.method, network, seen)
        self.learner = Learner(network, teacher, memory, config.seed, self.method.uses_teacher)

    @property
    def device_name(self) -> str:
        """The name of the processor or the graphics card."""
        if self.engine.device.type == "cuda":
            return torch.cuda.get_device_name(self.engine.device)
        return processor_name()

    @cached_property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel: those of the pretrained weights, those published for the data,
        or those of the training images of the base stage."""
        if self.config.weights is not None:
            return self.config.weights.mean, self.config.weights.std
        if self.store.mean is not None and self.store.std is not None:
            return self.store.mean, self.store.std
        return pixel_statistics(self.store.train.images, np.flatnonzero(self._arrivals == 0))

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the store. The first use reads every image."""
        return self.store.fingerprint()

    def base_key(self, fingerprint: str | None = None) -> str | None:
        """A digest of everything that determines the trained base stage; None if it is not shared.

        fingerprint: of the store, if it is already known.
        """
        method_key, code = find_method(self.config.method).base_key(self.method), code_digest(self.method)
        parts_code = {registry.code(name) for registry, name in self.config.training_parts()} - {""}
        if method_key is None or code is None or None in parts_code:
            return None
        base = self.stream.sizes[0]
        key = {
            "code": [code, *sorted(map(str, parts_code))],
            "torch": torch.__version__,
            "device": [self.engine.device.type, self.device_name],
            "precision": self.engine.precision,
            # On a CPU, the last bits of sums depend on it.
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
        if self.processes.count > 1:  # the last bits of sums depend on it
            key["processes"] = [self.processes.count, self.config.norms]
        if self.photographs is not None:  # the fingerprint is that of the stored squares
            key["photographs"] = self.photographs.digest
        if self.config.weights is not None:
            key["weights"] = self.config.weights.digest
        if self.config.blurry or self.config.repeat:
            key["images"] = np.flatnonzero(self._arrivals == 0).tolist()
        return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()

    def stage(self, index: int) -> Stage:
        """A stage to train on: its images, which are those of its new classes, and the current memory."""
        labels = self.stream.new_labels(index)
        rows = np.flatnonzero(self._arrivals == index)
        self._place(index, len(rows) + len(self.learner.memory))
        new = Samples(
            self._images_of(self.store.train.images, rows),
            torch.from_numpy(self._train_labels[rows]),
            torch.from_numpy(rows.astype(np.int64)),
            torch.zeros(len(rows), dtype=torch.bool),
        )
        kept = self.learner.memory.samples()
        pool = new if kept is None else Samples.concatenate([new, kept])
        return Stage(index, labels.start, len(labels), pool, self.stream.sizes[: index + 1])

    def _place(self, index: int, count: int) -> None:
        """Decide where the images of a stage are while it is trained."""
        engine, size, decoded = self.engine, self._streamed_size, self.photographs is not None
        self.placed = ("resident", None)
        if self.images == "streamed" or decoded or count * size[0] * size[1] * 3 >= UNCHECKED_BYTES:
            phases = self._outlined_phases(index)
            memory = stage_memory(engine, self.learner, phases, count, size, self._activation_bytes)
            kind = "photographs" if decoded else f"images of {size[1]}x{size[0]} pixels"
            subject = f"stage {index}: {count:,} {kind}"
            self.placed = place_images(self.images, engine, phases, subject, memory, decoded)
        engine.buffers.streamed = self.placed[0] == "streamed"

    @property
    def _streamed_size(self) -> tuple[int, int]:
        """Height and width of images on the device."""
        return self.store.image_size if self.photographs is None else self.engine.image_size

    def _images_of(self, source: Source, rows: np.ndarray) -> Pixels:
        """Images of the data set: a copy if they are few, else rows that are read where they are used."""
        is_large = len(rows) * source[0].nbytes >= UNCHECKED_BYTES if len(rows) else False
        if is_large or is_mapped(source) or self.engine.buffers.streamed:
            return ImageRows([source], torch.from_numpy(rows.astype(np.int64)))
        return torch.from_numpy(np.ascontiguousarray(source[rows]))

    def memory_of(self, plan: StagePlan) -> StageMemory:
        """The memory that a planned stage needs."""
        phases = self._outlined_phases(plan.stage)
        size = self._streamed_size
        return stage_memory(self.engine, self.learner, phases, plan.images, size, self._activation_bytes)

    @cached_property
    def _activation_bytes(self) -> float:
        """The bytes per image that a training step keeps, of the network as it is at first."""
        return count_activation_bytes(self.engine, self.learner.network)

    def _outlined_phases(self, index: int) -> list[Phase]:
        """The phases of a stage with as many images and exemplars as are planned."""
        new = self.stream.new_labels(index)
        counts = np.bincount(self._train_labels[self._arrivals == index], minlength=new.stop)
        return self._planned_phases(_outline(index, new, counts, self._planned_exemplars(index)))

    def plan(self) -> list[StagePlan]:
        """Plan all stages of the run, without training."""
        plans: list[StagePlan] = []
        seen: list[Phase] = []
        for index in range(len(self.stream)):
            new = self.stream.new_labels(index)
            counts = np.bincount(self._train_labels[self._arrivals == index], minlength=new.stop)
            kept = self._planned_exemplars(index)
            phases = self._planned_phases(_outline(index, new, counts, kept))
            seen += phases
            names = tuple(self.store.class_names[self.stream.order[label]] for label in new)
            images = int(counts.sum() + kept.sum())
            planned = tuple(PhasePlan.of(phase) for phase in phases)
            plans.append(StagePlan(index, names, new.stop, images, int(kept.sum()), planned))
        try_parts(seen, self.config.settings, self.config.memory)
        check_placement(self.images, seen)
        if self.photographs is not None:
            check_photographs(self.images, self.method, seen)
        return plans

    def _planned_exemplars(self, index: int) -> np.ndarray:
        """The number of exemplars of each old class that the memory will hold at the start of a stage."""
        memory, old = self.config.memory, self.stream.new_labels(index).start
        rows = np.flatnonzero(self._arrivals < index)
        if memory.selection == RESERVOIR:
            rows = rows[reservoir_order(torch.from_numpy(rows), self.config.seed)[: memory.size]]
        counts = np.bincount(self._train_labels[rows], minlength=old)
        quota = memory.per_class(old) if old and memory.selection != RESERVOIR else None
        return counts if quota is None else np.minimum(counts, quota)

    def _planned_phases(self, outline: Stage) -> list[Phase]:
        try:
            return stage_phases(self.method, self.learner, outline, self.engine)
        except EngramError:
            raise
        except Exception as error:
            raise EngramError(
                f"{self.config.method} cannot be planned: its phases() failed ({type(error).__name__}: {error}). It is "
                "also called before anything is learned, when the learner has no tensors of the method and the stage "
                "has no images: read those in the loss (step.buffers), or in the rows or start of a phase; "
                "ENGRAM_DEBUG=1 shows the traceback"
            ) from error

    def card(self) -> dict[str, str]:
        """The protocol card, with the epochs of the plan."""
        plans = self.plan()
        is_part = any(phase.images < plan.images for plan in plans for phase in plan.phases if phase.name == MAIN)
        return self.config.card(self.store, describe_epochs(plans, " on the memory" if is_part else ""))

    def evaluate(self, index: int) -> tuple[dict[str, float], dict[str, list[float]], dict[str, np.ndarray]]:
        """Accuracy over the classes seen, accuracy by stage, and the arrays to save (predictions, importance, ...)."""
        rows = np.flatnonzero(self._test_labels < self.stream.num_seen(index))
        targets = self._test_labels[rows].astype(np.int16)
        images = self._images_of(self.store.test.images, rows)
        scores = class_scores(self.learner, self.engine, images, self.method.predictors, f"after stage {index}, ")
        sizes, arrays, predictions = self.stream.sizes[: index + 1], {"targets": targets}, {}
        for name in self.method.predictors:
            arrays[f"{PREDICTIONS}{name}"] = predictions[name] = best_label(scores[name])
            own = metrics.best_of_own_stage(scores[name].float().cpu().numpy(), targets, sizes)
            arrays[f"{TASK_PREDICTIONS}{name}"] = own.astype(np.int16)
        logged = self.method.logged_buffers
        buffers = {name: value for name, value in self.learner.buffers.items() if name.startswith(logged)}
        arrays |= {name: value.float().cpu().numpy() for name, value in buffers.items()}
        accuracy = {name: metrics.accuracy(targets, labels) for name, labels in predictions.items()}
        by_stage = {name: metrics.accuracy_by_stage(targets, labels, sizes) for name, labels in predictions.items()}
        return accuracy, by_stage, arrays


def describe_epochs(plans: Sequence[StagePlan], on: str) -> str:
    """Describe the epochs in words: those of the main phase, then those of the other phases in order.

    on: the data of the main phase in later stages, if it differs from that of the base stage.
    """
    base = {phase.name: phase.epochs for phase in plans[0].phases}
    phases = base | {phase.name: phase.epochs for plan in plans[1:] for phase in plan.phases}
    parts = [f"{epochs} of {PHASE_TITLES.get(name, name)}" for name, epochs in phases.items() if name != MAIN]
    if MAIN in phases:
        first, later = base.get(MAIN, 0), phases[MAIN]
        alike = first == later
        parts.insert(0, f"{later} per stage" if alike else f"{first} for the base, {later}{on} for each stage after it")
    return ", ".join(parts) or "-"


def _outline(index: int, new: range, counts: np.ndarray, kept: np.ndarray) -> Stage:
    """A stage with the right labels and number of images, but with empty images, for planning."""
    labels = np.concatenate([np.repeat(np.arange(new.stop), counts), np.repeat(np.arange(new.start), kept)])
    total = len(labels)
    exemplar = torch.arange(total) >= int(counts.sum())
    empty = torch.empty(total, 0, 0, 3, dtype=torch.uint8)
    pool = Samples(empty, torch.from_numpy(labels.astype(np.int64)), torch.arange(total), exemplar)
    return Stage(index, new.start, len(new), pool)
