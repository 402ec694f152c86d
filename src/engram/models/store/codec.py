"""Convert a model to files and back. Everything read is checked before use; nothing in it is ever executed."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.data.memory import STATE
from engram.data.stage import content_ids
from engram.experiment.learner_config import Device, Precision
from engram.models.digests import DIGEST_BYTES
from engram.models.doubt import Doubt, doubt_from_state
from engram.models.heldout_features import features_to_save, read_features
from engram.models.history import LessonRecord
from engram.models.model import Model
from engram.models.store.generations import (
    FEATURES_FILE,
    MANIFEST,
    POINTER,
    WEIGHTS,
    NoModelYet,
    Pointer,
    Snapshot,
    read_model,
    read_previous,
)
from engram.models.store.manifest import Manifest, decode_digests
from engram.models.store.pictures import EXEMPLARS, HELDOUT, class_position, from_png, picture_name, to_png
from engram.models.store.writer import File

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_KEPT = f"memory.{STATE}"  # prefix of the tensors that are kept per exemplar
_HEAD = "network.head."
_DOUBT = "doubt."
_NAMES = re.compile(rf"(network|teacher|buffers|doubt|{re.escape(_KEPT[:-1])})\.[\w.]{{1,200}}|class_means")


def pack_model(model: Model) -> tuple[dict[str, Any], Iterator[File]]:
    """Return the content of model.json, and every other file; refuse a model that could not be opened again."""
    model.refuse_change()
    state = _weights(model)
    return Manifest.of(model).to_plain(), _files(model, state)


def _weights(model: Model) -> dict[str, Tensor]:
    """Return the tensors of the model by name, without the images of its memory."""
    assert model.learner is not None
    state = {
        name: value
        for name, value in model.learner.state_dict().items()
        if name.startswith(_KEPT) or not name.startswith("memory.")
    }
    network = {name: value for name, value in state.items() if name.startswith("network.")}
    # Between lessons the teacher is usually a copy of the network; it is saved only if it differs.
    if all(_same(value, state.get("teacher." + name.removeprefix("network."))) for name, value in network.items()):
        state = {name: value for name, value in state.items() if not name.startswith("teacher.")}
    for by, doubt in model.doubts.items():
        state |= {f"{_DOUBT}{by}.{name}": value for name, value in doubt.state().items()}
    for name, value in state.items():
        if not _is_allowed(name, value):
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise EngramError(
                f"{model.config.method} keeps {name!r:.80} ({value.dtype}), which cannot be saved: a name is "
                f"at most 200 letters, digits, dots and underscores, and the dtype is one of {dtypes}"
            )
    return state


def _is_allowed(name: str, value: Tensor) -> bool:
    return _NAMES.fullmatch(name) is not None and value.dtype in _DTYPES


def _same(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(value, other)


def _files(model: Model, state: dict[str, Tensor]) -> Iterator[File]:
    assert model.learner is not None
    weights = save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
    yield WEIGHTS, lambda: weights
    for kind, memory in ((EXEMPLARS, model.learner.memory), (HELDOUT, model.heldout)):
        for label in memory.labels:
            for rank, image in enumerate(memory.of(label).pixels.numpy()):
                yield picture_name(kind, label, rank), partial(to_png, image)
    if features := features_to_save(model.heldout):
        yield FEATURES_FILE, lambda: save(features)


def open_model(
    path: str | Path,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    images: bool = True,
    without: Collection[Hashable] = (),
    sparing: Collection[str] = (),
) -> tuple[Model, Pointer]:
    """Open the model at that path; return it and its generation. The checksum of every file read is verified.

    Raises only EngramError, whatever the directory contains.

    Parameters
    ----------
    images: read exemplars and held-out images, which learning needs and prediction does not.
    without: labels of classes whose images are not read.
    sparing: names of files that are not read.
    """

    def read(snapshot: Snapshot) -> tuple[Model, Pointer]:
        return _unpack(snapshot, device, precision, images, without, sparing), snapshot.pointer

    with _only_engram_errors(path):
        return read_model(path, read)


def open_previous(path: str | Path) -> Model:
    """Open the model as it was before its last change, on the CPU; refuse if that was not kept."""
    with _only_engram_errors(path):
        return read_previous(path, lambda snapshot: _unpack(snapshot, "cpu", "auto"))


@contextmanager
def _only_engram_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except EngramError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise EngramError(f"the model at {path} cannot be opened: {type(error).__name__}: {reason}") from error


def manifest_of(snapshot: Snapshot) -> Manifest:
    """Return the checked manifest of a generation."""
    return Manifest.read(snapshot.content, snapshot.path / MANIFEST)


def read_manifest_if_exists(path: Path) -> dict[str, Any] | None:
    """Return the same as `read_manifest`, or None if there is no model yet."""
    if not (path / POINTER).exists():
        return None
    try:
        return read_manifest(path)
    except NoModelYet:
        return None


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Return the content of model.json, checked, with decoded labels; and sizes in bytes.

    digest: changes when anything in the model changes; the number of a generation may be used again. learned_heldout:
    number of held-out images that the head has learned after they measured it. undo: the state that undoing the last
    change would restore; its steps: how many changes can be undone.
    """

    def read(snapshot: Snapshot) -> dict[str, Any]:
        manifest = manifest_of(snapshot)
        plain = manifest.to_plain()
        for entry, known in zip(plain["classes"], manifest.known_classes(), strict=True):
            entry["label"] = known.label
            del entry["digests"]
        sizes = {kind: _bytes(snapshot, f"{kind}/") for kind in (EXEMPLARS, HELDOUT)}
        return {
            "path": str(path),
            "generation": snapshot.pointer.generation,
            "digest": snapshot.pointer.digest,
            "engram": str(snapshot.content.get("engram"))[:40],
            **{key: value for key, value in plain.items() if key != "versions"},
            "history": [asdict(entry) for entry in manifest.history],
            "learned_heldout": len(decode_digests(manifest.learned_heldout)) // DIGEST_BYTES,
            "bytes": {"weights": _bytes(snapshot, WEIGHTS), **sizes},
            **_undo(path, snapshot),
        }

    with _only_engram_errors(path):
        return read_model(path, read)


