"""Start a run, resume one, or compute its result. `run` and `resume` yield events and display nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engram.core.checkpoint import Checkpoint, fitting
from engram.core.errors import EngramError, described, option
from engram.core.events import Event, RunFinished
from engram.core.processes import Processes, join_processes
from engram.core.provenance import code_digest, hardware, own_code
from engram.core.serialize import flatten
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.experiment.base_cache import StageCache, which_cache
from engram.experiment.execution import RunExecution
from engram.experiment.image_placement import ImagePlacement, photographs_of
from engram.experiment.learner_config import resolve_device
from engram.experiment.progress_display import show_progress
from engram.experiment.recipes import named_by_recipe
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.runs.checked import Source, checked
from engram.runs.directory import CHECKPOINT, RunDirectory
from engram.runs.reader import read_manifest
from engram.runs.run_checkpoint import read_run_checkpoint
from engram.runs.stored_run import RunManifest, RunResult
from engram.track import TrackedRun, Tracking
from engram.track.tracking import describe_run


def run(
    config: RunConfig,
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    stop_after_stage: int | None = None,
    checkpoint_minutes: float = 10.0,
    cache: StageCache | bool | None = None,
    command: str | None = None,
    images: ImagePlacement = "auto",
) -> Generator[Event, None, None]:
    """Run a configuration: a generator of events. The run advances as they are consumed.

    Parameters
    ----------
    store: the images, if the configuration does not name them.
    directory: for the files of the run; None: nothing is written.
    stop: called after every step; if it returns True, the run saves a checkpoint and ends.
    cache: of trained base stages, to share them with other runs; True: the cache of the commands and `run_together`.
    images: "resident" keeps all images of a stage on the device, "streamed" brings them there batch by batch; "auto"
        streams them if they do not fit. The result is the same.

    If torchrun started this process together with others, they share the run (docs/scale.md), and every one of them
    must consume the events.
    """
    check_config(config)
    check_store(store)
    processes = join_run(config)
    if store is None:
        store = processes.one_before_the_others(lambda: load_store(config.data))
    bases = which_cache(cache)  # first: an invalid argument must not leave a directory behind
    session = Session(settle(config, store), store, images, processes)
    check_same(session)
    files = None
    if directory is not None:
        manifest = {**_manifest(session), "command": command}
        files = _of_first(processes, lambda: RunDirectory.create(Path(directory), manifest))
    yield from RunExecution(session, files, stop, stop_after_stage, checkpoint_minutes, bases).events(resumed=False)


def resume(
    directory: str | Path,
    store: ImageStore | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    stop_after_stage: int | None = None,
    checkpoint_minutes: float = 10.0,
    cache: StageCache | bool | None = None,
    images: ImagePlacement = "auto",
) -> Generator[Event, None, None]:
    """Resume the run in a directory from its last checkpoint: a generator of events.

    store: the images, if the configuration does not name them or they have moved. Other parameters: as for `run`.
    """
    check_store(store)
    path = Path(directory)
    manifest = read_manifest(path)
    config = RunConfig.from_plain(manifest.config, f"the run in {path}")
    processes = join_run(config)
    if store is None:
        store = processes.one_before_the_others(lambda: load_store(config.data))
    files = _of_first(processes, lambda: RunDirectory.open(path, manifest.content))
    try:
        checkpoint = _read_checkpoint(path, manifest, files, processes)
        if store.fingerprint() != manifest.data.fingerprint:
            raise EngramError(
                f"the images are not those that the run in {path} started with; give the same data with "
                f"{option('data')}"
            )
        session = Session(config, store, images, processes)
        if session.photographs is not None and session.photographs.digest != manifest.data.photographs:
            raise EngramError(
                f"the photographs are not those that the run in {path} started with (their names or sizes differ); "
                f"give the same folder with {option('data')}"
            )
        check_same(session)
        recorded = (manifest.order.class_ids, manifest.stage_sizes)
        if (tuple(session.stream.order), tuple(session.stream.sizes)) != recorded:
            raise EngramError(f"the class order or the stages of the run in {path} do not match its configuration")
        execution = RunExecution(session, files, stop, stop_after_stage, checkpoint_minutes, which_cache(cache))
        if checkpoint is not None:
            with fitting(path / CHECKPOINT):
                execution.restore(checkpoint)
    except BaseException:
        if files is not None:
            files.close()
        raise
    yield from execution.events(resumed=True)


def join_run(config: RunConfig) -> Processes:
    """The processes that torchrun started together with this one, to share the run."""
    return join_processes(resolve_device(config.device, config.precision)[0])


def check_same(session: Session) -> None:
    """Refuse processes that were started with other arguments, images or code than process 0."""
    config = session.config
    if session.processes.count == 1:
        return
    values = {key: str(value) for key, value in flatten(config.to_plain()).items() if key != "data.path"}
    values |= {
        "images (by their digest)": session.fingerprint,
        "code (by its digest)": f"{code_digest(session.method)} {own_code(config.code_versions())}",
        "version of torch": torch.__version__,
        "photographs (by their digest)": "-" if session.photographs is None else session.photographs.digest,
        "number of CPU threads": str(torch.get_num_threads() if session.engine.device.type == "cpu" else "-"),
    }
    session.processes.check_equal(values, "has another {name}")


def _of_first(processes: Processes, work: Callable[[], RunDirectory]) -> RunDirectory | None:
    """The run directory, in the first process; the others wait until it is there."""
    found: list[RunDirectory] = []
    processes.from_first(lambda: found.append(work()))
    return found[0] if found else None


def _read_checkpoint(
    path: Path, manifest: RunManifest, files: RunDirectory | None, processes: Processes
) -> Checkpoint | None:
    """The checkpoint of the run, which the first process reads; None if there is none yet."""
    found: list[Checkpoint] = []

    def read() -> dict[str, Any] | None:
        assert files is not None
        if not files.is_started():
            return None
        found.append(read_run_checkpoint(path, manifest))
        return found[0].data

    data = processes.from_first(read)
    if data is None:
        return None
    tensors = processes.tensors_from_first(found[0].tensors if found else None)
    assert tensors is not None
    return Checkpoint(dict(tensors), data)


def check_config(config: Any) -> None:
    """Refuse anything that is not a configuration, such as the name of a recipe."""
    if not isinstance(config, RunConfig):
        raise EngramError(f"a run needs a configuration, such as recipe('afc-mini-b10-s5'), got {config!r}")


def check_store(store: Any) -> None:
    """Refuse images that are not in an ImageStore, such as an array."""
    if store is not None and not isinstance(store, ImageStore):
        raise EngramError(
            f"the images of a run are an ImageStore, got {described(store)}; make one with ImageStore.from_arrays("
            "images, labels, test_images, test_labels) or ImageStore.from_dataset(train, test)"
        )


def settle(config: RunConfig, store: ImageStore) -> RunConfig:
    """The final configuration of a run with these images on this machine; its name shows changes of its recipe.

    Refuses images without the held-out share of the configuration: the run would be evaluated on the test split. It
    also refuses a cutout that hides the images.
    """
    asked = config.data.holdout
    if asked is not None and asked != store.held_out:
        has = "none" if store.held_out is None else f"{store.held_out:g}"
        raise EngramError(
            f"the configuration has a held-out share of {asked:g}, but the images that were given have {has}; "
            f"give store.holdout({asked:g}, seed=0), or leave out data.holdout"
        )
    photographs_of(config, store)
    config.augmentation.check_cutout(store.image_size)
    # run.json must not name images that were not used, nor present held-out images as the test split.
    data = config.data if store.origin == config.data.name else DataConfig(store.origin, crops=config.data.crops)
    config = replace(config, data=replace(data, holdout=store.held_out))
    return named_by_recipe(config).on_this_machine()


def train(
    config: RunConfig,
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    *,
    progress: bool = True,
    track: str | Sequence[str] = (),
    images: ImagePlacement = "auto",
) -> RunResult:
    """Run a configuration from start to end and return its result.

    progress: show a bar on a terminal, and a bar and a curve in a notebook. Elsewhere nothing is shown.
    track: log to "tensorboard", "wandb", "mlflow" or a folder, or several of them (docs/trackers.md).
    images: as for `run`.

    >>> from engram import recipe, train
    >>> result = train(recipe("afc-mini-b10-s5"))
    >>> result.average["cnn"], result.forgetting["cnn"]
    """
    tracking = Tracking(track)
    check_config(config)

    def describe_new(event: Event) -> TrackedRun | None:  # without a directory, nobody else knows the configuration
        found = describe_run(event)
        return found if found is None or found.config else replace(found, config=flatten(config.to_plain()))

    events = tracking.follow(run(config, store, directory, images=images), describe_new)
    result = None
    for event in show_progress(events) if progress else events:
        if isinstance(event, RunFinished):
            result = event.result
    assert result is not None
    return checked(RunResult, result, Source("the result", "run it again"))


def _manifest(session: Session) -> dict[str, Any]:
    """The content of run.json, except for dates and the versions of installed packages."""
    config, store, stream = session.config, session.store, session.stream
    return {
        "recipe": config.recipe,
        "config": config.to_plain(),
        "config_hash": config.fingerprint(),
        "card": session.card(),
        "data": {
            "name": store.name,
            "class_names": list(store.class_names),
            "image_size": list(store.image_size),
            "train_images": len(store.train),
            "test_images": len(store.test),
            "skipped": list(store.skipped),
            "fingerprint": session.fingerprint,
            **({} if session.photographs is None else {"photographs": session.photographs.digest}),
        },
        "order": {"name": config.order, "class_ids": list(stream.order)},
        "stage_sizes": list(stream.sizes),
        "predictors": list(session.method.predictors),
        "versions": config.code_versions(),
        "hardware": hardware(str(session.engine.device), session.device_name, torch.get_num_threads())
        | {"processes": session.processes.count},
    }
