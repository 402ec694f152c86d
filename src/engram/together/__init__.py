"""Several runs side by side in one process, each in a thread of its own; what one comes to does not depend on the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from engram.config import RunConfig
from engram.data.store import ImageStore
from engram.events import Event
from engram.sharedbase import which_cache
from engram.stagecache import StageCache
from engram.together.members import Member, plan_members
from engram.together.workers import Workers

__all__ = ["Member", "Workers", "plan_members", "run_together"]


def run_together(
    configs: Sequence[RunConfig] | Mapping[str, RunConfig],
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    *,
    at_once: int | None = None,
    stop: Callable[[], bool] | None = None,
    stop_after_stage: int | None = None,
    checkpoint_minutes: float = 10.0,
    cache: StageCache | bool | None = True,
    command: str | None = None,
) -> Generator[tuple[str, Event], None, None]:
    """The events of several runs, each with the name of its run, as they come.

    configs: by name, or a list whose names are made of recipe, order and seed. store: the images of all of them; None
    reads what each configuration names, every set once. directory: each run has the subdirectory of its name there; one
    that is complete is skipped, one that is not is gone on with. at_once: how many at a time; None is 1 on a CPU and 12
    on a GPU. cache: where a base stage that several have is trained once and found by later runs, by default that of
    the commands (`engram list cache`); False has each run train its own. stop is asked by each run after every step, in
    that run's thread. A run that fails says so in its last event (`RunFailed`), and the others go on; what is wrong
    with a configuration or a directory is raised before anything starts. Closing the generator stops the runs and waits
    until each has saved itself.
    """
    workers = Workers(
        plan_members(configs, store, directory),
        at_once=at_once,
        stop=stop,
        stop_after_stage=stop_after_stage,
        checkpoint_minutes=checkpoint_minutes,
        cache=which_cache(cache),
        command=command,
    )
    yield from workers.events()
