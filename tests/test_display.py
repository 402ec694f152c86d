"""The displays, with made-up events."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from engram import ImageStore, RunConfig, run
from engram.cli import display as display_module
from engram.cli.display import (
    AnimatedDisplay,
    Display,
    JsonDisplay,
    LiveDisplay,
    PlainDisplay,
    QuietDisplay,
    fit_columns,
    follow,
    make_display,
    row_cells,
)
from engram.cli.signals import SAVING, Interrupt
from engram.cli.streams import printable, tell
from engram.cli.text import (
    clock,
    duration,
    make_console,
    make_table,
    print_line,
    print_table,
    shorten,
    stage_name,
    summary_line,
    summary_table,
)
from engram.core.events import (
    Checkpointed,
    EpochFinished,
    Event,
    PhaseStarted,
    Progress,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Warned,
    Working,
)
from engram.experiment.session import Session
from engram.experiment.stage_work import AFTER, StepTimer, TimeEstimate

RESULT = {
    "recipe": "afc-mini-b10-s5",
    "average_incremental_accuracy": {"cnn": 51.26, "nme": 49.0},
    "final_accuracy": {"cnn": 40.04, "nme": 41.0},
    "forgetting": {"cnn": None, "nme": 10.0},
    "backward_transfer": {"cnn": None, "nme": -9.5},
    "seconds": 75.4,
}


def progress(stage: int = 1, stages: int = 3, done: float = 0.42) -> Progress:
    terms = {"classification": 0.8, "discrepancy": 0.434}
    return Progress(stage, stages, "main", 4, 12, 7, 40, terms, 3214.4, done, 72.0)


def finished(stage: int, stages: int = 3) -> StageFinished:
    accuracy = {"cnn": 60.0 - stage, "nme": 58.0 - stage}
    average = {"cnn": 60.0 - stage / 2, "nme": 58.0 - stage / 2}
    return StageFinished(stage, stages, 10 + 2 * stage, accuracy, {}, average, 4.25)


def events(stages: int = 3) -> Iterator[Event]:
    """Events of a run with that many stages."""
    yield RunStarted("afc-mini-b10-s5", "afc", "runs/here", stages, {}, False)
    for stage in range(stages):
        yield StageStarted(stage, stages, ["cup", "clock"], 10 + 2 * stage, 600, 100)
        yield PhaseStarted(stage, "main", 12, 600, 40)
        yield progress(stage, stages, (stage + 0.5) / stages)
        yield EpochFinished(stage, "main", 12, {"classification": 0.8}, 0.1, 1.0)
        for what in ("importance", "exemplars", "evaluate"):
            yield Working(stage, stages, what)
        yield Warned("two of the images are odd")
        yield finished(stage, stages)
    yield RunFinished(RESULT, "runs/here")


def terminal(width: int, height: int = 24) -> Console:
    # With a height rich does not ask a real terminal; without colours the text can be compared.
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None, markup=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(display: AnimatedDisplay) -> list[str]:
    """Return the animated lines as they are now."""
    console = display.console
    paper = Console(file=io.StringIO(), width=console.width, height=console.height, color_system=None)
    paper.print(display.render())
    return written(paper).splitlines()


def pipe() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_there_are_always_three_animated_lines_that_fit(width: int) -> None:
    display = LiveDisplay(terminal(width), Interrupt(), refresh=False)
    with display:
        for event in events():
            display.show(event)
            lines = lines_of(display)
            assert len(lines) == 3
            assert max(map(len, lines)) <= width


def test_animated_lines_show_stage_progress_and_speed() -> None:
    display = LiveDisplay(terminal(120), Interrupt(), refresh=False)
    display.show(progress(stage=1, stages=11))
    bar, where, rate = lines_of(display)
    assert bar.endswith("42% 1:12 left")
    assert where == "stage 1 of 10  main  epoch 4/12  step 7/40"
    assert rate == "3,214 images/s  loss 1.234 (classification 0.800, discrepancy 0.434)"
    display.show(Working(0, 11, "evaluate"))
    display.show(StageStarted(0, 11, ["a"], 1, 5, 0))
    assert lines_of(display)[1:] == ["base  1 new class", ""]
    display.show(Working(0, 11, "importance"))
    assert lines_of(display)[1] == "base  finishing the stage"


def test_a_lesson_has_its_number_and_plain_names_of_phases() -> None:
    live = LiveDisplay(terminal(120), Interrupt(), refresh=False, lesson=3)
    live.show(StageStarted(1, 2, ["a", "b"], 4, 50, 10))
    assert lines_of(live)[1] == "lesson 3  2 new classes"
    live.show(PhaseStarted(1, "main", 12, 50, 40))
    assert lines_of(live)[1] == "lesson 3  training"
    live.show(progress(stage=1, stages=2))
    assert lines_of(live)[1] == "lesson 3  training  epoch 4/12  step 7/40"
    live.show(PhaseStarted(1, "balance", 12, 50, 40))
    assert lines_of(live)[1] == "lesson 3  fine-tuning"
    console = pipe()
    PlainDisplay(console, 0.0, lesson=3).show(progress(stage=1, stages=2))
    assert written(console).startswith("lesson 3, training, epoch 4/12, loss ")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now = 0.0
    meter = StepTimer(100, lambda: now)
    shown: list[float] = []
    for number in range(100):  # as on a GPU: the last of every four steps takes all the time
        now += 0.4 if number % 4 == 3 else 0.0
        meter.step()
        now += 0.01
        shown.append(meter.images_per_second())
    assert shown[60:] == pytest.approx([400 / 0.44] * 40, rel=0.1)
    rate = 0.0
    for _ in range(20):  # slower now: only the last seconds count
        now += 0.125
        meter.step()
        now += 0.25
        rate = meter.images_per_second()
    assert rate == pytest.approx(100 / 0.375, rel=0.1)


def test_time_left_ignores_compilation_and_includes_the_work_after_a_stage(
    store: ImageStore, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(meter: StepTimer) -> float:
        meter.steps += 1
        return 100.0 if meter.steps == 1 else 1.0

    note = TimeEstimate.stage

    def reports(after: dict[str, float]) -> list[Progress]:
        monkeypatch.setattr(TimeEstimate, "stage", lambda outlook, stage, _: note(outlook, stage, after))
        return [event for event in run(config, store) if isinstance(event, Progress)]

    monkeypatch.setattr(StepTimer, "step", step)
    monkeypatch.setattr(StepTimer, "due", lambda _: True)
    plans = Session(config, store).plan()
    base = plans[0].phases[0]
    of_a_step = base.work / (base.epochs * base.steps)
    total = sum(phase.work for plan in plans for phase in plan.phases)
    after = AFTER * sum(plan.phases[0].work / plan.phases[0].epochs for plan in plans)
    none, first, *others = reports({})
    assert none.seconds_left is None
    assert first.seconds_left == pytest.approx((total + after) / of_a_step - 2), "one second per step"
    for one, other in zip(others, reports({"train": 50.0, "importance": 3.0, "evaluate": 2.0})[2:], strict=True):
        assert one.seconds_left is not None
        assert other.seconds_left is not None
        measured = other.seconds_left - one.seconds_left
        assert measured == (pytest.approx(5.0, rel=0.3) if one.stage == 2 else 0.0)


def test_an_interrupt_shows_at_once() -> None:
    interrupt = Interrupt()
    display = LiveDisplay(terminal(80), interrupt, refresh=False)
    display.show(progress())
    assert SAVING not in "\n".join(lines_of(display))
    interrupt.signal = 2
    assert lines_of(display)[2] == SAVING


@pytest.mark.parametrize(
    ("width", "header", "base", "last"),
    [
        (40, "stage  classes   cnn %   nme %", " base       10    60.0    58.0", "   50      110    10.0     8.0"),
        (
            120,
            "stage  classes   cnn %   nme %  cnn average  nme average  seconds",
            " base       10    60.0    58.0         60.0         58.0      4.2",
            "   50      110    10.0     8.0         35.0         33.0      4.2",
        ),
    ],
)
def test_finished_stages_are_rows_that_stay(width: int, header: str, base: str, last: str) -> None:
    console = terminal(width)
    follow(events(51), LiveDisplay(console, Interrupt(), refresh=False))
    # A terminal shows the part of a line after its last control sequence.
    lines = [re.split(r"\x1b\[[0-9?]*[A-Za-z]|\r", line)[-1] for line in written(console).splitlines()]
    rows = [line for line in lines if re.match(r" +(base|\d+)  +\d", line)]
    assert lines.count(header) == 1
    assert len(rows) == 51
    assert (rows[0], rows[-1]) == (base, last)


def test_only_a_later_ctrl_c_quits_at_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with Interrupt() as interrupt:
        assert not interrupt()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):  # at once: the same request
            os.kill(os.getpid(), number)
        assert interrupt()
        assert interrupt.status == 143
        monkeypatch.setattr("engram.cli.signals.AGAIN_SECONDS", 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == f"engram: {SAVING}\n"
        os.kill(os.getpid(), signal.SIGHUP)
    assert [signal.getsignal(number) for number in numbers] == before
    with Interrupt(announce=False):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # it quits already
    assert signal.signal(signal.SIGINT, before[0]) == signal.SIG_IGN


def test_a_warning_is_shown_once() -> None:
    for display, console in (
        (LiveDisplay(c := terminal(80), Interrupt(), refresh=False), c),
        (PlainDisplay(p := pipe()), p),
    ):
        follow(events(), display)
        assert written(console).count("two of the images are odd") == 1


def test_plain_lines_have_no_control_characters_and_are_few() -> None:
    console = pipe()
    follow(events(), PlainDisplay(console))
    text = written(console)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert text.splitlines() == [
        "afc-mini-b10-s5: base and 2 stages, in runs/here",
        "warning: two of the images are odd",
        "base: 10 classes, cnn 60.0, nme 58.0; average cnn 60.0, nme 58.0; 4.2 s",
        "stage 1 of 2: 12 classes, cnn 59.0, nme 57.0; average cnn 59.5, nme 57.5; 4.2 s",
        "stage 2 of 2: 14 classes, cnn 58.0, nme 56.0; average cnn 59.0, nme 57.0; 4.2 s",
    ]


def test_plain_progress_is_printed_from_time_to_time() -> None:
    often, seldom = pipe(), pipe()
    for console, seconds in ((often, 0.0), (seldom, 30.0)):
        display = PlainDisplay(console, seconds)
        for _ in range(5):
            display.show(progress())
    assert written(seldom) == ""
    line = "stage 1 of 2, main, epoch 4/12, loss 1.234 (classification 0.800, discrepancy 0.434), 3,214 images/s, "
    assert written(often).splitlines() == [line + "42% done, 1:12 left"] * 5


def test_json_has_every_event() -> None:
    console = pipe()
    follow(events(), JsonDisplay(console))
    parsed = [json.loads(line) for line in written(console).splitlines()]
    assert parsed == [event.to_json() for event in events()]
    assert "progress" in {event["event"] for event in parsed}


def test_json_has_no_number_that_json_cannot_hold() -> None:
    console = pipe()
    with pytest.raises(ValueError, match="not JSON compliant"):
        JsonDisplay(console).show(EpochFinished(0, "main", 1, {"loss": float("nan")}, 0.1, 1.0))
    assert not written(console)


def test_quiet_shows_nothing_and_follow_returns_the_last_event() -> None:
    stopped = Stopped(1, 3, "interrupted", "runs/here")
    assert follow([Checkpointed(1, "main", 2), stopped], QuietDisplay(pipe())) is stopped


def test_an_error_ends_the_live_area_and_closes_the_run() -> None:
    closed: list[bool] = []

    def failing() -> Iterator[Event]:
        try:
            yield progress()
            raise RuntimeError("no")
        finally:
            closed.append(True)

    console = terminal(80)
    with pytest.raises(RuntimeError, match="no"):
        follow(failing(), LiveDisplay(console, Interrupt(), refresh=False))
    assert closed == [True]
    assert written(console).endswith("\x1b[2K"), "the animated lines are erased"
    assert "\x1b[?25h" in written(console), "the cursor is visible again"


@pytest.mark.parametrize(
    ("console", "flags", "kind", "announces"),
    [
        (terminal(80), {}, LiveDisplay, False),
        (pipe(), {}, PlainDisplay, True),
        (terminal(80), {"quiet": True}, QuietDisplay, True),
        (terminal(80), {"as_json": True}, JsonDisplay, True),
    ],
)
def test_the_display_suits_the_console(
    console: Console, flags: dict[str, Any], kind: type[Display], announces: bool
) -> None:
    interrupt = Interrupt()
    assert type(make_display(console, interrupt, **flags)) is kind
    assert interrupt.announce is announces


def test_columns_are_dropped_in_order() -> None:
    cells = row_cells(finished(3, 6))
    everything = ["stage", "classes", "cnn %", "nme %", "cnn average", "nme average", "seconds"]
    assert [title for title, _ in fit_columns(cells, 120)] == everything
    assert [title for title, _ in fit_columns(cells, 60)] == everything[:-1]
    assert [title for title, _ in fit_columns(cells, 40)] == everything[:4]
    assert [title for title, _ in fit_columns(cells, 10)] == ["stage", "cnn %", "nme %"]


def test_words_and_numbers() -> None:
    assert (stage_name(0, 11), stage_name(3, 11)) == ("base", "stage 3 of 10")
    assert [duration(s) for s in (4.21, 59.96, 3723)] == ["4.2 s", "1:00", "1:02:03"]
    assert [clock(s) for s in (4.21, 65, None)] == ["0:04", "1:05", "-"]
    assert shorten(["bed", "castle"]) == "bed, castle"
    assert shorten(["bed", "castle", "clock", "cup"], 16) == "bed, castle, +2"
    assert shorten(["a name that is far too long"], 10) == "a name that is far too long"


def test_summary_shows_a_dash_for_undefined_values() -> None:
    console = pipe()
    console.print(summary_table(RESULT))
    rows = {" ".join(line.split()[:-2]): line.split()[-2:] for line in written(console).splitlines() if line.strip()}
    assert rows["average incremental accuracy"] == ["51.3", "49.0"]
    assert rows["forgetting"] == ["-", "10.0"]
    assert rows["backward transfer"] == ["-", "-9.5"]
    line = summary_line(RunFinished(RESULT, "runs/here"))
    assert line == ("afc-mini-b10-s5: average cnn 51.3, nme 49.0; final cnn 40.0, nme 41.0; 1:15 (runs/here)")


def test_a_closed_terminal_is_not_an_error_but_a_full_disk_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        error = errno.EIO

        def write(self, text: str) -> int:
            raise OSError(self.error, os.strerror(self.error))

        def isatty(self) -> bool:
            return True

    stream = Stream()
    monkeypatch.setattr("sys.stdout", stream)
    console = make_console()
    assert console.is_terminal
    console.print("into nothing")
    stream.error = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        console.print("onto a full disk")


# Text that comes from names of files, classes and runs.

HOSTILE = "a\x1b]0;title\x07b\x1b[31mc\nd\u202ee\udcfff"
ESCAPED = r"a\x1b]0;title\x07b\x1b[31mc\nd\u202ee\udcfff"


def test_text_is_escaped_where_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert printable(HOSTILE) == ESCAPED
    assert printable(ESCAPED) == ESCAPED
    assert printable("é 猫 ± …") == "é 猫 ± …"
    console = make_console()
    table = make_table(["class", "two\nlines"])
    table.add_row(HOSTILE, "1")
    print_line(console, HOSTILE)
    print_table(console, table)
    PlainDisplay(console).show(Warned(HOSTILE))
    JsonDisplay(console).show(Warned(HOSTILE))
    tell(HOSTILE)
    printed = capsys.readouterr()
    line, *rows, warning, as_json = filter(str.strip, printed.out.splitlines())
    assert line == ESCAPED
    assert rows[-1].split() == [ESCAPED, "1"]
    assert len(rows) == 4, "two lines of the heading, a rule, one row"
    assert warning == f"warning: {ESCAPED}"
    assert json.loads(as_json)["message"] == HOSTILE
    assert printed.err == f"engram: {ESCAPED}\n"
    for renderable in (HOSTILE, Text(HOSTILE), Padding(HOSTILE)):
        console.print(renderable)
        shown = capsys.readouterr().out
        assert shown.replace("\n", "").isprintable()


def test_a_live_display_escapes_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with LiveDisplay(make_console(), Interrupt(), refresh=False) as display:
        display.show(RunStarted(HOSTILE, "afc", None, 2, {}, False))
        display.show(PhaseStarted(1, HOSTILE, 12, 50, 40))
    shown = capsys.readouterr().out
    assert ESCAPED in shown
    assert "\x1b]0" not in shown
    assert "\x1b[31m" not in shown


def test_nothing_is_printed_in_another_way() -> None:
    """Every module prints with print_line, tell or a console of make_console, which escape."""
    folder = Path(display_module.__file__).parent
    allowed = {"streams.py": {"print"}, "main.py": {"print"}, "parser.py": {"print"}, "text.py": set()}
    for path in sorted(folder.rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = {call.id for call in calls if isinstance(call, ast.Name)} & {"print", "Console"}
        assert named <= allowed.get(path.name, set()), path
