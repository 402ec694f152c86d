"""Methods from outside the package: messages about mistakes in them, and what works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ["own-mini-b10-s5", "--epochs", "1", "--threads", "1", "--no-cache"]
METHOD = """
import torch
from engram.contract import register
from engram.methods.blocks.lsc import LSCSettings, classification_loss, lsc_phases
from engram.methods.replay import Replay


@register("own", settings=LSCSettings, title="Replay that keeps a number from stage to stage")
class Own(Replay):
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


def call(place: Path, *arguments: str, program: str = "engram") -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, so that its methods are registered only there."""
    environment = {**os.environ, "ENGRAM_METHODS": str(place / "own.py"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment.pop("ENGRAM_DEBUG", None)
    command = [sys.executable, "-m", program, *arguments]
    cwd = place if program == "engram" else ROOT
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_stage_must_not_change_the_method(tmp_path: Path) -> None:
    write(tmp_path, kept="1.0", finish="self.factor = 0.5")
    done = call(tmp_path, "run", *RECIPE, "--stop-after-stage", "0", "--quiet")
    assert done.returncode == 2
    for words in ("Own changes its attribute 'factor'", "learner.store", "step.buffers"):
        assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_phases_that_cannot_be_planned_are_explained(tmp_path: Path) -> None:
    write(tmp_path, plan='float(learner.buffers["factor"])')
    done = call(tmp_path, "run", *RECIPE, "--dry-run")
    assert done.returncode == 2
    for words in ("own cannot be planned", "KeyError: 'factor'", "before anything is learned", "step.buffers"):
        assert words in done.stderr


def test_an_error_in_a_method_names_its_line_and_the_run_continues_after_a_fix(tmp_path: Path) -> None:
    file = write(tmp_path, kept='(step.buffers["factor"] if len(step.buffers) else 1.0)', finish="learner.nothing()")
    failed = call(tmp_path, "run", *RECIPE, "--out", "run", "--quiet")
    line = 1 + file.read_text().splitlines().index("        learner.nothing()")
    assert failed.returncode == 1
    assert f"({file}, line {line}, in finish)" in failed.stderr
    assert f"the details are in {Path('run') / 'error.txt'}" in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert "learner.nothing()" in (tmp_path / "run" / "error.txt").read_text()
    assert "failed in the base" in call(tmp_path, "list", "runs", "--root", ".").stdout
    write(tmp_path, kept='(step.buffers["factor"] if len(step.buffers) else 1.0)')
    done = call(tmp_path, "resume", "run", "--threads", "1", "--stop-after-stage", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "error.txt").exists(), "it is deleted when the run continues"
    assert "stopped after stage 1" in call(tmp_path, "list", "runs", "--root", ".").stdout
    write(tmp_path, kept='(1.0 * step.buffers["factor"] if len(step.buffers) else 1.0)')
    edited = call(tmp_path, "resume", "run", "--threads", "1", "--quiet")
    assert edited.returncode == 0, edited.stderr
    assert "the code of the method own was changed since" in edited.stderr, "also with --quiet"


def test_the_contract_tests_run_for_a_method_from_outside(tmp_path: Path) -> None:
    write(tmp_path, kept="1.0")
    flags = ["tests/test_methods_contract.py", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    done = call(tmp_path, *flags, "-k", "own and resumes_exactly", program="pytest")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
