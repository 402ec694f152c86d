"""Groups of runs that differ only in class order and seed, and the statistics over each group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.metrics import Difference, Estimate, estimate, paired
from engram.core.serialize import flatten
from engram.report.formatting import natural_key, plain
from engram.runs.directory import UNKNOWN_CODE
from engram.runs.reader import read_run
from engram.runs.stored_run import ClassOrder, DataSummary, StoredRun

# Settings in which repetitions of a run may differ. The fingerprint identifies the images, wherever they are.
_VARYING = ("order", "seed", "data.path")
_SHOWN_CHANGES = 3


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one recipe and configuration with the same number of finished stages. label: its name, on one line."""

    label: str
    runs: tuple[StoredRun, ...]

    @property
    def first(self) -> StoredRun:
        """A run of the group, for everything that its runs have in common."""
        return self.runs[0]

    @property
    def data(self) -> DataSummary:
        """The data set."""
        return self.first.manifest.data

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.runs)

    @property
    def predictors(self) -> tuple[str, ...]:
        """The predictors, the one that the recipe reports first."""
        names = self.first.manifest.predictors
        reported = self.first.manifest.config.get("predictor")
        return tuple(sorted(names, key=lambda name: name != reported))

    @property
    def classes(self) -> tuple[int, ...]:
        """Classes seen after each finished stage."""
        return tuple(stage.classes for stage in self.first.stages)

    @property
    def protocol(self) -> tuple[object, ...]:
        """Data and stages: groups must have them in common for their numbers to be comparable."""
        manifest = self.first.manifest
        shares = tuple(manifest.config.get(name) for name in ("blurry", "repeat"))
        return self.data.fingerprint, self.data.class_names, manifest.stage_sizes, shares

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: most finished stages first, then highest final accuracy."""
        final = self.metric("final_accuracy", self.predictors[0])
        return -len(self.classes), 0.0 if final is None else -final.mean

    def metric(self, name: str, predictor: str) -> Estimate | None:
        """A metric of result.json over the runs; None if a run does not have it."""
        return estimate([run.result.metrics[name].get(predictor) for run in self.runs])

    def difference(self, other: RunGroup, name: str) -> Difference | None:
        """Difference of a metric to another group, over pairs of runs with the same class order and seed."""
        mine, theirs = (
            {pairing_key(run): run.result.metrics[name][group.predictors[0]] for run in group.runs}
            for group in (self, other)
        )
        return paired(mine, theirs)

    def accuracy(self, predictor: str) -> list[Estimate]:
        """Accuracy after each stage over the runs."""
        columns = zip(*([s.accuracy[predictor] for s in run.stages] for run in self.runs), strict=True)
        return [value for column in columns if (value := estimate(column)) is not None]

    def matrix(self, predictor: str) -> np.ndarray:
        """(T, T) mean accuracy matrix R[t][i] over the runs; NaN for i > t."""
        size = len(self.first.stages)
        matrix = np.full((size, size), np.nan)
        for t in range(size):
            matrix[t, : t + 1] = np.mean([run.stages[t].accuracy_by_stage[predictor] for run in self.runs], axis=0)
        return matrix

    def key(self, kind: str, predictor: str = "") -> str:
        """Return the key of a figure or table of this group, different from all others of a page."""
        return "\n".join([kind, self.label, *filter(None, [predictor])])

    @property
    def seconds(self) -> Estimate:
        """Wall-clock seconds of a run."""
        total = estimate([run.result.seconds for run in self.runs])
        assert total is not None
        return total

    @cached_property
    def class_ids(self) -> tuple[int, ...]:
        """Classes seen by any run: in order of arrival if all runs have the same, otherwise in the data set's order."""
        seen = [run.class_order[: run.stages[-1].classes] for run in self.runs]
        return seen[0] if self.has_one_order else tuple(sorted(set().union(*seen)))

    @property
    def has_one_order(self) -> bool:
        """Whether all runs have the same class order."""
        return len({run.class_order[: run.stages[-1].classes] for run in self.runs}) == 1

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of `class_ids`."""
        return tuple(self.data.class_names[i] for i in self.class_ids)

    def confusion(self, predictor: str) -> np.ndarray:
        """(K, K) test images by true class (row) and predicted class (column) after the last stage, over all runs."""
        position = {class_id: row for row, class_id in enumerate(self.class_ids)}
        counts = np.zeros((len(position), len(position)), dtype=np.int64)
        for run in self.runs:
            rows = np.array([position[i] for i in run.class_order[: run.stages[-1].classes]])
            counts += metrics.confusion(
                rows[run.arrays.targets], rows[run.arrays.predictions[predictor]], len(position)
            )
        return counts

    def importance(self) -> list[np.ndarray]:
        """For each feature map (runs, C): importance after the last stage, from high to low; may be empty."""
        maps = [run.arrays.importance for run in self.runs]
        if not maps[0] or len({tuple(len(values) for values in run) for run in maps}) > 1:
            return []
        return [np.stack([np.sort(run[m])[::-1] for run in maps]) for m in range(len(maps[0]))]


def load_runs(directories: Sequence[Path]) -> list[StoredRun]:
    """Read run directories, in the given order.

    A class order that was given class by class has no short name: it is called "given 1", "given 2" and so on.
    """
    if not directories:
        raise EngramError("no run directory was given; name at least one, such as runs/demo")
    seen: dict[Path, Path] = {}
    for directory in map(Path, directories):
        if seen.setdefault(directory.resolve(), directory) is not directory:
            raise EngramError(f"{directory} was given twice; name each run once, or its spread would look too small")
    numbers: dict[tuple[str, ...], int] = {}
    runs: list[StoredRun] = []
    for run in map(read_run, seen.values()):
        if has_given_order(run):
            name = f"given {numbers.setdefault(run.arrivals, len(numbers) + 1)}"
            run = replace(run, manifest=replace(run.manifest, order=ClassOrder(name, run.class_order)))
        runs.append(run)
    return runs


def has_given_order(run: StoredRun) -> bool:
    """Whether the class order was given class by class."""
    return "," in str(run.manifest.config.get("order"))


def pairing_key(run: StoredRun) -> tuple[str, tuple[int, ...], str]:
    """Class order and seed: runs of two groups that have both in common are compared with each other."""
    return run.manifest.order.name, run.class_order, run.seed


def row_percent(counts: np.ndarray) -> np.ndarray:
    """Return each row as percent of its sum; a class without test images gives a row of NaN."""
    totals = counts.sum(axis=1, keepdims=True).astype(np.float64)
    return 100 * np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)


def without_repeats(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], dict[StoredRun, StoredRun]]:
    """Return the runs that count, and for each other run the one that counts instead.

    Runs with the same configuration, class order and seed are the same measurement; counting it twice would make the
    spread look too small. The run with the most stages counts; of several, the newest.
    """
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        found.setdefault(json.dumps([*_shared(run), *pairing_key(run)], sort_keys=True), []).append(run)
    counted = {
        run: max(same, key=lambda r: (len(r.stages), r.manifest.created)) for same in found.values() for run in same
    }
    kept = [run for run in runs if counted[run] is run]
    return kept, {run: counts for run, counts in counted.items() if counts is not run}


def make_groups(runs: Sequence[StoredRun]) -> list[RunGroup]:
    """Group the runs by everything that repetitions have in common.

    Sorted by protocol (in order of appearance), then by method and by configuration, the best first. Incomplete runs
    come after complete ones.
    """
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        # Incomplete runs get their own group: a mean over different numbers of classes is meaningless.
        found.setdefault(json.dumps([*_shared(run), len(run.stages)], sort_keys=True), []).append(run)
    members = list(found.values())
    labels = _labels([group[0] for group in members])
    groups = [
        RunGroup(label, tuple(sorted(group, key=lambda run: (natural_key(run.manifest.order.name), run.result.seed))))
        for label, group in zip(labels, members, strict=True)
    ]
    return _ranked(groups)


def _ranked(groups: list[RunGroup]) -> list[RunGroup]:
    protocols = list(dict.fromkeys(group.protocol for group in groups))
    best: dict[tuple[object, str], tuple[int, float]] = {}
    for group in groups:
        name = group.protocol, group.first.method
        best[name] = min(best.get(name, group.rank), group.rank)

    def place(group: RunGroup) -> tuple[object, ...]:
        method = group.first.method
        return protocols.index(group.protocol), best[group.protocol, method], method, group.rank

    return sorted(groups, key=place)


def leaders(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return the best configuration of each method and protocol. groups: sorted as by `make_groups`."""
    return list({(group.protocol, group.first.method): group for group in reversed(groups)}.values())[::-1]


