"""Predicting image files: what the command makes of the speed that its network has alone."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.report import Table, number, percent
from benchmarks.scale import Scale
from benchmarks.timing import spread, synchronise
from engram.cli.commands.predict import write_lines
from engram.core.rng import generator
from engram.data.augment import to_unit
from engram.data.decode.prefetch import Decoded, decode_files, decode_stream
from engram.data.sources.mini import read_mini
from engram.data.store import Images
from engram.engine.forward import INFERENCE_PIXELS
from engram.models.model import KnownClass, Model
from engram.models.model_config import ModelConfig
from engram.models.prediction import default_batch, predict_batches, predict_files

TARGET = 0.8
PARTS_OF_BATCH = {"bare": 1.0, "bare, double": 2.0, "bare, largest": None}
WAYS = {
    "bare": "the network alone on decoded images, in the command's batches",
    "bare, double": "the same in batches twice as large",
    "bare, largest": "the same in the engine's largest batches",
    "decoded": "predictions and their lines, on decoded images",
    "command": "the command: files decoded, predicted, lines written",
    "decoding": "decoding alone",
}
FILES = ("command", "decoding")  # the ways that read files


def measure_predict(scale: Scale) -> dict[str, Any]:
    """Images a second of each way, taken in turn so that what else the machine does hits all alike."""
    model = untrained(scale)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), scale.files, scale.image_size)
        images, _, _ = decode_files(paths, scale.image_size)
        rounds = scale.rounds if model.engine.device.type == "cuda" else 1
        ways = {
            **{name: partial(bare, model, images, part, rounds) for name, part in PARTS_OF_BATCH.items()},
            "decoded": lambda: decoded(model, images, paths, rounds),
            "command": lambda: command(model, paths),
            "decoding": lambda: decoding(paths, scale.image_size),
        }
        rates = {name: [] for name in ways}
        for repetition in range(scale.repetitions + 1):
            for name, way in ways.items():
                seconds = timed(way, model.engine.device)
                if repetition:  # the first one warms up
                    rates[name].append(len(paths) * (1 if name in FILES else rounds) / seconds)
    alone = [max(found) for found in zip(*(rates[name] for name in PARTS_OF_BATCH), strict=True)]  # the best way
    shares = {
        name: spread([ours / best for ours, best in zip(rates[name], alone, strict=True)])
        for name in ("decoded", "command")
    }
    return {
        "files": scale.files,
        "rounds": rounds,
        "backbone": scale.backbone,
        "images_per_second": {name: spread(values) for name, values in rates.items()},
        "share_of_bare": shares,
        "target": TARGET,
        "within_target": shares["decoded"]["median"] >= TARGET,
    }


def untrained(scale: Scale) -> Model:
    """A model of the benchmark's classes whose network has learned nothing: it takes the same time."""
    config = ModelConfig.choose("afc", image_size=scale.image_size, images=1000, backbone=scale.backbone)
    model = Model(config, scale.device, scale.precision)
    model.learner = model.make_learner((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), scale.classes)
    model.learner.network.head.grow(scale.classes, generator(1, "benchmark"))
    model.classes = tuple(KnownClass(f"class {i}", 0, 1) for i in range(scale.classes))
    return model


def write_files(folder: Path, count: int, size: int) -> list[str]:
    """So many PNG files of natural images at that size."""
    pictures = read_mini().train.images
    paths = [str(folder / f"{i:06d}.png") for i in range(count)]
    for number_, path in enumerate(paths):
        picture = Image.fromarray(pictures[number_ % len(pictures)])
        picture.resize((size, size), Image.Resampling.BICUBIC).save(path)
    return paths


def timed(way: Callable[[], None], device: torch.device) -> float:
    """The seconds it takes."""
    synchronise(device)
    started = time.perf_counter()
    way()
    synchronise(device)
    return time.perf_counter() - started


@torch.no_grad()
def bare(model: Model, images: Images, part_of_batch: float | None, rounds: int) -> None:
    """The network's own passes over batches of a part of the command's, or as large as the engine's."""
    assert model.learner is not None
    network, engine = model.learner.network.eval(), model.engine
    batch = INFERENCE_PIXELS[engine.device.type] // (images.shape[1] * images.shape[2])
    if part_of_batch is not None:
        batch = min(batch, max(1, round(default_batch(model) * part_of_batch)))
    for part in torch.from_numpy(images).split(batch) * rounds:
        with engine.autocast():
            network(to_unit(part.to(engine.device), False).contiguous(memory_format=engine.layout)).scores.cpu()


def decoded(model: Model, images: Images, paths: list[str], rounds: int) -> None:
    """What the command does once files are decoded, in its batches."""
    batch = default_batch(model)
    starts = [*range(0, len(images), batch)] * rounds
    parts = (Decoded(paths[start : start + batch], images[start : start + batch], []) for start in starts)
    for part in predict_batches(model, parts):
        write_lines(io.StringIO(), model.labels, part, 1, False)


def command(model: Model, paths: list[str]) -> None:
    """The command's own loop."""
    for part in predict_files(model, paths):
        write_lines(io.StringIO(), model.labels, part, 1, False)


def decoding(paths: list[str], size: int) -> None:
    """The files decoded and thrown away."""
    for _ in decode_stream(paths, size):
        pass


def predict_tables(result: dict[str, Any]) -> list[Table]:
    """The table of this part."""
    rows = []
    for name, values in result["images_per_second"].items():
        share = result["share_of_bare"].get(name)
        rows.append(
            [
                WAYS[name],
                number(values["median"], 0),
                f"{number(values['min'], 0)} to {number(values['max'], 0)}",
                "" if share is None else percent(share["median"]),
            ]
        )
    verdict = "is" if result["within_target"] else "is not"
    times = result["images_per_second"]["bare"]["n"]
    note = (
        f"{result['files']} PNG files, {result['backbone']}, n = {times}, in turn; what is decoded already was taken "
        f"{result['rounds']} times over. The target is "
        f"{percent(result['target'])} of the bare network's speed, in whichever batches it is quickest, "
        f"once images are decoded, and {verdict} met."
    )
    return [Table("Predicting files", ["way", "images/s, median", "least to most", "of the bare network"], rows, note)]
