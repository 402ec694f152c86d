"""Predictions."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from engram.models.prediction import best_positions
from engram.serve import answers
from engram.serve.gallery import Gallery
from engram.serve.guard import describe
from engram.serve.limits import Refused, busy
from engram.serve.predicting import Answers, Generation
from engram.serve.routes.common import IMAGES_SCHEMA, PROBLEMS, At, Service, receive_images, refuse_no_image, service_of
from engram.serve.served_model import OpenGeneration
from engram.serve.uploads import Received, clean_name, read_body

TOP, MOST_TOP, MOST_NEIGHBOURS = 5, 1000, 50
ROUTES = APIRouter(responses=PROBLEMS)
_PREDICT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {"type": "object", "required": ["images"], "properties": {"images": IMAGES_SCHEMA}}
            },
            "application/json": {"schema": answers.predict_schema()},
        },
    }
}


@ROUTES.post(
    "/models/{name}/predict", tags=["predict"], response_model=answers.Predictions, openapi_extra=_PREDICT_BODY
)
async def predict(
    at: At,
    request: Request,
    top: Annotated[int | None, Query(ge=1, le=MOST_TOP)] = None,
    unknown: Annotated[float | None, Query(gt=0, lt=1)] = None,
    neighbours: Annotated[int | None, Query(ge=0, le=MOST_NEIGHBOURS)] = None,
) -> Response:
    """Predict images. Requests that arrive at the same time are computed together."""
    service = service_of(request)
    if service.predicting >= service.limits.requests:
        raise busy(f"{service.predicting} requests are being predicted already; try again")
    service.predicting += 1
    files: list[Received] = []
    try:
        found = at.need()
        if request.headers.get("content-type", "").lower().startswith("application/json"):
            body = await _json_images(request, service, files)
            top = top if body.top is None else body.top
            unknown = unknown if body.unknown is None else body.unknown
            neighbours = neighbours if body.neighbours is None else body.neighbours
        else:
            await receive_images(request, service.spool, service.limits, files)
        refuse_no_image(files)
        asked = _Asked(
            min(_within("top", TOP if top is None else top, 1, MOST_TOP), len(found.generation.names)),
            _rate(found.generation, unknown),
            _within("neighbours", neighbours or 0, 0, MOST_NEIGHBOURS),
        )
        with service.batcher.admit(len(files)):
            content = await _predictions(found, service, files, asked)
    finally:
        service.predicting -= 1
        service.spool.release(files)
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


@dataclass(frozen=True)
class _Asked:
    top: int
    rate: float | None
    neighbours: int


def _within(what: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise Refused(422, f"{what} must be {least} to {most}, got {value}")
    return value


def _rate(generation: Generation, given: float | None) -> float | None:
    if given is None:
        return generation.default_rate()
    generation.threshold(given)  # refuses a rate that the model cannot give
    return given


async def _json_images(request: Request, service: Service, files: list[Received]) -> answers.PredictBody:
    """Receive images as JSON; add them as files, which the caller releases."""
    content = await read_body(request.stream(), service.memory)
    try:
        return await run_in_threadpool(_parse_images, content, service, files)
    finally:
        service.memory.give_back(len(content))


def _parse_images(content: bytes, service: Service, files: list[Received]) -> answers.PredictBody:
    try:
        body = answers.PredictBody.model_validate_json(content)
    except ValidationError as error:
        raise Refused(422, describe(error)) from None
    if len(body.images) > service.limits.files:
        raise Refused(413, f"a request may have {service.limits.files} images; send the others in another one")
    for image in body.images:
        try:
            data = base64.b64decode(image.data, validate=True)
        except (binascii.Error, ValueError):
            raise Refused(422, f"the data of {clean_name(image.name)!r} is not base64") from None
        service.spool.reserve(len(data))
        received = Received(clean_name(image.name), service.spool.new_path(), len(data))
        files.append(received)
        received.path.write_bytes(data)
    return body


async def _predictions(
    found: OpenGeneration, service: Service, files: Sequence[Received], asked: _Asked
) -> dict[str, Any]:
    generation = found.generation
    decoded = await service.decoders.decode([file.source for file in files], generation.side)
    images = [image for image in decoded if not isinstance(image, str)]
    read = iter(())
    if images:
        gallery = None
        if asked.neighbours:
            gallery = await run_in_threadpool(found.gallery)
        done = await service.batcher.predict(
            generation,
            np.stack(images) if len(images) > 1 else images[0][None],
            asked.rate is not None,
            bool(asked.neighbours),
        )
        read = iter(_entries(generation, done, asked, gallery))
    entries: list[dict[str, Any]] = []
    for file, image in zip(files, decoded, strict=True):
        if isinstance(image, str):
            entries.append({"name": file.name, "error": image})
        else:
            entries.append({"name": file.name, **next(read)})
    return {"model": generation.name, "generation": generation.pointer.generation, "predictions": entries}


def _entries(generation: Generation, done: Answers, asked: _Asked, gallery: Gallery | None) -> list[dict[str, Any]]:
    names = generation.names
    best = best_positions(done.shares, asked.top)
    shares = done.shares[np.arange(len(best))[:, None], best].tolist()
    threshold = generation.threshold(asked.rate)
    unknown: list[bool | None] = [None] * len(best)
    if threshold is not None and done.familiarity is not None:
        unknown = (done.familiarity < threshold).tolist()
    near: list[list[dict[str, Any]]] = [[] for _ in best]
    if gallery is not None and done.embedding is not None:
        near = [
            [
                {
                    "example": gallery.examples.id(number),
                    "class": names[gallery.examples.positions[number]],
                    "similarity": round(similarity, 6),
                }
                for number, similarity in row
            ]
            for row in gallery.nearest(done.embedding, asked.neighbours)
        ]
    return [
        {
            "class": names[places[0]],
            "probability": values[0],
            "top": [{"class": names[place], "probability": value} for place, value in zip(places, values, strict=True)],
            "unknown": is_unknown,
            "neighbours": own,
        }
        for places, values, is_unknown, own in zip(best.tolist(), shares, unknown, near, strict=True)
    ]
