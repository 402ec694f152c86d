"""Measures `engram learn` as people run it: python tools/measure_learn.py OUT.json TRAIN TEST [--lessons 50,10]

TRAIN and TEST are folders of class folders. The first classes by name are the first lesson, the next ones the second,
and so on, each a process of its own; after each the model is evaluated on the TEST images of all it has learned. Of
every lesson there is the time of its parts and, sampled from nvidia-smi meanwhile, the share of that time in which the
GPU was at work. Options that are not its own are given to `engram learn`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engram.core.io import write_json
from engram.core.provenance import hardware, processor_name, versions

PARTS = ("starting", "reading", "preparing", "training", "finishing")
ENGRAM = [sys.executable, "-m", "engram"]
SAMPLES = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]


class Busy:
    """Samples of how busy the GPU is, percent, each with its time; none where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._process = None
        if shutil.which(SAMPLES[0]):
            self._process = subprocess.Popen(SAMPLES, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.samples.append((time.monotonic(), float(line)))

    def share(self, start: float, end: float) -> float | None:
        """The mean of the samples between two times, 0 to 1."""
        values = [value for at, value in self.samples if start <= at <= end]
        return sum(values) / len(values) / 100 if values else None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def chosen(folder: Path, classes: Sequence[str], into: Path) -> Path:
    """A folder of links to these classes."""
    into.mkdir()
    for name in classes:
        (into / name).symlink_to((folder / name).resolve(), target_is_directory=True)
    return into


def learn(model: Path, images: Path, busy: Busy, more: Sequence[str]) -> dict[str, Any]:
    """One lesson: its parts in seconds, how busy the GPU was in each, and what it learned."""
    started = time.monotonic()
    process = subprocess.Popen(
        [*ENGRAM, "learn", str(model), str(images), "--json", "--method", "afc", *more],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    events = [(time.monotonic(), json.loads(line)) for line in process.stdout]
    if process.wait():
        raise SystemExit(f"engram learn ended with status {process.returncode}")
    ended = time.monotonic()

    def times_of(name: str) -> list[float]:
        return [at for at, event in events if event["event"] == name]

    named = {event["event"]: event for _, event in events}
    read, learned = named["images_read"], named["learned"]
    steps = times_of("progress")
    trained = next(at for at in times_of("working") if at > steps[-1])  # some work comes before the first step too
    rates = sorted(event["images_per_second"] for _, event in events if event["event"] == "progress")
    (known,) = times_of("images_read")
    moments = [started, known - read["seconds"], known, steps[0], trained, ended]
    spans = {part: (moments[place], moments[place + 1]) for place, part in enumerate(PARTS)}
    return {
        "images": read["images"],
        "seconds": ended - started,
        "seconds_by": {part: end - start for part, (start, end) in spans.items()},
        "gpu_busy": busy.share(started, ended),
        "gpu_busy_by": {part: busy.share(*span) for part, span in spans.items()},
        "read_images_per_second": read["images"] / read["seconds"],
        "trained_images_per_second": rates[len(rates) // 2],
        "heldout": {key: learned[key] for key in ("before", "after", "new_accuracy")},
    }


def evaluate(model: Path, images: Path) -> dict[str, float]:
    """Percent of the images that the model calls what they are, by each predictor, side by side."""
    processes: dict[str, subprocess.Popen[str]] = {}
    for by in ("cnn", "nme"):
        command = [*ENGRAM, "evaluate", str(model), str(images), "--json", "--by", by]
        processes[by] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = {by: process.communicate()[0] for by, process in processes.items()}
    for by, process in processes.items():
        if process.returncode:
            raise SystemExit(f"engram evaluate --by {by} ended with status {process.returncode}")
    return {by: json.loads(text)["accuracy"] for by, text in said.items()}


def _hardware() -> dict[str, Any]:
    """Of the device that a lesson chooses by itself."""
    if torch.cuda.is_available():
        return hardware("cuda", torch.cuda.get_device_name(), torch.get_num_threads())
    return hardware("cpu", processor_name(), torch.get_num_threads())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("train", type=Path)
    options.add_argument("test", type=Path)
    options.add_argument("--lessons", default="50,10", help="the classes of each lesson (default: %(default)s)")
    options.add_argument("--models", type=int, default=1, help="one after the other, with seeds 1, 2, ...")
    given, more = options.parse_known_args()
    counts = [int(count) for count in given.lessons.split(",")]
    classes = sorted(place.name for place in given.train.iterdir() if place.is_dir())
    if sum(counts) > len(classes):
        raise SystemExit(f"{sum(counts)} classes are asked for, and {given.train} has {len(classes)}")
    record: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "versions": versions(),
        "hardware": _hardware(),
        "models": [],
    }
    for seed in range(1, given.models + 1):
        busy, lessons = Busy(), []
        with tempfile.TemporaryDirectory() as folder:
            model, done = Path(folder) / "model", 0
            for number, count in enumerate(counts):
                images = chosen(given.train, classes[done : done + count], Path(folder) / f"lesson{number}")
                done += count
                flags = [*more, *([] if number else ["--seed", str(seed)])]
                lesson = learn(model, images, busy, flags)
                tested = chosen(given.test, classes[:done], Path(folder) / f"test{number}")
                lesson["test"] = evaluate(model, tested)
                lessons.append(lesson)
                print(json.dumps(lesson), flush=True)
            info = subprocess.run(
                [*ENGRAM, "info", str(model), "--json"], stdout=subprocess.PIPE, text=True, check=True
            )
            record["config"] = json.loads(info.stdout)["config"]
        busy.close()
        record["models"].append({"seed": seed, "lessons": lessons})
        write_json(given.out, record)


if __name__ == "__main__":
    main()
