"""`engram list`: recipes, methods, data sets, backbones, runs, and the caches of base stages and decoded images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding

from engram.cli.commands.run_paths import run_status
from engram.cli.options.runs import List
from engram.cli.text import make_console, make_table, percent, print_line, print_table
from engram.core.errors import EngramError
from engram.data.sources.download import data_home
from engram.experiment.shared_base import user_cache
from engram.runs.directory import RESULT, find_runs
from engram.runs.reader import read_manifest, read_result

DATASETS = {
    "mini": "in the package: 20 classes of CIFAR-100 at 16x16 pixels, 250 training and 100 test images each",
    "cifar100": "100 classes at 32x32 pixels; 'engram prepare cifar100' downloads it, or give --data PATH",
    "imagenet100": "the first 100 classes of ImageNet at 224x224 pixels: its train/ and val/, given with --data PATH",
    "imagenet1000": "all of ImageNet at 224x224 pixels: its train/ and val/, given with --data PATH",
    "folder": "your own images: a folder of class folders, given with --data PATH",
}
# The recipes whose results a method is listed with.
MEASURED_ON = {"measured": "{}-cifar100-b50-s10", "embedded": "{}-mini-b10-s5"}
METHODS_WIDTH = 120  # columns that their table needs
# Which entries of a row are shown, in order; --json gives all of them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "recipes": ("recipe", "base", "increment", "memory", "epochs", "predictor"),
    "methods": ("method", "title", "paper", "memory", *MEASURED_ON),
    "datasets": ("dataset", "description"),
    "backbones": ("backbone", "description"),
    "runs": ("directory", "recipe", "order", "seed", "stages", "average", "status"),
    "cache": ("trained by", "file", "megabytes", "last used"),
    "decoded": ("file", "megabytes", "last used"),
}
NUMBERS = ("megabytes", "base", "increment", "epochs", "order", "seed", "stages", "average", *MEASURED_ON)
TITLES: dict[str, str] = {"dataset": "data set", "description": "what it is", "average": "average %"}


def list_command(options: List, typed: Sequence[str]) -> int:
    """The exit status of `engram list`."""
    del typed
    console = make_console()
    rows = {
        "recipes": _recipes,
        "methods": _methods,
        "datasets": lambda: [{"dataset": name, "description": text} for name, text in DATASETS.items()],
        "backbones": _backbones,
        "runs": lambda: list_runs(Path(options.root)),
        "cache": _cache,
    }[options.what]()
    if options.text is not None:
        rows = _filtered(rows, options, options.text)
    if options.json:
        print_line(console, json.dumps(rows))
    elif options.what == "runs" and not rows:
        print_line(console, f"there is no run in {options.root}; 'engram demo' makes some")
    elif options.what == "cache":
        _print_cache(console, rows)
    elif options.what == "recipes":
        for dataset in dict.fromkeys(row["dataset"] for row in rows):
            _print(console, options.what, [row for row in rows if row["dataset"] == dataset], DATASETS.get(dataset))
    elif options.what == "runs":
        _print_runs(console, rows)
    elif options.what == "methods":
        _print_methods(console, rows)
        of = "; ".join(f"{column}: of {recipe.format('METHOD')}" for column, recipe in MEASURED_ON.items())
        console.print(f"average incremental accuracy, % (runs), {of}; - where there is none yet")
    else:
        _print(console, options.what, rows)
    return 0


def _filtered(rows: Sequence[dict[str, Any]], options: List, text: str) -> list[dict[str, Any]]:
    """The rows with the text in one of their entries; none is refused, but for programs, which get an empty list."""
    wanted = text.casefold()
    found = [row for row in rows if any(wanted in cell.casefold() for cell in row.values() if isinstance(cell, str))]
    if not found and not options.json:
        raise EngramError(f"there is no {text!r} in the list of {options.what}; 'engram list {options.what}' has all")
    return found


def _cache() -> list[dict[str, Any]]:
    """The trained base stages that runs share, then the decoded image sets, of each the longest unused first."""
    from engram.data.sources.image_cache import ImageCache
    from engram.data.sources.imagenet import CACHE

    images, cache = ImageCache(data_home() / CACHE), user_cache()
    stages = [("base stage", entry.path, entry, cache.trained_by(entry.key)) for entry in cache.entries()]
    decoded = [("decoded images", images.path(entry.key), entry, None) for entry in images.entries()]
    return [
        {
            "kind": kind,
            "trained by": trained_by,
            "file": path.name,
            "path": str(path),
            "megabytes": f"{entry.size / 1e6:.1f}",
            "last used": datetime.fromtimestamp(entry.used).isoformat(sep=" ", timespec="seconds"),
        }
        for kind, path, entry, trained_by in [*stages, *decoded]
    ]


def _print_cache(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints what is kept of each kind, where, and that it can be deleted; decoded images only where there are some."""
    stages, decoded = ([row for row in rows if row["kind"] == kind] for kind in ("base stage", "decoded images"))
    print_line(console, f"{len(stages)} trained base stages in {user_cache().folder}; delete what you like")
    if stages:
        _print(console, "cache", stages)
    if decoded:
        sets = f"{len(decoded)} set{'s' if len(decoded) > 1 else ''} of decoded images"
        place = Path(decoded[0]["path"]).parent
        print_line(console, f"{sets} in {place}; delete what you like, it is decoded again when a run needs it")
        _print(console, "decoded", decoded)


