"""`engram results`: collect measured runs in a file, or write a page or summary of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from engram.cli.options.runs import Results
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path, write_text
from engram.report.formatting import count_runs
from engram.reproduce.paper import load_paper
from engram.reproduce.paper_tables import document
from engram.reproduce.records import Record
from engram.reproduce.results_files import SUFFIX, merge, read_file, read_results, summarise, summary_text, write_file


def results_command(options: Results, typed: Sequence[str]) -> int:
    """Run `engram results`."""
    out, inputs = typed_path(options.out), [typed_path(name) for name in options.inputs]
    wanted = {"merge": SUFFIX, "page": ".md", "summary": ".json"}[options.what]
    if out.suffix != wanted:
        raise EngramError(f"engram results {options.what} writes a file that ends in {wanted}, got {out}")
    found = read_results(inputs)
    for run in found.unfinished:
        print(f"engram: left out {run}: it is not complete", file=sys.stderr)
    if options.what == "merge":
        return _merge(out, found.records)
    records = merge(found.records)
    if options.what == "page":
        paper = load_paper(None if options.paper is None else typed_path(options.paper))
        text, what = document(paper, records, shlex.join(["engram", *typed]), options.paper), ""
    else:
        summary = summarise(records)
        if not summary:
            raise EngramError("no run of an unchanged recipe was given; nothing was written")
        text, what = summary_text(summary), f"{len(summary)} unchanged recipes, of "
    write_text(out, text)
    print_line(make_console(), f"{out}: {what}{count_runs(len(records))}")
    return 0


def _merge(out: Path, records: Sequence[Record]) -> int:
    known = read_file(out) if out.exists() else []
    merged = merge([*known, *records])
    if not merged:
        raise EngramError("no complete run was given; nothing was written")
    write_file(out, merged)
    before = len(merge(known))
    print_line(make_console(), f"{out}: {count_runs(len(merged))}, {len(merged) - before} of them new")
    return 0
