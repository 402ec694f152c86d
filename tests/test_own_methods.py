"""Methods from outside the package: messages about mistakes in them, and what works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram.contract import Extension, Learner, Method, Passes, Phase, Stage, Step, Terms, register
from engram.contract.predictors import PREDICTORS
from engram.contract.settings import SCHEDULES
from engram.core.errors import EngramError
from engram.core.events import EpochFinished, RunFinished, StageFinished
from engram.data.memory import MemoryConfig
from engram.experiment.runner import resume, run
from engram.methods import METHODS
from engram.methods.blocks.linear import LinearMethod, SteppedSettings
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
from helpers import Engram, Outcome, begin_stage, last_state, tiny_config, tiny_session, toy_store, train_phase
from model_helpers import NAMES, learn, make, opened, pictures, scores, tiny

ROOT = Path(__file__).parents[1]
RECIPE = ["own-mini-b10-s5", "--base", "2", "--increment", "2", "--epochs", "1", "--threads", "1", "--no-cache"]
METHOD = """
import torch
from engram.contract import register
from engram.methods.blocks.lsc import LSCSettings, classification_loss, lsc_phases
from engram.methods.bounds import Replay


@register("own", settings=LSCSettings, title="Replay that keeps a number from stage to stage")
class Own(Replay):
    uses_teacher = True  # lsc_phases gives it one

    def phases(self, learner, stage, passes):
        PLAN
        return lsc_phases(self.settings, learner, stage, passes, self.loss, {})

    def loss(self, step):
        return {"classification": KEPT * classification_loss(self.settings, step).mean()}

    def finish(self, learner, stage, passes):
        FINISH
