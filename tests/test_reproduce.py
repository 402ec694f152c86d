"""The parts of reproducing a paper: its data, records, merging, plan, numbers, cost, and the committed page."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from engram.cli.commands.reproduce import cells_json, cost_lines, results_tables
from engram.core.errors import EngramError
from engram.experiment.recipes import apply_changes, named_after_changes, recipe, recipe_names
from engram.methods import METHODS
from engram.report.figures import line_style
from engram.report.formatting import signed
from engram.reproduce import paper_tables as text
from engram.reproduce.cell_plan import PaperCell, PaperRequest, make_plan, refuse_edited, run_name
from engram.reproduce.cells import curve, each_once, effect, headline, measure, measure_all, remarks
from engram.reproduce.cost import ALONE, costs, work_of
from engram.reproduce.paper import Experiment, Published, load_paper
from engram.reproduce.paper_page import write_page
from engram.reproduce.paper_tables import COMMAND, document
from engram.reproduce.records import Record, check_record, parse_line, protocol_key, sorted_importance
from engram.reproduce.results_files import merge, read_file, read_results, write_file
from engram.runs.reader import config_hash
from engram.runs.stored_run import StageArrays
from paper_helpers import NUMBERS, PAPER, experiment_on, make_record, write_paper, write_run

ROOT = Path(__file__).parents[1]
AFC = load_paper()


def cell_of(name: str, row: str, column: str, records: list[Record], **asked: Any) -> PaperCell:
    plan = make_plan(AFC.find([name]), records, PaperRequest(**asked))
    return next(cell for cell in plan.cells if (cell.row.label, cell.column.label) == (row, column))


# The paper as data.


def test_every_table_and_figure_is_there() -> None:
    names = [experiment.name for experiment in AFC.find(["all"])]
    assert names == [*(f"table{i}" for i in range(1, 11)), "figure2", "figure3", "figure4"]
    assert AFC.experiments["table10"].heading == "Table 10"
    table = AFC.experiments["table1"]
    assert table.published(table.rows[-1], table.columns[0]) == Published(62.18, 0.57)
    assert [row.label for row in table.rows][-2:] == ["AFC (NME)", "AFC (CNN)"]
    assert sum(value is not None for row in table.rows for value in row.values or ()) == 55


def test_every_cell_of_a_registered_method_has_a_recipe_that_its_changes_fit() -> None:
    """A name that is wrong would look like a method that is not there yet."""
    known = set(recipe_names())
    seen: set[str] = set()
    for experiment in AFC.experiments.values():
        for row in experiment.rows:
            for column in experiment.columns:
                spec = experiment.spec(row, column)
                if row.recipe in METHODS and "imagenet" not in spec.recipe:
                    assert spec.recipe in known, (experiment.name, row.label)
                    config = apply_changes(recipe(spec.recipe), spec.set)
                    assert spec.predictor in (None, *METHODS[config.method].predictors)
                    seen.add(row.recipe)
    assert seen >= {
        "icarl",
        "bic",
        "ucir",
        "gdumb",
        "podnet",
        "geodl",
        "afc",
        "replay",
        "uniform",
        "pixels",
        "pod",
        "gap",
    }


def test_settings_of_the_tables() -> None:
    def spec(name: str, row: str, column: str) -> tuple[str, str, str | None]:
        cell = cell_of(name, row, column, [])
        return cell.wanted[0].config.recipe, cell.wanted[-1].name, cell.predictor

    nme = "afc-nme-cifar100-b50-s50"
    assert spec("table1", "AFC (NME)", "50 stages") == (nme, f"{nme}-order3-seed1", "nme")
    assert spec("table1", "UCIR (NME)", "5 stages")[::2] == ("ucir-cifar100-b50-s5", "nme")
    assert spec("table1", "iCaRL", "5 stages")[::2] == ("icarl-cifar100-b50-s5", "nme")
    assert spec("table3", "AFC (CNN)", "5 a class")[0] == "afc-cifar100-b50-s50 (memory=per_class=5)"
    assert spec("table3", "AFC (CNN)", "20 a class")[0] == "afc-cifar100-b50-s50", "the recipe's own memory"
    only = "afc-cifar100-b50-s50 (exemplars_only=true, memory=per_class=5)"
    assert spec("table3", "AFC exemplars only (CNN)", "5 a class")[0] == only
    assert spec("table4", "PODNet", "NME")[::2] == ("pod-nme-cifar100-b50-s50", "nme")
    assert spec("table5", "GDumb*", "20 base classes")[0] == "gdumb-cifar100-b50-s50 (base=20)"
    assert spec("table6", "AFC (CNN)", "lambda 2")[1] == "afc-cifar100-b50-s50-lambda_disc-2.0-order3-seed1"
    total = ("afc-cifar100-b50-s10 (memory=total=2000)", "afc-cifar100-b50-s10-memory-total-2000-order3-seed1", "cnn")
    assert spec("table7", "AFC (CNN)", "total=2000 10 stages") == total
    assert spec("table10", "PODNet (CNN)*", "5 stages")[0] == "podnet-cifar100-b50-s5 (selection=random)"
    float32 = cell_of("effects", "float32 instead of bf16", "10 stages", []).wanted[0]
    assert float32.name == "afc-cifar100-b50-s10-order1-seed1-float32"
    assert float32.config.precision == "float32"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('published = "memory"', 'published = "memroy"', ["no published table 'memroy'", "did you mean 'memory'"]),
        ('name = "table2"', 'name = "table1"', ["'table1' is taken"]),
        ('column = "{kept} kept"', 'column = "{keep} kept"', ["table1", "'keep'"]),
        ('recipe = "{recipe}-folder"', 'recipe = "{recipe}-{keep}"', ["table1", "'keep'", "'2 kept'"]),
        (
            '"AFC" = { recipe = "afc" }',
            '"AFC" = { recpie = "afc" }',
            ["AFC has no key 'recpie'", "did you mean 'recipe'"],
        ),
        ('"AFC" = { recipe = "afc" }', '"ACF" = { recipe = "afc" }', ["method 'AFC'", "[methods]"]),
        ('measure = "final_accuracy"', 'measure = "final"', ["no measure 'final'", "final_accuracy"]),
        ('kind = "curves"', 'kind = "curve"', ["no kind 'curve'", "did you mean 'curves'"]),
        ('experiment = "table1"', 'experiment = "table9"', ["'table9'"]),
        ("[methods]", "[methods", ["cannot be read as a paper"]),
        ("orders = [1, 2]", 'orders = "12"', ["experiment[0].orders should be a list, got '12'"]),
        ("orders = [1, 2]", "orders = 2", ["experiment[0].orders should be a list, got 2"]),
        ("columns = [{}]", "columns = [5, 10]", ["experiment[2].columns[0] should be", "got 5"]),
        ("columns = [{}]", "columns = [{}]\nvalues = 3", ["experiment[2].values", "got 3"]),
        ('rows = [{ method = "AFC", inference = "CNN" }]', 'rows = "AFC"', ["experiment[3].rows", "got 'AFC'"]),
        ('set = ["memory=per_class=2", SMALL]', 'set = "memory=all"', ["experiment[2].set should be a list"]),
        (
            'recipe = "afc" }',
            'recipe = "afc", set = "memory=all" }',
            ["the method AFC of", "set should be", "got 'memory=all'"],
        ),
        ("[[remark]]", "[remark]", ["remark should be a list"]),
        ('recipe = "afc" }', 'recipe = "afc", label = 3 }', ["the method AFC of", "label should be text, got 3"]),
        ('name = "figure2"', 'name = "figure2"\nmethods = 3', ["experiment[3].methods should be", "got 3"]),
        ('"memory=per_class=2"', '"seed=2"', ["figure1 sets 'seed=2'", "'orders'", "seeds sets"]),
        ('"memory=per_class=2"', '" order = 4"', ["figure1 sets ' order = 4'"]),
    ],
)
def test_a_paper_that_is_wrong_is_refused_with_its_name(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in PAPER
    path = write_paper(tmp_path, PAPER.replace(old, new))
    with pytest.raises(EngramError) as refusal:
        load_paper(path)
    for word in (str(path), *words):
        assert word in str(refusal.value)


def test_numbers_that_are_wrong_are_refused(tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(NUMBERS))
    numbers["tables"][0]["rows"][0]["values"][0] = {"mean": "many"}
    with pytest.raises(
        EngramError, match=r"tables\[0\]\.rows\[0\]\.values\[0\]\.mean should be a finite number, got 'many'"
    ):
        load_paper(write_paper(tmp_path, numbers=numbers))
    numbers["tables"][0]["rows"][0]["values"] = 50.0
    with pytest.raises(EngramError, match=r"tables\[0\]\.rows\[0\]\.values should be a list, got 50"):
        load_paper(write_paper(tmp_path, numbers=numbers))
    with pytest.raises(EngramError, match="there is no paper at"):
        load_paper(tmp_path / "none.toml")
    assert load_paper(Path("bench")).title == "The open bench"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"\xef\xbb\xbftitle = 1",
        b"a = " + b"[" * 900,
        b"a = " + b"9" * 5000,
        b"title = 1e400",
        PAPER.replace("SMALL", '"base=2"').replace("orders = [1, 2]", "orders = [nan]").encode(),
        PAPER.replace("SMALL", '"base=2"').replace("{kept} kept", "{kept.real:>9999999999}").encode(),
        PAPER.replace("SMALL", '"base=2"').replace('"numbers.json"', '"numbers\\u0000.json"').encode(),
        PAPER.replace("SMALL", '"base=2"').replace('"numbers.json"', f'"{"n" * 999}"').encode(),
        PAPER.replace("SMALL", '"base=2"').replace('inference = "CNN"', 'inference = "?"').encode(),
        PAPER.replace("SMALL", '"base=2"').replace('name = "table1"', 'name = "a\\n"').encode(),
    ],
)
def test_a_damaged_paper_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write_paper(tmp_path)
    path.write_bytes(content)
    with pytest.raises(EngramError, match=r"paper\.toml"):
        load_paper(path)


@pytest.mark.parametrize("text", ["[" * 900 + "]" * 900, "9" * 5000, '{"tables": [{"id": NaN}]}', "\ufeff{}", "{"])
def test_damaged_published_numbers_are_refused(tmp_path: Path, text: str) -> None:
    path = write_paper(tmp_path)
    (tmp_path / "numbers.json").write_text(text, encoding="utf-8")
    with pytest.raises(EngramError, match=r"numbers\.json"):
        load_paper(path)


def test_experiments_of_a_paper_stay_in_the_folder_of_the_page(tmp_path: Path) -> None:
    paper = load_paper(write_paper(tmp_path / "in", PAPER.replace('"table1"', '"/../../victim"')))
    page = write_page(tmp_path / "in" / "page.html", paper, make_plan(list(paper.experiments.values()), []))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert {path.name for path in (tmp_path / "in" / "page_files").glob("*victim*")} == {
        "_.._.._victim.csv",
        "_.._.._victim.md",
    }
    assert 'href="page_files/_.._.._victim.csv"' in page.read_text(encoding="utf-8")


# Records and merging.


def test_a_record_is_a_line_that_reads_back() -> None:
    record = make_record(importance=[[2.0, 1.0], [3.0, 0.5]])
    line = record.to_line()
    assert "\n" not in line
    assert ": " not in line
    assert parse_line(line, "x").content == record.content
    assert record.value("average_incremental_accuracy", "nme") == 59.0
    assert record.curve("cnn")[0] == (50, 60.0)


def edited(change: Any) -> dict[str, Any]:
    data = json.loads(make_record().to_line())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(kind="something"), "not marked as"),
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.pop("hardware"), "hardware is missing"),
        (lambda d: d["config"].update(seed=2), "configuration was changed"),
        (lambda d: d["result"]["stages"].pop(), "5 of 6 stages"),
        (lambda d: d["result"]["stages"][2].update(classes=71), "stages[2] should be stage 2 with 70 classes"),
        (lambda d: d["result"]["stages"][1]["accuracy"].update(cnn=61.0), "average_incremental_accuracy (cnn) is 60.0"),
        (lambda d: d["result"]["final_accuracy"].update(nme=70.0), "final_accuracy (nme) is 70.0"),
        (lambda d: d["result"]["backward_transfer"].update(nme=None), "backward_transfer (nme) is None"),
        (
            lambda d: d["result"]["stages"][1]["accuracy"].update(cnn=160.0),
            "stages[1].accuracy.cnn is 160.0, not in the range 0 to 100",
        ),
        (
            lambda d: d["result"]["stages"][1]["accuracy_by_stage"].update(cnn=[60.0]),
            "stages[1] should have a cnn accuracy for each of 2 stages",
        ),
        (lambda d: d["result"].update(seed=4), "another run: seed 4, not 1"),
        (lambda d: d["result"].update(order=11), "another run: order 11, not 1"),
        (lambda d: d["result"].update(order=1.0), "another run: order 1.0, not 1"),
        (lambda d: d["result"].update(method="other"), "another run: method 'other', not 'afc'"),
        (lambda d: d["order"].update(name="2"), "its class order is called '2', and its configuration has '1'"),
        (lambda d: d.update(digest="0" * 32), "it was changed after it was made (its checksum does not match)"),
        (lambda d: d.update(digest=None), "digest should be text"),
        (lambda d: d["result"].update(seconds="long"), "result.seconds should be a finite number, got 'long'"),
        (lambda d: d["result"].update(seconds=-1.0), "result.seconds is -1.0, not in the range 0 to inf"),
        (lambda d: d["result"].pop("stages"), "result.stages is missing"),
        (lambda d: d["result"]["final_accuracy"].pop("nme"), "final_accuracy (nme) is None"),
        (lambda d: d["result"].update(seconds=10**400), "result.seconds should be a finite number"),
        (lambda d: d["result"].update(seconds=float("nan")), "result.seconds should be a finite number, got nan"),
        (lambda d: d["config"].update(seed=float("inf")), "config.seed should be a finite number"),
        (lambda d: d["config"].update(data=json.loads("[" * 90 + "]" * 90)), "config.data is nested too deeply"),
        (lambda d: d["order"].update(class_ids=[0] * 100), "not an order of the classes"),
        (lambda d: d.update(stage_sizes=[]), "stage_sizes does not fit"),
        (lambda d: d.update(wall=[1.0]), "wall should have a start and an end"),
        (lambda d: d.update(wall=[2.0, 1.0]), "wall should have a start and an end"),
        (lambda d: d.update(versions={"torch": 2}), "versions.torch should be text, got 2"),
        (lambda d: d.update(unknown=float("nan")), "unknown should be a finite number, got nan"),
        (lambda d: d["result"]["average_incremental_accuracy"].update(cnn=99.0), "(cnn) is 99.0 and its stages give"),
    ],
)
def test_a_changed_record_is_refused(change: Any, words: str) -> None:
    with pytest.raises(EngramError) as refusal:
        check_record(edited(change), "results.jsonl, line 3,")
    assert "results.jsonl, line 3, cannot be used: " in str(refusal.value)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"recipe,order\nafc,1\n",
        b'{"kind": "engram run"',
        b"[1, 2]\n",
        b'{"a": 1}\n',
        b"[" * 9999,
        b"9" * 9999,
        b"\xef\xbb\xbf{}",
        b'{"kind": "engram run", "format": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"kind": "engram run", "format": 1, "recipe": 1e400}',
    ],
)
def test_a_corrupt_or_foreign_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "strange.jsonl"
    file.write_bytes(content)
    with pytest.raises(EngramError, match=r"strange\.jsonl"):
        read_file(file)
    with pytest.raises(EngramError, match=r"strange\.jsonl"):
        read_results([tmp_path])


def test_lines_end_only_at_line_feeds(tmp_path: Path) -> None:
    record = make_record(hardware="Example\u2028GPU")
    write_file(tmp_path / "r.jsonl", [record])
    assert [found.machine for found in read_file(tmp_path / "r.jsonl")] == [record.machine]


def test_a_good_line_does_not_save_a_bad_one(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(make_record().to_line() + "\n" + make_record(order="2").to_line()[:-9] + "\n", encoding="utf-8")
    with pytest.raises(EngramError, match=r"r\.jsonl, line 2,"):
        read_file(file)


def test_merging_drops_duplicates_and_keeps_other_machines(tmp_path: Path) -> None:
    one, two = make_record(order="10"), make_record(order="2")
    again = make_record(order="2", seconds=77.0, created="2026-02-02T00:00:00+00:00", importance=[[2.0, 0.0]])
    other = make_record(order="2", accuracy=61.0, hardware="Another GPU")
    newer = make_record(order="2", accuracy=62.0, commit="def")
    merged = merge([one, two, again, other, newer, one])
    assert [r.order.name for r in merged] == ["2", "2", "2", "10"]
    assert {(r.machine, r.commit) for r in merged[:3]} == {
        ("Example GPU", "abc"),
        ("Another GPU", "abc"),
        ("Example GPU", "def"),
    }
    assert again in merged, "of two the one that has its importance"
    write_file(tmp_path / "a.jsonl", merged)
    write_file(tmp_path / "b.jsonl", merge(read_results([tmp_path]).records[::-1]))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes(), "in whatever order they come"


def test_runs_on_other_images_are_no_conflict() -> None:
    one, two = make_record(accuracy=60.0), make_record(accuracy=60.5)
    other = check_record({**two.content, "data": {**two.content["data"], "fingerprint": "beef"}}, "by hand")
    assert len(merge([one, other])) == 2


def test_a_conflict_is_named_and_not_settled() -> None:
    one, two = make_record(accuracy=60.0), make_record(accuracy=60.5)
    two = replace(two, source="other.jsonl, line 4,")
    with pytest.raises(EngramError) as refusal:
        merge([one, two])
    for word in ("by hand and other.jsonl, line 4,", "afc-cifar100-b50-s5, order 1, seed 1", "Example GPU", "abc"):
        assert word in str(refusal.value)


# The plan.


def test_runs_are_shared_between_tables() -> None:
    alone = make_plan(AFC.find(["table1"]), [])
    together = make_plan(AFC.find(["table1", "table8", "table9", "figure4"]), [])
    assert list(together.runs) == list(alone.runs) == list(alone.left)
    rows = [cell for cell in alone.cells if cell.row.method == "PODNet" and cell.column.label == "5 stages"]
    assert len(rows) == 4
    assert len({wanted.name for cell in rows for wanted in cell.wanted}) == 6, (
        "the authors' re-runs are the same runs here"
    )


def test_rows_and_columns_by_name() -> None:
    plan = make_plan(
        AFC.find(["all", "effects"]), [], PaperRequest(rows=["afc (cnn)"], columns=["50"], orders=["2"], seeds=[4])
    )
    assert {cell.row.label for cell in plan.cells} == {"AFC (CNN)"}
    assert {cell.column.label for cell in plan.of(plan.experiments[0])} == {"50 stages"}
    assert [e.name for e in plan.experiments if e.name.startswith("table")][-3:] == ["table8", "table9", "table10"]
    assert {(w.config.order, w.config.seed) for w in plan.runs.values()} == {("2", 4)}
    table = make_plan(AFC.find(["table1"]), [], PaperRequest(rows=["AFC (CNN)"], columns=["25 stages", "5"])).cells
    assert [(cell.column.label, cell.published) for cell in table] == [
        ("25 stages", Published(63.89, 0.93)),
        ("5 stages", Published(66.49, 0.81)),
    ]
    of_table3 = make_plan(AFC.find(["table3"]), [], PaperRequest(rows=["AFC"])).cells
    assert {cell.row.label for cell in of_table3} == {"AFC (CNN)"}, "and not what has the same recipe"
    by_recipe = make_plan(AFC.find(["table4"]), [], PaperRequest(rows=["uniform"])).cells
    assert {cell.row.label for cell in by_recipe} == {"Uniform Importance [uniform]"}
    effects = make_plan(AFC.find(["effects"]), [], PaperRequest(rows=["the paper's formulas"])).cells
    assert {cell.row.label for cell in effects} == {"AFC as the recipes have it (released)", "the paper's formulas"}
    with pytest.raises(EngramError, match=r"no row 'AFK \(CNN\)': did you mean 'AFC \(CNN\)'"):
        make_plan(AFC.find(["table1"]), [], PaperRequest(rows=["AFK (CNN)"]))
    with pytest.raises(EngramError, match=r"no column '7'"):
        make_plan(AFC.find(["table1"]), [], PaperRequest(columns=["7"]))
    with pytest.raises(EngramError, match="both those rows"):
        make_plan(AFC.find(["table1", "table6"]), [], PaperRequest(rows=["iCaRL"], columns=["lambda 2"]))
    with pytest.raises(EngramError, match="did you mean 'table10'"):
        AFC.find(["tabel10"])


def test_a_missing_recipe_and_a_number_the_paper_lacks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.reproduce.cell_plan.recipe_names", list)
    cell = cell_of("table2", "AFC (CNN)", "imagenet100 50 stages", [])
    assert (cell.missing, cell.reason, cell.wanted) == ("afc-imagenet100-b50-s50", "no recipe yet", ())
    absent = cell_of("table1", "Mnemonics", "50 stages", [])
    assert (absent.reason, absent.wanted) == ("not in the paper", ())
    assert text.lines(measure(absent)) == ["not in the paper"]


def test_only_runs_in_the_precision_that_was_asked_for_count() -> None:
    default = make_record()
    full = make_record(precision="float32", accuracy=61.0)
    on_cpu = make_record(order="2", device="cpu", precision="float32", accuracy=62.0)
    assert cell_of("table1", "AFC (CNN)", "5 stages", [default, full, on_cpu]).records == (default, on_cpu)
    assert cell_of("table1", "AFC (CNN)", "5 stages", [default, full], precision="float32").records == (full,)
    assert cell_of("table1", "AFC (CNN)", "5 stages", [full]).records == ()


def test_of_two_machines_the_latest_run_counts_once() -> None:
    old = make_record(accuracy=50.0, hardware="old")
    new = make_record(accuracy=60.0, hardware="new", created="2026-03-01T00:00:00+00:00")
    found = measure(cell_of("table1", "AFC (CNN)", "5 stages", [new, old]))
    assert found.ours is not None
    assert (found.ours.mean, found.n) == (60.0, 1)


def test_a_run_beside_those_of_other_code_is_refused_before_it_is_trained() -> None:
    data = json.loads(make_record(order="1").to_line())
    edited = check_record({**data, "versions": {**data["versions"], "method_code": "c0de"}}, "elsewhere")
    asked = PaperRequest(rows=["AFC (CNN)"], columns=["5 stages"])
    with pytest.raises(EngramError, match=r"elsewhere is a run of afc-cifar100-b50-s5 with other code .* has now"):
        refuse_edited(make_plan(AFC.find(["table1"]), [edited], asked))
    refuse_edited(make_plan(AFC.find(["table1"]), [make_record()], asked))
    refuse_edited(make_plan(AFC.find(["table1"]), [edited], replace(asked, orders=["1"])))  # nothing to train


def test_runs_of_other_images_or_code_are_not_taken_together() -> None:
    data = json.loads(make_record(order="2").to_line())
    edited = {**data, "versions": {**data["versions"], "method_code": "c0de"}}
    with pytest.raises(EngramError, match="runs of afc-cifar100-b50-s5 with different code of the method; leave one"):
        cell_of("table1", "AFC (CNN)", "5 stages", [make_record(), check_record(edited, "elsewhere")])
    data["data"]["fingerprint"] = "c0de"
    other = check_record(data, "elsewhere")
    with pytest.raises(EngramError, match="by hand and elsewhere are runs of afc-cifar100-b50-s5 on different images"):
        make_plan(AFC.find(["table1"]), [make_record(), other])


def test_a_record_of_a_method_that_is_not_here_matches_nothing() -> None:
    data = json.loads(make_record().to_line())
    data["config"]["method"] = data["result"]["method"] = "unheard"
    data["config_hash"] = config_hash(data["config"])
    record = check_record(data, "x")
    assert record.key is None
    assert make_plan(AFC.find(["table1"]), [record]).cells[0].records == ()


def test_an_importance_is_needed_where_it_is_drawn() -> None:
    record = make_record("afc-cifar100-b50-s50")
    kept = make_record("afc-cifar100-b50-s50", importance=[[3.0, 1.0]])
    assert cell_of("figure3", "AFC (CNN)", "cifar100 50 stages", [record]).records == ()
    found = measure(cell_of("figure3", "AFC (CNN)", "cifar100 50 stages", [record]))
    assert (found.why, found.mark) == ("run, but no importance was kept", "not run")
    assert text.lines(found) == [found.why]
    assert [wanted.name for wanted in found.cell.bare] == ["afc-cifar100-b50-s50-order1-seed1"]
    assert measure(cell_of("figure3", "AFC (CNN)", "cifar100 50 stages", [])).why == "not run"
    whole = measure(cell_of("figure3", "AFC (CNN)", "cifar100 50 stages", [record, kept]))
    assert whole.cell.records == (kept,)
    assert text.lines(whole) == ["1.00 (n = 1)"], "the spread over channels, not an accuracy"
    section = text.markdown(whole.cell.experiment, [whole] * 4)
    assert "accuracy" not in section
    assert "Standard deviation of the importance over the channels" in section


def test_names_of_runs_tell_their_changes() -> None:
    original = recipe("afc-mini-b10-s5")
    config = named_after_changes(original, apply_changes(original, ["memory=total=40", "settings.train.epochs=2"]))
    assert run_name(config) == "afc-mini-b10-s5-train.epochs-2-memory-total-40-order1-seed1"
    assert run_name(original) == "afc-mini-b10-s5-order1-seed1", "as engram run calls it"
    with pytest.raises(EngramError, match="KEY=VALUE"):
        apply_changes(original, ["epochs"])


# The numbers.


def numbers(experiment: Experiment, published: Published | None, values: list[float]) -> Any:
    records = [make_record(accuracy=value, order=str(i)) for i, value in enumerate(values, start=1)]
    plan = make_plan([experiment], records)
    cell = next(c for c in plan.cells if (c.row.label, c.column.label) == ("AFC (CNN)", "5 stages"))
    return measure(replace(cell, published=published))


@pytest.mark.parametrize(
    ("published", "values", "mark"),
    [
        (Published(60.0, 0.5), [60.2, 60.6, 60.7], "within one standard deviation"),
        (Published(60.0, 0.3), [60.2, 60.6, 60.7], "within one point"),
        (Published(60.0, 3.0), [62.0, 63.0, 64.0], "within one standard deviation"),
        (Published(60.0, None), [61.0, 61.0, 61.0], "within one point"),
        (Published(60.0, None), [61.0, 61.0, 61.1], "further off"),
        (Published(60.0, 0.2), [58.9], "further off"),
        (Published(60.0, 0.2), [], "not run"),
        (None, [58.9], "nothing published"),
    ],
)
def test_marks(published: Published | None, values: list[float], mark: str) -> None:
    found = numbers(AFC.experiments["table1"], published, values)
    assert found.mark == mark
    if not values:
        assert found.ours is None
        assert found.difference is None
        assert text.lines(found) == ["not run", "paper 60.00 ± 0.20"]
        return
    assert found.ours.mean == pytest.approx(statistics.fmean(values))
    assert found.n == len(values)
    if len(values) > 1:
        assert found.ours.std == pytest.approx(statistics.stdev(values))
    if published is not None:
        assert found.difference == pytest.approx(statistics.fmean(values) - published.mean)


def test_importance_is_kept_from_high_to_low() -> None:
    maps = (np.array([1.0, 3.0, 0.5]), np.array([0.25, 1.23456789]))
    assert sorted_importance(StageArrays(np.arange(3), {}, maps)) == [[3.0, 1.0, 0.5], [1.23457, 0.25]]


def test_the_spread_of_importance_is_that_of_the_last_map() -> None:
    record = make_record(importance=[[5.0, 1.0], [2.5, 1.0, -0.5]])
    assert record.value("importance_spread", "cnn") == pytest.approx(statistics.pstdev([2.5, 1.0, -0.5]))
    assert make_record().value("importance_spread", "cnn") is None


def test_a_curve_is_the_mean_of_runs_with_the_same_stages() -> None:
    plan = make_plan([AFC.experiments["table1"]], [])
    cell = next(c for c in plan.cells if (c.row.label, c.column.label) == ("AFC (CNN)", "10 stages"))
    alike = (make_record("afc-cifar100-b50-s10", 60.0), make_record("afc-cifar100-b50-s10", 62.0, order="2"))
    found = curve(replace(cell, found=alike))
    assert found is not None
    assert found[0] == list(range(50, 101, 5))
    assert [(value.mean, value.n) for value in found[1]] == [(61.0, 2)] * 11
    assert curve(replace(cell, found=(alike[0], make_record("afc-cifar100-b50-s5", 62.0, order="2")))) is None
    assert curve(replace(cell, found=())) is None


def test_words_of_a_cell() -> None:
    found = numbers(AFC.experiments["table1"], Published(61.0, 0.5), [60.0, 61.0])
    assert text.lines(found) == ["60.50 ± 0.71 (n = 2 of 3)", "paper 61.00 ± 0.50", "−0.50 ●"]
    assert (signed(0.001), signed(-0.001), signed(1.0)) == ("0.00", "0.00", "+1.00")


@pytest.mark.parametrize(("width", "tables"), [(200, 1), (80, 2), (60, 2), (40, 4), (10, 4)])
def test_a_narrow_console_cuts_no_number(width: int, tables: int) -> None:
    plan = make_plan(AFC.find(["table1"]), [make_record()], PaperRequest(rows=["AFC"]))
    cells = [measure(cell) for cell in plan.cells]
    made = results_tables(plan.experiments[0], cells, width)
    assert len(made) == tables
    console = Console(width=max(width, 40), file=io.StringIO())
    for table in made:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for whole in ("AFC (NME)", "AFC (CNN)", "50 stages", "paper 62.58 ± 1.02", "60.00 (n = 1 of 3)", "−6.49 ○"):
        assert whole in shown


def test_effects_are_taken_run_by_run() -> None:
    """Order 3 has no partner and plays no part; the others differ by 2 and by 4."""
    base = [make_record("afc-cifar100-b50-s10", value, order=str(i)) for i, value in enumerate((60.0, 70.0), start=1)]
    orders = enumerate((62.0, 74.0, 10.0), start=1)
    full = [make_record("afc-cifar100-b50-s10", value, order=str(i), precision="float32") for i, value in orders]
    plan = make_plan(AFC.find(["effects"]), [*base, *full])
    first, last = (plan.of(plan.experiments[0])[i] for i in (1, -1))
    assert (first.row.label, last.row.label) == ("AFC as the recipes have it (released)", "float32 instead of bf16")
    found = effect(first, last)
    assert found is not None
    assert (found.mean, found.n) == (3.0, 2)
    assert found.std == pytest.approx(statistics.stdev([2.0, 4.0]))
    assert effect(first, plan.of(plan.experiments[0])[3]) is None
    shown = text.markdown_effects(plan.experiments[0], [measure(cell) for cell in plan.cells])
    assert "| float32 instead of bf16 | not measured yet | +3.00 ± 1.41 points (n = 2) |" in shown


# What is left to do costs.


def test_cost_is_measured_seconds_of_the_same_work(tmp_path: Path) -> None:
    """Two runs that took 100 s of clock side by side, each 80 s of its own; one more like them is left."""
    wall = ([1000.0, 1080.0], [1020.0, 1100.0])
    records = [make_record(order=str(i), seconds=80.0, wall=wall[i - 1]) for i in (1, 2)]
    plan = make_plan(AFC.find(["table1"]), records, PaperRequest(rows=["AFC (CNN)"], columns=["5 stages"]))
    assert list(plan.left) == ["afc-cifar100-b50-s5-order3-seed1"]
    (cost,) = costs(plan, records, tmp_path)
    assert (cost.hardware, cost.measured, cost.at_once, cost.unmeasured) == ("Example GPU", 2, 2, ())
    assert cost.seconds == pytest.approx(80.0), "alone it takes no longer than beside the other"
    both = make_plan(
        AFC.find(["table1"]), records, PaperRequest(rows=["AFC (CNN)", "PODNet (CNN)"], columns=["5 stages"])
    )
    (cost,) = costs(both, records, tmp_path)
    assert cost.unmeasured == ("podnet",)
    alike = sum(work_of(both.left["podnet-cifar100-b50-s5-order1-seed1"].config).stages)
    base = work_of(both.left["podnet-cifar100-b50-s5-order3-seed1"].config)
    mine = sum(work_of(plan.left["afc-cifar100-b50-s5-order3-seed1"].config).stages)
    # Clock 100 s for 160 s of runs; PODNet's base stage in order 3 is AFC's, and is trained once.
    assert base.base == work_of(plan.left["afc-cifar100-b50-s5-order3-seed1"].config).base
    left = (3 * alike + mine - base.stages[0]) / mine * 80.0
    assert cost.seconds == pytest.approx(left * 100 / 160)


def test_a_run_that_went_beside_many_takes_less_alone(tmp_path: Path) -> None:
    """Eight runs took 800 s each, at the same time: a share of 100 s, which alone is 200 s and not 800."""
    seeds = range(2, 10)
    records = [make_record(seed=seed, seconds=800.0, wall=[0.0, 800.0]) for seed in seeds]
    asked = PaperRequest(rows=["AFC (CNN)"], columns=["5 stages"], orders=["1"])
    (cost,) = costs(make_plan(AFC.find(["table1"]), records, asked), records, tmp_path)
    assert (cost.at_once, cost.seconds) == (8, pytest.approx(ALONE * 100.0))


def test_no_measurement_is_no_cost(tmp_path: Path) -> None:
    plan = make_plan(AFC.find(["table6"]), [])
    assert costs(plan, [], tmp_path) == []
    other = replace(recipe("afc-cifar100-b50-s5"), backbone="resnet10")
    assert costs(plan, [make_record(other)], tmp_path) == [], "another network tells nothing"


def test_runs_like_none_that_was_measured_are_not_counted(tmp_path: Path) -> None:
    folder = write_paper(tmp_path, PAPER + experiment_on("mixed", "cifar100-b50-s5", "folder", small=False))
    plan = make_plan(load_paper(folder).find(["mixed"]), [])
    assert len(plan.left) == 2
    (cost,) = costs(plan, [make_record(seconds=50.0)], tmp_path)
    assert cost.uncounted == {"on other data or networks, of which none was measured": 1}
    assert cost.seconds == pytest.approx(50.0), "the one on CIFAR-100; the folder's images are not even here"
    folder_too = [make_record(seconds=50.0), make_record("afc-folder", seconds=50.0)]
    (cost,) = costs(plan, folder_too, tmp_path)
    assert (cost.seconds, cost.uncounted) == (pytest.approx(50.0), {"whose images are not here": 1})


def test_of_a_run_that_was_begun_what_is_left_costs(tmp_path: Path) -> None:
    """Two runs with one base stage: once the first has trained it, in whatever cache, the second is counted whole."""
    asked = PaperRequest(rows=["AFC (CNN)"], columns=["5 stages", "10 stages"], orders=["1"])
    plan = make_plan(AFC.find(["table1"]), [], asked)
    first, second = (work_of(wanted.config).stages for wanted in plan.left.values())
    measured = make_record(seconds=50.0, order="2")
    (whole,) = costs(plan, [measured], tmp_path)
    name = next(iter(plan.left))
    write_run(tmp_path / name, measured, finished=2)
    (begun,) = costs(plan, [measured], tmp_path)
    rate = 50.0 / sum(work_of(recipe("afc-cifar100-b50-s5")).stages)
    assert whole.seconds == pytest.approx(rate * (sum(first) + sum(second[1:])))
    assert begun.seconds == pytest.approx(rate * (sum(first[2:]) + sum(second)))


def test_where_and_how_it_was_computed_is_no_part_of_a_protocol() -> None:
    config = recipe("afc-cifar100-b50-s5")
    free = {"data.path": "elsewhere", "device": "cpu", "precision": "float32", "predictor": "nme", "recipe": "custom"}
    for path, value in free.items():
        assert protocol_key(config.with_value(path, value)) == protocol_key(config), path
    for path, value in {"seed": 2, "order": "2", "increment": 5, "data.holdout": 0.1}.items():
        assert protocol_key(config.with_value(path, value)) != protocol_key(config), path


def test_a_class_order_that_one_of_the_data_sets_has_is_not_refused(tmp_path: Path) -> None:
    text = PAPER + experiment_on("first", "cifar100-b50-s5", small=False)
    text += experiment_on("both", "cifar100-b50-s5", "mini-b10-s5", small=False)
    paper, asked = load_paper(write_paper(tmp_path, text)), PaperRequest(orders=["7"])
    assert len(make_plan(paper.find(["both"]), [], asked).left) == 2
    with pytest.raises(EngramError, match="published class orders 1 to 3, got 7"):
        make_plan(paper.find(["first"]), [], asked)


def test_a_cell_that_sets_its_precision_keeps_it() -> None:
    asked = PaperRequest(rows=["float32 instead of bf16"], columns=["10 stages"], orders=["1"], precision="tf32")
    plan = make_plan(AFC.find(["effects"]), [], asked)
    assert [wanted.config.precision for wanted in plan.left.values()] == ["tf32", "float32"]


def test_a_base_stage_that_was_not_trained_is_no_work_of_a_measured_run(tmp_path: Path) -> None:
    asked = PaperRequest(rows=["AFC (CNN)"], columns=["5 stages"], orders=["1"])
    plan = make_plan(AFC.find(["table1"]), [], asked)
    (wanted,) = plan.left.values()
    (cost,) = costs(plan, [make_record(seconds=50.0, order="2", reused_base=True)], tmp_path)
    work = work_of(wanted.config).stages
    assert cost.seconds == pytest.approx(50.0 * sum(work) / sum(work[1:]))


def test_a_run_is_told_from_those_of_its_precision(tmp_path: Path) -> None:
    """Base stages are not shared by two precisions, and a processor's own precision is float32."""
    name, rows = "afc-cifar100-b50-s10", ["float32 instead of bf16"]
    asked = PaperRequest(rows=rows, columns=["10 stages"], orders=["1"])
    fast = make_record(name, seconds=50.0, order="2")
    plan = make_plan(AFC.find(["effects"]), [make_record(name)], asked)
    assert [wanted.config.precision for wanted in plan.left.values()] == ["float32"]
    (cost,) = costs(plan, [fast], tmp_path)
    assert (cost.seconds, cost.uncounted) == (None, {"in float32, of which none was measured": 1})
    (line,) = cost_lines([cost], "Example GPU", 1, 1)
    assert line == "Example GPU (here): no estimate of 1 run in float32, of which none was measured"
    slow = make_record(name, seconds=300.0, order="2", precision="float32")
    (cost,) = costs(plan, [fast, slow], tmp_path)
    assert (cost.seconds, cost.measured, cost.uncounted) == (pytest.approx(300.0), 1, {})
    both = make_plan(AFC.find(["effects"]), [], asked)
    (cost,) = costs(both, [fast], tmp_path)
    assert cost.seconds == pytest.approx(50.0)
    assert "without 1 run in float32, of which none was measured" in cost_lines([cost], "", 2, 1)[1]
    (cost,) = costs(both, [fast, slow], tmp_path)
    assert cost.seconds == pytest.approx(350.0)
    (cost,) = costs(both, [make_record(name, seconds=90.0, order="2", device="cpu", precision="float32")], tmp_path)
    assert cost.uncounted == {}


