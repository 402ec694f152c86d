"""A run as a model: every method predicts what the run measured, is exported, and can be taught more classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engram import EngramError, ImageStore, RunResult, learn_into, model_from_run, open_model, run, train
from engram.cli.main import main
from engram.core.events import Learned
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.models.model import Model
from engram.models.onnx_export import export_onnx
from helpers import tiny_config, toy_store, varied_methods
from test_methods_contract import SETTINGS

Runs = Callable[[str], tuple[Path, RunResult]]


@pytest.fixture(scope="module")
def store() -> ImageStore:
    return toy_store(num_classes=4, per_class=8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: ImageStore) -> Runs:
    """Make a tiny run of a method once: its directory and its result."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def made(method: str) -> tuple[Path, RunResult]:
        config = tiny_config(method, epochs=1, order="seed:3").with_settings(**SETTINGS.get(method, {}))
        return root / method, train(config, store, root / method)

    return made


@pytest.mark.parametrize("method", varied_methods())
def test_a_run_of_every_method_predicts_as_measured_is_exported_and_learns_more(
    method: str, runs: Runs, exported: set[tuple[Any, ...]], store: ImageStore, tmp_path: Path
) -> None:
    directory, result = runs(method)
    model = model_from_run(directory, "cpu")
    wanted = [store.class_names[int(label)] for label in store.test.class_ids]
    assert set(model.predictors) == set(result.predictors)
    for by in model.predictors:
        best = model.probabilities(store.test.images, by).argmax(axis=1)
        right = np.mean([model.labels[place] == name for place, name in zip(best, wanted, strict=True)])
        assert 100 * right == pytest.approx(result.final[by])
        if structure(model, by) not in exported:
            exported.add(structure(model, by))
            assert export_onnx(model, tmp_path / "x.onnx", by).difference < 1e-4
    new = np.random.default_rng(1).integers(0, 40, (8, 8, 8, 3), dtype=np.uint8)
    events = list(learn_into(tmp_path / "model", new, ["new"] * 8, start=directory, epochs=epochs(model), device="cpu"))
    learned = events[-1]
    assert isinstance(learned, Learned)
    assert learned.num_classes == 5
    again, _ = open_model(tmp_path / "model", "cpu")
    assert again.labels == [*model.labels, "new"]
    assert again.config.method == method
    assert len(again.history) == 3
    assert np.isfinite(again.probabilities(store.test.images[:4])).all()


def epochs(model: Any) -> int | None:
    """One epoch, for a method that trains something."""
    from engram.contract.settings import MAIN_ROLES, with_role

    return 1 if with_role(model.config.settings, *MAIN_ROLES) else None


@pytest.fixture(scope="module")
def exported() -> set[tuple[Any, ...]]:
    """The structures of networks that were exported so far: methods that share one share what is exported."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return set()


def structure(model: Model, by: str) -> tuple[Any, ...]:
    """What the graph of an exported network depends on: its predictor, its modules and what the head does to scores.

    The nearest mean depends on the embedding alone.
    """
    assert model.learner is not None
    network = model.learner.network
    if by == "nme":
        return by, *((name, type(module).__name__) for name, module in network.backbone.named_modules())
    modules = [(name, type(module).__name__) for name, module in network.named_modules()]
    return by, type(network.head).__name__, repr(network.head), *modules


def test_commands_take_a_run(
    runs: Runs, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    directory = str(runs("replay")[0])
    monkeypatch.chdir(tmp_path)
    for number, (pixels, label) in enumerate(zip(store.test.images, store.test.class_ids, strict=True)):
        folder = tmp_path / "test" / store.class_names[int(label)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    assert main(["predict", directory, "test", "--json", "--quiet", "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    right = np.mean([line["class"] == Path(line["path"]).parent.name for line in lines])
    assert 100 * right == pytest.approx(runs("replay")[1].final["cnn"])
    assert main(["evaluate", directory, "test", "--json", "--device", "cpu"]) == 0
    assert main(["export", directory, "run.onnx"]) == 0
    assert (tmp_path / "run.onnx").stat().st_size > 1000
    for number in range(6):
        (tmp_path / "more" / "zebra").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 30 * number, np.uint8)).save(tmp_path / "more" / "zebra" / f"{number}.png")
    capsys.readouterr()
    lesson = ["learn", "model", "more", "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main([*lesson, "--from", directory, "--memory", "none"]) == 2
    assert "has the settings of the run; leave --memory out" in capsys.readouterr().err
    assert main([*lesson, "--from", directory]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "5 classes known" in said.out
    assert f"a new model of the run in {directory}: 4 classes, replay" in said.err
    assert main([*lesson, "--from", directory]) == 2
    assert "there is a model at model already; leave --from out" in capsys.readouterr().err
    assert main([*lesson, "--from", "nowhere"]) == 2


def test_what_cannot_become_a_model_is_refused(store: ImageStore, tmp_path: Path) -> None:
    for _ in run(tiny_config("naive"), store, tmp_path / "half", stop=lambda: True):
        pass
    with pytest.raises(EngramError, match="was stopped inside a stage, so its network is half trained; 'engram resume"):
        model_from_run(tmp_path / "half")
    reservoir = tiny_config("er-ace", epochs=1, memory=MemoryConfig("total", 6, "reservoir")).with_settings(replay=4)
    train(reservoir, store, tmp_path / "reservoir")
    with pytest.raises(EngramError, match=r"cannot become a model: a reservoir is for runs"):
        model_from_run(tmp_path / "reservoir")
    cropped = tiny_config("naive", epochs=1, augmentation=Augmentation(pad=0, view=0.8))
    train(cropped, toy_store(num_classes=4, per_class=4, size=10), tmp_path / "cropped")
    with pytest.raises(EngramError, match="cannot become a model: a model sees its images whole"):
        model_from_run(tmp_path / "cropped")


def test_a_run_that_was_stopped_after_a_stage_has_the_classes_it_has_seen(store: ImageStore, tmp_path: Path) -> None:
    for _ in run(tiny_config("naive", epochs=1), store, tmp_path / "run", stop_after_stage=0):
        pass
    assert len(model_from_run(tmp_path / "run").classes) == 2
