"""What must not harm a run, or anything outside it: links, pipes, damaged numbers and hostile JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import make_config, make_store
from engram import EngramError, open_run, resume, run
from engram.cli.commands.list_all import list_runs
from engram.experiment.members import progress_of
from engram.experiment.runner import settle
from engram.report.groups import load_runs
from engram.reproduce.results_files import merge, read_file, read_results, write_file
from helpers import timeless

CHECKPOINT = "checkpoint/state.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, and one that was stopped after its second stage."""
    folder = tmp_path_factory.mktemp("runs")
    list(run(make_config("replay"), make_store(), folder / "done"))
    list(run(make_config("replay"), make_store(), folder / "stopped", stop_after_stage=1))
    return folder


@pytest.fixture
def stopped(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "stopped", tmp_path / "runs" / "stopped"))


@pytest.fixture
def done(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "done", tmp_path / "runs" / "done"))


def resumed(directory: Path) -> list[Any]:
    return list(resume(directory, make_store()))


def progress(directory: Path) -> Any:
    return progress_of(directory, settle(make_config("replay"), make_store()), make_store().fingerprint())


READERS: dict[str, Callable[[Path], Any]] = {
    "report": lambda directory: load_runs([directory]),
    "open_run": open_run,
    "progress": progress,
    "results": lambda directory: read_results([directory]),
    "resume": resumed,
}


def refused(directory: Path) -> dict[str, str]:
    """The sentence of each reader that refuses the run; any other error fails."""
    found: dict[str, str] = {}
    for name, read in READERS.items():
        try:
            read(directory)
        except EngramError as error:
            found[name] = str(error)
    assert all("\n" not in sentence and len(sentence) < 700 for sentence in found.values())
    return found


