"""engram: class-incremental learning you can use.

from engram import ImageStore, recipe, train
result = train(recipe("afc-mini-b10-s5"))
print(result.average["cnn"])
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram.contract import Backbone as Backbone
    from engram.contract import ImageOutputs as ImageOutputs
    from engram.contract import Method as Method
    from engram.contract import Optimiser as Optimiser
    from engram.contract import Phase as Phase
    from engram.contract import Step as Step
    from engram.contract import Training as Training
    from engram.contract import register as register
    from engram.contract import register_augmentation as register_augmentation
    from engram.contract import register_backbone as register_backbone
    from engram.contract import register_optimiser as register_optimiser
    from engram.contract import register_predictor as register_predictor
    from engram.contract import register_schedule as register_schedule
    from engram.contract import register_selection as register_selection
    from engram.core.errors import EngramError as EngramError
    from engram.core.plugins import load_plugins as load_plugins
    from engram.data.augment import Augmentation as Augmentation
    from engram.data.memory import MemoryConfig as MemoryConfig
    from engram.data.sources.cifar import read_cifar100 as read_cifar100
    from engram.data.sources.folder import read_folder as read_folder
    from engram.data.sources.mini import read_mini as read_mini
    from engram.data.store import ImageStore as ImageStore
    from engram.estimator import IncrementalClassifier as IncrementalClassifier
    from engram.experiment.base_cache import StageCache as StageCache
    from engram.experiment.parallel import run_together as run_together
    from engram.experiment.recipes import recipe as recipe
    from engram.experiment.recipes import recipe_names as recipe_names
    from engram.experiment.run_config import RunConfig as RunConfig
    from engram.experiment.runner import resume as resume
    from engram.experiment.runner import run as run
    from engram.experiment.runner import train as train
    from engram.experiment.trained import TrainedRun as TrainedRun
    from engram.experiment.trained import open_run as open_run
    from engram.models.edit import merge_classes as merge_classes
    from engram.models.edit import remove_class as remove_class
    from engram.models.edit import rename_class as rename_class
    from engram.models.edit import undo as undo
    from engram.models.edit_images import move_images as move_images
    from engram.models.edit_images import remove_images as remove_images
    from engram.models.from_run import model_from_run as model_from_run
    from engram.models.learning import learn_into as learn_into
    from engram.models.model_config import ModelConfig as ModelConfig
    from engram.models.store.codec import open_model as open_model
    from engram.models.store.codec import read_manifest as read_manifest
    from engram.report.page import write_report as write_report
    from engram.runs.result import Result as Result
    from engram.runs.run_comparison import compare as compare
    from engram.runs.stored_run import RunResult as RunResult

# Must be set before torch is imported. Threads of torch wait for each other some hundred times per step, and keep their
# core busy for long before they sleep, which slows everything if other programs run. On two busy cores, predicting
# photographs took three times as long with 10,000 turns as with 1,000. On idle ones 1,000 is as fast; 300 is slower.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_PUBLIC = {
    "core.errors": ["EngramError"],
    "core.plugins": ["load_plugins"],
    "data.augment": ["Augmentation"],
    "data.memory": ["MemoryConfig", "register_selection"],
    "data.policies": ["register_augmentation"],
    "data.sources.cifar": ["read_cifar100"],
    "data.sources.folder": ["read_folder"],
    "data.sources.mini": ["read_mini"],
    "data.store": ["ImageStore"],
    "estimator": ["IncrementalClassifier"],
    "experiment.base_cache": ["StageCache"],
    "experiment.parallel": ["run_together"],
    "experiment.recipes": ["recipe", "recipe_names"],
    "experiment.run_config": ["RunConfig"],
    "experiment.runner": ["resume", "run", "train"],
    "experiment.trained": ["TrainedRun", "open_run"],
    "contract": ["Backbone", "Method", "Phase", "Step", "Training", "register", "register_backbone"],
    "contract.optimisers": ["Optimiser", "register_optimiser"],
    "contract.predictors": ["ImageOutputs", "register_predictor"],
    "contract.schedules": ["register_schedule"],
    "models.edit": ["merge_classes", "remove_class", "rename_class", "undo"],
    "models.edit_images": ["move_images", "remove_images"],
    "models.from_run": ["model_from_run"],
    "models.learning": ["learn_into"],
    "models.model_config": ["ModelConfig"],
    "models.store.codec": ["open_model", "read_manifest"],
    "report.page": ["write_report"],
    "runs.run_comparison": ["compare"],
    "runs.result": ["Result"],
    "runs.stored_run": ["RunResult"],
}
_MODULES = {name: f"engram.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # Names are imported when they are first used, so that `engram --help` does not import torch.
    if name not in _MODULES:
        raise AttributeError(f"module 'engram' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
