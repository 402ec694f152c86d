"""Parts from outside the package (optimisers, schedules, predictors ...): used, tracked, and refused if wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engram
from conftest import make_config, make_store
from engram.contract import (
    ImageOutputs,
    Learner,
    Training,
    register,
    register_predictor,
    register_schedule,
    register_selection,
)
from engram.contract.predictors import PREDICTORS
from engram.contract.schedules import learning_rates
from engram.contract.settings import OPTIMISERS, SCHEDULES
from engram.core.errors import EngramError, UnknownNameError
from engram.core.plugins import load_plugins
from engram.data.memory import SELECTIONS, MemoryConfig, select_rows
from engram.data.policies import POLICIES
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods import METHODS
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
from engram.models.onnx_export import export_onnx
from engram.report.page import write_report
from engram.runs.reader import read_manifest, read_result
from helpers import Engram, tiny_config, toy_store
from model_helpers import NAMES, make, opened, pictures, tiny
from test_cli import photos
from test_cli_several import SMALL

__all__ = ["photos"]  # a fixture

ROOT = Path(__file__).parents[1]
PARTS = (
    "optimiser lion",
    "schedule inverse-root",
    "exemplar selection spread",
    "predictor both",
    "augmentation policy grey",
)


def example() -> str:
    """The file that the examples of the page for method authors are together."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), flags=re.DOTALL))


