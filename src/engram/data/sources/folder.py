"""Data sets in folders: one folder of images per class."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import reading, typed_path
from engram.data.decode.formats import EXTENSIONS
from engram.data.decode.image import try_decode, unreadable_error
from engram.data.decode.prefetch import Report, decode_stream
from engram.data.store import DataSplit, Images, ImageStore, some, stratified_split

_TEST_FOLDERS: Final = ("test", "val")
SPREADSHEETS: Final = (".xls", ".xlsx", ".ods")
_TRAIN_FOLDERS: Final = ("train", "training")


@dataclass(frozen=True)
class _SplitFiles:
    """The image files of one split and their class ids, sorted by class and name."""

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
    """Read a folder of class folders as RGB images, with transparent pixels in white.

    Parameters
    ----------
    path: folder with the class folders, or with `train/` and `test/` (or `val/`) that contain them. Classes are sorted
        by name.
    size: resize the central square of each image to size x size pixels. None: all images must have the same size.
    test_fraction, seed: share of each class to hold out if there is no test folder, and seed of the draw.
    skip_bad: leave out files that cannot be decoded, and list them in `skipped`.
    progress: called with the number of images read and of all images.
    """
    root = typed_path(path)
    if size is not None and size < 1:
        raise EngramError(f"the image size must be at least 1 pixel, not {size}")
    with reading(root):
        splits, names = _find_images(root)
    reader = _FolderReader(root, size, skip_bad, progress)
    if len(splits) == 1:
        # Called twice: classes that cannot be split are an error before any image is decoded.
        stratified_split(np.array(splits[0].class_ids), names, test_fraction, seed)
        (whole,) = reader.read(splits)
        train, test = map(whole.take, stratified_split(whole.class_ids, names, test_fraction, seed))
    else:
        train, test = reader.read(splits)
    name = name or root.resolve().name or "images"
    return ImageStore(name, train, test, names, skipped=tuple(reader.skipped), origin="folder")


def list_classes(
    path: str | Path, left_out: list[str] | None = None, skip_bad: bool = False
) -> tuple[list[str], list[str]]:
    """List the image files in a folder of class folders, and the class of each: the name of its folder.

    left_out: receives the names of empty class folders, which otherwise are an error. skip_bad: also of those that
    have only files of other kinds.
    """
    root = typed_path(path)
    with reading(root):
        if root.is_dir() and _has_splits(root):
            raise EngramError(
                f"{root} contains train/, which has class folders; give the folder that contains the class folders, "
                f"such as {root / 'train'}"
            )
        (split,), names = _find_images(root, left_out, skip_bad)
    return [str(file) for file in split.files], [names[class_id] for class_id in split.class_ids]


def list_nested(path: str | Path) -> tuple[list[str], list[str]]:
    """List the image files in folders at any depth, and the class of each: the path of its folder, such as fruit/apple.

    Images outside of all folders are left out.
    """
    root = typed_path(path)
    with reading(root):
        if not root.is_dir():
            raise EngramError(f"{root} is not a folder; give a folder with folders of images")
        files = list(walk_images(root))
        folders = [os.path.relpath(os.path.dirname(file), root) for file in files]
    pairs = [(file, folder) for file, folder in zip(files, folders, strict=True) if folder != "."]
    if not pairs:
        raise EngramError(f"{root} has no folder with images; put the images of each class into a folder")
    return [file for file, _ in pairs], [folder.replace(os.sep, "/") for _, folder in pairs]


def list_ignored(path: str | Path) -> tuple[list[str], list[str]]:
    """List files that are not read, except hidden ones: other files in class folders, and images outside of them."""
    root = typed_path(path)
    others: list[str] = []
    for folder in _folders(root):
        others += [os.path.relpath(file, root) for file in walk_files(folder) if not is_image(file)]
    return others, [entry.name for entry in _entries(root) if is_image(entry.name) and not entry.is_dir()]


def why_not_class_folders(path: str | Path, is_new: bool) -> str | None:
    """Return a sentence that names the right folder if the class folders seem to be folders of class folders.

    This is so if none of them contains images directly, one has several subfolders with images (for the only class of
    a new model: one subfolder), and there is only one class, a class has the name of a split, or no two of them have a
    subfolder of the same name. Otherwise, the images of a class may be in subfolders, by year, for example.
    """
    root = typed_path(path)
    if any(_has_images(folder) for folder in _folders(root)):
        return None
    folders = [folder for folder in _folders(root) if any(walk_images(folder))]
    subfolders = [
        {os.path.relpath(os.path.dirname(file), folder) for file in walk_images(folder)} for folder in folders
    ]
    if max(map(len, subfolders), default=0) < (1 if is_new and len(folders) == 1 else 2):
        return None
    names = [folder.name for folder in folders]
    has_split = any(name.lower() in (*_TRAIN_FOLDERS, *_TEST_FOLDERS) for name in names)
    has_shared = sum(map(len, subfolders)) > len(set().union(*subfolders))
    if len(names) > 1 and not has_split and has_shared:
        return None
    likely = next((folder for folder in folders if folder.name.lower() in _TRAIN_FOLDERS), folders[0])
    subject = f"its folder {names[0]} has" if len(names) == 1 else f"its folders {some(names)} have"
    return (
        f"{root} does not look like a folder of class folders: {subject} no image but folders of images; if these are "
        f"the classes, give {_class_root(likely)}, else put the images of a class directly into its folder"
    )


def _class_root(folder: Path) -> Path:
    """Return the folder at or below this one that probably contains the class folders."""
    below = [entry for entry in _folders(folder) if any(walk_images(entry))]
    if any(_has_images(entry) for entry in below) or not below:
        return folder
    train = next((entry for entry in below if entry.name.lower() in _TRAIN_FOLDERS), None)
    return folder if train is None and len(below) > 1 else _class_root(train or below[0])


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


def _has_images(folder: Path) -> bool:
    return any(is_image(entry.name) and not entry.is_dir() for entry in _entries(folder))


def walk_images(folder: str | Path, others: Counter[str] | None = None) -> Iterator[str]:
    """Yield the image files in a folder and its subfolders, sorted by name; see `walk_files`.

    others: counts the other files by extension.
    """
    return (path for path in walk_files(folder) if is_image(path, others))


def is_image(path: str, others: Counter[str] | None = None) -> bool:
    """Return whether a file has the extension of an image. others: counts the others by extension."""
    if path.lower().endswith(EXTENSIONS):
        return True
    if others is not None:
        others[os.path.splitext(path)[1].lower()] += 1
    return False


def walk_files(folder: str | Path, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Yield the files in a folder and its subfolders, sorted by name, without hidden ones.

    Links are followed, but no folder is visited twice, and no link to a parent folder is followed: it would lead to
    images of other classes. Memory use: the names in each folder on the way down, and the ids of visited folders.

    seen: ids of folders visited before, which are left out; receives those visited now.
    """
    seen = set() if seen is None else seen
    if _identity(str(folder)) in seen:
        return
    seen.add(_identity(str(folder)))
    stack = [_list_once(str(folder), seen)]
    while stack:
        path, is_folder = next(stack[-1], ("", False))
        if not path:
            stack.pop()
        elif is_folder:
            stack.append(_list_once(path, seen))
        else:
            yield path


