"""Read the tensors of a file from anywhere: safetensors, or a state dict that torch saved. Nothing in it is executed.

A file is refused before anything of its own choice is allocated: a header that is too long, a pickle that names
anything but tensors or nests tuples, a number larger than the file, a compressed archive. So reading takes a few times
the file's size, and a time that grows with it.
"""

from __future__ import annotations

import io
import os
import pickletools
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.io import parse_json
from engram.core.memory_limits import check_memory

FILE_BYTES: Final = 2 * 2**30  # largest file
HEADER_BYTES: Final = 16 * 2**20  # of a safetensors file, or of a pickle
MOST_TENSORS: Final = 20_000
_ZIP: Final = b"PK\x03\x04"
_MAGIC: Final = 0x1950A86A20F9469CFC6C  # the first pickle of a file that torch saved before version 1.6
_LEGACY_PICKLES: Final = 3  # after that: a version, a description of the system, the object
_NAMED: Final = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(
        f"torch {kind}Storage"
        for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
    ),
}
_SMALL: Final = 2**16  # numbers that are always allowed, such as a version
_NAMING: Final = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}
# Values in a tuple, those of tuples inside it included. A tensor has about 20. Python hashes a tuple by visiting all of
# them, so tuples of tuples as keys of a dictionary would take exponential time, or overflow the stack.
_TUPLE_VALUES: Final = 100
_NESTED: Final = ("state_dict", "model")  # where training programs put the state dict in their own dictionary


def read_file(path: Path) -> bytes:
    """Return the content of a regular file of at most FILE_BYTES; a link to one is followed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise EngramError(f"there is no file {path}; give the path of a file of weights") from None
    except OSError as error:
        raise EngramError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise EngramError(f"{path} is not a regular file; give the path of a file of weights")
    with os.fdopen(handle, "rb") as file:
        size = status.st_size
        if size > FILE_BYTES:
            raise EngramError(f"{path} has {size / 1e9:.1f} GB, and a file of weights may have {FILE_BYTES / 1e9:.1f}")
        check_memory(3 * size, f"the tensors of {path}", "free some memory")
        return file.read(size)


def parse_tensors(content: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file's content by name, and the metadata of a safetensors file. path: for messages."""
    try:
        if content.startswith(_ZIP):
            return _checked(_read_zip(content)), {}
        if content.startswith(b"\x80") and content[8:9] != b"{":  # the header of a safetensors file may begin so too
            return _checked(_read_legacy(content)), {}
        metadata = _metadata(content)
        return _checked(load(content)), metadata
    except EngramError as error:
        raise EngramError(f"the file of weights {path} is refused: {error}") from None
    except Exception as error:  # torch, safetensors, pickle and zipfile raise many types
        reason = (str(error).splitlines() or [""])[0][:120]
        raise EngramError(
            f"the file of weights {path} is damaged, or is neither a safetensors file nor a state dict that torch "
            f"saved ({type(error).__name__}: {reason})"
        ) from None


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file: eight bytes with the length of its header, then the header as JSON."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise EngramError("it is cut short, or is neither a safetensors file nor a state dict that torch saved")
    if length > HEADER_BYTES:
        raise EngramError(f"its header has {length:,} bytes, and {HEADER_BYTES:,} are allowed")
    header = parse_json(content[8 : 8 + length])
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _read_zip(content: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise EngramError("its archive is compressed, which torch does not do")
        if sum(entry.file_size for entry in entries) > len(content):
            raise EngramError("its archive claims more bytes than the file has")
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise EngramError("its archive is not one that torch saved")
        _check_pickle(io.BytesIO(archive.read(pickles[0])), len(content))
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _read_legacy(content: bytes) -> Any:
    stream = io.BytesIO(content[:HEADER_BYTES])
    first = [argument for operation, argument, _ in pickletools.genops(stream) if operation.name == "LONG1"]
    if first != [_MAGIC]:
        raise EngramError("it is a pickle of something else than a state dict")
    for _ in range(_LEGACY_PICKLES):
        _check_pickle(stream, len(content))
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_pickle(stream: io.BytesIO, size: int) -> None:
    """Refuse a pickle that names anything but tensors, or has large tuples or a number larger than the file."""
    tuples = _TupleSizes()
    for operation, argument, position in pickletools.genops(stream):
        if operation.name in _NAMING and argument not in _NAMED:
            what = argument if isinstance(argument, str) else "something"
            raise EngramError(f"it asks for {what.replace(' ', '.')!r:.80}, and weights are tensors only")
        if isinstance(argument, int) and abs(argument) > max(size, _SMALL):
            raise EngramError(f"it claims {str(argument)[:20]} values, more than the file holds")
        if position is not None and position > HEADER_BYTES:
            raise EngramError("its list of tensors is too long")
        tuples.follow(operation, argument)


class _TupleSizes:
    """Follows the stack of a pickle, without making its objects, and refuses a tuple of too many values."""

    def __init__(self) -> None:
        self._stack: list[int | None] = []  # values in each object: more than 1 for tuples; None is a mark
        self._memo: dict[Any, int | None] = {}

    def follow(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Carry out an operation."""
        stack, name = self._stack, operation.name
        if name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if argument is None else argument] = self._top(1)[0]
            return
        taken, given = len(operation.stack_before), [1] * len(operation.stack_after)
        parts: list[int | None] = []
        if pickletools.markobject in operation.stack_before or (name == "POP" and self._top(1) == [None]):
            while self._top(1)[0] is not None:
                parts.append(stack.pop())
            stack.pop()
            before = operation.stack_before
            taken = before.index(pickletools.markobject) if pickletools.markobject in before else 0
        if taken:
            parts += self._top(taken)
            del stack[-taken:]
        if name == "MARK":
            stack.append(None)
            return
        if name in ("GET", "BINGET", "LONG_BINGET"):
            given = [self._memo.get(argument, 1) or 1]
        elif name == "DUP":
            given = [parts[0] or 1] * 2
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            given = [1 + sum(part or 1 for part in parts)]
            if given[0] > _TUPLE_VALUES:
                raise EngramError(f"it has a tuple of more than {_TUPLE_VALUES} values, which no tensor needs")
        stack += given

    def _top(self, count: int) -> list[int | None]:
        """The last objects on the stack."""
        if len(self._stack) < count:
            raise EngramError("it is a damaged pickle")
        return self._stack[-count:]


def _checked(found: Any) -> dict[str, Tensor]:
    """Return a state dict whose tensors are what they seem; refuse anything else."""
    for key in _NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise EngramError(f"it holds {type(found).__name__}, not a state dict of tensors by name")
    if len(found) > MOST_TENSORS:
        raise EngramError(f"it holds {len(found)} tensors, and {MOST_TENSORS} are allowed")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            what = repr(name)[:80] if isinstance(name, str) else f"a key of the type {type(name).__name__}"
            raise EngramError(f"it holds {what} with a {type(value).__name__}, not only tensors by name")
        if value.layout != torch.strided or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise EngramError(f"its tensor {name!r:.80} claims more values than it has")
    return {name: value.detach() for name, value in found.items()}
