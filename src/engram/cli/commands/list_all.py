"""`engram list`: what can be chosen, the runs so far, and the caches of base stages and decoded images."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.commands.run_common import run_status
from engram.cli.options.runs import List
from engram.cli.text import make_console, make_table, percent, print_indented, print_line, print_table
from engram.contract.predictors import PREDICTORS, Predictor
from engram.contract.settings import OPTIMISERS, SCHEDULES, with_role
from engram.core.errors import EngramError
from engram.core.io import data_home
from engram.data.memory import SELECTIONS
from engram.data.policies import POLICIES, Policy
from engram.data.sources.image_cache import ImageCache
from engram.data.sources.imagenet import CACHE
from engram.experiment.base_cache import user_cache
from engram.experiment.recipes import recipe, recipe_names
from engram.methods import METHODS
from engram.nn.backbones import BACKBONES
from engram.nn.pretrained import how_to_get, known_weights
from engram.nn.weights_catalogue import KNOWN
from engram.reproduce.results_files import measured
from engram.runs.directory import RESULT, find_runs
from engram.runs.reader import read_manifest, read_result

Row = dict[str, Any]

DATASETS = {
    "mini": "in the package: 20 classes of CIFAR-100 at 16x16 pixels, 250 training and 100 test images each",
    "cifar100": "100 classes at 32x32 pixels; 'engram prepare cifar100' downloads it, or give --data PATH",
    "imagenet100": "the first 100 classes of ImageNet at 224x224 pixels: give its train/ and val/ with --data PATH",
    "imagenet1000": "all of ImageNet at 224x224 pixels: give its train/ and val/ with --data PATH",
    "folder": "your own images: give a folder of class folders with --data PATH",
}
# The recipes whose results are listed with a method.
MEASURED_ON = {"measured": "{}-cifar100-b50-s10", "embedded": "{}-mini-b10-s5"}
MEMORY = {"needed": "exemplars", "none": "none", "all": "every image", "optional": "none, or exemplars"}
METHODS_WIDTH = 120  # columns that the table of methods needs
# The entries of a row that are shown, in order; --json prints all of them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "recipes": ("recipe", "base", "increment", "memory", "epochs", "predictor"),
    "methods": ("method", "title", "paper", "memory", *MEASURED_ON),
    "datasets": ("dataset", "description"),
    "backbones": ("backbone", "description"),
    "weights": ("weights", "here", "licence", "how"),
    "parts": ("part", "name", "description", "file"),
    "runs": ("directory", "recipe", "order", "seed", "stages", "average", "status"),
    "cache": ("trained by", "file", "megabytes", "last used"),
    "decoded": ("file", "megabytes", "last used"),
}
NUMBERS = ("megabytes", "base", "increment", "epochs", "order", "seed", "stages", "average", *MEASURED_ON)
TITLES = {"dataset": "data set", "average": "average %"}


def list_command(options: List, _: Sequence[str]) -> int:
    """Run `engram list`."""
    console = make_console()
    rows = {
        "overview": _protocols,
        "recipes": _recipes,
        "methods": _methods,
        "datasets": lambda: [{"dataset": name, "description": text} for name, text in DATASETS.items()],
        "backbones": _backbones,
        "weights": _weights,
        "parts": _parts,
        "runs": lambda: list_runs(Path(options.root)),
        "cache": _cache,
    }[options.what]()
    if options.text is not None:
        rows = _filter(rows, options, options.text)
    if options.json:
        print_line(console, json.dumps(rows))
    elif options.what == "overview":
        _print_overview(console, rows)
    elif options.what == "runs":
        _print_runs(console, rows, options.root)
    elif options.what == "cache":
        _print_cache(console, rows)
    elif options.what == "methods":
        _print_methods(console, rows)
    else:
        _print_rows(console, options.what, rows)
    return 0


def _filter(rows: Sequence[Row], options: List, text: str) -> list[Row]:
    """Return the rows that contain the text; without any, raise an error, except for --json."""
    wanted = text.casefold()
    found = [row for row in rows if wanted in " ".join(map(str, row.values())).casefold()]
    if not found and not options.json:
        raise EngramError(
            f"nothing in the list of {options.what} contains {text!r}; 'engram list {options.what}' has all"
        )
    return found


def _print_rows(console: Console, what: str, rows: Sequence[Row]) -> None:
    titles = {column: TITLES.get(column, column) for column in COLUMNS[what]}
    table = make_table(titles.values(), right=[title for column, title in titles.items() if column in NUMBERS])
    for row in rows:
        cells = [row[column] for column in titles]
        table.add_row(
            *["-" if cell is None else percent(cell) if isinstance(cell, float) else str(cell) for cell in cells]
        )
    print_table(console, table)


def _print_overview(console: Console, rows: Sequence[Row]) -> None:
    """Print the recipes by data set and protocol, with their methods, and where more is listed."""
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        print_line(console, f"{dataset}: {DATASETS.get(dataset, 'of a method from outside the package')}")
        own = [row for row in rows if row["dataset"] == dataset]
        for row, following in zip(own, [*own[1:], None], strict=True):
            numbers = f"N = {' or '.join(map(str, row['stages']))} stages" if row["stages"] else "one class a stage"
            base = "" if row["base"] is None else f"{row['base']}, then "
            print_indented(console, f"{row['recipes']}: {base}{numbers}{'' if base else ' of equal size'}")
            if following is None or following["methods"] != row["methods"]:
                print_indented(console, f"METHOD: {', '.join(row['methods'])}", 8)
    print_line(console, "'engram list recipes [TEXT]' shows the settings of each; 'engram list methods' the methods")


def _print_runs(console: Console, rows: Sequence[Row], root: str) -> None:
    """Print the runs as a table, or each on two lines if the console is too narrow."""
    if not rows:
        print_line(console, f"there is no run in {root}; 'engram demo' makes some")
        return
    longest = [max(len(str(row[column])) for row in rows) for column in ("directory", "recipe", "status")]
    if console.width >= sum(longest) + 50:
        _print_rows(console, "runs", rows)
        return
    for row in rows:
        print_line(console, row["directory"])
        known = [] if row["recipe"] is None else [f"{row['recipe']}, order {row['order']}, seed {row['seed']}"]
        known += [f"{row['stages']} stages" if row["stages"] else "", row["status"]]
        known += [] if row["average"] is None else [f"average {percent(row['average'])} %"]
        print_indented(console, ", ".join(filter(None, known)))


def _print_methods(console: Console, rows: Sequence[Row]) -> None:
    """Print the methods as a table, or each on about three lines if the table would break words."""
    if console.width >= METHODS_WIDTH:
        _print_rows(console, "methods", rows)
    else:
        for row in rows:
            console.print(f"{row['method']}: {row['title']}")
            numbers = [f"{column} {row[column] or '-'}" for column in MEASURED_ON]
            for text in filter(None, (row["paper"], f"memory: {row['memory']}; {', '.join(numbers)}")):
                print_indented(console, text)
    recipes = "; ".join(f"{column}: of {name.format('METHOD')}" for column, name in MEASURED_ON.items())
    console.print(f"average incremental accuracy, % (runs), {recipes}; - if not measured yet")


def _print_cache(console: Console, rows: Sequence[Row]) -> None:
    """Print the entries of each cache, where it is, and that they can be deleted."""
    stages, decoded = ([row for row in rows if row["kind"] == kind] for kind in ("base stage", "decoded images"))
    print_line(console, f"{len(stages)} trained base stages in {user_cache().folder}; you can delete any of them")
    if stages:
        _print_rows(console, "cache", stages)
    if decoded:
        sets = f"{len(decoded)} set{'s' if len(decoded) > 1 else ''} of decoded images"
        place = Path(decoded[0]["path"]).parent
        print_line(console, f"{sets} in {place}; you can delete any of them, a run that needs one decodes it again")
        _print_rows(console, "decoded", decoded)


def _cache() -> list[Row]:
    """List the trained base stages that runs share, then the decoded image sets; the longest unused first."""
    images, cache = ImageCache(data_home() / CACHE), user_cache()
    stages = [("base stage", entry.path, entry, cache.trained_by(entry.key)) for entry in cache.entries()]
    decoded = [("decoded images", images.path(entry.key, entry.kind), entry, None) for entry in images.entries()]
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


def _protocols() -> list[Row]:
    """List the recipes that differ only in their method or number of stages as one row.

    base: None if all stages have the same size, and their number counts all of them.
    """
    rows: dict[str, Row] = {}
    for config in map(recipe, recipe_names()):
        name = f"METHOD{config.recipe.removeprefix(config.method)}"
        stem, _, stages = name.rpartition("-s")
        name = f"{stem}-sN" if stages.isdecimal() else name
        base = "half of the classes" if config.base is None else f"{config.base} classes"
        base = None if config.base == config.increment else base
        empty = {"dataset": config.data.name, "recipes": name, "base": base, "stages": {}, "methods": {}}
        row = rows.setdefault(name, empty)
        row["methods"][config.method] = None
        row["stages"] |= {int(stages): None} if stages.isdecimal() else {}
    return [row | {"stages": list(row["stages"]), "methods": list(row["methods"])} for row in rows.values()]


def _recipes() -> list[Row]:
    rows: list[Row] = []
    for config in map(recipe, recipe_names()):
        trainings = list(with_role(config.settings, "main").values())
        rows.append(
            {
                "recipe": config.recipe,
                "dataset": config.data.name,
                "base": "half" if config.base is None else config.base,
                "increment": config.increment,
                "memory": str(config.memory),
                "epochs": trainings[0].epochs if trainings else None,
                "predictor": config.predictor,
            }
        )
    return rows


def _methods() -> list[Row]:
    known = measured()
    return [
        {
            "method": info.name,
            "title": info.title,
            "paper": info.paper or None,
            "memory": MEMORY[info.memory],
            **{column: _accuracy_text(known.get(name.format(info.name))) for column, name in MEASURED_ON.items()},
        }
        for info in sorted(METHODS.values(), key=lambda info: info.name)
    ]


def _accuracy_text(numbers: dict[str, Any] | None) -> str | None:
    """Return mean, standard deviation and number of runs, or None if there is no run yet."""
    if numbers is None:
        return None
    spread = "" if numbers["std"] is None else f" ± {numbers['std']:.2f}"
    return f"{numbers['mean']:.2f}{spread} ({numbers['n']})"


def _backbones() -> list[Row]:
    described = {name: (BACKBONES.find(name).__doc__ or "").strip() for name in BACKBONES.names()}
    return [{"backbone": name, "description": text.partition("\n")[0]} for name, text in described.items()]


def _weights() -> list[Row]:
    """List the known pretrained weights, and how to get those that are not here."""
    return [
        {
            "weights": name,
            "here": "yes" if is_here else "no",
            "licence": KNOWN[name].licence,
            "source": KNOWN[name].source,
            "how": None if is_here else how_to_get(name),
        }
        for name, is_here in known_weights().items()
    ]


def _parts() -> list[Row]:
    """List what settings name: optimisers, schedules, selections ... file: of one from outside."""
    rows: list[Row] = []
    for registry in (OPTIMISERS, SCHEDULES, SELECTIONS, PREDICTORS, POLICIES):
        for name in registry.names():
            value = registry.find(name)
            made = (
                value.function if isinstance(value, Predictor) else value.apply if isinstance(value, Policy) else value
            )
            text, versions = (made.__doc__ or "").strip().partition("\n")[0], registry.versions(name)
            file = next((text for key, text in versions.items() if key.endswith("_file")), None)
            rows.append({"part": registry.kind, "name": name, "description": text, "file": file})
    return rows


def list_runs(root: Path) -> list[Row]:
    """Return one row for each run under the root; the row of a damaged run says what is wrong."""
    rows: list[Row] = []
    for path in find_runs(root):
        row: Row = {**dict.fromkeys(COLUMNS["runs"]), "directory": str(path)}
        try:
            row |= _describe_run(path)
        except EngramError as error:
            row["status"] = f"damaged: {error}"
        rows.append(row)
    return rows


def _describe_run(path: Path) -> Row:
    manifest = read_manifest(path)
    total, done, average = len(manifest.stage_sizes), 0, None
    if os.path.lexists(path / RESULT):
        result = read_result(path, manifest)
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