"""
STORE = 'learner.store("factor", torch.tensor(0.5 ** (stage.index + 1)))'


def write(place: Path, plan: str = "pass", kept: str = 'step.buffers["factor"]', finish: str = STORE) -> Path:
    """Write a file with a method."""
    file = place / "own.py"
    file.write_text(METHOD.replace("PLAN", plan).replace("KEPT", kept).replace("FINISH", finish))
    return file


@pytest.fixture
def call(engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engram]:
    """Runs a command with the methods of the file as it is then, as a process of its own would."""
    file = tmp_path / "own.py"
    monkeypatch.setenv("ENGRAM_METHODS", str(file))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ENGRAM_DEBUG", raising=False)

    def forget() -> None:
        METHODS.pop("own", None)
        sys.modules.pop(str(file), None)

    def anew(*arguments: str | Path) -> Outcome:
        forget()
        return engram(*arguments)

    yield anew
    forget()


def test_a_stage_must_not_change_the_method(call: Engram, tmp_path: Path) -> None:
    write(tmp_path, kept="1.0", finish="self.factor = 0.5")
    done = call("run", *RECIPE, "--stop-after-stage", "0", "--quiet")
    assert done.status == 2
    for words in ("Own changes its attribute 'factor'", "learner.store", "step.buffers"):
        assert words in done.err
    assert done.err.count("\n") == 1


def test_phases_that_cannot_be_planned_are_explained(call: Engram, tmp_path: Path) -> None:
    write(tmp_path, plan='float(learner.buffers["factor"])')
    done = call("run", *RECIPE, "--dry-run")
    assert done.status == 2
    for words in ("own cannot be planned", "KeyError: 'factor'", "before anything is learned", "step.buffers"):
        assert words in done.err


def test_an_error_in_a_method_names_its_line_and_the_run_continues_after_a_fix(call: Engram, tmp_path: Path) -> None:
    file = write(tmp_path, kept='(step.buffers["factor"] if len(step.buffers) else 1.0)', finish="learner.nothing()")
    failed = call("run", *RECIPE, "--out", "run", "--quiet")
    line = 1 + file.read_text().splitlines().index("        learner.nothing()")
    assert failed.status == 1
    assert f"({file}, line {line}, in finish)" in failed.err
    assert f"the details are in {Path('run') / 'error.txt'}" in failed.err
    assert failed.err.count("\n") == 1
    assert "learner.nothing()" in (tmp_path / "run" / "error.txt").read_text()
    assert "failed in the base" in call("list", "runs", "--root", ".").out
    write(tmp_path, kept='(step.buffers["factor"] if len(step.buffers) else 1.0)')
    done = call("resume", "run", "--threads", "1", "--stop-after-stage", "1", "--quiet")
    assert done.status == 0, done.err
    assert not (tmp_path / "run" / "error.txt").exists(), "it is deleted when the run continues"
    assert "stopped after stage 1" in call("list", "runs", "--root", ".").out


def test_a_run_whose_method_lost_a_setting_is_named(call: Engram, tmp_path: Path) -> None:
    file = write(tmp_path, kept="1.0", finish="pass")
    plain = file.read_text()
    more = "class More(LSCSettings):\n    extra: float = 1.0\n\n\n@register("
    file.write_text(
        "from dataclasses import dataclass\n"
        + plain.replace("@register(", f"@dataclass(frozen=True)\n{more}").replace(
            "settings=LSCSettings", "settings=More"
        )
    )
    done = call("run", *RECIPE, "--out", "run", "--quiet", "--stop-after-stage", "0")
    assert done.status == 0, done.err
    file.write_text(plain)
    for command in (("resume", "run"), ("export", "run", "x.onnx")):
        failed = call(*command)
        assert failed.status == 2
        for words in (
            "of the run in run do not fit the method own any more (there is no setting 'extra')",
            "restore the code",
        ):
            assert words in failed.err
        assert "did you mean" not in failed.err


def test_the_contract_tests_run_for_a_method_from_outside(tmp_path: Path) -> None:
    write(tmp_path, kept="1.0")
    flags = ["tests/test_methods_contract.py", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *flags, "-k", "own and resumes_exactly"]
    environment = {**os.environ, "ENGRAM_METHODS": str(tmp_path / "own.py"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


Register = Callable[..., None]


@pytest.fixture
def own() -> Iterator[Register]:
    """Registers a method as "own" until the test ends."""

    def add(kind: type[Method], **declared: Any) -> None:
        register("own", **{"settings": LSCSettings, "title": "A method of one's own"} | declared)(kind)

    yield add
    METHODS.pop("own", None)


class Counting(LSCMethod[LSCSettings]):
    """Keeps a number for each row of the head, and reads it in the loss."""

    class_buffers = ("counts",)

    def loss(self, step: Step) -> Terms:
        return {"classification": super().loss(step)["classification"] + 0 * (step.buffers["counts"] * step.new).sum()}

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        head = learner.network.head
        kept = learner.buffers.get("counts", torch.zeros(head.capacity)).clone()
        kept[stage.num_old : stage.num_seen] = stage.index + 1.0
        learner.store("counts", kept)


def test_tensors_with_a_row_per_class_grow_with_the_head(own: Register, tmp_path: Path) -> None:
    own(Counting)
    model = opened(make(tmp_path / "model", NAMES[:2], NAMES[2:5], NAMES[5:6], config=tiny("own")))
    assert model.learner is not None
    assert model.learner.buffers["counts"].tolist() == [1, 1, 2, 2, 2, 3]


class ClosedForm(LinearMethod[SteppedSettings]):
    """Trains nothing, in no stage: the weight of a class is the mean of its embeddings."""

    predictors = ("cnn",)
    uses_teacher = False

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return []

    @torch.no_grad()
    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        for label in stage.new_labels:
            own = passes.embed(learner.network, stage.pool.images[stage.rows_of(label)])
            learner.network.get_parameter("head.weight")[label] = own.mean(dim=0)


def test_a_method_without_a_phase_runs_and_resumes(own: Register, tmp_path: Path) -> None:
    own(ClosedForm, settings=SteppedSettings, memory="none")
    config, store = tiny_config("own", memory=MemoryConfig("none", 0)), toy_store()
    events = list(run(config, store, tmp_path / "whole"))
    assert isinstance(events[-1], RunFinished)
    assert not any(isinstance(event, EpochFinished) for event in events)
    halted = run(config, store, tmp_path / "halted")
    for event in halted:
        if isinstance(event, StageFinished) and event.stage == 1:
            halted.close()
            break
    assert isinstance(list(resume(tmp_path / "halted", store))[-1], RunFinished)
    whole, resumed = last_state(tmp_path / "whole"), last_state(tmp_path / "halted")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("method", ["own", "ridge"])
def test_lessons_without_a_phase(own: Register, tmp_path: Path, method: str) -> None:
    own(ClosedForm, settings=SteppedSettings, memory="none")
    path = make(tmp_path / "model", NAMES[:3], config=tiny(method, memory="none"))
    before = opened(path).learner
    learn(path, NAMES[3:5])
    after = opened(path).learner
    assert before is not None
    assert after is not None
    assert after.num_classes == 5
    for name, value in before.network.backbone.state_dict().items():
        assert torch.equal(value, after.network.backbone.state_dict()[name]), "the second lesson trains nothing"
    images, labels = pictures(NAMES[:5], 4, seed=3)
    best = scores(opened(path), images)["cnn"].argmax(axis=1)
    right = np.mean([NAMES[place] == label for place, label in zip(best, labels, strict=True)])
    assert right > (0.6 if method == "ridge" else 0.2)


@dataclass(frozen=True)
class Unnamed(Extension):
    """Says that it has a stream, and not of which rows."""

    def stream(self) -> tuple[str, int]:
        return "more", 2


def test_a_stream_without_rows_says_what_to_define() -> None:
    session = tiny_session()
    stage = begin_stage(session, 0)
    (main,) = session.method.phases(session.learner, stage, session.engine)
    with pytest.raises(EngramError, match=r"Unnamed adds a stream of images, .*define stream_rows\(epochs, steps, "):
        train_phase(session, stage, replace(main, extensions=(Unnamed(),)))


class NoTeacher(LinearMethod[SteppedSettings]):
    """Says that it has no teacher, and distils from one in the phases of its family."""

    uses_teacher = False

    def loss(self, step: Step) -> Terms:
        assert step.teacher is not None
        return {"classification": (step.student.embedding - step.teacher.embedding).square().mean()}


class OnePhase(LinearMethod[SteppedSettings]):
    """Returns a phase instead of a list of phases."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> Any:
        return super().phases(learner, stage, passes)[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            NoTeacher,
            "NoTeacher has uses_teacher = False, but its phase 'main' has teacher=True, .*leave uses_teacher out",
        ),
        (OnePhase, r"OnePhase.phases\(\) must return a list of Phase objects, .*but it returned a Phase"),
    ],
)
def test_phases_that_cannot_be_trained_are_refused_before_training(
    kind: type[Method], message: str, own: Register, tmp_path: Path
) -> None:
    own(kind, settings=SteppedSettings)
    with pytest.raises(EngramError, match=message):
        next(run(tiny_config("own"), toy_store(), tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoint").exists()


CELL = """
from dataclasses import dataclass
from engram.contract import *
from engram.methods.blocks.lsc import LSCMethod, LSCSettings

@dataclass(frozen=True)
class CellSettings(LSCSettings):
    factor: float = FACTOR

@register("own", settings=CellSettings, title="In a cell")
class Cell(LSCMethod):
    factor = FACTOR

@register_schedule("own")
def schedule(training, steps):
    return FACTOR

@register_predictor("own")
def predictor(learner, outputs):
    return FACTOR
"""


def test_a_cell_that_is_run_again_replaces_its_method_and_its_parts(own: Register, clean_registries: None) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    for factor in ("1.0", "2.0"):
        exec(CELL.replace("FACTOR", factor), cell)
    assert METHODS["own"].kind.factor == METHODS["own"].settings().factor == 2.0  # pyright: ignore
    assert SCHEDULES.find("own")(None, 1) == PREDICTORS.find("own").function(None, None) == 2.0  # pyright: ignore
    config = tiny_config("own")
    exec(CELL.replace("FACTOR", "3.0"), cell)
    with pytest.raises(EngramError, match=r"own was registered again .*; make the configuration again"):
        config.with_value("seed", 2)
    for kind, text in (
        ("method", CELL.replace("class Cell(", "class Other(")),
        ("schedule", CELL.replace("def sch", "def x")),
    ):
        with pytest.raises(EngramError, match=f"a {kind} named 'own' is registered already .*; choose another name"):
            exec(text.replace("FACTOR", "4.0"), cell)


class NoHead(LinearMethod[SteppedSettings]):
    """Returns a module that is no head."""

    def head(self, dim: int, capacity: int) -> Any:
        return torch.nn.Linear(dim, capacity)


def test_what_is_no_head_no_tensor_and_no_store_is_refused(own: Register) -> None:
    own(NoHead, settings=SteppedSettings)
    with pytest.raises(EngramError, match=r"NoHead.head\(\) must return a Head, .*but it returned a Linear"):
        tiny_session(tiny_config("own"))
    with pytest.raises(EngramError, match=r"learner.store keeps a tensor, but 'x' is a dict; store each tensor"):
        tiny_session().learner.store("x", {"y": torch.zeros(1)})  # pyright: ignore[reportArgumentType]
    for wrong, said in ((np.zeros((4, 8, 8, 3)), r"an? ndarray of the shape"), ((1, 2), "a tuple of int")):
        with pytest.raises(EngramError, match=f"the images of a run are an ImageStore, got {said}.*from_arrays"):
            next(run(tiny_config("naive"), wrong))  # pyright: ignore[reportArgumentType]


class NaNs(LinearMethod[SteppedSettings]):
    """Damages the head after training."""

    predictors = ("cnn",)

    @torch.no_grad()
    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        learner.network.get_parameter("head.weight")[0] = torch.nan


def test_weights_that_finish_damaged_are_named(own: Register) -> None:
    own(NaNs, settings=SteppedSettings)
    with pytest.raises(
        EngramError, match=r"after stage 0, .*NaN\); head.weight .*look at what the method does after training"
    ):
        list(run(tiny_config("own"), toy_store()))
