"""A model as files and back. What is read is checked before it is believed; nothing in it is ever run."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.memory_limits import check_room
from engram.core.provenance import versions
from engram.experiment.learner_config import Device, Precision
from engram.models.labels import encode_label
from engram.models.model import Entry, Model
from engram.models.store.generations import MANIFEST, WEIGHTS, Pointer, Snapshot, read_model, read_previous
from engram.models.store.manifest import DIGESTS, count, parse_manifest, temperatures, texts
from engram.models.store.pictures import EXEMPLARS, HELDOUT, from_png, picture_name, picture_names, place_of, to_png
from engram.models.store.writer import File
from engram.nn.expanding import ExpandingHead, count_older

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
_NAMES = re.compile(r"(network|teacher|buffers)\.[\w.]{1,200}|class_means")


def pack_model(model: Model) -> tuple[dict[str, Any], Iterator[File]]:
    """What model.json says of the model, and every other file; what could not be opened again is refused."""
    model.refuse_change()
    state = _weights(model)
    described = model.describe()
    mean, std = model.normalisation
    manifest = {
        "config": described["config"],
        "predictors": described["predictors"],
        "mean": list(mean),
        "std": list(std),
        "classes": [
            {**entry, "label": encode_label(known.label), DIGESTS: b64encode(known.digests).decode()}
            for entry, known in zip(described["classes"], model.classes, strict=True)
        ],
        "stage_sizes": described["stage_sizes"],
        "temperatures": described["temperatures"],
        "history": [_plain_entry(entry) for entry in model.history],
        "versions": versions(),
    }
    return manifest, _files(model, state)


def _plain_entry(entry: Entry) -> dict[str, Any]:
    """Without what no class learned again has, so that earlier versions read it where there was none."""
    return {name: value for name, value in asdict(entry).items() if value or not name.startswith("refreshed_")}


def _weights(model: Model) -> dict[str, Tensor]:
    """The tensors of the model by name, the images of its memory aside."""
    assert model.learner is not None
    state = {name: value for name, value in model.learner.state_dict().items() if not name.startswith("memory.")}
    network = {name: value for name, value in state.items() if name.startswith("network.")}
    # Between lessons the teacher is a copy of the network; where it is not, it is kept.
    if all(_same(value, state.get("teacher." + name.removeprefix("network."))) for name, value in network.items()):
        state = {name: value for name, value in state.items() if not name.startswith("teacher.")}
    for name, value in state.items():
        if not _is_ours(name, value):
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _DTYPES)
            raise EngramError(
                f"{model.config.method} keeps {name!r:.80} ({value.dtype}), which no model's file can have: a name is "
                f"at most 200 letters, digits, dots and underscores, and the numbers are {kinds}"
            )
    return state


def _is_ours(name: str, value: Tensor) -> bool:
    """Whether a model may have a tensor of that name and kind."""
    return _NAMES.fullmatch(name) is not None and value.dtype in _DTYPES


def _files(model: Model, state: dict[str, Tensor]) -> Iterator[File]:
    assert model.learner is not None
    weights = save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
    yield WEIGHTS, lambda: weights
    for kind, memory in ((EXEMPLARS, model.learner.memory), (HELDOUT, model.heldout)):
        for label in memory.labels:
            for rank, image in enumerate(memory.of(label).images.numpy()):
                yield picture_name(kind, label, rank), partial(to_png, image)


def _same(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(value, other)


def open_model(
    path: str | Path,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    images: bool = True,
    without: Collection[Hashable] = (),
    sparing: Collection[str] = (),
) -> tuple[Model, Pointer]:
    """The model at that path, every file read found unchanged, and which generation it is.

    images: with its exemplars and held-out images, which learning needs and predicting does not; but for those of the
    classes in `without` and the files named in `sparing`. Whatever is wrong with the directory, what is raised is an
    EngramError.
    """

    def read(snapshot: Snapshot) -> tuple[Model, Pointer]:
        return _unpack(snapshot, device, precision, images, without, sparing), snapshot.pointer

    with _refusing(path):
        return read_model(path, read)


def open_previous(path: str | Path) -> Model:
    """The model as it was before its last lesson, on the CPU, all of it unchanged; refuses where that is not kept."""
    with _refusing(path):
        return read_previous(path, lambda snapshot: _unpack(snapshot, "cpu", "auto"))


@contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except EngramError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise EngramError(f"the model at {path} cannot be opened: {type(error).__name__}: {reason}") from error


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What model.json says, checked, with labels as they are: classes, history, configuration; and sizes in bytes.

    digest: another one where anything of the model is; a generation's number may come again. undo: what taking back the
    last lesson would go back to.
    """

    def read(snapshot: Snapshot) -> dict[str, Any]:
        manifest = snapshot.manifest
        config, classes, sizes, history, mean, std = parse_manifest(manifest, snapshot.path / MANIFEST)
        described = [{**entry, "label": known.label} for entry, known in zip(manifest["classes"], classes, strict=True)]
        for entry in described:
            entry.pop(DIGESTS, None)
        total = {kind: _bytes(snapshot, kind) for kind in (EXEMPLARS, HELDOUT)}
        return {
            "path": str(path),
            "generation": snapshot.pointer.generation,
            "digest": snapshot.pointer.digest,
            "engram": str(manifest.get("engram"))[:40],
            "config": config.to_plain(),
            "predictors": texts(manifest.get("predictors"), snapshot.path / MANIFEST),
            "mean": list(mean),
            "std": list(std),
            "classes": described,
            "stage_sizes": list(sizes),
            "temperatures": temperatures(manifest, snapshot.path / MANIFEST),
            "history": [asdict(entry) for entry in history],
            "bytes": {"weights": snapshot.size(WEIGHTS) if WEIGHTS in snapshot.names else 0, **total},
            **_undo(path, snapshot),
        }

    with _refusing(path):
        return read_model(path, read)


