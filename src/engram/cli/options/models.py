"""What can be typed about models of one's own images; see options.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

CHOSEN_ONCE = "(default: chosen by the images; recorded)"


@dataclass(frozen=True)
class NewModelFlags:
    """Of a new model; recorded in it, and the same for all that it learns."""

    method: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: afc)")] = None
    """How it learns; 'engram list methods' has them."""
    backbone: Annotated[str | None, arg(metavar="NAME", help_behavior_hint=CHOSEN_ONCE)] = None
    """Network; 'engram list backbones' has them."""
    image_size: Annotated[int | None, arg(metavar="PIXELS", help_behavior_hint=CHOSEN_ONCE)] = None
    """Side that images are brought to: the central square, resized."""
    memory: Annotated[str | None, arg(metavar="BUDGET", help_behavior_hint="(default: per_class=20)")] = None
    """Images of each class to keep in the model: per_class=20, total=2000, all or none."""
    holdout: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="(default: 0.2)")] = None
    """Share of each class's images, 50 at most, never trained on and kept to measure accuracy with."""
    no_mirror: Annotated[bool, arg(help_behavior_hint="")] = False
    """Do not mirror images in training: for letters, signs, and all where left and right differ."""
    seed: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 1)")] = None
    """Seed of weights, batches and augmentation."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE", help_behavior_hint="(repeatable)")] = ()
    """Any other setting of the method, such as train.lr=0.05."""


@dataclass(frozen=True)
class LessonFlags:
    """Of this lesson."""

    more_of_known: Annotated[bool, arg(help_behavior_hint="")] = False
    """Learn classes that the model knows again, from these images and the kept ones; else they are left out."""
    epochs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: by the number of images)")] = None
    """Times that every image is trained on."""
    minutes: Annotated[float | None, arg(metavar="M", help_behavior_hint="")] = None
    """Instead of epochs: as many as fit, by the time of the first steps."""
    skip_bad: Annotated[bool, arg(help_behavior_hint="")] = False
    """Leave out images that cannot be read and classes without any other, and say which."""
    restart: Annotated[bool, arg(help_behavior_hint="")] = False
    """Drop learning that was interrupted, and begin anew."""
    no_undo: Annotated[bool, arg(help_behavior_hint="")] = False
    """Do not keep what the model was before, for 'engram undo'; that takes about as much room as its weights."""
    checkpoint_minutes: Annotated[float, arg(metavar="M", help_behavior_hint="(default: 2)")] = 2.0
    """Save how far it is every M minutes."""


@dataclass(frozen=True)
class HardwareFlags:
    """Where it is computed."""

    device: Annotated[Literal["auto", "cpu", "cuda"], arg(metavar="WHERE", help_behavior_hint="(default: auto)")] = (
        "auto"
    )
    """auto, cpu or cuda."""
    threads: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one a core)")] = None
    """CPU threads to use; 1 is quicker where other programs keep the cores busy."""


@dataclass(frozen=True)
class Learn:
    """Learn classes from a folder of class folders: a new model, or what a model does not know yet.

    Part of the images is held out; it says the accuracy on old classes before and after, and on the new ones. Until it
    is done the model is what it was. Ctrl-C saves, and the same command goes on, also after a kill.

    For example:
        engram learn model photos
        engram learn model photos-of-june --minutes 10
        engram learn model photos --image-size 64 --memory total=500
        engram learn model more-photos --more-of-known --by-class
    """

    new_model: NewModelFlags
    lesson: LessonFlags
    hardware: HardwareFlags
    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory; made where there is none."""
    images: Annotated[Positional[str], arg(metavar="IMAGES", help_behavior_hint="")]
    """A folder with a folder of images for each class, named after it."""
    by_class: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print accuracy before and after for each class."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print one line at the end; warnings and errors go to stderr."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print every event as one line of JSON, and nothing else; notices go to stderr."""


@dataclass(frozen=True)
class Predict:
    """Say what is in images: a line for each, with its path, the class and its probability, tabs between.

    Images that cannot be read are named on stderr; the exit status is 3 then.

    For example:
        engram predict model x.jpg
        engram predict model inbox --top 3
        engram predict model 'inbox/**/*.png' --json
        find inbox -name '*.jpg' | engram predict model -
    """

    hardware: HardwareFlags
    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    paths: Annotated[Positional[tuple[str, ...]], arg(metavar="PATH [PATH ...]", help_behavior_hint="")]
    """Files, folders, patterns such as 'inbox/*.png', or - for a path a line on standard input."""
    top: Annotated[int, arg(metavar="K", help_behavior_hint="(default: 1)")] = 1
    """The K most probable classes of each image."""
    by: Annotated[Literal["nme", "cnn"] | None, arg(metavar="HOW", help_behavior_hint="(default: the method's)")] = None
    """cnn, the network's head, or nme, the nearest mean of the kept images."""
    batch: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: by the image size)")] = None
    """Images at a time."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """No progress bar."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print a line of JSON for each image."""


