"""`engram submit`: runs as jobs of a Slurm cluster, or as processes of this machine."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.commands.run_common import check_last_stage, check_running, command_line
from engram.cli.commands.several import plan_runs, run_several, without_flag
from engram.cli.main import ELSEWHERE
from engram.cli.options.overrides import configure_all
from engram.cli.options.runs import RUNS, Submit
from engram.cli.result_tables import EndedRuns, print_results
from engram.cli.streams import tell
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.events import RunSkipped
from engram.core.io import typed_path, writing
from engram.core.torchrun import RESTARTS
from engram.experiment.members import Member
from engram.report.formatting import count_runs
from engram.runs.directory import MANIFEST

PACKAGE = "submitit"
LOGS = "jobs"
OWN_FLAGS = ("--jobs", "--gpus", "--cpus", "--hours", "--slurm", "--wait", "--out", "--at-once")
QUEUED_AGAIN = 10  # times, at most, after its time was over
SAVING_SECONDS = 120  # between the signal and the end of a job's time
LOOK_SECONDS = 2.0
STATES = {"UNKNOWN": "waiting or running"}  # without Slurm's accounts it is only known whether a job has ended


@dataclass(frozen=True)
class Job:
    """A job: `engram run` as a process, which is told to save and stop before the job's time is over.

    arguments: of `engram run`. place: the directory of the run, if it is only one.
    """

    arguments: tuple[str, ...]
    place: Path | None = None

    def __call__(self) -> int:
        """Run the command; return its exit status, which says success."""
        environment = dict(os.environ)
        if self.place is not None and (self.place / MANIFEST).exists():
            environment.setdefault(RESTARTS[1], "1")  # `engram run` continues the run that it finds there
        # Slurm sends the signal that the time is over to all processes of the job, and only this one handles it.
        handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        process = subprocess.Popen([sys.executable, "-m", "engram", "run", *self.arguments], env=environment)
        _running.append(process)
        signal.signal(signal.SIGUSR2, handler)
        # Not `process.wait()`: its lock would be held when `checkpoint`, called by the signal, waits for the process.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        status = process.wait()
        if status not in (0, ELSEWHERE):
            raise RuntimeError(f"engram run ended with status {status}; its message is above")
        return status

    def checkpoint(self) -> Any:
        """Called when the time is over: stop the process, which saves, and return what to queue again."""
        for process in _running:
            process.terminate()
        for process in _running:
            process.wait()
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


_running: list[
    subprocess.Popen[bytes]
] = []  # of the job of this process; a job is sent as a pickle, a process cannot be


def submit_command(options: Submit, typed: Sequence[str]) -> int:
    """Run `engram submit`."""
    flags, console = options.running, make_console()
    check_running(flags, options.at_once)
    _check(options)
    configs = configure_all(options)
    if options.dry_run:
        return run_several(options, configs, typed, gpus=())
    members, _ = plan_runs(options, configs, console, outlined=True)
    check_last_stage(flags, *[member.stages for member in members])
    left = [member for member in members if member.progress.state != "done"]
    parent = typed_path(options.out or RUNS)
    if not left:
        return _print_end(console, members, parent)
    arguments = [*_arguments_of_run(typed), *(() if flags.quiet else ("--quiet",))]
    count = min(options.jobs or len(left), len(left))
    if len(members) == 1:
        place = parent.absolute() / members[0].name
        jobs = [Job((*arguments, "--out", str(place)), place)]
    else:
        at_once = options.at_once or -(-len(left) // count)
        jobs = [Job((*arguments, "--out", str(parent.absolute()), "--at-once", str(at_once)))] * count
    executor = _executor(options, parent)
    with executor.batch():
        submitted = [executor.submit(job) for job in jobs]
    where = "Slurm" if executor.cluster == "slurm" else "processes of this machine; there is no Slurm"
    numbers = ", ".join(job.job_id for job in submitted)
    what = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    print_line(console, f"{count_runs(len(left))} in {what} ({where}): {numbers}")
    print_line(console, f"runs in {parent}, logs in {parent / LOGS}")
    again = command_line([each for each in typed if each != "--wait"], configs)
    if options.wait:
        _wait(console, submitted)
        return _print_end(console, members, parent)
    print_line(console, "when they have ended, the same command prints the results or submits what is left:")
    print_line(console, again, "bold")
    return 0


def _check(options: Submit) -> None:
    """Refuse impossible values, before images are read."""
    if find_spec(PACKAGE) is None:
        raise EngramError("engram submit needs the package submitit: pip install submitit")
    for name, value, least in (("jobs", options.jobs, 1), ("gpus", options.gpus, 0), ("cpus", options.cpus, 1)):
        if value is not None and value < least:
            raise EngramError(f"--{name} must be at least {least}, got {value}")
    if not options.hours > 0:
        raise EngramError(f"--hours must be more than 0, got {options.hours:g}")
    if options.running.json:
        raise EngramError("--json prints the events of runs, which jobs do elsewhere; leave it out")
    if options.running.devices is not None:
        raise EngramError("--devices are GPUs of this machine; a job gets its own: leave it out, and give --gpus")
    if options.slurm and not _has_slurm():
        raise EngramError("--slurm gives options of sbatch, but this machine has no Slurm; leave it out")
    for each in options.slurm:
        key, equals, value = each.partition("=")
        if not (key and equals and value):
            raise EngramError(
                f"--slurm takes an option of sbatch as KEY=VALUE, such as partition=gpu, got {each!r:.60}"
            )


def _arguments_of_run(typed: Sequence[str]) -> list[str]:
    """Return the typed arguments without the command and without the options that only `engram submit` has."""
    kept = list(typed[1:])
    for flag in OWN_FLAGS:
        kept = [each for each in kept if each != flag] if flag == "--wait" else without_flag(kept, flag)
    return kept


def _has_slurm() -> bool:
    import submitit

    return submitit.AutoExecutor.which() == "slurm"


def _executor(options: Submit, parent: Path) -> Any:
    """Return submitit's executor: for Slurm, or for processes of this machine if it has no Slurm."""
    import submitit

    folder = (parent / LOGS).absolute()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    executor = submitit.AutoExecutor(folder, slurm_max_num_timeout=QUEUED_AGAIN, local_max_num_timeout=QUEUED_AGAIN)
    how: dict[str, Any] = {"name": "engram", "timeout_min": max(1, round(60 * options.hours))}
    how |= {"gpus_per_node": options.gpus} if options.gpus else {}
    how |= {"cpus_per_task": options.cpus} if options.cpus else {}
    if executor.cluster == "slurm":
        how["slurm_signal_delay_s"] = SAVING_SECONDS
        how["slurm_additional_parameters"] = dict(each.split("=", 1) for each in options.slurm)
    executor.update_parameters(**how)
    return executor


def _wait(console: Console, submitted: Sequence[Any]) -> None:
    """Wait until the jobs have ended; print how many are in which state when that changes."""
    before = ""
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns at every look if a cluster keeps no accounts
    while True:
        counts = Counter("ended" if job.done() else STATES.get(job.state, job.state.lower()) for job in submitted)
        now = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        if now != before:
            print_line(console, f"jobs: {now}")
        if counts["ended"] == len(submitted):
            return
        before = now
        time.sleep(LOOK_SECONDS)


def _print_end(console: Console, members: Sequence[Member], parent: Path) -> int:
    """Print the results of the runs that are complete, and those that are not; return the exit status."""
    found = {member: member.read_progress() for member in members}
    ended: EndedRuns = {
        member.name: RunSkipped(progress.result, str(member.directory))
        for member, progress in found.items()
        if progress.result is not None
    }
    print_results(console, ended, parent)
    open_ones = [member.name for member in members if member.name not in ended]
    if open_ones:
        tell(
            f"{len(open_ones)} of {count_runs(len(members))} not complete: {', '.join(open_ones)}; "
            f"the logs in {shlex.quote(str(parent / LOGS))} say why; the same command again submits them"
        )
    return 1 if open_ones else 0
