"""`engram run` and `engram resume`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from engram.cli.commands.run_common import (
    DRY_RUN,
    check_last_stage,
    check_running,
    choose_gpus,
    command_line,
    follow_run,
    new_directory,
    print_finished,
    proceeding,
    read_images,
    refuse_used,
    use_one_gpu,
    use_threads,
)
from engram.cli.commands.several import run_several
from engram.cli.options.overrides import configure_all, images_at
from engram.cli.options.runs import Resume, Run, RunningFlags
from engram.cli.signals import Interrupt
from engram.cli.streams import tell
from engram.cli.text import card_table, make_console, make_table, print_line, print_table, shorten
from engram.core.errors import EngramError
from engram.core.events import RunFinished
from engram.core.io import typed_path
from engram.core.memory_limits import free_device_memory
from engram.core.processes import ALONE
from engram.core.torchrun import launched_rank, was_restarted
from engram.data.image_rows import is_mapped
from engram.data.photographs import decoding_threads
from engram.data.sources.load import outline_store
from engram.data.store import ImageStore
from engram.experiment.members import refuse_other_settings
from engram.experiment.run_config import RunConfig, directory_name
from engram.experiment.runner import join_run, resume, run
from engram.experiment.session import Session
from engram.models.store.generations import refuse_model
from engram.runs.directory import MANIFEST
from engram.runs.reader import read_manifest, read_progress
from engram.runs.stored_run import RunManifest


def run_command(options: Run, typed: Sequence[str]) -> int:
    """Run `engram run`."""
    flags = options.running
    check_running(flags, options.at_once)
    configs = configure_all(options)
    gpus = choose_gpus(flags, options.training.device)
    if len(configs) > 1:
        return run_several(options, configs, typed, gpus)
    config = configs[0]
    use_one_gpu(gpus)
    given = None if options.out is None else typed_path(options.out)
    use_threads(flags.threads)
    processes = ALONE if options.dry_run else join_run(config)
    if (
        was_restarted()
        and not options.dry_run
        and processes.from_first(lambda: _is_left_by_earlier_start(given, config))
    ):
        return _continue(str(given), None, flags)
    silent = flags.quiet or flags.json or not processes.is_first
    if given is not None:
        processes.from_first(lambda: refuse_used(given))
    console = make_console()
    outline = outline_store(config.data) if options.dry_run else None
    store = (
        outline[0]
        if outline is not None
        else processes.one_before_the_others(lambda: read_images(config.data, console, silent))
    )
    check_last_stage(flags, len(config.stream(store)))
    place = processes.from_first(lambda: given or new_directory(directory_name(config), silent))
    if options.dry_run:
        _print_plan(config, store, place, console, flags.json)
        if outline is not None:
            tell(outline[1])
        return 0
    interrupt = Interrupt()
    command = command_line(typed, [config])
    events = run(config, store, place, command=command, **proceeding(flags, interrupt))
    return follow_run(events, console, interrupt, flags, place)


def _is_left_by_earlier_start(given: Path | None, config: RunConfig) -> bool:
    """Whether the same command, which torchrun or Slurm starts again, has left a run to continue; refuse another."""
    if given is None:
        raise EngramError(
            "this command was started again and cannot find the run of its first start; give that run's directory "
            "with --out, so that each start continues it"
        )
    if not (given / MANIFEST).exists():
        return False
    refuse_other_settings(given, read_manifest(given), config.on_this_machine())
    return True


def resume_command(options: Resume, _: Sequence[str]) -> int:
    """Run `engram resume`."""
    check_running(options.running)
    return _continue(options.directory, options.data, options.running)


def _continue(directory: str, images: str | None, flags: RunningFlags) -> int:
    """Continue the run in a directory. images: where they are, if they have moved."""
    place = typed_path(directory)
    use_one_gpu(choose_gpus(flags))
    refuse_model(place)
    console = make_console()
    manifest = read_manifest(place)
    finished = _finished(place, manifest)
    if finished is not None:
        if launched_rank() > 0:
            return 0
        if flags.json:
            print_line(console, json.dumps(finished.to_json()))
        else:
            print_line(console, f"{place} is finished already; nothing to do")
            print_finished(console, finished, flags.quiet)
        return 0
    check_last_stage(flags, len(manifest.stage_sizes))
    config = RunConfig.from_plain(manifest.config, f"the run in {place}")
    data = config.data if images is None else replace(config.data, path=images_at(images))
    # The threads it began with: with another number a CPU's sums differ in their last bits.
    use_threads(flags.threads or manifest.hardware.get("threads"))
    processes = join_run(config)
    silent = flags.quiet or flags.json or not processes.is_first
    store = processes.one_before_the_others(lambda: read_images(data, console, silent))
    interrupt = Interrupt()
    events = resume(place, store, **proceeding(flags, interrupt))
    return follow_run(events, console, interrupt, flags, place)


def _finished(place: Path, manifest: RunManifest) -> RunFinished | None:
    """Return the last event of a run whose stages are all finished."""
    result = read_progress(place, manifest).result
    return None if result is None else RunFinished(result, str(place))


def _print_plan(config: RunConfig, store: ImageStore, place: Path, console: Console, as_json: bool) -> None:
    """Print the protocol card and what each stage would do."""
    session = Session(config, store)
    plans, card = session.plan(), session.card()
    memory = [session.memory_of(plan) for plan in plans]
    phases = [phase for plan in plans for phase in plan.phases]
    epochs, steps = sum(phase.epochs for phase in phases), sum(phase.epochs * phase.steps for phase in phases)
    if as_json:
        plan = {
            "directory": str(place),
            "card": card,
            "config": config.to_plain(),
            "stages": [asdict(plan) | {"bytes": asdict(needs)} for plan, needs in zip(plans, memory, strict=True)],
            "bytes_of_images": store.train.images.nbytes + store.test.images.nbytes,
            "total_epochs": epochs,
            "total_steps": steps,
        }
        print_line(console, json.dumps(plan))
        return
    console.print(card_table(card))
    right = ("stage", "seen", "images", "exemplars", "resident", "streamed")
    table = make_table(["stage", "new classes", "seen", "images", "exemplars", *right[-2:], "epochs x steps"], right)
    for plan, needs in zip(plans, memory, strict=True):
        stage = "base" if plan.stage == 0 else str(plan.stage)
        numbers = (f"{number:,}" for number in (plan.num_seen, plan.images, plan.exemplars))
        trained = ", ".join(f"{phase.name} {phase.epochs} x {phase.steps}" for phase in plan.phases)
        bytes_on_device = [f"{needs.device(place) / 1e9:.2f} GB" for place in ("resident", "streamed")]
        if session.photographs is not None:
            bytes_on_device[0] = "-"
        table.add_row(stage, shorten(plan.new_classes), *numbers, *bytes_on_device, trained)
    print_table(console, table)
    for line in (
        *_describe_memory(session, store, max(needs.staging for needs in memory)),
        f"in total {epochs:,} epochs and {steps:,} steps",
        f"into {place}",
        DRY_RUN,
    ):
        print_line(console, line)


def _describe_memory(session: Session, store: ImageStore, staging: int) -> list[str]:
    """Return where the images are, and what the columns of the plan are of."""
    images, kept = store.train.images.nbytes + store.test.images.nbytes, store.train.images
    is_on_disk = is_mapped(kept) or kept.strides[0] == 0  # blank images stand for those that are not decoded yet
    where = "on disk, mapped" if is_on_disk else "in RAM"
    device = session.engine.device
    what = "the GPU's memory" if device.type == "cuda" else "RAM"
    free = f"{free_device_memory(device) / 1e9:.1f} GB are free"
    pinned = f"; streaming pins {staging / 1e9:.2f} GB of RAM" if staging else ""
    threads = decoding_threads()
    decoded = f"training crops come from the photographs, which are decoded in every epoch, by {threads} thread"
    return [
        f"images: {images / 1e9:.2f} GB {where}{pinned}",
        *([] if session.photographs is None else [decoded + "s" * (threads > 1)]),
        f"resident, streamed: estimated {what} of a stage with all its images there, or batch by batch; {free}",
    ]
