"""The routes of the server. What a route does is in the modules beside this one."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Body, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from engram.core.errors import EngramError
from engram.core.provenance import version
from engram.data.decode.image import Images
from engram.models.accuracies import balanced_accuracy
from engram.models.edit import remove_class, rename_class, undo
from engram.models.onnx_export import export_onnx, require_onnx
from engram.models.prediction import best_positions
from engram.models.store.codec import open_model
from engram.models.store.pictures import to_png
from engram.serve import answers
from engram.serve.counters import CONTENT_TYPE, Metrics, resident_bytes
from engram.serve.draft import class_name
from engram.serve.gallery import Gallery
from engram.serve.guard import PREFIX, describe
from engram.serve.lessons import check_draft
from engram.serve.limits import Limits, Refused, busy
from engram.serve.predicting import Answers, Batcher, DecoderPool, Generation
from engram.serve.served_model import OpenGeneration, ServedModel, Watcher
from engram.serve.uploads import Budget, Received, Spool, clean_name, read_body, read_multipart, temporary_folder

PAGE = Path(__file__).with_name("page")
THUMBNAIL = 192
TOP, MOST_TOP, MOST_NEIGHBOURS = 5, 1000, 50
KEEP_ALIVE_SECONDS = 10.0
PNG = "image/png"
_STATES = ("none", "running", "stopped", "failed", "finished")
_LOG = logging.getLogger("engram.serve")
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": answers.Problem, "description": "The request is refused; the error says why."},
    503: {"model": answers.Problem, "description": "Too much to do now; try again after Retry-After seconds."},
}
_PICTURE: dict[int | str, dict[str, Any]] = {200: {"content": {PNG: {}}, "description": "A picture."}}
_IMAGES_SCHEMA = {"type": "array", "items": {"type": "string", "format": "binary"}}


@dataclass
class Service:
    """What the routes work with."""

    models: dict[str, ServedModel]
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    decoders: DecoderPool
    spool: Spool
    memory: Budget
    exporting: threading.Lock = field(default_factory=threading.Lock)
    predicting: int = 0  # requests


def make_app(models: Sequence[ServedModel], limits: Limits, metrics: Metrics) -> FastAPI:
    """Return the application; it opens the models when it starts and lets lessons save when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with temporary_folder() as folder:
            batcher, decoders = Batcher(limits, metrics), DecoderPool(limits)
            watcher = Watcher(models)
            app.state.service = Service(
                {model.name: model for model in models},
                limits,
                metrics,
                batcher,
                decoders,
                Spool(folder, limits),
                Budget(limits.memory_bytes),
            )
            try:
                yield
            finally:
                await run_in_threadpool(watcher.close)
                for model in models:
                    await run_in_threadpool(model.close)
                await run_in_threadpool(batcher.close)
                await run_in_threadpool(decoders.close)

    app = FastAPI(
        title="engram",
        version=version(),
        summary="Predict with models that keep learning new classes, and teach them.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.include_router(_ROUTES, prefix=PREFIX)
    app.add_api_route("/metrics", _metrics, methods=["GET"], response_class=PlainTextResponse, tags=["server"])
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(EngramError, _mistake)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
    app.mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False), name="page")
    return app


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = (
        error.detail
        if isinstance(error, Refused)
        else {404: "there is nothing at this address"}.get(error.status_code, str(error.detail))
    )
    return JSONResponse({"error": text}, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": describe(error)}, 422)


async def _mistake(request: Request, error: Exception) -> Response:
    text = str(error)
    for model in request.app.state.service.models.values():
        text = text.replace(str(model.path), model.name)
    return JSONResponse({"error": text}, 409 if request.method != "GET" else 400)


async def _gone(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the client has gone"}, 499)


async def _unexpected(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "unexpected error; the server's log has the details"}, 500)


def _service(request: Request) -> Service:
    return request.app.state.service


def _model(name: str, request: Request) -> ServedModel:
    found = _service(request).models.get(name)
    if found is None:
        raise Refused(404, f"no model {name[:80]!r} is served here")
    return found


def _taught(name: str, request: Request) -> ServedModel:
    found = _model(name, request)
    found.teach()
    return found


At = Annotated[ServedModel, Depends(_model)]
Taught = Annotated[ServedModel, Depends(_taught)]  # its draft and lessons are this server's
_ROUTES = APIRouter(responses=_PROBLEMS)


@_ROUTES.get("/health", tags=["server"])
async def health() -> answers.Health:
    """Say that the server answers."""
    return answers.Health(status="ok", version=version())


@_ROUTES.get("/models", tags=["models"])
def models(request: Request) -> list[answers.ModelInfo]:
    """List the models that are served."""
    return [_info(model) for model in _service(request).models.values()]


@_ROUTES.get("/models/{name}", tags=["models"])
def model(at: At) -> answers.ModelInfo:
    """Describe a model."""
    return _info(at)


def _info(model: ServedModel) -> answers.ModelInfo:
    common: dict[str, Any] = {
        "name": model.name,
        "lesson_state": model.lessons.state,
        "draft_images": len(model.draft.images()),
        "error": model.error,
    }
    found = model.current
    if found is None:
        return answers.ModelInfo(exists=False, **common)
    manifest, config = found.manifest, found.generation.model.config
    shares = {number: known["accuracy"] for number, known in enumerate(manifest["classes"])}
    by = _predictor(found)
    return answers.ModelInfo(
        exists=True,
        method=config.method,
        backbone=config.backbone,
        weights=None if config.weights is None else config.weights.name,
        image_size=list(config.image_size),
        num_classes=len(manifest["classes"]),
        lessons=sum(entry["what"] == "learned" for entry in manifest["history"]),
        generation=found.generation.pointer.generation,
        digest=found.generation.pointer.digest,
        can_undo=manifest["undo"] is not None,
        why_no_undo=manifest["why_no_undo"],
        undo=manifest["undo"],
        predictors=list(manifest["predictors"]),
        can_doubt=found.generation.default_rate() is not None,
        accuracy=balanced_accuracy(shares, shares).get(by) if by else None,
        **common,
    )


def _predictor(found: OpenGeneration) -> str | None:
    return next(iter(found.generation.model.predictors), None)


@_ROUTES.get("/models/{name}/classes", tags=["models"])
def classes(at: At) -> list[answers.ClassInfo]:
    """List the classes that a model knows."""
    found = at.current
    if found is None:
        return []
    by, examples = _predictor(found), found.examples.by_class()
    return [
        answers.ClassInfo(
            name=str(known["label"]),
            images=known["images"],
            kept=known["exemplars"] + known["heldout"],
            heldout=known["heldout"],
            accuracy=known["accuracy"].get(by),
            lesson=known["stage"] + 1,
            examples=examples.get(position, []),
        )
        for position, known in enumerate(found.manifest["classes"])
    ]


@_ROUTES.patch("/models/{name}/classes/{label:path}", tags=["models"])
def rename(at: Taught, label: str, body: answers.RenameBody) -> answers.Renamed:
    """Rename a class."""
    at.lessons.refuse_unfinished()
    new = class_name(body.name)
    rename_class(at.path, at.label(label), new)
    at.refresh()
    return answers.Renamed(renamed=label, to=new)


@_ROUTES.delete("/models/{name}/classes/{label:path}", tags=["models"])
def remove(at: Taught, label: str) -> answers.Removed:
    """Remove a class with its pictures."""
    at.lessons.refuse_unfinished()
    left = remove_class(at.path, at.label(label))
    at.refresh()
    return answers.Removed(removed=label, classes=len(left.classes))


@_ROUTES.get("/models/{name}/lessons", tags=["models"])
def lessons(at: At) -> list[answers.LessonEntry]:
    """Return the history of a model."""
    found = at.current
    if found is None:
        return []
    manifest = found.manifest
    return [
        answers.LessonEntry(
            number=number + 1,
            classes=[str(known["label"]) for known in manifest["classes"] if known["stage"] == number],
            num_classes=entry["classes"],
            **{key: entry[key] for key in ("date", "what", "images", "epochs", "seconds", "before", "after", "new")},
            **{key: entry[key] for key in ("refreshed_before", "refreshed_after", "plain", "heldout")},
        )
        for number, entry in enumerate(manifest["history"])
    ]


@_ROUTES.post("/models/{name}/undo", tags=["models"])
def undo_lesson(at: Taught) -> answers.UndoneLesson:
    """Take the last lesson, removal or renaming back."""
    at.lessons.refuse_unfinished()
    undone = undo(at.path)
    at.refresh()
    if at.lessons.state != "none":
        at.lessons.stop(discard=True)  # its result is about a state that is gone
    named: dict[str, Any] = {key: list(map(str, getattr(undone, key))) for key in ("gone", "again")}
    return answers.UndoneLesson(**(asdict(undone) | named))


_PREDICT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {"type": "object", "required": ["images"], "properties": {"images": _IMAGES_SCHEMA}}
            },
            "application/json": {"schema": answers.predict_schema()},
        },
    }
}


