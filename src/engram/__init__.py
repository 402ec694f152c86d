"""engram: class-incremental learning you can use.

from engram import ImageStore, recipe, train
result = train(recipe("afc-mini-b10-s5"))
print(result["average_incremental_accuracy"])
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram.config import RunConfig
    from engram.data.augment import Augmentation
    from engram.data.cifar import read_cifar100
    from engram.data.folder import read_folder
    from engram.data.memory import MemoryConfig
    from engram.data.mini import read_mini
    from engram.data.store import ImageStore
    from engram.errors import EngramError
    from engram.estimator import IncrementalClassifier
    from engram.methods import Method, Phase, Step, Training, register
    from engram.modeldir import (
        ModelConfig,
        learn_into,
        open_model,
        read_manifest,
        remove_class,
        remove_images,
        rename_class,
        undo,
    )
    from engram.recipes import recipe, recipe_names
    from engram.report import write_report
    from engram.result import Result
    from engram.runner import resume, run, train
    from engram.stagecache import StageCache
    from engram.together import run_together
    from engram.trained import TrainedRun, open_run

# Before torch is loaded. Its threads wait for each other some hundred times a step, and each does so busily for
# long before it sleeps: beside other programs that is most of the time there is. A thirtieth of that is enough.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOME = {
    "Augmentation": "engram.data.augment",
    "EngramError": "engram.errors",
    "ImageStore": "engram.data.store",
    "IncrementalClassifier": "engram.estimator",
    "MemoryConfig": "engram.data.memory",
    "Method": "engram.methods",
    "ModelConfig": "engram.modeldir",
    "Phase": "engram.methods",
    "Result": "engram.result",
    "RunConfig": "engram.config",
    "StageCache": "engram.stagecache",
    "Step": "engram.methods",
    "TrainedRun": "engram.trained",
    "Training": "engram.methods",
    "learn_into": "engram.modeldir",
    "open_model": "engram.modeldir",
    "open_run": "engram.trained",
    "read_cifar100": "engram.data.cifar",
    "read_folder": "engram.data.folder",
    "read_manifest": "engram.modeldir",
    "read_mini": "engram.data.mini",
    "recipe": "engram.recipes",
    "recipe_names": "engram.recipes",
    "register": "engram.methods",
    "remove_class": "engram.modeldir",
    "remove_images": "engram.modeldir",
    "rename_class": "engram.modeldir",
    "resume": "engram.runner",
    "run": "engram.runner",
    "run_together": "engram.together",
    "train": "engram.runner",
    "undo": "engram.modeldir",
    "write_report": "engram.report",
}

__all__ = [
    "Augmentation",
    "EngramError",
    "ImageStore",
    "IncrementalClassifier",
    "MemoryConfig",
    "Method",
    "ModelConfig",
    "Phase",
    "Result",
    "RunConfig",
    "StageCache",
    "Step",
    "TrainedRun",
    "Training",
    "learn_into",
    "open_model",
    "open_run",
    "read_cifar100",
    "read_folder",
    "read_manifest",
    "read_mini",
    "recipe",
    "recipe_names",
    "register",
    "remove_class",
    "remove_images",
    "rename_class",
    "resume",
    "run",
    "run_together",
    "train",
    "undo",
    "write_report",
]


def __getattr__(name: str) -> Any:
    # Names are imported when first used, so that `engram --help` does not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'engram' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
