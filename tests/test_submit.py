"""`engram submit`: runs as jobs. Slurm itself is not needed: without it, jobs are processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from engram.cli.commands import submit
from helpers import Engram
from test_cli import one_thread, photos
from test_cli_several import SMALL

__all__ = ["one_thread", "photos"]  # fixtures

submitit: Any = pytest.importorskip("submitit", reason="engram[submit] is not installed")


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Slurm behaves like one without."""
    monkeypatch.setattr(submitit.AutoExecutor, "which", staticmethod(lambda: "local"))


def test_runs_are_jobs_whose_results_are_collected(engram: Engram, photos: Path) -> None:
    typed = ("submit", "replay-folder", "--data", photos, *SMALL, "--seeds", "1,2", "--jobs", "1", "--gpus", "0")
    found = engram(*typed, "--threads", "1", "--out", "runs", "--wait")
    assert found.status == 0, found.err
    assert "2 runs in 1 job (processes of this machine; there is no Slurm)" in found.out
    assert "jobs: 1 ended" in found.out
    table = found.out.partition("jobs: 1 ended")[2]
    assert "replay-folder" in table
    again = engram(*typed, "--threads", "1", "--out", "runs")
    assert again.status == 0
    assert again.out.strip() == table.strip(), "nothing is left, so nothing is submitted"
    planned = engram(*typed, "--out", "runs", "--dry-run")
    assert "2 runs (2 done), 0 steps left" in planned.out


def test_a_job_whose_time_is_over_saves_and_is_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's signal reaches all processes of the job; the one that trains gets SIGTERM, and time to save."""

    class Queued(Exception):
        pass

    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        assert command[-4:] == ["engram", "run", "some-recipe", "--quiet"]
        started.append(begin(["sh", "-c", "trap 'sleep 0.3; exit 143' TERM; sleep 60 & wait"], env=env))
        return started[0]

    def end_of_time(*_: object) -> None:
        raise Queued(job.checkpoint())

    def send_signal() -> None:
        for number in (started[0].pid, os.getpid()):
            os.kill(number, signal.SIGUSR2)

    monkeypatch.setattr(submit.subprocess, "Popen", start)
    job = submit.Job(("some-recipe", "--quiet"))
    before = signal.signal(signal.SIGUSR2, end_of_time)
    timer = threading.Timer(0.3, send_signal)
    timer.start()
    try:
        with pytest.raises(Queued) as queued:
            job()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert queued.value.args[0].function == job
    assert started[0].returncode == 143, "it saved before it ended"


def test_a_job_of_one_run_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts: list[str | None] = []

    def start(_: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        restarts.append(env.get("SLURM_RESTART_COUNT"))
        return begin(["true"])

    begin = subprocess.Popen
    monkeypatch.setattr(submit.subprocess, "Popen", start)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    submit.Job((), tmp_path)()
    (tmp_path / "run.json").touch()
    submit.Job((), tmp_path)()
    assert restarts == [None, "1"]


def test_a_run_that_fails_is_named(engram: Engram, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_wait", lambda *_: None)
    monkeypatch.setattr(submit, "_executor", lambda *_: _Queue())
    found = engram("submit", "replay-folder", "--data", photos, *SMALL, "--out", "runs", "--wait")
    assert found.status == 1
    assert "1 of 1 run not complete: replay-folder" in found.err


class _Queue:
    """An executor that never starts a job."""

    cluster = "slurm"

    def batch(self) -> Any:
        return threading.Lock()

    def submit(self, job: submit.Job) -> Any:
        assert job.arguments[-2:] == ("--out", str(job.place))
        return _Queued()


class _Queued:
    job_id = "17"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--jobs", "0"), "--jobs must be at least 1, got 0"),
        (("--gpus", "-1"), "--gpus must be at least 0, got -1"),
        (("--hours", "0"), "--hours must be more than 0, got 0"),
        (("--json",), "--json prints the events of runs"),
        (("--devices", "0"), "--devices are GPUs of this machine"),
        (("--slurm", "partition=gpu"), "this machine has no Slurm"),
    ],
)
def test_what_cannot_be_is_refused(wrong: tuple[str, ...], message: str, engram: Engram, photos: Path) -> None:
    found = engram("submit", "replay-folder", "--data", photos, *SMALL, *wrong)
    assert found.status == 2
    assert message in found.err
    assert not Path("runs").exists()


def test_options_of_slurm_are_read_before_anything_else(engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_has_slurm", lambda: True)
    found = engram("submit", "replay-mini-b10-s5", "--slurm", "gpu")
    assert found.status == 2
    assert "KEY=VALUE, such as partition=gpu, got 'gpu'" in found.err


def test_without_the_package_it_says_what_to_install(engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "find_spec", lambda _: None)
    found = engram("submit", "replay-mini-b10-s5")
    assert found.status == 2
    assert "pip install submitit" in found.err
