"""The members of a set of runs: configuration, progress, and the work that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engram.core.checkpoint import read_data
from engram.core.errors import EngramError, option
from engram.core.io import writing
from engram.core.provenance import own_code
from engram.core.serialize import flatten
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.experiment.learner_config import resolve_device
from engram.experiment.recipes import named_by_recipe
from engram.experiment.run_config import RunConfig, directory_name
from engram.experiment.runner import check_config, check_store, settle
from engram.experiment.session import Session
from engram.runs.checked import Source, checked
from engram.runs.directory import CHECKPOINT, MANIFEST, is_used
from engram.runs.reader import read_manifest, read_progress
from engram.runs.stored_run import RunManifest, RunProgress, StagePosition

SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, eq=False)
class Member:
    """One of several runs.

    fingerprint: of the store. doing: phase and epoch at which the run continues inside a stage, in words. total_work,
    base_work: of the whole run, of its base stage. work, steps: what is left to do. base_key: None if the base stage
    cannot be shared.
    """

    name: str
    config: RunConfig
    store: ImageStore
    fingerprint: str
    directory: Path | None
    progress: RunProgress
    doing: str | None
    stages: int
    total_work: float
    base_work: float
    work: float
    steps: int
    base_key: str | None

    @property
    def place(self) -> str | None:
        """The directory as text, as in events."""
        return None if self.directory is None else str(self.directory)

    @property
    def has_other_code(self) -> bool:
        """Whether the run is complete, and the code of the user's method or backbone was edited since."""
        return self.progress.state == "done" and self.progress.code != own_code(self.config.code_versions())

    def read_progress(self) -> RunProgress:
        """Read the progress again: another process may have worked on the run since it was planned."""
        if self.directory is None:
            return self.progress
        return progress_of(self.directory, self.config, self.fingerprint)


def plan_members(
    configs: Sequence[RunConfig] | Mapping[str, RunConfig],
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    read: Callable[[DataConfig], ImageStore] = load_store,
) -> list[Member]:
    """Return the members of a set of runs, in the given order; check all of them before any is run."""
    for config in configs.values() if isinstance(configs, Mapping) else configs:
        check_config(config)
    named = dict(configs) if isinstance(configs, Mapping) else name_runs(configs)
    if not named:
        raise EngramError("there is no run to do; give at least one configuration")
    for name in named:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise EngramError(
                f"{name!r} cannot be the name of a run, because it names a directory; use a plain file name"
            )
    parent = None if directory is None else Path(directory)
    if parent is not None:
        check_parent(parent)
    stores: dict[DataConfig | None, tuple[ImageStore, str]] = {}
    check_store(store)
    if store is not None:
        stores[None] = (store, store.fingerprint())
    members: list[Member] = []
    check_precisions(named.values())
    for name, config in named.items():
        key = None if store is not None else config.data
        if key not in stores:
            images = read(config.data)
            stores[key] = (images, images.fingerprint())
        place = None if parent is None else parent / name
        images, fingerprint = stores[key]
        members.append(_member(name, config, images, fingerprint, place))
    return members


def name_runs(configs: Sequence[RunConfig]) -> dict[str, RunConfig]:
    """Return the configurations by the names of their directories, which must be distinct."""
    named: dict[str, RunConfig] = {}
    for config in configs:
        name = directory_name(named_by_recipe(config))
        if name in named:
            same = named[name].fingerprint() == config.fingerprint()
            what = "are the same" if same else "differ in settings that are not part of the name"
            raise EngramError(f"two of the runs are named {name} and {what}; give each run its own name")
        named[name] = config
    return named


def check_precisions(configs: Iterable[RunConfig]) -> None:
    """Refuses tf32 beside anything else: torch has one switch for it, for the whole process."""
    precisions = {resolve_device(config.device, config.precision)[1] for config in configs}
    if "tf32" in precisions and len(precisions) > 1:
        others = " and ".join(sorted(precisions - {"tf32"}))
        raise EngramError(f"tf32 and {others} cannot run at the same time in one process; run one after the other")


