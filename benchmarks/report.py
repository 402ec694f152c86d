"""What a benchmark says: tables in Markdown, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from typing import Any

import torch

from benchmarks.scale import Scale
from engram.core.errors import EngramError
from engram.core.provenance import hardware, processor_name, versions


@dataclass(frozen=True)
class Table:
    """A table with a title, and a sentence under it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [
            f"### {self.title}",
            "",
            _line(self.header),
            _line(["---"] * len(self.header)),
            *map(_line, self.rows),
        ]
        return "\n".join(lines + (["", self.note] if self.note else [])) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def with_spread(values: dict[str, Any], digits: int) -> str:
    """Median (least to most)."""
    return f"{values['median']:,.{digits}f} ({values['min']:,.{digits}f} to {values['max']:,.{digits}f})"


def percent(share: float | None) -> str:
    """A share as a percentage with one digit."""
    return "-" if share is None else f"{100 * share:.1f} %"


def mebibytes(size: int | None) -> str:
    """Bytes in MiB, or a dash."""
    return "-" if size is None else f"{size / 2**20:,.0f}"


def provenance(scale: Scale, device: torch.device, commit: str | None) -> dict[str, Any]:
    """Where the numbers come from: date, versions, commit, hardware."""
    try:
        found: dict[str, Any] = dict(versions())
    except PackageNotFoundError as error:
        raise EngramError(
            f"{error.name} is not installed here, and a measurement names its version; "
            "run 'pip install --no-deps --editable .' in the checkout, or put the package's .dist-info on the path"
        ) from error
    if commit is not None:
        found["commit"] = commit
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    found |= {"cuda": torch.version.cuda, "cudnn": cudnn}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    machine = hardware(device.type, name, torch.get_num_threads())
    machine["processor"] = processor_name()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["memory"] = properties.total_memory
        machine["multiprocessors"] = properties.multi_processor_count
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": found,
        "hardware": machine,
        "repetitions": scale.repetitions,
    }


def heading(record: dict[str, Any]) -> str:
    """The lines above the tables: hardware, versions, commit, date, n."""
    known, machine = record["versions"], record["hardware"]
    cuda = f", CUDA {known['cuda']}, cuDNN {known['cudnn']}" if machine["device"] == "cuda" else ""
    warning = "\n\nQuick mode: a tiny problem that tries the code. These numbers say nothing about speed."
    return (
        f"## Benchmark of engram {known['engram']}\n\n"
        f"{machine['name']} ({machine['device']}; {machine['processor']}, {machine['cores']} cores); "
        f"torch {known['torch']}{cuda}, Python {known['python']}; "
        f"commit {known.get('commit', 'unknown')}; {record['date']}; n = {record['repetitions']} repetitions."
        f"{warning if record['quick'] else ''}\n"
    )
