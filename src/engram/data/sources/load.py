"""Loading of a data set by its name or path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engram.core.errors import EngramError, UnknownNameError, option
from engram.core.fields import check_fields, limits
from engram.core.io import data_home
from engram.core.serialize import ADDED
from engram.data.sources.cifar import ARCHIVE_NAME, FOLDER_NAME, outline_cifar100, read_cifar100
from engram.data.sources.folder import read_folder
from engram.data.sources.imagenet import IMAGENET, outline_imagenet, read_imagenet
from engram.data.sources.mini import read_mini
from engram.data.store import ImageStore

DATASETS = ("mini", "cifar100", *IMAGENET, "folder", "arrays")
FOLDERS = (*IMAGENET, "folder")  # data sets of many image files
PLACED = ("cifar100", *FOLDERS)  # data sets that are read from a path

Crops = Literal["square", "photograph"]


@dataclass(frozen=True)
class DataConfig:
    """Which images to use.

    Parameters
    ----------
    name: "mini" (part of the package), "cifar100" (official archive or its folder), "imagenet100" or "imagenet1000"
        (folder with train/ and val/), "folder" (folder of class folders), "arrays" (images given in Python).
    image_size, skip_bad: for "folder" and ImageNet.
    test_fraction: for "folder".
    holdout: share of the training images to evaluate on instead of the test split. Use it to choose settings.
    crops: for ImageNet: where training takes its random crops from: "square" (the stored image) or "photograph" (the
        original file, which is then decoded in every epoch).
    """

    name: str = "mini"
    path: str | None = None
    image_size: int | None = field(default=None, metadata=limits(at_least=8))
    test_fraction: float = field(default=0.2, metadata=limits(above=0, below=1))
    skip_bad: bool = False
    holdout: float | None = field(default=None, metadata=limits(above=0, below=1))
    crops: Crops = field(default="square", metadata={ADDED: True})

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise UnknownNameError("data set", self.name, DATASETS)
        check_fields(self)
        if self.crops == "photograph" and self.name not in IMAGENET:
            raise EngramError(
                f"{option('crops', 'photograph')} is for {' and '.join(IMAGENET)}, not for the data set {self.name}; "
                "leave it out"
            )


def load_store(
    config: DataConfig,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> ImageStore:
    """Load a data set. progress: called with the number of images read and of all images. notice: with a sentence."""
    if config.name == "arrays":
        raise EngramError("this run was given arrays in Python; give the same ImageStore again")
    if config.name in FOLDERS and config.path is None:
        needed = "a folder of images needs its path"
        if config.name in IMAGENET:
            needed = f"{config.name} needs the folder with ImageNet's train/ and val/"
        raise EngramError(f"{needed}: give {option('data', 'PATH')}")
    path, size, skip_bad = config.path or "", config.image_size, config.skip_bad
    of_files = config.crops == "photograph"
    if config.name == "mini":
        store = read_mini()
    elif config.name == "cifar100":
        store = read_cifar100(path or _default_cifar100())
    elif config.name in IMAGENET:
        given = {"side": size, "skip_bad": skip_bad, "photographs": of_files}
        store = read_imagenet(config.name, path, **given, progress=progress, notice=notice)
    else:
        share = config.test_fraction
        store = read_folder(path, size=size, test_fraction=share, skip_bad=skip_bad, progress=progress)
    return store if config.holdout is None else store.holdout(config.holdout, seed=0)


def outline_store(config: DataConfig) -> tuple[ImageStore, str] | None:
    """Return a data set that is not downloaded or not decoded yet, with blank images, to plan a run.

    The text says what is missing. None: the images can be read without writing anything.
    """
    if config.name in IMAGENET and config.path is not None:
        of_files = config.crops == "photograph"
        found = outline_imagenet(config.name, config.path, config.image_size, config.skip_bad, of_files)
        if found is None:
            return None
        store, missing = found[0], f"{config.name} is not decoded yet; the first run decodes {found[1]}"
    elif config.name == "cifar100" and config.path is None and _find_cifar100() is None:
        store, missing = outline_cifar100(), "cifar100 is not here yet; 'engram prepare cifar100' downloads it"
    else:
        return None
    if config.holdout is not None:
        store = replace(store.holdout(config.holdout, seed=0), known_fingerprint=store.known_fingerprint)
    return store, missing


def _find_cifar100() -> Path | None:
    places = (data_home() / ARCHIVE_NAME, data_home() / FOLDER_NAME)
    return next((path for path in places if path.exists()), None)


def _default_cifar100() -> Path:
    path = _find_cifar100()
    if path is not None:
        return path
    raise EngramError(
        f"CIFAR-100 is not in {data_home()}: run 'engram prepare cifar100', "
        f"or give the archive or its folder with {option('data', 'PATH')}"
    )
