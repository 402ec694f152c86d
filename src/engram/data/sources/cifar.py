"""CIFAR-100 in its official Python version, as archive or folder, and the published class orders."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import pickletools
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from engram.core.errors import EngramError
from engram.core.io import reading, typed_path
from engram.data.store import RGB, DataSplit, ImageStore

ARCHIVE_NAME: Final = "cifar-100-python.tar.gz"
FOLDER_NAME: Final = "cifar-100-python"
MEAN: Final[RGB] = (0.5071, 0.4867, 0.4408)
STD: Final[RGB] = (0.2675, 0.2565, 0.2761)
OFFICIAL_COUNTS: Final = (50_000, 10_000)
_NAMES: Final = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
    shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
OFFICIAL_NAMES: Final = tuple(_NAMES.split())

_MEMBERS: Final = ("meta", "train", "test")
_MEMBER_LIMIT: Final = 160 * 2**20  # the largest official file has 148 MiB
_CHUNK: Final = 2**20
_OPERATIONS: Final = 2**20  # most operations of a pickle; the official files have about 300,000


@cache
def published_orders(dataset: str) -> tuple[tuple[int, ...], ...]:
    """Return the class orders (class ids by label) published for a data set; empty if there are none.

    A data set with a held-out share (`cifar100:holdout0.2`) has the class orders of the whole data set.
    """
    text = resources.files("engram.data").joinpath("class_orders.json").read_text(encoding="utf-8")
    entry = json.loads(text)["orders"].get(dataset.partition(":")[0])
    return tuple(tuple(order) for order in entry["orders"]) if entry else ()


def read_cifar100(path: str | Path, *, counts: tuple[int, int] | None = OFFICIAL_COUNTS) -> ImageStore:
    """Read CIFAR-100 with its 100 fine classes from the official archive, its extracted folder, or their parent.

    counts: required numbers of training and test images, so that an incomplete copy is not used as the benchmark; None
    allows any number.
    """
    files = read_batches(path)
    names = _class_names(*files["meta"])
    train = _split(*files["train"], len(names), counts[0] if counts else None)
    test = _split(*files["test"], len(names), counts[1] if counts else None)
    return ImageStore("cifar100", train, test, names, mean=MEAN, std=STD, origin="cifar100")


def outline_cifar100() -> ImageStore:
    """Return CIFAR-100's classes and counts with blank images, to plan a run."""

    def split(count: int) -> DataSplit:
        images = np.broadcast_to(np.zeros((1, 32, 32, 3), np.uint8), (count, 32, 32, 3))
        return DataSplit(images, np.arange(count, dtype=np.int64) % len(OFFICIAL_NAMES))

    train, test = map(split, OFFICIAL_COUNTS)
    return ImageStore("cifar100", train, test, OFFICIAL_NAMES, mean=MEAN, std=STD, origin="cifar100")


