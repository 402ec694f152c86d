"""Make the embedded data set from CIFAR-100: python tools/make_mini.py CIFAR100_PATH [OUT].

One class of each of the 20 superclasses, 250 training images and all 100 test images of each, every
2x2 pixels averaged to one. Classes and images are drawn by hashing their names and pixels with a fixed
seed, so the result depends neither on the order of the images in the archive nor on a library's random
numbers, and no accuracy was looked at. Of each superclass the class that came second in the draw is
taken: the settings of the `mini` recipes were chosen on those that came first (--place 0), so that no
image of the shipped set, training or test, had a part in choosing them. Writes train.webp and test.webp
(lossless mosaics, one row for each class) and meta.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.core.errors import EngramError
from engram.data.sources.cifar import read_batches, read_cifar100
from engram.data.sources.mini import cut
from engram.data.store import DataSplit

SEED = "engram-mini-1"
PLACE = 1
IMAGES_PER_CLASS = {"train": 250, "test": 100}
SIZE = 16
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "src" / "engram" / "data" / "assets" / "mini"


def rank(content: bytes) -> bytes:
    """The place of a thing in the shuffle: its hash with the seed."""
    return hashlib.sha256(SEED.encode() + b"/" + content).digest()


def pick_classes(path: Path, class_names: tuple[str, ...], place: int) -> list[int]:
    """One CIFAR-100 class id of each superclass, the one at that place in the shuffle; sorted."""
    _, train = read_batches(path)["train"]
    superclass_of = dict(zip(train["fine_labels"], train["coarse_labels"], strict=True))
    chosen: list[int] = []
    for superclass in sorted(set(superclass_of.values())):
        members = [fine for fine, coarse in superclass_of.items() if coarse == superclass]
        chosen.append(sorted(members, key=lambda fine: rank(class_names[fine].encode()))[place])
    return sorted(chosen)


def pick_images(split: DataSplit, class_id: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` images (count, 16, 16, 3) of a class in the shuffle, at half the size."""
    images = split.images[split.class_ids == class_id]
    order = sorted(range(len(images)), key=lambda i: rank(images[i].tobytes()))[:count]
    blocks = images[order].reshape(count, SIZE, 2, SIZE, 2, 3).astype(np.uint16)
    return ((blocks.sum(axis=(2, 4)) + 2) // 4).astype(np.uint8)


def save_mosaic(images: npt.NDArray[np.uint8], rows: int, path: Path) -> None:
    """Write the images (N, 16, 16, 3) as one lossless mosaic, and read it back to be sure."""
    columns = len(images) // rows
    tiles = images.reshape(rows, columns, SIZE, SIZE, 3).transpose(0, 2, 1, 3, 4)
    mosaic = Image.fromarray(np.ascontiguousarray(tiles.reshape(rows * SIZE, columns * SIZE, 3)))
    partial = path.with_name(path.name + ".part")
    mosaic.save(partial, "WEBP", lossless=True, quality=100, method=6)
    with Image.open(partial) as written:
        assert np.array_equal(cut(np.asarray(written.convert("RGB")), SIZE), images)
    os.replace(partial, path)


def select(path: Path, place: int = PLACE) -> tuple[dict[int, str], dict[str, npt.NDArray[np.uint8]]]:
    """The names of the chosen classes by CIFAR-100 class id, and the images (N, 16, 16, 3) of each split."""
    store = read_cifar100(path)
    classes = pick_classes(path, store.class_names, place)
    images = {
        name: np.concatenate([pick_images(split, class_id, IMAGES_PER_CLASS[name]) for class_id in classes])
        for name, split in (("train", store.train), ("test", store.test))
    }
    return {class_id: store.class_names[class_id] for class_id in classes}, images


def make(path: Path, out: Path, place: int = PLACE) -> dict[str, Any]:
    """Write the three files and return what meta.json holds."""
    classes, splits = select(path, place)
    out.mkdir(parents=True, exist_ok=True)
    for name, images in splits.items():
        save_mosaic(images, len(classes), out / f"{name}.webp")
    meta = {
        "name": "mini",
        "attribution": "Made from CIFAR-100: A. Krizhevsky, Learning Multiple Layers of Features "
        "from Tiny Images, 2009, https://www.cs.toronto.edu/~kriz/cifar.html",
        "made_by": "tools/make_mini.py",
        "how": "of each superclass the class at a place in the rank of sha256(seed/name), images by rank of "
        "sha256(seed/pixels), 2x2 mean rounded; the mosaics hold one row for each class",
        "seed": SEED,
        "place": place,
        "image_size": SIZE,
        "images_per_class": IMAGES_PER_CLASS,
        "class_names": list(classes.values()),
        "cifar100_class_ids": list(classes),
        "sha256": {name: hashlib.sha256(images.tobytes()).hexdigest() for name, images in splits.items()},
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the official CIFAR-100 archive or its extracted folder")
    parser.add_argument("out", type=Path, nargs="?", default=OUT, help="where to write (default: the package)")
    parser.add_argument("--place", type=int, choices=range(5), default=PLACE, help="which class of each superclass")
    arguments = parser.parse_args()
    try:
        meta = make(arguments.path, arguments.out, arguments.place)
    except (EngramError, OSError) as error:
        sys.exit(f"error: {error}")
    size = sum((arguments.out / name).stat().st_size for name in ("train.webp", "test.webp", "meta.json"))
    print(f"{arguments.out}: {', '.join(meta['class_names'])}; {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
