"""Estimate the time of the missing runs from runs that were measured on the same hardware.

The work of a run is counted in steps and images; a measured run gives the seconds per unit of work. Runs that share a
device run in parallel: the start and end times of measured runs give the speed-up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from engram.core.errors import EngramError
from engram.core.provenance import processor_name
from engram.core.serialize import to_plain
from engram.data.sources.cifar import outline_cifar100
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.methods import find_method
from engram.reproduce.cell_plan import PaperPlan, Wanted, stages_done
from engram.reproduce.records import DEFAULT_PRECISION, Record

# Time of a step alone, relative to its share among many runs on a busy GPU (results/benchmark-h200.json).
ALONE = 2.0


@dataclass(frozen=True)
class Cost:
    """Estimated time of the missing runs on one kind of hardware; None if no run can be estimated.

    measured: number of runs behind the estimate. at_once: how many of them ran at the same time. unmeasured: methods
    without a measured run, assumed to cost as much as the others. uncounted: runs without an estimate, by reason.
    """

    hardware: str
    seconds: float | None
    measured: int
    at_once: int
    unmeasured: tuple[str, ...]
    uncounted: dict[str, int]


@dataclass(frozen=True)
class Work:
    """The work of each stage, and a key of the base stage: runs with the same key share it."""

    stages: tuple[float, ...]
    base: str | None


def costs(plan: PaperPlan, records: Sequence[Record], runs: Path) -> list[Cost]:
    """Estimate the time of the missing runs on each kind of hardware with measured runs of the same data."""
    left = list(plan.left.values())
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.run_config and _images(record.run_config) in {_images(wanted.config) for wanted in left}:
            groups.setdefault(record.machine, []).append(record)
    return [_on(hardware, measured, left, runs) for hardware, measured in groups.items()]


def _on(hardware: str, measured: Sequence[Record], left: Sequence[Wanted], runs: Path) -> Cost:
    """Estimate the missing runs on one kind of hardware."""
    device = measured[0].device
    kinds = {_kind(record.run_config, device) for record in measured if record.run_config}
    counted: list[tuple[Wanted, Work]] = []
    uncounted: Counter[str] = Counter()
    for wanted in left:
        kind = _kind(wanted.config, device)
        if _images(wanted.config) not in {(data, backbone) for data, backbone, _ in kinds}:
            uncounted["on other data or networks, of which none was measured"] += 1
        elif kind not in kinds:
            uncounted[f"in {kind[-1]}, of which none was measured"] += 1
        else:
            try:
                counted.append((wanted, _left(wanted, stages_done(runs, wanted))))
            except EngramError:
                uncounted["whose images are not here"] += 1
    used = {_kind(wanted.config, device) for wanted, _ in counted}
    alike = [record for record in measured if record.run_config and _kind(record.run_config, device) in used]
    if not counted:
        return Cost(hardware, None, 0, 1, (), dict(uncounted))
    return _cost(hardware, alike, counted, dict(uncounted))


def _images(config: RunConfig) -> tuple[str, str]:
    """The data set and the network."""
    return config.data.name, config.backbone


def _kind(config: RunConfig, device: str) -> tuple[str, str, str]:
    """Data, network and precision: a measured run must have them in common with the run to estimate."""
    precision = DEFAULT_PRECISION.get(device, "auto") if config.precision == "auto" else config.precision
    return *_images(config), precision


def this_hardware(device: str | None = None) -> str:
    """Name of the processor or graphics card that a run would use here."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor_name()


def _left(wanted: Wanted, finished: int) -> Work:
    work = work_of(wanted.config)
    return Work(work.stages[finished:], None if finished else work.base)


def _cost(
    hardware: str, measured: Sequence[Record], left: Sequence[tuple[Wanted, Work]], uncounted: dict[str, int]
) -> Cost:
    device = measured[0].device
    images = {wanted.config.data.name: wanted.config.data for wanted, _ in left}  # records have no paths
    spent: dict[object, list[tuple[float, float]]] = {}
    for record in measured:
        assert record.run_config is not None
        config = replace(record.run_config, data=images[record.run_config.data.name])
        stages = work_of(config).stages[1 if record.reused_base else 0 :]
        kind = _kind(config, device)
        for key in (kind, (kind, config.method)):
            spent.setdefault(key, []).append((record.result.seconds, sum(stages)))
    rates = {key: _rate(pairs) for key, pairs in spent.items()}
    trained: set[object] = set()
    unmeasured: dict[str, None] = {}
    total = longest = 0.0
    for wanted, work in left:
        kind, method = _kind(wanted.config, device), wanted.config.method
        if (kind, method) not in rates:
            unmeasured[method] = None
        shared = work.base is not None and (kind, work.base) in trained
        seconds = sum(work.stages[1:] if shared else work.stages) * rates.get((kind, method), rates[kind])
        total, longest = total + seconds, max(longest, seconds)
        trained.add((kind, work.base))
    share, at_once = _side_by_side(measured)
    alone = min(longest, longest * share * ALONE)  # the longest run cannot be split
    return Cost(hardware, max(total * share, alone), len(measured), at_once, tuple(unmeasured), uncounted)


def _rate(pairs: Iterable[tuple[float, float]]) -> float:
    seconds, work = (sum(values) for values in zip(*pairs, strict=True))
    return seconds / work if work else 0.0


def _side_by_side(records: Sequence[Record]) -> tuple[float, int]:
    """Wall-clock seconds per second of a run, and the largest number of runs at the same time."""
    known = [(record.wall, record.result.seconds) for record in records if record.wall]
    if not known:
        return 1.0, 1
    steps = sorted([(wall[0], 1) for wall, _ in known] + [(wall[1], -1) for wall, _ in known])
    clock, active, most, since = 0.0, 0, 0, 0.0
    for time, change in steps:
        clock += time - since if active else 0.0
        active, since = active + change, time
        most = max(most, active)
    spent = sum(seconds for _, seconds in known)
    return (clock / spent if spent else 1.0), most


def work_of(config: RunConfig) -> Work:
    """Return the work of a run, without reading images if the size of the data set is known."""
    config = replace(config, device="cpu", precision="float32", recipe="custom")
    # Only images are counted, so network, order and seed do not matter.
    return Work(_stage_work(replace(config, order="natural", seed=1, backbone="resnet10")), _base(config))


def _base(config: RunConfig) -> str | None:
    """Key that is the same for runs that share a base stage, apart from images and machine."""
    info = find_method(config.method)
    method = info.base_key(info.make(config.settings))
    if method is None:
        return None
    stream = config.stream(_outline(config.data))
    classes = stream.order[: stream.sizes[0]]
    same = [to_plain(config.data), config.backbone, to_plain(config.augmentation), config.seed, method, classes]
    return json.dumps(same, sort_keys=True)


@cache
def _stage_work(config: RunConfig) -> tuple[float, ...]:
    plans = Session(config, _outline(config.data)).plan()
    return tuple(sum(phase.work for phase in plan.phases) for plan in plans)


@cache
def _outline(data: DataConfig) -> ImageStore:
    """Load the data set; for CIFAR-100 only its sizes, so it need not be downloaded."""
    if data.name != "cifar100":
        return load_store(data)
    store = outline_cifar100()
    return store if data.holdout is None else store.holdout(data.holdout, seed=0)
