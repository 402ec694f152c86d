"""Attacks the files that engram reads: python tools/attack_files.py [--count N] [--seed S] [--only KIND]

Makes small originals with the real commands: a finished run, an unfinished one, one that stopped inside a stage, a
cache of base stages, a file of results, a paper, a model, a model of a pretrained network, one whose lesson stopped
inside its features, and files of weights. Then it damages a copy and runs what reads it. A case is a fault if a command

- prints a traceback or "unexpected error", ends by a signal, takes much memory, or hangs (more CPU time than
  --limit, or none for some seconds);
- changes a file outside the folder that it may write to, or prints what a file outside says;
- passes on control characters or a script of a file;
- shows another accuracy than the original, or resumes to another result, and does not refuse. ("signed" and "rename"
  compute checksums again, as somebody would who means harm: there the numbers are not compared.)

Each fault is printed with the command that repeats it. The exit status is 1 if there is one. Commands run in forked
copies of one process that has imported engram, so most take tens of milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save, save_file

from engram import EngramError, open_model, open_run, read_mini, resume
from engram.cli.main import main as engram_main
from engram.core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.core.safe_folder import digest
from engram.experiment import feature_pass
from engram.models.lesson import CheckpointPolicy
from engram.models.store.generations import GENERATIONS, MANIFEST, POINTER, pointer_checksum
from engram.nn.backbones import build_backbone
from engram.nn.pretrained import VARIABLE, find_weights, load_weights
from engram.reproduce.records import content_digest
from engram.runs.reader import config_hash

WAITING = 5.0  # seconds without CPU time after which a command hangs
MEMORY_BYTES = 2**30  # that a command may take beyond what the process has
LONGEST_MESSAGE = 10_000  # characters on stderr
TOLERANCE = 1e-6  # as of metrics that are computed again
SECRET = "SECRET-7f3a91"
SCRIPT = "<script>alert(7)</script>"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
SIZES = {"train": 8, "test": 5}  # images of a class
TINY = ("--base", "2", "--increment", "2", "--memory", "per_class=2", "--epochs", "1", "--finetune-epochs", "1")
TINY += ("--batch-size", "16", "--backbone", "resnet10", "--device", "cpu", "--threads", "1")
# A model of a pretrained network: a lesson takes a fraction of a second, and saves its features every few images.
STATISTICS = ("--method", "lda", "--backbone", "resnet10", "--image-size", "32", "--holdout", "0.6")
FEATURE_BATCH = 4
KNOWN = "efficientnet-lite0"  # weights that an installed package carries
PAPER = """
title = "A paper in miniature"
published = "numbers.json"

[methods]
"AFC" = { recipe = "afc" }
"Replay" = { recipe = "replay" }

[[experiment]]
name = "table1"
title = "Memory"
published = "memory"
recipe = "{recipe}-folder"
set = ["memory=per_class={kept}", "base=2", "increment=2", "backbone=resnet10"]
column = "{kept} kept"
orders = [1, 2]

[[experiment]]
name = "figure1"
kind = "curves"
recipe = "{recipe}-folder"
set = ["memory=per_class=2", "base=2", "increment=2", "backbone=resnet10"]
column = "2 kept"
columns = [{}]
rows = [{ method = "AFC", inference = "CNN" }, { method = "Replay", label = "none" }]
orders = ["1"]
note = "small"

[[remark]]
experiment = "table1"
rows = ["AFC (CNN)"]
text = "The numbers were made up."
"""
PUBLISHED = {
    "tables": [
        {
            "id": "memory",
            "title": "Memory",
            "columns": [{"kept": 2}, {"kept": 4}],
            "rows": [
                {"method": "AFC", "inference": "CNN", "values": [{"mean": 50.0, "std": 6.0}, {"mean": 20.0}]},
                {"method": "Replay", "inference": "NME", "values": [{"mean": 33.0, "std": 0.5}, None]},
            ],
        }
    ]
}


# Commands, each in a forked copy of this process


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its status (the signal if negative), and what it printed."""

    status: int
    out: str
    err: str
    seconds: float
    hung: bool = False
    megabytes: float = 0.0


def warm_up() -> None:
    """Import all that the commands need."""
    torch.set_num_threads(1)
    feature_pass.BATCH["cpu"] = FEATURE_BATCH
    os.environ["ENGRAM_COMMIT"] = "attack"  # otherwise each command asks git
    for name in ("run", "list_all", "write_pages", "reproduce", "learn", "info", "predict"):
        importlib.import_module(f"engram.cli.commands.{name}")
    importlib.import_module("engram.report.page")


