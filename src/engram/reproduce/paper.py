"""A paper as data: its experiments, each a table of rows and columns, and the published numbers.

`papers/afc.toml` explains the format; your own file has the same format.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError, option, suggest
from engram.runs.checked import Source, checked, read_checked

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
        predictor = row.predictor if inference is None else PREDICTORS[str(inference)]
        changes = tuple(_filled(text, words) for text in (*self.set, *row.set))
        return Spec(_filled(self.recipe, words), changes, predictor)

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
    text: str
    content: dict[str, Any] = field(repr=False)
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class _MethodEntry:
    """An entry of [methods]. nme: `recipe` by default; label: the paper's name of the method by default."""

    content: dict[str, Any]
    recipe: str = ""
    nme: str | None = None
    predictor: str | None = None
    set: tuple[str, ...] = ()
    label: str | None = None


@dataclass(frozen=True)
class _RowEntry:
    """A row of an experiment or of a published table; only a published row has values."""

    method: str
    content: dict[str, Any]
    inference: str | None = None
    label: str | None = None
    set: tuple[str, ...] = ()
    values: tuple[Published | None, ...] | None = None
    rerun_by_afc_authors: bool = False


@dataclass(frozen=True, kw_only=True)
class _TableEntry:
    """A table of the published numbers; an [[experiment]] has the title, columns and rows of its published table."""

    id: str = ""
    title: str = ""
    columns: tuple[Mapping[str, Any], ...] = ()
    rows: tuple[_RowEntry, ...] = ()


@dataclass(frozen=True)
class _PublishedFile:
    tables: tuple[_TableEntry, ...]


@dataclass(frozen=True, kw_only=True)
class _ExperimentEntry(_TableEntry):
    name: str
    content: dict[str, Any]
    kind: str = "table"
    published: str | None = None
    recipe: str = ""
    set: tuple[str, ...] = ()
    measure: str = ""
    orders: tuple[Any, ...] = (1, 2, 3)
    note: str = ""
    opening: str = ""
    beside: bool = False
    column: str | None = None
    values: tuple[Mapping[str, Any], ...] | None = None
    methods: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _PaperEntry:
    content: dict[str, Any]
    experiment: tuple[_ExperimentEntry, ...] = ()
    title: str = ""
    published: str | None = None
    methods: Mapping[str, Any] = field(default_factory=dict)
    remark: tuple[Remark, ...] = ()


def load_paper(path: Path | None = None) -> Paper:
    """Load a paper from a TOML file, or by its name in this package; None is AFC's."""
    own = {file.stem: file for file in sorted(PAPERS.glob("*.toml"))}
    file = PAPERS / "afc.toml" if path is None else own.get(str(path), path)
    if not file.is_file():
        names = " or ".join(own)
        raise EngramError(
            f"there is no paper at {file}; {option('paper')} must be {names}, or a TOML file of experiments"
        )
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngramError(f"{file} cannot be read as a paper: {error}; {option('paper')} must be TOML") from None
    return _PaperReader(file, data).paper()