def last_lesson(history: Sequence[LessonRecord]) -> dict[str, Any]:
    """Return the number of the last lesson, and the date of the last change."""
    lesson = max((number for number, entry in enumerate(history, 1) if entry.what == "learned"), default=0)
    return {"lesson": lesson, "date": history[-1].date if history else ""}


def _undo(path: str | Path, snapshot: Snapshot) -> dict[str, Any]:
    """Describe the state that undo restores, the number of earlier states and the bytes that keeping them takes.

    If there is none, the reason.
    """
    shared, extra = snapshot.by_checksum(), 0

    def read(before: Snapshot) -> dict[str, Any]:
        nonlocal shared, extra
        extra += before.extra_bytes(shared)
        shared = {**shared, **before.by_checksum()}
        manifest = manifest_of(before)
        return {**last_lesson(manifest.history), "classes": len(manifest.classes)}

    try:
        undo = read_previous(path, read, snapshot.pointer)
    except EngramError as error:
        return {"undo": None, "why_no_undo": str(error)}
    earlier = snapshot.pointer.earlier()
    for pointer in earlier[:-1]:
        with suppress(EngramError):  # only undo needs them
            read_previous(path, read, pointer)
    return {"undo": {**undo, "bytes": extra, "steps": len(earlier)}, "why_no_undo": None}


def _bytes(snapshot: Snapshot, prefix: str) -> int:
    return sum(snapshot.size(name) for name in snapshot.names if name.startswith(prefix))


