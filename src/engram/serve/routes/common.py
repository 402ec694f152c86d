"""Shared by the routes: the service, the model that a request names, answers, and uploads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from engram.serve import answers
from engram.serve.counters import Metrics
from engram.serve.decoder_pool import DecoderPool
from engram.serve.limits import Limits, Refused
from engram.serve.predicting import Batcher
from engram.serve.served_model import ServedModel
from engram.serve.uploads import Budget, Received, Spool, read_multipart

PNG = "image/png"
PICTURE_HEADERS = {"Cache-Control": "private, max-age=3600, immutable"}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": answers.Problem, "description": "The request is refused; the error says why."},
    503: {"model": answers.Problem, "description": "Too much to do now; try again after Retry-After seconds."},
}
PICTURE: dict[int | str, dict[str, Any]] = {200: {"content": {PNG: {}}, "description": "A picture."}}
IMAGES_SCHEMA = {"type": "array", "items": {"type": "string", "format": "binary"}}


@dataclass
class Service:
    """The objects that the routes work with."""

    models: dict[str, ServedModel]
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    decoders: DecoderPool
    spool: Spool
    memory: Budget
    exporting: threading.Lock = field(default_factory=threading.Lock)
    predicting: int = 0  # requests


def service_of(request: Request) -> Service:
    """Return what the routes work with."""
    return request.app.state.service


async def _model(name: str, request: Request) -> ServedModel:  # async: others are called in a thread each
    return _named(name, request)


def _named(name: str, request: Request) -> ServedModel:
    found = service_of(request).models.get(name)
    if found is None:
        raise Refused(404, f"no model {name[:80]!r} is served here")
    return found


def _taught(name: str, request: Request) -> ServedModel:
    found = _named(name, request)
    found.teach()
    return found


At = Annotated[ServedModel, Depends(_model)]
Taught = Annotated[ServedModel, Depends(_taught)]  # its draft and lessons are this server's


async def receive_images(request: Request, spool: Spool, limits: Limits, files: list[Received]) -> dict[str, str]:
    """Receive a multipart upload; add its files, which the caller releases, and return its other fields."""
    upload = await read_multipart(request.stream(), request.headers.get("content-type", ""), spool, limits)
    files += upload.files
    return upload.fields


def refuse_no_image(files: Sequence[Received]) -> None:
    """Refuse a request without images."""
    if not files:
        raise Refused(400, "the request has no image; send at least one in the field 'images'")
