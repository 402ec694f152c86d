"""A measured run in one line of JSON: what it was, what it ran on, and its whole result.

A line is checked when it is read: a number that was changed, or a line of something else, is refused by file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.events import read_events
from engram.experiment.run_config import RunConfig, config_hash
from engram.runs.directory import EVENTS, read_manifest, read_result

KIND, FORMAT = "engram run", 1
DEFAULT_PRECISION = {"cuda": "bf16", "cpu": "float32"}
_KEYS = {"kind": str, "format": int, "recipe": str, "config_hash": str, "config": dict, "data": dict, "order": dict}
_KEYS |= {"stage_sizes": list, "versions": dict, "hardware": dict, "created": str, "reused_base": bool, "result": dict}
_TOLERANCE = 1e-6  # of a mean that is computed again
_DIGITS = 6  # significant, of an importance


@dataclass(frozen=True, eq=False)
class Record:
    """One complete run. source: the file and line, or the directory, that it came from."""

    data: Mapping[str, Any]
    source: str

    @property
    def recipe(self) -> str:
        """The recipe's name, with what was changed of it."""
        return self.data["recipe"]

    @property
    def order(self) -> str:
        """The class order as it was asked for."""
        return str(self.data["order"]["name"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.data["config"]["seed"])

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return str(self.data["config"]["device"])

    @property
    def precision(self) -> str:
        """float32, tf32 or bf16."""
        return str(self.data["config"]["precision"])

    @property
    def hardware(self) -> str:
        """The processor or graphics card, as it calls itself."""
        return str(self.data["hardware"].get("name", "unknown"))

    @property
    def commit(self) -> str:
        """The commit that it ran from, where it is known."""
        return str(self.data["versions"].get("commit", "unknown"))

    @property
    def result(self) -> Mapping[str, Any]:
        """The content of result.json."""
        return self.data["result"]

    @property
    def predictors(self) -> list[str]:
        """What it was evaluated with."""
        return list(self.result["final_accuracy"])

    def value(self, measure: str, predictor: str) -> float | None:
        """A measure of an experiment; None where the run has no such number."""
        if measure in metrics.METRICS:
            return self.result[measure].get(predictor)
        if measure == "importance_spread":
            maps = self.data.get("importance")
            return statistics.pstdev(maps[-1]) if maps else None
        if predictor not in self.result["final_accuracy"]:
            return None
        matrix = [stage["accuracy_by_stage"][predictor] for stage in self.result["stages"]]
        return metrics.backward_transfer(matrix, self.data["stage_sizes"])

    def curve(self, predictor: str) -> list[tuple[int, float]]:
        """Classes seen and accuracy after each stage; empty where it was not evaluated so."""
        stages = self.result["stages"]
        return [(s["classes"], s["accuracy"][predictor]) for s in stages if predictor in s["accuracy"]]

    @cached_property
    def config(self) -> RunConfig | None:
        """The configuration as this version reads it; None where it does not know the method or a setting."""
        try:
            return RunConfig.from_plain(dict(self.data["config"]))
        except EngramError:
            return None

    @cached_property
    def key(self) -> str | None:
        """What it has in common with every run of the same protocol, class order and seed."""
        return None if self.config is None else protocol_key(self.config)

    @property
    def has_default_precision(self) -> bool:
        """Whether it computed as its device does where nobody says how."""
        return self.precision == DEFAULT_PRECISION.get(self.device)

    @cached_property
    def identity(self) -> str:
        """What two runs must have in common for their numbers to be the same: all but the numbers and the time."""
        same = {key: self.data[key] for key in ("config_hash", "data", "order", "versions", "hardware")}
        return json.dumps(same, sort_keys=True)

    @cached_property
    def numbers(self) -> str:
        """The accuracies alone."""
        stages = [[s["accuracy"], s["accuracy_by_stage"]] for s in self.result["stages"]]
        return json.dumps(stages, sort_keys=True)

    def to_line(self) -> str:
        """The record as one line of JSON without spaces."""
        return json.dumps(self.data, separators=(",", ":"), sort_keys=True, allow_nan=False, ensure_ascii=False)


def protocol_key(config: RunConfig) -> str:
    """A digest of all that determines what a run measures but where and how exactly it is computed."""
    plain = config.to_plain()
    for free in ("recipe", "device", "precision", "predictor"):
        del plain[free]
    del plain["data"]["path"]
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=12).hexdigest()


def is_complete(directory: Path) -> bool:
    """Whether every stage of the run in a directory is there."""
    return len(read_result(directory)["stages"]) == len(read_manifest(directory)["stage_sizes"])


def read_run(directory: Path) -> Record:
    """The record of a complete run directory. Where its images lay and the machine's own name stay out of it."""
    try:
        return _read_run(directory, read_manifest(directory))
    except (KeyError, TypeError, AttributeError) as error:
        raise EngramError(f"{directory} is damaged: its files do not hold what they should ({error})") from None


