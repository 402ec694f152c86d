"""Growth: the time of a stage against images and classes, and whether anything grows with the square of the classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.report import Table, number, percent
from benchmarks.runs import AFTER, StageTimes, run_stages
from benchmarks.scale import Scale, afc_config, synthetic_store
from engram.core.errors import EngramError

# What is fitted: a stage at full length, one epoch of its main phase, and each part that follows.
PARTS: dict[str, Callable[[StageTimes], float]] = {
    "stage": lambda stage: sum(stage.extrapolated().values()),
    "epoch": StageTimes.epoch_seconds,
    **{kind: (lambda stage, kind=kind: stage.seconds_by.get(kind, 0.0)) for kind in AFTER},
}
TRAINING = ("stage", "epoch")  # these see full batches only; the others see every image of the pool
SKIPPED = 2  # the base stage has no teacher, and the first stage that has one compiles for it
LEAST = 4  # points that the fit with a square needs: three coefficients and one to spare


@dataclass(frozen=True)
class Fit:
    """seconds = constant + per_image * images, and what a term in the square of the classes would add to it.

    residual: the largest relative distance of the line from a point. square: the coefficient of classes^2 when it is
    fitted too, with its standard error; square_share: what that term is of the last point's time.
    """

    points: int
    constant: float
    per_image: float
    residual: float
    square: float
    square_error: float
    square_share: float

    @property
    def grows_with_square(self) -> bool:
        """Whether the square shows: above three standard errors and more than a fiftieth of the last point's time."""
        return self.square > 3 * self.square_error and self.square_share > 0.02


def fit_growth(images: Sequence[float], classes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Least squares over the points, once with and once without the square of the classes."""
    if len(seconds) < LEAST:
        raise EngramError(f"a fit of growth needs {LEAST} stages or more, got {len(seconds)}; use more classes")
    x, n, y = (np.asarray(values, dtype=np.float64) for values in (images, classes, seconds))
    line, _ = _least_squares(np.stack([np.ones_like(x), x]), y)
    residual = np.abs(line[0] + line[1] * x - y) / np.maximum(np.abs(y), 1e-12)
    curve, errors = _least_squares(np.stack([np.ones_like(x), x, n**2]), y)
    return Fit(
        points=len(y),
        constant=float(line[0]),
        per_image=float(line[1]),
        residual=float(residual.max()),
        square=float(curve[2]),
        square_error=float(errors[2]),
        square_share=float(curve[2] * n[-1] ** 2 / y[-1]) if y[-1] else 0.0,
    )


def _least_squares(columns: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients of the columns (rows of the array) and their standard errors."""
    scales = np.abs(columns).max(axis=1)  # brought to like size: images and squares are far from one
    design = (columns / scales[:, None]).T
    solution, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if rank < len(columns):
        raise EngramError("the stages differ too little for a fit of growth; use more classes, or smaller increments")
    variance = ((design @ solution - y) ** 2).sum() / (len(y) - len(columns))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    return solution / scales, errors / scales


def measure_growth(scale: Scale) -> dict[str, Any]:
    """One short AFC run for each number of classes, and the fits to its stages."""
    runs: list[dict[str, Any]] = []
    for classes in scale.growth_classes:
        store = synthetic_store(classes, scale.growth_per_class, scale.test_per_class, scale.image_size)
        config = afc_config(scale, epochs=scale.run_epochs, finetune=scale.run_finetune)
        config = replace(config, base=scale.growth_base, increment=scale.growth_increment)
        runs.append(summarise_growth(classes, run_stages(config, store, scale.batch_size)))
    return {"runs": runs, "epochs": [scale.run_epochs, scale.run_finetune], "per_class": scale.growth_per_class, "n": 1}


def summarise_growth(classes: int, stages: Sequence[StageTimes]) -> dict[str, Any]:
    """The stages of a run and the fit of each part to them."""
    fitted = stages[SKIPPED:]
    seen = [stage.classes for stage in fitted]
    fits: dict[str, dict[str, Any]] = {}
    for part, seconds_of in PARTS.items():
        images = [stage.trained if part in TRAINING else stage.images for stage in fitted]
        fit = fit_growth(images, seen, [seconds_of(stage) for stage in fitted])
        fits[part] = {**asdict(fit), "grows_with_square": fit.grows_with_square}
    points = [
        {
            "stage": stage.stage,
            "classes": stage.classes,
            "exemplars": stage.exemplars,
            "images": stage.images,
            "images_trained": stage.trained,
            "seconds": {part: seconds_of(stage) for part, seconds_of in PARTS.items()},
        }
        for stage in stages
    ]
    return {"classes": classes, "stages": points, "fits": fits}


def growth_tables(result: dict[str, Any]) -> list[Table]:
    """A table of the fits and one of the stages for each run."""
    rows = [
        [
            str(run["classes"]),
            part,
            number(fit["constant"], 3),
            number(1e6 * fit["per_image"], 2),
            percent(fit["residual"]),
            f"{1e6 * fit['square']:.3g} ± {1e6 * fit['square_error']:.2g}",
            percent(fit["square_share"]),
            "yes" if fit["grows_with_square"] else "no",
        ]
        for run in result["runs"]
        for part, fit in run["fits"].items()
    ]
    header = ["classes in all", "time of", "a, s", "b, µs an image", "largest residual", "c, µs"]
    header += ["c n² at the last stage", "grows with n²"]
    main, finetune = result["epochs"]
    note = (
        "Fits of a + b * images and of a + b * images + c * n² over the stages from the second with a teacher on, "
        f"n being the classes seen. Measured with {main} epochs and {finetune} of fine-tuning, one run for "
        "each number of classes."
    )
    return [Table("Growth", header, rows, note), *(_stages_table(run) for run in result["runs"])]


def _stages_table(run: dict[str, Any]) -> Table:
    """Every stage of one run; long runs thinned to about a dozen rows, all being in the JSON file."""
    every = math.ceil(len(run["stages"]) / 12)
    shown = [stage for stage in run["stages"] if stage["stage"] % every == 0 or stage is run["stages"][-1]]
    rows = [
        [
            str(stage["stage"]),
            str(stage["classes"]),
            str(stage["exemplars"]),
            str(stage["images"]),
            *(number(stage["seconds"][part], 3) for part in PARTS),
        ]
        for stage in shown
    ]
    header = ["stage", "classes seen", "exemplars", "images", *(f"{part}, s" for part in PARTS)]
    return Table(f"Stages of the run with {run['classes']} classes", header, rows)
