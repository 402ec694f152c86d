"""What can be typed: one frozen dataclass per command, read by tyro for parsing and for help.

Nothing here imports torch or numpy, so that help is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from tyro.conf import Positional, UseAppendAction, arg

from engram.cli.options.models import Evaluate, Export, Info, Learn, Predict, Remove, Rename, Undo

OF_RECIPE: Final = "(default: the recipe's)"


@dataclass(frozen=True)
class DataFlags:
    """Where the images come from."""

    data: Annotated[str | None, arg(metavar="PATH", help_behavior_hint=OF_RECIPE)] = None
    """A folder of class folders; for imagenet recipes ImageNet's; for cifar100 recipes the archive or its folder."""
    image_size: Annotated[int | None, arg(metavar="PIXELS", help_behavior_hint="(default: as they are)")] = None
    """Bring the images of a folder to this size: the central square, resized."""
    skip_bad: Annotated[bool, arg(help_behavior_hint="")] = False
    """Leave out images of a folder that cannot be read, and say which."""
    test_fraction: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="(default: 0.2)")] = None
    """Share of a folder's images to test on, where it has no test/ or val/."""
    holdout: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="")] = None
    """Evaluate on this share of the training images instead of the test split, for choosing settings."""


@dataclass(frozen=True)
class StreamFlags:
    """Which classes arrive when, and what is remembered of them."""

    base: Annotated[int | None, arg(metavar="N", help_behavior_hint=OF_RECIPE)] = None
    """Classes of the base stage."""
    increment: Annotated[int | None, arg(metavar="N", help_behavior_hint=OF_RECIPE)] = None
    """New classes of each later stage; the last may have fewer."""
    order: Annotated[str | None, arg(metavar="ORDER", help_behavior_hint=OF_RECIPE)] = None
    """Class order: a number, seed:N, natural, every class by name (or by id) with commas between, or @FILE of them."""
    orders: Annotated[str | None, arg(metavar="ORDER,ORDER", help_behavior_hint="")] = None
    """Several class orders, such as 1,2,3 or @one.txt,@two.txt: a run for each of them."""
    memory: Annotated[str | None, arg(metavar="BUDGET", help_behavior_hint=OF_RECIPE)] = None
    """Exemplars to keep: per_class=20, total=2000, all or none."""
    selection: Annotated[
        Literal["herding", "closest", "random", "first"] | None,
        arg(metavar="HOW", help_behavior_hint=OF_RECIPE),
    ] = None
    """How exemplars are chosen: herding, closest (to the class mean), random or first (of the data set)."""


@dataclass(frozen=True)
class TrainingFlags:
    """How it trains."""

    seed: Annotated[int | None, arg(metavar="N", help_behavior_hint=OF_RECIPE)] = None
    """Seed of weights, batches and augmentation."""
    seeds: Annotated[str | None, arg(metavar="N,N", help_behavior_hint="")] = None
    """Several seeds, such as 1,2,3: a run for each of them, with each class order."""
    epochs: Annotated[int | None, arg(metavar="N", help_behavior_hint=OF_RECIPE)] = None
    """Epochs of a stage's main phase."""
    finetune_epochs: Annotated[int | None, arg(metavar="N", help_behavior_hint=OF_RECIPE)] = None
    """Epochs of the balanced fine-tuning after it."""
    batch_size: Annotated[int | None, arg(metavar="N", help_behavior_hint=OF_RECIPE)] = None
    """Images in a batch, in both phases."""
    lr: Annotated[float | None, arg(metavar="RATE", help_behavior_hint=OF_RECIPE)] = None
    """Learning rate of the main phase."""
    variant: Annotated[Literal["released", "paper"] | None, arg(metavar="WHICH", help_behavior_hint=OF_RECIPE)] = None
    """Where the paper and its released code differ, follow which: released or paper."""
    lambda_disc: Annotated[float | None, arg(metavar="WEIGHT", help_behavior_hint=OF_RECIPE)] = None
    """Weight of the distillation (AFC and its ablations)."""
    backbone: Annotated[str | None, arg(metavar="NAME", help_behavior_hint=OF_RECIPE)] = None
    """Network; 'engram list backbones' has them."""
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, arg(metavar="WHERE", help_behavior_hint=OF_RECIPE)] = None
    """auto, cpu or cuda."""
    precision: Annotated[
        Literal["auto", "float32", "tf32", "bf16"] | None, arg(metavar="KIND", help_behavior_hint=OF_RECIPE)
    ] = None
    """auto, float32, tf32 or bf16; auto is bf16 on a GPU and float32 elsewhere."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE", help_behavior_hint="(repeatable)")] = ()
    """Any other setting, such as settings.importance_samples=1000 or augmentation.pad=2."""


@dataclass(frozen=True)
class RunningFlags:
    """How the run goes, and what it says."""

    stop_after_stage: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Stop once stage K is finished (0 is the base); 'engram resume' goes on."""
    checkpoint_minutes: Annotated[float, arg(metavar="M", help_behavior_hint="(default: 10)")] = 10.0
    """Save inside a stage every M minutes; after each stage it is always saved."""
    no_cache: Annotated[bool, arg(help_behavior_hint="")] = False
    """Train the base stage even where a run before had the same one; 'engram list cache' shows what is kept."""
    threads: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one a core)")] = None
    """CPU threads to use; 1 is quicker where other programs keep the cores busy."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print one line at the end of a run; warnings and errors go to stderr."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print every event as one line of JSON, and nothing else."""


