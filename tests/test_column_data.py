"""Data sets of Hugging Face, which are recognised by their columns, and data sets given to `learn_into`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from engram import EngramError, ImageStore, IncrementalClassifier, learn_into, open_model
from model_helpers import NAMES, pictures, tiny


class Image:
    """The type of a column of images, by its name."""


class ClassLabel:
    """The type of a column of labels that are numbers with names."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Value:
    """The type of any other column."""


class Columns:
    """What a data set of Hugging Face looks like from outside."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
        self.rows, self.features, self.column_names = rows, features, list(features)
        self.shape = (len(rows), len(features))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def columns(image: str = "image", label: str = "label", **more: Any) -> Columns:
    x, y = pictures(NAMES[:2], 6)
    rows = [
        {image: Pillow.fromarray(pixels), label: NAMES.index(name), **dict.fromkeys(more, 0)}
        for pixels, name in zip(x, y, strict=True)
    ]
    return Columns(rows, {image: Image(), label: ClassLabel(list(NAMES)), **more})


def test_labels_are_named_and_images_are_the_same() -> None:
    x, y = pictures(NAMES[:2], 6)
    store = ImageStore.from_dataset(columns("img", "kind", note=Value()), columns())
    assert store.class_names == ("apple", "boat")
    assert np.array_equal(np.sort(store.train.images, axis=0), np.sort(x, axis=0))
    assert [store.class_names[int(label)] for label in store.train.class_ids] == y


def test_models_learn_them(tmp_path: Path) -> None:
    model = IncrementalClassifier(epochs=1, device="cpu").fit(columns())
    assert list(model.classes_) == ["apple", "boat"]
    in_arrays = columns()
    in_arrays.rows = [{"image": row["image"], "label": np.int64(row["label"])} for row in in_arrays.rows]
    assert ImageStore.from_dataset(in_arrays).class_names == ("apple", "boat")
    assert list(model.predict(columns())) == list(model.predict(pictures(NAMES[:2], 6)[0]))
    for _ in learn_into(tmp_path / "model", columns(), config=tiny("naive", epochs=1), device="cpu"):
        pass
    assert open_model(tmp_path / "model", "cpu")[0].labels == ["apple", "boat"]
    with pytest.raises(EngramError, match="there are no labels; give one for each image, or a data set"):
        list(learn_into(tmp_path / "other", pictures(NAMES[:2], 6)[0]))


class Column(Sequence[Any]):
    """What one column of such a data set looks like."""

    column_name = "image"

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: Any) -> Any:
        return self.values[place]


def test_images_and_labels_are_columns() -> None:
    rows = columns().rows
    x, y = (Column([row[name] for row in rows]) for name in ("image", "label"))
    model = IncrementalClassifier("naive", epochs=1, device="cpu").fit(x, y)
    assert list(model.classes_) == [0, 1]
    assert list(model.predict(x)) == list(model.predict(list(x)))
    assert len(ImageStore.from_arrays(x, y, x, y).train.images) == len(x)


class Batches:
    """What a loader of torch looks like."""

    dataset, batch_size = columns(), 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"test": columns(), "train": columns()}, r"X is a dict; give one data set of it, such as X\['train'\]"),
        (Batches(), r"X is a Batches, which shuffles and batches; give its data set, X\.dataset"),
        (iter(columns().rows), "X is a list_iterator, which can only be iterated; give a data set with a length"),
    ],
)
def test_what_is_not_one_data_set_is_refused(given: Any, message: str) -> None:
    with pytest.raises(EngramError, match=message):
        IncrementalClassifier().fit(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (columns(label="fine", coarse=ClassLabel(["x"])), "no column 'label': fine, coarse may be meant; rename"),
        (Columns([], {"text": Value()}), "no column 'image': its columns are text; rename the image column"),
        (columns(), "has the label -1, which has no name"),
    ],
)
def test_what_cannot_be_read_is_refused(given: Columns, message: str) -> None:
    if "no name" in message:
        given.rows[2]["label"] = -1
    with pytest.raises(EngramError, match=message):
        ImageStore.from_dataset(given)


def test_real_data_sets() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    x, y = pictures(NAMES[:2], 3)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    rows = {"image": [Pillow.fromarray(pixels) for pixels in x], "label": [NAMES.index(name) for name in y]}
    made = datasets.Dataset.from_dict(rows, features=features)
    store = ImageStore.from_dataset(made, made)
    assert store.class_names == ("apple", "boat")
    assert np.array_equal(store.train.images, x)
    model = IncrementalClassifier("naive", epochs=1, device="cpu").fit(made["image"], made["label"])
    assert list(model.predict(made["image"])) == list(model.predict(x))
