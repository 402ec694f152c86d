"""Model: a learner that knows its classes by their labels, with its history and its measured accuracy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.contract import Method
from engram.contract.learner import Learner
from engram.contract.predictors import ImageOutputs, need_means, predicted_scores
from engram.core.errors import EngramError, nearest, option, suggest
from engram.data.memory import Memory, MemoryConfig
from engram.data.stage import Samples
from engram.data.store import some
from engram.engine import Engine
from engram.experiment.learner_config import Device, Precision, resolve_device
from engram.experiment.networks import check_network, make_backbone, make_network
from engram.methods import find_method
from engram.models.calibration import fit_temperature
from engram.models.digests import digests_in, join_digests
from engram.models.doubt import FEWEST, MOST_CLASSES, Doubt, DoubtByMeans, DoubtByScores
from engram.models.heldout_features import kept_features
from engram.models.history import KnownClass, LessonRecord, current_time
from engram.models.model_config import ModelConfig
from engram.nn.backbone import Backbone
from engram.nn.network import Output

# NME's logits are the cosine similarities to the class means, multiplied by this.
NME_SHARPNESS = 10.0


class Model:
    """State of a classifier between two lessons.

    learner: None before the first lesson.
    sizes: number of new classes of each stage since the network was created.
    heldout: images that measure the accuracy, by label. A method that keeps statistics learns them after that: the head
        that predicts has learned all images, and the one that was measured only the others. Then their features are
        kept with them (`heldout_features.py`).
    learned_heldout: digests of the held-out images that the head has learned; empty if it has learned none.
    temperatures: divisor of the logits by predictor, for calibrated confidence; 1 if a predictor has none.
    doubts: what tells strangers from known images, by predictor; empty with too few held-out images.
    device, precision: as requested, possibly "auto".
    reads_only: opened without its images, so it can only predict.
    """

    def __init__(self, config: ModelConfig, device: Device = "auto", precision: Precision = "auto") -> None:
        self.config = config
        self.device: Device = device
        self.precision: Precision = precision
        used_device, used_precision = resolve_device(device, precision)
        self.engine = Engine(torch.device(used_device), used_precision, config.augmentation, config.image_size)
        self.method: Method = find_method(config.method).make(config.settings)
        self.learner: Learner | None = None
        self.classes: tuple[KnownClass, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.history: tuple[LessonRecord, ...] = ()
        self.heldout = Memory(MemoryConfig("all", 0))
        self.learned_heldout = b""
        self.temperatures: dict[str, float] = {}
        self.doubts: dict[str, Doubt] = {}
        self.reads_only = False

    @property
    def labels(self) -> list[Hashable]:
        """Labels of the classes, in the order of the scores."""
        return [known.label for known in self.classes]

    @property
    def predictors(self) -> tuple[str, ...]:
        """Predictors that can be used now, the method's default first."""
        has_means = self.learner is not None and self.learner.class_means is not None
        without = () if has_means else need_means(self.method.predictors)
        return tuple(name for name in self.method.predictors if name not in without)

    def position(self, label: Hashable) -> int:
        """Return the index of a class; refuse an unknown label."""
        if label not in self.labels:
            hint = suggest(str(label), [str(known) for known in self.labels]) if len(self.classes) <= 1000 else ""
            raise EngramError(f"the model knows no class {label!r}: {hint}")
        return self.labels.index(label)

    def make_learner(
        self, mean: tuple[float, ...], std: tuple[float, ...], capacity: int, start: bool = False
    ) -> Learner:
        """Create an untrained learner for images with this mean and standard deviation. start: as for `make_network`"""
        network, teacher = (
            make_network(self.config, self.method, capacity, mean, std, start).to(self.engine.device) for _ in range(2)
        )
        return Learner(network, teacher, Memory(self.config.memory), self.config.seed, self.method.uses_teacher)

    def check_network(self) -> None:
        """Refuse a network that cannot be trained, before the first lesson."""
        check_network(self.config, self.method, self._trained().network, self.config.image_size)

    def make_backbone(self) -> Backbone:
        """Create an untrained backbone, as the method needs it."""
        return make_backbone(self.config, self.method)

    def reset_head(self) -> None:
        """Create a new learner that keeps only the backbone's weights, for a model whose classes were all removed."""
        trained = self._trained().network.backbone.state_dict()
        self.learner = self.make_learner(*self.normalisation, capacity=1)
        backbone = self.learner.network.backbone
        backbone.load_state_dict({name: trained[name] for name in backbone.state_dict()})
        self.sizes = ()

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel in the images of the first lesson."""
        network = self._trained().network
        return tuple(network.mean.flatten().tolist()), tuple(network.std.flatten().tolist())

    def copy(self) -> Model:
        """Return an independent copy, to learn with; it can be discarded if learning fails."""
        self.refuse_change()
        other = Model(self.config, self.device, self.precision)
        other.classes, other.sizes, other.history = self.classes, self.sizes, self.history
        other.heldout.load_state_dict(self.heldout.state_dict())
        other.learned_heldout = self.learned_heldout
        other.temperatures, other.doubts = dict(self.temperatures), dict(self.doubts)
        if self.learner is not None:
            mean, std = self.normalisation
            other.learner = self.make_learner(mean, std, self.learner.network.head.capacity)
            state = {name: value.detach().clone() for name, value in self.learner.state_dict().items()}
            other.learner.load_state_dict(state)
        return other

    def measurable(self) -> Model:
        """Return this model with a head that has not learned the held-out images; a copy if this one has."""
        if not self.learned_heldout:
            return self
        other = self.copy()
        other.method.solve(other._trained())
        other.learned_heldout = b""
        return other

    def refuse_change(self) -> None:
        """Refuse to change or save a model that was opened without its images: they would be lost."""
        if self.reads_only:
            raise EngramError(
                f"the model was opened for prediction only ({option('images', False)}); "
                "open it with its images to change it"
            )

    def probabilities(self, images: np.ndarray | Tensor, by: str | None = None) -> np.ndarray:
        """Return class probabilities (N, K) for uint8 images (N, H, W, 3).

        With enough held-out images the confidence is calibrated: its mean over them is their accuracy less
        `Method.confidence_margin`.

        by: "cnn" (the head), "nme" (the class means) or another predictor of the method; None is its default.
        """
        return refuse_not_finite(self.reader(by)(images).cpu().numpy())

    def reader(self, by: str | None = None) -> Callable[[np.ndarray | Tensor], Tensor]:
        """Return a function from images to probabilities on the device, which may still be computing them.

        The model must not learn while it is in use.
        """
        read = self.logit_reader(by)
        return lambda images: read(images).softmax(dim=1)

    def logit_reader(self, by: str | None = None) -> Callable[[np.ndarray | Tensor], Tensor]:
        """Return a function from images to the logits of the probabilities, on the device."""
        read = self.score_reader(by)
        return lambda images: read(images)[0]

    def score_reader(self, by: str | None = None) -> Callable[[np.ndarray | Tensor], tuple[Tensor, ImageOutputs]]:
        """Return a function from images to the logits (N, K) of the probabilities and the outputs they come from."""
        learner, by = self._trained(), self.predictor(by)
        if not self.classes:
            raise EngramError("the model knows no class; let it learn some")
        read = self.engine.inference(learner.network)

        def scores(images: np.ndarray | Tensor) -> tuple[Tensor, ImageOutputs]:
            if isinstance(images, np.ndarray):
                images = torch.from_numpy(np.require(images, requirements=["C", "W"]))
            outputs = ImageOutputs(read.outputs(images))
            return self._logits(by, outputs), outputs

        return scores

    def _logits(self, by: str, outputs: ImageOutputs) -> Tensor:
        """Return the logits of the probabilities of a predictor, for these outputs of the network."""
        learner = self._trained()
        logits = predicted_scores(by, learner, outputs)
        if by == "cnn":
            scale = learner.network.head.scale
            logits = logits * (1.0 if scale is None else scale.detach())
        elif by == "nme":
            logits = NME_SHARPNESS * logits
        return logits.double() / self.temperatures.get(by, 1.0)

    def doubt_of(self, by: str | None = None) -> Doubt:
        """Return what tells strangers from known images; refuse if too few images are held out."""
        found = self.doubts.get(self.predictor(by))
        if found is None:
            way = "teach it more images" if self.config.validation else "make a new one that holds out a share"
            raise EngramError(
                f"this model cannot tell unknown images: that needs at least {FEWEST} held-out images, some of every "
                f"class, and 2 to {MOST_CLASSES} classes; {way}"
            )
        return found

    def is_unknown(self, images: np.ndarray | Tensor, rate: float = 0.05, by: str | None = None) -> np.ndarray:
        """Return for each image whether it is probably of no known class.

        rate: share of images of known classes that are called unknown by mistake, measured on held-out images.
        """
        doubt, read = self.doubt_of(by), self.score_reader(by)
        threshold = doubt.threshold(rate)
        return (doubt.familiarity_of(*read(images)) < threshold).cpu().numpy()

    def predictor(self, by: str | None) -> str:
        """Return the predictor of that name, or the default for None; refuse one that the model does not have."""
        if by is None:
            return self.predictors[0]
        if by not in self.predictors:
            have = " and ".join(self.predictors)
            more, near = "", nearest(by, self.predictors)
            if by in self.method.predictors:
                more = f"; {by} needs exemplars of every class"
            elif near:
                more = f"; {option('by')}: did you mean {near[0]!r}?"
            raise EngramError(f"this model ({self.config.method}) predicts by {have}, not by {by!r}{more}")
        return by

    def accuracy_on(self, samples: Samples) -> dict[str, dict[int, float]]:
        """Return the accuracy in percent, by predictor and label."""
        return {by: _accuracy(self.probabilities(samples.pixels, by), samples) for by in self.predictors}

    def refuse_not_finite(self, images: Tensor) -> None:
        """Refuse weights and class means that are not finite, and such scores of these images (which may be none)."""
        state = {**self._trained().network.state_dict(), "class_means": self._trained().class_means}
        wrong = [name for name, value in state.items() if value is not None and not value.isfinite().all()]
        try:
            for by in self.predictors if len(images) else ():
                self.probabilities(images, by)
        except EngramError:
            wrong.append("the scores")
        if wrong:
            raise EngramError(
                f"training diverged: {some(wrong, 1)} are not finite; the model did not change; "
                "try a lower learning rate"
            )

    def remove(self, labels: Iterable[Hashable]) -> None:
        """Remove classes with their exemplars and held-out images. The scores of the other classes do not change.

        With a method that keeps statistics they are as if these classes had never been learned. If one of the labels is
        unknown, nothing is removed. The backbone keeps what it learned from their images.
        """
        positions = [self.position(label) for label in dict.fromkeys(labels)]
        self.drop(positions)
        self.history = (*self.history, *(LessonRecord("removed", current_time()) for _ in positions))
        self.measure(calibrate=self.method.keeps_statistics)  # then the scores are others

    def merge(self, label: Hashable, into: Hashable) -> None:
        """Make the images of a class images of another, as if they had been learned so. This needs statistics."""
        position, target = self.position(label), self.position(into)
        if position == target:
            raise EngramError(f"{str(into)!r} is the same class; give two classes")
        if not self.method.keeps_statistics:
            raise EngramError(
                f"{self.config.method} cannot merge classes that it has learned to tell apart; remove both, and learn "
                "their images again in one folder"
            )
        one, other = self.classes[position], self.classes[target]
        if both := len(digests_in(one.digests) & digests_in(other.digests)):
            raise EngramError(
                f"{both} images were learned as {str(label)!r} and as {str(into)!r}, and would count twice; remove "
                f"{str(label)!r}, and learn its other images as more of {str(into)!r}"
            )
        learner = self._trained()
        self.method.merge(learner, position, target)
        for memory in (learner.memory, self.heldout):
            if position in memory.labels:
                memory.move(position, torch.arange(len(memory.of(position))), target)
        images, digests = one.images + other.images, b"".join(sorted(digests_in(one.digests + other.digests)))
        self.replace_class(target, images=images, digests=digests)
        self.drop([position])
        self.history = (*self.history, LessonRecord("merged", current_time()))
        self.measure(calibrate=True)

    def replace_class(self, position: int, **changes: Any) -> None:
        """Change fields of a class."""
        changed = replace(self.classes[position], **changes)
        self.classes = (*self.classes[:position], changed, *self.classes[position + 1 :])

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees of images (N, H, W, 3), averaged over the views, for a method's statistics."""
        return ImageOutputs(self.engine.inference(self._trained().network).outputs(images)).features

    def drop(self, positions: list[int]) -> None:
        """Drop the classes at these positions; later classes move up."""
        class_state = [name for name, kept in self.method.image_state.items() if kept.per_class]
        self._trained().drop(positions, self.method.class_buffers, class_state)
        if self.method.keeps_statistics:
            self.method.remove(self._trained(), positions)
            self.learned_heldout = b""
        self.heldout.drop(positions)
        ends = np.cumsum(self.sizes)
        stage_of = [int(np.searchsorted(ends, position, side="right")) for position in positions]
        self.sizes = tuple(size - stage_of.count(stage) for stage, size in enumerate(self.sizes))
        self.classes = tuple(known for position, known in enumerate(self.classes) if position not in positions)

    def measure(self, calibrate: bool = False) -> None:
        """Measure the accuracy of every class on its held-out images.

        If the method keeps statistics, the head is then set to the one that has learned these images too.

        calibrate: also fit the temperatures on these images.
        """
        if calibrate:
            self.temperatures = {}
        learner, samples = self._trained(), self.heldout.samples()
        if self.learned_heldout:
            self.method.solve(learner)
            self.learned_heldout = b""
        if samples is None or not self.classes:
            self.doubts = {}
            self.classes = tuple(replace(known, accuracy={}) for known in self.classes)
            return
        found: dict[str, dict[int, float]] = {}
        logits: dict[str, Tensor] = {}
        outputs = self._outputs_of_heldout(samples)
        for by in self.predictors:
            logits[by] = self._logits(by, outputs).cpu()
            probabilities = refuse_not_finite(logits[by].softmax(dim=1).numpy())
            found[by] = _accuracy(probabilities, samples)
            margin = self.method.confidence_margin
            temperature = fit_temperature(probabilities, samples.labels.numpy(), margin) if calibrate else None
            if temperature is not None:
                self.temperatures[by] = temperature
                logits[by] /= self.temperatures[by]
        self.doubts = self._fit_doubts(logits, outputs, samples.labels)
        self.classes = tuple(
            replace(known, accuracy={by: values[label] for by, values in found.items() if label in values})
            for label, known in enumerate(self.classes)
        )
        if self.method.keeps_statistics:
            self.method.solve(learner, outputs.features, samples.labels)
            self.learned_heldout = join_digests(samples.pixels.numpy())

    @torch.no_grad()
    def _outputs_of_heldout(self, samples: Samples) -> ImageOutputs:
        """Return the network's outputs for the held-out images. A frozen network computes their features only once."""
        network = self._trained().network
        if not self.method.keeps_statistics or self.predictors != ("cnn",):  # others may need the embedding
            return ImageOutputs(self.engine.inference(network).outputs(samples.images))
        features = kept_features(self.heldout, samples, self.features).to(self.engine.device)
        return ImageOutputs([Output((), features, *network.score(features), features)])

    def _fit_doubts(self, logits: dict[str, Tensor], outputs: ImageOutputs, labels: Tensor) -> dict[str, Doubt]:
        """Estimate by predictor what known images look like. logits, outputs, labels: of the held-out images."""
        learner = self._trained()
        before = self.method.class_centres(learner)
        if before is not None:
            means = self.method.class_centres(learner, outputs.features, labels)
            assert means is not None
            fitted = {by: DoubtByMeans.fit(own, outputs.features.cpu(), before, means) for by, own in logits.items()}
            return {by: doubt for by, doubt in fitted.items() if doubt is not None}
        memory = learner.memory
        lacking = [place for place in range(len(self.classes)) if place not in self.heldout.labels]
        others = {place: memory.of(place).pixels for place in lacking if place in memory.labels}
        found: dict[str, Doubt] = {}
        for by, own in logits.items():
            read = self.logit_reader(by)
            doubt = DoubtByScores.fit(own, labels, {place: read(images) for place, images in others.items()})
            if doubt is not None:
                found[by] = doubt
        return found

    def _trained(self) -> Learner:
        if self.learner is None:
            raise EngramError("the model has not learned anything yet; let it learn some classes first")
        return self.learner


def refuse_not_finite(probabilities: np.ndarray) -> np.ndarray:
    """Return the probabilities; refuse those that are not finite."""
    if not np.isfinite(probabilities).all():
        raise EngramError(
            "the model's scores are not finite: its training diverged, or its weights are damaged; undo its last "
            "lesson, or restore it from a copy"
        )
    return probabilities


def _accuracy(probabilities: np.ndarray, samples: Samples) -> dict[int, float]:
    """Return the accuracy in percent on the images of each label."""
    right = probabilities.argmax(axis=1) == samples.labels.numpy()
    rows = {label: samples.rows_of(label).numpy() for label in dict.fromkeys(samples.labels.tolist())}
    return {label: 100 * float(right[own].mean()) for label, own in rows.items()}
