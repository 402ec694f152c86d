"""The trackers: TensorBoard, Weights & Biases, MLflow, and a folder of plain files."""

from __future__ import annotations

import importlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engram.core.errors import EngramError, nearest, option
from engram.core.io import typed_path, write_json, write_text, writing
from engram.track.tracker import Axis, Confusion, Status, TrackedRun, Tracker

PROJECT = "engram"  # of Weights & Biases, and the experiment of MLflow
_PARAMETERS = 100  # that MLflow takes at a time
_LONGEST = 500  # characters of a parameter's value in MLflow


class TensorBoardTracker:
    """Event files in a folder, a subfolder for each run: `tensorboard --logdir FOLDER`."""

    def __init__(self, where: str) -> None:
        self._where = typed_path(where or "tensorboard")

    def start(self, run: TrackedRun) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(self._where / run.folder))
        self._writer.add_text("about", _markdown(run.about), 0)
        self._writer.add_text("configuration", _markdown(run.config), 0)

    def log(self, axis: Axis, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_confusion(self, step: int, confusion: Confusion) -> None:
        self._writer.add_image(f"confusion/{confusion.predictor}", _pixels(confusion.png), step, dataformats="HWC")

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        for name, value in summary.items():
            self._writer.add_scalar(name, value, 0)
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases. where: the project. WANDB_MODE=offline writes files only."""

    def __init__(self, where: str) -> None:
        self._project = where or PROJECT

    def start(self, run: TrackedRun) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=self._project,
            name=run.name,
            id=run.key,
            resume="allow",
            reinit="create_new",  # several runs at once in one process
            config={**run.config, **{f"about.{name}": value for name, value in run.about.items()}},
            settings=self._wandb.Settings(console="off", silent=True),
        )
        # Numbers have an axis of their own; the step that the service counts by itself has no meaning.
        for axis in ("epoch", "stage", "lesson"):
            self._run.define_metric(axis)

    def log(self, axis: Axis, step: int, numbers: Mapping[str, float]) -> None:
        for name in numbers:
            self._run.define_metric(name, step_metric=axis)
        self._run.log({axis: step, **numbers})

    def log_confusion(self, step: int, confusion: Confusion) -> None:
        names = confusion.class_names
        cells = [[names[t], names[p], int(confusion.counts[t, p])] for t, p in np.argwhere(confusion.counts)]
        table = self._wandb.Table(columns=["true", "predicted", "images"], data=cells)
        image = self._wandb.Image(Image.open(io.BytesIO(confusion.png)))
        name = f"confusion/{confusion.predictor}"
        self._run.log({"stage": step, name: image, f"{name}_table": table})

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        for name, value in summary.items():
            self._run.summary[name] = value
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MlflowTracker:
    """A run of MLflow. where: the experiment. MLFLOW_TRACKING_URI says where it is kept, as for MLflow itself."""

    def __init__(self, where: str) -> None:
        self._experiment = where or PROJECT

    def start(self, run: TrackedRun) -> None:
        # MLflow itself waits minutes for a server that does not answer, and the run would wait with it.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        # The client and not the functions of the module: these have one active run for a whole thread.
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`engram.key` = '{run.key}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"engram.key": run.key, **{f"engram.{name}": value for name, value in run.about.items()}}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        parameters = [self._entities.Param(name, str(value)[:_LONGEST]) for name, value in run.config.items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])

    def log(self, axis: Axis, step: int, numbers: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        found = [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=found)

    def log_confusion(self, step: int, confusion: Confusion) -> None:
        self._client.log_image(self._id, Image.open(io.BytesIO(confusion.png)), f"confusion-{confusion.predictor}.png")
        self._client.log_text(self._id, confusion.csv(), f"confusion-{confusion.predictor}.csv")

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        if summary:
            self.log("stage", 0, summary)
        self._client.set_terminated(self._id, {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[status])


class FolderTracker:
    """Plain files, a subfolder for each run: run.json, metrics.jsonl, confusion-PREDICTOR.csv, summary.json."""

    def __init__(self, where: str) -> None:
        self._where = typed_path(where)

    def start(self, run: TrackedRun) -> None:
        self._folder = self._where / run.folder
        write_json(self._folder / "run.json", {"name": run.name, "about": dict(run.about), "config": dict(run.config)})

    def log(self, axis: Axis, step: int, numbers: Mapping[str, float]) -> None:
        file = self._folder / "metrics.jsonl"
        with writing(file), file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({axis: step, **numbers}, allow_nan=False) + "\n")

    def log_confusion(self, step: int, confusion: Confusion) -> None:
        write_text(self._folder / f"confusion-{confusion.predictor}.csv", confusion.csv())

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        write_json(self._folder / "summary.json", {"status": status, **summary})


SERVICES: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def check_tracker(text: str) -> tuple[str, Callable[[], Tracker]]:
    """Return name and maker of a tracker; refuse one that cannot be meant.

    The maker raises an error if the package is not installed, or Weights & Biases has no login: a tracker that is
    missing stops no run.

    text: tensorboard, wandb, mlflow, each perhaps with =WHERE (a folder, a project, an experiment), or a folder.
    """
    name, equals, where = text.partition("=")
    if name in SERVICES:
        if equals and not where:
            raise EngramError(f"{option('track')} needs a value after {text!r}, such as {text}somewhere")
        return name, lambda: _make(name, where)
    if "/" not in text and not Path(text).exists() and (near := nearest(name, SERVICES)):
        raise EngramError(f"there is no tracker {text!r}: did you mean {near[0]!r}? Write ./{text} for a folder")
    place = typed_path(text)
    if not text or (place.exists() and not place.is_dir()):
        raise EngramError(f"{option('track')} must be {', '.join(SERVICES)} or a folder, got {text!r}")
    return text, lambda: FolderTracker(text)


def _make(name: str, where: str) -> Tracker:
    if find_spec(name) is None:
        raise EngramError(f"{option('track', name)} needs the package {name}: pip install {name}")
    if name == "wandb":
        _check_login()
    return SERVICES[name](where)


def _check_login() -> None:
    """Refuse Weights & Biases without a key: it would ask for one in the middle of the run's display."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return
    if not importlib.import_module("wandb").login(prompt=False):
        raise EngramError(
            f"{option('track', 'wandb')} needs a login: run 'wandb login' first, or set WANDB_MODE=offline to write "
            "files that 'wandb sync' sends later"
        )


def _markdown(values: Mapping[str, Any]) -> str:
    cells = ((name, str(value).replace("|", "\\|").replace("\n", " ")) for name, value in values.items())
    return "| name | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in cells)


def _pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
