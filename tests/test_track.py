"""Trackers: what they are told of runs and lessons, several at once, and that a failing one never stops a run."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from conftest import make_config, make_store
from engram import EngramError, resume, run, train
from engram.cli.main import main
from engram.core.events import EpochFinished, Event, RunFailed, RunFinished, RunStarted, StageFinished, Stopped, Warned
from engram.track import Confusion, TrackedRun, Tracking, check_tracker, services, tracking
from engram.track.tracker import Axis, Status

CONFUSIONS = cache(tracking.confusions)
Recorded = tuple[Path, list[Event]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run with a directory, and its events."""
    directory = tmp_path_factory.mktemp("tracked") / "replay run"
    return directory, list(run(make_config("replay"), make_store(), directory))


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the confusion matrices is most of the work here."""
    monkeypatch.setattr(tracking, "confusions", CONFUSIONS)


def lines(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_folder_has_losses_accuracies_configuration_and_confusion(recorded: Recorded, tmp_path: Path) -> None:
    directory, events = recorded
    assert list(Tracking(f"{tmp_path}/logs").follow(iter(events))) == events
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name.startswith("replay_run-")
    about = json.loads((folder / "run.json").read_text())
    assert about["name"] == "replay run"
    assert about["config"]["settings.train.epochs"] == 2
    assert {"engram", "torch", "hardware.name", "recipe", "method"} <= about["about"].keys()
    found = lines(folder)
    epochs = [event for event in events if isinstance(event, EpochFinished)]
    assert [line["epoch"] for line in found if "epoch" in line] == list(range(len(epochs)))
    assert found[0]["loss/main/classification"] == epochs[0].terms["classification"]
    assert found[0]["lr/main"] == epochs[0].lr
    assert any(name.startswith("loss/balance/") for line in found for name in line)
    stages = [line for line in found if "stage" in line]
    assert [line["stage"] for line in stages] == [0, 1, 2]
    finished = [event for event in events if isinstance(event, StageFinished)]
    assert stages[2]["accuracy/nme"] == finished[2].accuracy["nme"]
    assert stages[2]["average/cnn"] == finished[2].average["cnn"]
    assert stages[2]["accuracy_of_stage_1/cnn"] == finished[2].accuracy_by_stage["cnn"][1]
    result = json.loads((directory / "result.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["summary/average/cnn"] == result["average_incremental_accuracy"]["cnn"]
    assert summary["summary/forgetting/nme"] == result["forgetting"]["nme"]
    with (folder / "confusion-cnn.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert len(header) == 7
    right = sum(int(row[1 + place]) for place, row in enumerate(rows))
    assert right / 36 == pytest.approx(result["final_accuracy"]["cnn"] / 100)


def test_tensorboard_files_hold_the_numbers(recorded: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, events = recorded
    assert list(Tracking(f"tensorboard={tmp_path}").follow(iter(events))) == events
    (folder,) = tmp_path.iterdir()
    read = EventAccumulator(str(folder), size_guidance={"images": 0})
    read.Reload()
    tags = read.Tags()
    assert {"loss/main/classification", "lr/main", "accuracy/cnn", "average/nme", "summary/forgetting/cnn"} <= set(
        tags["scalars"]
    )
    assert [point.step for point in read.Scalars("accuracy/cnn")] == [0, 1, 2]
    last = [event for event in events if isinstance(event, StageFinished)][-1]
    assert read.Scalars("accuracy/cnn")[-1].value == pytest.approx(last.accuracy["cnn"])
    assert set(tags["images"]) == {"confusion/cnn", "confusion/nme"}
    assert b"settings.train.epochs" in read.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]


class Recorder:
    """Records what is called on it, as any of the objects of a service."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], name: str = "") -> None:
        self._calls, self._name = calls, name
        self.summary: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            self._calls.append((name, values, named))
            return {"get_experiment_by_name": None, "search_runs": [], "login": True}.get(name, self)

        return call if not name.startswith("__") and name not in ("info", "run_id", "experiment_id") else self


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """Put a module that records its calls in the place of a service."""

    def install(name: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for each in (name, f"{name}.entities"):
            module: Any = types.ModuleType(each)
            module.__getattr__ = lambda attribute: getattr(Recorder(calls), attribute)
            monkeypatch.setitem(sys.modules, each, module)
        monkeypatch.setattr(services, "find_spec", lambda _: True)
        return calls

    return install


def test_calls_of_wandb(recorded: Recorded, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    calls = fake("wandb")
    events = list(Tracking("wandb=my-project").follow(iter(recorded[1])))
    assert events == recorded[1], "no warning"
    ((_, _, begun),) = [call for call in calls if call[0] == "init"]
    assert (begun["project"], begun["name"], begun["resume"]) == ("my-project", "replay run", "allow")
    assert begun["config"]["settings.train.epochs"] == 2
    assert begun["reinit"] == "create_new"
    logged = [values[0] for name, values, _ in calls if name == "log"]
    assert {"epoch", "loss/main/classification"} <= logged[0].keys()
    assert sum("confusion/cnn" in numbers for numbers in logged) == 1
    assert [named for name, _, named in calls if name == "finish"] == [{"exit_code": 0}]


def test_calls_of_mlflow(recorded: Recorded, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake("mlflow")
    retries = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    monkeypatch.setenv(retries, "")
    monkeypatch.delenv(retries)  # and again at the end
    events = list(Tracking("mlflow").follow(iter(recorded[1])))
    assert events == recorded[1], "no warning"
    made = [values for name, values, _ in calls if name == "create_experiment"]
    assert made == [("engram",)]
    parameters = {values[0]: values[1] for name, values, _ in calls if name == "Param"}
    assert parameters["settings.train.epochs"] == "2"
    metrics = [values for name, values, _ in calls if name == "Metric"]
    assert [step for name, _, _, step in metrics if name == "accuracy/cnn"] == [0, 1, 2]
    assert {values[2] for name, values, _ in calls if name == "log_image"} == {
        "confusion-cnn.png",
        "confusion-nme.png",
    }
    assert [values[1] for name, values, _ in calls if name == "set_terminated"] == ["FINISHED"]
    assert os.environ[retries] == "2", "a server that does not answer holds a run up for seconds, not minutes"


@pytest.fixture
def several(recorded: Recorded, tmp_path: Path) -> list[tuple[str, Event]]:
    """The events of two runs, in turns."""
    directory = tmp_path / "naive run"
    others = list(run(make_config("naive"), make_store(), directory))
    pairs = zip_longest(recorded[1], others)
    return [(name, event) for pair in pairs for name, event in zip(("one", "two"), pair, strict=True) if event]


def test_several_runs_in_wandb_for_real(
    several: list[tuple[str, Event]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "offline"))
    (tmp_path / "offline").mkdir()
    assert list(Tracking("wandb").follow_together(pair for pair in several)) == several
    files = list(tmp_path.rglob("*.wandb"))
    assert len(files) == 2
    ends = time.monotonic() + 30  # another process writes them
    while time.monotonic() < ends and not all(b"confusion/cnn" in file.read_bytes() for file in files):
        time.sleep(0.1)
    for file in files:
        data = file.read_bytes()
        assert b"settings.train.epochs" in data
        assert all(name in data for name in (b"loss/main/classification", b"accuracy/cnn", b"confusion/cnn"))
    assert len(list(tmp_path.rglob("media/images/confusion/*.png"))) == 3, "both predictors of replay, naive's one"


def test_several_runs_in_mlflow_files_for_real(
    several: list[tuple[str, Event]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):  # the second time they are the same runs
        assert list(Tracking("mlflow").follow_together(pair for pair in several)) == several
    client = mlflow.MlflowClient()
    found = {
        run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("engram").experiment_id])
    }
    assert found.keys() == {"replay run", "naive run"}
    for name, last in several:
        if not isinstance(last, RunFinished):
            continue
        one = found["replay run" if name == "one" else "naive run"]
        assert one.data.params["settings.train.epochs"] == "2"
        assert one.data.metrics["accuracy/cnn"] == last.result["final_accuracy"]["cnn"]
        assert "loss/main/classification" in one.data.metrics
        assert {file.path for file in client.list_artifacts(one.info.run_id)} >= {
            "confusion-cnn.png",
            "confusion-cnn.csv",
        }


class Failing:
    """A tracker that raises an error in one of its methods."""

    where = "log"

    def start(self, run: TrackedRun) -> None:
        self._fail("start")

    def log(self, axis: Axis, step: int, numbers: Mapping[str, float]) -> None:
        self._fail("log")

    def log_confusion(self, step: int, confusion: Confusion) -> None:
        self._fail("log_confusion")

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        self._fail("finish")

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ConnectionError("the network\nis down")


@pytest.mark.parametrize("where", ["start", "log", "log_confusion", "finish"])
def test_a_tracker_that_fails_warns_once_and_the_run_and_the_others_continue(
    where: str, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "where", where)
    monkeypatch.setitem(services.SERVICES, "tensorboard", lambda _: Failing())
    found = list(Tracking(["tensorboard", f"{tmp_path}/logs"]).follow(iter(recorded[1])))
    warned = [event for event in found if event not in recorded[1]]
    assert warned == [
        Warned("the tracker tensorboard failed (ConnectionError: the network is down); the run continues without it")
    ]
    assert [event for event in found if event not in warned] == recorded[1]
    assert isinstance(found[-1], RunFinished), "the last event stays the last"
    assert json.loads(next(tmp_path.rglob("summary.json")).read_text())["status"] == "finished"


def test_a_place_that_cannot_be_written_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = list(Tracking(f"{tmp_path}/file/below").follow(run(make_config("naive"), make_store())))
    assert isinstance(found[-1], RunFinished)
    assert len([event for event in found if isinstance(event, Warned)]) == 1


def test_several_runs_are_several_runs_of_the_tracker(recorded: Recorded, tmp_path: Path) -> None:
    _, events = recorded
    failed = RunFailed("no", None, False, None)
    other = [RunStarted("other", "naive", None, 3, {"protocol": "x"}, False), events[-3], failed]

    def pairs() -> Iterator[tuple[str, Event]]:
        for number, event in enumerate(events):
            yield "one", event
            if number < len(other):
                yield "two", other[number]

    given = list(pairs())
    assert list(Tracking(f"{tmp_path}/logs").follow_together(pair for pair in given)) == given
    status = {
        folder.name.rpartition("-")[0]: json.loads((folder / "summary.json").read_text())["status"]
        for folder in (tmp_path / "logs").iterdir()
    }
    assert status == {"replay_run": "finished", "other": "failed"}


def test_a_resumed_run_continues_in_its_place(tmp_path: Path) -> None:
    directory, place = tmp_path / "run", f"{tmp_path}/logs"
    first = list(Tracking(place).follow(run(make_config("naive"), make_store(), directory, stop_after_stage=0)))
    assert isinstance(first[-1], Stopped)
    (folder,) = (tmp_path / "logs").iterdir()
    assert json.loads((folder / "summary.json").read_text()) == {"status": "stopped"}
    list(Tracking(place).follow(resume(directory, make_store())))
    assert list((tmp_path / "logs").iterdir()) == [folder]
    epochs = [line["epoch"] for line in lines(folder) if "epoch" in line]
    assert epochs == list(range(6))
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_a_run_that_ends_with_an_error_is_marked_and_its_events_are_closed(tmp_path: Path) -> None:
    closed: list[bool] = []

    def events() -> Iterator[Event]:
        try:
            yield RunStarted("r", "naive", None, 1, {}, False)
            yield EpochFinished(0, "main", 1, {"x": 1.0}, 0.1, 1.0)
        finally:
            closed.append(True)

    followed = Tracking(f"{tmp_path}/logs").follow(events())
    next(followed)
    next(followed)
    followed.close()
    assert closed == [True]
    assert json.loads(next(tmp_path.rglob("summary.json")).read_text()) == {"status": "failed"}


def test_train_tracks_the_configuration_without_a_directory(tmp_path: Path) -> None:
    train(make_config("naive"), make_store(), track=[f"{tmp_path}/logs"])
    (folder,) = (tmp_path / "logs").iterdir()
    assert json.loads((folder / "run.json").read_text())["config"]["settings.train.epochs"] == 2
    assert not list(folder.glob("confusion*")), "there are no predictions"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "no tracker 'tensorbord': did you mean 'tensorboard'.* ./tensorbord for a folder"),
        ("wandb=", "needs a value after 'wandb='"),
        ("", "must be tensorboard, wandb, mlflow or a folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngramError, match=message):
        check_tracker(text)


def test_a_missing_package_warns_and_the_run_is_the_same(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "find_spec", lambda _: None)
    found = list(Tracking(["mlflow", "wandb", "tensorboard", f"{tmp_path}/logs"]).follow(iter(recorded[1])))
    assert [event for event in found if event not in recorded[1]] == [
        Warned(
            f"the run continues without the tracker {name}: track={name} needs the package {name}: pip install {name}"
        )
        for name in ("mlflow", "wandb", "tensorboard")
    ]
    assert [event for event in found if event in recorded[1]] == recorded[1]
    assert isinstance(found[1], Warned), "it is said at once"
    assert json.loads(next(tmp_path.rglob("summary.json")).read_text())["status"] == "finished"


def test_wandb_without_a_login_warns(recorded: Recorded, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    fake("wandb")
    assert list(Tracking("wandb").follow(iter(recorded[1]))) == recorded[1], "logged in"
    monkeypatch.setattr(sys.modules["wandb"], "login", lambda prompt: False, raising=False)
    (warned,) = [event for event in Tracking("wandb").follow(iter(recorded[1])) if event not in recorded[1]]
    assert isinstance(warned, Warned)
    assert "run 'wandb login' first, or set WANDB_MODE=offline" in warned.message


def test_commands_track_one_run_several_and_a_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_cli_models import FIRST, QUICK, folder

    photos = folder(tmp_path / "photos", FIRST, count=6)
    monkeypatch.chdir(tmp_path)
    small = ("--data", "photos", "--backbone", "resnet10", "--epochs", "1", "--base", "2", "--quiet", "--threads", "1")
    command = ["run", "naive-folder", *small, "--increment", "1", "--track", "logs/", "--track", "tensorboard=boards"]
    assert main(command) == 0, capsys.readouterr().err
    assert main([*command, "--seeds", "1,2", "--out", "two"]) == 0, capsys.readouterr().err
    assert len(list((tmp_path / "logs").iterdir())) == len(list((tmp_path / "boards").iterdir())) == 3
    monkeypatch.setattr(services, "find_spec", lambda _: None)
    assert main(["learn", "model", str(photos), *QUICK, "--quiet", "--track", "lessons/", "--track", "mlflow"]) == 0
    assert "without the tracker mlflow: --track mlflow needs the package mlflow" in capsys.readouterr().err
    (lesson,) = (tmp_path / "lessons").iterdir()
    assert lesson.name.startswith("model-lesson1-")
    config = json.loads((lesson / "run.json").read_text())["config"]
    assert (config["method"], config["settings.train.epochs"]) == ("afc", 2), "of this lesson"
    found = lines(lesson)
    assert sum("epoch" in line for line in found) >= 2
    assert "accuracy_new/cnn" in found[-1]
