"""Checkpoints: the state of a run in one file, which is replaced as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.io import parse_json, writing
from engram.core.memory_limits import check_memory
from engram.core.safe_folder import Folder, MissingFile

FORMAT = 2
TENSORS_ONLY = 1  # the format whose checksum, an entry of the data, is of the tensors only
HEADER_BYTES = 100_000_000  # the limit of safetensors
_ENTRY = "engram"  # the only key in the metadata of the file: several would be written in any order


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Named tensors, and data that JSON can hold. is_verified: a checksum covers the data as well as the tensors."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]
    is_verified: bool = True


def save_checkpoint(path: Path, checkpoint: Checkpoint, within: Path | None = None) -> None:
    """Write a checkpoint; an older one at the path stays intact until the new one is complete.

    within: a folder above; links between it and the file are refused.
    """
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in checkpoint.tensors.items()}
    text = json.dumps(checkpoint.data)
    entry = {"format": FORMAT, "digest": _digest(tensors, text), "data": text}
    content = save(tensors, metadata={_ENTRY: json.dumps(entry)})
    root = within or path.parent
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    with Folder.open(root) as folder:
        folder.write(path.relative_to(root).as_posix(), content)


def load_checkpoint(path: Path, within: Path | None = None) -> Checkpoint:
    """Read a checkpoint and verify its checksum. within: as for `save_checkpoint`."""
    with _damage(path), _open_file(path, within) as (file, size):
        check_memory(2 * size, f"the tensors of {path}", "free some memory")
        entry = _read_entry(path, file, size)
        file.seek(0)
        tensors = load(file.read(size))
        if entry.digest != _digest(tensors, entry.text):
            raise EngramError(f"the checkpoint {path} is damaged (its checksum does not match); start the run again")
        return Checkpoint(tensors, entry.data, entry.format == FORMAT)


def read_data(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Read only the data of a checkpoint, without its tensors and unverified; empty if that fails."""
    try:
        with _damage(path), _open_file(path, within) as (file, size):
            return _read_entry(path, file, size).data
    except EngramError:
        return {}


@contextmanager
def _open_file(path: Path, within: Path | None) -> Iterator[tuple[BinaryIO, int]]:
    root = within or path.parent
    try:
        with Folder.open(root) as folder, folder.open_file(path.relative_to(root).as_posix()) as found:
            yield found
    except MissingFile:
        raise EngramError(
            f"there is no checkpoint at {path}, so there is nothing to resume; start the run again"
        ) from None


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged file into one sentence."""
    try:
        yield
    except EngramError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EngramError(f"the checkpoint {path} is damaged ({type(error).__name__}); start the run again") from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn an error inside this context, in which a checkpoint is put to use, into an EngramError."""
    try:
        yield
    except EngramError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise EngramError(
            f"the checkpoint {path} does not fit its run ({type(error).__name__}: {reason}); start the run again"
        ) from error


@dataclass(frozen=True)
class _Entry:
    """Our entry in the metadata of the file. text: the part of the data that the checksum covers, as it was written."""

    format: int
    digest: str
    text: str
    data: dict[str, Any]


def _read_entry(path: Path, file: BinaryIO, size: int) -> _Entry:
    """Read our entry in a safetensors file: eight bytes with the length of its header, then the header as JSON."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, HEADER_BYTES):
        raise ValueError("header")
    found = _json_object(parse_json(file.read(length))["__metadata__"][_ENTRY])
    form = found.get("format")
    if form not in (FORMAT, TENSORS_ONLY) or type(form) is not int:
        raise EngramError(
            f"the checkpoint {path} has format {form!r:.40}, and this version reads format {FORMAT}; "
            "use the version of engram that wrote it"
        )
    digest = _text(found["digest"])
    if form == TENSORS_ONLY:  # the entry itself holds the data
        data = {key: value for key, value in found.items() if key not in ("format", "digest")}
        return _Entry(form, digest, "", data)
    text = _text(found["data"])
    return _Entry(form, digest, text, _json_object(text))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    return value


def _json_object(text: Any) -> dict[str, Any]:
    data = parse_json(_text(text))
    if not isinstance(data, dict):
        raise TypeError("data")
    return data


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of the names, shapes and values of tensors."""
    return _digest({name: value.detach().cpu() for name, value in tensors.items()}, "")


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
