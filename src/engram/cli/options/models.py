"""Options of the commands that work with models of your own images. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated, Literal

from tyro.conf import UseAppendAction, arg

from engram.cli.options.declare import Shown, options

CHOSEN = "chosen by the images; recorded"

Device = Literal["auto", "cpu", "cuda"]
ModelDirectory = Annotated[str, Shown("MODEL", positional=True), arg(help="The model directory.")]
ModelOrRun = Annotated[
    str, Shown("MODEL", positional=True), arg(help="The model directory, or the directory of a finished run.")
]
Predictor = Annotated[
    str | None,
    Shown("HOW", "the method's"),
    arg(help="cnn: the network's head; nme: the nearest class mean of the exemplars; or another of the method."),
]
Threads = Annotated[
    int | None,
    Shown("N", "one per core"),
    arg(help="CPU threads to use; 1 is faster if other programs keep the cores busy."),
]
Track = Annotated[
    UseAppendAction[tuple[str, ...]],
    Shown("TRACKER"),
    arg(
        help="Log to tensorboard, wandb or mlflow, or as plain files into a folder; may be given several times. "
        "An equals sign and the folder, the project or the experiment may follow, such as wandb=my-project."
    ),
]
DropLearning = Annotated[bool, arg(help="Drop a lesson that was interrupted; it could not be continued.")]
Yes = Annotated[bool, arg(help="Do not ask for confirmation (it asks only on a terminal).")]
Quiet = Annotated[bool, arg(help="Print only errors.")]
Json = Annotated[bool, arg(help="Print JSON.")]


@options
class NewModelFlags:
    """For a new model; recorded in it and used for everything that it learns later."""

    method: Annotated[str | None, Shown("NAME", "lda on pretrained weights, or afc")] = None
    """Learning method; 'engram list methods' shows them."""
    backbone: Annotated[str | None, Shown("NAME", CHOSEN)] = None
    """Network; 'engram list backbones' shows them."""
    weights: Annotated[str | None, Shown("NAME|FILE")] = None
    """Pretrained weights to start from: a name of 'engram list weights', or a file (with --backbone NAME)."""
    image_size: Annotated[int | None, Shown("PIXELS", CHOSEN)] = None
    """Side length of the images: the central square is resized to it."""
    memory: Annotated[str | None, Shown("BUDGET", "per_class=20")] = None
    """Exemplars (images kept in the model; lda needs none): per_class=20, total=2000, all or none."""
    holdout: Annotated[float | None, Shown("SHARE", "0.2")] = None
    """Share of each class's images (at most 50) that is not trained on but kept to measure accuracy."""
    no_mirror: bool = False
    """Do not mirror images in training: for letters, signs and everything else where left and right differ."""
    augment: Annotated[str | None, Shown("POLICY", "none")] = None
    """Strong augmentation: trivial, rand, auto, one of your own, or none."""
    seed: Annotated[int | None, Shown("N", "1")] = None
    """Seed of weights, batches and augmentation."""
    from_: Annotated[str | None, Shown("RUN"), arg(name="from")] = None
    """Start from the network, the classes and the exemplars of a finished run, with its settings."""
    set: Annotated[UseAppendAction[tuple[str, ...]], Shown("KEY=VALUE")] = ()
    """Any other setting of the method, such as train.lr=0.05."""


@options
class LessonFlags:
    """For this lesson."""

    more_of_known: bool = False
    """Train known classes again, on these images and the exemplars (lda: add the images). Otherwise left out."""
    epochs: Annotated[int | None, Shown("N", "by the number of images")] = None
    """How often each image is trained on."""
    minutes: Annotated[float | None, Shown("M")] = None
    """Instead of --epochs: as many epochs as fit, estimated from the first steps."""
    group_by: Annotated[
        str | None,
        Shown("HOW", "near-duplicates"),
        arg(
            help="Hold out images together or not at all: folder (below the class), time=SECONDS (EXIF), or a "
            "regular expression with one group that is searched in the path. Near-duplicates always stay "
            "together, unless it is none."
        ),
    ] = None
    validate: Annotated[
        str | None,
        Shown("IMAGES"),
        arg(
            help="A folder of class folders to measure accuracy on, held out instead of a share of the images. With "
            "lda they are learned after that, so test on others."
        ),
    ] = None
    skip_bad: bool = False
    """Leave out unreadable images, and classes without a readable one, and name them."""
    restart: bool = False
    """Drop a lesson that was interrupted and start again."""
    no_undo: bool = False
    """Keep no earlier state for 'engram undo'; each takes about as much disk space as the weights."""
    undo_steps: Annotated[int, Shown("N")] = 3
    """How many earlier states to keep for 'engram undo', at most 20."""
    checkpoint_minutes: Annotated[float, Shown("M")] = 2.0
    """Save the progress every M minutes."""