class _PaperReader:
    """Builds a paper from the data of a file. Errors name the file and the experiment."""

    def __init__(self, file: Path, data: dict[str, Any]) -> None:
        self.file, self.source = file, Source(file, "correct the paper")
        self.entry = checked(_PaperEntry, data, self.source)
        self.tables: dict[str, _TableEntry] = {}
        if self.entry.published is not None:
            numbers = file.parent / self.entry.published
            if not os.path.isfile(numbers):  # unlike Path.is_file, also of a name that is too long
                self.source.fail(f"published names {self.entry.published!r}, which is not a file next to it")
            tables = read_checked(_PublishedFile, numbers, "correct the published numbers").tables
            self.tables = {table.id: table for table in tables}

    def paper(self) -> Paper:
        self._check_keys(self.entry, "the file")
        if not self.entry.experiment:
            self.source.fail("it has no [[experiment]]")
        experiments: dict[str, Experiment] = {}
        for entry in self.entry.experiment:
            if not entry.name or not entry.name.isprintable() or entry.name in (*experiments, "all"):
                self.source.fail(f"the name {entry.name!r} is taken, empty or not printable")
            experiments[entry.name] = self._experiment(entry)
        remarks = tuple(self._remark(entry, experiments) for entry in self.entry.remark)
        return Paper(self.entry.title or self.file.stem, _with_deviations(experiments), remarks)

    def _remark(self, remark: Remark, experiments: Mapping[str, Experiment]) -> Remark:
        about = remark.experiment
        self._check_keys(remark, f"a remark on {about!r}")
        if about not in experiments:
            self.source.fail(f"a remark is about {about!r}, which is not one of its experiments")
        for what in ("rows", "columns"):
            known = {thing.label for thing in getattr(experiments[about], what)}
            for name in sorted(set(getattr(remark, what)) - known):
                self.source.fail(f"a remark on {about} names {name!r} among its {what}: {suggest(name, known)}")
        paragraphs = (" ".join(part.split()) for part in remark.text.split("\n\n"))
        return replace(remark, text="\n\n".join(paragraphs))

    def _experiment(self, entry: _ExperimentEntry) -> Experiment:
        name = entry.name
        self._check_keys(entry, name)
        measure = entry.measure or _DEFAULT_MEASURES.get(entry.kind, "average_incremental_accuracy")
        for what, value, valid in (("kind", entry.kind, KINDS), ("measure", measure, MEASURES)):
            if value not in valid:
                self.source.fail(f"{name} has no {what} {value!r}: {suggest(value, valid)}")
        table = _TableEntry() if entry.published is None else self.tables.get(entry.published)
        if table is None:
            known = suggest(str(entry.published), self.tables)
            self.source.fail(f"{name} has no published table {entry.published!r}: {known}")
        values: dict[str, Any] = {each.name: getattr(entry, each.name) for each in fields(Experiment)}
        values |= {"title": entry.title or table.title or name, "measure": measure}
        values |= {"rows": self._rows(entry, table), "columns": self._columns(entry, table)}
        values |= {"orders": tuple(map(str, entry.orders)), "opening": " ".join(entry.opening.split())}
        experiment = Experiment(**values)
        self._check(experiment)
        return experiment

    def _check(self, experiment: Experiment) -> None:
        for what, things in (("row", experiment.rows), ("column", experiment.columns), ("order", experiment.orders)):
            labels = [getattr(thing, "label", thing) for thing in things]
            if not labels or len(set(labels)) < len(labels):
                self.source.fail(f"{experiment.name} needs one {what} or more, each with another name")
        for row in experiment.rows:
            where = f"{row.label} of {experiment.name}"
            if row.values is not None and len(row.values) != len(experiment.columns):
                self.source.fail(f"{where} has {len(row.values)} numbers, not one for each column")
            for column in experiment.columns:
                try:
                    spec = experiment.spec(row, column)
                except KeyError as error:
                    what = f"which is neither CNN nor NME nor a value of the column {column.label!r}"
                    self.source.fail(f"{where} names {error}, {what}")
                for change in spec.set:
                    if change.partition("=")[0].strip() in ("order", "seed"):
                        self.source.fail(
                            f"{experiment.name} sets {change!r}: give class orders in 'orders'; {option('seeds')} sets "
                            "the seeds; a cell is the mean over both"
                        )

    def _columns(self, entry: _ExperimentEntry, table: _TableEntry) -> tuple[PaperColumn, ...]:
        given = entry.columns or table.columns
        more = ({},) * len(given) if entry.values is None else entry.values
        if len(more) != len(given):
            self.source.fail(f"{entry.name} has {len(given)} columns and values for {len(more)}")
        columns: list[PaperColumn] = []
        for values, extra in zip(given, more, strict=True):
            words = {**values, **extra}
            try:
                columns.append(PaperColumn(_filled(entry.column or entry.name, words), words))
            except KeyError as error:
                self.source.fail(f"the columns of {entry.name} are named by {error}, which is not one of their values")
        return tuple(columns)

    def _rows(self, entry: _ExperimentEntry, table: _TableEntry) -> tuple[PaperRow, ...]:
        methods = {**self.entry.methods, **entry.methods}
        rows: list[PaperRow] = []
        for given in entry.rows or table.rows:
            if entry.rows:
                self._check_keys(given, entry.name)
            if given.method not in methods:
                self.source.fail(f"{entry.name} has the method {given.method!r}, which is not in [methods]")
            found = methods[given.method]
            source = Source(f"the method {given.method} of {self.file}", self.source.remedy)
            for each in found if isinstance(found, list) else [found]:
                method = checked(_MethodEntry, each, source)
                self._check_keys(method, given.method)
                if not method.recipe:
                    source.fail("it has no recipe")
                rows.append(_row(given, method))
        return tuple(rows)

    def _check_keys(self, entry: Any, where: str) -> None:
        known = {each.name for each in fields(entry)} - {"content", "id"}
        for key in sorted(entry.content.keys() - known):
            self.source.fail(f"{where} has no key {key!r}: {suggest(key, known)}")


def _row(given: _RowEntry, method: _MethodEntry) -> PaperRow:
    label = (method.label or given.method) + (f" ({given.inference})" if given.inference else "")
    return PaperRow(
        label=given.label or label + "*" * given.rerun_by_afc_authors,
        method=given.method,
        recipe=method.recipe,
        nme=method.nme or method.recipe,
        inference=given.inference,
        predictor=method.predictor,
        set=(*method.set, *given.set),
        values=given.values,
    )


def _with_deviations(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Fill in the standard deviation of numbers that another table repeats without it."""
    known: dict[tuple[object, ...], set[float]] = {}
    for experiment in experiments.values():
        for row in experiment.rows:
            for column, value in zip(experiment.columns, row.values or (), strict=False):
                if value is not None and value.std is not None:
                    known.setdefault(experiment.number(row, column, value), set()).add(value.std)

    def fill(experiment: Experiment, row: PaperRow) -> PaperRow:
        values = list(row.values or ())
        for i, (column, value) in enumerate(zip(experiment.columns, values, strict=False)):
            stds = known.get(experiment.number(row, column, value), set()) if value and value.std is None else set()
            if value and len(stds) == 1:
                values[i] = replace(value, repeated=next(iter(stds)))
        return row if row.values is None else replace(row, values=tuple(values))

    return {
        name: replace(experiment, rows=tuple(fill(experiment, row) for row in experiment.rows))
        for name, experiment in experiments.items()
    }


def _filled(text: str, words: Mapping[str, Any]) -> str:
    """Replace each {word} of a text by its value, and 2.0 by 2; KeyError for a word without a value."""
    whole = {key: int(value) for key, value in words.items() if isinstance(value, float) and value.is_integer()}
    return re.sub(r"\{([^{}]*)\}", lambda found: str({**words, **whole}[found[1]]), text)
