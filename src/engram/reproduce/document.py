"""docs/reproduction.md, or another paper's: what reproduces and what does not, made from the results and nothing else.

What this version could run plays no part, so the page changes when a result comes and not when a method does.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from engram.reproduce.cells import FURTHER, MARKS, NOT_RUN, WITHIN_POINT, WITHIN_STD, Measured, measure_all
from engram.reproduce.page import headline, records_of, remark
from engram.reproduce.paper import MEASURES, Experiment, Paper
from engram.reproduce.plan import Asked, make_plan
from engram.reproduce.records import Record
from engram.reproduce.text import LEGEND, caption, markdown, markdown_effects, number, signed

COMMAND = "engram results page docs/reproduction.md results"


def document(paper: Paper, records: Sequence[Record], command: str = COMMAND, file: str | None = None) -> str:
    """The whole page. command: what makes it. file: the paper's, as --paper takes it; None is AFC's."""
    seeds = sorted({record.seed for record in records}) or [1]
    plan = make_plan(list(paper.experiments.values()), records, Asked(seeds=seeds))
    cells = measure_all(plan)
    tables = [experiment for experiment in plan.experiments if experiment.kind != "effects"]
    effects = [experiment for experiment in plan.experiments if experiment.kind == "effects"]
    parts = [
        _opening(paper, cells, command, file),
        _overview(tables, cells),
        _reproduces(tables, cells),
        _does_not(paper, tables, cells),
        *(_effects(experiment, cells, file) for experiment in effects),
        *(_section(paper, experiment, cells) for experiment in tables),
        _provenance(records_of(plan.cells), records),
    ]
    return "\n".join(part for part in parts if part)


def _of(experiment: Experiment, cells: Sequence[Measured]) -> list[Measured]:
    return [cell for cell in cells if cell.cell.experiment is experiment]


def _opening(paper: Paper, cells: Sequence[Measured], command: str, file: str | None) -> str:
    checked = "; a test checks that it is what this command gives" if command == COMMAND else ""
    place = "[`results/`](../results/README.md)" if command == COMMAND else "a file of results"
    starred = any(cell.cell.row.label.endswith("*") for cell in cells)
    star = "A star marks what the paper's authors ran again with others' code. " if starred else ""
    return f"""# Reproduction

{paper.title}. {headline(cells)}

Made by `{command}`{checked}.
{_reproduce(next(iter(paper.experiments)), file)} runs what is not there yet; `engram results merge` adds it to {place}.
A number of ours stands beside the paper's and never in its place: what was not run says so.

{LEGEND}.
{star}Where the paper gives no standard deviation, one point is the measure.
"""


def _reproduce(name: str, file: str | None) -> str:
    """The command that runs what an experiment lacks."""
    return f"`engram reproduce {name}{'' if file is None else f' --paper {shlex.quote(file)}'}`"


def _overview(tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    rows = ["| | published | ours | " + " | ".join(MARKS[mark] for mark in (WITHIN_STD, WITHIN_POINT, FURTHER)) + " |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for experiment in tables:
        published = [cell for cell in _of(experiment, cells) if cell.cell.published is not None]
        if not published:
            continue
        marks = Counter(cell.mark for cell in published)
        counts = [
            len(published),
            len(published) - marks[NOT_RUN],
            *(marks[m] for m in (WITHIN_STD, WITHIN_POINT, FURTHER)),
        ]
        rows.append(f"| {caption(experiment)} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows) + "\n"


def _reproduces(tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    near = _named(tables, cells, (WITHIN_STD, WITHIN_POINT))
    text = "\n".join(near) or "Nothing was measured that is."
    return f"## What reproduces\n\nWithin the paper's standard deviation, or one point:\n\n{text}\n"


def _does_not(paper: Paper, tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    far = _named(tables, cells, (FURTHER,))
    remarks = {experiment.heading: remark(paper, _of(experiment, cells)) for experiment in tables}
    why = [f"- {heading}: {text}" for heading, text in remarks.items() if text]
    known = f"\nWhy, as far as known:\n\n{chr(10).join(why)}\n" if why else ""
    text = "\n".join(far) or "Nothing that was measured."
    return f"## What does not\n\nFurther off than one point and the paper's standard deviation:\n\n{text}\n{known}"


def _named(tables: Sequence[Experiment], cells: Sequence[Measured], marks: Sequence[str]) -> list[str]:
    """A line for each row of a table that has cells so marked."""
    found: list[str] = []
    for experiment in tables:
        for row in experiment.rows:
            those = [
                c for c in _of(experiment, cells) if c.cell.row is row and c.mark in marks and c.difference is not None
            ]
            texts = [f"{c.cell.column.label} {signed(c.difference or 0.0)} (n = {c.n})" for c in those]
            if texts:
                label = row.label.replace("*", "\\*")
                found.append(f"- {experiment.heading}, {label}: {', '.join(texts)}")
    return found


def _effects(experiment: Experiment, cells: Sequence[Measured], file: str | None) -> str:
    table = markdown_effects(experiment, _of(experiment, cells))
    note = f"\n{experiment.note}\n" if experiment.note else ""
    opening = f"{experiment.opening}\n" if experiment.opening else ""
    return f"""## {caption(experiment)}

{opening}The first row is {MEASURES[experiment.measure]}; the others are the mean difference to it over runs
of the same class order and seed. {_reproduce(experiment.name, file)} measures what is missing.

{table}{note}"""


def _section(paper: Paper, experiment: Experiment, cells: Sequence[Measured]) -> str:
    about = remark(paper, _of(experiment, cells))
    return markdown(experiment, _of(experiment, cells)) + (f"\n{about}\n" if about else "")


def _provenance(used: Sequence[Record], records: Sequence[Record]) -> str:
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        versions = record.data["versions"]
        key = (
            record.recipe,
            f"{record.hardware}, {record.precision}",
            f"torch {versions.get('torch', '?')}",
            record.commit,
        )
        groups.setdefault(key, []).append(record)
    rows = [
        "| recipe | runs (order/seed) | seconds of a run | hardware | torch | commit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (recipe, hardware, torch, commit), runs in groups.items():
        seconds = [run.result["seconds"] for run in runs]
        took = number(seconds[0], 0) if len(runs) == 1 else f"{number(min(seconds), 0)} to {number(max(seconds), 0)}"
        which = ", ".join(f"{run.order}/{run.seed}" for run in runs)
        rows.append(f"| {recipe} | {which} | {took} | {hardware} | {torch} | {commit} |")
    others = len(records) - len(used)
    more = f" {others} of them are in no table above." if others else ""
    text = "\n".join(rows) if groups else "There are none yet."
    shared = "Runs share a device, so their seconds do not add up to time on the wall."
    return f"## The runs\n\n{len(records)} runs.{more} {shared}\n\n{text}\n"
