"""`engram reproduce` and `engram results` as a user runs them, on a very small paper."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from engram.cli.main import main
from helpers import Engram, timeless
from paper_helpers import PAPER, experiment_on, write_paper
from test_cli import assert_refused, contents, one_thread, photos, start

ROOT = Path(__file__).parents[1]

__all__ = ["one_thread", "photos"]  # fixtures

LEGEND_START = "● within one standard deviation"


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_paper(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="module")
def done(paper: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of the paper's runs, and its page."""
    out = tmp_path_factory.mktemp("done") / "runs"
    assert main([*map(str, asked(paper, photos, out)), "--quiet", "--no-cache"]) == 0
    return out


def asked(paper: Path, photos: Path, out: Path | str = "runs", *more: str) -> list[str | Path]:
    return ["reproduce", "all", "--paper", paper, "--data", photos, "--out", out, *more]


def runs_of(out: Path) -> dict[tuple[str, int, str], Path]:
    """The run directories by method, exemplars per class and class order."""
    found: dict[tuple[str, int, str], Path] = {}
    for file in out.glob("*/run.json"):
        config = json.loads(file.read_text())["config"]
        found[config["method"], config["memory"]["size"], config["order"]] = file.parent
    return found


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def test_tables_match_a_calculation_by_hand(done: Path) -> None:
    """Calculated from the accuracies of each run's stages, without code of engram."""
    runs = runs_of(done)
    # Both methods with 2 exemplars; only AFC with 4, because the paper has no number of Replay there.
    assert sorted(runs) == [(m, k, o) for m, k in (("afc", 2), ("afc", 4), ("replay", 2)) for o in ("1", "2")]
    rows = list(csv.DictReader(io.StringIO((done / "reproduction_files" / "table1.csv").read_text())))
    cells = {(row["row"], row["column"]): row for row in rows}
    published = {("AFC (CNN)", 2): (50.0, 60.0), ("AFC (CNN)", 4): (200.0, None), ("Replay (NME)", 2): (33.0, 0.5)}
    for (label, kept), (mean, std) in published.items():
        method, predictor = label.split()[0].lower(), label.split()[1].strip("()").lower()
        averages = []
        for order in ("1", "2"):
            stages = result(runs[method, kept, order])["stages"]
            assert [stage["classes"] for stage in stages] == [2, 4, 6]
            averages.append(sum(stage["accuracy"][predictor] for stage in stages) / 3)
        cell = cells[label, f"{kept} kept"]
        assert float(cell["mean"]) == pytest.approx(sum(averages) / 2)
        assert float(cell["std"]) == pytest.approx(statistics.stdev(averages))
        assert (cell["n"], cell["wanted"], cell["orders_and_seeds"]) == ("2", "2", "1/1 2/1")
        assert float(cell["paper_mean"]) == mean
        off = float(cell["difference"])
        assert off == pytest.approx(sum(averages) / 2 - mean)
        mark = "within one standard deviation" if std and abs(off) <= std else "further off"
        assert cell["mark"] == ("within one point" if mark == "further off" and abs(off) <= 1 else mark)
    assert cells["AFC (CNN)", "2 kept"]["mark"] == "within one standard deviation"
    assert cells["AFC (CNN)", "4 kept"]["mark"] == "further off"
    assert (cells["Replay (NME)", "4 kept"]["why"], cells["Replay (NME)", "4 kept"]["mean"]) == ("not in the paper", "")
    assert (cells["Unheard of", "2 kept"]["why"], cells["Unheard of", "2 kept"]["mean"]) == ("no recipe yet", "")
    final = list(csv.DictReader(io.StringIO((done / "reproduction_files" / "table2.csv").read_text())))
    ends = [result(runs["afc", 4, order])["stages"][-1]["accuracy"]["nme"] for order in ("1", "2")]
    assert float(final[1]["mean"]) == pytest.approx(statistics.fmean(ends))


