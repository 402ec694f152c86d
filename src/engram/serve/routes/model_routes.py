"""Routes about a model: its classes, its pictures, and changes that need no lesson."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.models.accuracies import balanced_accuracy
from engram.models.edit import remove_class, rename_class, undo
from engram.serve import answers
from engram.serve.draft import class_name
from engram.serve.routes.common import PICTURE, PICTURE_HEADERS, PNG, PROBLEMS, At, Taught, service_of
from engram.serve.served_model import ServedModel

ROUTES = APIRouter(responses=PROBLEMS)


@ROUTES.get("/models", tags=["models"])
def models(request: Request) -> list[answers.ModelInfo]:
    """List the models that are served."""
    return [_info(model) for model in service_of(request).models.values()]


@ROUTES.get("/models/{name}", tags=["models"])
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
    by = found.predictor
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


@ROUTES.get("/models/{name}/classes", tags=["models"])
def classes(at: At) -> list[answers.ClassInfo]:
    """List the classes that a model knows."""
    found = at.current
    if found is None:
        return []
    by, examples = found.predictor, found.examples.by_class()
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


@ROUTES.patch("/models/{name}/classes/{label:path}", tags=["models"])
def rename(at: Taught, label: str, body: answers.RenameBody) -> answers.Renamed:
    """Rename a class."""
    at.lessons.refuse_unfinished()
    new = class_name(body.name)
    rename_class(at.path, at.label(label), new)
    at.refresh()
    return answers.Renamed(renamed=label, to=new)


@ROUTES.delete("/models/{name}/classes/{label:path}", tags=["models"])
def remove(at: Taught, label: str) -> answers.Removed:
    """Remove a class with its pictures."""
    at.lessons.refuse_unfinished()
    left = remove_class(at.path, at.label(label))
    at.refresh()
    return answers.Removed(removed=label, classes=len(left.classes))


@ROUTES.get("/models/{name}/lessons", tags=["models"])
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


@ROUTES.post("/models/{name}/undo", tags=["models"])
def undo_lesson(at: Taught) -> answers.UndoneLesson:
    """Take the last lesson, removal or renaming back."""
    at.lessons.refuse_unfinished()
    undone = undo(at.path)
    at.refresh()
    if at.lessons.state != "none":
        at.lessons.stop(discard=True)  # its result is about a state that is gone
    named: dict[str, Any] = {key: list(map(str, getattr(undone, key))) for key in ("gone", "again")}
    return answers.UndoneLesson(**(asdict(undone) | named))


@ROUTES.get("/models/{name}/examples/{example}", tags=["models"], response_class=Response, responses=PICTURE)
def example(at: At, example: str) -> Response:
    """Return a picture that the model keeps."""
    content = at.need().examples.read(at.path, example)
    return Response(content, media_type=PNG, headers=PICTURE_HEADERS)


@ROUTES.get("/models/{name}/confusion", tags=["models"])
def confusion(at: At) -> answers.ConfusionMatrix:
    """Return the confusion matrix on the held-out images."""
    found = at.need()
    counts, cells = found.gallery().confusion(len(found.generation.names))
    return answers.ConfusionMatrix(classes=found.generation.names, matrix=counts.tolist(), cells=cells)
