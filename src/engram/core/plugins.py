"""Import methods, optimisers and other parts from outside the package, which register themselves.

ENGRAM_METHODS names modules and files; an installed package announces modules as entry points of the group
engram.plugins.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import EntryPoint, entry_points

from engram.core.errors import EngramError, in_user_file
from engram.core.io import typed_path

VARIABLE, GROUP = "ENGRAM_METHODS", "engram.plugins"


def load_plugins() -> None:
    """Import the modules that installed packages announce to engram, and what ENGRAM_METHODS names.

    What was imported before is not imported again. Every command does this first; in Python, call it, or import the
    modules themselves.
    """
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        _import_announced(point)
    for name in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        try:
            _import_file(name) if name.endswith(".py") else _import_module(name)
        except EngramError as error:
            raise EngramError(f"{VARIABLE} names {name}: {error}{in_user_file(error)}") from error
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}{in_user_file(error)}"
            raise EngramError(
                f"{VARIABLE} names {name}, which cannot be imported ({reason}); ENGRAM_DEBUG=1 shows where"
            ) from error


def _import_announced(point: EntryPoint) -> None:
    package = "an installed package" if point.dist is None else f"the package {point.dist.name}"
    try:
        point.load()
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, EngramError) else f"{type(error).__name__}: {error}"
        raise EngramError(
            f"{package} announces {point.value} to engram ({GROUP}), which cannot be imported ({reason}); repair or "
            "uninstall that package, ENGRAM_DEBUG=1 shows where"
        ) from error


def _import_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package does not exist
        found = False
    if not found:
        raise EngramError(
            "there is no such module; set PYTHONPATH to the folder it is in, or give the path of a .py file"
        )
    importlib.import_module(name)


def _import_file(text: str) -> None:
    """Import a file as a module whose name is its path, unless it was imported before."""
    path = typed_path(text).resolve()
    name = str(path)
    if name in sys.modules:
        return
    if not path.is_file():
        raise EngramError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up while they are made
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