def test_all_files_are_written_next_to_the_page(done: Path) -> None:
    files = {path.name for path in (done / "reproduction_files").iterdir()}
    assert files >= {"table1.md", "table1.csv", "table1_differences.svg", "figure1_2_kept.svg", "figure2.svg"}
    assert "effects.md" not in files, "not part of the paper: only written if asked for by name"
    table = (done / "reproduction_files" / "table1.md").read_text()
    assert table.startswith("## Table 1: Memory\n")
    assert "| Unheard of | not run<br>paper 1.00 | not run<br>paper 2.00 |" in table
    page = (done / "reproduction.html").read_text()
    assert "A paper in miniature" in page
    assert "not in the paper" in page
    assert "The numbers were made up." in page, "a remark about a number that differs"
    assert "n = 2:" in (done / "reproduction_files" / "figure1_2_kept.svg").read_text()


def test_a_second_time_gives_the_same_and_trains_nothing(engram: Engram, paper: Path, photos: Path, done: Path) -> None:
    before = contents(done)
    outcome = engram(*asked(paper, photos, done, "--no-cache"))
    assert (outcome.status, outcome.err) == (0, "")
    assert "runs, at most" not in outcome.out
    assert contents(done) == before
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Table 1: Memory (average incremental accuracy, %)")
    assert any(line.startswith(LEGEND_START) for line in lines)
    # 50 differs by less than its std 60; 200 and both 10s by more than a point; Replay's 33 equals the run's.
    assert lines[-2].startswith("5 of 7 published numbers were measured: ")
    assert lines[-1] == str(done / "reproduction.html")
    hint = "(a method of your own: import its module first; for a command, set ENGRAM_METHODS=FILE.py)"
    assert f"no recipe yet: unheard-folder {hint}" in outcome.out


def test_a_single_run_and_the_legend_of_marks(
    engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path
) -> None:
    some = ["reproduce", "figure1", "--paper", paper, "--data", photos, "--rows", "AFC (CNN)", "--orders", "1"]
    shown = engram(*some, "--out", done, "--page", tmp_path / "page.html", "--no-run")
    assert shown.status == 0, shown.err
    assert "within one standard deviation" not in shown.out
    assert "over n runs (class orders and seeds)" in shown.out
    page = (tmp_path / "page.html").read_text()
    assert "; 1 run on " in page
    assert 'class="legend"' not in page
    assert 'class="legend"' in (done / "reproduction.html").read_text()
    assert "1 run, each counted once: 1 done, 0 to do" in engram(*some, "--out", done, "--dry-run").out
    began = engram(*some, "--out", "new", "--no-cache", "--threads", "1")
    assert began.out.startswith("1 run, at most 1 at a time, in new\n"), began


def test_dry_run_prints_what_is_left_and_writes_nothing(
    engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path
) -> None:
    some = tmp_path / "some"
    shutil.copytree(done, some)
    gone = runs_of(some)["afc", 4, "2"]
    shutil.rmtree(gone)
    before = contents(some)
    outcome = engram(*asked(paper, photos, some, "--dry-run"))
    assert outcome.status == 0
    assert "6 runs, each counted once: 5 done, 1 to do" in outcome.out
    assert "no recipe yet: unheard-folder" in outcome.out
    assert "(here): about 1 min, from 5 measured runs" in outcome.out
    assert outcome.out.splitlines()[-1] == "this was a dry run: nothing was written"
    plan = json.loads(engram(*asked(paper, photos, some, "--dry-run", "--json")).out)
    assert (plan["done"], plan["left"], plan["no_recipe"]) == (5, 1, ["unheard-folder"])
    assert [run["run"] for run in plan["runs"] if not run["done"]] == [gone.name]
    assert list(plan["minutes"]) == [plan["hardware"]]
    assert "at a time: --at-once" not in outcome.out, "as many as were measured"
    empty = engram(*asked(paper, photos, "nowhere", "--dry-run")).out
    assert "6 runs, each counted once: 0 done, 6 to do" in empty
    assert "(here): no measurement of such runs on this hardware" in empty
    assert contents(some) == before
    assert not (tmp_path / "nowhere").exists()