def start(action: Callable[[], int], folder: Path, home: Path, log: Path) -> int:
    """Fork a process that carries out the action in a folder, and return its id. It prints to LOG.out and LOG.err."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _carry_out(action, folder, home, log)
    return child


def _carry_out(action: Callable[[], int], folder: Path, home: Path, log: Path) -> NoReturn:
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ["ENGRAM_DATA"] = str(home)
        for number, target in ((0, os.devnull), (1, f"{log}.out"), (2, f"{log}.err")):
            handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(handle, number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "rw"[i > 0], encoding="utf-8") for i in range(3))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY_BYTES // 4, MEMORY_BYTES // 4))
        status = action()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `python -m engram` does at its end
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait(child: int, log: Path, limit: float) -> Outcome:
    """Wait for a process of `start`; if it hangs, it is killed with all that it started.

    It hangs after that many seconds of CPU time, or if it took none for WAITING seconds. Seconds of the clock would
    count what others do on a busy machine.
    """
    began, hung = time.monotonic(), False
    worked, since = 0.0, began
    handle = os.pidfd_open(child)
    while not select.select([handle], [], [], 0.2)[0]:
        spent, now = cpu_seconds(child), time.monotonic()
        if spent > worked:
            worked, since = spent, now
        if not hung and (spent > limit or now - since > WAITING):
            hung = True
            os.killpg(child, signal.SIGKILL)
    os.close(handle)
    _, code, usage = os.wait4(child, 0)
    out, err = (Path(f"{log}.{name}").read_text(encoding="utf-8", errors="backslashreplace") for name in ("out", "err"))
    status = os.waitstatus_to_exitcode(code)
    return Outcome(status, out, err, time.monotonic() - began, hung, usage.ru_maxrss / 1024)


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def run_command(action: Callable[[], int], folder: Path, home: Path, log: Path, limit: float = 20.0) -> Outcome:
    """Carry out an action in a forked process and wait for it."""
    return wait(start(action, folder, home, log), log, limit)


def command(*arguments: object) -> Callable[[], int]:
    """The action that runs `engram` with these arguments."""
    return lambda: engram_main([str(argument) for argument in arguments])


def print_scores(run: Path) -> Callable[[], int]:
    """The action that opens a run in Python and prints its scores of some images."""

    def action() -> int:
        try:
            trained = open_run(run)
            images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
            print(json.dumps({"scores": trained.scores(images).tolist(), "stages": trained.stages}))
        except EngramError as error:
            print(f"engram: {error}", file=sys.stderr)
            return 2
        return 0

    return action


def print_weights(folder: Path) -> Callable[[], int]:
    """The action that reads known weights and files of weights, and prints the record of the known ones."""

    def action() -> int:
        os.environ[VARIABLE] = str(folder)
        try:
            record, _ = load_weights(KNOWN)
            shown = {
                "side": record.image_size,
                "mean": record.mean,
                "std": record.std,
                "sha": int(record.digest[:12], 16),
            }
            print(json.dumps(shown))
            for file in ("archive.pth", "legacy.pth"):
                load_weights(folder / file, "resnet10")
        except EngramError as error:
            print(f"engram: {error}", file=sys.stderr)
            return 2
        return 0

    return action


# Originals


def make_photos(folder: Path, classes: int = 4) -> Path:
    """Write images of the embedded data set as a folder of class folders."""
    store = read_mini()
    for name, split in (("train", store.train), ("test", store.test)):
        for label in range(classes):
            place = folder / name / store.class_names[label]
            place.mkdir(parents=True)
            for number, row in enumerate(np.flatnonzero(split.class_ids == label)[: SIZES[name]]):
                Image.fromarray(split.images[row]).save(place / f"{number}.png")
    return folder


def make_lessons(photos: Path, folder: Path) -> list[Path]:
    """Divide the classes of `make_photos` into two lessons, and write the weights of a network: weights.safetensors."""
    backbone = build_backbone("resnet10", torch.Generator().manual_seed(5))
    folder.mkdir()
    tensors = {name: value.contiguous() for name, value in backbone.state_dict().items()}
    save_file(tensors, folder / "weights.safetensors")
    for number, place in enumerate(sorted((photos / "train").iterdir())):
        shutil.copytree(place, folder / f"lesson{number // 2 + 1}" / place.name)
    return [folder / "lesson1", folder / "lesson2"]


def learn_arguments(model: object, lesson: Path, *more: object) -> list[object]:
    """The arguments that teach a model a lesson of `make_lessons`."""
    first = [*STATISTICS, "--weights", lesson.parent / "weights.safetensors"] if lesson.name == "lesson1" else []
    return ["learn", model, lesson, *first, "--threads", 1, "--checkpoint-minutes", 0, *more]


class Originals:
    """The files to attack: made once, copied for each case."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.log = root / "log"
        self.photos = make_photos(root / "photos")
        self.made: set[str] = set()

    def do(self, *arguments: object, home: Path | None = None) -> None:
        """Run a command that must succeed."""
        outcome = run_command(command(*arguments), self.root, home or self.home, self.log)
        if outcome.status != 0:
            raise SystemExit(f"the original could not be made: engram {arguments}: {outcome}")

    def run(self, name: str, *more: object) -> Path:
        """Make a run once; `more` are further options."""
        if name not in self.made:
            self.made.add(name)
            self.do("run", "afc-folder", "--data", self.photos, *TINY, "--quiet", "--out", self.root / name, *more)
        return self.root / name

    def finished(self) -> Path:
        """A complete run, whose base stage is in the cache."""
        return self.run("finished")

    def other(self) -> Path:
        """A complete run with another seed, whose base stage is in the cache too."""
        return self.run("other", "--seed", 2)

    def unfinished(self) -> Path:
        """A run that stopped after its base stage."""
        return self.run("unfinished", "--stop-after-stage", 0)

    def inside(self) -> Path:
        """A run that stopped inside its second stage."""
        place = self.root / "inside"
        if "inside" not in self.made:
            self.made.add("inside")
            shutil.copytree(self.unfinished(), place)

            def action() -> int:
                asked = iter([False])
                list(resume(place, stop=lambda: next(asked, True)))
                return 0

            outcome = run_command(action, self.root, self.home, self.log)
            if outcome.status != 0:
                raise SystemExit(f"the original could not be made: {outcome}")
        return place

    def cache(self) -> Path:
        """A data folder with two base stages in its cache."""
        for make in (self.finished, self.other):
            make()
        return self.home

    def results(self) -> Path:
        """A folder with a file of results of two runs."""
        place = self.root / "results"
        if not place.exists():
            place.mkdir()
            self.do("results", "merge", place / "all.jsonl", self.finished(), self.other())
        return place

    def paper(self) -> Path:
        """A folder with a paper and its published numbers."""
        place = self.root / "paper"
        if not place.exists():
            place.mkdir()
            (place / "paper.toml").write_text(PAPER)
            (place / "numbers.json").write_text(json.dumps(PUBLISHED, indent=1))
        return place

    def model(self) -> Path:
        """A model that learned two classes."""
        place = self.root / "model"
        if not place.exists():
            lesson = self.root / "two classes"
            for folder in sorted((self.photos / "train").iterdir())[:2]:
                shutil.copytree(folder, lesson / folder.name)
            self.do("learn", place, lesson, "--quiet", "--backbone", "resnet10", "--epochs", 1, "--threads", 1)
        return place

    def lessons(self) -> list[Path]:
        """The folders of two lessons."""
        place = self.root / "lessons"
        return [place / "lesson1", place / "lesson2"] if place.exists() else make_lessons(self.photos, place)

    def pretrained(self) -> Path:
        """A model of a pretrained network that learned two lessons."""
        place = self.root / "pretrained"
        if not place.exists():
            for lesson in self.lessons():
                self.do(*learn_arguments(place, lesson, "--quiet"))
        return place

    def lesson(self) -> Path:
        """The same model, whose second lesson was killed after some features had been saved."""
        place = self.root / "lesson"
        if not place.exists():
            first, second = self.lessons()
            self.do(*learn_arguments(place, first, "--quiet"))
            write = CheckpointPolicy.write

            def write_and_end(self: CheckpointPolicy, checkpoint: Checkpoint) -> NoReturn:
                write(self, checkpoint)
                os._exit(0)

            def action() -> int:
                CheckpointPolicy.write = write_and_end
                return command(*learn_arguments(place, second, "--quiet"))()

            outcome = run_command(action, self.root, self.home, self.log)
            if outcome.status != 0 or not (place / "learning").exists():
                raise SystemExit(f"the original could not be made: {outcome}")
        return place

    def weights(self) -> Path:
        """Known weights as they were converted, and two files that torch saved."""
        place = self.root / "weights"
        if not place.exists():
            os.environ[VARIABLE] = str(place)
            if find_weights(KNOWN) is None:
                raise SystemExit(f"the weights {KNOWN} are not installed")
            state = build_backbone("resnet10", torch.Generator().manual_seed(5)).state_dict()
            torch.save(state, place / "archive.pth")
            torch.save(state, place / "legacy.pth", _use_new_zipfile_serialization=False)
        return place


