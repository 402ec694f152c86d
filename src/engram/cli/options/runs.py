"""Options of the commands that train and compare recipes. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from tyro.conf import UseAppendAction, arg

from engram.cli.options.declare import Shown, options
from engram.cli.options.models import Json, Threads, Track

OF_RECIPE: Final = "the recipe's"
RUNS: Final = "runs"  # the directory of runs, if none is given

DeviceOfRecipe = Annotated[str | None, Shown("WHERE", OF_RECIPE), arg(help="auto, cpu, cuda, or a GPU such as cuda:1.")]
Precision = Annotated[Literal["auto", "float32", "tf32", "bf16"] | None, Shown("KIND", OF_RECIPE)]
AtOnce = Annotated[int | None, Shown("N", "1 on a CPU, 12 on a GPU")]
PaperFile = Annotated[str | None, Shown("NAME|FILE", "AFC's")]


@options
class DataFlags:
    """Where the images come from."""

    data: Annotated[str | None, Shown("PATH", OF_RECIPE)] = None
    """A folder of class folders; for imagenet recipes ImageNet's; for cifar100 recipes the archive or its folder."""
    image_size: Annotated[int | None, Shown("PIXELS", "as they are")] = None
    """Resize the images of a folder to this side length: the central square of each."""
    skip_bad: bool = False
    """Leave out unreadable images of a folder, and name them."""
    test_fraction: Annotated[float | None, Shown("SHARE", "0.2")] = None
    """Share of a folder's images to test on, if it has no test/ or val/."""
    crops: Annotated[
        Literal["square", "photograph"] | None,
        Shown("WHERE", OF_RECIPE),
        arg(
            help="Where random crops of ImageNet's training images come from. square: the stored images; photograph: "
            "the original files, as in the protocol; they are then decoded in every epoch."
        ),
    ] = None
    holdout: Annotated[float | None, Shown("SHARE")] = None
    """Evaluate on this share of the training images instead of the test split, for choosing settings."""


@options
class StreamFlags:
    """Which classes arrive when, and what is remembered of them."""

    base: Annotated[int | None, Shown("N", OF_RECIPE)] = None
    """Number of classes of the base stage."""
    increment: Annotated[int | None, Shown("N", OF_RECIPE)] = None
    """Number of new classes of each later stage; the last may have fewer."""
    increments: Annotated[str | None, Shown("N,N")] = None
    """New classes of each later stage, one number for each, such as 10,5,5,20; they add up to the rest."""
    order: Annotated[
        str | None,
        Shown("ORDER", OF_RECIPE),
        arg(
            help="Class order: a number, seed:N, numpy:N (numpy:1993 is PyCIL's), natural, all classes by name (or "
            "by id) separated by commas, or @FILE of them."
        ),
    ] = None
    orders: Annotated[str | None, Shown("ORDER,ORDER")] = None
    """Several class orders, such as 1,2,3 or seed:1,seed:2 or @one.txt,@two.txt: one run for each."""
    memory: Annotated[str | None, Shown("BUDGET", OF_RECIPE)] = None
    """Exemplars to keep: per_class=20, total=2000, all or none."""
    selection: Annotated[
        str | None,
        Shown("HOW", OF_RECIPE),
        arg(
            help="How exemplars are chosen: herding, closest (to the class mean), random, first (in the data set), "
            "reservoir (of all images seen, with --memory total=N) or your own."
        ),
    ] = None
    blurry: Annotated[float | None, Shown("SHARE")] = None
    """Share of each class's images that come in later stages than the class, such as 0.1."""
    repeat: Annotated[float | None, Shown("SHARE")] = None
    """Share of the old classes that come again at each later stage, with new images, such as 0.2."""


