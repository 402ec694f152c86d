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
    from engram.core.errors import EngramError
    from engram.data.augment import Augmentation
    from engram.data.memory import MemoryConfig
    from engram.data.sources.cifar import read_cifar100
    from engram.data.sources.folder import read_folder
    from engram.data.sources.mini import read_mini
    from engram.data.store import ImageStore
    from engram.estimator import IncrementalClassifier
    from engram.experiment.base_cache import StageCache
    from engram.experiment.parallel import run_together
    from engram.experiment.recipes import recipe, recipe_names
    from engram.experiment.run_config import RunConfig
    from engram.experiment.runner import resume, run, train
    from engram.experiment.trained import TrainedRun, open_run
    from engram.methods import Method, Phase, Step, Training, register
    from engram.models.edit import remove_class, remove_images, rename_class, undo
    from engram.models.learning import learn_into
    from engram.models.model_config import ModelConfig
    from engram.models.store.codec import open_model, read_manifest
    from engram.report.entry import write_report
    from engram.runs.result import Result

# Before torch is loaded. Its threads wait for each other some hundred times a step, and each does so busily for
# long before it sleeps: beside other programs that is most of the time there is. A thirtieth of that is enough.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOME = {
    "Augmentation": "engram.data.augment",
    "EngramError": "engram.core.errors",
    "ImageStore": "engram.data.store",
    "IncrementalClassifier": "engram.estimator",
    "MemoryConfig": "engram.data.memory",
    "Method": "engram.methods",
    "ModelConfig": "engram.models.model_config",
    "Phase": "engram.methods",
    "Result": "engram.runs.result",
    "RunConfig": "engram.experiment.run_config",
    "StageCache": "engram.experiment.base_cache",
    "Step": "engram.methods",
    "TrainedRun": "engram.experiment.trained",
    "Training": "engram.methods",
    "learn_into": "engram.models.learning",
    "open_model": "engram.models.store.codec",
    "open_run": "engram.experiment.trained",
    "read_cifar100": "engram.data.sources.cifar",
    "read_folder": "engram.data.sources.folder",
    "read_manifest": "engram.models.store.codec",
    "read_mini": "engram.data.sources.mini",
    "recipe": "engram.experiment.recipes",
    "recipe_names": "engram.experiment.recipes",
    "register": "engram.methods",
    "remove_class": "engram.models.edit",
    "remove_images": "engram.models.edit",
    "rename_class": "engram.models.edit",
    "resume": "engram.experiment.runner",
    "run": "engram.experiment.runner",
    "run_together": "engram.experiment.parallel",
    "train": "engram.experiment.runner",
    "undo": "engram.models.edit",
    "write_report": "engram.report.entry",
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
