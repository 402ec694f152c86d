"""The displays of several runs, with made-up events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from conftest import make_config, make_store
from engram.cli.commands.several import exit_status, print_failures
from engram.cli.display import (
    Display,
    JsonDisplay,
    LiveMultiDisplay,
    PlainDisplay,
    QuietDisplay,
    make_display,
    shorten_name,
)
from engram.cli.result_tables import differences_table, results_table, spread
from engram.cli.run_progress import RunsProgress
from engram.cli.signals import SAVING, Interrupt
from engram.core.events import (
    BaseAwaited,
    BaseReused,
    Event,
    Progress,
    RunBusy,
    RunFailed,
    RunFinished,
    RunSkipped,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Warned,
    Working,
)
from engram.experiment.parallel import Member, plan_members
from test_display import RESULT, lines_of, pipe, terminal, written

LONG = "afc-cifar100-b50-s10-changed-order{order}-seed1"


@pytest.fixture(scope="module")
def members() -> list[Member]:
    """Four runs of equal work."""
    first = plan_members({LONG.format(order=1): make_config()}, make_store())[0]
    return [replace(first, name=LONG.format(order=order)) for order in (1, 2, 3, 4)]


def progress(done: float, stage: int = 1, left: float | None = 72.0) -> Progress:
    return Progress(stage, 11, "balance", 14, 20, 7, 40, {"classification": 0.8}, 3214.4, done, left)


def finished(stage: int) -> StageFinished:
    return StageFinished(stage, 11, 50, {"cnn": 60.0, "nme": 58.0}, {}, {"cnn": 61.24, "nme": 59.0}, 4.25)


def story(members: list[Member]) -> Iterator[tuple[str, Event]]:
    """One run is done already, one finishes, one waits for the second's base stage and fails, one is stopped."""
    done, first, second, third = (member.name for member in members)
    yield done, RunSkipped(RESULT, f"runs/{done}")
    for name in (first, second, third):
        yield name, RunStarted("afc", "afc", f"runs/{name}", 11, {}, False)
        yield name, StageStarted(0, 11, ["cup"], 1, 5, 0)
        yield name, Warned("two of the images are odd")
    yield second, BaseAwaited(0, 11, f"runs/{first}")
    yield first, progress(0.1, 0)
    yield first, Working(0, 11, "evaluate")
    yield first, finished(0)
    yield second, BaseReused(0, "cache")
    yield second, RunFailed("the disk is full", f"runs/{second}", False, None)
    yield third, progress(0.2)
    yield third, Stopped(1, 11, "interrupted", f"runs/{third}")
    yield first, progress(0.9, 10)
    yield first, RunFinished(RESULT, f"runs/{first}")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_animated_lines_fit_and_there_is_one_for_each_run(width: int, members: list[Member]) -> None:
    display = LiveMultiDisplay(terminal(width), Interrupt(), RunsProgress(members), refresh=False)
    with display:
        for run, event in story(members):
            display.show(event, run)
            lines = lines_of(display)
            assert max(map(len, lines)) <= width
            assert len(lines) <= 4


def test_a_line_shows_stage_phase_accuracy_and_time(members: list[Member]) -> None:
    display = LiveMultiDisplay(terminal(80), Interrupt(), RunsProgress(members), refresh=False)
    name = members[1].name
    display.show(RunStarted("afc", "afc", None, 11, {}, False), name)
    display.show(finished(0), name)
    display.show(progress(0.5, stage=3), name)
    first, totals = lines_of(display)
    start, _, rest = first.partition(" ")
    assert start.startswith("afc-cifar100-b50-s1")
    assert start.endswith("…-order2-seed1")
    assert rest.split()[:3] == ["3/10", "balance", "14/20"]
    assert rest.split()[-2:] == ["61.2", "1:12"]
    assert totals.startswith("0 of 4 done, 1 at work, 3 waiting")
    display.show(RunStarted("afc", "afc", None, 11, {}, False), members[2].name)
    display.show(BaseAwaited(0, 11, f"some/where/{name}"), members[2].name)
    assert lines_of(display)[1] == f"{members[2].name}: waiting for the base stage of {name}"[:79] + "…"


def test_more_runs_than_lines(members: list[Member]) -> None:
    display = LiveMultiDisplay(terminal(80, height=5), Interrupt(), RunsProgress(members), refresh=False)
    for member in members:
        display.show(RunStarted("afc", "afc", None, 11, {}, False), member.name)
    lines = lines_of(display)
    assert len(lines) == 3
    assert lines[1:] == ["and 3 more at work", "0 of 4 done, 4 at work"]
    interrupt = Interrupt(announce=False)
    interrupt.signal = 2
    asked = LiveMultiDisplay(terminal(80), interrupt, RunsProgress(members), refresh=False)
    assert lines_of(asked)[-2] == SAVING


