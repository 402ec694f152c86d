"""Images and labels given in Python: arrays, tensors, lists, Pillow images, data sets of torch and of Hugging Face.

Legend: N images, H height, W width. Neither torch nor datasets is imported: their objects are known by their methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.core.errors import EngramError
from engram.data.decode.image import Images, to_upright_rgb, why_unreadable


def as_array(value: Any, what: str) -> npt.NDArray[Any]:
    """Return an array, a tensor, a list of these or of Pillow images as one array. what: name of the argument."""
    if is_dataset(value):
        advice = "give it to ImageStore.from_dataset, or to fit and partial_fit without y"
        raise EngramError(f"{what} is a data set ({type(value).__name__}), not one array; {advice}")
    try:
        if isinstance(value, (list, tuple)) or is_column(value):
            value = [_pixels_of(item) for item in value]
        return np.asarray(_pixels_of(value))
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths, for example
        shapes = {getattr(item, "shape", None) for item in value} if isinstance(value, list) else set()
        reason = "the images differ in size" if len(shapes - {None}) > 1 else (str(error).splitlines() or [""])[0]
        raise EngramError(f"{what} could not be read as one array ({reason.rstrip('.')}); give one array") from None


def _pixels_of(item: Any) -> Any:
    """Return a Pillow image or a tensor as an array; other values unchanged."""
    if isinstance(item, Image.Image):
        try:
            return np.asarray(to_upright_rgb(item))
        except Exception as error:  # Pillow may read the file only now, and each decoder has its own error types
            name = getattr(item, "filename", "") or "a picture"
            raise EngramError(f"{name} cannot be read ({why_unreadable(error)}); repair it or leave it out") from None
    if _is_tensor(item):
        item = item.detach().cpu().resolve_conj().resolve_neg()
        return (item.float() if str(item.dtype) == "torch.bfloat16" else item).numpy()
    return item


def _is_tensor(item: Any) -> bool:
    return hasattr(item, "resolve_neg") and hasattr(item, "detach")


def as_images(value: Any, what: str) -> Images:
    """Copy images (N, H, W), (N, H, W, 1) or (N, H, W, 3), uint8 or floats from 0 to 1, to uint8 (N, H, W, 3)."""
    images = as_array(value, what)
    shape, kind = images.shape, images.dtype.kind
    if kind == "c":
        raise EngramError(f"Complex data not supported: {what} holds complex numbers, and images are uint8 or floats")
    if 0 in shape:
        raise EngramError(f"{what} has the shape {shape} and holds no image; give at least one")
    if kind == "f" and not np.isfinite(images).all():
        raise EngramError(f"{what} holds NaN or inf; images are uint8, or floats from 0 to 1")
    if images.ndim not in (3, 4):
        advice = "but images are (N, height, width) or (N, height, width, 3). Reshape your data"
        raise EngramError(f"{what} has the shape {shape}, {advice}")
    if kind == "f":
        low, high = images.min(), images.max()
        if low < 0 or high > 1:
            raise EngramError(f"{what} holds floats from {low:g} to {high:g}; images are uint8, or floats from 0 to 1")
        images = np.rint(images * 255).astype(np.uint8)
    if images.dtype != np.uint8:
        raise EngramError(
            f"{what} holds {images.dtype} values, but images are uint8 from 0 to 255 or floats from 0 to 1; "
            "if the values are between 0 and 255, x.astype('uint8') converts them"
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] not in (1, 3):
        if shape[1] in (1, 3):
            problem = f"its channels first {shape}; move them last with x.transpose(0, 2, 3, 1) (permute for a tensor)"
        elif shape[3] == 4:
            problem = f"four channels {shape}; drop the alpha channel with x[..., :3]"
        else:
            problem = f"{shape[3]} channels {shape}; images have 3 (colour) or 1 (grey) as last axis"
        raise EngramError(f"{what} has {problem}")
    # A copy, so that later changes to the caller's array do not reach it.
    return np.array(np.broadcast_to(images, (*images.shape[:3], 3)), order="C")


def is_dataset(given: Any) -> bool:
    """Return whether this has a length and items, like torch's map-style data sets, and is not an array or a list.

    A data set of Hugging Face is one too.
    """
    if _has_columns(given):
        return True
    if isinstance(given, (list, tuple, str, bytes, bytearray, Mapping, Set)):
        return False
    if hasattr(given, "__array__") or hasattr(given, "shape") or hasattr(given, "read") or is_column(given):
        return False
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def is_column(given: Any) -> bool:
    """Return whether this is one column of a data set of Hugging Face, which reads its values when they are needed."""
    return isinstance(given, Sequence) and hasattr(given, "column_name")


def refuse_without_labels(given: Any, what: str) -> None:
    """Refuse what is not one data set of images and labels, and say how to get it."""
    kind = type(given).__name__
    if isinstance(given, Mapping):
        name = next((key for key in given if key == "train"), next(iter(given), "train"))
        raise EngramError(f"{what} is a {kind}; give one data set of it, such as {what}[{name!r}]")
    if hasattr(given, "dataset") and hasattr(given, "batch_size"):
        raise EngramError(f"{what} is a {kind}, which shuffles and batches; give its data set, {what}.dataset")
    if not hasattr(given, "__len__") and hasattr(given, "__iter__"):
        raise EngramError(f"{what} is a {kind}, which can only be iterated; give a data set with a length and items")


def read_dataset(dataset: Any, what: str, rows: Sequence[int] | None = None) -> tuple[Images, list[Any]]:
    """Read the items (image, label) of a data set, or some rows: images of one size (N, H, W, 3), and the labels.

    An image is a Pillow image, an array as in `as_images`, or a tensor, which may have its channels first. A data set
    of Hugging Face has an image and a label column; labels that have names become these names.
    """
    item_of = _column_items(dataset, what) if _has_columns(dataset) else dataset.__getitem__
    images: list[Images] = []
    labels: list[Any] = []
    for row in range(len(dataset)) if rows is None else rows:
        item, place = item_of(row), f"{what}[{row}]"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            kind = type(item).__name__
            raise EngramError(
                f"{place} is of type {kind}; the items of a data set must be pairs of an image and a label"
            )
        image = item[0]
        if _is_tensor(image) and image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
            image = image.permute(1, 2, 0)
        images.append(as_images([image], place)[0])
        labels.append(item[1].item() if hasattr(item[1], "item") else item[1])
        if images[-1].shape != images[0].shape:
            (height, width, _), (first_height, first_width, _) = images[-1].shape, images[0].shape
            raise EngramError(
                f"the images of {what} differ in size: one has {first_width}x{first_height} pixels and {place} "
                f"{width}x{height}; resize them to one size, for example in the data set's transform"
            )
    if not images:
        raise EngramError(f"{what} holds 0 sample(s); give at least one image")
    return np.stack(images), labels


def _has_columns(given: Any) -> bool:
    """Return whether this is a data set of Hugging Face: rows by number, each with the columns that it lists."""
    names, features = getattr(given, "column_names", None), getattr(given, "features", None)
    return isinstance(names, list) and isinstance(features, Mapping) and hasattr(given, "__getitem__")


def _column_items(dataset: Any, what: str) -> Callable[[int], tuple[Any, Any]]:
    """Return a function from a row of a data set of Hugging Face to its image and its label."""
    image = _column(dataset, what, "image", "Image", ("image", "img"))
    label = _column(dataset, what, "label", "ClassLabel", ("label", "labels"))
    names = getattr(dataset.features[label], "names", None)

    def item(row: int) -> tuple[Any, Any]:
        found = dataset[row]
        value = found[label]
        value = value.item() if hasattr(value, "item") else value  # of a data set in the format of torch or NumPy
        if isinstance(names, list) and isinstance(value, int):
            if not 0 <= value < len(names):
                raise EngramError(f"{what}[{row}] has the label {value}, which has no name; leave the row out")
            value = names[value]
        return found[image], value

    return item


def _column(dataset: Any, what: str, role: str, kind: str, usual: Sequence[str]) -> str:
    """Return the column of images or labels: the only one of its kind, or else the one that has a usual name."""
    names = list(dataset.column_names)
    of_kind = [name for name in names if type(dataset.features[name]).__name__ == kind]
    named = [name for name in usual if name in names]
    if not named and len(of_kind) == 1:
        return of_kind[0]
    if not named:
        several = f"{', '.join(of_kind)} may be meant" if of_kind else f"its columns are {', '.join(names)}"
        raise EngramError(f"{what} has no column {usual[0]!r}: {several}; rename the {role} column with rename_column")
    return named[0]


def as_labels(value: Any, what: str) -> npt.NDArray[Any]:
    """Return labels as an array (N,) of strings, integers or booleans."""
    labels = as_array(value, what)
    if labels.ndim != 1:
        raise EngramError(f"{what} has the shape {labels.shape}, but there must be one label per image: (N,)")
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels):
        labels = labels.astype(str)
    if labels.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            fractional = ~(np.isfinite(labels) & (labels == np.round(labels)) & (np.abs(labels) < 2**53))
        if fractional.any():
            raise EngramError(f"{what} holds {labels[fractional][0]:g}; labels are whole numbers or strings")
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iubU":
        raise EngramError(f"{what} holds {labels.dtype} values; labels are whole numbers or strings")
    return labels
