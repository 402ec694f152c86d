"""Result of a lesson, as a line and as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from engram.cli.text import count_classes, duration, make_table, measures_text, percent, shorten
from engram.core.events import Learned


def learned_line(event: Learned) -> str:
    """Return the result of a lesson in one line."""
    again = set(event.refreshed)
    new = [name for name in event.new if name not in again]
    parts = [f"learned {shorten(new, 50)}"] if new else []
    parts += [f"learned again {shorten(event.refreshed, 50)}"] if event.refreshed else []
    said = [f"of these {measures_text(event.new_accuracy)}"] if event.new_accuracy else []
    for which, before, after in (
        ("those learned again", event.refreshed_before, event.refreshed_after),
        ("the old", event.before, event.after),
    ):
        said += [f"of {which} {measures_text(before)} before and {measures_text(after)} now"] if after else []
    accuracy = f"; held-out accuracy {', '.join(said)}" if said else ""
    exemplars = f"{event.exemplars} image{'s' if event.exemplars != 1 else ''} kept"
    where = f" ({event.path})" if event.path else ""
    return (
        f"{', '.join(parts)} in {duration(event.seconds)}; {count_classes(event.num_classes)} known, {exemplars}"
        f"{accuracy}{where}"
    )


def lesson_table(event: Learned) -> Table:
    """Return held-out accuracy by predictor: old classes before and after, forgetting, new classes."""
    predictors = list(dict.fromkeys([*event.new_accuracy, *event.after]))
    columns = [f"{name} %" for name in predictors]
    table = make_table(["held-out images", *columns], right=columns)
    rows: dict[str, dict[str, float]] = {}
    if event.after:
        lost = {by: event.before[by] - event.after[by] for by in event.after if by in event.before}
        rows |= {"old classes, before": event.before, "old classes, now": event.after, "forgotten, points": lost}
    if event.refreshed:
        rows |= {"learned again, before": event.refreshed_before, "learned again, now": event.refreshed_after}
    if len(event.new) > len(event.refreshed):
        rows["new and learned again" if event.refreshed else "classes learned now"] = event.new_accuracy
    for name, values in rows.items():
        table.add_row(name, *[percent(values.get(by)) for by in predictors])
    return table


def by_class_table(event: Learned) -> Table:
    """Return held-out accuracy of each class before and after the lesson, by predictor."""
    predictors = list(dict.fromkeys(by for entry in event.by_class for by in entry["after"]))
    columns = [f"{by}\n{when}" for by in predictors for when in ("before %", "now %")]
    table = make_table(["class", *columns], right=columns)
    for entry in event.by_class:
        table.add_row(entry["class"], *_cells(entry, predictors))
    return table


def _cells(entry: dict[str, Any], predictors: list[str]) -> list[str]:
    before, after = entry["before"] or {}, entry["after"]
    return [percent(values.get(by)) for by in predictors for values in (before, after)]
