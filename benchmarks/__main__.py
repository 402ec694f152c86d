"""`python -m benchmarks`: measures engram on this machine, prints tables, and writes one JSON file if asked to."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.after import after_tables, measure_after
from benchmarks.against import measure_plain, plain_tables
from benchmarks.augmented import augmented_tables, measure_augmented
from benchmarks.ground import Ground
from benchmarks.growth import growth_tables, measure_growth
from benchmarks.kernels import kernels_tables, measure_kernels
from benchmarks.methods import measure_methods, methods_tables
from benchmarks.predict import measure_predict, predict_tables
from benchmarks.report import Table, heading, provenance
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.step import measure_step, step_tables
from engram.core.errors import EngramError, suggest
from engram.core.io import write_json

# In the order they run: the profiler last, since what it leaves behind could slow the others down.
Results = dict[str, Any]
PARTS: dict[str, tuple[Callable[[Ground, Results], Results], Callable[[Results], list[Table]]]] = {
    "step": (lambda ground, _: measure_step(ground), step_tables),
    "plain": (lambda ground, done: measure_plain(ground, _measured(done, "step")), plain_tables),
    "augmented": (lambda ground, _: measure_augmented(ground), augmented_tables),
    "after": (lambda ground, _: measure_after(ground.scale), after_tables),
    "growth": (lambda ground, _: measure_growth(ground.scale), growth_tables),
    "methods": (lambda ground, _: measure_methods(ground.scale), methods_tables),
    "predict": (lambda ground, _: measure_predict(ground.scale), predict_tables),
    "kernels": (lambda ground, _: measure_kernels(ground), kernels_tables),
}


def _measured(done: Results, part: str) -> Results | None:
    """What a part found, if it ran and did not fail."""
    return None if "error" in done.get(part, {"error": ""}) else done[part]


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise EngramError(f"{text!r} is not a list of whole numbers; write them as 1,2,6") from None


def parts_of(text: str) -> list[str]:
    """The parts named, separated by commas, in the order they run."""
    asked = [item.strip() for item in text.split(",")]
    for part in asked:
        if part not in PARTS:
            raise EngramError(f"no part {part!r}: {suggest(part, PARTS)}")
    return [part for part in PARTS if part in asked]


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("--parts", default=",".join(PARTS), help="which to measure (default: %(default)s)")
    options.add_argument(
        "--quick", action="store_true", help="a tiny problem that tries the code; says nothing of speed"
    )
    options.add_argument("--out", type=Path, help="a JSON file for the numbers, written after every part")
    options.add_argument("--runs", help="how many runs at once, such as 1,2,6")
    options.add_argument("--steps", type=int, help="steps of one repetition")
    options.add_argument("--repetitions", type=int, help="repetitions of a measurement, 3 or more")
    options.add_argument("--workers", type=int, help="workers of the plain loop (no more than there are cores)")
    options.add_argument(
        "--epochs", type=int, help="epochs of the runs that 'after', 'growth' and 'methods' time, 2 or more"
    )
    options.add_argument("--files", type=int, help="the image files that 'predict' reads")
    options.add_argument("--methods", help="the methods that 'methods' times, such as afc,bic (default: all)")
    options.add_argument("--growth-classes", help="the classes in all of the runs that 'growth' times, such as 100,200")
    options.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="where to measure (default: CUDA if it is there)"
    )
    options.add_argument(
        "--precision",
        choices=("auto", "float32", "tf32", "bf16"),
        help="what engram computes in (default: bf16 on CUDA, float32 elsewhere)",
    )
    options.add_argument("--commit", help="the commit measured, where the code is not in a git checkout")
    return options


def scale_of(options: argparse.Namespace) -> Scale:
    """The scale that the options ask for."""
    changes: dict[str, Any] = {
        "runs": None if options.runs is None else numbers(options.runs),
        "growth_classes": None if options.growth_classes is None else numbers(options.growth_classes),
        "steps": options.steps,
        "repetitions": options.repetitions,
        "workers": options.workers,
        "run_epochs": options.epochs,
        "files": options.files,
        "methods": None if options.methods is None else tuple(options.methods.split(",")),
        "device": options.device,
        "precision": options.precision,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(QUICK if options.quick else FULL, **given)


def benchmark(options: argparse.Namespace, command: str, console: Console) -> bool:
    """Measures the parts one after the other; returns whether none failed."""
    scale, parts = scale_of(options), parts_of(options.parts)
    ground = Ground(scale)
    results: Results = {}
    record: dict[str, Any] = {
        "command": command,
        "quick": options.quick,
        **provenance(scale, ground.device, options.commit),
        "settings": asdict(scale),
        "parts": results,
    }
    print(heading(record))
    for part in parts:
        console.print(f"measuring: {part}")
        measure, tables = PARTS[part]
        started = time.perf_counter()
        try:
            results[part] = measure(ground, results)
        except Exception as error:
            # What the other parts measure is not lost: a machine with a GPU may be there for minutes only.
            traceback.print_exc()
            results[part] = {"error": f"{type(error).__name__}: {error}"}
            console.print(f"{part} failed after {time.perf_counter() - started:.1f} s", style="red")
        else:
            results[part]["seconds"] = time.perf_counter() - started
            for table in tables(results[part]):
                print(table.markdown(), flush=True)
        if options.out is not None:
            write_json(options.out, record)
    return not any("error" in result for result in results.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    console = Console(stderr=True)
    try:
        complete = benchmark(options, shlex.join(["python", "-m", "benchmarks", *given]), console)
    except EngramError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