@options
class TrainingFlags:
    """How it trains."""

    seed: Annotated[int | None, Shown("N", OF_RECIPE)] = None
    """Seed of weights, batches and augmentation."""
    seeds: Annotated[str | None, Shown("N,N")] = None
    """Several seeds, such as 1,2,3: one run for each, with each class order."""
    online: bool = False
    """See each image once: one epoch, batches of 10 (or --batch-size), and a reservoir of --memory total=N."""
    epochs: Annotated[int | None, Shown("N", OF_RECIPE)] = None
    """Epochs of a stage's main phase."""
    finetune_epochs: Annotated[int | None, Shown("N", OF_RECIPE)] = None
    """Epochs of the balanced fine-tuning after it."""
    batch_size: Annotated[int | None, Shown("N", OF_RECIPE)] = None
    """Images per batch, in both phases."""
    lr: Annotated[float | None, Shown("RATE", OF_RECIPE)] = None
    """Learning rate of the main phase."""
    variant: Annotated[Literal["released", "paper"] | None, Shown("WHICH", OF_RECIPE)] = None
    """Which to follow if the paper and its released code differ: released or paper."""
    lambda_disc: Annotated[float | None, Shown("WEIGHT", OF_RECIPE)] = None
    """Weight of the distillation (AFC and its ablations)."""
    backbone: Annotated[str | None, Shown("NAME", OF_RECIPE)] = None
    """Network; 'engram list backbones' shows them."""
    weights: Annotated[str | None, Shown("NAME|FILE")] = None
    """Pretrained weights to start from: a name of 'engram list weights', or a file (with --backbone NAME)."""
    augment: Annotated[str | None, Shown("POLICY", OF_RECIPE)] = None
    """Strong augmentation: trivial, rand, auto, one of your own, or none."""
    cutout: Annotated[int | None, Shown("PIXELS", OF_RECIPE)] = None
    """Side of a grey box at a random place in each image; 0 for no box."""
    device: DeviceOfRecipe = None
    precision: Precision = None
    """auto, float32, tf32 or bf16; auto is bf16 on a GPU and float32 elsewhere."""
    set: Annotated[UseAppendAction[tuple[str, ...]], Shown("KEY=VALUE")] = ()
    """Any other setting, such as settings.importance_samples=1000 or augmentation.pad=2."""


@options
class RunningFlags:
    """How the run proceeds, and what it prints."""

    stop_after_stage: Annotated[int | None, Shown("K")] = None
    """Stop when stage K is finished (0 is the base); 'engram resume' continues."""
    checkpoint_minutes: Annotated[float, Shown("M")] = 10.0
    """Save inside a stage every M minutes; after each stage it always saves."""
    no_cache: bool = False
    """Train the base stage even if an earlier run had the same one; 'engram list cache' shows those kept."""
    images: Annotated[
        Literal["auto", "resident", "streamed"],
        Shown("WHERE"),
        arg(
            help="Images of a stage: all on the device (resident), or brought there batch by batch (streamed); auto "
            "streams them if they do not fit. The result is the same."
        ),
    ] = "auto"
    devices: Annotated[str | None, Shown("N,N")] = None
    """The GPUs to use, such as 0,1,2,3: several runs are spread over them."""
    track: Track = ()
    threads: Threads = None
    quiet: bool = False
    """Print one line at the end of a run; warnings and errors go to stderr."""
    json: bool = False
    """Print every event as one line of JSON and nothing else."""


@options
class Run:
    """Train a recipe, stage by stage, into a run directory; or several recipes, side by side.

    Each combination of recipes, --orders and --seeds is one run. With several runs, the same command again skips those
    that are done and continues the others. With one run, the same command starts a second one in a new directory;
    to continue the first, use 'engram resume DIR'.

    For example:
        engram run afc-mini-b10-s5
        engram run afc-cifar100-b50-s10 --order 2 --seed 3
        engram run afc-folder --data photos --base 5 --memory per_class=10
        engram run afc-mini-b10-s5 replay-mini-b10-s5 --orders 1,2,3
        engram run afc-cifar100-b50-s10 --dry-run
    """

    data: DataFlags
    stream: StreamFlags
    training: TrainingFlags
    running: RunningFlags
    recipes: Annotated[tuple[str, ...], Shown("RECIPE [RECIPE ...]", positional=True)]
    """The recipe or recipes, such as afc-mini-b10-s5; 'engram list' shows them."""
    out: Annotated[str | None, Shown("DIR", "a new one under runs/; of several runs, runs")] = None
    """Run directory; refused if it is not empty. Of several runs, the directory that holds theirs."""
    at_once: AtOnce = None
    """Of several runs, how many to train at a time."""
    dry_run: bool = False
    """Print the protocol and what would be done, and write nothing."""


