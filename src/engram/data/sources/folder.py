"""A folder of class folders as an ImageStore."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import typed_path
from engram.data.decode.image import EXTENSIONS, try_decode
from engram.data.decode.prefetch import Report, decode_stream
from engram.data.store import DataSplit, Images, ImageStore, some, stratified_split

_TEST_FOLDERS: Final = ("test", "val")
_TRAIN_FOLDERS: Final = ("train", "training")


@dataclass(frozen=True)
class _Folder:
    """The image files of one split, each with its class id, by class and then by name."""

    files: list[Path]
    class_ids: list[int]


def read_folder(
    path: str | Path,
    *,
    name: str | None = None,
    size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    progress: Report | None = None,
) -> ImageStore:
    """The images under a folder as RGB; the classes are its folders, sorted by name.

    Either `train/` and `test/` (or, without it, `val/`) hold the class folders, or the folder itself does and
    `test_fraction` of each class is held out, drawn with `seed` from the sorted file names.
    With `size`, the central square of each image is resized to size x size pixels. Transparent pixels
    become white. `skip_bad` passes over files that cannot be decoded and lists them in `skipped`.
    `progress` is called with the number of images read and of all images.
    """
    root = typed_path(path)
    if size is not None and size < 1:
        raise EngramError(f"the image size must be at least 1 pixel, not {size}")
    try:
        folders, names = _find_images(root)
    except OSError as error:
        raise EngramError(
            f"{error.filename or root} cannot be read ({error.strerror}); check its permissions"
        ) from None
    if len(folders) == 1:  # what cannot be split is refused before the images are decoded, not after
        stratified_split(np.array(folders[0].class_ids), names, test_fraction, seed)
    reader = _FolderReader(root, size, skip_bad, progress)
    if len(folders) == 1:
        (whole,) = reader.read(folders)
        kept, held = stratified_split(whole.class_ids, names, test_fraction, seed)
        train = DataSplit(whole.images[kept], whole.class_ids[kept])
        test = DataSplit(whole.images[held], whole.class_ids[held])
    else:
        train, test = reader.read(folders)
    return ImageStore(
        name or root.resolve().name or "images", train, test, names, skipped=tuple(reader.skipped), origin="folder"
    )


def list_classes(path: str | Path, empty: list[str] | None = None) -> tuple[list[str], list[str]]:
    """The image files in a folder of class folders and, for each, its class: the folder's name.

    With `empty`, class folders without an image are noted there instead of refused.
    """
    root = typed_path(path)
    try:
        if root.is_dir() and _has_splits(root):
            raise EngramError(
                f"{root} holds train/, with class folders of its own; give the folder that holds the class folders, "
                f"such as {root / 'train'}"
            )
        (folder,), names = _find_images(root, empty)
    except OSError as error:
        raise EngramError(
            f"{error.filename or root} cannot be read ({error.strerror}); check its permissions"
        ) from None
    return [str(file) for file in folder.files], [names[class_id] for class_id in folder.class_ids]


def passed_over(path: str | Path) -> tuple[list[str], list[str]]:
    """What is not read, hidden entries aside: files of other kinds in class folders, and images beside these."""
    root = typed_path(path)
    others: list[str] = []
    for folder in _folders(root):
        others += [os.path.relpath(file, root) for file in _walk(folder) if not _has_extension(file)]
    return others, [entry.name for entry in _entries(root) if _is_image(entry)]


def refuse_nested(path: str | Path, is_new: bool) -> None:
    """Refuses a folder whose class folders look like folders of class folders; names the one that is likely meant.

    They hold no image themselves, there are several folders below one of them that do, and either there is no other
    class or one is called as splits are. A new model's only class is refused for one such folder. Other classes may
    have their images in folders within, by year, say.
    """
    root = typed_path(path)
    if any(_holds_image(folder) for folder in _folders(root)):
        return
    folders = [folder for folder in _folders(root) if any(walk_images(folder))]
    within = [len({os.path.dirname(file) for file in walk_images(folder)}) for folder in folders]
    if max(within, default=0) < (1 if is_new and len(folders) == 1 else 2):
        return
    names = [folder.name for folder in folders]
    if len(names) > 1 and not any(name.lower() in (*_TRAIN_FOLDERS, *_TEST_FOLDERS) for name in names):
        return
    meant = next((folder for folder in folders if folder.name.lower() in _TRAIN_FOLDERS), folders[0])
    whose = f"its folder {names[0]} has" if len(names) == 1 else f"its folders {some(names)} have"
    raise EngramError(
        f"{root} does not look like a folder of class folders: {whose} no image but folders of images; if these are "
        f"the classes, give {_class_root(meant)}, else put the images of a class directly into its folder"
    )


def _class_root(folder: Path) -> Path:
    """The folder at or below this one whose folders are classes, as far as one can tell."""
    below = [entry for entry in _folders(folder) if any(walk_images(entry))]
    if any(_holds_image(entry) for entry in below) or not below:
        return folder
    train = next((entry for entry in below if entry.name.lower() in _TRAIN_FOLDERS), None)
    return folder if train is None and len(below) > 1 else _class_root(train or below[0])


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


def _holds_image(folder: Path) -> bool:
    return any(_is_image(entry) for entry in _entries(folder))


def walk_images(folder: str | Path, others: Counter[str] | None = None) -> Iterator[str]:
    """The image files in a folder and its subfolders, by name; see _walk. others: counts the rest by their endings."""
    for path in _walk(folder):
        if _has_extension(path):
            yield path
        elif others is not None:
            others[os.path.splitext(path)[1].lower()] += 1


def _walk(folder: str | Path) -> Iterator[str]:
    """The files in a folder and its subfolders, by name, hidden ones aside.

    Links are followed, but no folder is gone into twice, nor one that holds the folder at hand: it would bring in the
    images of other classes. What is held is the names in each folder on the way down, and which folders were seen.
    """
    seen = {_identity(str(folder))}
    waiting = [_inside(str(folder), seen)]
    while waiting:
        path, is_folder = next(waiting[-1], ("", False))
        if not path:
            waiting.pop()
        elif is_folder:
            waiting.append(_inside(path, seen))
        else:
            yield path


def _inside(folder: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """The paths in a folder, by name, and whether each is a folder, which is noted as seen."""
    found: list[tuple[str, bool]] = []
    with os.scandir(folder) as entries:
        shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in shown:
        # os.path.isdir, unlike the entry's own, takes a link in a circle for what it is: no folder.
        is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
        if is_folder:
            leads_up = entry.is_symlink() and Path(folder).resolve().is_relative_to(Path(entry.path).resolve())
            if leads_up or _identity(entry.path) in seen:
                continue
            seen.add(_identity(entry.path))
        found.append((entry.path, is_folder))
    return iter(found)


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _find_images(root: Path, empty: list[str] | None = None) -> tuple[list[_Folder], tuple[str, ...]]:
    """The files of the training and the test split, or of the one folder to be split, and the class names."""
    if not root.is_dir():
        raise EngramError(f"there is no folder {root}; give a folder with a folder of images for each class")
    if not _has_splits(root):
        names = tuple(_class_folders(root))
        if empty is not None:
            empty += [name for name in names if not any(walk_images(root / name))]
            names = tuple(name for name in names if name not in empty) or names  # all of them empty is refused
        return [_list_images(root, names)], names
    train, test = root / "train", _test_folder(root)
    names = _common_classes(train, test)
    return [_list_images(train, names), _list_images(test, names)], names


def _has_splits(root: Path) -> bool:
    # "train" is also a word for a class: a folder of that name is a split only if it holds no image itself.
    train = root / "train"
    if not train.is_dir() or _holds_image(train):
        return False
    return any(entry.is_dir() for entry in _entries(train)) or any((root / test).is_dir() for test in _TEST_FOLDERS)


def _test_folder(root: Path) -> Path:
    for test in _TEST_FOLDERS:
        if (root / test).is_dir():
            return root / test
    raise EngramError(
        f"{root} has train/ but neither test/ nor val/; add one, or give {root / 'train'} to hold out a share of it"
    )


def _common_classes(train: Path, test: Path) -> tuple[str, ...]:
    trained, tested = _class_folders(train), _class_folders(test)
    only = [name for name in tested if name not in trained]
    if only:
        raise EngramError(f"class {some(only)} is in {test} but not in {train}; add its training images or remove it")
    only = [name for name in trained if name not in tested]
    if only:
        raise EngramError(
            f"class {some(only)} is in {train} but not in {test}, so its accuracy could not be measured; "
            "add its test images or remove it"
        )
    return tuple(trained)


def _class_folders(folder: Path) -> list[str]:
    """The names of the class folders, sorted."""
    names: list[str] = []
    for entry in _entries(folder):
        if entry.is_symlink() and not entry.exists():
            raise EngramError(f"{entry} is a link that leads nowhere; remove or mend it")
        if entry.is_dir():
            names.append(entry.name)
    if not names:
        raise EngramError(f"{folder} has no class folder; put the images of each class into a folder named after it")
    return sorted(names)


def _list_images(folder: Path, class_names: Sequence[str]) -> _Folder:
    files: list[Path] = []
    class_ids: list[int] = []
    for class_id, class_name in enumerate(class_names):
        found = [Path(file) for file in walk_images(folder / class_name)]
        if not found:
            raise EngramError(
                f"the class folder {folder / class_name} has no image; add some ({', '.join(EXTENSIONS)}) or remove it"
            )
        files += found
        class_ids += [class_id] * len(found)
    return _Folder(files, class_ids)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, sorted, hidden entries aside."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if not entry.name.startswith("."))


def _is_image(path: Path) -> bool:
    return _has_extension(str(path)) and not path.is_dir()


def _has_extension(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS)


class _FolderReader:
    """Decodes the files of all splits to one size and keeps account of those passed over."""

    def __init__(self, root: Path, size: int | None, skip_bad: bool, progress: Report | None) -> None:
        self.root = root
        self.size = size
        self.skip_bad = skip_bad
        self.progress = progress
        self.skipped: list[str] = []
        self._first: tuple[Path, tuple[int, int]] | None = None

    def read(self, folders: Sequence[_Folder]) -> list[DataSplit]:
        """The images of each folder, all of one size."""
        total = sum(len(folder.files) for folder in folders)
        done = 0
        splits: list[DataSplit] = []
        for folder in folders:
            splits.append(self._read_split(folder, done, total))
            done += len(folder.files)
        return splits

    def _read_split(self, folder: _Folder, done: int, total: int) -> DataSplit:
        images: Images | None = None
        class_ids: list[int] = []
        found = zip(folder.files, folder.class_ids, self._decoded(folder.files), strict=True)
        for position, (file, class_id, image) in enumerate(found, start=1):
            if isinstance(image, str):
                self._pass_over(file, image)
            else:
                self._check_size(file, (image.shape[0], image.shape[1]))
                if images is None:
                    images = _allocate(len(folder.files), image.shape)
                images[len(class_ids)] = image
                class_ids.append(class_id)
            if self.progress is not None:
                self.progress(done + position, total)
        if images is None:
            raise EngramError(f"none of the {len(folder.files)} images in {self.root} could be read; check the files")
        return DataSplit(images[: len(class_ids)], np.array(class_ids, dtype=np.int64))

    def _decoded(self, files: Sequence[Path]) -> Iterator[Images | str]:
        """Each file's image, or why it cannot be read."""
        if self.size is None:
            yield from (try_decode(file, None, quick=False) for file in files)
            return
        done = 0
        for part in decode_stream(files, self.size):
            reasons, images = dict(part.skipped), iter(part.images)
            batch = files[done : done + len(part.paths) + len(part.skipped)]
            yield from (reasons[str(file)] if str(file) in reasons else next(images) for file in batch)
            done += len(batch)

    def _pass_over(self, file: Path, reason: str) -> None:
        if not self.skip_bad:
            raise EngramError(
                f"the image {file} cannot be read ({reason}); repair or remove it, or leave such files out with "
                f"{option('skip_bad')}"
            )
        self.skipped.append(str(file.relative_to(self.root)))

    def _check_size(self, file: Path, found: tuple[int, int]) -> None:
        if self._first is None:
            self._first = (file, found)
        first, expected = self._first
        if found != expected:
            raise EngramError(
                f"the images differ in size: {first} has {expected[1]}x{expected[0]} pixels and {file} "
                f"{found[1]}x{found[0]}; give {option('image_size')} to bring all to one size"
            )


def _allocate(count: int, shape: tuple[int, ...]) -> Images:
    try:
        return np.empty((count, *shape), dtype=np.uint8)
    except MemoryError:
        _refuse_memory(count, shape)


def _refuse_memory(count: int, shape: tuple[int, ...]) -> NoReturn:
    gigabytes = count * shape[0] * shape[1] * 3 / 1e9
    raise EngramError(
        f"{count} images of {shape[1]}x{shape[0]} pixels need {gigabytes:.1f} GB of memory; "
        f"give a smaller {option('image_size')}"
    )
