"""Measures how strangers are told from known images: python tools/measure_strangers.py OUT.csv FOLDER [--others FOLDER]

FOLDER has lesson1, lesson2, lesson3 and test, each with one folder of images per class. The classes of the first two
lessons are learned by `engram learn` with its defaults, those of the third are strangers. `engram evaluate --strangers`
measures, for each seed, which draws the images that are held out:

- same days: known are a fifth of each class's images of the lessons, which this model does not learn (without them it
  learns less); strangers are the images of the third lesson;
- other days: known are the test images of the known classes; strangers are the test images of the others;
- other photographs: the same known images; strangers are the images in the folder --others.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engram.data.store import stable_permutation

SHARE = 0.2  # of a class's images that the model of "same days" does not learn
COLUMNS = ("accuracy_of_images", "auroc", "pass_at_95_kept", "known_called_unknown", "strangers_called_unknown")


def engram(*arguments: object) -> str:
    """Run a command, and return what it prints."""
    command = [sys.executable, "-m", "engram", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def divide(lesson: Path, learned: Path, left_out: Path, seed: int) -> None:
    """Copy a share of each class's images to one folder, and the others to another."""
    for folder in sorted(lesson.iterdir()):
        files = sorted(folder.iterdir())
        order = stable_permutation(len(files), f"strangers {seed} {folder.name}")
        for place, number in enumerate(order):
            target = (left_out if place < round(SHARE * len(files)) else learned) / folder.name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(files[number], target)


def measure(known: str, strangers: str, seed: int, model: Path, folders: tuple[Path, Path]) -> dict[str, object]:
    """One row: the model's evaluation of a folder of known images and one of strangers."""
    found: dict[str, Any] = json.loads(engram("evaluate", model, folders[0], "--strangers", folders[1], "--json"))
    found |= found.pop("strangers") | {"known_images": found["images"]}
    if found["learned_from"]:
        raise SystemExit(f"{folders[0]}: {found['learned_from']} of the images were learned")
    row = {"known": known, "strangers": strangers, "seed": seed, "images": found["known_images"]}
    return row | {"stranger_images": found["images"]} | {name: round(found[name], 4) for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--others", type=Path, help="folder of other images")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    lessons = [options.folder / f"lesson{number}" for number in (1, 2, 3)]
    rows: list[dict[str, object]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="strangers-") as temporary:
            work = Path(temporary)
            new = {place.name for place in lessons[2].iterdir()}
            for place in (options.folder / "test").iterdir():
                shutil.copytree(place, work / ("unknown" if place.name in new else "known") / place.name)
            for number, lesson in enumerate(lessons[:2], start=1):
                divide(lesson, work / f"part{number}", work / "same", seed)
                engram("learn", work / "whole", lesson, "--seed", seed, "--quiet")
                engram("learn", work / "part", work / f"part{number}", "--seed", seed, "--quiet")
            test = work / "known"
            rows.append(measure("same days", "third lesson", seed, work / "part", (work / "same", lessons[2])))
            rows.append(measure("other days", "same classes", seed, work / "whole", (test, work / "unknown")))
            if options.others is not None:
                rows.append(measure("other days", "other images", seed, work / "whole", (test, options.others)))
            print(*rows[-3:], sep="\n", file=sys.stderr)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
