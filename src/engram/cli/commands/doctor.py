"""`engram doctor`: check the installation, the hardware and the data."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.table import Table

from engram.cli.commands.run_paths import RUNS
from engram.cli.options.runs import Doctor
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError

Status = Literal["ok", "warning", "problem"]
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
LITTLE_MEMORY, LITTLE_DISK = 4e9, 2e9


@dataclass(frozen=True)
class Finding:
    """What was checked, its status, what was found, and what to do about it."""

    what: str
    status: Status
    found: str
    advice: str = ""


def doctor_command(options: Doctor, typed: Sequence[str]) -> int:
    """Run `engram doctor`."""
    del typed
    console = make_console()
    findings: list[Finding] = []
    for check in CHECKS:
        findings.append(finding := examine(check))
        if not options.json:
            console.print(_row(finding))
    if options.json:
        print_line(console, json.dumps([asdict(finding) for finding in findings]))
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def _row(finding: Finding) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=7, style=STYLES[finding.status])
    row.add_column(width=15)
    row.add_column(overflow="fold")
    row.add_row(finding.status, finding.what, "; ".join(filter(None, (finding.found, finding.advice))))
    return row


def examine(check: Callable[[], Finding]) -> Finding:
    """Run a check; an unexpected error in it is reported as a problem."""
    try:
        return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Finding(name, "problem", f"{type(error).__name__}: {error}", "install engram again")


def check_python() -> Finding:
    """The Python that runs this."""
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable}) on {platform.platform()}")


def check_engram() -> Finding:
    """The installed engram."""
    return Finding("engram", "ok", f"{metadata.version('engram')} ({Path(__file__).parents[2]})")


def check_torch() -> Finding:
    """torch, and the GPU if there is one."""
    torch = importlib.import_module("torch")
    found = f"{torch.__version__}"
    if not torch.cuda.is_available():
        return Finding("torch", "ok", f"{found}, no CUDA device: runs use the CPU")
    device = torch.cuda.get_device_properties(0)
    found += f", CUDA {torch.version.cuda}: {device.name}, {device.total_memory / 1e9:.0f} GB"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding("torch", "warning", f"{found}, without bf16", "use --precision float32")
    why = importlib.import_module("engram.kernels.availability").why_not(torch.device("cuda"))
    if why is not None:
        return Finding("torch", "ok", f"{found}, with bf16; without engram's kernels, and slower: {why}")
    return Finding("torch", "ok", f"{found}, with bf16")


def check_packages() -> Finding:
    """The other packages, by importing them."""
    packages = ("numpy", "safetensors", "pillow", "tyro", "rich", "matplotlib", "jinja2")
    for name in packages:
        try:
            importlib.import_module("PIL" if name == "pillow" else name)
        except ImportError as error:
            return Finding("packages", "problem", f"{name} does not import ({error})", "install engram again")
    return Finding("packages", "ok", ", ".join(f"{name} {metadata.version(name)}" for name in packages))


def check_webp() -> Finding:
    """Pillow's support for WebP, the format of the embedded images."""
    features = importlib.import_module("PIL.features")
    if not features.check("webp"):
        return Finding("images", "problem", "this Pillow cannot read WebP", "install a Pillow with WebP support")
    return Finding("images", "ok", "PNG, JPEG, BMP and WebP can be read")


def check_cores() -> Finding:
    """The CPU cores."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("cores", "ok", f"{usable} usable of {os.cpu_count()}")


def check_memory() -> Finding:
    """The main memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{total / 1e9:.1f} GB"
    if total < LITTLE_MEMORY:
        return Finding("memory", "warning", found, "large data sets may not fit")
    return Finding("memory", "ok", found)


def check_disk() -> Finding:
    """Disk space for runs, and permission to write there."""
    place = RUNS if RUNS.is_dir() else Path.cwd()
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free in {place}"
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("disk", "problem", f"no permission to write in {place}", "work elsewhere, or give --out DIR")
    if free < LITTLE_DISK:
        return Finding("disk", "warning", found, "free some space: a run takes tens of megabytes, CIFAR-100 takes 169")
    return Finding("disk", "ok", found)


def check_mini() -> Finding:
    """The embedded images, decoded and compared with their checksum."""
    from engram.data.sources.mini import read_mini

    try:
        store = read_mini()
    except EngramError as error:
        return Finding("embedded images", "problem", str(error))
    count = len(store.train) + len(store.test)
    return Finding("embedded images", "ok", f"{count:,} of {store.num_classes} classes, checksums match")


def check_cifar100() -> Finding:
    """CIFAR-100, if it was downloaded."""
    from engram.data.sources.download import data_home
    from engram.data.sources.load import DataConfig, load_store

    home = data_home()
    if not any((home / name).exists() for name in ("cifar-100-python.tar.gz", "cifar-100-python")):
        return Finding(
            "cifar100", "warning", f"not in {home}", "'engram prepare cifar100' downloads it, if you need it"
        )
    try:
        store = load_store(DataConfig("cifar100"))
    except EngramError as error:
        return Finding("cifar100", "problem", str(error))
    return Finding("cifar100", "ok", f"in {home}: {len(store.train):,} training and {len(store.test):,} test images")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_engram,
    check_torch,
    check_packages,
    check_webp,
    check_cores,
    check_memory,
    check_disk,
    check_mini,
    check_cifar100,
)
