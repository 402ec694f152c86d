"""A measured run in one line of JSON: what it was, what it ran on, and its result.

A line is checked when it is read: an edited number, or a line of something else, is refused with file and line.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.safe_folder import digest
from engram.experiment.run_config import RunConfig
from engram.runs.checked import Source, checked, load_json
from engram.runs.reader import check_identity, check_result, read_log, read_result, read_stage
from engram.runs.stored_run import RunIdentity, RunManifest, RunResult, StageArrays

KIND, FORMAT = "engram run", 1
DEFAULT_PRECISION = {"cuda": "bf16", "cpu": "float32"}
_DIGITS = 6  # significant digits of an importance


@dataclass(frozen=True)
class ImagesSummary:
    """The data set of a measured run."""

    name: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Record(RunIdentity):
    """One complete run.

    source: file and line, or the directory. wall: start and end time. reused_base: another run trained its base stage.
    importance: of the channels after the last stage, from high to low, a list per feature map. digest: see
    `content_digest`; a line of an early version has none.
    """

    data: ImagesSummary
    result: RunResult
    reused_base: bool
    wall: tuple[float, ...] | None = None
    importance: tuple[tuple[float, ...], ...] = ()
    digest: str = ""
    source: str = ""

    @property
    def seed(self) -> int:
        """The seed."""
        return self.result.seed

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return str(self.config.get("device"))

    @property
    def precision(self) -> str:
        """float32, tf32 or bf16."""
        return str(self.config.get("precision"))

    @property
    def machine(self) -> str:
        """Name of the processor or graphics card."""
        return str(self.hardware.get("name", "unknown"))

    @property
    def commit(self) -> str:
        """The commit that it ran from, if known."""
        return self.versions.get("commit", "unknown")

    def value(self, measure: str, predictor: str) -> float | None:
        """A measure of an experiment, or None if the run has no such number."""
        if measure in metrics.METRICS:
            return self.result.metrics[measure].get(predictor)
        if measure == "importance_spread":
            return statistics.pstdev(self.importance[-1]) if self.importance else None
        if predictor not in self.result.predictors:
            return None
        matrix = [stage.accuracy_by_stage[predictor] for stage in self.result.stages]
        return metrics.backward_transfer(matrix, self.stage_sizes)

    def curve(self, predictor: str) -> list[tuple[int, float]]:
        """Classes seen and accuracy after each stage; empty if it was not evaluated with this predictor."""
        stages = self.result.stages
        return [(stage.classes, stage.accuracy[predictor]) for stage in stages if predictor in stage.accuracy]

    @cached_property
    def run_config(self) -> RunConfig | None:
        """The configuration, or None if this version does not know the method or a setting."""
        try:
            return RunConfig.from_plain(self.config)
        except EngramError:
            return None

    @cached_property
    def key(self) -> str | None:
        """A key that is equal for runs of the same protocol, class order and seed; see `protocol_key`."""
        return None if self.run_config is None else protocol_key(self.run_config)

    @property
    def has_default_precision(self) -> bool:
        """Whether it used the default precision of its device."""
        return self.precision == DEFAULT_PRECISION.get(self.device)

    @cached_property
    def identity(self) -> str:
        """Everything that determines the numbers: two runs with the same identity must have the same numbers."""
        same = {key: self.content[key] for key in ("config_hash", "data", "order", "versions", "hardware")}
        return json.dumps(same, sort_keys=True)

    @cached_property
    def numbers(self) -> str:
        """The accuracies."""
        stages = [[stage.accuracy, stage.accuracy_by_stage] for stage in self.result.stages]
        return json.dumps(stages, sort_keys=True)

    def to_line(self) -> str:
        """The record as one line of JSON without spaces."""
        return _to_line(self.content)


def protocol_key(config: RunConfig) -> str:
    """Digest of everything that determines what a run measures, except device, precision and predictor."""
    plain = config.to_plain()
    for free in ("recipe", "device", "precision", "predictor"):
        del plain[free]
    del plain["data"]["path"]
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=12).hexdigest()


def read_record(directory: Path, manifest: RunManifest) -> Record:
    """Make the record of a complete run directory, without the path of the images and the name of the host."""
    result, log = read_result(directory, manifest), read_log(directory)
    config = dict(manifest.config)
    if isinstance(config.get("data"), dict):
        config["data"] = {key: value for key, value in config["data"].items() if key != "path"}
    hardware = manifest.hardware
    data: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "recipe": manifest.recipe,
        "config_hash": manifest.config_hash,
        "config": config,
        "data": {"name": manifest.data.name, "fingerprint": manifest.data.fingerprint},
        "order": manifest.content["order"],
        "stage_sizes": list(manifest.stage_sizes),
        "versions": manifest.versions,
        "hardware": {key: hardware[key] for key in ("device", "name", "cores", "threads") if key in hardware},
        "created": manifest.created,
        "wall": None if log.wall is None else list(log.wall),
        "reused_base": log.reused_base,
        "result": result.content,
    }
    check_record(data, str(directory))
    arrays = read_stage(directory, result.stages[-1], manifest.stage_sizes)
    importance = [] if arrays is None else sorted_importance(arrays)
    data |= {"importance": importance} if importance else {}
    return check_record(data | {"digest": content_digest(data)}, str(directory))


def content_digest(data: Mapping[str, Any]) -> str:
    """Digest of a record's content, without that digest.

    A line has no predictions to compute its accuracies from again: the digest shows that none was changed since the
    line was made from a run directory, where they were.
    """
    line = _to_line({key: value for key, value in data.items() if key != "digest"})
    return digest(line.encode(errors="backslashreplace"))


def _to_line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=False, ensure_ascii=False)


def sorted_importance(arrays: StageArrays) -> list[list[float]]:
    """The importance of each feature map's channels, from high to low, rounded."""
    maps = (sorted(values.tolist(), reverse=True) for values in arrays.importance)
    return [[float(f"{value:.{_DIGITS}g}") for value in values] for values in maps]


def parse_line(line: str, source: str) -> Record:
    """Parse a line of a results file."""
    return check_record(load_json(line, _source(source)), source)


def check_record(data: Any, source: str) -> Record:
    """Return the record that plain data describes, after all checks."""
    where = _source(source)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        where.fail(f"it is not marked as an {KIND!r}")
    if data.get("format") != FORMAT:
        where.fail(f"it has format {data.get('format')!r:.40} and this version reads format {FORMAT}")
    record = checked(Record, data, where)
    check_identity(record, where)
    if record.wall is not None and not (len(record.wall) == 2 and 0 <= record.wall[0] <= record.wall[1]):
        where.fail("wall should have a start and an end")
    if len(record.result.stages) != len(record.stage_sizes):
        where.fail(f"it has {len(record.result.stages)} of {len(record.stage_sizes)} stages")
    check_result(record.result, record, where)
    if record.digest and record.digest != content_digest(data):
        where.fail("it was changed after it was made (its checksum does not match)")
    return replace(record, source=source)


def _source(name: str) -> Source:
    return Source(name, "leave it out or make it again")
