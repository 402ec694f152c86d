"""Labels of any hashable type: as Python values, as JSON, as NumPy arrays."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from engram.core.errors import EngramError

DEPTH = 8  # of nested tuples
_LARGEST = 2**63


def plain_labels(values: Any, what: str = "y") -> list[Hashable]:
    """Return labels as Python values, converted from NumPy or torch. what: name of the argument, for messages."""
    if not isinstance(values, Iterable) and hasattr(values, "__array__"):
        values = np.asarray(values)
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise EngramError(f"{what} must be a list or an array with one label for each image, got {values!r:.60}")
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise EngramError(f"{what} has the shape {tuple(shape)}, but labels are one for each image: (N,)")
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "mM":
        raise EngramError(f"{what} holds {dtype.name}, which is not a label; convert it to text with astype(str)")
    items: Any = getattr(values, "tolist", lambda: list(values))()
    return [_plain(item, what) for item in items]


def _plain(item: Any, what: str) -> Hashable:
    if isinstance(item, (np.datetime64, np.timedelta64)):
        raise EngramError(f"{what} holds {item!r}, which is not a label; convert it to text with str")
    if isinstance(item, (np.generic, np.ndarray)) or type(item).__module__ == "torch":
        item = item.tolist()
    if isinstance(item, float) and not math.isfinite(item):
        raise EngramError(
            f"{what} holds {'NaN' if item != item else 'inf'}, which is not a label; leave such images out"
        )
    try:
        hash(item)
        is_nan = bool(item != item)  # of another type, such as Decimal
    except TypeError:
        raise EngramError(f"{what} holds {item!r:.60}, a {type(item).__name__}; a label must be hashable") from None
    if is_nan:
        raise EngramError(f"{what} holds {item!r:.60}, which is not a label; leave such images out")
    return tuple(_plain(part, what) for part in item) if type(item) is tuple else item


def encode_label(label: Hashable, depth: int = 0) -> Any:
    """Return a label as JSON; a tuple becomes a list."""
    if label is None or type(label) is bool or (type(label) is str and _is_text(label)):
        return label
    if type(label) is str:
        raise EngramError(f"the label {label!r:.60} cannot be saved: it is not valid Unicode; give it another name")
    if type(label) is int and -_LARGEST <= label < _LARGEST:
        return label
    if type(label) is float and abs(label) != float("inf"):
        return label
    if type(label) is tuple and depth < DEPTH:
        return [encode_label(item, depth + 1) for item in label]
    raise EngramError(
        f"the label {label!r:.60} ({type(label).__name__}) cannot be saved; "
        "labels in files are strings, numbers, booleans, None, or tuples of them"
    )


def decode_label(data: Any, depth: int = 0) -> Hashable:
    """Return the label that JSON describes."""
    if isinstance(data, list) and depth < DEPTH:
        return tuple(decode_label(item, depth + 1) for item in data)
    if isinstance(data, (bool, int, float)) or data is None or (isinstance(data, str) and _is_text(data)):
        return data
    raise EngramError(f"{data!r:.60} is not a label")


def _is_text(text: str) -> bool:
    """Return whether the text can be encoded; a file name in an unknown encoding cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def labels_by_name(labels: Iterable[Hashable]) -> dict[str, Hashable]:
    """Return the labels by the name of their folder. Of 7 and "7", which share a name, it is the text."""
    return {str(label): label for label in sorted(labels, key=lambda label: isinstance(label, str))}


def label_array(labels: Sequence[Hashable]) -> np.ndarray:
    """Return labels as an array (K,) of strings, integers, floats or booleans; of objects if their types differ."""
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        array = np.array(labels)
        if array.dtype.kind in "UifbO" and array.tolist() == list(
            labels
        ):  # false for a string that ends with a null character
            return array
    array = np.empty(len(labels), dtype=object)
    for i, label in enumerate(labels):
        array[i] = label
    return array


def group_similar(labels: Iterable[Hashable]) -> list[list[Hashable]]:
    """Return groups of similar labels.

    They differ only in type (1 and "1"), case, surrounding spaces or the encoding of accents.
    """
    groups: dict[str, list[Hashable]] = {}
    for label in dict.fromkeys(labels):
        groups.setdefault(unicodedata.normalize("NFKC", str(label)).casefold().strip(), []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def similar_label_warnings(labels: Iterable[Hashable], known: Iterable[Hashable]) -> list[str]:
    """Return a warning for each group of similar labels that contains one of the labels to learn."""
    new = set(labels)
    groups = [group for group in group_similar([*known, *labels]) if not new.isdisjoint(group)]
    return [
        f"{' and '.join(map(ascii, group))} are different classes; if they should be one, give them one name"
        for group in groups
    ]


def in_order(labels: Iterable[Hashable]) -> list[Hashable]:
    """Return each label once: sorted, or in the given order if they cannot be compared."""
    unique = list(dict.fromkeys(labels))
    try:
        return sorted(unique)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return unique