@_ROUTES.post(
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
    service = _service(request)
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
            await _receive_images(request, service.spool, service.limits, files)
        if not files:
            raise Refused(400, "the request has no image; send at least one in the field 'images'")
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


async def _receive_images(request: Request, spool: Spool, limits: Limits, files: list[Received]) -> dict[str, str]:
    """Receive a multipart upload; add its files, which the caller releases, and return its other fields."""
    upload = await read_multipart(request.stream(), request.headers.get("content-type", ""), spool, limits)
    files += upload.files
    return upload.fields


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
    decoded = await service.decoders.decode([file.path for file in files], generation.side)
    images = [image for image in decoded if not isinstance(image, str)]
    read = iter(())
    if images:
        gallery = None
        if asked.neighbours:
            gallery = await run_in_threadpool(found.gallery)
        done = await service.batcher.predict(
            generation, np.stack(images), asked.rate is not None, bool(asked.neighbours)
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
    shares = np.take_along_axis(done.shares, best, axis=1).tolist()
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


@_ROUTES.get("/models/{name}/examples/{example}", tags=["models"], response_class=Response, responses=_PICTURE)
def example(at: At, example: str) -> Response:
    """Return a picture that the model keeps."""
    content = at.need().examples.read(at.path, example)
    return Response(content, media_type=PNG, headers={"Cache-Control": "private, max-age=3600, immutable"})


@_ROUTES.get("/models/{name}/confusion", tags=["models"])
def confusion(at: At) -> answers.ConfusionMatrix:
    """Return the confusion matrix on the held-out images."""
    found = at.need()
    counts, cells = found.gallery().confusion(len(found.generation.names))
    return answers.ConfusionMatrix(classes=found.generation.names, matrix=counts.tolist(), cells=cells)


@_ROUTES.get("/models/{name}/draft", tags=["teach"])
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
                    "properties": {"class": {"type": "string"}, "images": _IMAGES_SCHEMA},
                }
            }
        },
    }
}