# What the commands show


Numbers = dict[str, float]


def flatten(data: Any, name: str = "") -> Numbers:
    """The numbers in plain data by their path, without times."""
    if isinstance(data, bool) or "seconds" in name or name.endswith(".engram"):
        return {}
    if isinstance(data, int | float):
        return {name: float(data)} if abs(data) < 1e300 else {name: math.inf}
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found: Numbers = {}
    for key, value in items:
        found |= flatten(value, f"{name}.{key}")
    return found


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of a text."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def shown_runs(arena: Path, outcome: Outcome) -> Numbers:
    """The averages in the list of runs."""
    return flatten([row["average"] for row in json.loads(outcome.out)], "average")


def shown_result(arena: Path, outcome: Outcome) -> Numbers:
    """The result in the last event."""
    results = [event["result"] for event in json_lines(outcome.out) if event.get("event") == "run_finished"]
    return flatten(results[-1]) if results else {}


def shown_tables(arena: Path, outcome: Outcome) -> Numbers:
    """The accuracies in the files of a report."""
    folder, found = arena / "out" / "report_files", {}
    for pattern in ("summary.csv", "accuracy_matrix_*.csv", "accuracy_per_stage.csv"):
        for number, file in enumerate(sorted(folder.glob(pattern))):
            for line, row in enumerate(csv.reader(file.open(encoding="utf-8", newline=""))):
                for column, cell in enumerate(row):
                    if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", cell):
                        found[f"{pattern} {number} {line} {column}"] = float(cell)
    return found


def merged(arena: Path, outcome: Outcome) -> Numbers:
    """The results in the merged file, by seed."""
    file = arena / "out" / "merged.jsonl"
    found: Numbers = {}
    for record in json_lines(file.read_text(encoding="utf-8")):
        found |= flatten(record["result"], f"seed {record['result']['seed']}")
    return found


def shown_json(arena: Path, outcome: Outcome) -> Numbers:
    """All numbers in lines of JSON."""
    found: Numbers = {}
    for number, line in enumerate(json_lines(outcome.out)):
        found |= flatten(line, str(number))
    return {name: value for name, value in found.items() if not re.search("bytes|created|date|time", name)}


def learned_head(arena: Path, outcome: Outcome) -> Numbers:
    """The weights of the model's head, and the classes that they are of."""
    model, _ = open_model(arena / "target", "cpu")
    assert model.learner is not None
    return flatten(model.learner.network.head.get_parameter("weight").tolist(), f"{len(model.classes)} classes")


def nothing(arena: Path, outcome: Outcome) -> Numbers:
    """No number is compared."""
    return {}


@dataclass(frozen=True)
class Reading:
    """A command that reads a target. writes: the paths in the arena that it may change. numbers: what it shows."""

    name: str
    action: Callable[[Path], Callable[[], int]]
    numbers: Callable[[Path, Outcome], Numbers]
    writes: tuple[str, ...] = ()


LIST = Reading("list runs", lambda arena: command("list", "runs", "--root", arena, "--json"), shown_runs)
OPEN = Reading("open_run", lambda arena: print_scores(arena / "target"), shown_json)
RESUME = Reading(
    "resume",
    lambda arena: command("resume", arena / "target", "--json", "--no-cache"),
    shown_result,
    ("target",),
)
REPORT = Reading(
    "report",
    lambda arena: command("report", arena / "target", "--out", arena / "out" / "report.html"),
    shown_tables,
    ("out/report.html", "out/report_files"),
)
MERGE_RUN = Reading(
    "results merge",
    lambda arena: command("results", "merge", arena / "out" / "merged.jsonl", arena / "target"),
    merged,
    ("out/merged.jsonl",),
)
PLAN = Reading(
    "reproduce --dry-run",
    lambda arena: command(*_reproduce(arena), "--dry-run"),
    nothing,
)
PAGE = Reading(
    "reproduce --no-run",
    lambda arena: command(*_reproduce(arena), "--no-run", "--page", arena / "out" / "paper.html"),
    nothing,
    ("out/paper.html", "out/paper_files"),
)
LIST_CACHE = Reading("list cache", lambda arena: command("list", "cache", "--json"), nothing)
INFO = Reading("info", lambda arena: command("info", arena / "target", "--json"), shown_json)


WEIGHTS_READ = Reading("weights", lambda arena: print_weights(arena / "target"), shown_json, ("target",))


def _reproduce(arena: Path) -> list[object]:
    paper = arena / "target" / "paper.toml"
    return ["reproduce", "all", "--paper", paper, "--out", arena / "runs", "--results", "none", "--data", arena / "out"]