@options
class HardwareFlags:
    """Where it is computed."""

    device: Annotated[Device, Shown("WHERE")] = "auto"
    """auto, cpu or cuda."""
    threads: Threads = None


@options
class TableFlags:
    """How images are given."""

    nested: bool = False
    """Every folder with images is a class, at any depth, and named by its path, such as fruit/apple."""
    path_column: Annotated[str, Shown("NAME")] = "path"
    """Column of a table with the paths, which are relative to the table's folder."""
    label_column: Annotated[str, Shown("NAME")] = "label"
    """Column of a table with the classes."""


@options
class Learn:
    """Learn classes from a folder of class folders: make a new model, or teach a model new classes.

    Part of the images is held out; the result shows the accuracy on old classes before and after, and on the new
    ones. The model changes only when the lesson is done. Ctrl-C saves; the same command continues, also after a kill.

    For example:
        engram learn model photos
        engram learn model photos-of-june --minutes 10
        engram learn model photos --image-size 64 --memory total=500
        engram learn model more-photos --more-of-known --by-class
        engram learn model photos.csv --validate photos-of-july
        engram learn model photos --from runs/afc-folder-order1-seed1
    """

    new_model: NewModelFlags
    lesson: LessonFlags
    table: TableFlags
    hardware: HardwareFlags
    model: Annotated[str, Shown("MODEL", positional=True)]
    """The model directory; created if it does not exist."""
    images: Annotated[
        str,
        Shown("IMAGES", positional=True),
        arg(
            help="A folder with one folder of images per class, named after the class; or a table of paths and "
            "labels (.csv, .tsv, .jsonl, .parquet)."
        ),
    ]
    by_class: bool = False
    """Print accuracy before and after for each class."""
    track: Track = ()
    quiet: bool = False
    """Print one line at the end; warnings and errors go to stderr."""
    json: bool = False
    """Print every event as one line of JSON and nothing else; notices go to stderr."""


@options
class Predict:
    """Classify images: prints one line per image with path, class and probability, separated by tabs.

    Unreadable images are named on stderr; the exit status is 3 then.

    For example:
        engram predict model x.jpg
        engram predict model inbox --top 3
        engram predict model 'inbox/**/*.png' --json
        find inbox -name '*.jpg' | engram predict model -
        engram predict model.onnx inbox
    """

    hardware: HardwareFlags
    model: Annotated[
        str,
        Shown("MODEL", positional=True),
        arg(
            help="The model directory, the directory of a finished run, or a file of 'engram export', which "
            "onnxruntime computes on the CPU."
        ),
    ]
    paths: Annotated[tuple[str, ...], Shown("PATH [PATH ...]", positional=True)]
    """Files, folders, patterns such as 'inbox/*.png', or - to read paths from standard input, one per line."""
    top: Annotated[int, Shown("K")] = 1
    """Print the K most probable classes of each image."""
    by: Predictor = None
    unknown: Annotated[
        float | None,
        Shown("RATE"),
        arg(
            help="Print 'unknown' or 'known' before the class. RATE is the share of images of known classes that are "
            "called unknown by mistake, such as 0.05, measured on held-out images."
        ),
    ] = None
    batch: Annotated[int | None, Shown("N", "by the image size")] = None
    """Images per batch."""
    bf16: Annotated[
        bool,
        arg(
            help="Compute in bfloat16 on a CPU too: about twice as fast for large images where the processor has "
            "AMX; the probabilities change a little."
        ),
    ] = False
    quiet: bool = False
    """Show no progress bar."""
    json: bool = False
    """Print a line of JSON for each image."""


