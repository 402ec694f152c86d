"""Measures what decoding photographs in every epoch costs: python tools/measure_crops.py OUT.json FOLDER [--files 400]

FOLDER is one of tools/make_jpegs.py (or ImageNet itself). One thread decodes the training files, takes a random crop of
each and resizes it to 224x224 pixels, as `--crops photograph` does; and decodes them to stored squares, to compare. The
same with a file and a crop of 8x8 pixels is what Python itself takes, mostly with its lock held: threads share that.

    python tools/make_jpegs.py /scratch/jpegs --classes 100 --train 4
    taskset -c 0 python tools/measure_crops.py results/crops-cpu.json /scratch/jpegs

Times are CPU time of the process, so that other programs on the machine hardly change them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from engram.core.io import write_json
from engram.core.provenance import hardware, processor_name, versions
from engram.core.rng import generator
from engram.data.decode.image import decode_protocol_square
from engram.data.photographs import Photographs, choose_crop
from engram.data.planned_crops import draw_numbers

SEEN = 224


def images_a_second(work: Callable[[], None], files: int, times: int) -> list[float]:
    """The images that a second of CPU time does, after one round that is not counted."""
    work()
    found: list[float] = []
    for _ in range(times):
        started = time.process_time()
        work()
        found.append(round(files / (time.process_time() - started), 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = sorted((given.folder / "train").rglob("*.JPEG"))[: given.files]
    photographs = Photographs(given.folder, tuple(str(file.relative_to(given.folder)) for file in found), "")
    numbers = draw_numbers((len(found),), generator(1, "crops")).tolist()
    out = np.zeros((SEEN, SEEN, 3), np.uint8)
    sizes = [Image.open(file).size for file in found]
    boxes = [choose_crop(own, *size) for own, size in zip(numbers, sizes, strict=True)]
    halved = sum(min(box[2] - box[0], box[3] - box[1]) >= 2 * SEEN for box in boxes)

    def crop() -> None:
        for position, own in enumerate(numbers):
            photographs.crop_into(position, own, out)

    def square() -> None:
        for file in found:
            decode_protocol_square(file, 256)

    with tempfile.TemporaryDirectory() as folder:
        Image.new("RGB", (8, 8)).save(Path(folder) / "small.JPEG")
        small, smaller = Photographs(Path(folder), ("small.JPEG",), ""), np.zeros((8, 8, 3), np.uint8)

        def overhead() -> None:
            for own in numbers:
                small.crop_into(0, own, smaller)

        alone = images_a_second(overhead, len(found), given.times)
    write_json(
        given.out,
        {
            "files": len(found),
            "kilobytes_a_file": round(sum(file.stat().st_size for file in found) / len(found) / 1e3, 1),
            "mean_size": np.mean(sizes, axis=0).round(1).tolist(),
            "images_a_second_of_one_core": {
                "decode, crop, resize": images_a_second(crop, len(found), given.times),
                "decode to a square": images_a_second(square, len(found), given.times),
                "8x8 pixels": alone,
            },
            "crops_that_a_half_size_would_serve": halved,
            "hardware": hardware("cpu", processor_name(), 1),
            "versions": versions(),
        },
    )


if __name__ == "__main__":
    main()
