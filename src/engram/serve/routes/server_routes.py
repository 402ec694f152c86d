"""Health and metrics of the server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from engram.core.provenance import version
from engram.serve import answers
from engram.serve.counters import CONTENT_TYPE, resident_bytes
from engram.serve.routes.common import PROBLEMS, service_of

STATES = ("none", "running", "stopped", "failed", "finished")
ROUTES = APIRouter(responses=PROBLEMS)


@ROUTES.get("/health", tags=["server"])
async def health() -> answers.Health:
    """Say that the server answers."""
    return answers.Health(status="ok", version=version())


def metrics(request: Request) -> PlainTextResponse:
    """Counters and gauges in Prometheus' text format."""
    service = service_of(request)
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
        for state in STATES:
            labels = {"model": model.name, "state": state}
            gauges.append(
                ("engram_lesson_state", "1 for the state of the last lesson.", labels, state == model.lessons.state)
            )
    for model in models:
        process = model.lessons.process_id
        memory = resident_bytes(process) if process else 0
        gauges.append(("engram_lesson_memory_bytes", "Resident memory of the lesson.", {"model": model.name}, memory))
    return PlainTextResponse(service.metrics.text(gauges), media_type=CONTENT_TYPE)
