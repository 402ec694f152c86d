"""Files to download: the network as ONNX, and a report."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse
from starlette.background import BackgroundTask

from engram.core.errors import EngramError
from engram.models.onnx_export import export_onnx, require_onnx
from engram.models.store.codec import open_model
from engram.serve.limits import Refused, busy
from engram.serve.routes.common import PROBLEMS, At, service_of
from engram.serve.served_model import OpenGeneration, ServedModel

ROUTES = APIRouter(responses=PROBLEMS)


@ROUTES.get("/models/{name}/export.onnx", tags=["models"], response_class=FileResponse)
def export(at: At, request: Request) -> FileResponse:
    """Return the network as an ONNX file, after a comparison with the model."""
    try:
        require_onnx()
    except EngramError as error:
        raise Refused(501, str(error)) from None
    at.need()
    service = service_of(request)
    out = service.spool.new_path()
    if not service.exporting.acquire(blocking=False):
        raise busy("a model is being exported already; try again")
    try:
        model, _ = open_model(at.path, "cpu", "float32")
        export_onnx(model, out)
    finally:
        service.exporting.release()
    return FileResponse(
        out, media_type="application/octet-stream", filename=f"{at.name}.onnx", background=BackgroundTask(out.unlink)
    )


@ROUTES.get("/models/{name}/report.html", tags=["models"], response_class=HTMLResponse)
def report(at: At, request: Request) -> FileResponse:
    """Return a page with the accuracy on held-out images, by class, and the confusion matrix."""
    from engram.report.evaluation_page import write_evaluation  # matplotlib takes a second to import

    found = at.need()
    counts, _ = found.gallery().confusion(len(found.generation.names))
    if not counts.sum():
        raise Refused(409, "the model has no held-out images to report on")
    out = service_of(request).spool.new_path()
    write_evaluation(_evaluation(at, found, counts), out)
    return FileResponse(out, media_type="text/html", filename=f"{at.name}.html", background=BackgroundTask(out.unlink))


def _evaluation(at: ServedModel, found: OpenGeneration, counts: np.ndarray) -> dict[str, Any]:
    """Return what `engram evaluate --json` prints, for the held-out images."""
    right, images = np.diag(counts), counts.sum(axis=1)
    shares = [100 * int(r) / int(n) if n else None for r, n in zip(right, images, strict=True)]
    return {
        "model": at.name,
        "folder": "its held-out images",
        "method": found.generation.model.config.method,
        "by": found.predictor,
        "images": int(counts.sum()),
        "learned_from": 0,
        "accuracy": float(np.mean([share for share in shares if share is not None])),
        "accuracy_of_images": 100 * int(right.sum()) / int(counts.sum()),
        "classes": [
            {"class": name, "images": int(n), "right": int(r), "accuracy": share}
            for name, n, r, share in zip(found.generation.names, images, right, shares, strict=True)
        ],
        "confusion": counts.tolist(),
        "left_out": [],
        "unreadable": [],
    }
