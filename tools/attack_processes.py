"""Attacks runs and lessons while they train: python tools/attack_processes.py [--kills N] [--terms N] ... [--lessons N]

Two runs at once, started by one `engram run`, are

- killed (SIGKILL) at random times, up to three times in a row;
- ended by two SIGTERMs, to the process or its group, 0 to 50 ms apart: each run must save a checkpoint;
- interrupted by two to six SIGINTs, 0 to 30 ms apart;
- started twice at the same time in one --out, as one run or as several; and resumed twice at the same time.

Afterwards the same command must continue them to the result of runs that nobody touched: result.json (without times)
and every tensor of the last checkpoint, bit for bit. The table says how many attacks landed during training, not before
the first step or after the last.

A model of a pretrained network is killed up to three times in each of two lessons. After each kill it must open and be
the model before or after the lesson; in the end every tensor and picture must be that of a model that nobody touched.
"In training" are the kills after a checkpoint of its features was saved.

Each fault is printed with the command that repeats it. The exit status is 1 if there is one. Times are random, but not
the machine's: the same seed may hit another moment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attack_files import (
    TINY,
    Outcome,
    command,
    faults_of,
    json_lines,
    learn_arguments,
    make_lessons,
    make_photos,
    start,
    wait,
    warm_up,
)
from engram import EngramError, open_model
from engram.cli.main import ELSEWHERE
from engram.core.checkpoint import load_checkpoint
from engram.models.store.generations import NoModelYet

ORDERS = ("1", "2")
EPOCHS = 3  # of a stage
LIMIT = 60.0  # seconds of CPU time
OFTEN = 0.001  # minutes between checkpoints
SELDOM = 10.0


@dataclass
class Trial:
    """One attack: how often it hit, how often during training, and its faults."""

    kind: str
    number: int
    hits: int = 0
    in_training: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Process:
    """A command that was started. ready: a file that it makes as soon as it has begun."""

    pid: int
    log: Path
    ready: Path
    began: float

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send(self, number: int, group: bool = False) -> bool:
        """Send a signal, and return whether it still ran."""
        alive = self.is_alive()
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)
        return alive

    def end(self) -> Outcome:
        """Wait for its end."""
        return wait(self.pid, self.log, LIMIT)


class Runs:
    """Runs in a folder of their own, with a data folder of their own."""

    def __init__(self, root: Path, photos: Path, minutes: float = OFTEN) -> None:
        self.root, self.photos, self.minutes = root, photos, minutes
        self.out, self.home = root / "runs", root / "home"
        root.mkdir(parents=True)
        self.started = 0

    def begin(self, *arguments: object) -> Process:
        """Start `engram` with these arguments; without any, the command that trains the runs."""
        self.started += 1
        log, ready = self.root / f"log-{self.started}", self.root / f"ready-{self.started}"
        act = command(*(arguments or self.several()))

        def action() -> int:
            ready.touch()
            return act()

        process = Process(start(action, self.root, self.home, log), log, ready, time.monotonic())
        while not ready.exists() and process.is_alive():
            time.sleep(0.001)
        time.sleep(0.005)  # until it is inside the command, which answers signals from then on
        return process

    def several(self) -> list[object]:
        """The arguments that train two runs at once."""
        return ["run", "afc-folder", *self.options(), "--orders", ",".join(ORDERS), "--at-once", 2]

    def options(self) -> list[object]:
        """Options of all runs."""
        tiny = [*TINY, "--epochs", EPOCHS, "--checkpoint-minutes", self.minutes]
        return ["--data", self.photos, *tiny, "--out", self.out, "--quiet"]

    def directories(self) -> list[Path]:
        """The run directories, the first class order first."""
        found = [path.parent for path in self.out.rglob("run.json")]
        return sorted(found, key=lambda path: json.loads((path / "run.json").read_text())["order"]["name"])

    def events(self) -> dict[str, list[str]]:
        """The names of all events so far, by run."""
        files = self.out.rglob("events.jsonl")
        return {file.parent.name: [event["event"] for event in json_lines(file.read_text())] for file in files}


def since(now: dict[str, list[str]], before: dict[str, list[str]]) -> dict[str, list[str]]:
    """The events of each run that were not there before."""
    new = {name: events[len(before.get(name, [])) :] for name, events in now.items()}
    return {name: events for name, events in new.items() if "run_started" in events}


def is_training(events: Sequence[str]) -> bool:
    """Whether a run with these events since its start has begun to train and has not ended."""
    return "phase_started" in events and not {"run_finished", "stopped"} & set(events)


def timeless(data: Any) -> Any:
    """Plain data without times."""
    if isinstance(data, dict):
        return {key: timeless(value) for key, value in data.items() if not key.startswith("seconds")}
    return [timeless(item) for item in data] if isinstance(data, list) else data


def compare(found: Path, expected: Path) -> list[str]:
    """The differences between a run and the one that nobody touched."""
    try:
        ours, theirs = (json.loads((run / "result.json").read_text()) for run in (found, expected))
        files = (run / "checkpoint" / "state.safetensors" for run in (found, expected))
        tensors, whole = (load_checkpoint(file).tensors for file in files)
    except (OSError, ValueError, EngramError) as error:
        return [f"{found.name} cannot be read: {error}"]
    if timeless(ours) != timeless(theirs):
        return [f"{found.name} has another result"]
    if tensors.keys() != whole.keys() or not all(torch.equal(tensors[name], whole[name]) for name in whole):
        return [f"{found.name} has other weights"]
    return [f"{found.name} holds {path.name}" for path in found.rglob("*.part")][:1]


class ProcessAttack:
    """Carries out the trials in a folder."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        root.mkdir(parents=True, exist_ok=True)
        self.photos = make_photos(root / "photos")
        whole = Runs(root / "whole", self.photos)
        process = whole.begin()
        outcome = process.end()
        if outcome.status != 0 or len(whole.directories()) != len(ORDERS):
            raise SystemExit(f"the runs that nobody touches fail: {outcome}")
        self.expected = whole.directories()
        self.seconds = time.monotonic() - process.began
        self.megabytes = outcome.megabytes
        self.learned: list[dict[str, torch.Tensor]] = []  # the model after each lesson
        self.lesson_seconds = 0.0

    def carry_out(self, kind: str, number: int) -> Trial:
        """One trial of a kind."""
        trial, draw = Trial(kind, number), random.Random(f"{self.seed} {kind} {number}")
        place = self.root / f"{kind}-{number}"
        runs = Runs(place, self.photos, SELDOM if kind in ("terms", "interrupts") else OFTEN)
        KINDS[kind](self, trial, draw, runs)
        shutil.rmtree(place)
        return trial

    def check(self, trial: Trial, outcome: Outcome, statuses: Sequence[int]) -> None:
        """Note the faults of a command that ended; statuses: those it may end with."""
        found = [fault for fault in faults_of(outcome, self.megabytes) if "killed by" not in fault]
        trial.faults += [fault for fault in found if not fault.startswith("status ")]
        if outcome.status not in statuses and not outcome.hung:
            trial.faults.append(f"ended with {outcome.status}: {' '.join(outcome.err.split())[-200:]}")

    def finish(self, trial: Trial, runs: Runs, *arguments: object) -> None:
        """Continue the runs to their end, and compare them."""
        self.check(trial, runs.begin(*arguments).end(), (0,))
        found = runs.directories()
        expected = self.expected[: len(found)] if arguments else self.expected
        if len(found) != len(expected):
            trial.faults.append(f"{len(found)} runs instead of {len(expected)}")
        for run, whole in zip(found, expected, strict=False):
            trial.faults += compare(run, whole)

    def attack(self, trial: Trial, draw: random.Random, runs: Runs, hit: Callable[[Process], bool]) -> Outcome:
        """Start the runs and hit them at a random time."""
        before = runs.events()
        process = runs.begin()
        time.sleep(draw.uniform(0, self.seconds))
        there = since(runs.events(), before)
        alive = hit(process)
        trial.hits += alive
        trial.in_training += alive and any(map(is_training, there.values()))
        outcome = process.end()
        if trial.kind == "terms":
            for name, events in since(runs.events(), before).items():
                if name in there and not {"run_finished", "stopped"} & set(events):
                    trial.faults.append(f"{name} did not save: its last event is {events[-1]}, status {outcome.status}")
        return outcome

    def kills(self, trial: Trial, draw: random.Random, runs: Runs) -> None:
        """SIGKILL, up to three times before the runs may end."""
        for _ in range(draw.randint(1, 3)):
            outcome = self.attack(trial, draw, runs, lambda process: process.send(signal.SIGKILL, group=True))
            self.check(trial, outcome, (0, -signal.SIGKILL))
        self.finish(trial, runs)

    def terms(self, trial: Trial, draw: random.Random, runs: Runs) -> None:
        """Two SIGTERMs, as a service manager sends to a process and its group."""
        group, pause = draw.choice([(False, False), (False, True), (True, False), (True, True)]), draw.uniform(0, 0.05)

        def hit(process: Process) -> bool:
            alive = process.send(signal.SIGTERM, group[0])
            time.sleep(pause)
            process.send(signal.SIGTERM, group[1])
            return alive

        outcome = self.attack(trial, draw, runs, hit)
        self.check(trial, outcome, (0, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM))
        self.finish(trial, runs)

    def interrupts(self, trial: Trial, draw: random.Random, runs: Runs) -> None:
        """Ctrl-C, several times: the second may end the runs at once, and they continue from what was saved."""
        pauses = [draw.uniform(0, 0.03) for _ in range(draw.randint(1, 5))]

        def hit(process: Process) -> bool:
            alive = process.send(signal.SIGINT, group=True)
            for pause in pauses:
                time.sleep(pause)
                process.send(signal.SIGINT, group=True)
            return alive

        outcome = self.attack(trial, draw, runs, hit)
        self.check(trial, outcome, (0, 128 + signal.SIGINT, -signal.SIGINT))
        self.finish(trial, runs)

    def pairs(self, trial: Trial, draw: random.Random, runs: Runs) -> None:
        """Two commands at the same time in one --out."""
        how = ("run", "several", "resume")[trial.number % 3]
        one = ["run", "afc-folder", *runs.options(), "--order", ORDERS[0]]
        arguments: list[object] = [] if how == "several" else one
        if how == "resume":
            self.check(trial, runs.begin(*one, "--stop-after-stage", 0).end(), (0,))
            arguments = ["resume", runs.out, "--quiet", "--checkpoint-minutes", OFTEN]
        first = runs.begin(*arguments)
        time.sleep(draw.choice([0, draw.uniform(0, 0.3)]))
        there = runs.events()
        second = runs.begin(*arguments)
        trial.hits += first.is_alive()
        trial.in_training += first.is_alive() and any("phase_started" in events for events in there.values())
        outcomes = [process.end() for process in (first, second)]
        for outcome in outcomes:
            self.check(trial, outcome, (0, 2, ELSEWHERE))
        done = sorted(outcome.status for outcome in outcomes)
        if how == "run" and done != [0, 2]:
            trial.faults.append(f"two runs in one --out ended with {done}, not one of them with 0 and the other with 2")
        self.finish(trial, runs, *([] if how == "several" else ["resume", runs.out, "--quiet"]))

    def lessons(self, trial: Trial, draw: random.Random, runs: Runs) -> None:
        """SIGKILL, up to three times in each of two lessons of a model."""
        folders = self._learn_untouched()
        model, states = runs.root / "model", [{}, *self.learned]
        for number, folder in enumerate(folders):
            arguments = learn_arguments(model, folder, "--quiet")
            for _ in range(draw.randint(1, 3)):
                process = runs.begin(*arguments)
                time.sleep(draw.uniform(0, self.lesson_seconds))
                saved = (model / "learning" / "state.safetensors").exists()
                alive = process.send(signal.SIGKILL, group=True)
                trial.hits += alive
                trial.in_training += alive and saved
                self.check(trial, process.end(), (0, -signal.SIGKILL))
                if not any(same_tensors(model_tensors(model), state) for state in states[number : number + 2]):
                    trial.faults.append(f"after a kill in {folder.name} the model is neither the old nor the new one")
            self.check(trial, runs.begin(*arguments).end(), (0,))
            if not same_tensors(model_tensors(model), states[number + 1]):
                trial.faults.append(f"{folder.name} was continued to another model")
            left = [path.name for path in model.iterdir() if path.name not in (".lock", "current", "generations")]
            trial.faults += [f"{name} is left" for name in left]

    def _learn_untouched(self) -> list[Path]:
        """Learn the lessons once, without a kill; return their folders."""
        root = self.root / "lessons"
        if root.exists():
            return [root / "lesson1", root / "lesson2"]
        folders, whole = make_lessons(self.photos, root), Runs(self.root / "whole lessons", self.photos)
        for folder in folders:
            process = whole.begin(*learn_arguments(whole.root / "model", folder, "--quiet"))
            outcome = process.end()
            if outcome.status != 0:
                raise SystemExit(f"the lesson that nobody touches fails: {outcome}")
            self.lesson_seconds = max(self.lesson_seconds, time.monotonic() - process.began)
            self.learned.append(model_tensors(whole.root / "model"))
        return folders