def _print(console: Console, what: str, rows: Sequence[dict[str, Any]], title: str | None = None) -> None:
    columns = COLUMNS[what]
    titles = {column: TITLES.get(column, column) for column in columns}
    table = make_table(titles.values(), right=[title for column, title in titles.items() if column in NUMBERS])
    for row in rows:
        cells = [row[column] for column in columns]
        table.add_row(
            *[percent(cell) if isinstance(cell, float) else "-" if cell is None else str(cell) for cell in cells]
        )
    if title is not None:
        print_line(console, f"{rows[0]['dataset']}: {title}")
    print_table(console, table)


def _print_runs(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the runs as a table, or where that is too wide, each on two lines."""
    longest = {column: max(len(str(row[column])) for row in rows) for column in ("directory", "recipe", "status")}
    if console.width >= sum(longest.values()) + 50:
        _print(console, "runs", rows)
        return
    for row in rows:
        print_line(console, row["directory"])
        known = [] if row["recipe"] is None else [f"{row['recipe']}, order {row['order']}, seed {row['seed']}"]
        known += [f"{row['stages']} stages" if row["stages"] else "", row["status"]]
        known += [] if row["average"] is None else [f"average {percent(row['average'])} %"]
        console.print(Padding(", ".join(filter(None, known)), (0, 0, 0, 4)))


def _print_methods(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the methods as a table, or where words would be broken in it, each on three lines or so."""
    if console.width >= METHODS_WIDTH:
        _print(console, "methods", rows)
        return
    for row in rows:
        console.print(f"{row['method']}: {row['title']}")
        numbers = [f"{column} {row[column] or '-'}" for column in MEASURED_ON]
        for text in filter(None, (row["paper"], f"memory: {row['memory']}; {', '.join(numbers)}")):
            console.print(Padding(text, (0, 0, 0, 4)))


def _recipes() -> list[dict[str, Any]]:
    from engram.experiment.recipes import recipe, recipe_names

    rows: list[dict[str, Any]] = []
    for name in recipe_names():
        config = recipe(name)
        training = getattr(config.settings, "train", None)
        rows.append(
            {
                "recipe": name,
                "dataset": config.data.name,
                "base": "half" if config.base is None else config.base,
                "increment": config.increment,
                "memory": str(config.memory),
                "epochs": None if training is None else training.epochs,
                "predictor": config.predictor,
            }
        )
    return rows


def _methods() -> list[dict[str, Any]]:
    from engram.methods import METHODS
    from engram.reproduce.measured_summary import measured

    needs = {"needed": "exemplars", "none": "none", "all": "every image", "optional": "none, or exemplars"}
    known = measured()
    return [
        {
            "method": info.name,
            "title": info.title,
            "paper": info.paper or None,
            "memory": needs[info.memory],
            **{column: _measured(known.get(recipe.format(info.name))) for column, recipe in MEASURED_ON.items()},
        }
        for info in sorted(METHODS.values(), key=lambda info: info.name)
    ]


def _measured(numbers: dict[str, Any] | None) -> str | None:
    """The accuracy, its spread and how many runs it is of; None where there is no run yet."""
    if numbers is None:
        return None
    spread = "" if numbers["std"] is None else f" ± {numbers['std']:.2f}"
    return f"{numbers['mean']:.2f}{spread} ({numbers['n']})"


def _backbones() -> list[dict[str, Any]]:
    from engram.nn.backbones import BACKBONES

    return [{"backbone": name, "description": (make.__doc__ or "").strip()} for name, make in BACKBONES.items()]


def list_runs(root: Path) -> list[dict[str, Any]]:
    """One row for each run under the root; a damaged one has its row too, and says what is wrong."""
    rows: list[dict[str, Any]] = []
    for path in find_runs(root):
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS["runs"]), "directory": str(path)}
        try:
            row |= _describe_run(path)
        except EngramError as error:
            row["status"] = f"damaged: {error}"
        rows.append(row)
    return rows


def _describe_run(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    total, done, average = len(manifest.stage_sizes), 0, None
    if (path / RESULT).exists():
        result = read_result(path)
        done, averages = len(result.stages), result.average_incremental_accuracy
        average = averages.get(str(manifest.config.get("predictor")), next(iter(averages.values()), None))
    return {
        "recipe": manifest.recipe,
        "order": manifest.order.name if "," not in manifest.order.name else "given",
        "seed": manifest.config.get("seed"),
        "stages": f"{done}/{total}",
        "average": average,
        "status": run_status(path, total, done),
    }