def test_interrupted_and_resumed_gives_the_same_result(
    engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path
) -> None:
    command = asked(paper, photos, "cut", "--threads", "1", "--no-cache")
    process = start(*command, "--json", cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if '"event": "run_finished"' in line:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "engram: saving... (Ctrl-C again to quit at once)\n")
    assert (tmp_path / "cut" / "reproduction.html").exists(), "with the runs so far"
    dry = json.loads(engram(*command, "--dry-run", "--json").out)
    assert 1 <= dry["done"] < 6
    assert dry["done"] + dry["left"] == 6
    outcome = engram(*command)
    assert (outcome.status, outcome.err) == (0, "")
    assert f"{dry['left']} runs, at most 1 at a time, in cut" in outcome.out
    for key, directory in runs_of(tmp_path / "cut").items():
        assert timeless(directory) == timeless(runs_of(done)[key])
    for name in ("table1.md", "table2.md", "figure1.md", "figure2.svg"):
        there, here = (folder / "reproduction_files" / name for folder in (done, tmp_path / "cut"))
        assert there.read_bytes() == here.read_bytes()


def test_a_stopped_run_prints_how_to_continue(engram: Engram, paper: Path, photos: Path, tmp_path: Path) -> None:
    outcome = engram(*asked(paper, photos, "runs", "--rows", "Replay", "--stop-after-stage", "0"))
    assert outcome.status == 0
    assert "2 stopped and saved; to continue, the same command again without --stop-after-stage:" in outcome.out
    assert "0 of 2 published" not in outcome.out
    assert "None of the 1 requested published numbers was measured yet." in outcome.out
    assert "–" not in (tmp_path / "runs" / "reproduction_files" / "table1.csv").read_text()


