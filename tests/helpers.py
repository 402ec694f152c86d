"""What several test files share: a toy data set that can be learned, tiny runs of it, and the stages of a run by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engram.config import RunConfig
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.samples import Samples
from engram.data.stage import Stage
from engram.data.store import ImageStore
from engram.engine import Engine
from engram.methods import Phase, Step, Training, find_method
from engram.methods.exemplars import choose_exemplars, class_means
from engram.models.network import Network, Output
from engram.session import Session

MEMORY = {
    "needed": MemoryConfig(size=3),
    "none": MemoryConfig(budget="none", size=0),
    "all": MemoryConfig(budget="all", size=0),
}
NO_AUGMENTATION = Augmentation(pad=0, flip=False, brightness=0.0)


def toy_store(
    num_classes: int = 6, per_class: int = 12, test_per_class: int = 4, size: int = 8, seed: int = 0
) -> ImageStore:
    """Classes that differ in colour and pattern under noise: a few epochs learn them."""
    random = np.random.default_rng(seed)
    patterns = random.integers(40, 216, (num_classes, size, size, 3))
    colours = random.integers(-40, 41, (num_classes, 1, 1, 3))

    def images(count: int) -> np.ndarray:
        noise = random.normal(0, 12, (num_classes, count, size, size, 3))
        drawn = (patterns + colours)[:, None] + noise
        return drawn.clip(0, 255).astype(np.uint8).reshape(-1, size, size, 3)

    names = [f"class {i}" for i in range(num_classes)]
    train, test = np.repeat(range(num_classes), per_class), np.repeat(range(num_classes), test_per_class)
    return ImageStore.from_arrays(images(per_class), train, images(test_per_class), test, class_names=names, name="toy")


def tiny_config(method: str = "afc", *, epochs: int = 2, finetune: int = 1, batch_size: int = 8, **changes: Any) -> RunConfig:
    """A run of the toy set that takes a fraction of a second: base 2, then 2 classes a stage."""
    info = find_method(method)
    settings = info.settings(
        **{
            "train": Training(epochs=epochs, batch_size=batch_size, lr=0.05, remainder="keep"),
            "finetune": Training(epochs=finetune, batch_size=batch_size, lr=0.05, schedule="constant", remainder="keep"),
        }
    )
    config = RunConfig(
        method=method,
        settings=settings,
        base=2,
        increment=2,
        order="natural",
        memory=MEMORY[info.memory],
        backbone="resnet10",
        augmentation=Augmentation(pad=1),
        device="cpu",
    )
    return replace(config, **changes)


def tiny_session(config: RunConfig | None = None, store: ImageStore | None = None) -> Session:
    """A session of a tiny run, nothing learned yet."""
    return Session(tiny_config() if config is None else config, toy_store() if store is None else store)


def train_phase(session: Session, stage: Stage, phase: Phase, number: int = 0) -> None:
    """Takes every step of a phase."""
    loop = session.engine.start(session.learner, stage, phase, number)
    for _ in loop:
        loop.check_finite()


def learn_stage(session: Session, index: int, before_finish: Callable[[Stage], None] | None = None) -> Stage:
    """One stage by hand, in the order: grow, phases, finish, exemplars, class means, teacher."""
    learner, method, engine = session.learner, session.method, session.engine
    stage = session.stage(index)
    method.grow(learner, stage, engine)
    for number, phase in enumerate(method.phases(learner, stage, engine)):
        train_phase(session, stage, phase, number)
    if before_finish is not None:
        before_finish(stage)
    method.finish(learner, stage, engine)
    learner.memory.update(stage.pool, choose_exemplars(learner, stage, engine), stage.num_seen)
    if "nme" in method.predictors:
        learner.class_means = class_means(learner, engine)
    learner.snapshot_teacher()
    return stage


def parameters_of(network: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def buffers_of(network: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in network.named_buffers()}


def without_batch_norm(network: Network) -> Network:
    """A copy in which every BatchNorm is an identity, so that an image's output does not depend on its batch."""
    network = copy.deepcopy(network)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return network


def cpu_engine(augmentation: Augmentation = NO_AUGMENTATION, size: int = 8) -> Engine:
    """An engine on the CPU."""
    return Engine(torch.device("cpu"), "float32", augmentation, (size, size))


def make_stage(index: int, num_old: int, labels: list[int], size: int = 8, seed: int = 0) -> Stage:
    """A stage of random images with these labels; those below num_old count as exemplars."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.integers(0, 256, (len(labels), size, size, 3), dtype=np.uint8))
    label = torch.tensor(labels)
    pool = Samples(images, label, torch.arange(len(labels)), label < num_old)
    return Stage(index, num_old, max(labels) + 1 - num_old, pool)


@dataclass(frozen=True)
class RandomStep:
    """Random numbers for one training step, as float64 arrays: what slow implementations read."""

    scores: np.ndarray  # (B, K)
    labels: np.ndarray  # (B,)
    exemplar: np.ndarray  # (B,)
    student: list[np.ndarray]  # (B, C, H, W) per map
    teacher: list[np.ndarray]
    importance: list[np.ndarray]  # (C,) per map
    scale: float
    weight: float

    def step(self) -> Step:
        """The same numbers as the loss of a method sees them; the student's tensors take gradients."""
        student_maps = tuple(torch.tensor(value, requires_grad=True) for value in self.student)
        teacher_maps = tuple(torch.tensor(value) for value in self.teacher)
        scores, scale = torch.tensor(self.scores, requires_grad=True), torch.tensor(self.scale, dtype=torch.float64)
        embedding = torch.zeros(len(self.labels), 1)
        student = Output(student_maps, embedding, scores, scale * scores, scale)
        teacher = Output(teacher_maps, embedding, scores.detach(), scores.detach(), scale)
        buffers = {f"importance.{i}": torch.tensor(value) for i, value in enumerate(self.importance)}
        weights = {"discrepancy": torch.tensor(self.weight, dtype=torch.float64)}
        labels, exemplar = torch.tensor(self.labels), torch.tensor(self.exemplar)
        return Step(labels, exemplar, student, teacher, weights, buffers)


def random_step(seed: int, batch: int = 5, classes: int = 6) -> RandomStep:
    """A random step with two maps of different shape, positive importances of mean 1, and a mix of exemplars."""
    random = np.random.default_rng(seed)
    shapes = [(batch, 3, 4, 4), (batch, 5, 2, 3)]
    importance = [random.gamma(1.0, size=shape[1]) for shape in shapes]
    exemplar = random.random(batch) < 0.5
    exemplar[0], exemplar[1] = True, False
    return RandomStep(
        scores=random.normal(size=(batch, classes)),
        labels=random.integers(classes, size=batch),
        exemplar=exemplar,
        student=[random.normal(size=shape) for shape in shapes],
        teacher=[random.normal(size=shape) for shape in shapes],
        importance=[value / value.mean() for value in importance],
        scale=float(random.uniform(0.5, 4)),
        weight=float(random.uniform(0.5, 9)),
    )
