"""What the tests of reproducing a paper share: a paper in miniature, and records made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engram.data.stream import Stream
from engram.experiment.recipes import recipe
from engram.experiment.run_config import RunConfig
from engram.reproduce.records import FORMAT, KIND, Record, check_record
from engram.runs.result import StageRecord, summarise

# Two methods, two settings, two class orders, and a curve and an importance of the same runs.
PAPER = """
title = "A paper in miniature"
published = "numbers.json"

[methods]
"AFC" = { recipe = "afc" }
"Replay" = { recipe = "replay" }
"Unheard of" = { recipe = "unheard" }

[[experiment]]
name = "table1"
published = "memory"
recipe = "{recipe}-folder"
set = ["memory=per_class={kept}", SMALL]
column = "{kept} kept"
orders = [1, 2]

[[experiment]]
name = "table2"
published = "final"
recipe = "{recipe}-folder"
set = ["memory=per_class={kept}", SMALL]
measure = "final_accuracy"
column = "{kept} kept"
orders = ["1", "2"]

[[experiment]]
name = "figure1"
kind = "curves"
recipe = "{recipe}-folder"
set = ["memory=per_class=2", SMALL]
column = "2 kept"
columns = [{}]
rows = [{ method = "AFC", inference = "CNN" }, { method = "Replay", inference = "NME" }]
orders = ["1", "2"]

[[experiment]]
name = "figure2"
kind = "importance"
recipe = "{recipe}-folder"
set = ["memory=per_class=2", SMALL]
column = "2 kept"
columns = [{}]
rows = [{ method = "AFC", inference = "CNN" }]
orders = ["1", "2"]

[[experiment]]
name = "effects"
kind = "effects"
beside = true
recipe = "{recipe}-folder"
set = ["memory=per_class=2", SMALL]
column = "2 kept"
columns = [{}]
rows = [
    { method = "AFC", inference = "CNN", label = "AFC" },
    { method = "Replay", inference = "CNN", label = "no distillation" },
]
orders = ["1", "2"]

[[remark]]
experiment = "table1"
text = "The numbers were made up."
"""
SMALL = ["base=2", "increment=2", "backbone=resnet10", "settings.train.epochs=1", "settings.finetune.epochs=1"]
SMALL += ["settings.train.batch_size=16", "settings.finetune.batch_size=16"]
NUMBERS = {
    "tables": [
        {
            "id": "memory",
            "title": "Memory",
            "columns": [{"kept": 2}, {"kept": 4}],
            "rows": [
                {"method": "AFC", "inference": "CNN", "values": [{"mean": 50.0, "std": 60.0}, {"mean": 200.0}]},
                {"method": "Replay", "inference": "NME", "values": [{"mean": 33.0, "std": 0.5}, None]},
                {"method": "Unheard of", "values": [{"mean": 1.0}, {"mean": 2.0}]},
            ],
        },
        {
            "id": "final",
            "title": "At the end",
            "columns": [{"kept": 2}, {"kept": 4}],
            "rows": [{"method": "AFC", "inference": "NME", "values": [{"mean": 10.0}, {"mean": 10.0}]}],
        },
    ]
}


def experiment_on(name: str, *recipes: str, small: bool = True) -> str:
    """An experiment of the paper in miniature: AFC in one class order, a column for each end of a recipe's name."""
    columns = ", ".join(f'{{ where = "{recipe}" }}' for recipe in recipes)
    return f"""
[[experiment]]
name = "{name}"
recipe = "{{recipe}}-{{where}}"
column = "{{where}}"
columns = [{columns}]
set = [{"SMALL" if small else ""}]
rows = [{{ method = "AFC" }}]
orders = ["1"]
"""


def write_paper(folder: Path, text: str = PAPER, numbers: Any = NUMBERS) -> Path:
    """The file of the paper in miniature."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")
    small = ", ".join(json.dumps(change) for change in SMALL)
    (folder / "paper.toml").write_text(text.replace("SMALL", small), encoding="utf-8")
    return folder / "paper.toml"


def make_record(
    name: str | RunConfig = "afc-cifar100-b50-s5",
    accuracy: float = 60.0,
    *,
    order: str = "1",
    seed: int = 1,
    device: str = "cuda",
    precision: str = "bf16",
    hardware: str = "Example GPU",
    commit: str = "abc",
    created: str = "2026-01-01T00:00:00+00:00",
    seconds: float = 100.0,
    wall: Sequence[float] | None = None,
    reused_base: bool = False,
    importance: Sequence[Sequence[float]] | None = None,
) -> Record:
    """The record of a run that was never done: the same accuracy after every stage, nme one point lower."""
    config = recipe(name) if isinstance(name, str) else name
    for key, value in {"order": order, "seed": seed, "device": device, "precision": precision}.items():
        config = config.with_value(key, value)
    base = config.base or 50
    sizes = Stream.build(range(100), base, config.increment).sizes
    levels = {"cnn": accuracy, "nme": accuracy - 1}
    stages = [
        StageRecord(
            stage=i,
            classes=sum(sizes[: i + 1]),
            accuracy=dict(levels),
            seconds=seconds / len(sizes),
            accuracy_by_stage={predictor: [level] * (i + 1) for predictor, level in levels.items()},
            seconds_by={},
        )
        for i in range(len(sizes))
    ]
    identity = {"engram": "0.1.0", "recipe": config.recipe, "method": config.method, "dataset": "cifar100"}
    plain = config.to_plain()
    del plain["data"]["path"]
    data: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "recipe": config.recipe,
        "config_hash": config.fingerprint(),
        "config": plain,
        "data": {"name": config.data.name, "fingerprint": "feed"},
        "order": {"name": order, "class_ids": list(range(100))},
        "stage_sizes": list(sizes),
        "versions": {"torch": "2.13.0", "commit": commit},
        "hardware": {"device": device, "name": hardware, "cores": 2, "threads": 1},
        "created": created,
        "wall": None if wall is None else list(wall),
        "reused_base": reused_base,
        "result": dict(summarise({**identity, "order": order, "seed": seed}, stages)),
    }
    if importance is not None:
        data["importance"] = [list(values) for values in importance]
    return check_record(data, "by hand")


def write_run(directory: Path, record: Record, finished: int) -> None:
    """Write run.json and result.json of a run with so many finished stages."""
    directory.mkdir(parents=True)
    data = {**record.content["data"], "class_names": [str(i) for i in range(100)], "image_size": [32, 32]}
    manifest = {**record.content, "data": data, "predictors": ["cnn", "nme"], "engram": "0.1.0"}
    stages = [StageRecord(**stage, seconds_by={}) for stage in record.content["result"]["stages"][:finished]]
    result = summarise({**record.content["result"]}, stages)
    (directory / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    (directory / "result.json").write_text(json.dumps(result), encoding="utf-8")
