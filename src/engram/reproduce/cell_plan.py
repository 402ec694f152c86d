"""The runs that each cell of a paper needs, and those that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engram.core.errors import EngramError, option, suggest
from engram.core.provenance import own_code
from engram.data.sources.load import PLACED
from engram.data.stream import check_order
from engram.experiment.recipes import apply_changes, named_after_changes, recipe, recipe_names
from engram.experiment.run_config import RunConfig, directory_name
from engram.reproduce.paper import Experiment, PaperColumn, PaperRow, Published
from engram.reproduce.records import Record, protocol_key
from engram.runs.reader import read_manifest, read_progress

NOT_IN_PAPER, NO_RECIPE = "not in the paper", "no recipe yet"


@dataclass(frozen=True, eq=False)
class Wanted:
    """A run that cells need. name: of its directory. key: see `protocol_key`."""

    name: str
    config: RunConfig
    key: str

    def is_measured_by(self, record: Record, importance: bool = False) -> bool:
        """Whether a record is this run, in the wanted precision. importance: whether the record must have it."""
        if record.key != self.key or (importance and not record.importance):
            return False
        asked = self.config.precision
        return record.has_default_precision if asked == "auto" else record.precision == asked


@dataclass(frozen=True, eq=False)
class PaperCell:
    """A cell of a table: the runs that it needs, and the record of each (None if not measured).

    reason: why it cannot have runs. missing: the recipe that does not exist. bare: runs that were measured without the
    importance that the cell needs.
    """

    experiment: Experiment
    row: PaperRow
    column: PaperColumn
    predictor: str | None
    published: Published | None
    wanted: tuple[Wanted, ...] = ()
    found: tuple[Record | None, ...] = ()
    reason: str = ""
    missing: str = ""
    bare: tuple[Wanted, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """The runs that were measured."""
        return tuple(record for record in self.found if record is not None)

    @property
    def left(self) -> tuple[Wanted, ...]:
        """The runs that were not measured."""
        return tuple(wanted for wanted, record in zip(self.wanted, self.found, strict=True) if record is None)


@dataclass(frozen=True, eq=False)
class PaperPlan:
    """The requested cells, and the runs that they need, by name. left: runs that were not measured."""

    cells: tuple[PaperCell, ...]
    runs: dict[str, Wanted] = field(default_factory=dict)
    left: dict[str, Wanted] = field(default_factory=dict)

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments of the cells."""
        return list({id(cell.experiment): cell.experiment for cell in self.cells}.values())

    def of(self, experiment: Experiment) -> list[PaperCell]:
        """Return the cells of an experiment, row by row."""
        return [cell for cell in self.cells if cell.experiment is experiment]


@dataclass(frozen=True)
class PaperRequest:
    """Which cells to reproduce and how to compute them; None is the default of the experiment or recipe."""

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    orders: Sequence[str] | None = None
    seeds: Sequence[int] = (1,)
    data_path: str | None = None
    device: str | None = None
    precision: str | None = None


def make_plan(
    experiments: Sequence[Experiment], records: Iterable[Record], asked: PaperRequest | None = None
) -> PaperPlan:
    """Return the requested cells with the runs that were measured."""
    asked = asked or PaperRequest()
    planner = _Planner(records, asked)
    cells = [
        planner.cell(experiment, row, column)
        for experiment in select(experiments, asked.rows, asked.columns)
        for row in experiment.rows
        for column in experiment.columns
    ]
    _refuse_others(cells, lambda record: record.data.fingerprint, "on different images")
    _refuse_others(cells, lambda record: record.method_code, "with different code of the method")
    _refuse_unknown_orders(planner.runs.values())
    left = {wanted.name: wanted for cell in cells for wanted in cell.left}
    return PaperPlan(tuple(cells), planner.runs, left)


def _refuse_others(cells: Sequence[PaperCell], what: Callable[[Record], str], how: str) -> None:
    """Refuse cells whose runs have different images or code: their mean would be meaningless."""
    for cell in cells:
        first = {what(record): record for record in cell.records}
        if len(first) > 1:
            one, two = list(first.values())[:2]
            raise EngramError(f"{one.source} and {two.source} are runs of {one.recipe} {how}; leave one of them out")


def refuse_edited(plan: PaperPlan) -> None:
    """Refuse, before training, runs that would be averaged with runs of other code of the method."""
    for cell in plan.cells:
        for wanted in cell.left:
            now = own_code(wanted.config.code_versions())
            for record in cell.records:
                if record.method_code != now:
                    raise EngramError(
                        f"{record.source} is a run of {record.recipe} with other code than the method "
                        f"{wanted.config.method} has now, and {wanted.name} would be averaged with it; leave that run "
                        f"out ({option('directory')}, {option('results')}), or restore its code"
                    )


def _refuse_unknown_orders(runs: Iterable[Wanted]) -> None:
    """Refuse a class order that none of the data sets has."""
    errors: dict[str, list[EngramError | None]] = {}
    for order, dataset in dict.fromkeys((run.config.order, run.config.data.name) for run in runs):
        try:
            check_order(order, dataset)
            errors.setdefault(order, []).append(None)
        except EngramError as error:
            errors.setdefault(order, []).append(error)
    for found in errors.values():
        if found[0] is not None and None not in found:
            raise found[0]