def test_the_example_of_the_page_runs_from_the_command_line(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(example())
    changes = ("optimiser=lion", "schedule=inverse-root", "warmup=0.25", "lr=0.001")
    flags = [text for change in changes for text in ("--set", f"settings.train.{change}")]
    program = (
        "import sys, engram.cli.main as cli\n"
        "codes = [cli.main(['list', 'parts', '--json']), cli.main(sys.argv[1:]), cli.main(['report', 'run'])]\n"
        "sys.exit(max(codes))"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "run",
        "anchored-folder",
        "--data",
        str(photos),
        *SMALL,
        *flags,
        "--augment",
        "grey",
    ]
    environment = {**os.environ, "ENGRAM_METHODS": "own.py", "COLUMNS": "200", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--out", "run", "--quiet"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    listed = {(row["part"], row["name"]): row["file"] for row in json.loads(done.stdout.splitlines()[0])}
    for part in PARTS:
        kind, _, name = part.rpartition(" ")
        assert listed[kind, name] == "own.py"
    assert listed["optimiser", "sgd"] is None
    path = tmp_path / "run"
    manifest = read_manifest(path)
    result = read_result(path, manifest)
    assert result.predictors == manifest.predictors == ("cnn", "both")
    assert manifest.config["memory"]["selection"] == "spread"
    kinds = ("method", "optimiser", "schedule", "exemplar_selection", "predictor", "augmentation_policy")
    assert {manifest.versions[f"{kind}_file"] for kind in kinds} == {"own.py"}
    assert len({manifest.versions[f"{kind}_code"] for kind in kinds}) == 1, "it is one file"
    assert manifest.command is not None
    assert manifest.command.startswith("ENGRAM_METHODS=own.py engram run anchored-folder")
    logged = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    later = [event["terms"].keys() for event in logged if "terms" in event and event["stage"] == 1]
    assert {"classification", "distance", "gradient"} == later[0]
    assert "both" in (path / "report.html").read_text()


# Schedules


Schedule = Callable[[Training, int], Any]


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (lambda training, steps: 0.1, "returned 0.1; it should return a tensor"),
        (lambda training, steps: torch.zeros(3), r"returned a tensor of the shape \(3,\); it should return a tensor"),
        (lambda training, steps: torch.full((training.epochs * steps,), -1.0), "negative or not finite"),
        (lambda training, steps: torch.full((training.epochs * steps,), torch.nan), "negative or not finite"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_before_training(
    schedule: Schedule, wanted: str, clean_registries: None, tmp_path: Path
) -> None:
    register_schedule("own")(schedule)
    with pytest.raises(EngramError, match=wanted):
        learning_rates(Training(schedule="own", epochs=2), 5)
    config = tiny_config("afc").with_settings(finetune__schedule="own")
    with pytest.raises(EngramError, match="the schedule 'own' returned"):
        next(run(config, toy_store(4), tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no schedule 'cosin': did you mean 'cosine'\?"):
        Training(schedule="cosin")
    with pytest.raises(UnknownNameError, match=r"no exemplar selection 'herd': did you mean 'herding'\?"):
        MemoryConfig(selection="herd")
    with pytest.raises(UnknownNameError, match=r"no exemplar selection 'reservoi': did you mean 'reservoir'\?"):
        MemoryConfig("total", 20, "reservoi")
    with pytest.raises(EngramError, match=r"Wrong.predictors of own must be a tuple of some of cnn, nme"):
        register("own", settings=LSCSettings, title="Own")(
            type("Wrong", (LSCMethod,), {"predictors": ("cnn", "nothing")})
        )
    with pytest.raises(EngramError, match="the selection of own must be one of herding, closest"):
        register("own", settings=LSCSettings, title="Own", selection="nothing")(type("Wrong", (LSCMethod,), {}))
    assert "own" not in METHODS


@pytest.mark.parametrize("decorate", [register_schedule, register_selection, register_predictor])
def test_only_functions_with_good_names_are_registered(decorate: Any) -> None:
    with pytest.raises(EngramError, match="it should be a function"):
        decorate("own")(3)
    with pytest.raises(EngramError, match="cannot be called 'My Own'"):
        decorate("My Own")(lambda *given: None)
    for registry, name in ((SCHEDULES, "cosine"), (SELECTIONS, "herding"), (PREDICTORS, "cnn")):
        if decorate.__name__.removeprefix("register_") in registry.kind:
            with pytest.raises(EngramError, match=f"named '{name}' is registered already"):
                decorate(name)(lambda *given: None)


# Selections


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        (lambda embeddings, count, random: [0, 1], r"returned \[0, 1\] for 5 of 24 images"),
        (lambda embeddings, count, random: torch.arange(count).float(), r"returned torch.float32 \(5,\) for 5 of 24"),
        (lambda embeddings, count, random: torch.arange(2), r"returned torch.int64 \(2,\) for 5 of 24 images"),
        (lambda embeddings, count, random: torch.arange(count), r"returned torch.int64 \(8,\) for 8 of 6 images"),
        (lambda embeddings, count, random: torch.zeros(count).long(), "returned a row twice, or one that is not"),
        (
            lambda embeddings, count, random: torch.arange(count) + len(embeddings),
            "returned a row twice, or one that is not between 0 and 23",
        ),
        (
            lambda embeddings, count, random: torch.arange(count) - 1,
            "returned a row twice, or one that is not between 0 and 23",
        ),
        (lambda embeddings, count: None, r"fails to choose 5 of 24 images \(TypeError: "),
    ],
)
def test_a_selection_that_cannot_work_is_refused_before_training(
    selector: Any, wanted: str, clean_registries: None, tmp_path: Path
) -> None:
    register_selection("own")(selector)
    config = tiny_config("replay", memory=MemoryConfig(size=3, selection="own"))
    with pytest.raises(EngramError, match=f"the exemplar selection 'own' {wanted}"):
        next(run(config, toy_store(4), tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_the_name_of_the_reservoir_is_taken() -> None:
    with pytest.raises(EngramError, match="'reservoir' is a selection of another kind"):
        register_selection("reservoir")(lambda embeddings, count, random: torch.arange(count))


def test_rows_are_checked_at_every_use(clean_registries: None) -> None:
    register_selection("own")(lambda embeddings, count, random: torch.zeros(count, dtype=torch.int64))
    with pytest.raises(EngramError, match="returned a row twice"):
        select_rows("own", torch.rand(9, 2), 2, torch.Generator())


def test_the_help_names_every_selection_of_the_package(engram: Engram) -> None:
    told = " ".join(engram("run", "--help").out.split())
    assert all(name in told for name in SELECTIONS.names())
    wrong = engram("run", "replay-mini-b10-s5", "--selection", "herdin")
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    assert "no exemplar selection 'herdin': did you mean 'herding'?" in wrong.err


# Predictors


Predict = Callable[[Learner, ImageOutputs], Any]


def test_a_file_that_cannot_be_imported_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    monkeypatch.setenv("ENGRAM_METHODS", str(file))
    for text, line in (
        ("def f():\n    1 / 0\n\nf()", "line 2, in f"),
        ("\nimport no_such_module", "line 2, in <module>"),
    ):
        file.write_text(text)
        with pytest.raises(EngramError, match=re.escape(f"({file}, {line})")):
            load_plugins()


@pytest.fixture
def predicting(clean_registries: None) -> Iterator[Callable[[Predict], None]]:
    """Registers a predictor "own", and a method "own" that predicts by it and by cnn."""

    def make_method(function: Predict) -> None:
        register_predictor("own")(function)
        cls = type("Own", (LSCMethod,), {"predictors": ("cnn", "own"), "uses_teacher": False})
        register("own", settings=LSCSettings, title="Own")(cls)

    yield make_method
    METHODS.pop("own", None)


def last_seen(learner: Learner, outputs: ImageOutputs) -> Tensor:
    """Always the class that came last."""
    return torch.arange(learner.num_classes).float().expand(len(outputs), -1)


def test_a_run_evaluates_by_it_and_the_report_shows_it(predicting: Callable[[Predict], None], tmp_path: Path) -> None:
    predicting(last_seen)
    config, store = tiny_config("own", epochs=1), toy_store(4)
    list(run(config, store, tmp_path / "run"))
    manifest = read_manifest(tmp_path / "run")
    stages = read_result(tmp_path / "run", manifest).stages
    assert [stage.accuracy["own"] for stage in stages] == [50, 25]
    assert stages[1].accuracy_by_stage["own"] == (0, 50)
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "own" in (tmp_path / "report.html").read_text()


def test_its_name_may_be_the_one_that_recipes_report(predicting: Callable[[Predict], None]) -> None:
    predicting(last_seen)
    assert tiny_config("own", predictor="own").predictor == "own"
    with pytest.raises(EngramError, match="own predicts by cnn, own, not by 'nme'"):
        tiny_config("own", predictor="nme")


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda learner, outputs: None, "returned None for 8 images and 2 classes"),
        (lambda learner, outputs: torch.zeros(8), r"returned a tensor of the shape \(8,\) for 8 images and 2 classes"),
        (
            lambda learner, outputs: torch.zeros(8, 1),
            r"returned a tensor of the shape \(8, 1\) for 8 images and 2 classes; it should return a score",
        ),
        (lambda learner, outputs: torch.full((8, 2), torch.nan), "returned scores that are not numbers"),
    ],
)
def test_scores_that_are_none_are_refused(
    function: Predict, wanted: str, predicting: Callable[[Predict], None]
) -> None:
    predicting(function)
    with pytest.raises(EngramError, match=f"the predictor 'own' {wanted}"):
        list(run(tiny_config("own", epochs=1), toy_store(4)))


def test_a_predictor_by_means_needs_exemplars(clean_registries: None) -> None:
    register_predictor("own-means", needs_means=True)(last_seen)
    cls = type("Own", (LSCMethod,), {"predictors": ("cnn", "own-means")})
    with pytest.raises(EngramError, match="cannot predict by own-means, which needs the means of exemplars"):
        register("own", settings=LSCSettings, title="Own", memory="none")(cls)


def test_a_model_of_own_images_predicts_by_it(predicting: Callable[[Predict], None], tmp_path: Path) -> None:
    predicting(last_seen)
    path = make(tmp_path / "model", NAMES[:2], NAMES[2:3], config=tiny("own", epochs=1))
    model = opened(path)
    assert model.predictors == ("cnn", "own")
    images, _ = pictures(NAMES[:3], 2)
    shares = model.probabilities(images, "own")
    assert shares.shape == (6, 3)
    assert np.allclose(shares.sum(axis=1), 1)
    assert (shares.argmax(axis=1) == 2).all()
    with pytest.raises(EngramError, match="only the predictors cnn and nme can be exported, not 'own'; choose by=cnn"):
        export_onnx(model, tmp_path / "model.onnx", "own")
    with pytest.raises(EngramError, match="predicts by cnn and own, not by 'nme'"):
        model.probabilities(images, "nme")


# Code


OPTIMISER = """
from engram.contract import Optimiser, register_augmentation, register_optimiser, register_schedule
import torch

@register_optimiser("NAME")
class Plain(Optimiser):
    def direction(self, values, gradients, state, training):
        return gradients * 1.0

@register_schedule("NAME")
def flat(training, steps):
    return torch.full((training.epochs * steps,), training.lr)

@register_augmentation("NAME", numbers=0)
def inverted(images, numbers):
    return 255 - images
"""


def bring_in(monkeypatch: pytest.MonkeyPatch, file: Path, name: str = "own", more: str = "") -> None:
    """The file's parts are registered, anew if they were before."""
    file.write_text(OPTIMISER.replace("NAME", name) + more)
    sys.modules.pop(str(file), None)
    for registry in (OPTIMISERS, SCHEDULES, POLICIES):
        if name in registry:
            registry.remove(name)
    monkeypatch.setenv("ENGRAM_METHODS", str(file))
    load_plugins()


def keys(config: RunConfig) -> tuple[str | None, dict[str, str]]:
    return Session(config, make_store()).base_key(), config.code_versions()


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("optimiser", "settings.train.optimiser"),
        ("schedule", "settings.train.schedule"),
        ("augmentation_policy", "augmentation.policy"),
    ],
)
def test_code_that_trains_is_in_the_key_of_the_base_stage(
    kind: str, setting: str, clean_registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bring_in(monkeypatch, tmp_path / "own.py")
    config = make_config("afc").with_value(setting, "own")
    key, versions = keys(config)
    assert versions.keys() == {f"{kind}_file", f"{kind}_code"}
    assert keys(config) == (key, versions)
    assert keys(make_config("afc"))[1] == {}
    bring_in(monkeypatch, tmp_path / "own.py", more="# edited")
    other_key, other = keys(config)
    assert other_key not in (None, key)
    assert other[f"{kind}_code"] != versions[f"{kind}_code"]


def test_two_files_of_one_kind_are_both_recorded(
    clean_registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bring_in(monkeypatch, tmp_path / "one.py", "one")
    bring_in(monkeypatch, tmp_path / "two.py", "two")
    config = make_config("afc").with_settings(train__optimiser="one", finetune__optimiser="two")
    versions = config.code_versions()
    assert versions["optimiser_file"] == "one.py+two.py"
    assert versions["optimiser_code"].count("+") == 1


def test_a_base_stage_by_code_that_cannot_be_read_is_not_shared(clean_registries: None) -> None:
    made: dict[str, Any] = {"torch": torch}
    exec("def flat(training, steps): return torch.full((training.epochs * steps,), training.lr)", made)
    made["flat"].__module__ = "a_module_without_a_file"
    register_schedule("own")(made["flat"])
    assert keys(make_config("afc").with_settings(train__schedule="own"))[0] is None
    assert keys(make_config("afc").with_settings(train__schedule="constant"))[0] is not None


def test_a_run_that_goes_on_with_another_optimiser_says_so(
    clean_registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bring_in(monkeypatch, tmp_path / "own.py")
    config, store = tiny_config("replay", epochs=1).with_settings(train__optimiser="own"), toy_store(4)
    list(run(config, store, tmp_path / "run", stop_after_stage=0))
    bring_in(monkeypatch, tmp_path / "own.py", more="# edited")
    told = [getattr(event, "message", "") for event in engram.resume(tmp_path / "run", store)]
    assert any("the code of the optimiser own in own.py was changed since" in text for text in told)
    assert read_manifest(tmp_path / "run").versions["optimiser_code"].count(", ") == 1


def test_a_changed_file_with_several_parts_is_one_warning(
    clean_registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "several.py"
    text = """
from engram.contract import register, register_predictor, register_schedule
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
import torch
register_schedule("own")(lambda training, steps: torch.full((training.epochs * steps,), 0.01))
register_predictor("own")(lambda learner, outputs: outputs.scores[:, : learner.num_classes])
@register("own", settings=LSCSettings, title="From a file with other parts")
class Own(LSCMethod):
    predictors = ("cnn", "own")
"""
    monkeypatch.setenv("ENGRAM_METHODS", str(file))
    try:
        for content in (text, text + "# edited"):
            for registry in (SCHEDULES, PREDICTORS):
                if "own" in registry:
                    registry.remove("own")
            METHODS.pop("own", None)
            sys.modules.pop(str(file), None)
            file.write_text(content)
            load_plugins()
            if content == text:
                config = tiny_config("own", epochs=1).with_settings(train__schedule="own")
                list(run(config, toy_store(4), tmp_path / "run", stop_after_stage=0))
        told = [getattr(event, "message", "") for event in engram.resume(tmp_path / "run", toy_store(4))]
    finally:
        METHODS.pop("own", None)
        sys.modules.pop(str(file), None)
    (warning,) = [text for text in told if "was changed since" in text]
    assert warning.startswith("the code of the method own, schedule own, predictor own in several.py was changed since")


# Packages


def install(place: Path, package: str, module: str, code: str) -> None:
    """A package as pip leaves it, whose module is announced to engram."""
    info = place / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[engram.plugins]\nparts = {module}\n")
    (place / f"{module}.py").write_text(code)


def test_a_package_announces_its_parts(clean_registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path / "site", "flat-parts", "flat_parts", OPTIMISER.replace("NAME", "flat"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    try:
        engram.load_plugins()
        engram.load_plugins()
        assert "flat" in OPTIMISERS
        assert OPTIMISERS.versions("flat")["optimiser_file"] == "flat_parts.py"
    finally:
        sys.modules.pop("flat_parts", None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise SystemExit(0)", "SystemExit"),
        ("from engram.contract import *\nregister_schedule('cosine')(len)", "'cosine' is registered already"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(
    code: str, reason: str, engram: Engram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(tmp_path / "site", "broken-parts", "broken_parts", code)
    monkeypatch.syspath_prepend(tmp_path / "site")
    outcome = engram("list", "datasets")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    for text in ("the package broken-parts announces broken_parts", reason, "uninstall that package"):
        assert text in outcome.err
    assert engram("--help").status == 0, "help imports no plugin"