@options
class Submit(Run):
    """Train recipes as jobs of a Slurm cluster, or as processes of this machine if it has no Slurm.

    The runs are those of 'engram run' with the same options, and are divided among the jobs. A job whose time is over,
    or that is preempted, saves and is queued again. The same command again submits what is left, and prints the results
    when nothing is. Needs the package submitit.

    For example:
        engram submit afc-cifar100-b50-s10 --orders 1,2,3 --out /shared/runs
        engram submit afc-cifar100-b50-s10 --slurm partition=gpu --slurm mem=32G
        engram submit afc-mini-b10-s5 replay-mini-b10-s5 --jobs 1 --gpus 0 --wait
    """

    out: Annotated[str | None, Shown("DIR", RUNS)] = None
    """The directory that holds the runs, which every job must be able to write; logs go to its folder jobs."""
    at_once: Annotated[int | None, Shown("N", "enough to start all runs")] = None
    """How many of its runs a job trains at a time."""
    jobs: Annotated[int | None, Shown("N", "one for each run")] = None
    """Number of jobs."""
    gpus: Annotated[int, Shown("N")] = 1
    """GPUs of each job; 0 for none. Each run uses one."""
    cpus: Annotated[int | None, Shown("N", "the cluster's default")] = None
    """CPU cores of each job."""
    hours: Annotated[float, Shown("H")] = 24.0
    """Time limit of each job. When it is over, the job is queued again, ten times at most."""
    slurm: Annotated[UseAppendAction[tuple[str, ...]], Shown("KEY=VALUE")] = ()
    """An option of sbatch, such as partition=gpu or account=lab."""
    wait: bool = False
    """Wait until the jobs have ended, then print the results. Ctrl-C ends the waiting, but no job of a cluster."""


@options
class Resume:
    """Continue a run from its last checkpoint.

    For example:
        engram resume runs/afc-mini-b10-s5-order1-seed1
    """

    running: RunningFlags
    directory: Annotated[str, Shown("DIR", positional=True)]
    """The run directory."""
    data: Annotated[str | None, Shown("PATH", "where they were")] = None
    """Where the images are now, if they moved."""


@options
class Demo:
    """Compare four ways to learn new classes on the embedded images and write a report: one to three minutes on a CPU.

    For example:
        engram demo
        engram demo --seed 2
    """

    out: Annotated[str | None, Shown("DIR", "a new one under runs/")] = None
    """Directory for the runs and the report."""
    seed: Annotated[int, Shown("N")] = 1
    """Seed of the runs and of their class order."""
    threads: Threads = None
    quiet: bool = False
    """Print only the table and the path of the report."""


@options
class List:
    """List what you can choose from, and the runs so far.

    For example:
        engram list
        engram list methods
        engram list recipes afc-cifar100
        engram list runs --root experiments
    """

    what: Annotated[
        Literal["overview", "recipes", "methods", "datasets", "backbones", "weights", "parts", "runs", "cache"],
        Shown("[WHAT]", positional=True),
        arg(
            help="overview (data sets, protocols and methods), recipes (all of them), methods, datasets, backbones, "
            "weights (pretrained), parts (optimisers, schedules, exemplar selections, predictors, augmentation "
            "policies), runs, or the cache of trained base stages and decoded images."
        ),
    ] = "overview"
    text: Annotated[str | None, Shown("[TEXT]", "all", positional=True)] = None
    """Only those that contain this text, such as cifar100 or icarl."""
    root: Annotated[str, Shown("DIR")] = RUNS
    """Where to look for runs."""
    json: Json = False


@options
class Report:
    """Write one HTML page about one or more runs, with its figures and numbers next to it.

    For example:
        engram report runs/afc-mini-b10-s5-order1-seed1
        engram report runs/demo --open
    """

    directories: Annotated[tuple[str, ...], Shown("DIR [DIR ...]", positional=True)]
    """Run directories, or directories of run directories."""
    out: Annotated[str | None, Shown("FILE", "report.html next to the runs")] = None
    """The HTML file to write."""
    pdf: bool = False
    """Write every figure as PDF too, next to its SVG file."""
    open: bool = False
    """Open it in a browser."""