def _unpack(
    snapshot: Snapshot,
    device: Device,
    precision: Precision,
    images: bool = True,
    without: Collection[Hashable] = (),
    sparing: Collection[str] = (),
) -> Model:
    manifest, weights = manifest_of(snapshot), snapshot.path / WEIGHTS
    model = Model(manifest.config, device, precision)
    model.classes, model.sizes, model.history = manifest.known_classes(), manifest.stage_sizes, manifest.history
    model.temperatures, model.learned_heldout = manifest.temperatures, decode_digests(manifest.learned_heldout)
    pictures = _picture_names(manifest, snapshot)
    check_memory(2 * snapshot.size(WEIGHTS), f"the weights in {snapshot.path}")
    state = _tensors(snapshot.read(WEIGHTS), weights)
    _check_head(model, state, weights)
    model.doubts = _doubts(model, state, weights)
    kept = _image_state(model, state, sum(entry.exemplars for entry in manifest.classes), weights)
    model.learner = model.make_learner(manifest.mean, manifest.std, len(state["network.head.seen"]))
    teacher = {
        f"teacher.{name.removeprefix('network.')}": value
        for name, value in state.items()
        if name.startswith("network.")
    }
    try:
        model.learner.load_state_dict({**teacher, **state})
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngramError(
            f"{weights} does not fit the network that {MANIFEST} describes; the model is damaged"
        ) from error
    try:
        model.method.check_buffers(model.learner, model.learner.buffers)
    except EngramError as error:
        raise EngramError(f"{weights} cannot be used: {error}") from None
    means = model.learner.class_means
    if means is not None and means.shape != (len(model.classes), model.learner.network.backbone.dim):
        raise EngramError(f"{weights} has class means of another shape; the model is damaged")
    model.reads_only = not images
    if images:
        skipped = {position for position, known in enumerate(model.classes) if known.label in without}
        names = [name for name in pictures if name not in sparing and class_position(name) not in skipped]
        exemplars, heldout = ([name for name in pictures if name.startswith(kind)] for kind in (EXEMPLARS, HELDOUT))
        features = read_features(snapshot, model.learner.network, len(heldout))
        read, per_image = set(names), dict[str, dict[str, Tensor]]()
        for kind, own, tensors in ((EXEMPLARS, exemplars, kept), (HELDOUT, heldout, features)):
            rows = [row for row, name in enumerate(own) if name in read]
            per_image[kind] = {name: value[rows] for name, value in tensors.items()}
        _read_pictures(snapshot, model, names, per_image)
    return model


def _picture_names(manifest: Manifest, snapshot: Snapshot) -> list[str]:
    """Return the names of all pictures; refuse counts that do not agree with the list of files."""
    path = snapshot.path / MANIFEST
    number = sum(entry.exemplars + entry.heldout for entry in manifest.classes)
    listed = len(snapshot.names - {FEATURES_FILE})
    if number + 1 != listed:
        raise EngramError(f"{path} lists {listed} files and counts {number + 1}; it is damaged")
    names = [
        picture_name(kind, position, rank)
        for kind in (EXEMPLARS, HELDOUT)
        for position, entry in enumerate(manifest.classes)
        for rank in range(getattr(entry, kind))
    ]
    if different := {WEIGHTS, *names} ^ (snapshot.names - {FEATURES_FILE}):
        raise EngramError(f"{path} counts {min(different)} and does not list it, or the reverse; it is damaged")
    return names


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        state = load(content)
    except Exception as error:  # safetensors has its own error types, and JSON and torch raise others
        raise EngramError(f"{path} is not a safetensors file ({type(error).__name__}); the model is damaged") from None
    for name, value in state.items():
        if not _is_allowed(name, value):
            raise EngramError(f"{path} holds {name!r:.80} ({value.dtype}), which is not part of a model")
    return state


