"""The bodies of requests and answers, which the OpenAPI description is made from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Base of all answers: names with underscores may begin with "model"."""

    model_config = ConfigDict(protected_namespaces=(), populate_by_name=True)


class Request(BaseModel):
    """Base of all bodies: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Problem(Answer):
    """Every answer with a status of 400 or more."""

    error: str = Field(description="What is wrong and what to do, in one sentence.")


class Health(Answer):
    """The server answers."""

    status: Literal["ok"]
    version: str


class ModelInfo(Answer):
    """A model that is served. `exists` is false before its first lesson; then most fields are null."""

    name: str
    exists: bool
    method: str | None = None
    backbone: str | None = None
    weights: str | None = Field(default=None, description="Pretrained weights that the network started from.")
    image_size: list[int] | None = Field(default=None, description="Height and width in pixels.")
    num_classes: int = 0
    lessons: int = 0
    generation: str | None = None
    digest: str | None = Field(default=None, description="Changes whenever anything in the model changes.")
    can_undo: bool = False
    why_no_undo: str | None = None
    undo: dict[str, Any] | None = Field(default=None, description="The state that undoing the last change restores.")
    predictors: list[str] = Field(default_factory=list)
    can_doubt: bool = Field(default=False, description="Whether the model can tell unknown images.")
    accuracy: float | None = Field(default=None, description="Percent on held-out images, mean over classes.")
    lesson_state: str = "none"
    draft_images: int = 0
    error: str | None = Field(default=None, description="Why the newest generation on disk cannot be opened.")


class ClassInfo(Answer):
    """A class that a model knows."""

    name: str
    images: int = Field(description="Images it was trained on.")
    kept: int = Field(description="Pictures of it in the model: exemplars and held-out images.")
    heldout: int
    accuracy: float | None = Field(description="Percent of its held-out images.")
    lesson: int = Field(description="Number of the lesson that taught it, from 1.")
    examples: list[str] = Field(description="Ids for the route examples.")


class LessonEntry(Answer):
    """An entry of a model's history. Accuracies are percent of held-out images by predictor, means over classes."""

    number: int
    date: str
    what: Literal["learned", "removed"]
    classes: list[str] = Field(description="Classes of this lesson that the model still has from it.")
    num_classes: int
    images: int
    epochs: int
    seconds: float
    before: dict[str, float] = Field(description="Old classes before the lesson.")
    after: dict[str, float] = Field(description="Old classes after it.")
    new: dict[str, float]
    refreshed_before: dict[str, float]
    refreshed_after: dict[str, float]
    plain: dict[str, dict[str, float]] = Field(description="The same accuracies of all images.")
    heldout: dict[str, int]


class Scored(Answer):
    """A class and its probability."""

    class_: str = Field(alias="class")
    probability: float


class Neighbour(Answer):
    """A picture that the model keeps. similarity: cosine of the embeddings."""

    example: str
    class_: str = Field(alias="class")
    similarity: float


class Prediction(Answer):
    """The prediction of one image, or why it could not be read."""

    name: str
    class_: str | None = Field(default=None, alias="class")
    probability: float | None = None
    top: list[Scored] = Field(default_factory=list)
    unknown: bool | None = Field(default=None, description="Unlike anything learned; null if the model cannot tell.")
    neighbours: list[Neighbour] = Field(default_factory=list)
    error: str | None = None


class Predictions(Answer):
    """The predictions of all images of a request, in their order."""

    model: str
    generation: str
    predictions: list[Prediction]


class ImageData(Request):
    """An image in JSON."""

    name: str = "image"
    data: str = Field(description="The file in base64.")


class PredictBody(Request):
    """Images to predict, as JSON."""

    images: list[ImageData]
    top: int | None = None
    unknown: float | None = Field(default=None, description="Share of known images that are called unknown by mistake.")
    neighbours: int | None = None


def predict_schema() -> dict[str, Any]:
    """Return the schema of PredictBody, for a route that reads its body itself."""
    schema = PredictBody.model_json_schema()
    del schema["$defs"]
    schema["properties"]["images"]["items"] = ImageData.model_json_schema()
    return schema


class ConfusionMatrix(Answer):
    """Held-out images by true class (row) and predicted class (column)."""

    classes: list[str]
    matrix: list[list[int]]
    cells: dict[str, list[str]] = Field(description="Ids of examples by 'row,column'.")


class DraftFinding(Answer):
    """Something about an image of the draft that should be looked at before learning."""

    kind: Literal["exact", "near", "unreadable", "tiny", "blurry", "label"]
    text: str = Field(description="What was found, in one sentence.")
    suggested: str | None = Field(default=None, description="The class that it perhaps belongs to.")
    like: list[str] = Field(default_factory=list, description="Ids of the other images of a group of duplicates.")


class DraftEntry(Answer):
    """An image that waits to be taught."""

    id: str
    name: str
    class_: str = Field(alias="class")
    findings: list[DraftFinding]


class DraftClass(Answer):
    """A class of the draft. known: the model has it already."""

    name: str
    known: bool
    images: int


class RejectedFile(Answer):
    """A file that was refused."""

    name: str
    error: str


class DraftInfo(Answer):
    """The images that wait to be taught."""

    images: list[DraftEntry]
    classes: list[DraftClass]
    rejected: list[RejectedFile]


class DraftAdded(DraftInfo):
    """The draft after an upload. added: ids of the new images. rejected: the files of this upload."""

    added: list[str]


class MoveBody(Request):
    """Images to move to another class."""

    ids: list[str]
    class_: str = Field(alias="class")


class DiscardBody(Request):
    """Images to discard; all without ids."""

    ids: list[str] | None = None


class RenameBody(Request):
    """A new name of a class."""

    name: str


class LessonBody(Request):
    """How to learn the draft. Nothing is needed; a stopped lesson continues with its own options."""

    epochs: int | None = Field(default=None, ge=1, le=10_000)
    minutes: float | None = Field(default=None, gt=0, le=100_000)
    more_of_known: bool = Field(
        default=False, description="Learn known classes again, too, from these images and exemplars."
    )


class LessonProgress(Answer):
    """Progress of a lesson. done: from 0 to 1. terms: losses."""

    done: float
    phase: str
    epoch: int
    epochs: int
    step: int = 0
    steps: int = 0
    terms: dict[str, float]
    seconds_left: float | None
    images_per_second: float = 0.0


class LessonInfo(Answer):
    """The last lesson taught through this server."""

    state: Literal["none", "running", "stopped", "failed", "finished"]
    progress: LessonProgress | None
    result: dict[str, Any] | None = Field(description="What was learned and forgotten, as the event 'learned'.")
    error: str | None
    interrupted: bool = Field(description="It was stopped by the end of a process, not by a request.")
    images: int
    classes: list[str]
    notes: list[str]
    losses: list[tuple[float, float]] = Field(description="Share done and loss, in order; at most a few hundred.")
    options: dict[str, Any]


class UndoneLesson(Answer):
    """The result of undoing the last change."""

    gone: list[str]
    again: list[str] = Field(description="Classes that are as they were before.")
    classes: int
    lesson: int
    date: str


class Renamed(Answer):
    """A class has another name."""

    renamed: str
    to: str


class Removed(Answer):
    """A class was removed. classes: how many are left."""

    removed: str
    classes: int
