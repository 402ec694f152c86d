"""Provenance: versions, commit and hardware of a run, and digests of the code that trained it."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

METHOD_FILE, METHOD_CODE = "method_file", "method_code"  # of a method from outside the package, among the versions
# The code that a base stage's weights depend on, below the package's folder.
_TRAINING = (
    "core/rng.py",
    "data",
    "nn",
    "contract",
    "methods",
    "engine",
    "kernels",
    "experiment/session.py",
    "experiment/stage_work.py",
)


def version() -> str:
    """engram's version."""
    return metadata.version("engram")


def versions() -> dict[str, str]:
    """The versions of what a result depends on; the commit too, where engram runs from a checkout."""
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "pillow", "safetensors")}
    found = {"engram": version(), "python": platform.python_version(), **packages}
    commit = _commit()
    return found if commit is None else found | {"commit": commit}


def _commit() -> str | None:
    """The commit of the checkout that this file is in, marked where files differ from it; None outside a checkout.

    A copy without its history can be told by the variable ENGRAM_COMMIT.
    """
    if os.environ.get("ENGRAM_COMMIT"):
        return os.environ["ENGRAM_COMMIT"]
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def processor_name() -> str:
    """The processor as it calls itself, where the system says."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware(device: str, device_name: str, threads: int) -> dict[str, Any]:
    """What the run ran on; threads are those of torch on the CPU, which sums depend on in their last bits."""
    cores = os.cpu_count()
    return {"device": device, "name": device_name, "cores": cores, "threads": threads, "system": platform.platform()}


@cache
def _package_code() -> str:
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for name in _TRAINING:
        paths = sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]
        for path in paths:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_digest(method: object) -> str | None:
    """A digest of the code that trains a base stage: edited code finds no old entry.

    It covers this package and, for a method from elsewhere, the whole files that its class and its bases are in; None
    where there is no such file to read, as for a class that was typed in by hand.
    """
    digest = hashlib.blake2b(_package_code().encode(), digest_size=16)
    files = files_outside(type(method))
    if files is None:
        return None
    for _, content in files:
        digest.update(content)
    return digest.hexdigest()


def files_outside(cls: type) -> list[tuple[str, bytes]] | None:
    """The files from outside this package that a class and its bases are in, by name, with what is in them.

    None where there is no such file to read.
    """
    ours = {base for each in cls.__mro__ if each.__module__.startswith("engram.") for base in each.__mro__}
    files: list[tuple[str, bytes]] = []
    for each in cls.__mro__:
        if each not in ours:
            try:
                inspect.getsource(each)  # fails for a class that is not in its module's file
                path = Path(inspect.getfile(each))
                files.append((path.name, path.read_bytes()))
            except (OSError, TypeError):
                return None
    return files


def versions_outside(cls: type) -> dict[str, str]:
    """For run.json the name of the file that a class from outside this package is in, and a digest of its code.

    Empty for a class of this package, and where there is no such file to read.
    """
    files = files_outside(cls)
    if not files:
        return {}
    digest = hashlib.blake2b(b"".join(content for _, content in files), digest_size=6)
    return {METHOD_FILE: files[0][0], METHOD_CODE: digest.hexdigest()}