def _run_with_cache(photos: Path) -> Reading:
    def action(arena: Path) -> Callable[[], int]:
        return command("run", "afc-folder", "--data", photos, *TINY, "--json", "--out", arena / "out" / "run")

    return Reading("run with the cache", action, shown_result, ("out/run", "target"))


def _predict(photos: Path) -> Reading:
    images = min((photos / "test").iterdir())

    def action(arena: Path) -> Callable[[], int]:
        return command("predict", arena / "target", images, "--json", "--threads", 1)

    return Reading("predict", action, shown_json)


def _learn(lesson: Path) -> Reading:
    def action(arena: Path) -> Callable[[], int]:
        return command(*learn_arguments(arena / "target", lesson, "--json"))

    return Reading("learn", action, learned_head, ("target",))


def _results_page(paper: Path) -> Reading:
    def action(arena: Path) -> Callable[[], int]:
        return command("results", "page", arena / "out" / "page.md", arena / "target", "--paper", paper / "paper.toml")

    return Reading("results page", action, nothing, ("out/page.md",))


@dataclass(frozen=True)
class Target:
    """Files to attack, and the commands that read them. other: the same files with other content."""

    make: Callable[[Originals], Path]
    readings: Callable[[Originals], list[Reading]]
    other: Callable[[Originals], Path] | None = None


RUN_READINGS = [LIST, OPEN, MERGE_RUN]
TARGETS = {
    "finished": Target(Originals.finished, lambda _: [*RUN_READINGS, REPORT, RESUME], Originals.other),
    "unfinished": Target(Originals.unfinished, lambda _: [LIST, OPEN, RESUME], Originals.other),
    "inside": Target(Originals.inside, lambda _: [LIST, RESUME], Originals.other),
    "cache": Target(Originals.cache, lambda originals: [LIST_CACHE, _run_with_cache(originals.photos)]),
    "results": Target(Originals.results, lambda originals: [MERGE_RUN, _results_page(originals.paper())]),
    "paper": Target(Originals.paper, lambda _: [PLAN, PAGE]),
    "model": Target(Originals.model, lambda originals: [INFO, _predict(originals.photos)]),
    "pretrained": Target(Originals.pretrained, lambda originals: [INFO, _predict(originals.photos)], Originals.lesson),
    "lesson": Target(Originals.lesson, lambda originals: [INFO, _learn(originals.lessons()[1])], Originals.pretrained),
    "weights": Target(Originals.weights, lambda _: [WEIGHTS_READ]),
}


# Mutations


JUNK = {
    "null": "null",
    "true": "true",
    "-1": "-1",
    "0": "0",
    "3": "3",
    "0.5": "0.5",
    "2**63": str(2**63),
    "2**31": str(2**31),
    "NaN": "NaN",
    "Infinity": "Infinity",
    "1e308": "1e308",
    "1e400": "1e400",
    "5,000 digits": "7" * 5000,
    "-5,000 digits": "-" + "7" * 5000,
    "list": "[]",
    "list of lists": "[[], [1]]",
    "object": "{}",
    "object in object": '{"a": {"b": null}}',
    "10,000 lists": "[" * 10_000 + "]" * 10_000,
    "10,000 objects": '{"a": ' * 10_000 + "1" + "}" * 10_000,
    "100 lists": "[" * 100 + "]" * 100,
    "empty text": '""',
    "text": '"x"',
    "number as text": '"12"',
    "a megabyte": '"' + "x" * 1_000_000 + '"',
    "300 letters": '"' + "y" * 300 + '"',
    "path": '"/../../victim"',
    "path to a folder": '"../../outside/"',
    "escape sequence": '"\\u001b[31mred\\u0007\\u009b2J"',
    "lines": '"one\\ntwo\\r\\nthree"',
    "script": json.dumps(SCRIPT),
    "half a character": '"\\ud800"',
    "zero byte": '"a\\u0000b"',
    "braces": '"{0} {x!r} %s"',
    "markup": '"[bold]x[/nothing] $x$ \\\\frac"',
}
TOML_JUNK = {
    name: text
    for name, text in JUNK.items()
    if name not in ("null", "NaN", "Infinity", "object in object", "10,000 objects", "half a character")
} | {"nan": "nan", "inf": "inf", "date": "1979-05-27", "table": "{ a = { b = 1 } }", "numbers": "[1, 2.5]"}
PLAIN_JUNK: list[Any] = [None, True, -1, 0, 3, 0.5, 2**40, 2**70, 10**400, math.nan, math.inf, 1e308, [], {}, [[]]]
PLAIN_JUNK += ["", "x", "12", "/../../victim", SCRIPT, "y" * 300, [1, 2, 3], {"a": None}]
NAMES = ("x", "__class__", "/../../victim", "\x1b[2J", SCRIPT, "", "y" * 300)


class NotApplicable(Exception):
    """The mutation does not fit the file."""


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in plain data, without the whole."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def edit_json(data: Any, draw: random.Random) -> tuple[str, str]:
    """JSON text of the data with one change, and what was changed. The data is changed too."""
    marks: dict[str, str] = {}
    found = list(places(data))
    if not found or draw.random() < 0.02:
        name = draw.choice(sorted(JUNK))
        return JUNK[name], f"the whole = {name}"
    path = draw.choice(found)
    above = data
    for key in path[:-1]:
        above = above[key]
    where, value, how = ".".join(map(str, path)), above[path[-1]], draw.random()
    if how < 0.1:
        del above[path[-1]]
        what = f"{where} removed"
    elif how < 0.15 and isinstance(above, dict):
        name = draw.choice(NAMES)
        above[name] = value
        what = f"{where} also as {name[:20]!r}"
    elif how < 0.2 and isinstance(above, dict):
        name = draw.choice(NAMES)
        above[name] = above.pop(path[-1])
        what = f"{where} renamed to {name[:20]!r}"
    elif how < 0.25 and isinstance(above, list):
        above.append(value)
        what = f"{where} twice"
    elif how < 0.5 and isinstance(value, int | float) and not isinstance(value, bool):
        above[path[-1]] = value + draw.choice([1, -1, 0.5, 10])
        what = f"{where} = {above[path[-1]]} instead of {value}"
    else:
        name = draw.choice(sorted(JUNK))
        above[path[-1]] = mark = "@the marked place@"
        marks[json.dumps(mark)] = JUNK[name]
        what = f"{where} = {name}"
    text = json.dumps(data)
    for mark, raw in marks.items():
        text = text.replace(mark, raw)
    return text, what


