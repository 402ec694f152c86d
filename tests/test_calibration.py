"""Confidence that means what it says: fitted to held-out images, kept with the model, and never to change an answer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram import EngramError, IncrementalClassifier, read_mini
from engram.cli.commands.info import card
from engram.core.safe_folder import digest
from engram.models.calibration import COLDEST, FEWEST, HOTTEST, fit_temperature, mean_confidence
from engram.models.edit import remove_class
from engram.models.model import Model
from engram.models.store.codec import open_model, read_manifest
from model_helpers import NAMES, make, opened, tiny


def drawn(right: int, wrong: int, sharpness: float, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Shares of images, so many of which are called right."""
    random = np.random.default_rng(1)
    logits = sharpness * random.normal(size=(right + wrong, classes))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = shares.argmax(axis=1)
    labels[right:] = (labels[right:] + 1) % classes
    return shares, labels


@pytest.mark.parametrize("margin", [0.0, 0.05])
@pytest.mark.parametrize("sharpness", [0.3, 3.0, 15.0], ids=["unsure", "sure", "certain"])
def test_the_mean_confidence_becomes_the_share_that_is_right_less_the_margin(sharpness: float, margin: float) -> None:
    shares, labels = drawn(right=58, wrong=40, sharpness=sharpness)
    temperature = fit_temperature(shares, labels, margin)
    assert temperature is not None
    assert COLDEST <= temperature <= HOTTEST
    assert mean_confidence(np.log(shares), temperature) == pytest.approx(59 / 100 - margin, abs=1e-6)


def test_no_number_of_images_makes_a_model_certain() -> None:
    shares, labels = drawn(right=30, wrong=0, sharpness=9.0)
    temperature = fit_temperature(shares, labels)
    assert temperature is not None
    assert mean_confidence(np.log(shares), temperature) == pytest.approx(31 / 32, abs=1e-6)


def test_shares_that_no_temperature_mends_are_left_as_they_are() -> None:
    alike, labels = np.full((40, 4), 0.25), np.zeros(40, dtype=int)  # as sure of each class, and right every time
    assert fit_temperature(alike, labels) is None
    certain = np.eye(4)[np.zeros(40, dtype=int)]  # shares of exactly 1 and 0, and never right
    assert fit_temperature(certain, labels + 1) is None
    assert fit_temperature(np.ones((40, 1)), labels) is None, "one class alone"


@pytest.fixture(scope="module")
def taught() -> IncrementalClassifier:
    mini = read_mini()
    images, labels = mini.train.images[::4], mini.train.class_ids[::4]
    model = IncrementalClassifier(epochs=4, validation=0.2, seed=1).fit(images[labels < 4], labels[labels < 4])
    new = (labels >= 4) & (labels < 6)
    return model.partial_fit(images[new], labels[new])


def confidence(model: Model, by: str) -> tuple[float, float]:
    """Mean confidence and share of right answers on the held-out images."""
    samples = model.heldout.samples()
    assert samples is not None
    shares = model.probabilities(samples.pixels, by)
    return float(shares.max(axis=1).mean()), float((shares.argmax(axis=1) == samples.labels.numpy()).mean())


@pytest.mark.parametrize("by", ["cnn", "nme"])
def test_a_model_is_as_confident_as_it_is_right(taught: IncrementalClassifier, by: str) -> None:
    model = taught.model_
    sure, right = confidence(model, by)
    assert sure == pytest.approx(right, abs=0.01)
    plain = model.copy()
    plain.temperatures = {}
    assert abs(confidence(plain, by)[0] - right) > 0.03, "or there was nothing to do"
    mini = read_mini()
    of_new = [each.probabilities(mini.test.images[:300], by) for each in (model, plain)]
    assert np.array_equal(of_new[0].argmax(axis=1), of_new[1].argmax(axis=1))


def test_the_temperatures_are_saved_and_stay_when_a_class_goes(taught: IncrementalClassifier, tmp_path: Path) -> None:
    images = read_mini().test.images[:20]
    taught.save(tmp_path / "model")
    again = IncrementalClassifier.load(tmp_path / "model")
    assert np.array_equal(again.predict_proba(images), taught.predict_proba(images))
    before = read_manifest(tmp_path / "model")["temperatures"]
    assert before == taught.model_.temperatures
    assert before.keys() == {"cnn", "nme"}
    assert card(read_manifest(tmp_path / "model"))["confidence"] == "cnn and nme calibrated on held-out images"
    remove_class(tmp_path / "model", 0)
    assert read_manifest(tmp_path / "model")["temperatures"] == before, "the other classes' scores stay what they are"
    remove_class(tmp_path / "model", 1, 2, 3, 4)
    assert card(read_manifest(tmp_path / "model"))["confidence"].endswith(
        "on held-out images, most of them removed since"
    )


def test_the_temperatures_stay_when_the_estimator_forgets_a_class(taught: IncrementalClassifier) -> None:
    assert taught.model_.temperatures
    assert copy.deepcopy(taught).remove(0).model_.temperatures == taught.model_.temperatures


def test_the_least_number_of_images_is_enough() -> None:
    shares, labels = drawn(right=FEWEST - 8, wrong=8, sharpness=3.0)
    assert fit_temperature(shares, labels) is not None
    assert fit_temperature(shares[1:], labels[1:]) is None


def test_few_held_out_images_change_nothing(tmp_path: Path) -> None:
    few = make(tmp_path / "few", NAMES[:3])  # two of eight held out of each
    assert 0 < sum(known["heldout"] for known in read_manifest(few)["classes"]) < FEWEST
    assert opened(few).temperatures == {}
    none = make(tmp_path / "none", NAMES[:3], config=tiny())
    assert opened(none).temperatures == {}


@pytest.mark.parametrize("value", [{"cnn": 0}, {"cnn": "1"}, {"cnn": True}, {"cnn": 1e9}, [1.0]])
def test_damaged_temperatures_are_refused(tmp_path: Path, value: Any) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    manifest = next((path / "generations").glob("*/model.json"))
    said = json.loads(manifest.read_text(encoding="utf-8"))
    assert said["temperatures"] == {}
    said["temperatures"] = value
    manifest.write_text(json.dumps(said), encoding="utf-8")
    current = json.loads((path / "current").read_text(encoding="utf-8")) | {"digest": digest(manifest.read_bytes())}
    del current["checksum"]
    (path / "current").write_text(json.dumps(current), encoding="utf-8")
    for read in (open_model, read_manifest):
        with pytest.raises(EngramError, match=r"is damaged: .*temperature"):
            read(path)
