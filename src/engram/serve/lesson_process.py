"""The process of a lesson or of a check: reads a request on stdin, writes lines of JSON on stdout.

The server keeps stdin open. A line "stop", and the end of stdin when the server dies, ask it to save and stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TextIO

from engram.core.errors import EngramError, explain, spell_options
from engram.core.events import Learned
from engram.core.io import write_json
from engram.core.memory_limits import keep_freed_memory
from engram.data.decode.prefetch import decode_files
from engram.data.store import Images
from engram.models.image_check import ImageFinding, check_images
from engram.models.inputs import ImageFiles
from engram.models.labels import labels_by_name
from engram.models.learning import learn_into
from engram.models.store.codec import open_model, read_manifest_if_exists

NICENESS = 5  # predictions come first
FLAGS = {"known": "more_of_known"}


def main() -> None:
    """Carry out the request on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    request = json.loads(sys.stdin.readline())
    os.nice(NICENESS)
    keep_freed_memory()
    stop = threading.Event()
    threading.Thread(target=_wait_for_stop, args=(stop,), daemon=True).start()
    with spell_options(
        lambda name, value: FLAGS.get(name, name) if value is None else f"{FLAGS.get(name, name)}={value}"
    ):
        try:
            if request["threads"]:
                import torch

                torch.set_num_threads(request["threads"])
            (_learn if request["job"] == "learn" else _check)(request, stop, out)
        except Exception as error:
            message, unexpected = explain(error)
            _write(out, {"event": "failed", "error": message, "unexpected": unexpected})
            if unexpected:
                raise


def _wait_for_stop(stop: threading.Event) -> None:
    sys.stdin.readline()
    stop.set()


def _write(out: TextIO, data: dict[str, Any]) -> None:
    try:
        out.write(json.dumps(data) + "\n")
        out.flush()
    except BrokenPipeError:  # the server died; what matters is on disk
        pass


def _learn(request: dict[str, Any], stop: threading.Event, out: TextIO) -> None:
    path = Path(request["model"])
    manifest = read_manifest_if_exists(path)
    known: list[Hashable] = [] if manifest is None else [entry["label"] for entry in manifest["classes"]]
    by_name = labels_by_name(known)

    def read(files: Sequence[str], side: int) -> tuple[Images, list[int]]:
        images, kept, skipped = decode_files(files, side, skip_bad=True)
        if skipped:
            _write(out, {"event": "warned", "message": f"left out {len(skipped)} images that cannot be read"})
        return images, kept

    events = learn_into(
        path,
        ImageFiles(request["paths"], read),
        [by_name.get(name, name) for name in request["labels"]],
        config=request["new_model"] if manifest is None else None,
        known="refresh" if request["more_of_known"] else "ignore",
        epochs="auto" if request["epochs"] is None and request["minutes"] is None else request["epochs"],
        minutes=request["minutes"],
        restart=request["restart"],
        stop=stop.is_set,
        checkpoint_minutes=request["checkpoint_minutes"],
        device=request["device"],
    )
    for event in events:
        data = event.to_json()
        if isinstance(event, Learned):
            data["path"] = None
            write_json(Path(request["result"]), data)
        _write(out, data)


def _check(request: dict[str, Any], stop: threading.Event, out: TextIO) -> None:
    del stop
    path = Path(request["model"])
    manifest = read_manifest_if_exists(path)
    model = None
    if manifest is not None and manifest["classes"]:
        try:
            model, _ = open_model(path, request["device"], images=False)
        except EngramError as error:
            _write(out, {"event": "warned", "message": str(error)})
    checked = check_images(request["paths"], request["labels"], model)
    names = dict(zip(request["paths"], request["names"], strict=True))
    ids = dict(zip(request["paths"], request["ids"], strict=True))
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in checked.findings:
        for path_of in finding.paths:
            entry = {
                "kind": finding.kind,
                "text": _sentence(finding, path_of, names),
                "suggested": finding.suggested,
                "like": [ids[other] for other in finding.paths if other != path_of],
            }
            found.setdefault(ids[path_of], []).append(entry)
    _write(out, {"event": "checked", "findings": found, "labels_checked": checked.labels_checked})


def _sentence(finding: ImageFinding, path: str, names: dict[str, str]) -> str:
    """Return one sentence about an image."""
    others = [
        f"{names[other]} ({label})" for other, label in zip(finding.paths, finding.labels, strict=True) if other != path
    ]
    listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    across = ", in another class" if finding.across else ""
    return {
        "exact": f"the same picture as {listed}{across}",
        "near": f"nearly the same picture as {listed}{across}",
        "unreadable": f"cannot be read: {finding.detail}",
        "tiny": f"very small: {finding.detail}",
        "blurry": f"blurry: {finding.detail}",
        "label": f"perhaps {finding.suggested!r}: {finding.detail} are",
    }[finding.kind]