def _read_run(directory: Path, manifest: dict[str, Any]) -> Record:
    config = dict(manifest["config"])
    config["data"] = {key: value for key, value in config.get("data", {}).items() if key != "path"}
    hardware = manifest.get("hardware", {})
    wall, reused = _times(directory / EVENTS)
    data: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "recipe": manifest.get("recipe"),
        "config_hash": manifest["config_hash"],
        "config": config,
        "data": {key: manifest["data"].get(key) for key in ("name", "fingerprint")},
        "order": manifest["order"],
        "stage_sizes": manifest["stage_sizes"],
        "versions": manifest.get("versions"),
        "hardware": {key: hardware[key] for key in ("device", "name", "cores", "threads") if key in hardware},
        "created": manifest.get("created"),
        "wall": wall,
        "reused_base": reused,
        "result": read_result(directory),
    }
    stages = directory / "stages" / f"{len(manifest['stage_sizes']) - 1:03d}.safetensors"
    importance = _importance(stages) if stages.exists() else []
    if importance:
        data["importance"] = importance
    return check_record(data, str(directory))


def parse_line(line: str, source: str) -> Record:
    """The record that a line holds."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise EngramError(f"{source} is no result: it cannot be read as JSON ({error})") from None
    return check_record(data, source)


def check_record(data: Any, source: str) -> Record:
    """The record, once everything in it fits together."""

    def fail(what: str) -> NoReturn:
        raise EngramError(f"{source} is not a usable result of engram: {what}; leave it out or make it again")

    if not isinstance(data, dict) or data.get("kind") != KIND:
        fail(f"it does not say that it is an {KIND!r}")
    if data.get("format") != FORMAT:
        fail(f"it has format {data.get('format')!r} and this version reads format {FORMAT}")
    for key, kind in _KEYS.items():
        if not isinstance(data.get(key), kind):
            fail(f"its {key!r} is missing or not what it should be")
    if config_hash(data["config"]) != data["config_hash"]:
        fail("its configuration was changed after the run began")
    try:
        wrong = _wrong_result(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        fail(f"its numbers do not have the form of a result ({type(error).__name__}: {error})")
    if wrong:
        fail(wrong)
    return Record(data, source)


def _wrong_result(data: Mapping[str, Any]) -> str:
    """What does not fit together in a record's numbers; empty where everything does."""
    result, sizes, stages = data["result"], data["stage_sizes"], data["result"]["stages"]
    if len(stages) != len(sizes):
        return f"it has {len(stages)} of {len(sizes)} stages"
    if [stage["classes"] for stage in stages] != list(accumulate(sizes)):
        return "its stages do not have the classes they should"
    if result["recipe"] != data["recipe"] or result["seed"] != data["config"]["seed"]:
        return "its result is of another run than its configuration"
    if not _is_number(result["seconds"]) or result["seconds"] < 0:
        return f"it took {result['seconds']!r} seconds"
    predictors = list(stages[0]["accuracy"])
    if not predictors:
        return "it has no accuracy"
    for name in predictors:
        matrix = [stage["accuracy_by_stage"][name] for stage in stages]
        values = [stage["accuracy"][name] for stage in stages]
        if [len(row) for row in matrix] != list(range(1, len(sizes) + 1)):
            return f"its {name} accuracies by stage are not one for each stage so far"
        if not all(_is_percent(value) for value in [*values, *(value for row in matrix for value in row)]):
            return f"a {name} accuracy of it is no percentage"
        measured = {
            "average_incremental_accuracy": metrics.average_incremental_accuracy(values),
            "final_accuracy": values[-1],
            "forgetting": metrics.forgetting(matrix),
            "backward_transfer": metrics.backward_transfer(matrix),
        }
        for metric, again in measured.items():
            told = result[metric][name]
            if (told is None) != (again is None) or (again is not None and abs(told - again) > _TOLERANCE):
                return f"its {metric} ({name}) is {told} and its stages give {again}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_percent(value: Any) -> bool:
    return _is_number(value) and -_TOLERANCE <= value <= 100 + _TOLERANCE


def _times(file: Path) -> tuple[list[float] | None, bool]:
    """When the run began and ended, where it went through in one go, and whether it took over its base stage."""
    times: list[float] = []
    starts, reused = 0, False
    for event in read_events(file):
        times += [event["time"]] if _is_number(event.get("time")) else []
        starts += event.get("event") == "run_started"
        reused |= event.get("event") == "base_reused"
    return ([times[0], times[-1]] if times and starts == 1 else None), reused


def _importance(file: Path) -> list[list[float]]:
    """The channels' importance after a stage, from high to low, one list a map; empty where there is none."""
    try:
        tensors = load_tensors(file.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise EngramError(f"{file} cannot be read ({error}); run it again, or leave it out") from None
    maps: list[list[float]] = []
    while (values := tensors.get(f"importance.{len(maps)}")) is not None:
        maps.append([float(f"{value:.{_DIGITS}g}") for value in sorted(values.tolist(), reverse=True)])
    return maps
