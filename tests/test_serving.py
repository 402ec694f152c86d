"""A model in a service: several threads ask it at once, also while it learns, and none harms it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_config, make_store
from engram import IncrementalClassifier
from engram.modeldir import Model
from engram.session import Session
from model_helpers import NAMES, make, opened, pictures, same


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four classes; not to be changed."""
    return make(tmp_path_factory.mktemp("served") / "m", NAMES[:4])


def state(model: Model) -> dict[str, Tensor]:
    """A copy of all that the model holds."""
    assert model.learner is not None
    return {name: value.clone() for name, value in model.learner.state_dict().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


class Overlapping:
    """Two calls whose passes overlap: the second is inside its own from before the first's end until after it."""

    def __init__(self, model: Model) -> None:
        assert model.learner is not None
        self._entered = [threading.Event(), threading.Event()]
        self._first_ended = threading.Event()
        self._calls = 0
        self._hook = model.learner.network.backbone.conv.register_forward_pre_hook(self._inside)

    def _inside(self, *_: object) -> None:
        self._calls += 1
        if self._calls == 1:
            self._entered[0].set()
            assert self._entered[1].wait(20)
        else:
            self._entered[1].set()
            assert self._first_ended.wait(20)

    def run(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(call)
            first.add_done_callback(lambda _: self._first_ended.set())
            assert self._entered[0].wait(20)
            second = pool.submit(call)
            found = first.result(), second.result()
        self._hook.remove()
        return found


@pytest.mark.parametrize("images", [True, False])
def test_a_pass_inside_another_changes_neither_it_nor_the_model(served: Path, images: bool) -> None:
    model, asked = opened(served, images=images), pictures(NAMES[:4], 3, seed=5)[0]
    before, alone = state(model), opened(served).probabilities(asked)
    for found in Overlapping(model).run(lambda: model.probabilities(asked)):
        assert np.array_equal(found, alone)
    assert equal(state(model), before)
    assert np.array_equal(model.probabilities(asked), alone)


def test_many_threads_get_what_one_gets(served: Path, tmp_path: Path) -> None:
    classifier, images = IncrementalClassifier.load(served, device="cpu"), pictures(NAMES[:4], 4, seed=5)[0]
    before = state(classifier.model_)
    alone = [classifier.predict_proba(images[row : row + 1]) for row in range(len(images))]

    def ask(turn: int) -> bool:
        torch.set_num_threads(1)  # a thread's own: sums depend on it
        row = turn % len(images)
        return np.array_equal(classifier.predict_proba(images[row : row + 1]), alone[row])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(300)))
    assert equal(state(classifier.model_), before)
    classifier.save(tmp_path / "again")
    assert same(opened(tmp_path / "again"), opened(served))


def test_the_engine_reads_without_a_trace_too() -> None:
    session = Session(make_config(), make_store())
    network, images = session.learner.network, session.stage(0).pool.images
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert not network.training
    session.engine.infer(network, images)
    assert equal(dict(network.state_dict()), before)
    with network.in_training(), pytest.raises(AssertionError, match="in training"):
        session.engine.infer(network, images)
    assert not network.training


@pytest.mark.parametrize("method", ["afc", "der", "bic", "mas"])
def test_who_asks_while_it_learns_gets_one_model_or_the_other(method: str) -> None:
    classifier = IncrementalClassifier(method, epochs=2, memory=3, backbone="resnet10", device="cpu")
    classifier.fit(*pictures(NAMES[:3]))
    images = pictures(NAMES[:4], 1, seed=5)[0]
    before, held = classifier.predict_proba(images), state(classifier.model_)
    model, found = classifier.model_, []
    ended = threading.Event()

    def ask() -> None:
        torch.set_num_threads(1)
        while not ended.is_set():
            found.append(classifier.predict_proba(images))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        try:
            classifier.partial_fit(*pictures(NAMES[3:5]))
        finally:
            ended.set()
        for thread in asked:
            thread.result()
    after = classifier.predict_proba(images)
    assert found
    assert all(np.array_equal(shares, before if shares.shape == before.shape else after) for shares in found)
    assert equal(state(model), held)
    alone = IncrementalClassifier(method, epochs=2, memory=3, backbone="resnet10", device="cpu")
    alone.fit(*pictures(NAMES[:3])).partial_fit(*pictures(NAMES[3:5]))
    assert equal(state(classifier.model_), state(alone.model_))


def test_labels_are_those_of_the_model_that_was_asked(served: Path) -> None:
    classifier, images = IncrementalClassifier.load(served, device="cpu"), pictures(NAMES[:4], 2, seed=5)[0]
    alone, other = classifier.predict(images), copy.deepcopy(classifier).remove("apple")
    learner = classifier.model_.learner
    assert learner is not None
    # Another thread's change comes in the midst of the pass.
    hook = learner.network.register_forward_hook(lambda *_: classifier._adopt(other.model_))
    assert classifier.predict(images).tolist() == alone.tolist()
    hook.remove()
    assert "apple" not in classifier.predict(images)
