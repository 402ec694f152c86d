"""A model from the directory of a run: to predict, to export, and to be taught more classes."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.core.checkpoint import fitting
from engram.core.errors import EngramError
from engram.data.sources.load import load_store
from engram.data.stage import content_ids
from engram.data.store import ImageStore
from engram.experiment.learner_config import Device, Precision
from engram.experiment.run_config import RunConfig
from engram.models.history import KnownClass, LessonRecord
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.models.store.codec import open_model
from engram.runs.directory import CHECKPOINT, MANIFEST
from engram.runs.reader import read_manifest
from engram.runs.run_checkpoint import read_run_checkpoint
from engram.runs.stored_run import RunManifest


def is_run(path: Path) -> bool:
    """Return whether there is a run directory at the path."""
    return (path / MANIFEST).is_file()


def model_from_run(
    directory: str | Path,
    device: Device = "auto",
    precision: Precision = "auto",
    validation: float = 0.0,
    *,
    store: ImageStore | None = None,
    exemplars: bool = True,
) -> Model:
    """Return a model with the network, the exemplars and the classes of a run, from its last checkpoint.

    It has no held-out images: its confidence is not calibrated, and its accuracy on the old classes is not measured.

    validation: share of the images of later lessons that is held out.
    store: the images of the run, if its checkpoint refers to those of its exemplars and they have moved.
    exemplars: False leaves them out: such a model predicts, but cannot learn.

    >>> from engram import model_from_run, read_mini, recipe, train
    >>> config = recipe("replay-mini-b10-s5").with_settings(train__epochs=2)
    >>> train(config, directory="runs/as-a-model")
    >>> model_from_run("runs/as-a-model").probabilities(read_mini().test.images[:5])
    """
    path = Path(directory)
    manifest = read_manifest(path)
    run = RunConfig.from_plain(manifest.config, f"the run in {path}")
    checkpoint = read_run_checkpoint(path, manifest)
    records = checkpoint.data["records"]
    if checkpoint.data["phase"] is not None or not records:
        raise EngramError(
            f"the run in {path} was stopped inside a stage, so its network is half trained; "
            f"'engram resume {path}' finishes it"
        )
    height, width = manifest.data.image_size
    try:
        config = ModelConfig(
            method=run.method,
            settings=run.settings,
            image_size=(height, width),
            memory=run.memory,
            backbone=run.backbone,
            augmentation=run.augmentation,
            seed=run.seed,
            validation=validation,
            weights=run.weights,
        )
    except EngramError as error:
        raise EngramError(f"the run in {path} cannot become a model: {error}") from None
    model = Model(config, device, precision)
    model.learner = model.make_learner((0.0,) * 3, (1.0,) * 3, len(manifest.data.class_names))
    tensors = dict(checkpoint.tensors)
    if not exemplars:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("memory.")}
    elif "memory.sources" in tensors and "memory.images" not in tensors:
        tensors["memory.images"] = _referred_images(path, manifest, run, store, tensors["memory.sources"])
    if "memory.images" in tensors:  # a run knows its images by their rows in the data set, a model by their content
        tensors["memory.sources"] = content_ids(tensors["memory.images"])
    with fitting(path / CHECKPOINT):
        model.learner.load_state_dict(tensors)
    model.sizes = tuple(manifest.stage_sizes[: len(records)])
    stages = list(accumulate(model.sizes))
    names = [manifest.data.class_names[class_id] for class_id in manifest.order.class_ids[: stages[-1]]]
    if model.learner.num_classes != len(names):
        raise EngramError(f"{path / CHECKPOINT} has {model.learner.num_classes} classes and {MANIFEST} {len(names)}")
    born = [sum(label >= end for end in stages) for label in range(len(names))]
    model.classes = tuple(KnownClass(name, stage, 0) for name, stage in zip(names, born, strict=True))
    where = str(manifest.hardware.get("device", ""))
    model.history = tuple(
        LessonRecord(
            "learned",
            manifest.created,
            seconds=record["seconds"],
            device=where,
            precision=run.precision,
            classes=size,
        )
        for record, size in zip(records, model.sizes, strict=True)
    )
    return model


def _referred_images(
    path: Path, manifest: RunManifest, run: RunConfig, store: ImageStore | None, sources: Tensor
) -> Tensor:
    """The exemplars of a run whose checkpoint has only their rows in the data set."""
    if store is None and run.data.name == "arrays":
        raise EngramError(
            f"the run in {path} did not copy the images of its exemplars, which are in its data set; give the data set "
            "as store"
        )
    found = load_store(run.data) if store is None else store
    if found.fingerprint() != manifest.data.fingerprint:
        raise EngramError(f"these images are not those that the run in {path} learned; give the same data set")
    return torch.from_numpy(np.ascontiguousarray(found.train.images[sources.numpy()]))


def open_for_prediction(
    path: Path, device: Device = "auto", precision: Precision = "auto", bf16: bool = False
) -> Model:
    """Open the model or the run at that path, to predict with it.

    bf16: compute so on a CPU too, where models and runs do not learn so. A GPU does it anyway.
    """
    if is_run(path):
        model = model_from_run(path, device, precision, exemplars=False)
    else:
        model, _ = open_model(path, device, precision, images=False)
    if bf16:
        model.engine.precision = "bf16"
    return model
