"""The images that wait to be taught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from engram.models.store.pictures import to_png
from engram.serve import answers
from engram.serve.draft import class_name
from engram.serve.draft_check import check_draft
from engram.serve.limits import Refused, busy
from engram.serve.routes.common import (
    IMAGES_SCHEMA,
    PICTURE,
    PICTURE_HEADERS,
    PNG,
    PROBLEMS,
    Taught,
    receive_images,
    refuse_no_image,
    service_of,
)
from engram.serve.served_model import ServedModel
from engram.serve.uploads import Received

THUMBNAIL = 192
ROUTES = APIRouter(responses=PROBLEMS)


@ROUTES.get("/models/{name}/draft", tags=["teach"])
def draft(at: Taught) -> answers.DraftInfo:
    """Return the images that wait to be taught."""
    return answers.DraftInfo(**_draft(at))


def _draft(at: ServedModel, rejected: Sequence[Any] | None = None) -> dict[str, Any]:
    images = at.draft.images()
    known = set() if at.current is None else set(at.current.generation.names)
    counts = Counter(image.label for image in images)
    return {
        "images": [
            answers.DraftEntry(
                id=image.id,
                name=image.name,
                **{"class": image.label},
                findings=[answers.DraftFinding(**found) for found in image.findings],
            )
            for image in images
        ],
        "classes": [answers.DraftClass(name=name, known=name in known, images=count) for name, count in counts.items()],
        "rejected": [
            answers.RejectedFile(name=each.name, error=each.error)
            for each in (at.draft.rejected() if rejected is None else rejected)
        ],
    }


_DRAFT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["class", "images"],
                    "properties": {"class": {"type": "string"}, "images": IMAGES_SCHEMA},
                }
            }
        },
    }
}


@ROUTES.post("/models/{name}/draft/images", tags=["teach"], openapi_extra=_DRAFT_BODY)
async def add_images(at: Taught, request: Request) -> answers.DraftAdded:
    """Add images of one class to the draft. Each is decoded; those that cannot be read are rejected."""
    service, own = service_of(request), at.draft
    files: list[Received] = []
    try:
        await run_in_threadpool(own.prepare)
        own.check_room(1, 0)
        fields = await receive_images(request, own.spool, service.limits, files)
        label = class_name(fields.get("class", ""))
        refuse_no_image(files)
        decoded = await service.decoders.decode([file.source for file in files], THUMBNAIL)
        for file, image in zip(files, decoded, strict=True):
            file.error = f"it cannot be read ({image})" if isinstance(image, str) else None
        before = {id(each) for each in own.rejected()}
        added = await run_in_threadpool(own.add, files, label)
        rejected = [each for each in own.rejected() if id(each) not in before]
        state = await run_in_threadpool(_draft, at, rejected)
    finally:
        own.spool.release(files)
    return answers.DraftAdded(added=[image.id for image in added], **state)


@ROUTES.get("/models/{name}/draft/images/{image}", tags=["teach"], response_class=Response, responses=PICTURE)
async def draft_image(at: Taught, request: Request, image: str) -> Response:
    """Return a thumbnail of an image of the draft."""
    (found,) = await service_of(request).decoders.decode([str(at.draft.path(image))], THUMBNAIL)
    if isinstance(found, str):
        raise Refused(409, f"the image cannot be read ({found})")
    content = await run_in_threadpool(to_png, found)
    return Response(content, media_type=PNG, headers=PICTURE_HEADERS)


@ROUTES.patch("/models/{name}/draft/images", tags=["teach"])
def move_images(at: Taught, body: answers.MoveBody) -> answers.DraftInfo:
    """Move images of the draft to another class."""
    at.draft.move(body.ids, class_name(body.class_))
    return answers.DraftInfo(**_draft(at))


@ROUTES.delete("/models/{name}/draft/images", tags=["teach"])
def discard_images(at: Taught, body: Annotated[answers.DiscardBody | None, Body()] = None) -> answers.DraftInfo:
    """Discard images of the draft; all of them without ids."""
    at.draft.discard(None if body is None else body.ids)
    return answers.DraftInfo(**_draft(at))


@ROUTES.post("/models/{name}/draft/check", tags=["teach"])
def check(at: Taught) -> answers.DraftInfo:
    """Look for duplicates, blurry and tiny images and labels that are probably wrong."""
    if not at.checking.acquire(blocking=False):
        raise busy("the draft is being checked already; try again")
    try:
        check_draft(at.path, at.draft, at.options)
    finally:
        at.checking.release()
    return answers.DraftInfo(**_draft(at))
