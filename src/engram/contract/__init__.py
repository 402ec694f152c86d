"""The contract between methods and the engine: what a method declares, and what it may use."""

from engram.contract.batch_plan import BatchPlan, copy_ahead
from engram.contract.exemplars import (
    balanced_count,
    balanced_rows,
    choose_exemplars,
    class_means,
    unit_embeddings,
    unit_means,
)
from engram.contract.extension import AfterUpdate, Extension, FlatParameters, PhaseContext, StepHooks
from engram.contract.image_state import ImageStateRows, ImageTensor
from engram.contract.learner import Learner, load_network
from engram.contract.method import Method
from engram.contract.method_registry import (
    METHODS,
    OWN_METHODS,
    MethodInfo,
    RecipeHints,
    both_imagenets,
    find_method,
    import_all,
    register,
)
from engram.contract.optimisers import Optimiser, register_optimiser
from engram.contract.passes import ImageTuningStep, Passes
from engram.contract.phase import Phase, Step, Terms, mean_over_images
from engram.contract.predictors import ImageOutputs, register_predictor
from engram.contract.schedules import register_schedule
from engram.contract.settings import Settings, SettingsT, Training, base_settings, setting
from engram.data.memory import register_selection
from engram.data.policies import register_augmentation
from engram.data.stage import Samples, Stage
from engram.nn.backbone import Backbone
from engram.nn.backbones import register_backbone
from engram.nn.network import Network, Output, Part

__all__ = [
    "METHODS",
    "OWN_METHODS",
    "AfterUpdate",
    "Backbone",
    "BatchPlan",
    "Extension",
    "FlatParameters",
    "ImageOutputs",
    "ImageStateRows",
    "ImageTensor",
    "ImageTuningStep",
    "Learner",
    "Method",
    "MethodInfo",
    "Network",
    "Optimiser",
    "Output",
    "Part",
    "Passes",
    "Phase",
    "PhaseContext",
    "RecipeHints",
    "Samples",
    "Settings",
    "SettingsT",
    "Stage",
    "Step",
    "StepHooks",
    "Terms",
    "Training",
    "balanced_count",
    "balanced_rows",
    "base_settings",
    "both_imagenets",
    "choose_exemplars",
    "class_means",
    "copy_ahead",
    "find_method",
    "import_all",
    "load_network",
    "mean_over_images",
    "register",
    "register_augmentation",
    "register_backbone",
    "register_optimiser",
    "register_predictor",
    "register_schedule",
    "register_selection",
    "setting",
    "unit_embeddings",
    "unit_means",
]