class _Planner:
    """Makes the cells; a run that several cells need is planned once."""

    def __init__(self, records: Iterable[Record], asked: PaperRequest) -> None:
        self.asked = asked
        self.runs: dict[str, Wanted] = {}
        self._recipes = set(recipe_names())
        self._by_key: dict[str, list[Record]] = {}
        for record in records:
            if record.key is not None:
                self._by_key.setdefault(record.key, []).append(record)

    def found(self, wanted: Wanted, importance: bool) -> Record | None:
        """Return the record of a run; of several (other machines or commits), the latest."""
        known = self._by_key.get(wanted.key, [])
        fitting = [record for record in known if wanted.is_measured_by(record, importance)]
        return max(fitting, key=lambda record: record.created, default=None)

    def cell(self, experiment: Experiment, row: PaperRow, column: PaperColumn) -> PaperCell:
        spec, published = experiment.spec(row, column), experiment.published(row, column)
        cell = PaperCell(experiment, row, column, spec.predictor, published)
        if row.values is not None and published is None:
            return replace(cell, reason=NOT_IN_PAPER)
        if spec.recipe not in self._recipes:
            return replace(cell, reason=NO_RECIPE, missing=spec.recipe)
        original = recipe(spec.recipe)
        config = named_after_changes(original, self._here(apply_changes(original, spec.set)))
        seeds, orders = self.asked.seeds, self.asked.orders or experiment.orders
        wanted = tuple(self._wanted(replace(config, order=order, seed=seed)) for order in orders for seed in seeds)
        found = tuple(self.found(run, importance=experiment.kind == "importance") for run in wanted)
        pairs = zip(wanted, found, strict=True)
        bare = tuple(run for run, record in pairs if record is None and self.found(run, importance=False) is not None)
        return replace(cell, predictor=spec.predictor or config.predictor, wanted=wanted, found=found, bare=bare)

    def _here(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the requested images, device and precision."""
        if self.asked.data_path is not None and config.data.name in PLACED:
            config = config.with_value("data.path", self.asked.data_path)
        if self.asked.device is not None:
            config = config.with_value("device", self.asked.device)
        # A cell that sets its precision keeps it.
        if self.asked.precision is not None and config.precision == "auto":
            config = config.with_value("precision", self.asked.precision)
        return config

    def _wanted(self, config: RunConfig) -> Wanted:
        key = protocol_key(config)
        name = run_name(config)
        other = self.runs.setdefault(name, Wanted(name, config, key))
        if other.key != key:
            raise EngramError(f"two runs would both be named {name}; change the settings of one of them")
        return other


def run_name(config: RunConfig) -> str:
    """Return the name of the run's directory, as in `engram run`, plus the precision if it is set."""
    name = directory_name(config)
    return name if config.precision == "auto" else f"{name}-{config.precision}"


def stages_done(parent: Path, wanted: Wanted) -> int:
    """Number of finished stages of a run; 0 if it was not started."""
    directory = parent / wanted.name
    try:
        return read_progress(directory, read_manifest(directory)).finished
    except EngramError:
        return 0


def select(
    experiments: Sequence[Experiment], rows: Sequence[str] | None, columns: Sequence[str] | None
) -> list[Experiment]:
    """Return the experiments with only these rows and columns; refuse a name that none of them has."""
    kept_rows = _named(rows, "row", [row for experiment in experiments for row in experiment.rows])
    kept_columns = _named(columns, "column", [column for experiment in experiments for column in experiment.columns])
    chosen = [_cut(experiment, kept_rows, kept_columns) for experiment in experiments]
    kept = [experiment for experiment in chosen if experiment.rows and experiment.columns]
    if not kept:
        raise EngramError(
            f"no experiment has both those rows and those columns; leave out {option('rows')} or {option('columns')}"
        )
    return kept


def _named(names: Sequence[str] | None, what: str, things: Sequence[PaperRow | PaperColumn]) -> set[int]:
    """Return the ids of the rows or columns with these names (None: all). Rows can also be named by recipe."""
    if names is None:
        return {id(thing) for thing in things}
    found: set[int] = set()
    for name in names:
        called = [thing for thing in things if _has_name(thing, name)]
        called = called or [
            row for row in things if isinstance(row, PaperRow) and row.recipe.casefold() == name.casefold()
        ]
        if not called:
            labels = dict.fromkeys(thing.label for thing in things)
            raise EngramError(f"there is no {what} {name!r}: {suggest(name, labels)}")
        found |= {id(thing) for thing in called}
    return found


def _cut(experiment: Experiment, rows: set[int], columns: set[int]) -> Experiment:
    places = [i for i, column in enumerate(experiment.columns) if id(column) in columns]
    kept = [row for row in experiment.rows if id(row) in rows]
    if experiment.kind == "effects" and kept and kept[0] is not experiment.rows[0]:
        kept.insert(0, experiment.rows[0])  # the others are compared with it
    cut = tuple(
        row if row.values is None else replace(row, values=tuple(row.values[i] for i in places)) for row in kept
    )
    return replace(experiment, rows=cut, columns=tuple(experiment.columns[i] for i in places))


def _has_name(thing: PaperRow | PaperColumn, name: str) -> bool:
    """Whether a row or column has this name: its label, a row's method, or a word of a column's label."""
    if isinstance(thing, PaperRow):
        names = [thing.label, thing.method, thing.label.rstrip("*")]
    else:
        names = [thing.label, *thing.label.split()]
    return name.casefold() in [text.casefold() for text in names]
