"""Build wheel and sdist, and try both in an empty environment, outside the checkout.

    python tools/try_wheel.py --python python3.13            # the wheel: demo, README, two rows of a table
    python tools/try_wheel.py --python python3.11 --sdist    # also: unpack the sdist and run a part of its tests
    python tools/try_wheel.py --dist dist/                   # those that are built already

The environment is made in a temporary folder and removed at the end, unless --environment names a folder for it.
It takes some minutes, most of them for the demo and the table, and downloads torch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests that read files of the repository: pages, results, workflows, fixtures, tools.
TESTS = (
    "test_api_page.py",
    "test_architecture.py",
    "test_contributing.py",
    "test_docs_code.py",
    "test_fill_cards.py",
    "test_model_fixture.py",
    "test_notebook.py",
    "test_old_files.py",
    "test_packaging.py",
    "test_site.py",
    "test_walkthrough.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try")
    parser.add_argument("--environment", type=Path, help="a folder for the environment, which is kept and used again")
    parser.add_argument("--sdist", action="store_true", help="also unpack the sdist and run a part of its tests")
    parser.add_argument("--dist", type=Path, help="a folder with wheel and sdist; without it, they are built")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="engram-wheel-") as scratch:
        place = Path(scratch)
        bin = make_environment(given.python, given.environment or place / "environment")
        dist = given.dist.resolve() if given.dist else build(bin, place / "dist")
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        version = run(bin / "python", "-c", "import platform; print(platform.python_version())", cwd=place).strip()
        print(f"Python {version}: {wheel.name}, {sdist.name}", flush=True)
        try_wheel(bin, wheel, place / "empty")
        if given.sdist:
            try_sdist(bin, sdist, place / "unpacked")
    return 0


def make_environment(python: str, folder: Path) -> Path:
    """Make an empty environment, unless it is there, and return its folder of programs."""
    bin = folder / "bin"
    if not bin.exists():
        run(python, "-m", "venv", folder, cwd=ROOT)
    return bin


def build(bin: Path, folder: Path) -> Path:
    """Build wheel and sdist of the checkout."""
    pip(bin, "install", "hatchling")
    run(bin / "python", "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    return folder


def try_wheel(bin: Path, wheel: Path, folder: Path) -> None:
    """Install the wheel and use it in an empty folder."""
    folder.mkdir()
    pip(bin, "install", "--constraint", torch_pin(folder), wheel)
    pip(bin, "install", "--force-reinstall", "--no-deps", wheel)  # the version is that of an earlier try
    where = run(bin / "python", "-c", "import engram; print(engram.__file__)", cwd=folder)
    assert str(bin.parent) in where, f"not the wheel's package: {where}"
    for command in ("--version", "doctor", "demo", "reproduce mini --rows AFC,replay"):
        timed(f"engram {command}", bin / "engram", *command.split(), folder=folder)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    for number, code in enumerate(blocks, 1):
        timed(f"Python block {number} of the README", bin / "python", "-c", code, folder=folder)


def try_sdist(bin: Path, sdist: Path, folder: Path) -> None:
    """Install what the tests need, unpack the sdist, and run those tests that read files of the repository."""
    folder.mkdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    pip(bin, "install", "--constraint", root / "constraints.txt", f"{root}[dev]")
    tests = [f"tests/{name}" for name in TESTS]
    timed("tests of the sdist", bin / "python", "-m", "pytest", "-p", "no:cacheprovider", *tests, folder=root)


def torch_pin(folder: Path) -> Path:
    """A constraints file with torch's version only: everything else is the newest, as for a user."""
    (pin,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    file = folder.parent / "torch.txt"
    file.write_text(pin + "\n")
    return file


def pip(bin: Path, *arguments: str | Path) -> None:
    run(bin / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, cwd=ROOT)


def timed(title: str, *command: str | Path, folder: Path) -> None:
    """Run a command, and print its last lines and how long it took."""
    began = time.monotonic()
    lines = run(*command, cwd=folder).splitlines()
    print(f"\n== {title}: {time.monotonic() - began:.0f} s", *lines[-12:], sep="\n", flush=True)


def run(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command; it must succeed, and sees no package but those of its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ENGRAM"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