def edit_plain(data: Any, draw: random.Random) -> str:
    """Change plain data in one place, and return what was changed."""
    found = list(places(data))
    path = draw.choice(found)
    above = data
    for key in path[:-1]:
        above = above[key]
    if draw.random() < 0.1:
        del above[path[-1]]
        return f"{'.'.join(map(str, path))} removed"
    above[path[-1]] = draw.choice(PLAIN_JUNK)
    return f"{'.'.join(map(str, path))} = {repr(above[path[-1]])[:30]}"


def files_in(target: Path) -> list[Path]:
    """The files of a target."""
    return sorted(path for path in target.rglob("*") if path.is_file())


def some_file(target: Path, draw: random.Random, suffixes: tuple[str, ...] = ()) -> Path:
    """Choose a file that has content, each kind of file as often as the others."""
    found = [path for path in files_in(target) if path.stat().st_size and (not suffixes or path.suffix in suffixes)]
    found = [path for path in found if path.suffix or path.name == "current"]
    if not found:
        raise NotApplicable
    return draw.choice(found)


def edit(target: Path, draw: random.Random, originals: Originals) -> str:
    """Change one value of a JSON file, a line of TOML, or the JSON inside a file of tensors."""
    file = some_file(target, draw, (".json", ".jsonl", ".toml", ".safetensors", ""))
    if file.suffix == ".toml":
        what = _edit_toml(file, draw)
    elif file.suffix == ".jsonl":
        lines = file.read_text(encoding="utf-8").splitlines()
        number = draw.randrange(len(lines))
        lines[number], what = edit_json(json.loads(lines[number]), draw)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif file.suffix == ".safetensors":
        what = _edit_header(file, draw)
    else:
        text, what = edit_json(json.loads(file.read_text(encoding="utf-8")), draw)
        file.write_text(text, encoding="utf-8")
    return f"{file.relative_to(target)}: {what}"


def _edit_toml(file: Path, draw: random.Random) -> str:
    lines = file.read_text().splitlines()
    number = draw.choice([i for i, line in enumerate(lines) if " = " in line])
    key, _, rest = lines[number].partition(" = ")
    if draw.random() < 0.1:
        lines[number], what = "", f"{key} removed"
    else:
        name = draw.choice(sorted(TOML_JUNK))
        inner = list(re.finditer(r'"[^"]*"|\b\d+\b', rest))
        if inner and draw.random() < 0.5:
            match = draw.choice(inner)
            lines[number], what = f"{key} = {rest[: match.start()]}{TOML_JUNK[name]}{rest[match.end() :]}", "part of "
        else:
            lines[number], what = f"{key} = {TOML_JUNK[name]}", ""
        what += f"{key} = {name}"
    file.write_text("\n".join(lines), encoding="utf-8")
    return f"line {number + 1}: {what}"


def _edit_header(file: Path, draw: random.Random) -> str:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    inner = header.get("__metadata__", {}).get("engram")
    if inner is not None and draw.random() < 0.8:
        entry = json.loads(inner)
        if isinstance(entry.get("data"), str) and draw.random() < 0.9:
            entry["data"], what = edit_json(json.loads(entry["data"]), draw)
            header["__metadata__"]["engram"] = json.dumps(entry)
        else:
            header["__metadata__"]["engram"], what = edit_json(entry, draw)
        text = json.dumps(header)
    else:
        text, what = edit_json(header, draw)
    encoded = text.encode(errors="surrogatepass")
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[end:])
    return f"header {what}"


def signed(target: Path, draw: random.Random, originals: Originals) -> str:
    """Change a checkpoint or a configuration and compute its checksum again."""
    file = some_file(target, draw, (".safetensors", ".json", ".jsonl"))
    where = file.relative_to(target)
    if where.parts[0] == GENERATIONS:
        return f"{where}: {_sign_model(target, file, draw)}"
    if file.suffix == ".safetensors":
        try:
            checkpoint = load_checkpoint(file)
        except EngramError:
            raise NotApplicable from None
        tensors = dict(checkpoint.tensors)
        data = dict(checkpoint.data)
        what = _edit_tensors(tensors, draw) if draw.random() < 0.4 or not data else edit_plain(data, draw)
        save_checkpoint(file, Checkpoint(tensors, data))
        return f"{where}: {what}"
    lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = draw.randrange(len(lines))
    data = json.loads(lines[number])
    if not isinstance(data.get("config"), dict) or "config_hash" not in data:
        raise NotApplicable
    whole = "digest" in data and draw.random() < 0.5
    what = edit_plain(data, draw) if whole else f"config.{edit_plain(data['config'], draw)}"
    lines[number] = _sign(json.dumps(data))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{where}: {what}"


def _sign_model(target: Path, file: Path, draw: random.Random) -> str:
    """Change the weights or the model.json of a generation, and compute all checksums above again."""
    manifest_file, pointer_file = file.parent / MANIFEST, target / POINTER
    if not manifest_file.exists():  # a picture
        raise NotApplicable
    manifest, pointer = json.loads(manifest_file.read_text()), json.loads(pointer_file.read_text())
    if file == manifest_file:
        what = edit_plain(manifest, draw)
    else:
        tensors = load(file.read_bytes())
        what = _edit_tensors(tensors, draw)
        content = save({name: value.contiguous() for name, value in tensors.items()})
        file.unlink()  # it may be a link to a file of another generation
        file.write_bytes(content)
        manifest["files"][file.name] = [len(content), digest(content)]
    manifest_file.write_text(json.dumps(manifest))
    for entry in (pointer, pointer.get("previous", {})):
        if entry.get("generation") == file.parent.name:
            entry["digest"] = digest(manifest_file.read_bytes())
    pointer_file.write_text(json.dumps(pointer | {"checksum": pointer_checksum(pointer)}))
    return what