def test_time_left_is_of_all_runs_at_the_rate_so_far(members: list[Member]) -> None:
    time = [100.0]
    runs_progress = RunsProgress(members, now=lambda: time[0])
    for member in members[:2]:
        runs_progress.note(member.name, RunStarted("afc", "afc", None, 11, {}, False))
    assert runs_progress.seconds_left() is None
    runs_progress.note(members[0].name, progress(0.0))
    runs_progress.note(members[1].name, progress(0.5))  # half of it was done by another process
    time[0] = 110.0
    runs_progress.note(members[0].name, progress(0.5))
    runs_progress.note(members[1].name, progress(1.0))
    assert runs_progress.seconds_left() == pytest.approx(25), "one run's work in 10 seconds, two and a half to go"
    runs_progress.note(members[1].name, RunFinished(RESULT, None))
    runs_progress.note(members[2].name, RunFailed("no", None, False, None))
    assert runs_progress.seconds_left() == pytest.approx(15)
    assert runs_progress.summary() == "1 of 4 done, 1 at work, 1 waiting, 1 failed; 0:15 left"


def test_time_left_counts_a_shared_base_stage_once(members: list[Member]) -> None:
    whole, base, key = members[0].total_work, members[0].base_work, members[0].base_key
    assert key is not None
    own = [replace(members[0], base_key=None), *members[1:]]
    name, other = members[0].name, members[1].name
    shared = whole / 2 + 3 * (whole - base)
    for runs, bases, expected in (
        (members, (), shared),
        (members, None, 3.5 * whole),
        (own, (), shared + base),
        (own, (key,), shared),
    ):
        time = [100.0]
        runs_progress = RunsProgress(runs, bases, now=lambda time=time: time[0])
        runs_progress.note(name, RunStarted("afc", "afc", None, 11, {}, False))
        time[0] = 400.0  # kernels were compiled
        runs_progress.note(name, progress(0.0))
        time[0] = 410.0
        runs_progress.note(name, progress(0.5))
        assert runs_progress.seconds_left() == pytest.approx(20 * expected / whole), "half a run's work in 10 seconds"
        if bases is not None and runs is members:
            runs_progress.note(other, RunStarted("afc", "afc", None, 11, {}, False))
            for event in (BaseAwaited(0, 11, f"runs/{name}"), BaseReused(0, "cache")):
                runs_progress.note(other, event)
                assert runs_progress.seconds_left() == pytest.approx(20 * expected / whole)


def test_plain_lines(members: list[Member]) -> None:
    console = pipe()
    display = PlainDisplay(console, progress=RunsProgress(members))
    for run, event in story(members):
        display.show(event, run)
    done, first, second, third = (member.name for member in members)
    assert written(console).splitlines() == [
        f"{done}: done already; average cnn 51.3, nme 49.0; final cnn 40.0, nme 41.0; 1:15",
        f"{first}: warning: two of the images are odd",
        f"{second}: waiting for the base stage of runs/{first}",
        f"{first}: base: 50 classes, cnn 60.0, nme 58.0; average cnn 61.2, nme 59.0; 4.2 s",
        f"{second}: base: trained by another run, from cache (--no-cache trains it again)",
        f"{second}: failed: the disk is full",
        f"{third}: saved, interrupted in stage 1 of 10",
        f"{first}: average cnn 51.3, nme 49.0; final cnn 40.0, nme 41.0; 1:15",
    ]
    often = pipe()
    PlainDisplay(often, 0, progress=RunsProgress(members)).show(progress(0.5), first)
    assert written(often) == "0 of 4 done, 4 waiting\n"


def test_ended_runs_stay_above_the_animated_lines(members: list[Member]) -> None:
    console = terminal(120)
    display = LiveMultiDisplay(console, Interrupt(), RunsProgress(members), refresh=False)
    with display:
        for run, event in story(members):
            display.show(event, run)
    text = written(console)
    assert text.count("two of the images are odd") == 1
    for words in ("done already; average cnn 51.3", "failed: the disk is full", "saved, interrupted in stage 1 of 10"):
        assert text.count(words) == 1
    assert text.endswith("\x1b[2K"), "the animated lines are erased"


def test_json_names_the_run_and_quiet_prints_one_line_per_run(members: list[Member]) -> None:
    console, quiet = pipe(), pipe()
    displays: list[Display] = [JsonDisplay(console), QuietDisplay(quiet)]
    for run, event in story(members):
        for display in displays:
            display.show(event, run)
    parsed = [json.loads(line) for line in written(console).splitlines()]
    assert parsed == [{"run": run, **event.to_json()} for run, event in story(members)]
    assert [line.partition(":")[0] for line in written(quiet).splitlines()] == [members[0].name, members[1].name]


@pytest.mark.parametrize(
    ("console", "flags", "kind", "announces"),
    [
        (terminal(80), {}, LiveMultiDisplay, False),
        (pipe(), {}, PlainDisplay, True),
        (terminal(80), {"quiet": True}, QuietDisplay, True),
        (terminal(80), {"as_json": True}, JsonDisplay, True),
    ],
)
def test_the_display_suits_the_console(
    console: Console, flags: dict[str, bool], kind: type[Display], announces: bool, members: list[Member]
) -> None:
    interrupt = Interrupt()
    assert type(make_display(console, interrupt, progress=RunsProgress(members), **flags)) is kind
    assert interrupt.announce is announces


