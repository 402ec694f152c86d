"""Data sets in memory: the format that every reader returns and the rest of the package reads.

Legend: N images, H height, W width.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.core.errors import EngramError, option, suggest
from engram.core.memory_limits import check_memory
from engram.data.arrays import as_images, as_labels, read_dataset
from engram.data.decode.image import Images
from engram.data.photographs import Photographs

ClassIds = npt.NDArray[np.int64]
RGB = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class DataSplit:
    """Images (N, H, W, 3) in uint8 and their class ids (N,) in int64."""

    images: Images
    class_ids: ClassIds

    def __post_init__(self) -> None:
        for name, dtype in (("images", np.uint8), ("class_ids", np.int64)):
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype != dtype:
                kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise EngramError(
                    f"the {name} of a split must be a NumPy array of {np.dtype(dtype)}, not {kind}; "
                    "ImageStore.from_arrays can convert other types"
                )
        if self.images.ndim != 4 or self.images.shape[3] != 3 or 0 in self.images.shape[1:]:
            raise EngramError(
                f"images must have the shape (N, height, width, 3), not {self.images.shape}; "
                "ImageStore.from_arrays can convert grey images"
            )
        if self.class_ids.shape != (len(self.images),):
            raise EngramError(
                f"{len(self.images)} images need {len(self.images)} class ids in one dimension, "
                f"but class_ids has the shape {self.class_ids.shape}"
            )

    def __len__(self) -> int:
        return len(self.class_ids)

    def take(self, positions: npt.NDArray[np.int64]) -> DataSplit:
        """Return a copy of the images at these positions."""
        return DataSplit(self.images[positions], self.class_ids[positions])


@dataclass(frozen=True, eq=False)
class ImageStore:
    """A data set: training and test images, and the names of the classes.

    mean, std: published normalisation per channel, for pixels scaled to 0..1, or None.
    skipped: unreadable files that the reader left out.
    origin: kind of data set, as in `DataConfig.name`.
    held_out: share of the training images that replaces the test split, or None.
    known_fingerprint: fingerprint computed before, so that images on disk need not be read again.
    photographs: original files of the training images, if the reader was asked for them.
    """

    name: str
    train: DataSplit
    test: DataSplit
    class_names: tuple[str, ...]
    mean: RGB | None = None
    std: RGB | None = None
    skipped: tuple[str, ...] = ()
    origin: str = "arrays"
    held_out: float | None = None
    known_fingerprint: str | None = None
    photographs: Photographs | None = None

    def __repr__(self) -> str:
        height, width = self.image_size
        images = f"{len(self.train)} training and {len(self.test)} test images of {width}x{height} pixels"
        return f"ImageStore({self.name!r}: {self.num_classes} classes, {images})"

    def __post_init__(self) -> None:
        _check_names(self.name, self.class_names)
        _check_normalisation(self.mean, self.std)
        for what, split in (("training", self.train), ("test", self.test)):
            if not len(split):
                raise EngramError(f"the data set {self.name!r} has no {what} image; add some")
            low, high = int(split.class_ids.min()), int(split.class_ids.max())
            if low < 0 or high >= self.num_classes:
                raise EngramError(
                    f"class id {low if low < 0 else high} of a {what} image is out of range: "
                    f"{self.num_classes} class names allow 0 to {self.num_classes - 1}"
                )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            (height, width), (other_height, other_width) = self.image_size, self.test.images.shape[1:3]
            raise EngramError(
                f"training images are {height}x{width} pixels and test images {other_height}x{other_width}; "
                "resize one of them"
            )
        _check_classes(self)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of every image, in pixels."""
        return int(self.train.images.shape[1]), int(self.train.images.shape[2])

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the class names, class ids and pixels of both splits."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr(self.class_names).encode())
        for split in (self.train, self.test):
            digest.update(repr(split.images.shape).encode())
            digest.update(np.ascontiguousarray(split.class_ids, dtype="<i8").data)
            digest.update(np.ascontiguousarray(split.images).data)
        return digest.hexdigest()

    def holdout(self, fraction: float, seed: int) -> ImageStore:
        """Return a store of the training images only, in which a share of each class replaces the test split.

        Use it to choose settings without looking at the test images.
        """
        advice = f"give a smaller {option('image_size')}"
        check_memory(self.train.images.nbytes, "copies of the training images, to hold out a share of them,", advice)
        kept, held = stratified_split(self.train.class_ids, self.class_names, fraction, seed)
        return replace(
            self,
            name=f"{self.name}:holdout{fraction:g}",
            train=self.train.take(kept),
            test=self.train.take(held),
            held_out=float(fraction),
            known_fingerprint=None,
            photographs=None if self.photographs is None else self.photographs.take(kept),
        )

    @classmethod
    def from_arrays(
        cls,
        x_train: Any,
        y_train: Any,
        x_test: Any = None,
        y_test: Any = None,
        *,
        class_names: Sequence[str] | None = None,
        name: str = "arrays",
        test_fraction: float = 0.2,
        seed: int = 0,
    ) -> ImageStore:
        """Make a store from copies of images and their labels (whole numbers or strings).

        x_train, x_test: images (N, H, W), (N, H, W, 1) or (N, H, W, 3), uint8 or floats from 0 to 1; or a list of
            Pillow images of one size.
        y_train, y_test: labels (N,). With `class_names`, a number is a position in them and a string is one of them.
        class_names: by default, the labels in `y_train` in sorted order.
        test_fraction: share of each class that becomes the test split if there is no `x_test`.
        """
        if (x_test is None) != (y_test is None):
            given, missing = ("x_test", "y_test") if y_test is None else ("y_test", "x_test")
            raise EngramError(f"{given} was given without {missing}; give both, or neither to hold out a share")
        images, labels = _as_pair(x_train, y_train, "train")
        names = _class_names(labels, class_names)
        train = DataSplit(images, _class_ids(labels, "y_train", names, named=class_names is not None))
        if x_test is None:
            kept, held = stratified_split(train.class_ids, names, test_fraction, seed)
            return cls(name, train.take(kept), train.take(held), names)
        images, labels = _as_pair(x_test, y_test, "test")
        test = DataSplit(images, _class_ids(labels, "y_test", names, named=class_names is not None))
        return cls(name, train, test, names)

    @classmethod
    def from_dataset(cls, train: Any, test: Any = None, **options: Any) -> ImageStore:
        """Make a store from data sets like torch's, with a length and items (image, label), or of Hugging Face.

        An image is a Pillow image, an array, or a tensor with its channels first or last. All have one size.
        options: as for `from_arrays`.
        """
        tested = (None, None) if test is None else read_dataset(test, "test")
        return cls.from_arrays(*read_dataset(train, "train"), *tested, **options)