def rename(target: Path, draw: random.Random, originals: Originals) -> str:
    """Replace a name by a hostile one wherever it is: values, keys, tensors; checksums are computed again."""
    names = {
        json.dumps(name) for file in files_in(target) if file.suffix in (".json", ".toml") for name in texts_in(file)
    }
    names |= {json.dumps(name) for name in ("afc", "afc-folder", "photos") if target.parent.name == "results"}
    if not names:
        raise NotApplicable
    old, new = draw.choice(sorted(names)), json.dumps(draw.choice(NAMES))
    for file in files_in(target):
        if file.suffix in (".json", ".jsonl", ".toml"):
            lines = file.read_text(encoding="utf-8").replace(old, new)
            written = [_sign(line) for line in lines.splitlines()] if file.suffix == ".jsonl" else [_sign(lines)]
            file.write_text("\n".join(written) + "\n", encoding="utf-8")
        elif file.suffix == ".safetensors" and file.parent.name == "stages":
            content = file.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            header = content[8:end].replace(f".{old[1:]}".encode(), f".{new[1:]}".encode())
            file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return f"{old} renamed to {new[:40]}"


def texts_in(file: Path) -> list[str]:
    """The names in a file: short texts that are values or keys."""
    if file.suffix == ".toml":
        return re.findall(r'"([A-Za-z0-9. -]+)"', file.read_text())
    return re.findall(r'"([A-Za-z0-9_ -]{2,40})"(?!:)', file.read_text(encoding="utf-8"))


def _sign(text: str) -> str:
    """The text of a run or a line of results with the checksums of its configuration and of itself, if it is one."""
    with contextlib.suppress(ValueError):
        data = json.loads(text)
        if isinstance(data, dict) and isinstance(data.get("config"), dict) and "config_hash" in data:
            data["config_hash"] = config_hash(data["config"])
        if isinstance(data, dict) and "digest" in data:
            try:
                data["digest"] = content_digest(data)
            except ValueError:  # NaN: a line without a checksum can be read too
                del data["digest"]
        return json.dumps(data)
    return text


def _edit_tensors(tensors: dict[str, torch.Tensor], draw: random.Random) -> str:
    name = draw.choice(sorted(tensors))
    how = draw.choice(["removed", "renamed", "flat", "double", "not finite", "empty", "longer", "far out of range"])
    value = tensors.pop(name)
    if how == "renamed":
        tensors["x"] = value
    elif how == "flat":
        tensors[name] = value.flatten()[None]
    elif how == "double":
        tensors[name] = value.to(torch.float64 if value.dtype != torch.float64 else torch.int32)
    elif how == "not finite":
        tensors[name] = torch.full_like(value, math.nan) if value.is_floating_point() else torch.full_like(value, -1)
    elif how == "empty":
        tensors[name] = value.flatten()[:0]
    elif how == "longer":
        tensors[name] = torch.cat([value.flatten(), value.flatten()]) if value.numel() else torch.zeros(3)
    elif how == "far out of range":
        tensors[name] = (value + 100).to(value.dtype)
    return f"the tensor {name} {how}"


def truncate(target: Path, draw: random.Random, originals: Originals) -> str:
    """Cut a file off."""
    file = some_file(target, draw)
    size = draw.choice([0, draw.randrange(file.stat().st_size), file.stat().st_size - 1])
    os.truncate(file, size)
    return f"{file.relative_to(target)}: cut off at {size}"


def flip(target: Path, draw: random.Random, originals: Originals) -> str:
    """Flip one bit of a file; in a file of tensors, half of the time in its header."""
    file = some_file(target, draw)
    content = bytearray(file.read_bytes())
    reach = min(len(content), 3000) if draw.random() < 0.5 else len(content)
    place, bit = draw.randrange(reach), draw.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"{file.relative_to(target)}: bit {bit} of byte {place}"


def swap(target: Path, draw: random.Random, originals: Originals) -> str:
    """Exchange two files, or take one from elsewhere; both are whole."""
    file = some_file(target, draw)
    where, other = file.relative_to(target), OTHERS.get(target.parent.name)
    if other is not None and draw.random() < 0.5 and (other(originals) / where).exists():
        shutil.copyfile(other(originals) / where, file)
        return f"{where}: that of {other.__name__}"
    alike = [path for path in files_in(target) if path.suffix == file.suffix and path != file and path.stat().st_size]
    second = draw.choice(alike) if alike and draw.random() < 0.7 else some_file(target, draw)
    first_content, second_content = file.read_bytes(), second.read_bytes()
    file.write_bytes(second_content)
    second.write_bytes(first_content)
    return f"{where}: exchanged with {second.relative_to(target)}"


LINKS = {
    "copy": "the same file outside",
    "secret": "another file outside",
    "zeros": "/dev/zero",
    "pipe": "a pipe outside",
    "itself": "itself",
    "nothing": "a file outside that does not exist",
    "folder": "the same folder outside",
}


def link(target: Path, draw: random.Random, originals: Originals) -> str:
    """Replace a file, or the folder that holds it, by a link."""
    file = draw.choice(files_in(target))
    outside, where = target.parent / "outside", file.relative_to(target)
    how = draw.choice(sorted(LINKS if target.parent.name != "paper" else {"copy", "secret", "itself", "nothing"}))
    if how == "folder" and (file.parent == target or target.parent.name == "cache"):
        how = "copy"  # a cache may be on another disk
    moved = outside / f"moved-{file.name}"
    if how == "folder":
        folder = file.parent
        shutil.move(folder, outside / "moved")
        folder.symlink_to(outside / "moved")
        return f"{folder.relative_to(target)}: a link to {LINKS[how]}"
    shutil.move(file, moved)
    pipe = outside / "pipe"
    os.mkfifo(pipe)
    ends = {"copy": moved, "secret": outside / "victim.txt", "zeros": "/dev/zero", "pipe": pipe, "itself": file}
    file.symlink_to(ends.get(how, outside / "nothing here"))
    return f"{where}: a link to {LINKS[how]}"


