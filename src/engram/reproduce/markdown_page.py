"""docs/reproduction.md: which numbers of a paper were reproduced, made only from the results.

The page does not depend on which methods this version has, only on the results.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engram.report.formatting import count_runs, join, signed
from engram.reproduce.cell_plan import PaperRequest, make_plan
from engram.reproduce.cells import FURTHER, MARKS, NOT_RUN, WITHIN_POINT, WITHIN_STD, Measured, each_once, measure_all
from engram.reproduce.paper import MEASURES, Experiment, Paper
from engram.reproduce.paper_page import headline, records_of, remarks
from engram.reproduce.paper_tables import caption, legend, markdown, markdown_effects, markdown_rows, run_batches
from engram.reproduce.records import Record

_JUDGED = (WITHIN_STD, WITHIN_POINT, FURTHER)
COMMAND = "engram results page docs/reproduction.md results"


def document(paper: Paper, records: Sequence[Record], command: str = COMMAND, file: str | None = None) -> str:
    """Return the page. command: what makes it. file: path of the paper; None is the paper in this package."""
    seeds = sorted({record.seed for record in records}) or [1]
    plan = make_plan(list(paper.experiments.values()), records, PaperRequest(seeds=seeds))
    cells = measure_all(plan)
    tables = [experiment for experiment in plan.experiments if experiment.kind != "effects"]
    effects = [experiment for experiment in plan.experiments if experiment.kind == "effects"]
    parts = [
        _opening(paper, cells, command, file),
        _overview(tables, cells),
        _reproduces(cells),
        _does_not(paper, tables, cells),
        *(_effects(paper, experiment, cells, file) for experiment in effects),
        *(_section(experiment, cells, file) for experiment in tables),
        _provenance(records_of(plan.cells), records),
    ]
    return "\n".join(part for part in parts if part)


def _of(experiment: Experiment, cells: Sequence[Measured]) -> list[Measured]:
    return [cell for cell in cells if cell.cell.experiment is experiment]


def _opening(paper: Paper, cells: Sequence[Measured], command: str, file: str | None) -> str:
    checked = "; a test checks that it is what this command gives" if command == COMMAND else ""
    place = "[`results/`](../results/README.md)" if command == COMMAND else "a file of results"
    starred = any(cell.cell.row.label.endswith("*") for cell in cells)
    star = "A star marks rows for which the paper's authors ran other people's code again. " if starred else ""
    repeated = """If a table repeats a number without its standard deviation, the one in the other table is used;
without any, only the limit of one point counts.
"""
    if not any(cell.cell.published for cell in cells):
        repeated = ""
    return f"""# Reproduction

{paper.title}. {headline(cells)}

Made by `{command}`{checked}.
{_reproduce(next(iter(paper.experiments)), file)} runs what is missing; `engram results merge` adds it to {place}.
The paper's numbers never replace ours: cells without runs are marked "not run".

{legend(cells)}.
{star}{repeated}"""


def _reproduce(name: str, file: str | None) -> str:
    """The command that runs the missing runs of an experiment."""
    return f"`engram reproduce {name}{'' if file is None else f' --paper {shlex.quote(file)}'}`"


def _overview(tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    rows: list[list[str]] = []
    for experiment in tables:
        published = [cell for cell in _of(experiment, cells) if cell.cell.published is not None]
        marks = Counter(cell.mark for cell in published)
        counts = [len(published), len(published) - marks[NOT_RUN], *(marks[mark] for mark in _JUDGED)]
        if published:
            rows.append([caption(experiment), *map(str, counts)])
    return markdown_rows(["", "published", "ours", *(MARKS[mark] for mark in _JUDGED)], rows)


def _reproduces(cells: Sequence[Measured]) -> str:
    text = "\n".join(_named(cells, (WITHIN_STD, WITHIN_POINT))) or "Nothing yet."
    return f"## What reproduces\n\nWithin the paper's standard deviation, or one point:\n\n{text}\n"


def _does_not(paper: Paper, tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    why = [
        f"- {experiment.heading}: {text}" for experiment in tables for text in remarks(paper, _of(experiment, cells))
    ]
    known = f"\nWhy, as far as known:\n\n{chr(10).join(why)}\n" if why else ""
    text = "\n".join(_named(cells, (FURTHER,))) or "Nothing that was measured."
    return f"## What does not\n\nFurther off than one point and the paper's standard deviation:\n\n{text}\n{known}"


def _named(cells: Sequence[Measured], marks: Sequence[str]) -> list[str]:
    """Return a line for each row of a table with such marks; a number that several tables repeat is listed once."""
    found: dict[tuple[str, str], list[str]] = {}
    for group in each_once(cells):
        results: dict[str, list[Measured]] = {}  # one, unless the tables have different runs
        for measured in group:
            if measured.difference is not None and measured.mark in marks:
                results.setdefault(signed(measured.difference), []).append(measured)
        for difference, (first, *others) in results.items():
            where = (first.cell.experiment.heading, first.cell.row.label.replace("*", "\\*"))
            also = dict.fromkeys(other.cell.experiment.heading for other in others)
            text = f"{first.cell.column.label} {difference} (n = {first.n}{_also(list(also))})"
            found.setdefault(where, []).append(text)
    return [f"- {heading}, {label}: {', '.join(texts)}" for (heading, label), texts in found.items()]


def _also(headings: Sequence[str]) -> str:
    """'; also in Table 3', '; also in Tables 3 and 4'."""
    if len(headings) > 1 and all(heading.startswith("Table ") for heading in headings):
        return f"; also in Tables {join([heading.removeprefix('Table ') for heading in headings])}"
    return f"; also in {join(headings)}" if headings else ""


def _effects(paper: Paper, experiment: Experiment, cells: Sequence[Measured], file: str | None) -> str:
    mine = _of(experiment, cells)
    table = markdown_effects(experiment, mine)
    note = "".join(f"\n{text}\n" for text in (experiment.note, *remarks(paper, mine)) if text)
    opening = f"{experiment.opening}\n" if experiment.opening else ""
    return f"""## {caption(experiment)}

{opening}The first row is {MEASURES[experiment.measure]}; the others are the mean difference to it over runs
of the same class order and seed. {_reproduce(experiment.name, file)} runs what is missing.

{table}{note}"""


def _section(experiment: Experiment, cells: Sequence[Measured], file: str | None) -> str:
    """The table of the rows with runs; other rows are listed by name."""
    rows = [
        row for row in experiment.rows if any(c.n or c.cell.bare for c in _of(experiment, cells) if c.cell.row is row)
    ]
    if not rows:
        return f"## {caption(experiment)}\n\nNot run. {_reproduce(experiment.name, file)} would run it.\n"
    mine = [cell for cell in _of(experiment, cells) if cell.cell.row in rows]
    text = markdown(replace(experiment, rows=tuple(rows)), mine)
    others = [row.label.replace("*", "\\*") for row in experiment.rows if row not in rows]
    return text + (f"\nNot run: {', '.join(others)}.\n" if others else "")


def _provenance(used: Sequence[Record], records: Sequence[Record]) -> str:
    header = ["recipe", "runs (order/seed)", "seconds of a run", "hardware", "torch", "commit"]
    rows = [[run.recipe, run.orders, run.seconds, run.hardware, run.torch, run.commit] for run in run_batches(records)]
    others = len(records) - len(used)
    more = f" {others} of them are in no table above." if others else ""
    text = markdown_rows(header, rows) if records else "There are none yet.\n"
    shared = "Runs share a device, so the sum of their seconds is not wall-clock time."
    return f"## The runs\n\n{count_runs(len(records))}.{more} {shared}\n\n{text}"
