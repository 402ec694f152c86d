"""`engram run` with several runs, as a user runs it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engram.cli.options.overrides import configure, configure_all
from engram.cli.parser import parse
from engram.experiment.members import name_runs
from engram.experiment.recipes import recipe
from engram.experiment.run_config import directory_name
from engram.runs.directory import RunDirectory
from helpers import Engram, Outcome, timeless
from test_cli import assert_refused, contents, one_thread, photos, start

__all__ = ["one_thread", "photos"]  # fixtures

SMALL = (
    "--backbone",
    "resnet10",
    "--epochs",
    "1",
    "--finetune-epochs",
    "1",
    "--batch-size",
    "16",
    "--base",
    "2",
    "--increment",
    "2",
)


def several(photos: Path, *more: str | Path) -> list[str | Path]:
    """Four quick runs: two methods with two seeds."""
    return ["run", "afc-folder", "replay-folder", "--data", photos, *SMALL, "--seeds", "1,2", *more]


def name_of(recipe: str, seed: int) -> str:
    options = parse(["run", recipe, "--data", ".", *SMALL, "--seed", str(seed)])[1]
    return directory_name(configure(options, recipe))


def names(*seeds: int) -> list[str]:
    return [name_of(f"{method}-folder", seed) for method in ("afc", "replay") for seed in seeds]


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same four runs, each by a separate command."""
    from engram.cli.main import main

    parent = tmp_path_factory.mktemp("alone")
    for name in names(1, 2):
        recipe, seed = f"{name.partition('-')[0]}-folder", name[-1]
        place = ["--out", str(parent / name), "--quiet", "--no-cache"]
        assert main(["run", recipe, "--data", str(photos), *SMALL, "--seed", seed, *place]) == 0
    return parent


