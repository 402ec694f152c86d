"""What model.json says, each thing found to be of the kind and in the range that it should be."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import fields
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError
from engram.models.calibration import COLDEST, HOTTEST
from engram.models.labels import decode_label
from engram.models.model import Entry, KnownClass
from engram.models.model_config import ModelConfig
from engram.models.split import DIGEST_BYTES

DIGESTS = "digests"
MOST_CLASSES, MOST_IMAGES = 30_000, 10**9


def parse_manifest(
    manifest: dict[str, Any], where: Path
) -> tuple[
    ModelConfig, tuple[KnownClass, ...], tuple[int, ...], tuple[Entry, ...], tuple[float, ...], tuple[float, ...]
]:
    """What model.json says, each thing of the kind it should be."""
    try:
        config = ModelConfig.from_plain(manifest.get("config"))
    except EngramError as error:
        raise EngramError(f"the configuration in {where} is none of this version's: {error}") from None
    mean, std = (_numbers(manifest.get(name), name, where) for name in ("mean", "std"))
    if min(std) <= 0:
        raise EngramError(f"{where} gives a standard deviation of {min(std)}; it is damaged")
    listed = manifest.get("classes")
    if not isinstance(listed, list) or len(listed) > MOST_CLASSES:
        raise EngramError(f"{where} does not list the model's classes, or too many; it is damaged")
    history = _history(manifest.get("history"), where)
    classes = tuple(_known(entry, len(history), where) for entry in listed)
    if len({known.label for known in classes}) != len(classes):
        raise EngramError(f"{where} lists a class twice; it is damaged")
    sizes = manifest.get("stage_sizes")
    if not isinstance(sizes, list) or not all(_is_count(size) for size in sizes) or sum(sizes) != len(classes):
        raise EngramError(f"the stages in {where} are not those of its classes; it is damaged")
    return config, classes, tuple(sizes), history, mean, std


def _known(entry: Any, stages: int, where: Path) -> KnownClass:
    if not isinstance(entry, dict) or "label" not in entry:
        raise EngramError(f"{where} lists a class without a label; it is damaged")
    stage = entry.get("stage")
    if stage is None or not _is_count(stage) or stage >= stages:
        raise EngramError(f"{where} has a class of a lesson that never was; it is damaged")
    try:
        label = decode_label(entry["label"])
    except EngramError as error:
        raise EngramError(f"{where} has a class whose label cannot be read: {error}") from None
    accuracy = _shares(entry.get("accuracy"), where)
    return KnownClass(label, stage, count(entry, "images", where), accuracy, _digests(entry, where))


def _digests(entry: dict[str, Any], where: Path) -> bytes:
    """The digests of a class's images; none where the model was written before they were kept."""
    try:
        joined = b64decode(entry.get(DIGESTS, ""), validate=True)
        if len(joined) % DIGEST_BYTES == 0:
            return joined
    except (TypeError, ValueError):
        pass
    raise EngramError(f"{where} has a class whose digests cannot be read; it is damaged")


def _history(entries: Any, where: Path) -> tuple[Entry, ...]:
    if not isinstance(entries, list):
        raise EngramError(f"{where} has no history; it is damaged")
    kinds = {field.name: field.type for field in fields(Entry)}
    found: list[Entry] = []
    for entry in entries:
        if not isinstance(entry, dict) or not kinds.keys() >= entry.keys() >= {"what", "date"}:
            raise EngramError(f"{where} has a history that cannot be read; it is damaged")
        for name, value in entry.items():
            right = {"str": str, "int": int, "float": (int, float)}.get(str(kinds[name]), dict)
            if not isinstance(value, right) or isinstance(value, bool):
                raise EngramError(f"{where} has {value!r:.40} for {name} in its history; it is damaged")
            if right is dict:
                _shares(value, where)
        found.append(Entry(**entry))
    return tuple(found)


def _shares(value: Any, where: Path) -> dict[str, float]:
    """Percentages by predictor."""
    if not isinstance(value, dict) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) for x in value.values()
    ):
        raise EngramError(f"{where} has {value!r:.40} for an accuracy; it is damaged")
    return {str(name): float(share) for name, share in value.items()}


def temperatures(manifest: dict[str, Any], where: Path) -> dict[str, float]:
    """What logits are divided by, by predictor; models of before there were any have none."""
    value = manifest.get("temperatures", {})
    if not isinstance(value, dict) or not all(
        type(x) in (int, float) and COLDEST <= x <= HOTTEST for x in value.values()
    ):
        raise EngramError(f"{where} has {value!r:.60} for its temperatures; it is damaged")
    return {str(name): float(number) for name, number in value.items()}


def texts(value: Any, where: Path) -> list[str]:
    """A list of names."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise EngramError(f"{where} has {value!r:.40} where names should be; it is damaged")
    return value


def _numbers(value: Any, name: str, where: Path) -> tuple[float, ...]:
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(type(x) in (int, float) and abs(x) < 1e6 for x in value)
    ):
        raise EngramError(f"{where} has {value!r:.60} for {name}, which should be three numbers; it is damaged")
    return tuple(float(x) for x in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_IMAGES


def count(entry: Any, name: str, where: Path) -> int:
    """A number of images of a class."""
    if not isinstance(entry, dict) or not _is_count(entry.get(name)):
        raise EngramError(f"{where} has a class without its number of {name}; it is damaged")
    return entry[name]
