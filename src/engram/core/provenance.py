"""Provenance: versions, commit and hardware of a run, and digests of the code that trained it."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

# Keys in the versions of a run: KIND_file and KIND_code, of each thing that is defined by the user.
CODE = "_code"
METHOD_FILE, METHOD_CODE = "method_file", f"method{CODE}"
# Code in this package that the weights of a base stage depend on.
_TRAINING = (
    "core/rng.py",
    "core/processes.py",
    "data",
    "nn",
    "contract",
    "methods",
    "engine",
    "kernels",
    "experiment/networks.py",
    "experiment/session.py",
    "experiment/stage_work.py",
)


def version() -> str:
    """Return the version of engram, or that it is unknown, as in a source tree that was never installed."""
    try:
        return metadata.version("engram")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on, and the commit if engram runs from a checkout."""
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "pillow", "safetensors")}
    found = {"engram": version(), "python": platform.python_version(), **packages}
    commit = _commit()
    return found if commit is None else found | {"commit": commit}


def _commit() -> str | None:
    """Return the commit of the checkout with this file, marked "-dirty" if files were changed; None outside a checkout.

    The environment variable ENGRAM_COMMIT overrides it, for copies without git history.
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
    """Return the model name of the processor, or its architecture if the system does not report the name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware(device: str, device_name: str, threads: int) -> dict[str, Any]:
    """Return a description of the machine. threads: of torch on the CPU, which change the last bits of sums."""
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
    """Return a digest of the code that trains a base stage, so that a cached base of edited code is not used.

    It covers this package and, for a user's method, the files of its class and base classes. None if such a file
    cannot be read, for example for a class defined in an interactive session.
    """
    digest = hashlib.blake2b(_package_code().encode(), digest_size=16)
    files = _user_code_files(type(method))
    if files is None:
        return None
    for _, content in files:
        digest.update(content)
    return digest.hexdigest()


def _user_code_files(cls: type) -> list[tuple[str, bytes]] | None:
    """Return name and content of the files outside this package that define a class and its base classes.

    None if one of them cannot be read.
    """
    ours = {base for each in cls.__mro__ if each.__module__.startswith("engram.") for base in each.__mro__}
    files: list[tuple[str, bytes]] = []
    for each in cls.__mro__:
        if each not in ours:
            try:
                inspect.getsource(each)  # fails if the class is not in its module's file
                path = Path(inspect.getfile(each))
                files.append((path.name, path.read_bytes()))
            except (OSError, TypeError):
                return None
    return files


def user_code_versions(cls: type) -> dict[str, str]:
    """Return the name of the file that defines a user's class, and a digest of its code, for run.json.

    Empty for a class of this package, and if the file cannot be read.
    """
    files = _user_code_files(cls)
    if not files:
        return {}
    digest = hashlib.blake2b(b"".join(content for _, content in files), digest_size=6)
    return {METHOD_FILE: files[0][0], METHOD_CODE: digest.hexdigest()}


def own_code(versions: Mapping[str, str]) -> str:
    """Return the digests of all code of the user in the versions of a run, joined; empty if there is none."""
    return " ".join(versions[key] for key in sorted(versions) if key.endswith(CODE) and versions[key])
