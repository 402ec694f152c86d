"""Makes JPEG files like ImageNet's, to measure with: python tools/make_jpegs.py OUT [--classes 1000] [--train 60]

OUT gets train/<wnid>/*.JPEG and val/<wnid>/*.JPEG of about 500x375 pixels, in about the size of ImageNet's files. The
pictures are smooth patterns with noise, different in every file; nothing can be learned from them. Of 1,000 classes
there are as many as of `imagenet1000`, of 100 those of `imagenet100`. The defaults make 61,000 files.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from engram.data.sources.imagenet import published_wnids

PATTERNS = 16  # that files are made from, by a shift, a mirror image and another brightness


@cache
def patterns(width: int, height: int) -> np.ndarray:
    """Patterns (PATTERNS, height, width, 3) of several scales, with noise as of a camera."""
    random = np.random.default_rng(0)
    made = np.zeros((PATTERNS, height, width, 3))
    for picture in made:
        for cells, strength in ((4, 70), (16, 40), (64, 20)):
            coarse = random.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            fine = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            picture += strength / 128 * (np.asarray(fine, float) - 128)
        picture += random.normal(128, 6, picture.shape)
    return made.clip(0, 255)


def write_class(out: Path, size: tuple[int, int], train: int, val: int, numbered: tuple[int, str]) -> int:
    """Writes the files of one class; returns how many bytes they have."""
    number, wnid = numbered
    random, written = np.random.default_rng(number), 0
    for split, count in (("train", train), ("val", val)):
        folder = out / split / wnid
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            # Sizes differ a little, as those of photographs do.
            width, height = (side + int(random.integers(-25, 26)) for side in size)
            picture = patterns(size[0] + 25, size[1] + 25)[random.integers(PATTERNS)]
            picture = np.roll(picture, random.integers(0, 400, 2), (0, 1))[:height, :width]
            picture = picture[:, :: int(random.choice([-1, 1]))] * random.uniform(0.6, 1.1)
            file = folder / f"{wnid}_{split}_{i:05}.JPEG"
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
            written += file.stat().st_size
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--train", type=int, default=60, help="training files of each class")
    parser.add_argument("--val", type=int, default=1, help="validation files of each class")
    parser.add_argument("--size", default="500x375", help="width and height in pixels, about")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    wnids = published_wnids() if given.classes == 100 else [f"n{i:08}" for i in range(given.classes)]
    started = time.perf_counter()
    with ProcessPoolExecutor(given.processes) as processes:
        work = partial(write_class, given.out, (width, height), given.train, given.val)
        sizes = list(processes.map(work, enumerate(wnids)))
    files = given.classes * (given.train + given.val)
    print(f"{files:,} files of {sum(sizes) / files / 1e3:.0f} kB on average in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
