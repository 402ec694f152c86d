"""Fixtures shared by all tests: tiny problems that train in a moment."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from engram import ImageStore, MemoryConfig, RunConfig, Training
from engram.cli.main import main
from engram.contract.predictors import PREDICTORS
from engram.contract.settings import OPTIMISERS, SCHEDULES
from engram.core.plugins import load_plugins
from engram.data.augment import Augmentation
from engram.data.memory import SELECTIONS
from engram.data.policies import POLICIES
from engram.data.sources.load import DataConfig
from engram.methods import find_method
from engram.models import learning
from engram.nn.backbones import BACKBONES
from helpers import Engram, Outcome

# The problems here are too small for a second thread to pay, and one thread gives the same sums on every machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # nor in the processes that tests start
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which looks then and at each launch
HOMES = itertools.count()
# Each takes most of a minute or more: begun last, it would leave the other core idle.
FIRST = ("test_old_classes_are_kept_where_naive_training_forgets_them", "test_scikit_learns_checks_pass")
load_plugins()  # of ENGRAM_METHODS, for the contract's tests of a method from outside the package


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests."""
    items.sort(key=lambda item: not item.name.startswith(FIRST))


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of every later garbage collection: it stays to the end."""
    gc.collect()
    gc.freeze()


def make_store(num_classes: int = 6, train: int = 14, test: int = 6, size: int = 8, seed: int = 0) -> ImageStore:
    """Random images with a colour and a corner per class, so that there is something to learn."""
    rng = np.random.default_rng(seed)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(num_classes), count)
        images = rng.integers(0, 90, (len(labels), size, size, 3))
        for image, label in zip(images, labels, strict=True):
            corner = (label % 2) * size // 2
            image[corner : corner + size // 2, :, label % 3] += 120
            image[:, corner : corner + size // 2, (label + 1) % 3] += 40 * (label // 3)
        return images.clip(0, 255).astype(np.uint8), labels

    x_train, y_train = split(train)
    x_test, y_test = split(test)
    names = [f"class {chr(ord('a') + i)}" for i in range(num_classes)]
    return ImageStore.from_arrays(x_train, y_train, x_test, y_test, class_names=names)


def make_config(method: str = "afc", **changes: object) -> RunConfig:
    """A run of that method in miniature: 2 base classes, then stages of 2, 2 epochs of batches of 8."""
    budget = find_method(method).memory
    memory = MemoryConfig(size=3) if budget == "needed" else MemoryConfig("all" if budget == "all" else "none", 0)
    config = RunConfig(
        method=method,
        settings=find_method(method).settings(),
        data=DataConfig("arrays"),
        base=2,
        increment=2,
        memory=memory,
        backbone="resnet10",
        augmentation=Augmentation(pad=1),
        device="cpu",
    )
    settings = {
        "proxies": 3,
        "train": Training(epochs=2, batch_size=8, lr=0.05, remainder="keep"),
        "finetune": Training(epochs=1, batch_size=8, lr=0.02, schedule="constant"),
    }
    known = {field.name for field in fields(config.settings)}
    config = config.with_settings(**{name: value for name, value in settings.items() if name in known})
    for path, value in changes.items():
        config = config.with_value(path.replace("__", "."), value)
    return config


@pytest.fixture(autouse=True)
def no_width_of_another_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed does not depend on where the tests run; processes side by side have a width of their own."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def private_data_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own data and cache, nor brings in methods of the user's."""
    home = tmp_path_factory.getbasetemp() / f"home-of-test-{next(HOMES)}"  # mktemp would look through all of them
    home.mkdir()
    monkeypatch.setenv("ENGRAM_DATA", str(home))
    monkeypatch.delenv("ENGRAM_METHODS", raising=False)
    monkeypatch.delenv("ENGRAM_WEIGHTS", raising=False)


@pytest.fixture
def engram(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engram:
    """Runs a command in this process, in an empty directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGRAM_DATA", str(tmp_path / "no data here"))

    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return call


@pytest.fixture(autouse=True)
def no_starting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """New models are trained from scratch, whatever weights this machine has; test_lda.py tests what is chosen."""
    monkeypatch.setattr(learning, "starting_point", lambda *_: ({}, ""))


@pytest.fixture
def clean_registries() -> Iterator[None]:
    """What a test registers is gone after it."""
    registries = (OPTIMISERS, SCHEDULES, SELECTIONS, PREDICTORS, POLICIES, BACKBONES)
    before = [registry.names() for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.names()) - set(names):
            registry.remove(name)


@pytest.fixture
def store() -> ImageStore:
    return make_store()


@pytest.fixture
def config() -> RunConfig:
    return make_config()