def _image_state(model: Model, state: dict[str, Tensor], exemplars: int, path: Path) -> dict[str, Tensor]:
    """Take the tensors kept per exemplar out of the state; refuse any but those that the method keeps."""
    kept = {name.removeprefix(_KEPT): state.pop(name) for name in list(state) if name.startswith(_KEPT)}
    declared, width = model.method.image_state, len(model.classes)
    for name, value in kept.items():
        # A tensor with a value per class may have more columns than there are classes.
        columns = value.shape[1] if value.ndim == 2 and value.shape[1] >= width else width
        shape = declared[name].row_shape(columns) if name in declared else None
        if shape != tuple(value.shape[1:]) or len(value) != exemplars or value.dtype != torch.float32:
            raise EngramError(f"{path} has a tensor {name!r:.80} per image that does not fit; the model is damaged")
    if exemplars and kept.keys() != declared.keys():
        raise EngramError(f"{path} lacks tensors per image that {model.config.method} keeps; the model is damaged")
    return kept


def _doubts(model: Model, state: dict[str, Tensor], path: Path) -> dict[str, Doubt]:
    """Take what tells strangers from known images out of the state, by predictor."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in state if name.startswith(_DOUBT)]:
        by, _, tensor = name.removeprefix(_DOUBT).rpartition(".")
        parts.setdefault(by, {})[tensor] = state.pop(name)
    if unknown := parts.keys() - set(model.method.predictors):
        raise EngramError(f"{path} has statistics of a predictor {min(unknown)!r:.40} that the model does not have")
    weight = state.get(f"{_HEAD}weight")  # it was compared with the head
    width = 0 if weight is None else weight.shape[-1]
    return {by: doubt_from_state(tensors, len(model.classes), width) for by, tensors in parts.items()}


def _check_head(model: Model, state: dict[str, Tensor], path: Path) -> None:
    """Refuse weights that do not fit the head, before a head of that size is allocated."""
    seen = state.get("network.head.seen")
    if seen is None or seen.dtype != torch.bool or seen.ndim != 1:
        raise EngramError(f"{path} does not say which classes are known; the model is damaged")
    known = torch.arange(len(seen)) < len(model.classes)
    if len(seen) < len(model.classes) or not torch.equal(seen, known):
        raise EngramError(f"{path} knows other classes than {MANIFEST} lists; the model is damaged")
    backbone = model.make_backbone()
    older = backbone.count_branches(name.removeprefix("network.backbone.") for name in state)
    if older >= max(1, len(model.sizes)):
        raise EngramError(f"{path} has {older + 1} backbones and {MANIFEST} {len(model.sizes)} stages; it is damaged")
    dim = backbone.dim
    try:
        with torch.device("meta"):
            head = model.method.head(dim, len(seen))
            head.widen(dim * (older + 1))
            own = {name.removeprefix(_HEAD): value for name, value in state.items() if name.startswith(_HEAD)}
            head.prepare_for_state(own)
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        raise EngramError(f"{path} does not fit the head that {MANIFEST} describes; the model is damaged") from None
    for name, value in head.state_dict().items():
        found = state.get(f"{_HEAD}{name}")
        if found is None or found.shape != value.shape:
            raise EngramError(f"{path} does not fit the head that {MANIFEST} describes; the model is damaged")


def _read_pictures(
    snapshot: Snapshot, model: Model, names: list[str], kept: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Read pictures into the model's memories. kept: by kind, the tensors per image, in the order of the names."""
    assert model.learner is not None
    height, width = model.config.image_size
    check_memory(2 * len(names) * height * width * 3, f"{len(names)} images of {width}x{height} pixels")

    def read(name: str) -> np.ndarray:
        return from_png(snapshot.read(name), (height, width), snapshot.path / name)

    with ThreadPoolExecutor(8, "pictures") as pool:
        for kind, memory in ((EXEMPLARS, model.learner.memory), (HELDOUT, model.heldout)):
            own = [name for name in names if name.startswith(f"{kind}/")]
            if not own:
                continue
            pixels = np.empty((len(own), height, width, 3), dtype=np.uint8)
            for place, image in enumerate(pool.map(read, own)):
                pixels[place] = image
            labels = torch.tensor([class_position(name) for name in own])
            images = torch.from_numpy(pixels)
            state = {"images": images, "labels": labels, "sources": content_ids(images)}
            state |= {f"{STATE}{name}": value for name, value in kept[kind].items()}
            memory.load_state_dict(state)