@dataclass(frozen=True)
class Run:
    """Train a recipe, stage by stage, into a run directory; or several, side by side.

    Every combination of the recipes, --orders and --seeds is one run. Of several runs, the same command again skips
    what is done and goes on with what is not. A single run is made anew beside the first, with which 'engram resume
    DIR' goes on.

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
    recipes: Annotated[Positional[tuple[str, ...]], arg(metavar="RECIPE [RECIPE ...]", help_behavior_hint="")]
    """The recipe or recipes, such as afc-mini-b10-s5; 'engram list' has them all."""
    out: Annotated[
        str | None, arg(metavar="DIR", help_behavior_hint="(default: a new one under runs/; of several, runs)")
    ] = None
    """Run directory; one that holds something already is refused. Of several runs, the directory that holds theirs."""
    at_once: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 1 on a CPU, 12 on a GPU)")] = None
    """Of several runs, how many at a time."""
    dry_run: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print the protocol and what would be done, and write nothing."""


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its last checkpoint.

    For example:
        engram resume runs/afc-mini-b10-s5-order1-seed1
    """

    running: RunningFlags
    directory: Annotated[Positional[str], arg(metavar="DIR", help_behavior_hint="")]
    """The run directory."""
    data: Annotated[str | None, arg(metavar="PATH", help_behavior_hint="(default: where they were)")] = None
    """Where the images are now, if they moved."""


@dataclass(frozen=True)
class Demo:
    """Three ways of meeting new classes, on the images in the box, then a report: about a minute on a CPU.

    For example:
        engram demo
        engram demo --seed 2
    """

    out: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: a new one under runs/)")] = None
    """Directory for the three runs and the report."""
    seed: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 1)")] = 1
    """Seed of the runs and of their class order."""
    threads: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one a core)")] = None
    """CPU threads to use; 1 is quicker where other programs keep the cores busy."""
    quiet: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print the table and the path of the report alone."""