def read_batches(path: str | Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read the files meta, train and test; return for each its path and its content by key."""
    place = _locate(typed_path(path))
    if place.is_dir():
        return {name: _read_member(place / name) for name in _MEMBERS}
    return _read_archive(place)


def _locate(path: Path) -> Path:
    """Return the archive or the extracted folder at a path."""
    with reading(path):
        if path.is_file() or any((path / name).is_file() for name in _MEMBERS):
            return path
        if not path.is_dir():
            raise EngramError(
                f"there is no file or folder {path}; give the path of {ARCHIVE_NAME} or its extracted folder"
            )
        if (path / FOLDER_NAME).is_dir():
            return path / FOLDER_NAME
        if (path / ARCHIVE_NAME).is_file():
            return path / ARCHIVE_NAME
    raise EngramError(f"{path} has neither {ARCHIVE_NAME} nor the folder {FOLDER_NAME}; give the path of one of them")


def _read_member(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        if path.stat().st_size > _MEMBER_LIMIT:
            raise EngramError(f"{path} is larger than any file of CIFAR-100; give the official files")
        with path.open("rb") as file:
            return str(path), _unpickle(file.read(_MEMBER_LIMIT), str(path))
    except FileNotFoundError:
        raise EngramError(f"{path} is missing; extract {ARCHIVE_NAME} again or give the archive itself") from None
    except OSError as error:
        raise EngramError(f"{path} cannot be read ({error.strerror or error}); check the file") from None


def _read_archive(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read the three files of the archive into memory; nothing is written to disk."""
    found: dict[str, bytes] = {}
    try:
        with _open_tar(path) as tar:
            for member in tar:
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                if folder != FOLDER_NAME or name not in _MEMBERS or not member.isreg():
                    continue
                if member.size > _MEMBER_LIMIT:
                    raise EngramError(f"{member.name} in {path} is larger than any file of CIFAR-100")
                if name in found:
                    raise EngramError(f"{path} holds {member.name} twice; give the official {ARCHIVE_NAME}")
                content = tar.extractfile(member)
                assert content is not None  # true for every regular file
                found[name] = content.read()
                if len(found[name]) != member.size:
                    raise EOFError("it ends inside a file")
    except EngramError:
        raise
    except Exception as error:  # gzip, zlib, tarfile and the file system raise their own types
        if isinstance(error, OSError) and error.strerror:
            raise EngramError(f"{path} cannot be read ({error.strerror}); check the file") from None
        reason = str(error).rstrip(".") or type(error).__name__
        raise EngramError(
            f"{path} is truncated, damaged or no tar archive ({reason}); download it again (engram prepare cifar100)"
        ) from None
    missing = [name for name in _MEMBERS if name not in found]
    if missing:
        raise EngramError(
            f"{path} has no file {FOLDER_NAME}/{missing[0]}; give the official {ARCHIVE_NAME} "
            "(the python version, not the binary or Matlab one)"
        )
    places = {name: f"{path}:{FOLDER_NAME}/{name}" for name in _MEMBERS}
    return {name: (place, _unpickle(found.pop(name), place)) for name, place in places.items()}


@contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    # Look at the content: some browsers decompress the file but keep its name.
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        source: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # pyright: ignore[reportAssignmentType]
        with tarfile.open(fileobj=source, mode="r|") as tar:
            yield tar
        while source.read(_CHUNK):  # to the end, to verify the checksum of the compressed stream
            pass


class _Pixels:
    """A NumPy array in a pickle: NumPy itself would allocate any shape that the file asks for."""

    array = np.empty(0, np.uint8)

    def __init__(self, kind: object, shape: object, code: object) -> None:
        pass  # NumPy writes an empty array here and its content as the state

    def __setstate__(self, state: tuple[Any, Any, _Dtype, Any, Any]) -> None:
        _, shape, dtype, by_column, content = state
        self.array = np.frombuffer(content, str(dtype)).reshape(shape, order="F" if by_column else "C")


class _Dtype(str):
    """The dtype of an array in a pickle. Its state holds only the byte order."""

    __slots__ = ()

    def __new__(cls, code: Any, align: object = None, copy: object = None) -> _Dtype:
        return str.__new__(cls, _text(code))

    def __setstate__(self, state: object) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Loads only plain containers and arrays: other names in a pickle could run any program."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._left = len(content)  # of bytes that may be encoded: no text is encoded twice

    def find_class(self, module: str, name: str, /) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): _Pixels,
            ("numpy", "ndarray"): None,
            ("numpy", "dtype"): _Dtype,
            ("_codecs", "encode"): self._encode,
        }
        wanted = (module.replace("numpy._core", "numpy.core"), name)  # NumPy has renamed its core
        if wanted not in allowed:
            raise EngramError(f"it asks for {module}.{name}, which no CIFAR-100 file needs")
        return allowed[wanted]

    def _encode(self, text: str, encoding: str) -> bytes:
        self._left -= len(text)
        if encoding not in ("latin1", "latin-1") or self._left < 0:
            raise EngramError(f"it encodes a text as {encoding!r:.20}, which no CIFAR-100 file needs")
        return text.encode("latin1")


def _unpickle(content: bytes, place: str) -> dict[str, Any]:
    try:
        _check_operations(content)
        found = _PlainUnpickler(content).load()
        if isinstance(found, dict):
            return {_text(key): value for key, value in found.items()}
    except EngramError as error:
        raise EngramError(f"{place} was refused: {error}; give the official files") from None
    except Exception as error:  # a damaged pickle can raise almost any exception
        reason = (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
        raise EngramError(f"{place} is truncated or damaged ({reason}); download CIFAR-100 again") from None
    raise EngramError(f"{place} holds a {type(found).__name__} where CIFAR-100 has a table; give the official files")


def _check_operations(content: bytes) -> None:
    """Refuse a pickle that would take much more memory than its size, before it is loaded.

    Each operation may make one small object, and storing an object under a number makes a table of that length.
    """
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        number = int(argument or 0) if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") else 0
        if max(count, number) > _OPERATIONS:
            raise EngramError("it has more objects than any file of CIFAR-100")


def _text(value: Any) -> str:
    if not isinstance(value, (bytes, str)):
        raise EngramError(f"it holds a {type(value).__name__} where CIFAR-100 has a text")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _class_names(place: str, content: dict[str, Any]) -> tuple[str, ...]:
    names = content.get("fine_label_names")
    if not isinstance(names, list) or len(names) != 100 or not all(isinstance(name, (bytes, str)) for name in names):
        found = f"{len(names)}" if isinstance(names, list) else "no"
        raise EngramError(f"{place} has {found} fine class names where CIFAR-100 has 100; give the official files")
    return tuple(_text(name) for name in names)


def _split(place: str, content: dict[str, Any], num_classes: int, count: int | None) -> DataSplit:
    pixels, labels = content.get("data"), content.get("fine_labels")
    pixels = pixels.array if isinstance(pixels, _Pixels) else pixels
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise EngramError(f"{place} has pixels of the form {found}, not uint8 (N, 3072); give the official files")
    if count is not None and len(pixels) != count:
        raise EngramError(f"{place} has {len(pixels)} images where CIFAR-100 has {count}; give the official files")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        found = f"{len(labels)}" if isinstance(labels, list) else "no"
        raise EngramError(f"{place} has {found} fine labels for {len(pixels)} images; give the official files")
    if not all(isinstance(label, int) and 0 <= label < num_classes for label in labels):
        raise EngramError(f"{place} has a fine label that is not 0 to {num_classes - 1}; give the official files")
    # Each row has the red, then the green, then the blue pixels.
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return DataSplit(images, np.array(labels, dtype=np.int64))
