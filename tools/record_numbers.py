"""Record what every method computes, to show that a refactoring changes no number.

Every method's recipe on the embedded set is run for two stages of 10 classes and two epochs on the CPU, and
`engram learn` is given two lessons. What is recorded: a digest of every tensor in the last checkpoint or generation,
and `result.json` without times. `--compare BEFORE.json` lists what differs and exits with 1 if anything does.

    python tools/record_numbers.py before.json        # in a checkout of the commit before
    python tools/record_numbers.py after.json --compare before.json

Numbers depend on the processor, on torch's version and on the number of threads, so both are recorded on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from engram.contract.settings import MAIN_ROLES, with_role
from engram.methods import find_method

THREADS = "1"
TIMES = ("seconds", "began", "ended", "time")
LESSONS = 6, 2  # classes of the first lesson and of the second
FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "ten-classes.tar.gz"


def engram(*arguments: str) -> str:
    """Return the output of an engram command; an error if it fails."""
    done = subprocess.run([sys.executable, "-m", "engram", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"engram {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def digests(folder: Path) -> dict[str, str]:
    """A digest of every tensor in the folder's safetensors files, by file name and tensor name."""
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            head = f"{tensor.dtype} {tensor.shape} ".encode()
            found[f"{file.name}:{name}"] = hashlib.sha256(head + tensor.tobytes()).hexdigest()[:16]
    return found


def without_times(value: Any) -> Any:
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not any(word in key for word in TIMES)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def record_run(method: str, folder: Path) -> dict[str, Any]:
    """A short run of the method on the embedded set."""
    out = folder / method
    trains = with_role(find_method(method).settings(), *MAIN_ROLES)  # some methods only solve for a head
    size = ("--base", "10", "--increment", "10", *(("--epochs", "2") if trains else ()), "--out", str(out))
    here = ("--threads", THREADS, "--no-cache", "--device", "cpu", "--quiet")
    engram("run", f"{method}-mini-b10-s5", *size, *here)
    return {"result": without_times(json.loads((out / "result.json").read_text())), "tensors": digests(out)}


def record_lessons(folder: Path) -> dict[str, Any]:
    """Two lessons with the default settings, few epochs."""
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(folder / "images", filter="data")
    classes = sorted(path for path in (folder / "images").rglob("*") if path.is_dir() and any(path.glob("*.*")))
    model, start = folder / "model", 0
    for number, count in enumerate(LESSONS):
        lesson = folder / f"lesson{number}"
        lesson.mkdir()
        for path in classes[start : start + count]:
            (lesson / path.name).symlink_to(path)
        start += count
        settings = ("--epochs", "3") if number == 0 else ()
        engram("learn", str(model), str(lesson), *settings, "--threads", THREADS, "--device", "cpu", "--quiet")
    lines = engram("predict", str(model), str(classes[0]), "--json", "--device", "cpu").replace(str(folder), "")
    return {"predictions": [json.loads(line) for line in lines.splitlines()], "tensors": digests(model)}


def record(names: list[str]) -> dict[str, Any]:
    """Return the numbers of these methods (none given: of all of the package), and of two lessons."""
    methods = names or sorted(entry["method"] for entry in json.loads(engram("list", "methods", "--json")))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not names:
            found["learn"] = record_lessons(Path(folder))
        for method in methods:
            found[method] = record_run(method, Path(folder))
            print(f"{method}: {found[method]['result']['average_incremental_accuracy']}", flush=True)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The dotted paths at which two records differ, among what the first has."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [] if before == after else [""]
    return [
        f"{key}.{rest}".rstrip(".")
        for key in before
        for rest in (["missing"] if key not in after else differences(before[key], after[key]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="*", default=[], help="only these methods, and no lessons")
    parser.add_argument("--compare", type=Path, help="an earlier record")
    arguments = parser.parse_args()
    found = record(arguments.methods)
    arguments.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if arguments.compare is not None:
        before = json.loads(arguments.compare.read_text())
        if arguments.methods:
            before = {name: before[name] for name in arguments.methods}
        differ = differences(before, found)
        tensors = sum(len(entry["tensors"]) for entry in before.values())
        print("\n".join(differ) or f"identical: {len(before)} records, {tensors} tensors")
        sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