def comparable_groups(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Return lists of groups that can be compared: same protocol, same number of stages."""
    found: dict[object, list[RunGroup]] = {}
    for group in groups:
        found.setdefault((group.protocol, len(group.classes)), []).append(group)
    return list(found.values())


def have_same_orders(groups: Sequence[RunGroup]) -> bool:
    """Whether all groups have the same class orders and seeds."""
    return len({frozenset(pairing_key(run) for run in group.runs) for group in groups}) == 1


def _shared(run: StoredRun) -> list[Any]:
    """Return everything that repetitions of a run have in common."""
    manifest, data = run.manifest, run.manifest.data
    config = {key: value for key, value in _settings(run).items() if key not in _VARYING}
    return [
        run.recipe,
        run.method,
        config,
        data.fingerprint,
        data.class_names,
        manifest.stage_sizes,
        manifest.predictors,
    ]


def _labels(firsts: list[StoredRun]) -> list[str]:
    """Return the shortest distinct name of each group: method, or recipe, or recipe and the settings that differ.

    If every method has only one recipe (with or without changes), the method's name replaces the recipe's.
    """
    names = [run.method for run in firsts]
    if len(set(names)) < len(names):
        recipes = Counter(run.recipe for run in firsts)
        names = [
            _short_recipe(run, firsts) if recipes[run.recipe] == 1 else _with_settings(run, firsts) for run in firsts
        ]
        bare = {(run.method, _changes(run.recipe)[0]) for run in firsts}
        if len(bare) == len({run.method for run in firsts}):
            names = [
                run.method + name.removeprefix(_changes(run.recipe)[0]) for name, run in zip(names, firsts, strict=True)
            ]
    names = [plain(f"{name} ({run.stopped})" if run.stopped else name) for name, run in zip(names, firsts, strict=True)]
    repeated = {name for name, times in Counter(names).items() if times > 1}
    numbers = {name: count(1) for name in repeated}
    return [f"{name} [{next(numbers[name])}]" if name in repeated else name for name in names]


def _short_recipe(run: StoredRun, others: list[StoredRun]) -> str:
    """Return the recipe's name; of many changes, only those that distinguish it from the others."""
    name, changes = _changes(run.recipe)
    if len(changes) <= _SHOWN_CHANGES:
        return run.recipe
    peers = [theirs for other, theirs in (_changes(other.recipe) for other in others) if other == name]
    distinct = [change for change in changes if any(change not in theirs for theirs in peers)]
    return f"{name} ({', '.join([*distinct[:_SHOWN_CHANGES], '…'])})"


def _changes(recipe: str) -> tuple[str, list[str]]:
    """Split "name (key=value, key=value)" into the recipe's name and its changes."""
    name, _, changed = recipe.removesuffix(")").partition(" (")
    return name, changed.split(", ") if changed else []


def _with_settings(run: StoredRun, others: list[StoredRun]) -> str:
    flat = [_settings(other) for other in others if other.recipe == run.recipe]
    mine = _settings(run)
    differing = [
        f"{key.rsplit('.', 1)[-1]}={value}"
        for key, value in mine.items()
        if key not in _VARYING and any(other.get(key) != value for other in flat)
    ]
    return f"{_short_recipe(run, others)} {', '.join(differing[:3])}".strip()


def _settings(run: StoredRun) -> dict[str, str]:
    """Return every setting as text, and the code of a method from outside the package as one more setting."""
    settings = {key: as_text(value) for key, value in flatten(run.manifest.config).items()}
    return {"code": run.manifest.method_code or UNKNOWN_CODE, **settings}


def as_text(value: Any) -> str:
    """Return text as it is, and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