def _list_once(folder: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """Return the sorted paths in a folder, and whether each is a folder; leave out folders seen before, mark others."""
    found: list[tuple[str, bool]] = []
    with os.scandir(folder) as entries:
        shown = sorted((entry for entry in entries if not _is_hidden(entry.name)), key=lambda entry: entry.name)
    for entry in shown:
        # For circular links, os.path.isdir returns False, while entry.is_dir raises an error.
        is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
        if is_folder:
            if leads_up(entry.path) or _identity(entry.path) in seen:
                continue
            seen.add(_identity(entry.path))
        found.append((entry.path, is_folder))
    return iter(found)


def leads_up(path: str) -> bool:
    """Return whether a path is a link to a folder that contains it."""
    is_link = os.path.islink(path) and os.path.isdir(path)  # a circular link is no folder
    return is_link and Path(path).parent.resolve().is_relative_to(Path(path).resolve())


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _find_images(
    root: Path, left_out: list[str] | None = None, skip_bad: bool = False
) -> tuple[list[_SplitFiles], tuple[str, ...]]:
    """Return the files of the training and test split, or of the one folder to split, and the class names."""
    if not root.is_dir():
        problem = f"{root} is a file" if root.exists() else f"there is no folder {root}"
        table = ", or a table saved as CSV" if root.suffix.lower() in SPREADSHEETS else ""
        raise EngramError(f"{problem}; give a folder with one folder of images per class{table}")
    if not _has_splits(root):
        names = tuple(_class_folders(root))
        if left_out is not None:
            walk = walk_images if skip_bad else walk_files
            left_out += [name for name in names if not any(walk(root / name))]
            names = tuple(name for name in names if name not in left_out) or names  # if all are empty, it is an error
        hint = "" if left_out is None else f", or leave it out with {option('skip_bad', True)}"
        return [_list_images(root, names, hint)], names
    train, test = root / "train", next((root / name for name in _TEST_FOLDERS if (root / name).is_dir()), None)
    if test is None:
        raise EngramError(
            f"{root} has train/ but neither test/ nor val/; add one, or give {train} to hold out a share of it"
        )
    names = _common_classes(train, test)
    return [_list_images(train, names), _list_images(test, names)], names


def _has_splits(root: Path) -> bool:
    # A class may be called "train", too: a folder of this name is a split only if it has no image directly inside.
    train = root / "train"
    if not train.is_dir() or _has_images(train):
        return False
    return any(entry.is_dir() for entry in _entries(train)) or any((root / test).is_dir() for test in _TEST_FOLDERS)


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
    """Return the sorted names of the class folders."""
    for entry in _entries(folder):
        if entry.is_symlink() and not entry.exists():
            raise EngramError(f"{entry} is a broken link; remove or repair it")
    names = sorted(entry.name for entry in _folders(folder))
    if not names:
        raise EngramError(f"{folder} has no class folder; put the images of each class into a folder named after it")
    return names


def _list_images(folder: Path, class_names: Sequence[str], hint: str = "") -> _SplitFiles:
    files: list[Path] = []
    class_ids: list[int] = []
    for class_id, class_name in enumerate(class_names):
        others: Counter[str] = Counter()
        found = [Path(file) for file in walk_images(folder / class_name, others)]
        if not found:
            kinds = ", ".join(repr(kind)[1:-1] or "no extension" for kind in sorted(others))
            what = (
                f"has files of other kinds only ({kinds}); convert them to images"
                if others
                else "has no image; add some"
            )
            raise EngramError(
                f"the class folder {folder / class_name} {what} ({', '.join(EXTENSIONS)}), or remove it{hint}"
            )
        files += found
        class_ids += [class_id] * len(found)
    return _SplitFiles(files, class_ids)


def _entries(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if not _is_hidden(entry.name))


def _is_hidden(name: str) -> bool:
    """Return whether to skip a file or folder silently: hidden ones, and what macOS adds to ZIP archives."""
    return name.startswith(".") or name == "__MACOSX"


@dataclass
class _FolderReader:
    """Decodes the files of all splits to one size and lists those that were skipped."""

    root: Path
    size: int | None
    skip_bad: bool
    progress: Report | None
    skipped: list[str] = field(default_factory=list)
    _first: tuple[Path, tuple[int, int]] | None = None

    def read(self, splits: Sequence[_SplitFiles]) -> list[DataSplit]:
        """Decode the images of each split, all of one size."""
        total = sum(len(split.files) for split in splits)
        starts = itertools.accumulate((len(split.files) for split in splits), initial=0)
        return [self._read_split(split, done, total) for split, done in zip(splits, starts, strict=False)]

    def _read_split(self, split: _SplitFiles, done: int, total: int) -> DataSplit:
        images: Images | None = None
        class_ids: list[int] = []
        decoded = zip(split.files, split.class_ids, self._decode(split.files), strict=True)
        for position, (file, class_id, image) in enumerate(decoded, done + 1):
            if isinstance(image, str):
                self._skip(file, image)
            else:
                self._check_size(file, (image.shape[0], image.shape[1]))
                if images is None:
                    images = _allocate(len(split.files), image.shape)
                images[len(class_ids)] = image
                class_ids.append(class_id)
            if self.progress is not None:
                self.progress(position, total)
        if images is None:
            raise EngramError(f"none of the {len(split.files)} images in {self.root} could be read; check the files")
        return DataSplit(images[: len(class_ids)], np.array(class_ids, dtype=np.int64))

    def _decode(self, files: Sequence[Path]) -> Iterator[Images | str]:
        """Yield the image of each file, or the reason why it cannot be read."""
        if self.size is None:
            yield from (try_decode(file, None, quick=False) for file in files)
            return
        done = 0
        for part in decode_stream(files, self.size):
            reasons, images = dict(part.skipped), iter(part.images)
            batch = files[done : done + len(part.paths) + len(part.skipped)]
            yield from (reasons[str(file)] if str(file) in reasons else next(images) for file in batch)
            done += len(batch)

    def _skip(self, file: Path, reason: str) -> None:
        if not self.skip_bad:
            raise unreadable_error(file, reason)
        self.skipped.append(str(file.relative_to(self.root)))

    def _check_size(self, file: Path, found: tuple[int, int]) -> None:
        if self._first is None:
            self._first = (file, found)
        first, expected = self._first
        if found != expected:
            raise EngramError(
                f"the images differ in size: {first} has {expected[1]}x{expected[0]} pixels and {file} "
                f"{found[1]}x{found[0]}; give {option('image_size')} to resize all to one size"
            )


def _allocate(count: int, shape: tuple[int, ...]) -> Images:
    try:
        return np.empty((count, *shape), dtype=np.uint8)
    except MemoryError:
        raise EngramError(
            f"{count} images of {shape[1]}x{shape[0]} pixels need {count * shape[0] * shape[1] * 3 / 1e9:.1f} GB of "
            f"memory; give a smaller {option('image_size')}"
        ) from None
