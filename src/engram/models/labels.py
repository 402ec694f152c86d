"""Labels of any hashable kind: as a model compares them, as JSON has them, as NumPy has them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from engram.core.errors import EngramError

DEPTH = 8  # of tuples in tuples
_LARGEST = 2**63


def plain_labels(values: Any, what: str = "y") -> list[Hashable]:
    """The labels as Python values; NumPy's and torch's numbers and strings become Python's."""
    if not isinstance(values, Iterable) and hasattr(values, "__array__"):
        values = np.asarray(values)
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise EngramError(f"{what} must be a list or an array with one label for each image, got {values!r:.60}")
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise EngramError(f"{what} has the shape {tuple(shape)}, but labels are one for each image: (N,)")
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "mM":
        raise EngramError(f"{what} holds {dtype.name}, which is no label; make text of it with astype(str)")
    items: Any = getattr(values, "tolist", lambda: list(values))()
    return [_plain(item, what) for item in items]


def _plain(item: Any, what: str) -> Hashable:
    if isinstance(item, (np.datetime64, np.timedelta64)):
        raise EngramError(f"{what} holds {item!r}, which is no label; make text of it with str")
    if isinstance(item, (np.generic, np.ndarray)) or type(item).__module__ == "torch":
        item = item.tolist()
    if isinstance(item, float) and not math.isfinite(item):
        raise EngramError(f"{what} holds {'NaN' if item != item else 'inf'}, which is no label; leave such images out")
    try:
        hash(item)
    except TypeError:
        raise EngramError(f"{what} holds {item!r:.60}, a {type(item).__name__}; a label must be hashable") from None
    return tuple(_plain(part, what) for part in item) if type(item) is tuple else item


def encode_label(label: Hashable, depth: int = 0) -> Any:
    """The label as JSON has it: text, numbers, true, false and null as they are, a tuple as a list."""
    if label is None or type(label) is bool or (type(label) is str and _is_text(label)):
        return label
    if type(label) is str:
        raise EngramError(f"the label {label!r:.60} cannot be saved: it is no text in Unicode; give it another name")
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
    """The label that JSON describes."""
    if isinstance(data, list) and depth < DEPTH:
        return tuple(decode_label(item, depth + 1) for item in data)
    if isinstance(data, (bool, int, float)) or data is None or (isinstance(data, str) and _is_text(data)):
        return data
    raise EngramError(f"{data!r:.60} is no label")


def _is_text(text: str) -> bool:
    """Whether it can be written anywhere; a file name of another encoding, say, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def label_array(labels: Sequence[Hashable]) -> np.ndarray:
    """The labels (K,) as an array: of strings, integers, floats or booleans where all are of one kind, else objects."""
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        array = np.array(labels)
        if array.dtype.kind in "UifbO" and array.tolist() == list(labels):  # not a string that ends in a null
            return array
    array = np.empty(len(labels), dtype=object)
    for i, label in enumerate(labels):
        array[i] = label
    return array


def alike(labels: Iterable[Hashable]) -> list[list[Hashable]]:
    """Those of the labels that people write alike, together.

    They differ by kind (1 and "1"), case, spaces around them or the encoding of their accents alone.
    """
    groups: dict[str, list[Hashable]] = {}
    for label in dict.fromkeys(labels):
        groups.setdefault(unicodedata.normalize("NFKC", str(label)).casefold().strip(), []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def doubts(labels: Iterable[Hashable], known: Iterable[Hashable]) -> list[str]:
    """A sentence for each group of classes that are written alike, where one of them is among the labels to learn."""
    new = set(labels)
    groups = [group for group in alike([*known, *labels]) if not new.isdisjoint(group)]
    return [
        f"{' and '.join(map(ascii, group))} are different classes; if they should be one, give them one name"
        for group in groups
    ]


def in_order(labels: Iterable[Hashable]) -> list[Hashable]:
    """Each label once: sorted where they can be compared, else in the order they come in."""
    unique = list(dict.fromkeys(labels))
    try:
        return sorted(unique)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return unique