@dataclass(frozen=True)
class List:
    """What there is to choose from, and what has been run.

    For example:
        engram list
        engram list methods
        engram list recipes afc-cifar100
        engram list runs --root experiments
    """

    what: Annotated[
        Positional[Literal["recipes", "methods", "datasets", "backbones", "runs", "cache"]],
        arg(metavar="[WHAT]", help_behavior_hint="(default: recipes)"),
    ] = "recipes"
    """recipes, methods, datasets, backbones, runs, or the cache of trained base stages and decoded images."""
    text: Annotated[Positional[str | None], arg(metavar="[TEXT]", help_behavior_hint="(default: all)")] = None
    """Only those with this text in them, such as cifar100 or icarl."""
    root: Annotated[str, arg(metavar="DIR", help_behavior_hint="(default: runs)")] = "runs"
    """Where to look for runs."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


@dataclass(frozen=True)
class Report:
    """Write one HTML page about one or more runs, with its figures and numbers beside it.

    For example:
        engram report runs/afc-mini-b10-s5-order1-seed1
        engram report runs/demo --open
    """

    directories: Annotated[Positional[tuple[str, ...]], arg(metavar="DIR [DIR ...]", help_behavior_hint="")]
    """Run directories, or directories of run directories."""
    out: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: report.html beside the runs)")] = None
    """The HTML file to write."""
    open: Annotated[bool, arg(help_behavior_hint="")] = False
    """Open it in a browser."""


@dataclass(frozen=True)
class Reproduce:
    """Fill in the paper's tables and figures: run what is missing, then show ours beside the published numbers.

    WHAT is table1 to table10, figure2 to figure4, all (every one of them), effects (what each difference between the
    paper, its released code and this does), methods (those that Table 1 lacks, with 10 stages), mini (every method on
    the embedded set: no GPU, no download), mini-effects, or remainder and mini-remainder (what the last partial batch
    of an epoch does). Runs that several of them need are done once; the same command again goes on where it was cut.
    Runs are looked for in --out and in --results.

    For example:
        engram reproduce table1 --rows AFC --dry-run
        engram reproduce table1 table6 --rows AFC --columns "50 stages,4"
        engram reproduce all --no-run
    """

    running: RunningFlags
    what: Annotated[Positional[tuple[str, ...]], arg(metavar="WHAT [WHAT ...]", help_behavior_hint="")]
    """The tables and figures, such as table1, or all."""
    rows: Annotated[str | None, arg(metavar="ROW,ROW", help_behavior_hint="(default: all)")] = None
    """Rows, by label or method: AFC, or "AFC (CNN)"."""
    columns: Annotated[str | None, arg(metavar="COLUMN,COLUMN", help_behavior_hint="(default: all)")] = None
    """Columns, by label or a word of it: "50 stages", or 50."""
    orders: Annotated[str | None, arg(metavar="ORDER,ORDER", help_behavior_hint="(default: the paper's)")] = None
    """Class orders, such as 1,2,3."""
    seeds: Annotated[str, arg(metavar="N,N", help_behavior_hint="(default: 1)")] = "1"
    """Seeds: a run for each, with each class order."""
    results: Annotated[str | None, arg(metavar="PATH", help_behavior_hint="(default: results, where there is one)")] = (
        None
    )
    """Results measured before: a file of 'engram results merge', a folder of them, or none to count --out alone."""
    out: Annotated[str, arg(metavar="DIR", help_behavior_hint="(default: runs)")] = "runs"
    """The directory that holds the runs."""
    page: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: reproduction.html in --out)")] = None
    """The HTML page to write; tables as Markdown and CSV and plots as SVG go to a folder beside it."""
    paper: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: AFC's)")] = None
    """Another paper's experiments and numbers; docs/architecture.md says how to write one."""
    data: Annotated[str | None, arg(metavar="PATH", help_behavior_hint="(default: where they were prepared)")] = None
    """The images: the official archive or its folder."""
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, arg(metavar="WHERE", help_behavior_hint=OF_RECIPE)] = None
    """auto, cpu or cuda."""
    precision: Annotated[
        Literal["auto", "float32", "tf32", "bf16"] | None, arg(metavar="KIND", help_behavior_hint=OF_RECIPE)
    ] = None
    """Count and do runs of this precision; auto is the device's own (bf16 on a GPU, float32 elsewhere)."""
    at_once: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 1 on a CPU, 12 on a GPU)")] = None
    """How many runs at a time."""
    dry_run: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print how many runs there are, how many are done and what the rest would take, and write nothing."""
    no_run: Annotated[bool, arg(help_behavior_hint="")] = False
    """Run nothing: show what has been measured."""


@dataclass(frozen=True)
class Results:
    """Bring measured runs together in one file, or write what they come to.

    For example:
        engram results merge results/cifar100.jsonl runs other-machine.jsonl
        engram results page docs/reproduction.md results
        engram results summary summary.json results
    """

    what: Annotated[Positional[Literal["merge", "page", "summary"]], arg(metavar="WHAT", help_behavior_hint="")]
    """merge: a file of all runs, none twice. page: a Markdown page of the paper's tables with ours beside them.
    summary: a JSON file with mean and spread of each recipe that was run unchanged."""
    out: Annotated[Positional[str], arg(metavar="OUT", help_behavior_hint="")]
    """The file to write; merge keeps the runs that it has already."""
    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="IN [IN ...]", help_behavior_hint="")]
    """Run directories, folders of them, or files of results."""
    paper: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: AFC's)")] = None
    """Another paper's experiments and numbers, for the page."""


@dataclass(frozen=True)
class Prepare:
    """Download a public data set and check it; a download that broke off is taken up again.

    For example:
        engram prepare cifar100
    """

    dataset: Annotated[Positional[str], arg(metavar="DATASET", help_behavior_hint="")]
    """cifar100."""
    out: Annotated[
        str | None, arg(metavar="DIR", help_behavior_hint="(default: $ENGRAM_DATA, or engram in the cache folder)")
    ] = None
    """Where to put it."""


@dataclass(frozen=True)
class Doctor:
    """Check that everything engram needs is here and works; the exit status is 1 if something is not.

    For example:
        engram doctor
    """

    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""


COMMANDS: Final[dict[str, type]] = {
    "demo": Demo,
    "learn": Learn,
    "predict": Predict,
    "info": Info,
    "evaluate": Evaluate,
    "remove": Remove,
    "rename": Rename,
    "undo": Undo,
    "export": Export,
    "run": Run,
    "resume": Resume,
    "list": List,
    "report": Report,
    "reproduce": Reproduce,
    "results": Results,
    "prepare": Prepare,
    "doctor": Doctor,
}