@pytest.fixture(scope="module")
def done(alone: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four runs together, without a display."""
    from engram.cli.main import main

    parent = tmp_path_factory.mktemp("done") / "runs"
    command = several(photos, "--at-once", "3", "--out", parent, "--quiet", "--no-cache")
    assert main([str(argument) for argument in command]) == 0
    return parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["afc-mini-b10-s5", "--order", "1", "--orders", "1,2"], ["--order and --orders exclude each other"]),
        (["afc-mini-b10-s5", "--seed", "1", "--seeds", "1,2"], ["--seed and --seeds exclude each other"]),
        (["afc-mini-b10-s5", "--set", "seed=4", "--seeds", "1,2"], ["--set seed and --seeds"]),
        (["afc-mini-b10-s5", "--orders", "1,2,1"], ["order 1 is given more than once"]),
        (["afc-mini-b10-s5", "--orders", "1,01"], ["order 1 is given more than once"]),
        (["afc-mini-b10-s5", "--seeds", "3,3"], ["seed 3 is given more than once"]),
        (["afc-mini-b10-s5", "--seeds", "1,,2"], ["--seeds takes values separated by commas", "'1,,2'"]),
        (["afc-mini-b10-s5", "--orders", ""], ["--orders takes values", "''"]),
        (["afc-mini-b10-s5", "--seeds", "1,two"], ["--seeds takes whole numbers", "'two'"]),
        (["afc-mini-b10-s5", "--seeds=-1,2"], ["--seeds takes whole numbers", "'-1'"]),
        (["afc-mini-b10-s5", "--orders", "1,backwards"], ["'backwards'", "natural"]),
        (["afc-mini-b10-s5", "afc-mini-b10-s5"], ["recipe afc-mini-b10-s5 is given more than once"]),
        (["afc-mini-b10-s5", "replay-mini-b10-s6"], ["'replay-mini-b10-s6'", "did you mean"]),
        (["afc-mini-b10-s5", "--seeds", "1,2", "--at-once", "0"], ["--at-once must be at least 1, got 0"]),
        (["afc-mini-b10-s5", "--at-once", "some"], ["--at-once", "whole number"]),
        (
            ["afc-mini-b10-s5", "afc-mini-b10-s10", "--stop-after-stage", "11"],
            ["--stop-after-stage 11", "the longest of the runs has 11 stages, 0 (the base) to 10"],
        ),
        (["afc-mini-b10-s5", "naive-mini-b10-s5", "--lambda-disc", "2"], ["--lambda-disc", "naive"]),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_a_wrong_input_gets_one_sentence(
    arguments: list[str], words: list[str], engram: Engram, tmp_path: Path
) -> None:
    assert_refused(engram("run", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_every_combination_is_a_run() -> None:
    typed = ["run", "afc-mini-b10-s5", "--orders", "2,seed:7,natural", "--seeds", "1, 3", "replay-mini-b10-s5"]
    found = [(config.recipe, config.order, config.seed) for config in configure_all(parse(typed)[1])]
    assert found == [
        (recipe, order, seed)
        for recipe in ("afc-mini-b10-s5", "replay-mini-b10-s5")
        for order in ("2", "seed:7", "natural")
        for seed in (1, 3)
    ]
    single = configure_all(parse(["run", "afc-mini-b10-s5", "--orders", "2", "--seeds", "5"])[1])
    assert [(config.order, config.seed) for config in single] == [("2", 5)]


def test_one_combination_is_a_single_run(engram: Engram, photos: Path, tmp_path: Path) -> None:
    run = ("run", "replay-folder", "--data", photos, *SMALL, "--orders", "1", "--seeds", "3", "--stop-after-stage", "0")
    first = name_of("replay-folder", 3)
    for name in (first, f"{first}-2"):
        outcome = engram(*run)
        assert outcome.status == 0
        assert f"engram resume runs/{name}" in outcome.out
        assert (tmp_path / "runs" / name / "run.json").exists()
    assert_refused(engram(*run, "--out", f"runs/{name}"), "not empty", "engram resume")


def test_runs_side_by_side_give_the_same_results_as_single_runs(alone: Path, done: Path) -> None:
    assert sorted(path.name for path in done.iterdir()) == names(1, 2)
    for name in names(1, 2):
        assert timeless(done / name) == timeless(alone / name)
        for file in ("000", "001", "002"):
            stage = Path("stages") / f"{file}.safetensors"
            assert (done / name / stage).read_bytes() == (alone / name / stage).read_bytes()


def test_lines_and_summary_and_the_same_again(engram: Engram, photos: Path, alone: Path, tmp_path: Path) -> None:
    command = several(photos, "--at-once", "2")
    outcome = engram(*command)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "4 runs, at most 2 at a time, in runs"
    assert "\x1b" not in outcome.out
    for name in names(1, 2):
        said = [line for line in lines if line.startswith(f"{name}: ")]
        assert said[-1].startswith(f"{name}: average cnn ")
        assert sum(" classes, cnn " in line for line in said) == 3
        assert timeless(tmp_path / "runs" / name) == timeless(alone / name), "also with shared base stages"
    assert sum("base: trained by another run" in line for line in lines) == 2
    rows = [line.split(" (")[0].strip() for line in lines if " ± " in line]
    assert rows == ["afc-folder", "replay-folder", "replay-folder"], "and replay minus afc"
    assert lines[-2] == "time: 2 of 4 runs did not train the base stage but reused it"
    assert lines[-1] == "next: engram report runs"
    before = contents(tmp_path / "runs")
    again = engram(*command)
    assert again.status == 0
    assert again.out.count("done already") == 4
    assert again.out.partition("recipe")[2] == outcome.out.partition("recipe")[2], "the same summary"
    assert contents(tmp_path / "runs") == before
    manifest = json.loads((tmp_path / "runs" / names(1)[0] / "run.json").read_text())
    assert manifest["command"].startswith("engram run afc-folder replay-folder --data ")


def test_dry_run_is_a_table_of_what_is_left(engram: Engram, photos: Path, done: Path, tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    parent.mkdir()
    shutil.copytree(done / names(1)[0], parent / names(1)[0])
    stopped = ("run", "replay-folder", "--data", photos, *SMALL, "--seed", "2", "--stop-after-stage", "1", "--no-cache")
    assert engram(*stopped, "--out", parent / names(2)[1]).status == 0
    before = contents(parent)
    outcome = engram(*several(photos, "--dry-run"))
    assert outcome.status == 0
    rows = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines() if line.lstrip().startswith("runs/")}
    assert list(rows) == [f"runs/{name}" for name in names(1, 2)]
    assert [row[0] for row in rows.values()] == ["done", "new", "new", "incomplete,"]
    assert rows[f"runs/{names(2)[1]}"] == ["incomplete,", "2", "of", "3", "stages", rows[f"runs/{names(2)[1]}"][-1]]
    plan = json.loads(engram(*several(photos, "--dry-run", "--json")).out)
    steps = {run["run"]: run["steps"] for run in plan["runs"]}
    assert steps[names(1)[0]] == 0
    assert 0 < steps[names(2)[1]] < steps[names(1)[1]]
    assert plan["total_steps"] == sum(steps.values())
    assert plan["shared_bases"] == []
    assert contents(parent) == before
    shared = engram(*several(photos, "--dry-run", "--out", "elsewhere")).out
    for seed in (1, 2):
        afc, replay = names(seed)
        assert f"one base stage is trained once for 2 runs: {afc}, {replay}" in shared
    assert "one base stage" not in engram(*several(photos, "--dry-run", "--out", "elsewhere", "--no-cache")).out


def test_a_failing_run_is_named_at_the_end(engram: Engram, photos: Path, done: Path, tmp_path: Path) -> None:
    """A damaged checkpoint is found when its run is continued; the other three runs are not affected."""
    parent = Path(shutil.copytree(done, tmp_path / "runs"))
    spoilt = parent / names(2)[0]
    shutil.rmtree(parent / names(2)[1])
    result = json.loads((spoilt / "result.json").read_text())
    (spoilt / "result.json").write_text(json.dumps(result | {"stages": result["stages"][:2]}))
    (spoilt / "checkpoint" / "state.safetensors").write_bytes(b"nothing")
    outcome = engram(*several(photos, "--out", parent, "--no-cache"))
    assert outcome.status == 2
    failed, why = outcome.err.splitlines()
    assert failed == "engram: 1 of 4 runs failed"
    assert why.startswith(f"engram: {spoilt.name}: the checkpoint ")
    assert "damaged" in why
    assert timeless(parent / names(2)[1]) == timeless(done / names(2)[1])
    assert f"{spoilt.name}: failed: the checkpoint" in outcome.out
    quiet = engram(*several(photos, "--out", parent, "--no-cache", "--quiet"))
    assert quiet.status == 2
    assert [line.partition(":")[0] for line in quiet.out.splitlines()] == [names(1)[0], *names(1, 2)[2:]]
    assert quiet.err == outcome.err


def test_a_run_whose_result_lost_its_metrics_is_continued(
    engram: Engram, photos: Path, done: Path, tmp_path: Path
) -> None:
    parent = Path(shutil.copytree(done, tmp_path / "runs"))
    spoilt = parent / names(1)[0]
    result = json.loads((spoilt / "result.json").read_text())
    del result["average_incremental_accuracy"]
    (spoilt / "result.json").write_text(json.dumps(result))
    outcome = engram(*several(photos, "--out", parent))
    assert (outcome.status, outcome.err) == (0, "")
    assert timeless(spoilt) == timeless(done / spoilt.name)
    assert engram("resume", spoilt).out.startswith(f"{spoilt} is finished already; nothing to do\n")


def test_another_run_in_a_directory_stops_all_before_they_begin(
    engram: Engram, photos: Path, done: Path, tmp_path: Path
) -> None:
    parent = tmp_path / "runs"
    parent.mkdir()
    afc, replay = names(1)
    shutil.copytree(done / replay, parent / afc)
    before = contents(parent)
    assert_refused(
        engram(*several(photos)),
        afc,
        "holds a run with other settings",
        "exemplars_only is None there and False here",
        "--out",
    )
    assert contents(parent) == before
    assert_refused(engram(*several(photos, "--out", parent / names(1)[0])), "is itself a run")


def test_json_has_the_name_of_the_run(engram: Engram, photos: Path, tmp_path: Path) -> None:
    outcome = engram(*several(photos, "--json", "--at-once", "4"))
    events = outcome.events()
    assert {event["run"] for event in events} == set(names(1, 2))
    finished = {event["run"]: event["result"] for event in events if event["event"] == "run_finished"}
    assert finished == {name: json.loads((tmp_path / "runs" / name / "result.json").read_text()) for name in finished}
    assert len(finished) == 4


def test_runs_that_another_process_does_are_left_to_it(photos: Path, tmp_path: Path, engram: Engram) -> None:
    command = ["run", "replay-folder", "--data", photos, *SMALL, "--seeds", "1,2", "--out", "both"]
    first, second = (name_of("replay-folder", seed) for seed in (1, 2))
    assert engram(*command, "--stop-after-stage", "0", "--quiet").status == 0
    held = RunDirectory.open(tmp_path / "both" / first, {})
    outcome = engram(*command)
    held.close()
    assert outcome.status == 4
    assert outcome.err == (
        "engram: another process is doing 1 of the 2 runs; when it has ended, the same command "
        f"shows all results: {first}\n"
    )
    assert f"{first}: left to another process, which is doing it now" in outcome.out
    assert f"{second}: average" in outcome.out
    again = engram(*command)
    assert (again.status, again.err) == (0, "")


def cut_off(photos: Path, tmp_path: Path, number: signal.Signals, *flags: str) -> tuple[Outcome, list[str | Path]]:
    """Send a signal twice when a run is in its second stage; return the outcome and the command."""
    command = several(photos, "--epochs", "4", "--threads", "1", "--at-once", "3", "--out", "cut")
    process = start(*command, *flags, cwd=tmp_path)
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if ": base: " in line or '"event": "stage_finished"' in line:
            for _ in range(2):  # as `timeout` does: to the process, and to its group
                process.send_signal(number)
            break
    out, err = process.communicate(timeout=60)
    return Outcome(process.returncode, "".join(seen) + out, err), command


def test_ctrl_c_saves_every_run_and_the_same_command_continues(photos: Path, tmp_path: Path, engram: Engram) -> None:
    cut, command = cut_off(photos, tmp_path, signal.SIGINT, "--json")
    assert (cut.status, cut.err) == (130, "engram: saving... (Ctrl-C again to quit at once)\n")
    last = {event["run"]: event["event"] for event in cut.events()}
    assert len(last) == 3, "the fourth was not begun"
    assert set(last.values()) == {"stopped"}
    dry = engram(*command, "--dry-run").out
    assert dry.count("incomplete") == 3 + 1
    assert " and in main, epoch " in dry
    again = engram(*command)
    assert (again.status, again.err) == (0, "")
    assert engram(*command, "--out", "whole", "--no-cache", "--quiet").status == 0
    runs = sorted(place.name for place in (tmp_path / "whole").iterdir())
    assert len(runs) == 4
    for name in runs:
        assert timeless(tmp_path / "cut" / name) == timeless(tmp_path / "whole" / name)


def test_a_signal_prints_how_to_continue(photos: Path, tmp_path: Path, engram: Engram) -> None:
    cut, command = cut_off(photos, tmp_path, signal.SIGTERM)
    assert cut.status == 143
    assert cut.err.startswith("engram: saving...")
    text = cut.out.splitlines()
    assert text[-2] == "3 stopped and saved, 1 not begun; to continue, the same command again:"
    assert text[-1] == shlex.join(["engram", *map(str, command)])
    for parent, flag in (("one", ("--stop-after-stage", "0")), ("other", ("--stop_after_stage=0",))):
        stopped = engram(*several(photos), *flag, "--out", parent)
        assert stopped.status == 0
        text = stopped.out.splitlines()
        assert text[-2] == "4 stopped and saved; to continue, the same command again without --stop-after-stage:"
        assert text[-1] == shlex.join(["engram", *map(str, several(photos)), "--out", parent])


# Runs that ignore requests to stop.
DEAF = """
import sys
from engram.cli.main import main
from engram.experiment.parallel import Workers
Workers._stopping = lambda self: False
sys.exit(main(sys.argv[1:]))
"""


def test_a_second_ctrl_c_quits_at_once(photos: Path, tmp_path: Path) -> None:
    command = several(photos, "--epochs", "4000", "--threads", "1", "--at-once", "2")
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, *map(str, command)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("4 runs")
    while not list((tmp_path / "runs").glob("*/events.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "engram: saving... (Ctrl-C again to quit at once)\n"
    for _ in range(15):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    err = process.communicate(timeout=60)[1]  # the main thread shares one core with two busy ones
    assert process.returncode == 130
    assert err == "engram: quit at once; the same command again continues from the last checkpoints\n"


def test_threads_are_those_the_runs_began_with(photos: Path, tmp_path: Path, engram: Engram) -> None:
    stop = ("--stop-after-stage", "0", "--no-cache", "--quiet")
    run = ("run", "replay-folder", "--data", photos, *SMALL, *stop)
    assert engram(*run, "--seed", "1", "--threads", "2", "--out", f"runs/{names(1)[1]}").status == 0
    torch.set_num_threads(1)
    outcome = engram(*several(photos, *stop))
    assert (outcome.status, outcome.err, torch.get_num_threads()) == (0, "", 2)
    assert engram(*run, "--seed", "2", "--threads", "1", "--out", f"other/{names(2)[1]}").status == 0
    shutil.copytree(tmp_path / "runs" / names(1)[1], tmp_path / "other" / names(1)[1])
    outcome = engram(*several(photos, *stop, "--out", "other"))
    assert outcome.status == 0
    assert "different numbers of CPU threads" in outcome.err
    torch.set_num_threads(1)


def test_given_class_orders_have_different_names() -> None:
    orders = ("natural", "seed:7", "2", "a,b,c", "c,b,a")
    names = [directory_name(replace(recipe("afc-folder"), order=order)) for order in orders]
    assert names[:3] == [f"afc-folder-order{order}-seed1" for order in ("natural", "seed-7", "2")]
    assert all(re.fullmatch("afc-folder-ordergiven-[0-9a-f]{8}-seed1", name) for name in names[3:])
    assert names[3] != names[4]
    assert directory_name(replace(recipe("afc-folder"), order="a, b,c ")) == names[3]
    assert list(name_runs([replace(recipe("afc-folder"), order=order) for order in orders])) == names


def test_a_class_order_is_read_from_a_file(engram: Engram, tmp_path: Path) -> None:
    for number, text in enumerate(("fox\ngirl\n elk \n", "fox,girl, elk", "\ufefffox,\r\ngirl,\r\n\r\nelk,")):
        Path(f"{number}.txt").write_text(text, encoding="utf-8", newline="")
        for flags in (["--order", f"@{number}.txt"], ["--set", f"order=@{tmp_path}/{number}.txt"]):
            (config,) = configure_all(parse(["run", "afc-folder", *flags])[1])
            assert config == replace(recipe("afc-folder"), order="fox,girl,elk")
    Path("other.txt").write_text("elk\nfox\ngirl")
    both = configure_all(parse(["run", "afc-folder", "--orders", "@0.txt,2,@other.txt"])[1])
    assert [config.order for config in both] == ["fox,girl,elk", "2", "elk,fox,girl"]


def test_an_unreadable_file_of_a_class_order_is_refused(engram: Engram, tmp_path: Path) -> None:
    for name, content in (("empty", b" \n,\n"), ("one", b"3\n"), ("picture", b"\x89PNG\xff"), ("wrong", b"a\nb\n")):
        Path(name).write_bytes(content)
    for name, said in (
        ("nowhere", ["there is no file nowhere"]),
        ("", ["cannot be read"]),
        (".", ["cannot be read"]),
        ("empty", ["empty", "is empty"]),
        ("one", ["names only '3'"]),
        ("picture", ["not text in UTF-8"]),
    ):
        expected = [*said, "every class, one per line or separated by commas"]
        assert_refused(engram("run", "afc-mini-b10-s5", "--order", f"@{name}", "--dry-run"), *expected)
        assert_refused(engram("run", "afc-mini-b10-s5", "--orders", f"1,@{name}", "--dry-run"), *expected)
    assert_refused(
        engram("run", "afc-mini-b10-s5", "--order", "@wrong", "--dry-run"), "names 'a', but there is no such class"
    )
    assert_refused(engram("run", "afc-mini-b10-s5", "--order", "wrong", "--dry-run"), "'wrong' is none of", "@FILE")
