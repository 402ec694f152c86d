"""Synthetic run directories for the tests of the report: consistent numbers from a seeded generator, no training.

Predictions are drawn first and every accuracy is computed from them, so the files of a run are consistent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engram.runs.reader import config_hash

CHANNELS = (8, 16, 32, 32)


def fake_run(
    directory: Path,
    *,
    method: str = "afc",
    recipe: str | None = None,
    stage_sizes: Sequence[int] = (10, *[1] * 10),
    finished: int | None = None,
    predictors: Sequence[str] = ("cnn", "nme"),
    importance: bool = True,
    order: int = 1,
    seed: int = 1,
    shuffled: bool = False,
    class_names: Sequence[str] | None = None,
    images_per_class: int = 20,
    keep: float = 0.93,
    epochs: int = 5,
    settings: dict[str, Any] | None = None,
    reported: str = "cnn",
    path: str | None = None,
    command: str | None = None,
    final: float | None = None,
) -> Path:
    """Write a run whose classes lose the factor `keep` of their accuracy in every later stage.

    final: accuracy of the last stage in percent, of all predictors.
    """
    rng = np.random.default_rng([order, seed, len(method), sum(map(ord, method))])
    names = list(class_names or [f"class {i:02d}" for i in range(sum(stage_sizes))])
    class_ids = np.random.default_rng(order).permutation(len(names)) if shuffled else np.arange(len(names))
    (directory / "stages").mkdir(parents=True)
    stages = []
    for stage in range(len(stage_sizes) if finished is None else finished):
        exact = final if stage == len(stage_sizes) - 1 else None
        tensors, entry = _stage(rng, stage, stage_sizes, predictors, images_per_class, keep, exact)
        tensors |= _importance(rng) if importance else {}
        save_file(tensors, directory / "stages" / f"{stage:03d}.safetensors")
        stages.append(entry)
    info = {
        **_made_with(),
        "recipe": recipe or f"{method}-mini-b{stage_sizes[0]}-s{len(stage_sizes) - 1}",
        "config": {"method": method, "base": stage_sizes[0], "order": str(order), "seed": seed}
        | {"data": {"name": "mini", "path": path}, "predictor": reported, "settings": settings or {"epochs": epochs}},
        "card": _card(method, stage_sizes, len(names), order, seed),
        "data": {"name": "mini", "class_names": names, "image_size": [16, 16], "train_images": 250 * len(names)}
        | {"test_images": images_per_class * len(names), "fingerprint": "feedc0de"},
        "order": {"name": str(order), "class_ids": [int(i) for i in class_ids]},
        "stage_sizes": list(stage_sizes),
        "predictors": list(predictors),
    }
    info["config_hash"] = config_hash(info["config"])
    if command is not None:
        info["command"] = command
    write_json(directory / "run.json", info)
    which = {"recipe": info["recipe"], "method": method, "dataset": "mini", "order": order, "seed": seed}
    write_json(directory / "result.json", _result(which, stages, predictors, importance))
    _write_events(directory / "events.jsonl", rng, len(stages), epochs, distils=importance)
    return directory


def _made_with() -> dict[str, Any]:
    """The part of run.json about programs and machine."""
    return {
        "engram": "0.1.0",
        "format": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
        "hardware": {"device": "cpu", "cpu": "Example CPU at 3 GHz", "cores": 2},
    }


def _card(method: str, stage_sizes: Sequence[int], classes: int, order: int, seed: int) -> dict[str, str]:
    return {
        "Data set": f"mini ({classes} classes, 16x16)",
        "Base": f"{stage_sizes[0]} classes",
        "Stages": f"{len(stage_sizes) - 1} of {stage_sizes[-1]}",
        "Order": str(order),
        "Memory": "none" if method == "naive" else "10 exemplars a class",
        "Seed": str(seed),
    }


def _result(
    which: dict[str, Any], stages: list[dict[str, Any]], predictors: Sequence[str], importance: bool
) -> dict[str, Any]:
    seconds = {
        "train": 30.0 + which["seed"],
        "importance": 2.5 if importance else 0.0,
        "exemplars": 1.5,
        "evaluate": 3.0,
    }
    return {
        "engram": "0.1.0",
        **which,
        "stages": stages,
        **_metrics(stages, predictors),
        "seconds": sum(seconds.values()) + 0.5,
        "seconds_by": seconds,
    }


def _importance(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tensors = {}
    for m, channels in enumerate(CHANNELS):
        values = rng.lognormal(sigma=0.4 + 0.3 * m, size=channels).astype(np.float32)
        tensors[f"importance.{m}"] = values / values.mean()
    return tensors


def write_json(file: Path, data: Any) -> None:
    """Write `data` to a file."""
    file.write_text(json.dumps(data), encoding="utf-8")


def edit_json(file: Path, **changes: Any) -> None:
    """Change top-level keys of a file (`...` removes the key); a new configuration gets its hash."""
    data = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(changes.get("config"), dict):
        changes = {"config_hash": config_hash(changes["config"]), **changes}
    for key, value in changes.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    write_json(file, data)


def _stage(
    rng: np.random.Generator,
    stage: int,
    sizes: Sequence[int],
    predictors: Sequence[str],
    images: int,
    keep: float,
    exact: float | None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    seen = sum(sizes[: stage + 1])
    born = np.repeat(np.arange(stage + 1), sizes[: stage + 1])
    targets = np.repeat(np.arange(seen), images)
    tensors = {"targets": targets.astype(np.int16)}
    accuracy, by_stage = {}, {}
    for predictor in predictors:
        right = (0.72 if predictor == "cnn" else 0.68) * keep ** (stage - born[targets])
        # Mistakes go half to a fixed look-alike (the neighbouring label) and half to the newest classes.
        alike = np.where(targets % 2 == 0, np.minimum(targets + 1, seen - 1), targets - 1)
        newest = seen - 1 - rng.integers(0, sizes[stage], size=len(targets))
        wrong = np.where(rng.random(len(targets)) < 0.5, alike, newest)
        labels = np.where(rng.random(len(targets)) < right, targets, wrong)
        if exact is not None:
            wrong = np.where(wrong == targets, (targets + 1) % seen, wrong)
            chosen = rng.permutation(len(targets)) < round(exact / 100 * len(targets))
            labels = np.where(chosen, targets, wrong)
        tensors[f"predictions.{predictor}"] = labels.astype(np.int16)
        hits = labels == targets
        accuracy[predictor] = 100 * float(hits.mean())
        by_stage[predictor] = [100 * float(hits[born[targets] == i].mean()) for i in range(stage + 1)]
    seconds = 6.0 if stage == 0 else 3.0
    return tensors, {
        "stage": stage,
        "classes": seen,
        "accuracy": accuracy,
        "seconds": seconds,
        "accuracy_by_stage": by_stage,
    }


def _metrics(stages: list[dict[str, Any]], predictors: Sequence[str]) -> dict[str, dict[str, float | None]]:
    metrics: dict[str, dict[str, float | None]] = {
        name: {} for name in ("average_incremental_accuracy", "final_accuracy", "backward_transfer", "forgetting")
    }
    for predictor in predictors:
        accuracies = [stage["accuracy"][predictor] for stage in stages]
        rows = [stage["accuracy_by_stage"][predictor] for stage in stages]
        last = len(rows) - 1
        metrics["average_incremental_accuracy"][predictor] = sum(accuracies) / len(accuracies) if stages else None
        metrics["final_accuracy"][predictor] = accuracies[-1] if stages else None
        transfer = [rows[last][i] - rows[i][i] for i in range(last)]
        lost = [max(rows[t][i] for t in range(i, last)) - rows[last][i] for i in range(last)]
        metrics["backward_transfer"][predictor] = sum(transfer) / last if last > 0 else None
        metrics["forgetting"][predictor] = sum(lost) / last if last > 0 else None
    return metrics


def _write_events(file: Path, rng: np.random.Generator, stages: int, epochs: int, distils: bool) -> None:
    lines = [json.dumps({"event": "run_started", "time": 0.0})]
    for stage in range(stages):
        for epoch in range(epochs):
            terms = {"classification": 2.0 * 0.75**epoch + 0.1 * float(rng.random())}
            if distils and stage > 0:
                terms["discrepancy"] = 0.6 * 0.9**epoch
            event = {"event": "epoch_finished", "time": 1.0, "stage": stage, "phase": "main", "epoch": epoch}
            lines.append(json.dumps(event | {"terms": terms}))
    # A killed run leaves a line that is cut off.
    file.write_text("\n".join(lines) + '\n{"event": "epoch_fin', encoding="utf-8")
