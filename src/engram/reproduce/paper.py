"""A paper as data: its experiments, each a table of rows and columns, and the published numbers.

`papers/afc.toml` explains the format; your own file has the same format.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from engram.core.errors import EngramError, option, suggest
from engram.core.io import read_json

PAPERS = Path(__file__).parent / "papers"
KINDS = ("table", "curves", "importance", "effects")
MEASURES = {  # the metrics of result.json, and more that are computed from its accuracy matrix
    "average_incremental_accuracy": "average incremental accuracy, %",
    "final_accuracy": "accuracy after the last stage, %",
    "backward_transfer": "backward transfer, points",
    "class_backward_transfer": "backward transfer, mean over the old classes, points",
    "forgetting": "forgetting, points",
    "importance_spread": "standard deviation of the importance over the channels of the last map, whose mean is 1",
}
_DEFAULT_MEASURES = {"importance": "importance_spread"}  # by kind
PREDICTORS = {"CNN": "cnn", "NME": "nme"}
_COMMON_KEYS = ("name", "title", "kind", "published", "recipe", "set", "measure", "orders", "note", "opening", "beside")
_KEYS = frozenset((*_COMMON_KEYS, "column", "values", "columns", "rows", "methods"))
_ROW_KEYS = frozenset(("method", "inference", "label", "set"))
_METHOD_KEYS = frozenset(("recipe", "nme", "predictor", "set", "label"))
_LISTED = {"texts": str, "class orders": str | int, "tables": dict, "numbers": object}  # types of the items of a list


@dataclass(frozen=True)
class Published:
    """A published number. std: None if the table has none; repeated: the std of the same number in another table."""

    mean: float
    std: float | None = None
    repeated: float | None = None

    @property
    def deviation(self) -> float | None:
        """The published standard deviation of the number, from this table or another."""
        return self.repeated if self.std is None else self.std


@dataclass(frozen=True)
class PaperRow:
    """A row of a table.

    method: its name in the paper. recipe, nme: the start of its recipes' names (nme: for NME). values: as published.
    """

    label: str
    method: str
    recipe: str
    nme: str
    inference: str | None
    predictor: str | None
    set: tuple[str, ...] = ()
    values: tuple[Published | None, ...] | None = None


@dataclass(frozen=True)
class PaperColumn:
    """A column of a table. values: by name, for the templates of recipes and settings."""

    label: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """The measurement of a cell: a recipe and changes to it. predictor: None is the one that the recipe reports."""

    recipe: str
    set: tuple[str, ...]
    predictor: str | None


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    kind: one of KINDS. measure: one of MEASURES. beside: whether it is an addition of ours, not in the paper. opening:
    text of the Markdown page before a table of effects.
    """

    name: str
    title: str
    kind: str
    measure: str
    recipe: str
    set: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    columns: tuple[PaperColumn, ...]
    orders: tuple[str, ...]
    note: str
    opening: str = ""
    beside: bool = False

    @property
    def heading(self) -> str:
        """The name as in the paper: "Table 1"."""
        word = self.name.rstrip("0123456789")
        number = self.name[len(word) :]
        return f"{word.capitalize()} {number}".strip()

    def spec(self, row: PaperRow, column: PaperColumn) -> Spec:
        """Return what a cell measures."""
        inference = row.inference or column.values.get("inference")
        begins = row.nme if inference == "NME" else row.recipe
        words = {**column.values, "recipe": begins}
        predictor = row.predictor if inference is None else PREDICTORS[inference]
        changes = tuple(text.format(**words) for text in (*self.set, *row.set))
        return Spec(self.recipe.format(**words), changes, predictor)

    def number(self, row: PaperRow, column: PaperColumn, published: Published) -> tuple[object, ...]:
        """Return a key that is the same for the same published number in another table."""
        return self.measure, row.method, row.inference or column.values.get("inference"), published.mean

    def published(self, row: PaperRow, column: PaperColumn) -> Published | None:
        """Return the published number of a cell, or None."""
        return None if row.values is None else row.values[self.columns.index(column)]


@dataclass(frozen=True)
class Remark:
    """A known reason why numbers of an experiment differ from the paper. No rows or columns: all of them."""

    experiment: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Paper:
    """Experiments by name, and remarks on some of their numbers."""

    title: str
    experiments: Mapping[str, Experiment]
    remarks: tuple[Remark, ...]

    def find(self, names: Sequence[str]) -> list[Experiment]:
        """Return experiments by name; "all" is every table and figure of the paper."""
        chosen: dict[str, Experiment] = {}
        for name in names:
            if name == "all":
                chosen |= {key: value for key, value in self.experiments.items() if not value.beside}
            elif name in self.experiments:
                chosen[name] = self.experiments[name]
            else:
                raise EngramError(f"the paper has no {name!r}: {suggest(name, [*self.experiments, 'all'])}")
        return list(chosen.values())


