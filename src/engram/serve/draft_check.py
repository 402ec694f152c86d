"""Look for mistakes in a draft before it is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engram.serve.children import ChildOptions, start_process
from engram.serve.draft import Draft
from engram.serve.limits import Refused


def check_draft(path: Path, draft: Draft, options: ChildOptions) -> None:
    """Look for mistakes in the images of a draft, in another process; the findings are then in the draft."""
    images = draft.images()
    if not images:
        raise Refused(409, "the draft is empty: add images first")
    request = {
        "job": "check",
        "model": str(path.absolute()),
        "paths": [str(draft.path(image.id).absolute()) for image in images],
        "labels": [image.label for image in images],
        "names": [image.name for image in images],
        "ids": [image.id for image in images],
        "device": options.device,
        "threads": options.threads,
    }
    process = start_process(request)
    assert process.stdin is not None
    assert process.stdout is not None
    found: dict[str, Any] | None = None
    error = "the process of the check ended unexpectedly"
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "checked":
            found = event["findings"]
        elif event["event"] == "failed":
            error = event["error"]
    process.wait()
    process.stdin.close()
    process.stdout.close()
    if found is None:
        raise Refused(500, error)
    draft.find(found)
