"""`engram prepare`: download public data sets and check them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from engram.cli.options.runs import Prepare
from engram.cli.text import is_live, make_console, print_line
from engram.core.errors import EngramError, UnknownNameError
from engram.core.io import typed_path
from engram.data.sources.cifar import read_cifar100
from engram.data.sources.download import data_home, fetch_cifar100
from engram.data.sources.imagenet import IMAGENET

PREPARED = ("cifar100",)
PLAIN_SECONDS = 5.0


def prepare_command(options: Prepare, typed: Sequence[str]) -> int:
    """Run `engram prepare`."""
    del typed
    if options.dataset in ("mini", "folder"):
        raise EngramError(f"{options.dataset} needs no preparation; only 'cifar100' can be downloaded")
    if options.dataset in IMAGENET:
        raise EngramError(
            f"{options.dataset} cannot be downloaded: get ImageNet from https://image-net.org and give 'engram run' "
            "the folder with its train/ and val/ with --data"
        )
    if options.dataset not in PREPARED:
        raise UnknownNameError("data set", options.dataset, PREPARED)
    folder = data_home() if options.out is None else typed_path(options.out)
    console = make_console()
    try:
        path = _fetch_live(folder, console) if is_live(console) else _fetch_plain(folder, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; what was downloaded is kept, and the same command continues") from None
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


def _fetch_live(folder: Path, console: Console) -> Path:
    columns = (TextColumn("cifar100"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        return fetch_cifar100(folder, report=lambda done, total: progress.update(task, completed=done, total=total))


def _fetch_plain(folder: Path, console: Console) -> Path:
    printed = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal printed
        if time.monotonic() - printed >= PLAIN_SECONDS:
            printed = time.monotonic()
            share = f" ({done / total:.0%})" if total else ""
            print_line(console, f"cifar100: {done / 1e6:.0f} MB{share}")

    return fetch_cifar100(folder, report=report)