def hard(target: Path, draw: random.Random, originals: Originals) -> str:
    """Give a file a second name outside: what is written into one is in the other."""
    file = draw.choice(files_in(target))
    os.link(file, target.parent / "outside" / "second")
    return f"{file.relative_to(target)}: a hard link"


def fifo(target: Path, draw: random.Random, originals: Originals) -> str:
    """Replace a file by a pipe that nobody writes to."""
    file = draw.choice(files_in(target))
    file.unlink()
    os.mkfifo(file)
    return f"{file.relative_to(target)}: a pipe"


def folder(target: Path, draw: random.Random, originals: Originals) -> str:
    """Replace a file by a folder, or a folder by a file."""
    file = draw.choice(files_in(target))
    where = file.relative_to(target)
    if file.parent != target and draw.random() < 0.4:
        shutil.rmtree(file.parent)
        file.parent.write_text("x")
        return f"{where.parent}: a file"
    file.unlink()
    file.mkdir()
    if draw.random() < 0.5:
        (file / "x").write_text("x")
    return f"{where}: a folder"


def delete(target: Path, draw: random.Random, originals: Originals) -> str:
    """Delete a file or a folder."""
    file = draw.choice(files_in(target))
    if file.parent != target and draw.random() < 0.3:
        shutil.rmtree(file.parent)
        return f"{file.parent.relative_to(target)}: deleted"
    file.unlink()
    return f"{file.relative_to(target)}: deleted"


OTHERS: dict[str, Callable[[Originals], Path]] = {
    name: target.other for name, target in TARGETS.items() if target.other is not None
}
KINDS: dict[str, Callable[[Path, random.Random, Originals], str]] = {
    "edit": edit,
    "signed": signed,
    "rename": rename,
    "truncate": truncate,
    "flip": flip,
    "swap": swap,
    "link": link,
    "hard": hard,
    "fifo": fifo,
    "folder": folder,
    "delete": delete,
}
WEIGHTS = {"edit": 5, "flip": 2, "link": 2, "signed": 2, "rename": 2}  # of the others: 1
# Papers have no checksum. A paper is named by who runs the command, who
# may give a pipe. The time of a cached base stage is set when it is used.
UNFIT = {
    "signed": ("paper", "weights"),
    "rename": ("cache", "model", "pretrained", "lesson", "weights"),
    "fifo": ("paper",),
    "hard": ("cache",),
}


# Cases


@dataclass(frozen=True)
class Case:
    """One mutation. Everything random in it follows from these."""

    seed: int
    kind: str
    target: str
    number: int

    @property
    def repeat(self) -> str:
        """The command that repeats it."""
        return f"python tools/attack_files.py --case {self.kind}:{self.target}:{self.number}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of KIND:TARGET:NUMBER:SEED."""
        kind, target, number, seed = text.split(":")
        if kind not in KINDS or target not in TARGETS:
            raise ValueError(text)
        return cls(int(seed), kind, target, int(number))


@dataclass
class Finding:
    """The result of a case. notes: the faults, one line each."""

    case: Case
    what: str
    refused: bool = False
    faults: list[str] = field(default_factory=list)


def snapshot(arena: Path) -> dict[str, tuple[int, ...]]:
    """All that is in the arena, and files that a path out of it would make."""
    paths = [*arena.rglob("*"), *Path("/").glob("victim*"), *Path(tempfile.gettempdir()).glob("victim*")]
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            rest = (0, 0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns, status.st_ino)
            name = str(path.relative_to(arena)) if path.is_relative_to(arena) else str(path)
            found[name] = (stat.S_IFMT(status.st_mode), *rest)
    return found


def faults_of(outcome: Outcome, megabytes: float) -> Iterator[str]:
    """The faults that the output and the end of a command show."""
    text = outcome.out + outcome.err
    message = " ".join(outcome.err.split())[-300:]
    if outcome.hung:
        yield f"hangs (no end after {outcome.seconds:.0f} s)"
    elif outcome.status < 0:
        yield f"killed by {signal.Signals(-outcome.status).name}"
    if "Traceback (most recent call last)" in text:
        yield f"traceback: {message[-160:]}"
    elif outcome.status == 1 or "unexpected error" in text:
        yield f"unexpected error: {message[:200]}"
    elif not outcome.hung and outcome.status > 0 and outcome.status not in (2, 3):
        yield f"status {outcome.status}: {message}"
    if "not enough memory" in text or outcome.megabytes > megabytes + 700:
        yield f"memory: {outcome.megabytes:.0f} MB, {message[:100]}"
    if outcome.status == 2 and not re.search("^engram: ", outcome.err, re.MULTILINE):
        yield f"status 2 without a message: {message}"
    if CONTROL.search(text):
        found = CONTROL.search(text)
        assert found is not None
        yield f"control character in the output: {text[max(0, found.start() - 40) : found.start() + 5]!r}"
    if SECRET in text:
        yield f"prints what a file outside says: {message[:160]}"
    if len(outcome.err) > LONGEST_MESSAGE:
        yield f"a message of {len(outcome.err):,} characters"


def is_allowed(name: str, writes: Sequence[str]) -> bool:
    """Whether a command may change a path in the arena."""
    return any(name == allowed or name.startswith(f"{allowed}/") for allowed in writes)


