"""The application: its routes, its start and end, and the answers to errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from engram.core.errors import EngramError
from engram.core.provenance import version
from engram.serve.counters import Metrics
from engram.serve.decoder_pool import DecoderPool
from engram.serve.guard import PREFIX, describe
from engram.serve.limits import Limits, Refused
from engram.serve.predicting import Batcher
from engram.serve.routes import (
    downloads_routes,
    draft_routes,
    lesson_routes,
    model_routes,
    predict_routes,
    server_routes,
)
from engram.serve.routes.common import Service
from engram.serve.served_model import ServedModel, Watcher
from engram.serve.uploads import Budget, Spool, temporary_folder

PAGE = Path(__file__).with_name("page")


def make_app(served: Sequence[ServedModel], limits: Limits, metrics: Metrics) -> FastAPI:
    """Return the application; it opens the models when it starts and lets lessons save when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with temporary_folder() as folder:
            batcher, decoders = Batcher(limits, metrics), DecoderPool(limits)
            watcher, memory = Watcher(served), Budget(limits.memory_bytes)
            app.state.service = Service(
                {model.name: model for model in served},
                limits,
                metrics,
                batcher,
                decoders,
                Spool(folder, limits, memory),
                memory,
            )
            try:
                yield
            finally:
                await run_in_threadpool(watcher.close)
                for model in served:
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
    for subject in (predict_routes, server_routes, model_routes, draft_routes, lesson_routes, downloads_routes):
        app.include_router(subject.ROUTES, prefix=PREFIX)
    app.add_api_route(
        "/metrics", server_routes.metrics, methods=["GET"], response_class=PlainTextResponse, tags=["server"]
    )
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
