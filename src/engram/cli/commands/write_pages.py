"""`engram report` and `engram results`: write pages and files about runs."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from engram.cli.options.runs import Report, Results
from engram.cli.streams import tell
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path, write_text
from engram.models.store.generations import refuse_model
from engram.report.formatting import count_runs, csv_text
from engram.report.html_page import is_report_folder
from engram.runs.directory import MANIFEST, RESULT, runs_in


def report_command(options: Report, _: Sequence[str]) -> int:
    """Run `engram report`."""
    given = [typed_path(name) for name in options.directories]
    directories = find_directories(given)
    out = None if options.out is None else typed_path(options.out)
    if out is None and len(given) == 1:
        out = given[0] / "report.html"  # next to its runs
    from engram.report.page import write_report  # matplotlib takes a second to import

    path = write_report(directories, out, tell=tell, pdf=options.pdf)
    console = make_console()
    print_line(console, str(path))
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        print_line(console, "no browser could be opened here; open the file above in one")
    return 0


def find_directories(given: Sequence[Path]) -> list[Path]:
    """Return the run directories in what was given.

    The folder of an earlier report, which a pattern such as runs/* matches, is skipped. Other directories without runs,
    and runs without a finished stage, are named and left out if there is something else to report on.
    """
    missing = [path for path in given if not path.exists()]
    if missing or (len(given) == 1 and not given[0].is_dir()):
        raise EngramError(f"there is no run directory at {(missing or given)[0]}; 'engram list runs' shows all runs")
    found = [(path, runs_in(path)) for path in given if path.is_dir()]
    if len(given) > 1:
        found = [(path, runs) for path, runs in found if runs or not is_report_folder(path)]
    runs = [run for _, inner in found for run in inner]
    finished = [run for run in runs if (run / RESULT).exists()]
    if not runs:
        path = found[0][0] if found else given[0]
        refuse_model(path)
        raise EngramError(f"{path} is not a run directory (it has no {MANIFEST}) and contains none; give another")
    for path in [path for path, inner in found if not inner]:
        tell(f"left out {path}: it is not a run directory and contains none")
    if not finished:
        return runs  # the report's error says what the first one lacks
    for run in [run for run in runs if run not in finished]:
        tell(f"left out {run}: it has no finished stage yet")
    return finished


def results_command(options: Results, typed: Sequence[str]) -> int:
    """Run `engram results`."""
    from engram.reproduce.paper import load_paper  # these import torch, which a report does not need
    from engram.reproduce.paper_tables import document
    from engram.reproduce.results_files import (
        SUFFIX,
        merge,
        read_file,
        read_results,
        summarise,
        summary_text,
        table_of,
        write_file,
    )

    out, inputs = typed_path(options.out), [typed_path(name) for name in options.inputs]
    kinds = {"merge": [SUFFIX], "table": [".tex", ".md", ".csv"], "page": [".md"], "summary": [".json"]}[options.what]
    if out.suffix not in kinds:
        raise EngramError(f"engram results {options.what} writes a file that ends in {' or '.join(kinds)}, got {out}")
    found = read_results(inputs)
    for run in found.unfinished:
        tell(f"left out {run}: it is not complete")
    known = read_file(out) if options.what == "merge" and out.exists() else []
    records = merge([*known, *found.records])
    what, new = "", ""
    if options.what == "merge":
        if not records:
            raise EngramError("no complete run was given; nothing was written")
        write_file(out, records)
        new = f", {len(records) - len(merge(known))} of them new"
    elif options.what == "table":
        if not records:
            raise EngramError("no complete run was given; nothing was written")
        table = table_of(records)
        texts = {".tex": table.to_latex, ".md": table.to_markdown, ".csv": lambda: csv_text(*table.cells())}
        write_text(out, texts[out.suffix]())
        what = f"{len(table.rows)} row{'' if len(table.rows) == 1 else 's'}, of "
    elif options.what == "page":
        paper = load_paper(None if options.paper is None else typed_path(options.paper))
        write_text(out, document(paper, records, shlex.join(["engram", *typed]), options.paper))
    else:
        summary = summarise(records)
        if not summary:
            raise EngramError("no run of an unchanged recipe was given; nothing was written")
        write_text(out, summary_text(summary))
        what = f"{len(summary)} unchanged recipes, of "
    print_line(make_console(), f"{out}: {what}{count_runs(len(records))}{new}")
    return 0