class Attack:
    """Carries out cases in a folder."""

    def __init__(self, root: Path, limit: float, keep: bool) -> None:
        (root / "originals").mkdir(parents=True)
        self.originals = Originals(root / "originals")
        self.root, self.limit, self.keep = root, limit, keep
        self.megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.expected: dict[tuple[str, str], Numbers] = {}

    def arena(self, name: str, number: object) -> Path:
        """A copy of a target, with files around it that nothing may touch."""
        arena = self.root / f"case-{number}" / name
        for folder in ("outside", "out"):
            (arena / folder).mkdir(parents=True)
        (arena / "outside" / "victim.txt").write_text(f'{{"the secret": "{SECRET}"}}\n')
        for place in (arena.parent, arena, arena / "out"):
            (place / "victim").write_text(SECRET)
        shutil.copytree(TARGETS[name].make(self.originals), arena / "target")
        if name in ("finished", "unfinished", "inside"):
            # A run that stopped is resumed to what the finished one has.
            self.expect("finished")
        return arena

    def expect(self, name: str) -> None:
        """Record what the commands show of an original."""
        target = TARGETS[name]
        if any(key[0] == name for key in self.expected):
            return
        self.expected[name, ""] = {}
        arena = self.arena(name, f"original-{name}")
        for reading in target.readings(self.originals):
            outcome = self.read(reading, arena)
            faults = list(faults_of(outcome, self.megabytes))
            shown = reading.numbers(arena, outcome)
            if outcome.status != 0 or faults or (reading.numbers is not nothing and not shown):
                raise SystemExit(f"{reading.name} fails on the original {name}: {outcome}")
            self.expected[name, reading.name] = shown
        if name != "finished" and ("finished", "resume") in self.expected:
            found = self.expected.get((name, "resume"))
            if found is not None and differences(found, self.expected["finished", "resume"]):
                raise SystemExit(f"the original {name} is not resumed to the same result")

    def read(self, reading: Reading, arena: Path) -> Outcome:
        """Carry out a command that reads the target."""
        home = arena / "target" if arena.name == "cache" else arena / "home"
        log = self.root / "log"
        return run_command(reading.action(arena), arena / "out", home, log, self.limit)

    def carry_out(self, case: Case) -> Finding | None:
        """Damage a copy and run everything that reads it; None if the mutation does not fit."""
        self.expect(case.target)
        draw = random.Random(f"{case.seed} {case.kind} {case.target} {case.number}")
        arena = self.arena(case.target, f"{case.kind}-{case.target}-{case.number}")
        kept = False
        try:
            finding = Finding(case, KINDS[case.kind](arena / "target", draw, self.originals))
            before = snapshot(arena.parent)
            for reading in TARGETS[case.target].readings(self.originals):
                outcome = self.read(reading, arena)
                after = snapshot(arena.parent)
                found = list(faults_of(outcome, self.megabytes))
                writes = [f"{arena.name}/{name}" for name in reading.writes]
                changed = sorted(name for name in before | after if before.get(name) != after.get(name))
                found += [f"changed {name}" for name in changed if not is_allowed(name, writes)][:3]
                page = arena / "out" / "report.html"
                if SCRIPT in (page.read_text(errors="replace") if page.is_file() else ""):
                    found.append("a script in the page")
                if outcome.status == 0 and not found and case.kind not in ("signed", "rename"):
                    try:
                        shown = reading.numbers(arena, outcome)
                    except (ValueError, KeyError, TypeError, OSError) as error:
                        found.append(f"its output cannot be read: {error!r}")
                    else:
                        found += differences(shown, self.expected[case.target, reading.name])
                        finding.refused |= not shown and reading.numbers is not nothing
                finding.refused |= outcome.status == 2
                finding.faults += [f"{reading.name}: {fault}" for fault in found]
                before = after
            kept = self.keep and bool(finding.faults)
            return finding
        except NotApplicable:
            return None
        finally:
            if not kept:
                shutil.rmtree(arena.parent)


def differences(shown: Numbers, expected: Numbers) -> list[str]:
    """The first number that is not the original's; numbers that the original does not have do no harm."""
    for name, value in shown.items():
        original = expected.get(name, value)
        if not math.isclose(value, original, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return [f"shows another number: {name.lstrip('.')} is {value:g}, the original's {original}"]
    return []


def cases(seed: int, count: int, kinds: Sequence[str], targets: Sequence[str]) -> Iterator[Case]:
    """As many cases as asked for, over all kinds and targets in turn."""
    pairs = [
        (kind, target)
        for kind in kinds
        for target in targets
        for _ in range(WEIGHTS.get(kind, 1))
        if target not in UNFIT.get(kind, ())
    ]
    random.Random(seed).shuffle(pairs)
    numbers: Counter[tuple[str, str]] = Counter()
    for number in range(count if pairs else 0):
        kind, target = pairs[number % len(pairs)]
        yield Case(seed, kind, target, numbers[kind, target])
        numbers[kind, target] += 1


def print_table(findings: Sequence[Finding]) -> None:
    """Print one row for each kind."""
    print(f"{'kind':<10}{'tried':>7}{'refused':>9}{'same':>7}{'FAULTS':>8}")
    for kind in [*KINDS, "all"]:
        those = [finding for finding in findings if kind in (finding.case.kind, "all")]
        if those:
            faults = sum(bool(finding.faults) for finding in those)
            refused = sum(finding.refused and not finding.faults for finding in those)
            print(f"{kind:<10}{len(those):>7}{refused:>9}{len(those) - faults - refused:>7}{faults:>8}")


def print_faults(finding: Finding) -> None:
    """Print the faults of a case, with the command that repeats it."""
    for fault in finding.faults:
        print(f"FAULT {finding.case.target}, {finding.what}\n  {fault}")
    if finding.faults:
        print(f"  {finding.case.repeat}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print what was found, and return the exit status."""
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--count", type=int, default=300, help="number of mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(KINDS), help="only this kind of mutation")
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="only these files (repeatable)")
    parser.add_argument("--case", type=Case.parse, action="append", help="only this case, as printed (repeatable)")
    parser.add_argument(
        "--limit",
        type=float,
        default=20.0,
        help="seconds of CPU time that a command may take",
    )
    parser.add_argument("--keep", type=Path, help="a new folder to work in; the cases with faults stay there")
    given = parser.parse_args(arguments)
    targets = given.target or list(TARGETS)
    chosen = given.case or cases(given.seed, given.count, [given.only] if given.only else list(KINDS), targets)
    warm_up()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attack-") as temporary:
        attack = Attack(given.keep or Path(temporary) / "work", given.limit, given.keep is not None)
        findings: list[Finding] = []
        for case in chosen:
            finding = attack.carry_out(case)
            if finding is not None:
                findings.append(finding)
                print_faults(finding)
                if given.case and not finding.faults:
                    print(f"no fault: {finding.case.target}, {finding.what}")
    print_table(findings)
    print(f"\n{len(findings)} mutations in {time.monotonic() - began:.0f} s")
    return int(any(finding.faults for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
