"""From a data set's name, or a path, to an ImageStore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engram.core.errors import EngramError, option, suggest
from engram.data.sources.cifar import ARCHIVE_NAME, FOLDER_NAME, outline_cifar100, read_cifar100
from engram.data.sources.download import data_home
from engram.data.sources.folder import read_folder
from engram.data.sources.imagenet import IMAGENET, read_imagenet
from engram.data.sources.mini import read_mini
from engram.data.store import ImageStore

DATASETS = ("mini", "cifar100", *IMAGENET, "folder", "arrays")
FOLDERS = (*IMAGENET, "folder")  # those that are many files
PLACED = ("cifar100", *FOLDERS)  # those that are where a path says


@dataclass(frozen=True)
class DataConfig:
    """Where the images come from.

    name: "mini" is in the package; "cifar100" is the official archive or its folder; "imagenet100" and "imagenet1000"
    are the folder with ImageNet's train/ and val/ at `path`; "folder" is a folder of class folders there; "arrays" are
    given in Python. image_size and skip_bad are for folders, ImageNet's among them, and test_fraction for the others.
    holdout: evaluate on that share of the training images instead of the test split, for choosing settings without
    looking at it.
    """

    name: str = "mini"
    path: str | None = None
    image_size: int | None = None
    test_fraction: float = 0.2
    skip_bad: bool = False
    holdout: float | None = None

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise EngramError(f"no data set {self.name!r}: {suggest(self.name, DATASETS)}")
        for name in ("test_fraction", "holdout"):
            share = getattr(self, name)
            if share is not None and not 0 < share < 1:
                raise EngramError(f"{name} must be between 0 and 1, got {share}")
        if self.image_size is not None and self.image_size < 8:
            raise EngramError(f"image_size must be at least 8 pixels, got {self.image_size}")


def load_store(config: DataConfig, progress: Callable[[int, int], None] | None = None) -> ImageStore:
    """The images that the configuration names."""
    if config.name == "arrays":
        raise EngramError("this run was given arrays in Python; give the same ImageStore again")
    if config.name == "mini":
        store = read_mini()
    elif config.name == "cifar100":
        store = read_cifar100(config.path or _default_cifar100())
    elif config.name in IMAGENET:
        if config.path is None:
            raise EngramError(
                f"{config.name} needs the folder that holds ImageNet's train/ and val/: give {option('data', 'PATH')}"
            )
        store = read_imagenet(
            config.name, config.path, side=config.image_size, skip_bad=config.skip_bad, progress=progress
        )
    else:
        if config.path is None:
            raise EngramError(f"a folder of images needs its path: give {option('data', 'PATH')}")
        store = read_folder(
            config.path,
            size=config.image_size,
            test_fraction=config.test_fraction,
            skip_bad=config.skip_bad,
            progress=progress,
        )
    return store if config.holdout is None else store.holdout(config.holdout, seed=0)


def outline_store(config: DataConfig) -> ImageStore | None:
    """Classes and counts, with blank images, of a published data set that is not here yet; None for all others."""
    if config.name != "cifar100" or config.path is not None or _find_cifar100() is not None:
        return None
    store = outline_cifar100()
    return store if config.holdout is None else store.holdout(config.holdout, seed=0)


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
