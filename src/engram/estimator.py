"""IncrementalClassifier: an image classifier with the API of scikit-learn that can learn new classes at any time."""

from __future__ import annotations

import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from engram.contract import Settings
from engram.core.errors import EngramError, suggest
from engram.core.events import Event
from engram.core.memory_limits import return_memory
from engram.data.arrays import is_dataset, read_dataset, refuse_without_labels
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.store import Images
from engram.experiment.learner_config import Device, Precision, take_weights
from engram.models.edit import save_model
from engram.models.inputs import read_batches, read_images
from engram.models.labels import label_array, plain_labels, similar_label_warnings
from engram.models.lesson import CheckpointPolicy, Lesson, LessonOptions
from engram.models.model import Model, refuse_not_finite
from engram.models.model_config import DEFAULT_METHOD, ModelConfig, as_size, shortest_argument
from engram.models.store.codec import open_model
from engram.models.store.generations import Pointer
from engram.nn.pretrained import PretrainedWeights

Follow = Callable[[Event], None]

# Lock of each classifier. Not an attribute of it, because attributes are copied and pickled.
_LOCKS: WeakKeyDictionary[IncrementalClassifier, threading.RLock] = WeakKeyDictionary()
_GUARD = threading.Lock()


class IncrementalClassifier:
    """A classifier of images that keeps learning new classes.

    The constructor only stores its arguments. Attributes after fit: classes_ (in order of arrival), n_classes_, model_.

    Parameters
    ----------
    method: name of a method (`engram list methods`).
    memory: exemplars to keep per class, text ("total=2000", "all", "none") or a MemoryConfig. A number has no effect
        on methods that are defined with no memory or with all images.
    epochs: of each lesson; None chooses by its number of images, unless the settings contain epochs.
    backbone, image_size: None chooses by the first images, or by the weights.
    weights: pretrained weights to start from, by name (`engram list weights`) or file.
    settings: of the method, or some of them by dotted path: {"train.lr": 0.05}.
    augmentation: None crops, mirrors and brightens at random; use `Augmentation(flip=False)` if left and right differ.
    validation: fraction of each class's images held out to measure accuracy, now and after later lessons.
    """

    def __init__(
        self,
        method: str = DEFAULT_METHOD,
        *,
        memory: MemoryConfig | int | str = 20,
        epochs: int | None = None,
        backbone: str | None = None,
        weights: str | Path | PretrainedWeights | None = None,
        image_size: int | tuple[int, int] | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        augmentation: Augmentation | None = None,
        validation: float = 0.0,
        seed: int = 1,
        device: Device = "auto",
        precision: Precision = "auto",
    ) -> None:
        self.method = method
        self.memory = memory
        self.epochs = epochs
        self.backbone = backbone
        self.weights = weights
        self.image_size = image_size
        self.settings = settings
        self.augmentation = augmentation
        self.validation = validation
        self.seed = seed
        self.device: Device = device
        self.precision: Precision = precision

    def fit(self, X: Any, y: Any = None, *, progress: Follow | None = None) -> IncrementalClassifier:
        """Forget everything and learn the classes of these images; return self.

        Parameters
        ----------
        X: uint8 images (N, H, W, 3), grey (N, H, W), floats from 0 to 1, tensors of these, a list of paths, a list of
            bytes, open files and Pillow images, or a data set like torch's, with a length and items (image, label).
        y: a hashable label for each image; None takes those of a data set.
        progress: called with each event of the training.
        """
        X, labels = _labelled_images(X, y)
        with self._lock():
            return self._learn(None, X, labels, False, progress)

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Any = None,
        *,
        more_of_known: bool = False,
        progress: Follow | None = None,
    ) -> IncrementalClassifier:
        """Learn the classes of these images in addition to the known ones; return self. A failure changes nothing.

        Parameters
        ----------
        classes: for compatibility with scikit-learn; if given, it must contain all labels of y.
        more_of_known: learn known classes again, from these images and their exemplars; they move to the end of
            `classes_`. Without it, images of known classes are refused.
        """
        X, labels = _labelled_images(X, y)
        if classes is not None:
            given = set(plain_labels(classes, "classes"))
            odd = [label for label in labels if label not in given]
            if odd:
                raise EngramError(f"the label {odd[0]!r} of y is not among the classes given")
        with self._lock():
            return self._learn(getattr(self, "model_", None), X, labels, more_of_known, progress)

    def _learn(
        self, model: Model | None, X: Any, labels: list[Hashable], refresh: bool, progress: Follow | None
    ) -> IncrementalClassifier:
        if model is None:
            weights = None if self.weights is None else take_weights(self.weights, self.backbone)
            size = None if self.image_size is None else as_size(self.image_size)
            images = read_images(X, size, None if weights is None else weights.image_size)
            model = Model(self._configure(images, weights), self.device, self.precision)
        else:
            images = read_images(X, model.config.image_size)
        options = LessonOptions("refresh" if refresh else "refuse", self._lesson_epochs(model, len(images)))
        lesson = Lesson(model, images, labels, options)
        for warning in similar_label_warnings(dict.fromkeys(labels), model.labels):
            warnings.warn(warning, UserWarning, stacklevel=3)  # at the caller of fit or partial_fit
        learned = _consume(lesson.take(CheckpointPolicy()), progress)
        assert learned is not None
        return_memory()
        if progress is not None:
            progress(lesson.learned(None))
        self._adopt(learned)
        return self

    def _lesson_epochs(self, model: Model, images: int) -> int | None:
        """Return the epochs of a lesson of that many images; None means those of the model's configuration."""
        if not model.classes:
            return None  # the configuration was made for these images
        if self.epochs is not None:
            return self.epochs
        kept = 0 if model.learner is None else len(model.learner.memory)
        return model.config.lesson_epochs(images + kept, self.device)

    def _configure(self, images: Images, weights: PretrainedWeights | None) -> ModelConfig:
        return ModelConfig.choose(
            self.method,
            image_size=(images.shape[1], images.shape[2]),
            images=len(images),
            epochs=self.epochs,
            memory=self.memory,
            backbone=self.backbone,
            weights=weights,
            settings=self.settings,
            augmentation=self.augmentation,
            seed=self.seed,
            validation=self.validation,
            device=self.device,
        )

    def _adopt(self, model: Model) -> None:
        self.model_ = model
        self.classes_ = label_array(model.labels)
        self.n_classes_ = len(model.classes)

    def predict_proba(self, X: Any, *, by: str | None = None) -> np.ndarray:
        """Return class probabilities (N, K), columns as in `classes_`.

        With 20 or more held-out images the confidence is calibrated: its mean over them is their accuracy.

        by: "cnn" (the head) or "nme" (the nearest mean of exemplars); None is the method's default.
        """
        return _probabilities(self._fitted(), X, by)

    def predict(self, X: Any, *, by: str | None = None) -> np.ndarray:
        """Return the label of each image (N,)."""
        model = self._fitted()  # read once: another thread may replace it
        return label_array(model.labels)[_probabilities(model, X, by).argmax(axis=1)]

    def is_unknown(self, X: Any, rate: float = 0.05, *, by: str | None = None) -> np.ndarray:
        """Return for each image (N,) whether it is probably of no known class. Needs 20 or more held-out images.

        rate: share of images of known classes that are called unknown by mistake, measured on held-out images.
        """
        model = self._fitted()
        return np.concatenate([model.is_unknown(part, rate, by) for part in read_batches(X, model.config.image_size)])

    def score(self, X: Any, y: Any = None, *, by: str | None = None) -> float:
        """Return the accuracy, 0 to 1. X, y: as for `fit`."""
        X, wanted = _labelled_images(X, y)
        found = self.predict(X, by=by).tolist()
        if len(found) != len(wanted):
            raise EngramError(f"{len(found)} images need {len(found)} labels, got {len(wanted)}")
        return float(np.mean([ours == theirs for ours, theirs in zip(found, wanted, strict=True)]))

    def remove(self, label: Hashable, *more: Hashable) -> IncrementalClassifier:
        """Remove one or several classes; the scores of the others do not change. Files change with `save`."""
        with self._lock():
            model = self._fitted().copy()
            model.remove(plain_labels([label, *more]))
            self._adopt(model)
        return self

    def save(self, path: str | Path, *, overwrite: bool = False, undoable: bool = True) -> None:
        """Save the model into a directory, completely or not at all.

        The directory must be new, or the one it was loaded from or saved to, unchanged since. `overwrite` replaces any
        model. undoable: keep what was there for `undo`; False deletes it, for example what was removed.
        """
        with self._lock():
            held = getattr(self, "_place", None)
            expected: Pointer | None = held[1] if held is not None and held[0] == Path(path).resolve() else None
            pointer = save_model(self._fitted(), path, expected=expected, overwrite=overwrite, undoable=undoable)
            self._place = (Path(path).resolve(), pointer)

    @classmethod
    def load(
        cls, path: str | Path, *, device: Device = "auto", precision: Precision = "auto", images: bool = True
    ) -> IncrementalClassifier:
        """Load a classifier from a model directory.

        images: also load the images it keeps. Prediction does not need them; learning and saving do.
        """
        model, pointer = open_model(path, device, precision, images=images)
        kept = ("memory", "backbone", "weights", "image_size", "settings", "augmentation", "validation", "seed")
        stored: dict[str, Any] = {name: getattr(model.config, name) for name in kept}
        loaded = cls(model.config.method, **stored, device=device, precision=precision)
        loaded._adopt(model)
        loaded._place = (Path(path).resolve(), pointer)
        return loaded

    def _lock(self) -> threading.RLock:
        """Return the lock for changing or saving the model: two threads must not change it at the same time."""
        with _GUARD:
            return _LOCKS.setdefault(self, threading.RLock())

    def _fitted(self) -> Model:
        model: Model | None = getattr(self, "model_", None)
        if model is None:
            raise _not_fitted(f"this {type(self).__name__} is not fitted yet; call fit or partial_fit first")
        return model

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    @classmethod
    def _parameters(cls) -> list[str]:
        return sorted(name for name in inspect.signature(cls.__init__).parameters if name != "self")

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name."""
        return {name: getattr(self, name) for name in self._parameters()}

    def set_params(self, **params: Any) -> IncrementalClassifier:
        """Change arguments of the constructor; they take effect with the next fit."""
        valid = self._parameters()
        for name, value in params.items():
            if name not in valid:
                raise EngramError(f"Invalid parameter {name!r} for estimator {self!r}: {suggest(name, valid)}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        params = {
            name: shortest_argument(value, self.method, self.image_size) for name, value in self.get_params().items()
        }
        changed = [f"{name}={value!r}" for name, value in params.items() if repr(value) != repr(defaults[name].default)]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __sklearn_tags__(self) -> Any:
        """Return the tags for scikit-learn, which must be installed for this."""
        sklearn: Any = importlib.import_module("sklearn.utils")
        return sklearn.Tags(
            estimator_type="classifier",
            target_tags=sklearn.TargetTags(required=True),
            classifier_tags=sklearn.ClassifierTags(),
            input_tags=sklearn.InputTags(two_d_array=False, three_d_array=True),
        )


def _labelled_images(X: Any, y: Any) -> tuple[Any, list[Hashable]]:
    """Return images and one label for each; a data set is read once, because its items may be random."""
    if is_dataset(X):
        X, found = read_dataset(X, "X")
        y = found if y is None else y
    if y is None:
        refuse_without_labels(X, "X")
        raise EngramError("requires y to be passed, but the target y is None")
    return X, plain_labels(y)


def _probabilities(model: Model, X: Any, by: str | None) -> np.ndarray:
    read = model.reader(by)
    parts = [read(images).cpu().numpy() for images in read_batches(X, model.config.image_size)]
    return refuse_not_finite(np.concatenate(parts))


def _consume(events: Any, progress: Follow | None) -> Model | None:
    """Run a lesson to its end; return its result."""
    iterator: Iterator[Event] = iter(events)
    while True:
        try:
            event = next(iterator)
        except StopIteration as end:
            return end.value
        if progress is not None:
            progress(event)


def _not_fitted(message: str) -> Exception:
    """Return an error that scikit-learn recognises if it is installed, else an EngramError."""
    try:
        theirs: Any = importlib.import_module("sklearn.exceptions").NotFittedError
    except ImportError:
        return EngramError(message)
    return type("NotFitted", (theirs, EngramError), {})(message)
