"""Model: a learner that knows its classes by their labels, how it came to know them, and how good it is at them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.learner import Learner
from engram.core.errors import EngramError, suggest
from engram.core.rng import generator
from engram.data.memory import Memory, MemoryConfig
from engram.data.stage import Samples
from engram.engine import Engine
from engram.experiment.learner_config import Device, Precision, resolve_device
from engram.methods import Method, find_method
from engram.models.calibration import fit_temperature
from engram.models.model_config import ModelConfig
from engram.nn.backbones import ResNet, build_backbone
from engram.nn.network import Network

# Of the cosine with a class's mean, for the shares that NME gives.
NME_SHARPNESS = 10.0


@dataclass(frozen=True)
class KnownClass:
    """A class that a model knows.

    stage: the number of the learning in the model's history that it came with. images: those it was trained on then.
    accuracy: percent of its held-out images, by predictor; empty where none was held out. digests: of all images it was
    ever trained on, one behind the other; none of those from before they were kept.
    """

    label: Hashable
    stage: int
    images: int
    accuracy: dict[str, float] = field(default_factory=dict)
    digests: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Entry:
    """Something that happened to a model: "learned" or "removed".

    images: those that were given to learn; classes: how many were learned. before, after: percent of the held-out
    images of the classes known before and not learned again, by predictor; new: of all that were learned now.
    refreshed_before, refreshed_after: of those learned again, both on the images held out after it. device, precision:
    where it was learned.
    """

    what: str
    date: str
    images: int = 0
    epochs: int = 0
    seconds: float = 0.0
    device: str = ""
    precision: str = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    new: dict[str, float] = field(default_factory=dict)
    classes: int = 0  # 0 where it was not noted
    refreshed_before: dict[str, float] = field(default_factory=dict)
    refreshed_after: dict[str, float] = field(default_factory=dict)


class Model:
    """What a classifier is between two lessons.

    learner is None until the first. sizes: the new classes of each stage since the network began, as methods count
    them. heldout: images never trained on, by label. temperatures: what logits are divided by, by predictor, so that
    confidence is what can be expected; 1 where nothing is said. device, precision: as asked for, "auto" included.
    reads_only: it was opened without the images it keeps.
    """

    def __init__(self, config: ModelConfig, device: Device = "auto", precision: Precision = "auto") -> None:
        self.config = config
        self.device: Device = device
        self.precision: Precision = precision
        place, exact = resolve_device(device, precision)
        self.engine = Engine(torch.device(place), exact, config.augmentation, config.image_size)
        self.method: Method = find_method(config.method).make(config.settings)
        self.learner: Learner | None = None
        self.classes: tuple[KnownClass, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.history: tuple[Entry, ...] = ()
        self.heldout = Memory(MemoryConfig("all", 0))
        self.temperatures: dict[str, float] = {}
        self.reads_only = False

    @property
    def labels(self) -> list[Hashable]:
        """The labels of the classes, in the order of the scores."""
        return [known.label for known in self.classes]

    @property
    def predictors(self) -> tuple[str, ...]:
        """How it can predict now, the method's own choice first."""
        usable = self.learner is not None and self.learner.class_means is not None
        return tuple(name for name in self.method.predictors if name != "nme" or usable)

    def position(self, label: Hashable) -> int:
        """The place of a class; refuses one that is not known."""
        if label not in self.labels:
            hint = suggest(str(label), [str(known) for known in self.labels]) if len(self.classes) <= 1000 else ""
            raise EngramError(f"the model knows no class {label!r}: {hint}")
        return self.labels.index(label)

    def make_learner(self, mean: tuple[float, ...], std: tuple[float, ...], capacity: int) -> Learner:
        """A learner that has learned nothing, for images with these statistics."""

        def network() -> Network:
            backbone = self.make_backbone()
            return Network(backbone, self.method.head(backbone.dim, capacity), mean, std)

        device, memory = self.engine.device, Memory(self.config.memory)
        return Learner(network().to(device), network().to(device), memory, self.config.seed, self.method.taught)

    def make_backbone(self) -> ResNet:
        """A backbone that has learned nothing, as the method wants it."""
        return self.method.backbone(build_backbone(self.config.backbone, generator(self.config.seed, "backbone")))

    def begin_again(self) -> None:
        """Forgets all but the backbone as it is now, for a model that knows no class any more."""
        known = self._taught().network.backbone.state_dict()
        self.learner = self.make_learner(*self.normalisation, capacity=1)
        fresh = self.learner.network.backbone
        fresh.load_state_dict({name: known[name] for name in fresh.state_dict()})
        self.sizes = ()

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Each channel's mean and standard deviation in the images of the first lesson."""
        network = self._taught().network
        return tuple(network.mean.flatten().tolist()), tuple(network.std.flatten().tolist())

    def copy(self) -> Model:
        """A model of its own with the same knowledge: to learn with, and to be thrown away if that fails."""
        self.refuse_change()
        other = Model(self.config, self.device, self.precision)
        other.classes, other.sizes, other.history = self.classes, self.sizes, self.history
        other.heldout.load_state_dict(self.heldout.state_dict())
        other.temperatures = dict(self.temperatures)
        if self.learner is not None:
            mean, std = self.normalisation
            other.learner = self.make_learner(mean, std, self.learner.network.head.capacity)
            state = {name: value.detach().clone() for name, value in self.learner.state_dict().items()}
            other.learner.load_state_dict(state)
        return other

    def refuse_change(self) -> None:
        """Refuses to learn, remove or save what was opened without its images: they would be lost."""
        if self.reads_only:
            raise EngramError(
                "the model was opened to predict alone (images=False); open it with its images to change it"
            )

    def probabilities(self, images: np.ndarray | Tensor, by: str | None = None) -> np.ndarray:
        """The share of each class (N, K) for uint8 images (N, H, W, 3), by the head ("cnn") or the class means ("nme").

        They sum to 1. Where enough images are held out the largest is, on average over these, the share that is right.
        """
        return self.reader(by)(images).cpu().numpy()

    def reader(self, by: str | None = None) -> Callable[[np.ndarray | Tensor], Tensor]:
        """`probabilities` for one batch after the other, on the device, where they may still be under way.

        The model must not learn meanwhile.
        """
        learner, by = self._taught(), self.predictor(by)
        if not self.classes:
            raise EngramError("the model knows no class; let it learn some")
        network, read = learner.network, self.engine.reader(learner.network)
        temperature = self.temperatures.get(by, 1.0)

        def shares(images: np.ndarray | Tensor) -> Tensor:
            if isinstance(images, np.ndarray):
                images = torch.from_numpy(np.require(images, requirements=["C", "W"]))
            embedding, scores = read(images)
            if by == "cnn":
                scale = network.head.scale
                logits = scores[:, : len(self.classes)] * (1.0 if scale is None else scale.detach())
            else:
                assert learner.class_means is not None
                logits = NME_SHARPNESS * (F.normalize(embedding, dim=1) @ learner.class_means.T)
            return (logits.double() / temperature).softmax(dim=1)

        return shares

    def predictor(self, by: str | None) -> str:
        """The predictor of that name, or the method's own choice; refuses one that the model does not have."""
        if by is None:
            return self.predictors[0]
        if by not in self.predictors:
            have = " and ".join(self.predictors)
            more = "; NME needs exemplars of every class" if by == "nme" else ""
            raise EngramError(f"this model ({self.config.method}) predicts by {have}, not by {by!r}{more}")
        return by

    def accuracy_on(self, samples: Samples) -> dict[str, dict[int, float]]:
        """Percent of the images of each label, by predictor and label."""
        return {by: _accuracy(shares, samples) for by, shares in self._answers(samples).items()}

    def _answers(self, samples: Samples) -> dict[str, np.ndarray]:
        return {by: self.probabilities(samples.images, by) for by in self.predictors}

    def remove(self, labels: Iterable[Hashable], date: str) -> None:
        """Forgets classes: their rows, means, exemplars and held-out images. The others' scores stay what they are.

        Where one is not known, none goes. What the backbone learned from their images stays in the backbone.
        """
        places = [self.position(label) for label in dict.fromkeys(labels)]
        self.drop(places)
        self.history = (*self.history, *(Entry("removed", date) for _ in places))

    def drop(self, places: list[int]) -> None:
        """Forgets the classes at these places; those after them move up."""
        learner = self._taught()
        learner.drop(places, self.method.class_buffers)
        self.heldout.drop(places)
        ends = np.cumsum(self.sizes)
        stage_of = [int(np.searchsorted(ends, place, side="right")) for place in places]
        self.sizes = tuple(size - stage_of.count(stage) for stage, size in enumerate(self.sizes))
        self.classes = tuple(known for place, known in enumerate(self.classes) if place not in places)

    def measure(self, calibrate: bool = False) -> None:
        """Notes the held-out accuracy of every class.

        calibrate: also finds the temperatures by these images; with few of them, and where none does, there are none.
        """
        if calibrate:
            self.temperatures = {}
        samples = self.heldout.samples()
        answers = {} if samples is None or not self.classes else self._answers(samples)
        found: dict[str, dict[int, float]] = {}
        for by, shares in answers.items():
            assert samples is not None
            found[by] = _accuracy(shares, samples)
            temperature = fit_temperature(shares, samples.labels.numpy()) if calibrate else None
            if temperature is not None:
                self.temperatures[by] = temperature
        self.classes = tuple(
            replace(known, accuracy={by: values[label] for by, values in found.items() if label in values})
            for label, known in enumerate(self.classes)
        )

    def describe(self) -> dict[str, Any]:
        """What there is to know of the model beside its weights and images, as plain data (labels as they are)."""
        memory = None if self.learner is None else self.learner.memory
        return {
            "config": self.config.to_plain(),
            "predictors": list(self.predictors),
            "classes": [
                {
                    "label": known.label,
                    "stage": known.stage,
                    "images": known.images,
                    "exemplars": _held(memory, place),
                    "heldout": _held(self.heldout, place),
                    "accuracy": dict(known.accuracy),
                }
                for place, known in enumerate(self.classes)
            ],
            "stage_sizes": list(self.sizes),
            "temperatures": dict(self.temperatures),
        }

    def _taught(self) -> Learner:
        if self.learner is None:
            raise EngramError("the model has not learned anything yet; let it learn some classes first")
        return self.learner


def _accuracy(shares: np.ndarray, samples: Samples) -> dict[int, float]:
    """Percent of the images of each label that have their largest share there."""
    right = shares.argmax(axis=1) == samples.labels.numpy()
    rows = {label: samples.rows_of(label).numpy() for label in dict.fromkeys(samples.labels.tolist())}
    return {label: 100 * float(right[own].mean()) for label, own in rows.items()}


def _held(memory: Memory | None, label: int) -> int:
    return len(memory.of(label)) if memory is not None and label in memory.labels else 0


def to_samples(images: Tensor, labels: Tensor) -> Samples:
    """Labelled images that are no exemplars."""
    return Samples(images, labels, torch.arange(len(labels)), torch.zeros(len(labels), dtype=torch.bool))
