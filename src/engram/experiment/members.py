"""The members of a set of runs: what each is, where it stands, and what is left of it to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from engram.core.checkpoint import read_data
from engram.core.errors import EngramError, option
from engram.core.io import writing
from engram.core.provenance import METHOD_CODE
from engram.core.serialize import dotted
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.experiment.learner_config import resolve_device
from engram.experiment.recipe_changes import named_by_recipe
from engram.experiment.run_config import RunConfig, config_hash, directory_name
from engram.experiment.runner import check_config, settle
from engram.experiment.session import Session
from engram.methods import find_method
from engram.runs.directory import CHECKPOINT, MANIFEST, is_used, method_code, read_manifest, read_result

State = Literal["new", "incomplete", "done"]
SHOWN_DIFFERENCES = 3


@dataclass(frozen=True)
class Standing:
    """How far the run in a directory is. finished: its stages. result: that of a complete run. code: see `method_code`.

    inside: where its checkpoint stands in the next stage: the phase's number, and the epoch and the step to take next.
    """

    state: State
    finished: int = 0
    result: dict[str, Any] | None = None
    threads: int | None = None  # of the CPU, that it began with
    inside: tuple[int, int, int] | None = None
    code: str = ""


@dataclass(frozen=True, eq=False)
class Member:
    """One of several runs. work and steps are what is left to do; base_key is None where no base stage is shared.

    fingerprint: the store's. doing: the phase and the epoch to go on with inside a stage, in words. total_work: of the
    run from start to end; base_work: of its base stage.
    """

    name: str
    config: RunConfig
    store: ImageStore
    fingerprint: str
    directory: Path | None
    standing: Standing
    doing: str | None
    stages: int
    total_work: float
    base_work: float
    work: float
    steps: int
    base_key: str | None

    @property
    def place(self) -> str | None:
        """The directory as events name it."""
        return None if self.directory is None else str(self.directory)

    @property
    def has_other_code(self) -> bool:
        """Whether the run is complete, and not on record with the code that its method has now."""
        now = find_method(self.config.method).versions.get(METHOD_CODE, "")
        return self.standing.state == "done" and self.standing.code != now

    def look_again(self) -> Standing:
        """Where the run stands now: another process may have been at work since it was planned."""
        if self.directory is None:
            return self.standing
        return standing(self.directory, self.config, self.fingerprint)


def plan_members(
    configs: Sequence[RunConfig] | Mapping[str, RunConfig],
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    read: Callable[[DataConfig], ImageStore] = load_store,
) -> list[Member]:
    """The members of a set of runs, in the order given; refuses what could not be run before anything is."""
    for config in configs.values() if isinstance(configs, Mapping) else configs:
        check_config(config)
    named = dict(configs) if isinstance(configs, Mapping) else name_runs(configs)
    if not named:
        raise EngramError("there is no run to do; give at least one configuration")
    for name in named:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise EngramError(f"a run cannot be called {name!r}, because its directory is; use a plain file name")
    parent = None if directory is None else Path(directory)
    if parent is not None:
        check_parent(parent)
    stores: dict[DataConfig | None, tuple[ImageStore, str]] = {}
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
        members.append(_member(name, config, *stores[key], place))
    return members


def name_runs(configs: Sequence[RunConfig]) -> dict[str, RunConfig]:
    """The configurations by the names of their directories, which must be distinct."""
    named: dict[str, RunConfig] = {}
    for config in configs:
        name = directory_name(named_by_recipe(config))
        if name in named:
            same = named[name].fingerprint() == config.fingerprint()
            what = "are the same" if same else "differ in settings that the name does not tell"
            raise EngramError(f"two of the runs are called {name} and {what}; give each a name of its own")
        named[name] = config
    return named


def check_precisions(configs: Iterable[RunConfig]) -> None:
    """Refuses tf32 beside anything else: torch has one switch for it, for the whole process."""
    precisions = {resolve_device(config.device, config.precision)[1] for config in configs}
    if "tf32" in precisions and len(precisions) > 1:
        others = " and ".join(sorted(precisions - {"tf32"}))
        raise EngramError(f"tf32 and {others} cannot run side by side in one process; do one after the other")


def check_parent(parent: Path) -> None:
    """Refuses a directory for several runs that is a file or itself a run."""
    with writing(parent):
        exists, is_folder = parent.exists(), parent.is_dir()
    if exists and not is_folder:
        raise EngramError(f"{parent} is a file, not a directory for several runs; choose another {option('directory')}")
    if (parent / MANIFEST).exists():
        raise EngramError(f"{parent} is a run itself; choose another {option('directory')} for several runs")


def _member(name: str, config: RunConfig, store: ImageStore, fingerprint: str, directory: Path | None) -> Member:
    config = settle(config, store)
    found = Standing("new") if directory is None else standing(directory, config, fingerprint)
    session = Session(config, store)
    stages = session.plan()
    left = [phase for stage in stages[found.finished :] for phase in stage.phases]
    doing, work, steps = None, 0.0, 0  # the latter two of the phase in progress, done
    number, epoch, step = found.inside or (len(left), 0, 0)
    if number < len(left) and epoch * left[number].steps + step <= left[number].epochs * left[number].steps:
        left = left[number:]
        phase, steps = left[0], epoch * left[0].steps + step
        doing = f"{phase.name}, epoch {min(epoch + 1, phase.epochs)} of {phase.epochs}"
        work = phase.work * steps / (phase.epochs * phase.steps)
    return Member(
        name=name,
        config=config,
        store=store,
        fingerprint=fingerprint,
        directory=directory,
        standing=found,
        doing=doing,
        stages=len(stages),
        total_work=sum(phase.work for stage in stages for phase in stage.phases),
        base_work=sum(phase.work for phase in stages[0].phases),
        work=sum(phase.work for phase in left) - work,
        steps=sum(phase.epochs * phase.steps for phase in left) - steps,
        base_key=None if found.finished else session.base_key(fingerprint),
    )


def standing(directory: Path, config: RunConfig, fingerprint: str) -> Standing:
    """Where the run in a directory stands; refuses one that is no run, or another than this."""
    with writing(directory):
        used = is_used(directory)
    if not used:
        return Standing("new")
    if directory.is_dir() and not (directory / MANIFEST).exists():
        raise EngramError(f"{directory} holds something that is not a run; choose another {option('directory')}")
    manifest = read_manifest(directory)
    if config_hash(manifest["config"]) != manifest["config_hash"]:
        raise EngramError(f"the configuration in {directory / MANIFEST} was changed after the run began; remove it")
    # As this version reads it, so that a run saved before a setting existed is still the same run.
    theirs = RunConfig.from_plain(manifest["config"])
    if theirs.fingerprint() != config.fingerprint():
        raise EngramError(
            f"{directory} holds a run with other settings ({_differences(theirs, config)}); "
            f"choose another {option('directory')}"
        )
    if manifest["data"].get("fingerprint") != fingerprint:
        raise EngramError(f"{directory} holds a run of other images; choose another {option('directory')}")
    result = read_result(directory)
    finished, total = len(result["stages"]), len(manifest["stage_sizes"])
    threads = manifest.get("hardware", {}).get("threads")
    if finished == total:
        return Standing("done", finished, result, threads, code=method_code(manifest))
    return Standing("incomplete", finished, None, threads, _inside(directory, finished))


def _inside(directory: Path, finished: int) -> tuple[int, int, int] | None:
    """Where the checkpoint stands in the stage after those finished; None where it stands in none."""
    data = read_data(directory / CHECKPOINT)
    phase, records = data.get("phase"), data.get("records")
    if not isinstance(phase, dict) or not isinstance(records, list) or len(records) != finished:
        return None
    number, epoch, step = (phase.get(key) for key in ("number", "epoch", "step"))
    return (number, epoch, step) if _is_count(number) and _is_count(epoch) and _is_count(step) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _differences(theirs: RunConfig, ours: RunConfig) -> str:
    """The settings in which two configurations differ, with their values there and here."""
    there, here = dotted(theirs.to_plain()), dotted(ours.to_plain())
    keys = [key for key in here | there if key not in ("recipe", "data.path") and there.get(key) != here.get(key)]
    shown = [f"{key} is {there.get(key)} there and {here.get(key)} here" for key in keys[:SHOWN_DIFFERENCES]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