# What is committed.


def test_the_committed_page_is_what_its_command_gives() -> None:
    records = merge(read_results([ROOT / "results"]).records)
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == document(AFC, records), COMMAND


def test_the_remarks_count_what_the_page_has() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    _, _, table8 = page.partition("## Table 8")
    rows = table8.partition("\n## ")[0].splitlines()
    near = {who: sum(row.count("●") for row in rows if row.startswith(f"| {who}")) for who in ("AFC", "PODNet")}
    assert near == {"AFC": 5, "PODNet": 7}
    assert "all eight numbers of AFC are within 1.5 points, five within the paper's standard deviation" in page
    assert "Of the eight of PODNet, run after it was chosen, seven are within it, and one is 0.9 off." in page


def test_the_committed_results_are_in_order() -> None:
    file = ROOT / "results" / "cifar100.jsonl"
    records = read_file(file)
    assert "".join(f"{record.to_line()}\n" for record in merge(records)) == file.read_text(encoding="utf-8")
    assert all(record.key is not None for record in records)
    assert all(record.commit != "unknown" for record in records)
    assert "/" not in "".join(str(value) for record in records for value in record.hardware.values())


def test_the_page_does_not_depend_on_what_could_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that comes must not make the committed page wrong."""
    records = merge(read_results([ROOT / "results"]).records)
    before = document(AFC, records)
    measured = {record.recipe.split()[0] for record in records}
    assert measured < set(recipe_names())
    monkeypatch.setattr("engram.reproduce.cell_plan.recipe_names", lambda: sorted(measured))
    assert document(AFC, records) == before


def test_a_number_that_tables_repeat_counts_once() -> None:
    """AFC (CNN) with 50 stages stands in six tables, and in Table 1 alone with a standard deviation."""
    record = make_record("afc-cifar100-b50-s50", accuracy=62.5)
    cells = measure_all(make_plan(AFC.find(["all"]), [record]))
    of_accuracy = [cell for cell in cells if cell.n and cell.cell.experiment.measure == "average_incremental_accuracy"]
    published = [cell for cell in of_accuracy if cell.cell.published is not None]
    assert len(published) == 6
    assert headline(published) == (
        "1 of 1 published numbers were measured: 1 within the paper's standard deviation (1 from a single run); "
        "the paper's are means over 3 class orders. Some are in several tables: 6 of 6 cells are filled."
    )
    assert {cell.mark for cell in published} == {"within one standard deviation"}, "in the other five, too"
    (table4,) = make_plan(AFC.find(["table4"]), [record], PaperRequest(rows=["AFC"], columns=["CNN"])).cells
    assert text.lines(measure(table4))[1:] == ["paper 62.18", "+0.32 ●"], "by itself, and as the table has it"


def test_a_standard_deviation_is_not_repeated_where_two_tables_disagree(tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(NUMBERS))
    rows = numbers["tables"][1]["rows"]
    rows[0]["values"] = [{"mean": 10.0, "std": 0.5}, {"mean": 10.0}]
    paper = load_paper(write_paper(tmp_path, numbers=numbers))
    assert [value.deviation for value in paper.experiments["table2"].rows[0].values or () if value] == [0.5, 0.5]
    numbers["tables"][1]["columns"].append({"kept": 6})
    rows[0]["values"].append({"mean": 10.0, "std": 0.7})
    paper = load_paper(write_paper(tmp_path, numbers=numbers))
    assert [value.deviation for value in paper.experiments["table2"].rows[0].values or () if value] == [0.5, None, 0.7]


def test_of_a_number_that_stands_twice_the_cell_that_was_measured_comes_first() -> None:
    places = (("table1", "AFC (CNN)", "50 stages"), ("table4", "AFC", "CNN"))
    plans = [
        make_plan(AFC.find([name]), [], PaperRequest(rows=[row], columns=[column])) for name, row, column in places
    ]
    first, second = (measure(cell) for plan in plans for cell in plan.cells)
    assert (first.mark, second.mark) == ("not run", "not run")
    assert each_once([first, second]) == [[first, second]]
    second = replace(second, mark="within one point")
    assert each_once([first, second]) == [[second, first]]


def test_a_row_without_a_number_for_each_column_is_refused(tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(NUMBERS))
    numbers["tables"][1]["rows"][0]["values"].pop()
    with pytest.raises(EngramError, match=r"AFC \(NME\) of table2 has 1 numbers, not one for each column"):
        load_paper(write_paper(tmp_path, numbers=numbers))


def test_the_headline_tells_single_runs_from_means() -> None:
    single = [make_record("afc-cifar100-b50-s5", 66.0), make_record("afc-cifar100-b50-s10", 50.0)]
    whole = [make_record("afc-cifar100-b50-s25", 63.5, order=order) for order in "123"]
    cells = measure_all(make_plan(AFC.find(["table1"]), [*single, *whole], PaperRequest(rows=["AFC (CNN)"])))
    assert headline(cells) == (
        "3 of 4 published numbers were measured: 2 within the paper's standard deviation (1 from a single run), "
        "1 further off (1 from a single run); the paper's are means over 3 class orders."
    )
    assert "one run" not in headline([cell for cell in cells if cell.n == 3])


def test_the_page_says_everything_once() -> None:
    page = document(AFC, [make_record("afc-cifar100-b50-s50", accuracy=70.0, order=order) for order in "123"])
    (line,) = [line for line in page.splitlines() if line.startswith("- ") and "+7.82" in line]
    assert line == "- Table 1, AFC (CNN): 50 stages +7.82 (n = 3; also in Tables 3, 4, 5, 6 and 7)"
    assert page.count("AFC (CNN) with 50 stages is 1.2 above the paper.") == 1
    _, _, table3 = page.partition("## Table 3")
    assert "\nNot run: iCaRL, BiC, UCIR (CNN), PODNet (CNN), AFC exemplars only (CNN).\n" in table3
    assert "Not run. `engram reproduce table10` would run it." in page


def test_a_remark_stands_by_the_numbers_it_is_about() -> None:
    def said(row: str, column: str, name: str, accuracy: float) -> str:
        plan = make_plan(
            AFC.find(["table1"]), [make_record(name, accuracy=accuracy)], PaperRequest(rows=[row], columns=[column])
        )
        return " ".join(remarks(AFC, measure_all(plan)))

    assert "AFC (CNN) with 50 stages is 1.2 above" in said("AFC (CNN)", "50 stages", "afc-cifar100-b50-s50", 70.0)
    assert said("AFC (CNN)", "50 stages", "afc-cifar100-b50-s50", 62.0) == "", "where nothing is off"
    assert said("AFC (CNN)", "5 stages", "afc-cifar100-b50-s5", 10.0) == ""
    other = said("Mnemonics", "10 stages", "mnemonics-cifar100-b50-s10", 10.0)
    assert other.startswith("Mnemonics, GeoDL and GDumb have one run each")
    assert "AFC (NME)" not in other


def test_a_remark_on_effects_stands_on_the_pages_once_one_is_measured(tmp_path: Path) -> None:
    original = recipe("afc-cifar100-b50-s10")
    config = named_after_changes(original, apply_changes(original, ["settings.exemplars_only=true"]))
    base, changed = make_record(original, 64.0), make_record(config, 65.0)
    said = "Rounding alone moves a run too"
    assert said not in document(AFC, [base])
    assert document(AFC, [base, changed]).count(said) == 1
    plan = make_plan(AFC.find(["effects"]), [base, changed])
    page = write_page(tmp_path / "page.html", AFC, plan).read_text(encoding="utf-8")
    assert said in page
    assert '<span class="paper" title="nothing published">+1.00 against the first row</span>' in page, (
        "no mark: the paper has none"
    )


def test_a_table_of_effects_in_the_terminal_compares_runs_of_one_class_order() -> None:
    """Not 65 of one class order with 66, the mean of two."""
    original = recipe("afc-cifar100-b50-s10")
    config = named_after_changes(original, apply_changes(original, ["settings.exemplars_only=true"]))
    records = [make_record(original, 64.0), make_record(original, 68.0, order="2"), make_record(config, 65.0)]
    plan = make_plan(AFC.find(["effects"]), records, PaperRequest(columns=["10 stages"]))
    (table,) = results_tables(plan.experiments[0], [measure(cell) for cell in plan.cells], 120)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table)
    shown = console.export_text()
    assert "66.00" in shown
    assert shown.count("against the first row") == 1
    assert "+1.00 against the first row" in shown
    (found,) = [cell["effect"] for cell in cells_json(plan) if cell["effect"] is not None]
    assert found == {"mean": 1.0, "std": None, "n": 1}


def test_a_remark_on_no_row_of_its_table_is_refused(tmp_path: Path) -> None:
    spoilt = PAPER.replace('text = "The numbers were made up."', 'rows = ["AFK"]\ntext = "Why."')
    with pytest.raises(EngramError, match=r"a remark on table1 names 'AFK' among its rows"):
        load_paper(write_paper(tmp_path, spoilt))


def test_what_the_paper_has_no_number_of_is_said_so() -> None:
    plan = make_plan(AFC.find(["methods"]), [make_record("gap-cifar100-b50-s10")], PaperRequest(rows=["gap", "pod"]))
    assert headline(measure_all(plan)) == "The paper has no numbers for these; 1 of 2 were measured."
    assert "methods" not in [experiment.name for experiment in AFC.find(["all"])], "by name alone"


def test_as_many_lines_are_drawn_as_can_be_told_apart(tmp_path: Path) -> None:
    names = [
        "afc",
        "replay",
        "naive",
        "uniform",
        "pixels",
        "gap",
        "pod",
        "gram",
        "channel",
        "gradcam",
        "wa",
        "lwf",
        "si",
    ]
    records = [make_record(f"{name}-mini-b10-s5") for name in names]
    for some, drawn in ((records[:12], True), (records, False)):
        plan = make_plan(AFC.find(["mini"]), some)
        page = write_page(tmp_path / "page.html", AFC, plan).read_text(encoding="utf-8")
        assert ("Lines are means over n runs" in page) == drawn
        assert ("Not drawn: 13 lines would be too many, rows chooses up to 12." in page) != drawn
    styles = {(style["color"], style["linestyle"]) for style in (line_style(index, 6) for index in range(29))}
    assert len(styles) == 29, "rows of the largest experiment"