def last_lesson(history: Sequence[Entry]) -> dict[str, Any]:
    """The number of a model's last lesson, and when it became what it is."""
    lesson = max((number for number, entry in enumerate(history, 1) if entry.what == "learned"), default=0)
    return {"lesson": lesson, "date": history[-1].date if history else ""}


def _undo(path: str | Path, snapshot: Snapshot) -> dict[str, Any]:
    """What undoing the last lesson would go back to, and the bytes that keeping it takes; or why it cannot."""

    def read(before: Snapshot) -> dict[str, Any]:
        _, classes, _, history, _, _ = parse_manifest(before.manifest, before.path / MANIFEST)
        return {
            **last_lesson(history),
            "classes": len(classes),
            "bytes": before.bytes_beside(snapshot),
        }

    try:
        return {"undo": read_previous(path, read, snapshot.pointer), "why_no_undo": None}
    except EngramError as error:
        return {"undo": None, "why_no_undo": str(error)}


def _bytes(snapshot: Snapshot, kind: str) -> int:
    return sum(snapshot.size(name) for name in snapshot.names if name.startswith(f"{kind}/"))


def _unpack(
    snapshot: Snapshot,
    device: Device,
    precision: Precision,
    images: bool = True,
    without: Collection[Hashable] = (),
    sparing: Collection[str] = (),
) -> Model:
    where = snapshot.path / MANIFEST
    config, classes, sizes, history, mean, std = parse_manifest(snapshot.manifest, where)
    model = Model(config, device, precision)
    model.classes, model.sizes, model.history = classes, sizes, history
    model.temperatures = temperatures(snapshot.manifest, where)
    counts = {
        kind: [count(entry, kind, where) for entry in snapshot.manifest["classes"]] for kind in (EXEMPLARS, HELDOUT)
    }
    number = sum(sum(numbers) for numbers in counts.values())
    if number + 1 != len(snapshot.names):
        raise EngramError(f"{where} lists {len(snapshot.names)} files and counts {number + 1}; it is damaged")
    odd = {WEIGHTS, *picture_names(counts)} ^ snapshot.names
    if odd:
        raise EngramError(f"{where} does not agree with itself about {min(odd)}; it is damaged")
    check_room(2 * snapshot.size(WEIGHTS), f"the weights in {snapshot.path}")
    state = _tensors(snapshot.read(WEIGHTS), snapshot.path / WEIGHTS)
    _check_head(model, state, snapshot.path / WEIGHTS)
    model.learner = model.make_learner(mean, std, len(state["network.head.seen"]))
    teacher = {
        f"teacher.{name.removeprefix('network.')}": value
        for name, value in state.items()
        if name.startswith("network.")
    }
    try:
        model.learner.load_state_dict({**teacher, **state})
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise EngramError(
            f"{snapshot.path / WEIGHTS} does not fit the network that {where} describes; the model is damaged"
        ) from error
    means = model.learner.class_means
    if means is not None and means.shape != (len(classes), model.learner.network.backbone.dim):
        raise EngramError(f"{snapshot.path / WEIGHTS} has class means of another shape; the model is damaged")
    model.reads_only = not images
    if images:
        places = {place for place, known in enumerate(classes) if known.label in without}
        names = [name for name in picture_names(counts) if name not in sparing and place_of(name) not in places]
        _read_pictures(snapshot, model, names)
    return model


def _tensors(content: bytes, where: Path) -> dict[str, Tensor]:
    try:
        state = load(content)
    except Exception as error:  # safetensors' own kinds, and those of JSON and torch below it
        raise EngramError(f"{where} is no safetensors file ({type(error).__name__}); the model is damaged") from None
    for name, value in state.items():
        if not _is_ours(name, value):
            raise EngramError(f"{where} holds {name!r:.80} ({value.dtype}), which is no part of a model")
    return state


def _check_head(model: Model, state: dict[str, Tensor], where: Path) -> None:
    """Refuses weights of other shapes than the head's, before such a head is made and needs its memory."""
    seen = state.get("network.head.seen")
    if seen is None or seen.dtype != torch.bool or seen.ndim != 1:
        raise EngramError(f"{where} does not say which classes are known; the model is damaged")
    known = torch.arange(len(seen)) < len(model.classes)
    if len(seen) < len(model.classes) or not torch.equal(seen, known):
        raise EngramError(f"{where} knows other classes than {MANIFEST} lists; the model is damaged")
    older = count_older(name.removeprefix("network.backbone.") for name in state)
    if older >= max(1, len(model.sizes)):
        raise EngramError(f"{where} has {older + 1} backbones and {MANIFEST} {len(model.sizes)} stages; it is damaged")
    dim = model.make_backbone().dim
    try:
        with torch.device("meta"):
            head = model.method.head(dim, len(seen))
            if isinstance(head, ExpandingHead):
                head.widen(dim * (older + 1))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise EngramError(f"the head that {MANIFEST} describes cannot be made ({type(error).__name__})") from None
    for name, value in head.state_dict().items():
        found = state.get(f"network.head.{name}")
        if found is None or found.shape != value.shape:
            raise EngramError(f"{where} does not fit the head that {MANIFEST} describes; the model is damaged")


def _read_pictures(snapshot: Snapshot, model: Model, names: list[str]) -> None:
    assert model.learner is not None
    height, width = model.config.image_size
    check_room(2 * len(names) * height * width * 3, f"{len(names)} images of {width}x{height} pixels")

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
            labels = torch.tensor([place_of(name) for name in own])
            state = {"images": torch.from_numpy(pixels), "labels": labels, "sources": torch.arange(len(own))}
            memory.load_state_dict(state)
