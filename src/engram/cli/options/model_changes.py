"""Options of the commands that change or export a model. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated

from engram.cli.options.declare import Shown, options
from engram.cli.options.models import DropLearning, Json, ModelDirectory, ModelOrRun, Predictor, Quiet, Yes


@options
class Remove:
    """Remove classes from a model: their rows, exemplars and held-out images are deleted from its files.

    Either all of them are removed or none. The scores of the other classes do not change; with lda they become those of
    a model that never learned these. Write -- before a name that begins with a dash.

    With --images, single images are removed instead: every exemplar and held-out image that equals one of these files,
    resized to the model's image size. The exit status is 1 if none is found.

    For example:
        engram remove model cat
        engram remove model --yes -- -cat
        engram remove model --images photos/cat/0003.jpg withdrawn
        engram remove model cat --no-undo
    """

    model: ModelDirectory
    classes: Annotated[tuple[str, ...], Shown("CLASS [CLASS ...]", positional=True)]
    """The class or classes; with --images, image files, folders or patterns."""
    images: bool = False
    """Remove single images instead of classes. This cannot be undone."""
    no_undo: bool = False
    """Delete all earlier states that are kept for 'engram undo', so that nothing of the classes is left."""
    drop_learning: DropLearning = False
    yes: Yes = False
    quiet: Quiet = False
    json: Json = False


@options
class Rename:
    """Rename a class of a model; its scores, its images and everything else stay the same.

    A name that another class has, or that differs from one only in case (dog, Dog), is refused. Write -- before a name
    that begins with a dash.

    For example:
        engram rename model cat kitten
        engram rename model -- -cat cat
    """

    model: ModelDirectory
    old: Annotated[str, Shown("OLD", positional=True)]
    """The class."""
    new: Annotated[str, Shown("NEW", positional=True)]
    """Its new name."""
    drop_learning: DropLearning = False
    quiet: Quiet = False
    json: Json = False


@options
class Merge:
    """Merge a class into another: its images become images of that class, as if they had been learned so.

    This is exact with methods that keep statistics of each class (lda, bedrock); others refuse it. Write -- before a
    name that begins with a dash.

    For example:
        engram merge model kitten cat
    """

    model: ModelDirectory
    name: Annotated[str, Shown("CLASS", positional=True)]
    """The class, which is gone afterwards."""
    into: Annotated[str, Shown("INTO", positional=True)]
    """The class that gets its images."""
    drop_learning: DropLearning = False
    quiet: Quiet = False
    json: Json = False


@options
class Move:
    """Move images to another class, for example because their label was wrong.

    The images are those that the model learned or kept, found by their pixels. With lda it is as if they had been
    learned as the other class. Other methods move the pictures that they kept, and keep in their weights what they
    learned from them. The exit status is 1 if none is found.

    For example:
        engram move model --images photos/cat/0003.jpg --to dog
    """

    model: ModelDirectory
    images: Annotated[tuple[str, ...], Shown("FILE [FILE ...]")]
    """Image files, folders or patterns."""
    to: Annotated[str, Shown("CLASS")]
    """The class that they are of."""
    drop_learning: DropLearning = False
    quiet: Quiet = False
    json: Json = False


@options
class Undo:
    """Take the last change back, a lesson, a removal, a new name, a merge or a move: restore the whole model as it was
    before, and print what is gone or back.

    Again takes back the change before that, as long as earlier states are kept. 'engram info' shows what can be undone.
    After 'engram remove --images' and 'engram remove --no-undo' there is nothing to undo.

    For example:
        engram undo model
        engram undo model --yes --json
    """

    model: ModelDirectory
    drop_learning: DropLearning = False
    yes: Yes = False
    quiet: Quiet = False
    json: Json = False


@options
class Export:
    """Write a model's network as an ONNX file and check the file against the model in onnxruntime.

    The network takes uint8 images (N, height, width, 3) and returns probabilities (N, classes); normalisation and class
    names are included. Needs onnx and onnxruntime: pip install '.[onnx]' in the checkout.

    For example:
        engram export model model.onnx
        engram export runs/afc-mini-b10-s5-order1-seed1 afc.onnx
    """

    model: ModelOrRun
    out: Annotated[str, Shown("OUT.onnx", positional=True)]
    """The file to write."""
    by: Predictor = None
    overwrite: bool = False
    """Replace the file if it exists."""
    json: Json = False