def load_paper(path: Path | None = None) -> Paper:
    """Load a paper from a TOML file; None is the paper in this package."""
    file = next(PAPERS.glob("*.toml")) if path is None else path
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngramError(
            f"there is no paper at {file}; {option('paper')} must be a TOML file of experiments"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EngramError(f"{file} cannot be read as a paper: {error}") from None
    return _PaperReader(file, data).paper()


class _PaperReader:
    """Builds a paper from the data of a file. Errors name the file and the experiment."""

    def __init__(self, file: Path, data: dict[str, Any]) -> None:
        self.file, self.data = file, data
        numbers = read_json(file.parent / data["published"]) if isinstance(data.get("published"), str) else {}
        tables = self._list(numbers.get("tables", []), "tables", "tables of the published numbers")
        self.tables = {table.get("id"): table for table in tables}

    def fail(self, what: str) -> NoReturn:
        raise EngramError(f"{self.file} is not a usable paper: {what}")

    def paper(self) -> Paper:
        known = {"title", "published", "methods", "experiment", "remark"}
        self._check_keys(self.data, known, "the file")
        entries = self._list(self.data.get("experiment", []), "tables", "[[experiment]]")
        if not entries:
            self.fail("it has no [[experiment]]")
        experiments: dict[str, Experiment] = {}
        for entry in entries:
            experiment = self._experiment(entry)
            if experiment.name in experiments or experiment.name == "all":
                self.fail(f"the name {experiment.name!r} is taken")
            experiments[experiment.name] = experiment
        remarks = self._list(self.data.get("remark", []), "tables", "[[remark]]")
        found = tuple(self._remark(entry, experiments) for entry in remarks)
        return Paper(str(self.data.get("title", self.file.stem)), _with_deviations(experiments), found)

    def _remark(self, entry: dict[str, Any], experiments: Mapping[str, Experiment]) -> Remark:
        about, text = entry.get("experiment"), entry.get("text")
        self._check_keys(entry, {"experiment", "rows", "columns", "text"}, f"a remark on {about!r}")
        if not isinstance(about, str) or about not in experiments or not isinstance(text, str):
            self.fail(f"a remark is about {about!r}, which is not one of its experiments")
        names: dict[str, tuple[str, ...]] = {}
        for what in ("rows", "columns"):
            known = {thing.label for thing in getattr(experiments[about], what)}
            names[what] = tuple(self._list(entry.get(what, []), "texts", f"{what} of a remark on {about}"))
            for name in names[what]:
                if name not in known:
                    self.fail(f"a remark on {about} names {name!r} among its {what}: {suggest(name, known)}")
        return Remark(about, names["rows"], names["columns"], " ".join(text.split()))

    def _experiment(self, entry: dict[str, Any]) -> Experiment:
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            self.fail("an experiment has no name")
        self._check_keys(entry, _KEYS, name)
        table = self._table(name, entry.get("published"))
        kind = entry.get("kind", "table")
        measure = entry.get("measure", _DEFAULT_MEASURES.get(kind, "average_incremental_accuracy"))
        for what, value, valid in (("kind", kind, KINDS), ("measure", measure, MEASURES)):
            if value not in valid:
                self.fail(f"{name} has no {what} {value!r}: {suggest(str(value), valid)}")
        columns = self._columns(name, entry, table)
        rows = self._rows(name, entry, table)
        experiment = Experiment(
            name=name,
            title=str(entry.get("title") or table.get("title") or name),
            kind=kind,
            measure=measure,
            recipe=str(entry.get("recipe", "")),
            set=tuple(self._list(entry.get("set", []), "texts", f"set of {name}")),
            rows=rows,
            columns=columns,
            orders=tuple(map(str, self._list(entry.get("orders", [1, 2, 3]), "class orders", f"orders of {name}"))),
            note=str(entry.get("note", "")),
            opening=" ".join(str(entry.get("opening", "")).split()),
            beside=bool(entry.get("beside", False)),
        )
        self._check(experiment)
        return experiment

    def _check(self, experiment: Experiment) -> None:
        for what, things in (("row", experiment.rows), ("column", experiment.columns), ("order", experiment.orders)):
            labels = [getattr(thing, "label", thing) for thing in things]
            if not labels or len(set(labels)) < len(labels):
                self.fail(f"{experiment.name} needs one {what} or more, each with another name")
        for row in experiment.rows:
            if row.values is not None and len(row.values) != len(experiment.columns):
                self.fail(f"{row.label} of {experiment.name} has {len(row.values)} numbers, not one for each column")
            for column in experiment.columns:
                try:
                    spec = experiment.spec(row, column)
                except (KeyError, IndexError, ValueError) as error:
                    self.fail(f"{experiment.name} names {error}, which is not a value of the column {column.label!r}")
                for change in spec.set:
                    if change.partition("=")[0].strip() in ("order", "seed"):
                        self.fail(
                            f"{experiment.name} sets {change!r}: give class orders in 'orders'; {option('seeds')} sets "
                            "the seeds; a cell is the mean over both"
                        )

    def _table(self, name: str, published: Any) -> dict[str, Any]:
        if published is None:
            return {}
        if published not in self.tables:
            self.fail(f"{name} has no published table {published!r}: {suggest(str(published), self.tables)}")
        return self.tables[published]

    def _columns(self, name: str, entry: dict[str, Any], table: dict[str, Any]) -> tuple[PaperColumn, ...]:
        given = self._list(entry.get("columns", table.get("columns", [])), "tables", f"columns of {name}")
        more = self._list(entry.get("values", [{}] * len(given)), "tables", f"values of {name}")
        if len(more) != len(given):
            self.fail(f"{name} has {len(given)} columns and values for {len(more)}")
        columns: list[PaperColumn] = []
        for values, extra in zip(given, more, strict=True):
            words = {key: _number_text(value) for key, value in {**values, **extra}.items()}
            try:
                columns.append(PaperColumn(str(entry.get("column", name)).format(**words), words))
            except (KeyError, IndexError, ValueError) as error:
                self.fail(f"the columns of {name} are named by {error}, which is not one of their values")
        return tuple(columns)

    def _rows(self, name: str, entry: dict[str, Any], table: dict[str, Any]) -> tuple[PaperRow, ...]:
        known = [part.get("methods", {}) for part in (self.data, entry)]
        if not all(isinstance(part, dict) for part in known):
            self.fail(f"the methods of {name} should be a table, [methods], got {known}")
        methods = {**known[0], **known[1]}
        rows: list[PaperRow] = []
        for given in self._list(entry.get("rows", table.get("rows", [])), "tables", f"rows of {name}"):
            if "values" not in given:
                self._check_keys(given, _ROW_KEYS, name)
            if given.get("method") not in methods:
                self.fail(f"{name} has the method {given.get('method')!r}, which is not in [methods]")
            readings = methods[given["method"]]
            rows += [self._row(name, given, each) for each in (readings if isinstance(readings, list) else [readings])]
        return tuple(rows)

    def _row(self, name: str, given: dict[str, Any], method: dict[str, Any]) -> PaperRow:
        self._check_keys(method, _METHOD_KEYS, given["method"])
        inference = given.get("inference")
        if inference is not None and inference not in PREDICTORS:
            self.fail(f"{name} has the inference {inference!r}: it must be CNN or NME")
        if not isinstance(method.get("recipe"), str):
            self.fail(f"the method {given['method']!r} has no recipe")
        if not isinstance(method.get("label", ""), str):
            self.fail(f"the label of the method {given['method']!r} should be a text, got {method['label']!r}")
        label = method.get("label", given["method"]) + (f" ({inference})" if inference else "")
        label += "*" if given.get("rerun_by_afc_authors") else ""
        values = given.get("values")
        values = None if values is None else self._list(values, "numbers", f"values of {label} in {name}")
        changes = [each for of in (method, given) for each in self._list(of.get("set", []), "texts", f"set of {label}")]
        return PaperRow(
            label=given.get("label", label),
            method=given["method"],
            recipe=method["recipe"],
            nme=method.get("nme", method["recipe"]),
            inference=inference,
            predictor=method.get("predictor"),
            set=tuple(changes),
            values=None if values is None else tuple(self._published(name, value) for value in values),
        )

    def _published(self, name: str, value: Any) -> Published | None:
        if value is None:
            return None
        numbers = [value.get("mean"), value.get("std", 0.0)] if isinstance(value, dict) else [None]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            self.fail(f"a number of {name} is {value!r}; it should be a mean and optionally a std")
        return Published(float(value["mean"]), None if "std" not in value else float(value["std"]))

    def _list(self, found: Any, of: str, what: str) -> list[Any]:
        """Return a value that must be a list. of: the type of its items, a key of _LISTED. what: its name."""
        if not isinstance(found, list) or not all(isinstance(each, _LISTED[of]) for each in found):
            self.fail(f"{what} should be a list of {of}, got {found!r}")
        return found

    def _check_keys(self, data: Any, known: frozenset[str] | set[str], where: str) -> None:
        if not isinstance(data, dict):
            self.fail(f"{where} should be a table, got {data!r}")
        for key in data:
            if key not in known:
                self.fail(f"{where} has no key {key!r}: {suggest(key, known)}")


def _with_deviations(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Fill in the standard deviation of numbers that another table repeats without it."""
    known: dict[tuple[object, ...], set[float]] = {}
    for experiment in experiments.values():
        for row in experiment.rows:
            for column, value in zip(experiment.columns, row.values or (), strict=False):
                if value is not None and value.std is not None:
                    known.setdefault(experiment.number(row, column, value), set()).add(value.std)

    def with_std(experiment: Experiment, row: PaperRow) -> PaperRow:
        def fill(column: PaperColumn, value: Published | None) -> Published | None:
            if value is None or value.std is not None:
                return value
            stds = known.get(experiment.number(row, column, value), set())
            return replace(value, repeated=next(iter(stds))) if len(stds) == 1 else value

        if row.values is None:
            return row
        return replace(row, values=tuple(map(fill, experiment.columns, row.values)))

    return {
        name: replace(experiment, rows=tuple(with_std(experiment, row) for row in experiment.rows))
        for name, experiment in experiments.items()
    }


def _number_text(value: Any) -> Any:
    """Return whole numbers as int: 2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