def check_parent(parent: Path) -> None:
    """Refuse a directory for several runs that is a file, or is itself a run."""
    with writing(parent):
        exists, is_folder = parent.exists(), parent.is_dir()
    if exists and not is_folder:
        raise EngramError(f"{parent} is a file, not a directory for several runs; choose another {option('directory')}")
    if (parent / MANIFEST).exists():
        raise EngramError(f"{parent} is itself a run; choose another {option('directory')} for several runs")


def _member(name: str, config: RunConfig, store: ImageStore, fingerprint: str, directory: Path | None) -> Member:
    config = settle(config, store)
    progress = RunProgress("new") if directory is None else progress_of(directory, config, fingerprint)
    session = Session(config, store)
    stages = session.plan()
    left = [phase for stage in stages[progress.finished :] for phase in stage.phases]
    doing, work_done, steps_done = None, 0.0, 0  # of the phase in progress
    if (at := progress.position) is not None and at.number < len(left):
        phase = left[at.number]
        steps, total = at.epoch * phase.steps + at.step, phase.epochs * phase.steps
        if steps <= total:
            left = left[at.number :]
            doing = f"{phase.name}, epoch {min(at.epoch + 1, phase.epochs)} of {phase.epochs}"
            work_done, steps_done = phase.work * steps / total, steps
    return Member(
        name=name,
        config=config,
        store=store,
        fingerprint=fingerprint,
        directory=directory,
        progress=progress,
        doing=doing,
        stages=len(stages),
        total_work=sum(phase.work for stage in stages for phase in stage.phases),
        base_work=sum(phase.work for phase in stages[0].phases),
        work=sum(phase.work for phase in left) - work_done,
        steps=sum(phase.epochs * phase.steps for phase in left) - steps_done,
        base_key=None if progress.finished else session.base_key(fingerprint),
    )


def progress_of(directory: Path, config: RunConfig, fingerprint: str) -> RunProgress:
    """Read how far the run in a directory is; refuse a directory that holds something else, or another run."""
    with writing(directory):
        used = is_used(directory)
    if not used:
        return RunProgress("new")
    if directory.is_dir() and not (directory / MANIFEST).exists():
        raise EngramError(f"{directory} holds something that is not a run; choose another {option('directory')}")
    manifest = read_manifest(directory)
    refuse_other_settings(directory, manifest, config)
    if manifest.data.fingerprint != fingerprint:
        raise EngramError(f"{directory} holds a run of other images; choose another {option('directory')}")
    progress = read_progress(directory, manifest)
    if progress.state == "done":
        return progress
    return replace(progress, position=_position(directory / CHECKPOINT, progress.finished))


def refuse_other_settings(directory: Path, manifest: RunManifest, config: RunConfig) -> None:
    """Refuse the run in a directory if its configuration is not this one."""
    # Parsed by this version, so a run saved before a setting existed is still the same run.
    theirs = RunConfig.from_plain(manifest.config, f"the run in {directory}")
    if theirs.fingerprint() != config.fingerprint():
        raise EngramError(
            f"{directory} holds a run with other settings ({_differences(theirs, config)}); "
            f"choose another {option('directory')}"
        )


def _position(checkpoint: Path, finished: int) -> StagePosition | None:
    """Where the checkpoint is inside the stage after the finished ones; None if it is not inside a stage."""
    data = read_data(checkpoint, checkpoint.parents[1])
    records = data.get("records")
    if data.get("phase") is None or not isinstance(records, list) or len(records) != finished:
        return None
    try:
        return checked(StagePosition, data["phase"], Source(checkpoint, "start the run again"))
    except EngramError:
        return None  # the checkpoint is checked when it is loaded


def _differences(theirs: RunConfig, ours: RunConfig) -> str:
    """List the settings in which two configurations differ, with both values."""
    there, here = flatten(theirs.to_plain()), flatten(ours.to_plain())
    keys = [key for key in here | there if key not in ("recipe", "data.path") and there.get(key) != here.get(key)]
    shown = [f"{key} is {there.get(key)} there and {here.get(key)} here" for key in keys[:SHOWN_DIFFERENCES]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