def test_shortened_names_keep_order_and_seed() -> None:
    assert shorten_name("afc-mini-order1-seed1", 30) == "afc-mini-order1-seed1"
    for width in range(40):
        assert len(shorten_name("afc-mini-b10-s5-changed-order12-seed34", width)) <= width
    assert shorten_name("afc-mini-b10-s5-changed-order12-seed34", 25) == "afc-mini-…-order12-seed34"


# Results.


def result(recipe: str, seed: int, cnn: float, **others: float) -> dict[str, object]:
    accuracy = {"cnn": cnn, **others}
    return {
        "recipe": recipe,
        "dataset": "mini",
        "order": 1,
        "seed": seed,
        "stages": [{"classes": 10}, {"classes": 12}],
        "average_incremental_accuracy": accuracy,
        "final_accuracy": {name: value / 2 for name, value in accuracy.items()},
        "seconds": 50.0,
    }


def test_summary_is_mean_and_standard_deviation_by_recipe() -> None:
    results = [
        result("afc", 1, 40.0, nme=50.0),
        result("naive", 1, 20.0),
        result("afc", 2, 44.0, nme=50.0),
        result("afc", 3, 48.0, nme=50.0),
    ]
    console = pipe()
    console.print(results_table(results))
    lines = [" ".join(line.split()) for line in written(console).splitlines() if line.strip()]
    assert lines[:2] == ["average average final final", "recipe n cnn % nme % cnn % nme % time"]
    assert lines[3] == "afc 3 44.0 ± 4.0 50.0 ± 0.0 22.0 ± 2.0 25.0 ± 0.0 2:30"
    assert lines[4] == "naive 1 20.0 - 10.0 - 0:50", "one run has no spread"
    assert spread(None) == "-"


def test_differences_are_between_runs_with_the_same_order_and_seed() -> None:
    console = pipe()
    afc, replay = [40.0, 50.0, 60.0], [39.0, 47.0]
    results = [result("afc", seed, cnn) for seed, cnn in enumerate(afc)]
    results += [result("replay", seed, cnn, nme=1.0) for seed, cnn in enumerate(replay)]
    results += [result("naive", 0, 9.0), *[result("other", seed, 9.0) | {"dataset": "folder"} for seed in (0, 1)]]
    table = differences_table(results)
    assert table is not None
    console.print(table)
    lines = [" ".join(line.split()) for line in written(console).splitlines() if line.strip()]
    assert lines[1] == "minus afc, run by run n cnn cnn"
    assert lines[3:] == ["replay 2 -2.0 ± 1.4 -1.0 ± 0.7"], "one pair, or other images: not compared"
    assert differences_table(results[:3]) is None


def test_summary_fits_80_columns() -> None:
    console = terminal(80)
    console.print(
        results_table([result("afc-cifar100-b50-s10 (train.epochs=1)", seed, 64.0 + seed, nme=64.0) for seed in (1, 2)])
    )
    lines = written(console).splitlines()
    assert max(map(len, lines)) <= 80
    assert "64.0 ± 0.0" in written(console)
    assert "afc-cifar100-b50-s10 " in written(console), "the name is not split"


def test_exit_status_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = RunFinished(RESULT, None)
    expected, unexpected = RunFailed("no room", "a", False, None), RunFailed("oh", "b", True, "Traceback ...\n")
    assert exit_status({"a": fine}, 1, Interrupt()) == 0
    assert exit_status({"a": fine, "b": expected}, 2, Interrupt()) == 2
    assert exit_status({"a": unexpected, "b": expected}, 2, Interrupt()) == 1
    assert exit_status({"a": fine, "b": RunBusy("b")}, 2, Interrupt()) == 4
    assert exit_status({"a": expected, "b": RunBusy("b")}, 2, Interrupt()) == 2
    interrupt = Interrupt()
    interrupt.signal = 15
    assert exit_status({"a": unexpected, "b": Stopped(1, 3, "interrupted", None)}, 2, interrupt) == 143
    assert exit_status({"a": fine}, 2, interrupt) == 143, "one was not begun"
    assert exit_status({"a": fine, "b": fine}, 2, interrupt) == 0, "it came too late to stop anything"
    kept = RunFailed("oh", str(tmp_path), True, "Traceback ...\n")
    (tmp_path / "error.txt").write_text("Traceback ...\n")
    print_failures({"a": fine, "b": expected, "c": unexpected, "d": kept}, 4)
    assert capsys.readouterr().err.splitlines() == [
        "engram: 3 of 4 runs failed",
        "engram: b: no room",
        "engram: c: oh",
        "Traceback ...",
        f"engram: d: oh; the details are in {tmp_path}/error.txt",
    ]
    print_failures({"a": fine}, 1)
    assert capsys.readouterr().err == ""