@_ROUTES.post("/models/{name}/draft/images", tags=["teach"], openapi_extra=_DRAFT_BODY)
async def add_images(at: Taught, request: Request) -> answers.DraftAdded:
    """Add images of one class to the draft. Each is decoded; those that cannot be read are rejected."""
    service, own = _service(request), at.draft
    files: list[Received] = []
    try:
        await run_in_threadpool(own.prepare)
        own.check_room(1, 0)
        fields = await _receive_images(request, own.spool, service.limits, files)
        label = class_name(fields.get("class", ""))
        if not files:
            raise Refused(400, "the request has no image; send at least one in the field 'images'")
        decoded = await service.decoders.decode([file.path for file in files], THUMBNAIL)
        for file, image in zip(files, decoded, strict=True):
            file.error = f"it cannot be read ({image})" if isinstance(image, str) else None
        before = {id(each) for each in own.rejected()}
        added = await run_in_threadpool(own.add, files, label)
        rejected = [each for each in own.rejected() if id(each) not in before]
        state = await run_in_threadpool(_draft, at, rejected)
    finally:
        own.spool.release(files)
    return answers.DraftAdded(added=[image.id for image in added], **state)


@_ROUTES.get("/models/{name}/draft/images/{image}", tags=["teach"], response_class=Response, responses=_PICTURE)
async def draft_image(at: Taught, request: Request, image: str) -> Response:
    """Return a thumbnail of an image of the draft."""
    (found,) = await _service(request).decoders.decode([at.draft.path(image)], THUMBNAIL)
    if isinstance(found, str):
        raise Refused(409, f"the image cannot be read ({found})")
    content = await run_in_threadpool(to_png, found)
    return Response(content, media_type=PNG, headers={"Cache-Control": "private, max-age=3600, immutable"})


@_ROUTES.patch("/models/{name}/draft/images", tags=["teach"])
def move_images(at: Taught, body: answers.MoveBody) -> answers.DraftInfo:
    """Move images of the draft to another class."""
    at.draft.move(body.ids, class_name(body.class_))
    return answers.DraftInfo(**_draft(at))


@_ROUTES.delete("/models/{name}/draft/images", tags=["teach"])
def discard_images(at: Taught, body: Annotated[answers.DiscardBody | None, Body()] = None) -> answers.DraftInfo:
    """Discard images of the draft; all of them without ids."""
    at.draft.discard(None if body is None else body.ids)
    return answers.DraftInfo(**_draft(at))


@_ROUTES.post("/models/{name}/draft/check", tags=["teach"])
def check(at: Taught) -> answers.DraftInfo:
    """Look for duplicates, blurry and tiny images and labels that are probably wrong."""
    if not at.checking.acquire(blocking=False):
        raise busy("the draft is being checked already; try again")
    try:
        check_draft(at.path, at.draft, at.options)
    finally:
        at.checking.release()
    return answers.DraftInfo(**_draft(at))


@_ROUTES.post("/models/{name}/lesson", tags=["teach"], status_code=202)
def start_lesson(at: Taught, body: Annotated[answers.LessonBody | None, Body()] = None) -> answers.LessonInfo:
    """Start to learn the draft, or continue the lesson that was stopped."""
    asked = body or answers.LessonBody()
    if asked.epochs is not None and asked.minutes is not None:
        raise Refused(422, "epochs and minutes exclude each other; give one of them")
    at.lessons.start(at.draft.images(), asked.epochs, asked.minutes, asked.more_of_known)
    return answers.LessonInfo(**at.lessons.shown())


