"""Lessons: start, stop, and follow them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from engram.serve import answers
from engram.serve.limits import Refused, busy
from engram.serve.routes.common import PROBLEMS, Taught, service_of

KEEP_ALIVE_SECONDS = 10.0
ROUTES = APIRouter(responses=PROBLEMS)


@ROUTES.post("/models/{name}/lesson", tags=["teach"], status_code=202)
def start_lesson(at: Taught, body: Annotated[answers.LessonBody | None, Body()] = None) -> answers.LessonInfo:
    """Start to learn the draft, or continue the lesson that was stopped."""
    asked = body or answers.LessonBody()
    if asked.epochs is not None and asked.minutes is not None:
        raise Refused(422, "epochs and minutes exclude each other; give one of them")
    at.lessons.start(at.draft.images(), asked.epochs, asked.minutes, asked.more_of_known)
    return answers.LessonInfo(**at.lessons.shown())


@ROUTES.get("/models/{name}/lesson", tags=["teach"])
def lesson(at: Taught) -> answers.LessonInfo:
    """Return the state of the last lesson."""
    return answers.LessonInfo(**at.lessons.shown())


@ROUTES.delete("/models/{name}/lesson", tags=["teach"])
def stop_lesson(at: Taught, discard: bool = False) -> answers.LessonInfo:
    """Stop the lesson: it saves, and can be continued; or discard it."""
    at.lessons.stop(discard)
    return answers.LessonInfo(**at.lessons.shown())


@ROUTES.get(
    "/models/{name}/lesson/events",
    tags=["teach"],
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Events; data is LessonInfo as JSON."}},
)
async def lesson_events(at: Taught, request: Request) -> StreamingResponse:
    """Follow the lessons of a model: progress, note, finished, failed, stopped, none. First comes the present state."""
    service = service_of(request)
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