@pytest.mark.parametrize("name", ["events.jsonl", "checkpoint", "stages", CHECKPOINT, "error.txt", ".lock", "run.json"])
def test_nothing_is_written_through_a_link(stopped: Path, tmp_path: Path, name: str) -> None:
    outside, link = tmp_path / "outside", stopped / name
    if link.is_dir():
        shutil.move(link, outside)
    else:
        outside.write_bytes(link.read_bytes() if link.exists() else b"")
        link.unlink(missing_ok=True)
    link.symlink_to(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    if name == "error.txt":
        resumed(stopped)
        assert not os.path.lexists(link), "it was removed"
    else:
        with pytest.raises(EngramError, match=f"{re.escape(str(link))}.* link"):
            resumed(stopped)
    assert {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()} == before


@pytest.mark.parametrize("name", ["events.jsonl", ".lock", CHECKPOINT, "run.json", "result.json"])
def test_nothing_is_written_through_a_hard_link(stopped: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    os.link(stopped / name, outside)
    before = outside.read_bytes()
    if name in ("events.jsonl", ".lock"):
        with pytest.raises(EngramError, match=f"{re.escape(str(stopped / name))} is a hard link"):
            resumed(stopped)
    else:
        resumed(stopped)
    assert outside.read_bytes() == before


def test_a_run_that_is_reached_by_a_link_is_a_run(stopped: Path, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(stopped)
    resumed(tmp_path / "link")
    assert timeless(stopped) == timeless(runs / "done")


# Who uses a file, and must refuse it if it is not a regular file.
USED_BY = {
    "run.json": {"report", "open_run", "progress", "results", "resume"},
    "result.json": {"report"},
    "events.jsonl": {"report", "results", "resume"},
    CHECKPOINT: {"open_run", "resume"},
    "stages/001.safetensors": {"report", "results"},
    ".lock": {"resume"},
}


@pytest.mark.parametrize("name", USED_BY)
@pytest.mark.parametrize("kind", ["pipe", "endless device", "folder"])
def test_only_regular_files_are_read(runs: Path, tmp_path: Path, name: str, kind: str) -> None:
    done = Path(shutil.copytree(runs / "done", tmp_path / "runs" / "bad"))
    shutil.copytree(runs / "done", tmp_path / "runs" / "good")
    file = done / name
    file.unlink()
    {"pipe": os.mkfifo, "endless device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](file)
    assert refused(done).keys() >= USED_BY[name]
    assert [row["status"] for row in list_runs(tmp_path / "runs") if row["directory"].endswith("good")] == ["finished"]


@pytest.mark.parametrize("words", [b'"classes": 4', b'"cnn": ', b'"seconds": ', b'"records"'])
def test_a_changed_number_beside_the_tensors_of_a_checkpoint_is_found(stopped: Path, words: bytes) -> None:
    file = stopped / CHECKPOINT
    content = bytearray(file.read_bytes())
    words = words.replace(b'"', b'\\\\\\"')  # JSON in a text in a text
    content[content.index(words) + len(words) - 1] ^= 1
    file.write_bytes(content)
    for read in (resumed, open_run):
        with pytest.raises(EngramError, match=r"checkpoint .* is damaged"):
            read(stopped)


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def raise_all(result: dict[str, Any]) -> None:
    """Numbers that fit together, and not the predictions."""
    for stage in result["stages"]:
        stage["accuracy"]["cnn"] = 99.0
    result["average_incremental_accuracy"]["cnn"] = result["final_accuracy"]["cnn"] = 99.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda result: result["average_incremental_accuracy"].update(cnn=99.0), "its average_incremental_accuracy"),
        (raise_all, "predictions are"),
        (lambda result: result["stages"][1]["accuracy_by_stage"]["nme"].__setitem__(0, 1.5), "nme"),
        (lambda result: result.update(order=11), "its result is of another run: order 11, not 1"),
        (lambda result: result.update(method="afc"), "its result is of another run: method 'afc', not 'replay'"),
    ],
)
def test_every_reader_refuses_an_edited_result(done: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    edit(done / "result.json", change)
    found = refused(done)
    assert set(found) == {"report", "results"}, "the others do not use it, or write it again"
    assert all(words in sentence for sentence in found.values())


def test_an_edited_result_is_listed_as_damaged(done: Path) -> None:
    edit(done / "result.json", lambda result: result["average_incremental_accuracy"].update(cnn=99.0))
    (row,) = list_runs(done.parent)
    assert row["average"] is None
    assert row["status"].startswith("damaged: ")


@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_an_infinite_number_is_refused_wherever_it_is(done: Path, name: str) -> None:
    edit(done / name, lambda data: data.update(unknown={"deep": [float("inf")]}))
    assert "unknown should be a finite number, got inf" in refused(done)["report"]


def test_a_line_of_results_that_was_edited_is_refused(done: Path, tmp_path: Path) -> None:
    """An accuracy that no metric uses, too: a line has no predictions to compute it from again."""
    file = tmp_path / "all.jsonl"
    write_file(file, merge(read_results([done]).records))
    line = json.loads(file.read_text())
    (again,) = read_file(file)
    assert again.to_line() + "\n" == file.read_text(), "merged again, it stays as it is"
    line["result"]["stages"][-1]["accuracy_by_stage"]["nme"][-1] = 1.5
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(EngramError, match=r"all.jsonl, line 1, .*: it was changed after it was made"):
        read_file(file)
    del line["digest"]  # as a line of an early version
    file.write_text(json.dumps(line) + "\n")
    assert len(read_file(file)) == 1


def test_a_lost_stage_does_not_finish_a_run(stopped: Path) -> None:
    edit(stopped / "run.json", lambda manifest: manifest["stage_sizes"].pop())
    found = refused(stopped)
    assert set(found) == set(READERS)
    assert all("stage_sizes does not fit" in sentence for sentence in found.values())


HOSTILE = {
    "empty": b"",
    "half": b'{"format": 1, "eng',
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep enough": b'{"format": 1, "config": ' + b"[" * 400 + b"]" * 400 + b"}",
    "long number": b'{"format": ' + b"1" * 5000 + b"}",
    "large number": b'{"format": 1' + b"0" * 400 + b"}",
    "infinite": b'{"format": 1e999}',
    "not UTF-8": b"\xff\xfe",
    "null": b"null",
    "text": b'"x"',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", ["run.json", "result.json", "events.jsonl"])
def test_hostile_json_is_refused_in_a_sentence_and_hides_no_other_run(
    runs: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    bad = Path(shutil.copytree(runs / "done", tmp_path / "runs" / "bad"))
    shutil.copytree(runs / "done", tmp_path / "runs" / "good")
    (bad / name).write_bytes(content)
    found = refused(bad)
    assert "resume" not in found or name == "run.json"
    assert ("report" in found) == (name != "events.jsonl")
    rows = {Path(row["directory"]).name: row["status"] for row in list_runs(tmp_path / "runs")}
    assert rows["good"] == "finished"
    assert rows["bad"].startswith("damaged: ") == (name == "run.json")


@pytest.mark.parametrize("threads", ["many", 0, 10**6, 1.5])
def test_an_impossible_number_of_threads_is_refused(stopped: Path, threads: Any) -> None:
    edit(stopped / "run.json", lambda manifest: manifest["hardware"].update(threads=threads))
    assert all("hardware.threads should be" in sentence for sentence in refused(stopped).values())
