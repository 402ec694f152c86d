"""`engram export`: export the network as an ONNX file, compared with the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engram.cli.options.models import Export
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.models.model import Model
from engram.models.onnx_export import export_onnx, require_onnx
from engram.models.store.codec import open_model


def export_command(options: Export, typed: Sequence[str]) -> int:
    """Carry out `engram export`; return the exit status."""
    del typed
    out = typed_path(options.out)
    if out.suffix.lower() != ".onnx":
        raise EngramError(f"the file must end in .onnx, got {out}")
    if out.is_dir():
        raise EngramError(f"{out} is a folder; choose another name")
    if out.exists() and not options.overwrite:
        raise EngramError(f"{out} exists; choose another name, or replace it with --overwrite")
    require_onnx()
    model = _opened(typed_path(options.model))
    exported = export_onnx(model, out, options.by)
    console = make_console()
    if options.json:
        print_line(console, json.dumps(asdict(exported)))
        return 0
    height, width = model.config.image_size
    print_line(
        console,
        f"{out}: images uint8 (N, {height}, {width}, 3) to probabilities (N, {len(model.classes)}) by {exported.by}, "
        f"{exported.bytes / 1e6:.1f} MB",
    )
    print_line(
        console,
        f"checked in onnxruntime {exported.onnxruntime} on {exported.images} images: "
        f"probabilities differ by {exported.difference:.1e} at most",
    )
    return 0


def _opened(place: Path) -> Model:
    """Open the model with its pictures, to compare the export on them; without them if they cannot be read."""
    try:
        return open_model(place, "cpu", "float32")[0]
    except EngramError as error:
        model, _ = open_model(place, "cpu", "float32", images=False)
        print(f"engram: compared on noise only: {error}", file=sys.stderr)
        return model
