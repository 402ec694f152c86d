"""What the runs that are left would take, from runs that were measured on the same hardware.

A run's work is counted in steps and images trained, as its own estimate of the time left does; a measured run gives
the seconds of a unit of it. Runs side by side share a device: how much they gain by it is taken from when measured runs
began and ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from engram.config import RunConfig
from engram.data.cifar import outline_cifar100
from engram.data.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.errors import EngramError
from engram.methods import find_method
from engram.plain import to_plain
from engram.reproduce.plan import Plan, Wanted, stages_done
from engram.reproduce.records import Record
from engram.rundir import processor_name
from engram.session import Session

# A step alone against a step's share among many, on a GPU that these keep busy (results/benchmark-h200.json).
ALONE = 2.0


@dataclass(frozen=True)
class Cost:
    """What is left on one kind of hardware. measured: the runs it was taken from; at_once: how many went side by side.

    unmeasured: the methods that have no run there, and are taken to cost what the others do. uncounted: the runs left
    that are like none of the measured ones (another data set or network), and not in the seconds.
    """

    hardware: str
    seconds: float
    measured: int
    at_once: int
    unmeasured: tuple[str, ...]
    uncounted: int


@dataclass(frozen=True)
class Work:
    """The work of each stage, and a name for the base stage that equals that of every run that shares it."""

    stages: tuple[float, ...]
    base: str | None


def costs(plan: Plan, records: Sequence[Record], runs: Path) -> list[Cost]:
    """What the runs that are left would take, on each kind of hardware with measured runs of the same data."""
    left = list(plan.left.values())
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.config and record.has_default_precision and _kind(record.config) in {_kind(w.config) for w in left}:
            groups.setdefault(record.hardware, []).append(record)
    found: list[Cost] = []
    for hardware, measured in groups.items():
        kinds = {_kind(record.config) for record in measured if record.config}
        alike: list[tuple[Wanted, Work]] = []
        with suppress(EngramError):  # images that are not here cannot be counted
            alike += [(w, _left(w, stages_done(runs, w))) for w in left if _kind(w.config) in kinds]
        if alike:
            found.append(_cost(hardware, measured, alike, len(left) - len(alike)))
    return found


def _kind(config: RunConfig) -> tuple[str, str]:
    """What a run must have in common with a measured one for its time to be told from it."""
    return config.data.name, config.backbone


def this_hardware(device: str | None = None) -> str:
    """The processor or graphics card that a run would take here, as it calls itself."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor_name()


def _left(wanted: Wanted, finished: int) -> Work:
    work = work_of(wanted.config)
    return Work(work.stages[finished:], None if finished else work.base)


def _cost(hardware: str, measured: Sequence[Record], left: Sequence[tuple[Wanted, Work]], uncounted: int) -> Cost:
    images = {wanted.config.data.name: wanted.config.data for wanted, _ in left}  # a record does not say where they are
    spent: dict[str, list[tuple[float, float]]] = {}
    for record in measured:
        assert record.config is not None
        config = replace(record.config, data=images[record.config.data.name])
        stages = work_of(config).stages[1 if record.data["reused_base"] else 0 :]
        spent.setdefault(record.config.method, []).append((record.result["seconds"], sum(stages)))
    rates = {method: _rate(pairs) for method, pairs in spent.items()}
    overall = _rate([pair for pairs in spent.values() for pair in pairs])
    trained: set[str] = set()
    total = longest = 0.0
    for wanted, work in left:
        shared = work.base is not None and work.base in trained
        seconds = sum(work.stages[1:] if shared else work.stages) * rates.get(wanted.config.method, overall)
        total, longest = total + seconds, max(longest, seconds)
        trained |= {work.base} if work.base is not None else set()
    share, at_once = _side_by_side(measured)
    methods = dict.fromkeys(wanted.config.method for wanted, _ in left if wanted.config.method not in rates)
    alone = min(longest, longest * share * ALONE)  # the longest run cannot be shared out
    return Cost(hardware, max(total * share, alone), len(measured), at_once, tuple(methods), uncounted)


def _rate(pairs: Iterable[tuple[float, float]]) -> float:
    seconds, work = (sum(values) for values in zip(*pairs, strict=True))
    return seconds / work if work else 0.0


def _side_by_side(records: Sequence[Record]) -> tuple[float, int]:
    """Seconds on the clock for each second of a run, and how many runs were at work at once at most."""
    known = [(record.data["wall"], record.result["seconds"]) for record in records if record.data.get("wall")]
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
    """The work of a run; no image is read of a set whose numbers are known."""
    config = replace(config, device="cpu", precision="float32", recipe="custom")
    # Images are counted, so a small network will do, and neither order nor seed plays a part.
    return Work(_stage_work(replace(config, order="natural", seed=1, backbone="resnet10")), _base(config))


def _base(config: RunConfig) -> str | None:
    """What runs that share a base stage have in common, of all that a session knows: images and machine aside."""
    method = find_method(config.method).make(config.settings).base_key()
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
    """The data set; of CIFAR-100 its numbers alone, so that a plan can be made where it is not."""
    if data.name != "cifar100":
        return load_store(data)
    store = outline_cifar100()
    return store if data.holdout is None else store.holdout(data.holdout, seed=0)