@dataclass(frozen=True)
class Info:
    """Say what a model knows: classes, lessons, images kept, accuracy on held-out images, settings.

    For example:
        engram info model
        engram info model --json
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


@dataclass(frozen=True)
class Evaluate:
    """Test a model on a folder of class folders: accuracy in all and by class, and what is taken for what.

    Classes that the model does not know are left out by name. Images that cannot be read are named on stderr; the exit
    status is 3 then.

    For example:
        engram evaluate model photos/test
        engram evaluate model photos/test --report evaluation.html
    """

    hardware: HardwareFlags
    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    images: Annotated[Positional[str], arg(metavar="IMAGES", help_behavior_hint="")]
    """A folder with a folder of images for each class."""
    by: Annotated[Literal["nme", "cnn"] | None, arg(metavar="HOW", help_behavior_hint="(default: the method's)")] = None
    """cnn, the network's head, or nme, the nearest mean of the kept images."""
    report: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write an HTML page with the confusion matrix."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print the accuracy alone."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


@dataclass(frozen=True)
class Remove:
    """Remove classes from a model: their rows, exemplars and held-out images are gone from its files.

    All of them go or none does. The other classes' scores stay what they are. After -- a name may begin with a dash.
    With --images, single images go instead: every exemplar and held-out image that is one of these files, brought to
    the model's size. The exit status is 1 where none is found.

    For example:
        engram remove model cat
        engram remove model --yes -- -cat
        engram remove model --images photos/cat/0003.jpg withdrawn
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    classes: Annotated[Positional[tuple[str, ...]], arg(metavar="CLASS [CLASS ...]", help_behavior_hint="")]
    """The class or classes; with --images, image files, folders or patterns."""
    images: Annotated[bool, arg(help_behavior_hint="")] = False
    """Remove single images, not classes."""
    drop_learning: Annotated[bool, arg(help_behavior_hint="")] = False
    """Drop learning that was interrupted, which could not go on."""
    yes: Annotated[bool, arg(help_behavior_hint="")] = False
    """Do not ask first; on a terminal it does."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print nothing but errors."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


@dataclass(frozen=True)
class Rename:
    """Give a class of a model another name; its scores and images, and all else, stay as they are.

    A name that another class has, or that is written like one (dog, Dog), is refused. After -- a name may begin with a
    dash.

    For example:
        engram rename model cat kitten
        engram rename model -- -cat cat
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    old: Annotated[Positional[str], arg(metavar="OLD", help_behavior_hint="")]
    """The class."""
    new: Annotated[Positional[str], arg(metavar="NEW", help_behavior_hint="")]
    """Its name from now on."""
    drop_learning: Annotated[bool, arg(help_behavior_hint="")] = False
    """Drop learning that was interrupted, which could not go on."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print nothing but errors."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


@dataclass(frozen=True)
class Undo:
    """Take the last lesson back: the model is again what it was before it, all of it, and says what is gone.

    One lesson can be taken back, not two in a row. After 'engram remove' there is nothing to undo: nothing of what was
    removed is kept. 'engram info' says what could be undone.

    For example:
        engram undo model
        engram undo model --yes --json
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    drop_learning: Annotated[bool, arg(help_behavior_hint="")] = False
    """Drop learning that was interrupted, which could not go on."""
    yes: Annotated[bool, arg(help_behavior_hint="")] = False
    """Do not ask first; on a terminal it does."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print nothing but errors."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


@dataclass(frozen=True)
class Export:
    """Write a model's network as an ONNX file and check it against the model in onnxruntime.

    It takes uint8 images (N, height, width, 3) and gives probabilities (N, classes); normalisation and class names are
    in it. It needs onnx and onnxruntime: pip install '.[onnx]' in the checkout.

    For example:
        engram export model model.onnx
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The model directory."""
    out: Annotated[Positional[str], arg(metavar="OUT.onnx", help_behavior_hint="")]
    """The file to write."""
    by: Annotated[Literal["nme", "cnn"] | None, arg(metavar="HOW", help_behavior_hint="(default: the method's)")] = None
    """cnn, the network's head, or nme, the nearest mean of the kept images."""
    overwrite: Annotated[bool, arg(help_behavior_hint="")] = False
    """Replace the file where there is one."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""