@_ROUTES.get("/models/{name}/lesson", tags=["teach"])
def lesson(at: Taught) -> answers.LessonInfo:
    """Return the state of the last lesson."""
    return answers.LessonInfo(**at.lessons.shown())


@_ROUTES.delete("/models/{name}/lesson", tags=["teach"])
def stop_lesson(at: Taught, discard: bool = False) -> answers.LessonInfo:
    """Stop the lesson: it saves, and can be continued; or discard it."""
    at.lessons.stop(discard)
    return answers.LessonInfo(**at.lessons.shown())


@_ROUTES.get(
    "/models/{name}/lesson/events",
    tags=["teach"],
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Events; data is LessonInfo as JSON."}},
)
async def lesson_events(at: Taught, request: Request) -> StreamingResponse:
    """Follow the lessons of a model: progress, note, finished, failed, stopped, none. First comes the present state."""
    service = _service(request)
    if sum(model.lessons.listeners for model in service.models.values()) >= service.limits.streams:
        raise busy(f"{service.limits.streams} clients follow lessons already; try again")
    listener = at.lessons.listen()

    async def lines() -> AsyncIterator[str]:
        while (event := await listener.next(KEEP_ALIVE_SECONDS)) is not None:
            if event == "silence":
                yield ": keep-alive\n\n"
            else:
                yield f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    leave = BackgroundTask(at.lessons.leave, listener)
    return _EventStream(lines(), media_type="text/event-stream", headers=headers, background=leave)


class _EventStream(StreamingResponse):
    """A stream whose background task runs also if the client goes first."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        background, self.background = self.background, None
        try:
            await super().__call__(scope, receive, send)
        finally:
            if background is not None:
                with_shield = asyncio.shield(asyncio.ensure_future(background()))
                await with_shield


@_ROUTES.get("/models/{name}/export.onnx", tags=["models"], response_class=FileResponse)
def export(at: At, request: Request) -> FileResponse:
    """Return the network as an ONNX file, after a comparison with the model."""
    try:
        require_onnx()
    except EngramError as error:
        raise Refused(501, str(error)) from None
    at.need()
    service = _service(request)
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


@_ROUTES.get("/models/{name}/report.html", tags=["models"], response_class=HTMLResponse)
def report(at: At, request: Request) -> FileResponse:
    """Return a page with the accuracy on held-out images, by class, and the confusion matrix."""
    from engram.report.evaluation_page import write_evaluation  # matplotlib takes a second to import

    found = at.need()
    counts, _ = found.gallery().confusion(len(found.generation.names))
    if not counts.sum():
        raise Refused(409, "the model has no held-out images to report on")
    out = _service(request).spool.new_path()
    write_evaluation(_evaluation(at, found, counts), out)
    return FileResponse(out, media_type="text/html", filename=f"{at.name}.html", background=BackgroundTask(out.unlink))


def _evaluation(at: ServedModel, found: OpenGeneration, counts: Images) -> dict[str, Any]:
    """Return what `engram evaluate --json` prints, for the held-out images."""
    right, images = np.diag(counts), counts.sum(axis=1)
    shares = [100 * int(r) / int(n) if n else None for r, n in zip(right, images, strict=True)]
    return {
        "model": at.name,
        "folder": "its held-out images",
        "method": found.generation.model.config.method,
        "by": _predictor(found),
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


def _metrics(request: Request) -> PlainTextResponse:
    """Counters and gauges in Prometheus' text format."""
    service = _service(request)
    gauges: list[tuple[str, str, dict[str, str], float]] = [
        ("engram_resident_memory_bytes", "Resident memory of the server.", {}, resident_bytes()),
        ("engram_waiting_images", "Images that wait for a prediction.", {}, service.batcher.waiting),
    ]
    models = service.models.values()
    for model in models:
        found = model.current
        number = 0 if found is None else int(found.generation.pointer.generation)
        gauges.append(("engram_model_generation", "Generation that is served.", {"model": model.name}, number))
    for model in models:
        count = 0 if model.current is None else len(model.current.generation.names)
        gauges.append(("engram_model_classes", "Classes that the model knows.", {"model": model.name}, count))
    for model in models:
        for state in _STATES:
            labels = {"model": model.name, "state": state}
            gauges.append(
                ("engram_lesson_state", "1 for the state of the last lesson.", labels, state == model.lessons.state)
            )
    for model in models:
        process = model.lessons.process_id
        memory = resident_bytes(process) if process else 0
        gauges.append(("engram_lesson_memory_bytes", "Resident memory of the lesson.", {"model": model.name}, memory))
    return PlainTextResponse(service.metrics.text(gauges), media_type=CONTENT_TYPE)