def test_rows_columns_orders_and_seeds(engram: Engram, paper: Path, photos: Path) -> None:
    some = ("--rows", "AFC", "--columns", "4", "--orders", "2", "--seeds", "3,5", "--dry-run", "--json")
    plan = json.loads(engram(*asked(paper, photos, "runs", *some)).out)
    assert [(run["order"], run["seed"]) for run in plan["runs"]] == [("2", 3), ("2", 5)]
    assert all("per_class=4" in run["recipe"] for run in plan["runs"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rows", "AFK"], ["no row 'AFK'"]),
        (["--seeds", "1,x"], ["--seeds takes whole numbers", "'x'"]),
        (["--orders", "1,1"], ["order 1 is given more than once"]),
        (["--orders", "backwards"], ["'backwards'", "natural"]),
        (["--dry-run", "--no-run"], ["exclude each other"]),
        (["--page", "page.txt"], ["page.txt", ".html"]),
        (["--results", "none.jsonl"], ["there is nothing at none.jsonl"]),
        (["--at-once", "0"], ["--at-once must be at least 1"]),
        (["--stop-after-stage", "9"], ["--stop-after-stage 9", "the longest of the runs has 3 stages"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_a_wrong_input_gets_one_sentence(
    engram: Engram, paper: Path, photos: Path, tmp_path: Path, more: list[str], words: list[str]
) -> None:
    assert_refused(engram(*asked(paper, photos, "runs", *more)), *words)
    assert list(tmp_path.iterdir()) == []


def test_runs_without_images_are_left_out(engram: Engram, tmp_path: Path, photos: Path) -> None:
    """The recipe of CIFAR-100 cannot read a folder of photos; the other can, and is done."""
    mixed = experiment_on("mixed", "cifar100-b50-s5", "folder")
    paper = write_paper(tmp_path / "paper", PAPER + mixed)
    outcome = engram("reproduce", "mixed", "--paper", paper, "--data", photos, "--quiet")
    assert outcome.status == 0
    assert outcome.err.startswith("engram: left out 1 run of cifar100: ")
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 1
    alone = ("reproduce", "mixed", "--columns", "cifar100-b50-s5", "--paper", paper, "--data", photos)
    assert_refused(engram(*alone), outcome.err.partition("cifar100: ")[2].strip())


def test_no_such_table(engram: Engram) -> None:
    assert_refused(engram("reproduce", "tabel1"), "'tabel1'", "did you mean 'table1'")
    assert_refused(engram("reproduce", "table 1"), "did you mean 'table1'?")
    assert_refused(engram("reproduce", "table", "1"), "'table'", "did you mean one of table1, table10, table2,")
    for order, words in (("9", "published class orders 1 to 3, got 9"), ("backwards", "'backwards' is none of")):
        assert_refused(engram("reproduce", "table1", "--orders", order, "--dry-run"), words)
    assert_refused(engram("reproduce"), "needs WHAT")
    assert_refused(engram("reproduce", "table1", "--data", "nowhere"), "no file or folder nowhere")


def test_results_from_several_machines(engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path) -> None:
    """Half of the runs in one place and half in another, one in both: all tables come from the merged file."""
    directories = sorted(runs_of(done).values())
    for name, some in {"here": directories[:4], "there": directories[3:]}.items():
        for directory in some:
            shutil.copytree(directory, tmp_path / name / directory.name)
    outcome = engram("results", "merge", "there.jsonl", "there")
    assert (outcome.status, outcome.out) == (0, "there.jsonl: 3 runs, 3 of them new\n")
    outcome = engram("results", "merge", "all.jsonl", "here", "there.jsonl")
    assert outcome.out == "all.jsonl: 6 runs, 6 of them new\n"
    again = (tmp_path / "all.jsonl").read_bytes()
    assert engram("results", "merge", "all.jsonl", "there", "here").out == "all.jsonl: 6 runs, 0 of them new\n"
    assert (tmp_path / "all.jsonl").read_bytes() == again
    lines = [json.loads(line) for line in again.decode().splitlines()]
    assert all("path" not in line["config"]["data"] for line in lines)
    assert str(photos).encode() not in again, "the path of the images is not published"
    assert {len(line.get("importance", [])) for line in lines} == {0, 4}
    shown = engram(*asked(paper, photos, "empty", "--results", "all.jsonl", "--no-run", "--page", "p.html"))
    assert (shown.status, shown.err) == (0, "")
    for name in ("table1.csv", "table2.csv", "figure2.svg"):
        there, here = done / "reproduction_files" / name, tmp_path / "p_files" / name
        assert there.read_bytes() == here.read_bytes()
    cells = json.loads(engram(*asked(paper, photos, "empty", "--results", "all.jsonl", "--no-run", "--json")).out)
    assert {cell["mark"] for cell in cells if cell["why"] == "no recipe yet"} == {"not run"}
    assert all(cell["ours"] is None for cell in cells if cell["why"])


def test_a_foreign_or_damaged_result_is_refused(
    engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path
) -> None:
    (tmp_path / "strange.jsonl").write_text('{"accuracy": 99}\n')
    assert_refused(engram("results", "merge", "all.jsonl", "strange.jsonl"), "strange.jsonl, line 1,")
    assert_refused(engram(*asked(paper, photos, "runs", "--results", "strange.jsonl")), "strange.jsonl, line 1,")
    assert_refused(engram("results", "page", "page.md", "strange.jsonl"), "strange.jsonl, line 1,")
    runs = Path(shutil.copytree(done, tmp_path / "runs"))
    spoilt = runs_of(runs)["afc", 2, "1"]
    told = result(spoilt)
    told["average_incremental_accuracy"]["cnn"] = 99.0
    (spoilt / "result.json").write_text(json.dumps(told))
    assert_refused(engram("results", "merge", "all.jsonl", "runs"), str(spoilt.name), "average_incremental_accuracy")
    assert_refused(engram(*asked(paper, photos, "runs", "--no-run")), str(spoilt.name))
    (spoilt / "run.json").write_text("{")
    assert_refused(engram("results", "merge", "all.jsonl", "runs"), str(spoilt.name), "JSON")
    assert not (tmp_path / "all.jsonl").exists()
    assert_refused(engram("results", "merge", "all.csv", "runs"), "all.csv", ".jsonl")
    assert_refused(engram("results", "mrge", "all.jsonl", "runs"), "'mrge'", "did you mean 'merge'")
    assert_refused(engram("results", "merge", "all.jsonl"), "needs IN")


def test_a_conflict_leaves_the_file_as_it_was(engram: Engram, done: Path, tmp_path: Path) -> None:
    directory = runs_of(done)["afc", 2, "1"]
    shutil.copytree(directory, tmp_path / "here" / directory.name)
    assert engram("results", "merge", "all.jsonl", "here").status == 0
    before = (tmp_path / "all.jsonl").read_bytes()
    place = tmp_path / "here" / directory.name
    shutil.rmtree(place / "stages")  # its predictions would not fit
    told = result(place)
    for stage in told["stages"]:
        stage["accuracy"]["cnn"] = 50.0
    told["average_incremental_accuracy"]["cnn"] = told["final_accuracy"]["cnn"] = 50.0
    (place / "result.json").write_text(json.dumps(told))
    assert_refused(engram("results", "merge", "all.jsonl", "here"), "all.jsonl, line 1,", directory.name, "different")
    assert (tmp_path / "all.jsonl").read_bytes() == before


def test_an_unfinished_run_is_left_out_and_named(engram: Engram, done: Path, tmp_path: Path) -> None:
    place = tmp_path
    for number, directory in enumerate(list(runs_of(done).values())[:2]):
        place = Path(shutil.copytree(directory, tmp_path / "runs" / directory.name))
        if number:
            told = result(place)
            (place / "result.json").write_text(json.dumps(told | {"stages": told["stages"][:2]}))
    outcome = engram("results", "merge", "all.jsonl", "runs")
    assert (outcome.status, outcome.out) == (0, "all.jsonl: 1 run, 1 of them new\n")
    assert outcome.err.startswith(f"engram: left out runs/{place.name}: it is not complete")


def test_the_markdown_page(engram: Engram, paper: Path, done: Path, tmp_path: Path) -> None:
    outcome = engram("results", "page", "page.md", done, "--paper", paper)
    assert outcome.out == "page.md: 6 runs\n"
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Reproduction\n\nA paper in miniature. 5 of 7 published numbers were measured")
    for heading in ("## What reproduces", "## What does not", "## Effects: ", "## Table 2", "## The runs"):
        assert heading in page
    assert "| no distillation | " in page
    assert "points (n = 2) |" in page
    assert "- Table 1: The numbers were made up." in page
    assert f"Made by `engram results page page.md {done} --paper {paper}`.\n" in page
    assert f"`engram reproduce table1 --paper {paper}` runs" in page
    for only_of_afc in ("a test checks", "(afc.md", "A star marks", "../results"):
        assert only_of_afc not in page


def test_the_example_paper_of_the_documentation_works(engram: Engram, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for suffix in ("toml", "json"):
        (block,) = re.findall(rf"```{suffix}\n(.*?)```", text, flags=re.DOTALL)
        (tmp_path / f"mine.{suffix}").write_text(block, encoding="utf-8")
    outcome = engram("reproduce", "all", "--paper", "mine.toml", "--dry-run")
    assert (outcome.status, outcome.err) == (0, "")
    assert "10 runs, each counted once: 0 done, 10 to do" in outcome.out
    assert engram("reproduce", "all", "--paper", "mine.toml", "--no-run").status == 0
    assert "paper 45.60 ± 4.00" in (tmp_path / "runs/reproduction_files/table1.md").read_text(encoding="utf-8")


def test_a_summary_has_only_unchanged_recipes(engram: Engram, done: Path, tmp_path: Path) -> None:
    outcome = engram("results", "summary", "summary.json", ROOT / "results" / "mini.jsonl")
    assert outcome.out == "summary.json: 30 unchanged recipes, of 123 runs\n"
    before = (tmp_path / "summary.json").read_bytes()
    assert_refused(engram("results", "summary", "summary.json", done), "no run of an unchanged recipe")
    assert (tmp_path / "summary.json").read_bytes() == before


@pytest.mark.parametrize("what", ["page", "summary"])
def test_a_file_of_results_is_not_overwritten(engram: Engram, done: Path, tmp_path: Path, what: str) -> None:
    assert engram("results", "merge", "all.jsonl", done).status == 0
    before = (tmp_path / "all.jsonl").read_bytes()
    ending = {"page": ".md", "summary": ".json"}[what]
    assert_refused(engram("results", what, "all.jsonl", done), f"a file that ends in {ending}, got all.jsonl")
    assert (tmp_path / "all.jsonl").read_bytes() == before


def test_files_of_another_program_in_the_results_folder_are_left_out(
    engram: Engram, tmp_path: Path, done: Path
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "answers.jsonl").write_text('{"question": 1}\n')
    engram("results", "merge", "results/ours.jsonl", done)
    outcome = engram("reproduce", "table1", "--dry-run")
    assert outcome.status == 0
    assert outcome.err.startswith("engram: left out results/answers.jsonl: it has no results of engram")
    assert outcome.err.count("\n") == 1
    assert_refused(engram("reproduce", "table1", "--results", "results", "--dry-run"), "answers.jsonl, line 1,")
    ours = tmp_path / "results" / "ours.jsonl"
    ours.write_text(ours.read_text().replace('"format":1', '"format":"x"', 1))
    (tmp_path / "results" / "answers.jsonl").unlink()
    assert_refused(engram("reproduce", "table1", "--dry-run"), "ours.jsonl, line 1,")
    ours.unlink()
    ours.mkdir()
    assert_refused(engram("reproduce", "table1", "--dry-run"), "ours.jsonl")


def test_runs_without_importance_count_as_to_do(
    engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path
) -> None:
    """Table 1 counts them as done; Figure 2 does not, because it needs what they did not save."""
    some = Path(shutil.copytree(done, tmp_path / "some"))
    for name in "1", "2":
        shutil.rmtree(runs_of(some)["afc", 2, name] / "stages")
    outcome = engram(*asked(paper, photos, some, "--dry-run"))
    assert (
        "4 done, 2 to do\n2 of those to do were run before without saving the importance that Figure 2 shows\n"
        in outcome.out
    )
    assert "kept no importance" not in engram(*asked(paper, photos, done, "--dry-run")).out


def test_earlier_results_are_counted_separately_from_runs_in_out(
    engram: Engram, paper: Path, photos: Path, done: Path, tmp_path: Path
) -> None:
    here, *before = sorted(runs_of(done).values())
    (tmp_path / "results").mkdir()
    shutil.copytree(here, tmp_path / "runs" / here.name)
    assert "\ndone: 1 in runs\n" in engram(*asked(paper, photos, "runs", "--dry-run")).out
    assert engram("results", "merge", "results/ours.jsonl", *before).status == 0
    both = "\ndone: 5 measured before (results/ours.jsonl), 1 in runs; --results none counts only the latter\n"
    dry = engram(*asked(paper, photos, "runs", "--dry-run")).out
    assert both in dry
    assert "6 done, 0 to do" in dry
    assert both in engram(*asked(paper, photos)).out, "also in the output at the end"
    alone = engram(*asked(paper, photos, "runs", "--dry-run", "--results", "none")).out
    assert "1 done, 5 to do\ndone: 1 in runs\n" in alone
    plan = json.loads(engram(*asked(paper, photos, "runs", "--dry-run", "--json")).out)
    assert plan["done_in"] == {"results/ours.jsonl": 5, "runs": 1}


def test_a_path_for_embedded_images_is_refused(engram: Engram, photos: Path, tmp_path: Path) -> None:
    command = ("reproduce", "mini", "--rows", "AFC", "--data", photos)
    assert_refused(engram(*command), "are part of the package; leave --data out")
    paper = write_paper(tmp_path / "paper", PAPER + experiment_on("both", "mini-b10-s5", "folder"))
    stop = ("--stop-after-stage", "0", "--quiet")
    assert engram("reproduce", "both", "--paper", paper, "--data", photos, *stop).status == 0
    told = [json.loads(file.read_text())["config"]["data"] for file in (tmp_path / "runs").glob("*/run.json")]
    assert {data["name"]: data["path"] for data in told} == {"mini": None, "folder": str(photos.resolve())}
