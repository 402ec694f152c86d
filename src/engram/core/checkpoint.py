"""Checkpoints: the state of a run in one file, which is replaced as a whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.io import write_bytes

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Named tensors, and data that JSON can hold."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; an older one at the path stays intact until the new one is complete."""
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in checkpoint.tensors.items()}
    data = {"format": FORMAT, "digest": _digest(tensors), **checkpoint.data}
    write_bytes(path, save(tensors, metadata={"engram": json.dumps(data)}))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksum."""
    if not path.is_file():
        raise EngramError(f"there is no checkpoint at {path}, so there is nothing to resume; start the run again")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        data = json.loads(metadata["engram"])
        intact = data["digest"] == _digest(tensors)
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError, ValueError) as error:
        raise EngramError(f"the checkpoint {path} is damaged ({type(error).__name__}); start the run again") from error
    if data.get("format") != FORMAT:
        raise EngramError(
            f"the checkpoint {path} has format {data.get('format')}, and this version reads format {FORMAT}; "
            "use the version of engram that wrote it"
        )
    if not intact:
        raise EngramError(f"the checkpoint {path} is damaged (its checksum does not match); start the run again")
    return Checkpoint(tensors, data)


def read_data(path: Path) -> dict[str, Any]:
    """Read only the data of a checkpoint, without its tensors; empty if that fails."""
    try:
        with safe_open(str(path), framework="pt") as file:
            data = json.loads((file.metadata() or {})["engram"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