def model_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model, its held-out images too; nothing if it has not learned anything yet."""
    try:
        model, _ = open_model(path, "cpu")
    except NoModelYet:
        return {}
    except EngramError as error:
        begun = path.exists() and any((path / name).exists() for name in ("current", "generations", "learning"))
        return {str(error): torch.zeros(0)} if begun else {}
    assert model.learner is not None
    held = {f"heldout.{name}": value for name, value in model.heldout.state_dict().items()}
    return {**model.learner.state_dict(), **held, "temperatures": torch.tensor(list(model.temperatures.values()))}


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


KINDS: dict[str, Callable[[ProcessAttack, Trial, random.Random, Runs], None]] = {
    "kills": ProcessAttack.kills,
    "terms": ProcessAttack.terms,
    "interrupts": ProcessAttack.interrupts,
    "pairs": ProcessAttack.pairs,
    "lessons": ProcessAttack.lessons,
}
COUNTS = {"kills": 10, "terms": 10, "interrupts": 5, "pairs": 6, "lessons": 10}


def print_table(trials: Sequence[Trial]) -> None:
    """Print one row for each kind of attack."""
    print(f"{'attack':<12}{'tried':>7}{'landed':>8}{'in training':>13}{'FAULTS':>8}")
    for kind in KINDS:
        those = [trial for trial in trials if trial.kind == kind]
        if those:
            landed, training = sum(trial.hits for trial in those), sum(trial.in_training for trial in those)
            faults = sum(bool(trial.faults) for trial in those)
            print(f"{kind:<12}{len(those):>7}{landed:>8}{training:>13}{faults:>8}")


def print_faults(trial: Trial, seed: int) -> None:
    """Print the faults of an attack, with the command that repeats it."""
    for fault in trial.faults:
        print(f"FAULT {trial.kind}: {fault}")
    if trial.faults:
        again = f"python tools/attack_processes.py --seed {seed} --only {trial.kind} --case {trial.number}"
        print(f"  {again}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print what was found, and return the exit status."""
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=about)
    for kind, count in COUNTS.items():
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"how many (default: {count})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(KINDS), help="only this kind of attack")
    parser.add_argument("--case", type=int, help="only the case of this number; needs --only")
    given = parser.parse_args(arguments)
    if given.case is not None and given.only is None:
        parser.error("--case needs --only")
    kinds = [given.only] if given.only else list(KINDS)
    chosen = [(kind, number) for kind in kinds for number in range(getattr(given, kind))]
    if given.case is not None:
        chosen = [(given.only, given.case)]
    warm_up()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attack-") as temporary:
        attack = ProcessAttack(Path(temporary) / "work", given.seed)
        trials: list[Trial] = []
        for kind, number in chosen:
            trials.append(attack.carry_out(kind, number))
            print_faults(trials[-1], given.seed)
    print_table(trials)
    print(f"\n{len(trials)} attacks in {time.monotonic() - began:.0f} s, seed {given.seed}")
    return int(any(trial.faults for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