def stratified_split(
    class_ids: ClassIds, class_names: Sequence[str], fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split positions into two sorted arrays, kept and held out.

    Of each class, `fraction` of the images is held out, but at least one and never all of them. The draw for a class
    depends only on the seed, its name and its number of images: neither on the other classes nor on the version of a
    random number library.
    """
    if not 0 < fraction < 1:
        raise EngramError(f"the share of images to hold out must be between 0 and 1, not {fraction:g}; try 0.2")
    by_class = np.argsort(class_ids, kind="stable")
    groups = np.split(by_class, np.cumsum(np.bincount(class_ids, minlength=len(class_names)))[:-1])
    kept: list[npt.NDArray[np.int64]] = []
    held: list[npt.NDArray[np.int64]] = []
    for name, group in zip(class_names, groups, strict=True):
        if len(group) == 1:
            raise EngramError(
                f"class {name!r} has only one image, so none can be held out as a test image; "
                "add images of it or give a test split"
            )
        if not len(group):
            continue  # ImageStore reports classes without images
        count = min(max(math.floor(len(group) * fraction + 0.5), 1), len(group) - 1)
        shuffled = group[stable_permutation(len(group), f"{seed}/{name}")]
        held.append(shuffled[:count])
        kept.append(shuffled[count:])
    if not held:
        raise EngramError("there is no image to hold out as a test image; give at least two images of each class")
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))


def pixel_statistics(images: Images, rows: npt.NDArray[np.int64] | None = None) -> tuple[RGB, RGB]:
    """Return mean and standard deviation of each channel over images (N, H, W, 3), or some rows, scaled to 0..1."""
    rows = np.arange(len(images)) if rows is None else rows
    # Counts of each pixel value, in chunks: this is exact and needs no copy of all images.
    counts = np.zeros((3, 256), dtype=np.int64)
    for part in np.array_split(rows, -(-len(rows) // 1024)):
        pixels = images[part]
        for channel in range(3):
            counts[channel] += np.bincount(pixels[..., channel].ravel(), minlength=256)
    values, weights = np.arange(256) / 255, counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    std = np.maximum(
        np.sqrt(np.maximum(weights @ values**2 - mean**2, 0)), 1e-3
    )  # rounding can give a variance below 0
    (red, green, blue), spread = mean.tolist(), std.tolist()
    return (red, green, blue), (spread[0], spread[1], spread[2])


def stable_permutation(n: int, key: str) -> npt.NDArray[np.int64]:
    """Return a permutation of 0 to n - 1 that depends only on the key.

    It is derived from a hash, because the streams of NumPy's generators may change between releases: the test images
    of a folder and the class order of a seed must stay the same after an upgrade.
    """
    ranks = np.frombuffer(hashlib.shake_128(key.encode("utf-8", "surrogatepass")).digest(8 * n), dtype="<u8")
    return np.argsort(ranks, kind="stable").astype(np.int64, copy=False)


def some(names: Iterable[str], limit: int = 5) -> str:
    """Return the first few names in quotes, and the number of the others."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - limit} more" if len(quoted) > limit else ""
    return ", ".join(quoted[:limit]) + more


def _check_names(name: str, class_names: tuple[str, ...]) -> None:
    if not isinstance(class_names, tuple) or not all(isinstance(item, str) for item in class_names):
        raise EngramError(f"the class names must be a tuple of strings, not {class_names!r:.80}")
    if len(class_names) < 2:
        raise EngramError(
            f"the data set {name!r} has {len(class_names)} class{'' if class_names else 'es'}; "
            "learning classes one after another needs at least 2"
        )
    repeated = [item for item, count in Counter(class_names).items() if count > 1]
    if repeated:
        raise EngramError(f"class names must differ, but {some(repeated)} occurs more than once")
    for item in class_names:
        if not item.strip():
            raise EngramError(f"class {class_names.index(item)} has the empty name {item!r}; give it a name")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise EngramError(f"the class name {item!r} is not valid Unicode; rename the class") from None


def _check_normalisation(mean: RGB | None, std: RGB | None) -> None:
    if mean is None and std is None:
        return
    if mean is None or std is None:
        raise EngramError("give both mean and std of the pixels, or neither")
    if len(mean) != 3 or len(std) != 3 or not np.isfinite([*mean, *std]).all() or min(std) <= 0:
        raise EngramError(
            f"mean {mean} and std {std} must each be three finite numbers, for red, green and blue, and std positive"
        )


def _check_classes(store: ImageStore) -> None:
    trained = np.bincount(store.train.class_ids, minlength=store.num_classes) > 0
    tested = np.bincount(store.test.class_ids, minlength=store.num_classes) > 0
    for wrong, sentence in (
        (tested & ~trained, "test images but no training image; add some or remove it from the test split"),
        (~trained, "no training image; add some or remove the class"),
        # A stage may have only this class; then its accuracy would be undefined.
        (~tested, "no test image, so its accuracy could not be measured; add some or remove the class"),
    ):
        if wrong.any():
            names = [store.class_names[i] for i in np.flatnonzero(wrong)]
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise EngramError(f"class {names[0]!r}{others} has {sentence}")


def _as_pair(x: Any, y: Any, which: str) -> tuple[Images, npt.NDArray[Any]]:
    """Return images and labels as arrays of the same length."""
    images, labels = as_images(x, f"x_{which}"), as_labels(y, f"y_{which}")
    if len(images) != len(labels):
        raise EngramError(f"x_{which} has {len(images)} images and y_{which} has {len(labels)} labels; give one each")
    return images, labels


def _class_names(labels: npt.NDArray[Any], given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return tuple(str(label) for label in np.unique(labels))
    if isinstance(given, str):
        raise EngramError(f"class_names must be a list of names, not the string {given!r}")
    names = tuple(given)
    _check_names("arrays", names)
    return names


def _class_ids(labels: npt.NDArray[Any], what: str, names: tuple[str, ...], *, named: bool) -> ClassIds:
    """Return the class ids (N,) of labels: their positions in the names."""
    if named and labels.dtype.kind != "U":
        outside = (labels < 0) | (labels >= len(names))
        if outside.any():
            raise EngramError(
                f"label {labels[outside][0]} of {what} is out of range: {len(names)} class names "
                f"allow 0 to {len(names) - 1}"
            )
        return labels.astype(np.int64)
    unique, inverse = np.unique(labels, return_inverse=True)
    ids = {name: class_id for class_id, name in enumerate(names)}
    for label in map(str, unique):
        if label not in ids:
            where = "among the class names" if named else "in y_train"
            hint = suggest(label, names) if len(names) <= 20 else "check its spelling"
            raise EngramError(f"class {label!r} of {what} is not {where}; {hint}")
    return np.array([ids[label] for label in map(str, unique)], dtype=np.int64)[inverse]