@options
class Reproduce:
    """Fill in the paper's tables and figures: run what is missing, then compare with the published numbers.

    WHAT is table1 to table10, figure2 to figure4, all (every one of them), effects (the effect of each difference
    between the paper, its released code and this package), methods (those missing from Table 1, with 10 stages), mini
    (every method on the embedded images: no GPU, no download), mini-effects, or remainder and mini-remainder (the
    effect of the last partial batch of an epoch). A run that several of them need is done once; the same command again
    continues where it was interrupted. Runs are looked for in --out and in --results.

    For example:
        engram reproduce table1 --rows AFC --dry-run
        engram reproduce table1 table6 --rows AFC --columns "50 stages,4"
        engram reproduce all --no-run
    """

    running: RunningFlags
    what: Annotated[tuple[str, ...], Shown("WHAT [WHAT ...]", positional=True)]
    """The tables and figures, such as table1, or all."""
    rows: Annotated[str | None, Shown("ROW,ROW", "all")] = None
    """Rows, by label or method: AFC, or "AFC (CNN)"."""
    columns: Annotated[str | None, Shown("COLUMN,COLUMN", "all")] = None
    """Columns, by label or a word of it: "50 stages", or 50."""
    orders: Annotated[str | None, Shown("ORDER,ORDER", "the paper's")] = None
    """Class orders, such as 1,2,3."""
    seeds: Annotated[str, Shown("N,N")] = "1"
    """Seeds: one run for each, with each class order."""
    results: Annotated[str | None, Shown("PATH", "results, if it exists")] = None
    """Earlier results: a file of 'engram results merge', a folder of such files, or none to count only --out."""
    out: Annotated[str, Shown("DIR")] = RUNS
    """The directory that holds the runs."""
    page: Annotated[str | None, Shown("FILE", "reproduction.html in --out")] = None
    """The HTML page to write; tables as Markdown and CSV and plots as SVG go to a folder next to it."""
    paper: PaperFile = None
    """bench: the open bench (b50, b0); or a file with another paper's experiments, as in docs/architecture.md."""
    data: Annotated[str | None, Shown("PATH", "where they were prepared")] = None
    """The images: the official archive or its folder."""
    device: DeviceOfRecipe = None
    precision: Precision = None
    """Count and do runs of this precision; auto is the device's default (bf16 on a GPU, float32 elsewhere)."""
    at_once: AtOnce = None
    """How many runs to train at a time."""
    dry_run: bool = False
    """Print how many runs there are, how many are done and how long the rest would take, and write nothing."""
    no_run: bool = False
    """Run nothing: show what has been measured."""


@options
class Results:
    """Collect measured runs in one file, or write a table, a page or a summary of them.

    For example:
        engram results merge results/cifar100.jsonl runs other-machine.jsonl
        engram results table comparison.tex runs
        engram results page docs/reproduction.md results
        engram results summary summary.json results
    """

    what: Annotated[
        Literal["merge", "table", "page", "summary"],
        Shown("WHAT", positional=True),
        arg(
            help="merge: a file of all runs, none twice. table: a row for each recipe with mean and standard "
            "deviation, as LaTeX (.tex), Markdown (.md) or CSV (.csv). page: a Markdown page of the paper's "
            "tables with our numbers. summary: a JSON file with mean and standard deviation of each recipe that "
            "was run unchanged."
        ),
    ]
    out: Annotated[str, Shown("OUT", positional=True)]
    """The file to write; merge keeps the runs that are already in it."""
    inputs: Annotated[tuple[str, ...], Shown("IN [IN ...]", positional=True)]
    """Run directories, folders of them, or files of results."""
    paper: PaperFile = None
    """bench, or a file with another paper's experiments and numbers, for the page."""


@options
class Prepare:
    """Download a public data set or pretrained weights and check them; an interrupted download is continued.

    For example:
        engram prepare cifar100
        engram prepare weights resnet18-imagenet
    """

    dataset: Annotated[str, Shown("DATASET", positional=True)]
    """cifar100, or weights."""
    name: Annotated[str | None, Shown("[NAME]", "none", positional=True)] = None
    """Of the weights; 'engram list weights' shows them."""
    out: Annotated[str | None, Shown("DIR", "$ENGRAM_DATA, or engram in the cache folder")] = None
    """Where to put a data set; weights go to $ENGRAM_WEIGHTS, or weights in the same folder."""


@options
class Doctor:
    """Check that everything engram needs is installed and works; the exit status is 1 if something does not.

    For example:
        engram doctor
    """

    json: Json = False