@options
class Info:
    """Describe a model: classes, lessons, exemplars, accuracy on held-out images, settings.

    For example:
        engram info model
        engram info model --json
    """

    model: ModelDirectory
    json: Json = False


@options
class Evaluate:
    """Test a model on a folder of class folders: accuracy overall and by class, and the most confused classes.

    Classes that the model does not know are left out and named. Unreadable images are named on stderr; the exit status
    is 3 then.

    For example:
        engram evaluate model photos/test
        engram evaluate model photos/test --report evaluation.html
    """

    table: TableFlags
    hardware: HardwareFlags
    model: ModelOrRun
    images: Annotated[str, Shown("IMAGES", positional=True)]
    """A folder with one folder of images per class, or a table of paths and labels."""
    by: Predictor = None
    report: Annotated[str | None, Shown("FILE")] = None
    """Write an HTML page with the confusion matrix."""
    strangers: Annotated[str | None, Shown("FOLDER")] = None
    """A folder of images of other things: how well the model tells them from images of its classes."""
    bf16: Annotated[
        bool,
        arg(
            help="Compute in bfloat16 on a CPU too: about twice as fast for large images where the processor has "
            "AMX; the probabilities change a little."
        ),
    ] = False
    quiet: bool = False
    """Print only the accuracy."""
    json: Json = False


@options
class Check:
    """Look for mistakes in images before learning them: duplicates, also across classes, unreadable, tiny and blurry
    images, and labels that are probably wrong.

    Nothing is changed. Labels are compared by the network of a model; 'none' leaves this out. The exit status is 3 if
    some images cannot be read.

    For example:
        engram check none photos --report check.html
        engram check model photos --json
    """

    table: TableFlags
    hardware: HardwareFlags
    model: Annotated[str, Shown("MODEL", positional=True)]
    """The model directory, or none."""
    images: Annotated[str, Shown("IMAGES", positional=True)]
    """A folder with one folder of images per class, or a table of paths and labels."""
    report: Annotated[str | None, Shown("FILE")] = None
    """Write an HTML page with thumbnails."""
    quiet: bool = False
    """Print only the numbers."""
    json: Json = False


@options
class Serve:
    """Open a page in the browser to predict with models and to teach them, and answer programs over HTTP.

    The page and the API (/api/v1, described by /api/v1/openapi.json) are on this machine only, unless --host names
    another address; then a token is needed. A model that does not exist yet is made by its first lesson. Images that
    wait to be taught are in a folder MODEL.draft beside the model. Ctrl-C ends the server; a lesson saves first. Needs
    fastapi, uvicorn, httptools and python-multipart: pip install '.[serve]' in the checkout.

    For example:
        engram serve model
        engram serve model another-model --port 8000 --no-browser
        ENGRAM_TOKEN=... engram serve model --host 0.0.0.0 --port 8000 --allow-host models.example.org
        curl -F images=@x.jpg http://127.0.0.1:8000/api/v1/models/model/predict
    """

    new_model: NewModelFlags
    hardware: HardwareFlags
    models: Annotated[tuple[str, ...], Shown("MODEL [MODEL ...]", positional=True)]
    """Model directories; each is called by its name in the page and the API."""
    host: Annotated[str, Shown("ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: Annotated[int, Shown("N", "a free one")] = 0
    """Port to listen on."""
    token: Annotated[
        str | None,
        Shown("TOKEN", "ENGRAM_TOKEN; made if one is needed"),
        arg(
            help="Secret that requests must send as 'Authorization: Bearer TOKEN'. Other users can see it in the "
            "list of processes; the variable ENGRAM_TOKEN is not seen."
        ),
    ] = None
    allow_host: Annotated[UseAppendAction[tuple[str, ...]], Shown("NAME")] = ()
    """Another name that this server is reached by, such as a proxy's."""
    checkpoint_minutes: Annotated[float, Shown("M")] = 2.0
    """Save the progress of a lesson every M minutes."""
    no_browser: bool = False
    """Do not open the page in a browser."""
    json: bool = False
    """Print a line of JSON with the address once the server answers."""
