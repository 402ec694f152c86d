"""What `train` returns: attributes, a mapping, tables as text and frames, a notebook's picture; and its progress."""

from __future__ import annotations

import io
import json
import sys
import types
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from conftest import make_config, make_store
from engram import EngramError, RunResult, compare, train
from engram.cli.main import main
from engram.core.metrics import Estimate
from engram.experiment import progress_display
from engram.experiment.run_config import RunConfig
from engram.report.svg import Drawing, drawing_style, finish
from engram.reproduce.results_files import table_of
from engram.runs.curve_svg import curve_svg
from engram.runs.reader import parse_result
from engram.runs.result_table import ResultTable
from fake_runs import fake_run
from paper_helpers import make_record

HARD = "a_b & 100% \\ $x$ {#} <i>|^~"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of two recipes over three class orders."""
    folder = tmp_path_factory.mktemp("stored")
    shape: dict[str, Any] = {"stage_sizes": (4, 2, 2), "images_per_class": 6, "importance": False}
    return [
        fake_run(folder / f"{method}{order}", method=method, order=order, **shape)
        for method in ("afc", "naive")
        for order in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def result(stored: list[Path]) -> RunResult:
    return parse_result(stored[0])


def test_train_returns_attributes_that_are_also_a_mapping(capfd: pytest.CaptureFixture[str]) -> None:
    found = train(make_config("replay"), make_store())
    assert isinstance(found, RunResult)
    assert found.average == found["average_incremental_accuracy"] == found.average_incremental_accuracy
    assert found.final == found["final_accuracy"]
    assert found.forgetting == found["forgetting"]
    assert found.classes == (2, 4, 6)
    assert found.curve == {by: [stage["accuracy"][by] for stage in found["stages"]] for by in found.predictors}
    assert found.stages[-1].accuracy == found["stages"][-1]["accuracy"]
    assert dict(found) == found == found.content
    assert json.loads(json.dumps(found.content)) == found
    with pytest.raises(KeyError):
        found["nothing"]
    assert len(repr(found)) < 500
    assert capfd.readouterr() == ("", ""), "nothing is shown where nobody looks"


def test_a_notebook_shows_a_table_and_a_curve(result: RunResult) -> None:
    content = {**result.content, "recipe": "<script>alert(1)</script>"}
    shown = RunResult(**{**vars(result), "recipe": content["recipe"], "content": content})._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    tree = ET.fromstring(shown)
    assert [cell.text for cell in tree.iter("th")] == ["%", "average", "final", "forgetting"]
    assert f"{result.average['cnn']:.2f}" in shown
    assert len(list(tree.iter("polyline"))) == len(result.predictors)
    assert not any(name.startswith("on") for element in tree.iter() for name in element.attrib)


def test_a_curve_of_one_stage_and_a_hostile_name_is_xml() -> None:
    drawn = ET.fromstring(curve_svg([5], {"<b>&": [50.0], "other": [50.0]}))
    labels = [text.text for text in drawn.iter("text")]
    assert "<b>& 50.0" in labels
    heights = [float(text.attrib["y"]) for text in drawn.iter("text") if (text.text or "").endswith("50.0")]
    assert abs(heights[0] - heights[1]) >= 12, "names do not lie on each other"


def test_comparison_is_mean_and_sample_deviation_by_recipe(stored: list[Path]) -> None:
    results = [parse_result(run) for run in stored]
    table = compare(results)
    assert table.header[:3] == ("recipe", "n", "average cnn")
    assert [row[:2] for row in table.rows] == [("afc-mini-b4-s2", 3), ("naive-mini-b4-s2", 3)]
    values = [found.average["cnn"] for found in results[:3]]
    mean = sum(values) / 3
    cell = table.rows[0][2]
    assert isinstance(cell, Estimate)
    assert cell.mean == pytest.approx(mean)
    assert cell.std == pytest.approx((sum((value - mean) ** 2 for value in values) / 2) ** 0.5)
    assert compare(results, "nme").header[2:] == ("average nme", "final nme", "forgetting nme")
    named = compare({"ours": results[:3], "theirs": results[3], "none": []})
    assert [row[:2] for row in named.rows] == [("ours", 3), ("theirs", 1)]
    assert compare(results[0]).rows == compare([results[0].content]).rows
    assert results[0].to_latex() == compare([results[0]]).to_latex()


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "no result to compare"), ([1], "1 is not a result"), (["x"], "x"), ([{"recipe": 1}], "is not a result")],
)
def test_what_is_no_result_is_refused(given: list[Any], message: str) -> None:
    with pytest.raises(EngramError, match=message):
        compare(given)


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    stopped = fake_run(tmp_path / "stopped", finished=1, stage_sizes=(4, 2, 2), images_per_class=6, importance=False)
    with pytest.raises(EngramError, match="stopped is a run that was stopped after stage 0 of 2; finish it"):
        compare({"ours": stopped})


def test_an_unknown_predictor_is_refused(result: RunResult) -> None:
    with pytest.raises(EngramError, match="no result has the predictor 'knn'; they have cnn, nme"):
        compare([result], "knn")


def test_names_are_escaped_in_each_form() -> None:
    table = ResultTable(("name", "x %"), ((HARD, Estimate(1.234, 0.5, 3)), ("two\nlines", None), ("-", -1.0)))
    latex = table.to_latex().splitlines()
    assert latex[0] == r"\begin{tabular}{lr}"
    assert latex[1:4] == [r"\toprule", r"name & x \% \\", r"\midrule"]
    escaped = (
        r"a\_b \& 100\% \textbackslash{} \$x\$ \{\#\} \textless{}i\textgreater{}\textbar{}"
        r"\textasciicircum{}\textasciitilde{}"
    )
    assert latex[4] == escaped + r" & $1.23 \pm 0.50$ \\"
    assert latex[5:7] == [r"two lines & -- \\", r"- & $-1.00$ \\"]
    assert latex[-1] == r"\end{tabular}"
    lines = table.to_markdown().splitlines()
    assert len(lines) == 5
    assert lines[2] == r"| a\_b & 100% \\ \$x\$ {\#} \<i\>\|^\~ | 1.23 ± 0.50 |"
    assert "&lt;i&gt;" in table._repr_html_()
    assert table.cells() == (
        ["name", "x %", "x % std"],
        [[HARD, 1.234, 0.5], ["two\nlines", None, None], ["-", -1.0, None]],
    )


def test_frames_need_pandas(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EngramError, match="pandas, which is not installed: pip install pandas"):
        result.to_frame()
    made: list[tuple[Any, Any]] = []
    fake: Any = types.ModuleType("pandas")
    fake.DataFrame = lambda rows, columns: made.append((rows, columns))
    monkeypatch.setitem(sys.modules, "pandas", fake)
    result.to_frame()
    ((rows, columns),) = made
    assert columns == ["stage", "classes", "cnn", "nme", "seconds"]
    assert [row[1] for row in rows] == list(result.classes)
    assert [row[2] for row in rows] == result.curve["cnn"]


@pytest.mark.parametrize("suffix", [".tex", ".md", ".csv"])
def test_the_command_writes_the_comparison(
    suffix: str, stored: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"table{suffix}"
    assert main(["results", "table", str(out), *map(str, stored)]) == 0
    assert capsys.readouterr().out.split(": ")[1] == "2 rows, of 6 runs\n"
    table = compare(stored)
    assert table == compare([parse_result(run) for run in stored])
    written = out.read_text(encoding="utf-8")
    if suffix == ".csv":
        assert written.splitlines()[0].startswith("recipe,n,average cnn,average cnn std,")
        assert float(written.splitlines()[1].split(",")[2]) == table.cells()[1][0][2]
    else:
        assert written == (table.to_latex() if suffix == ".tex" else table.to_markdown())


def test_the_command_refuses_other_files(
    stored: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["results", "table", str(tmp_path / "table.pdf"), str(stored[0])]) == 2
    assert "ends in .tex or .md or .csv" in capsys.readouterr().err


def test_other_precisions_and_settings_have_a_row_of_their_own() -> None:
    name = "afc-cifar100-b50-s10"
    again = make_record(name, 70.0, created="2026-02-01T00:00:00+00:00", commit="new")
    table = table_of([make_record(name, 60.0), again, make_record(name, 50.0, precision="float32")])
    assert [row[1] for row in table.rows] == [1, 1]
    assert {row[2].mean for row in table.rows if isinstance(row[2], Estimate)} == {70.0, 50.0}
    assert any("float32" in str(row[0]) for row in table.rows)
    first, second = (replace(make_record(name), versions={"method_code": code}) for code in ("aaaa", "bbbb"))
    assert [row[0] for row in table_of([first, second]).rows] == [f"{name} [code aaaa]", f"{name} [code bbbb]"]


def test_other_code_and_precision_stand_apart_and_the_latest_of_a_repeated_run_counts(
    result: RunResult, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"stage_sizes": (4, 2, 2), "images_per_class": 6, "importance": False}
    runs = [fake_run(tmp_path / str(number), final=final, **shape) for number, final in enumerate((60.0, 50.0, 40.0))]
    for number, run in enumerate(runs):
        manifest = json.loads((run / "run.json").read_text())
        manifest["created"] = f"2026-01-0{3 - number}T00:00:00+00:00"
        manifest["versions"] |= {"method_code": "edited"} if number == 2 else {}
        (run / "run.json").write_text(json.dumps(manifest))
    name = "afc-mini-b4-s2"
    cells = [(row[0], row[1], row[3].mean) for row in compare(runs, "cnn").rows if isinstance(row[3], Estimate)]
    assert cells == [
        (f"{name} [code unknown]", 1, pytest.approx(60.0, abs=1)),
        (f"{name} [code edited]", 1, pytest.approx(40.0, abs=1)),
    ]
    assert [row[1] for row in compare({"all": [*runs, result]}).rows] == [2]
    content = dict(result.content)
    without = [{key: value for key, value in content.items() if key != "order"} for _ in range(2)]
    assert [row[1] for row in compare(without).rows] == [2], "early results do not say their class order"
    float32, bf16 = ({**content, "precision": precision} for precision in ("float32", "bf16"))
    assert [row[:2] for row in compare([float32, bf16, float32]).rows] == [
        (f"{name} [float32]", 1),
        (f"{name} [bf16]", 1),
    ]


def test_a_result_says_its_precision_and_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(make_config("naive"), make_store())
    assert plain["precision"] == "float32"
    assert "code" not in plain
    monkeypatch.setattr(RunConfig, "code_versions", lambda self: {"method_file": "own.py", "method_code": "abcd"})
    own = train(make_config("naive"), make_store())
    assert own["code"] == "abcd"
    assert [row[1] for row in compare([plain, plain, own]).rows] == [1, 1]


def test_a_terminal_shows_a_bar_and_a_run_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def terminal(**how: Any) -> Console:
        return Console(file=screen, force_terminal=True, force_jupyter=False, width=80)

    monkeypatch.setattr(progress_display, "Console", terminal)
    train(make_config("naive"), make_store(), progress=False)
    assert screen.getvalue() == ""
    train(make_config("naive"), make_store())
    assert "%" in screen.getvalue()


def test_a_notebook_shows_a_bar_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, content: str) -> None:
            shown.append(content)

    module: Any = types.ModuleType("IPython.display")
    module.HTML = str
    module.display = lambda content, display_id: Handle()
    package: Any = types.ModuleType("IPython")
    package.display = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(progress_display, "Console", lambda **how: Console(force_jupyter=True))
    train(make_config("naive"), make_store())
    assert '<progress value="1.000"' in shown[-1]
    assert "<polyline" in shown[-1]
    for content in shown:
        ET.fromstring(f"<all>{content}</all>")


def test_figures_are_written_as_pdf_if_asked(
    stored: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Figure(figsize=(1, 1))
    small.text(0.1, 0.5, "a $5 class")
    with drawing_style():
        drawing = finish(small, "x", "")
    pdf, png = drawing.pdf(), drawing.png()
    assert pdf.startswith(b"%PDF-")
    assert png.startswith(b"\x89PNG")
    assert drawing.pdf() == pdf, "it depends only on what was drawn"
    # Drawing the others is most of the work of a report.
    monkeypatch.setattr(
        "engram.report.figures.finish", lambda figure, name, alt: Drawing(name, "<svg></svg>", alt, small)
    )
    command = ["report", str(stored[0]), "--out", str(tmp_path / "page.html")]
    assert main([*command, "--pdf"]) == 0
    folder = tmp_path / "page_files"
    drawn = {path.stem for path in folder.glob("*.svg")}
    assert {path.stem for path in folder.glob("*.pdf")} == drawn != set()
    assert all(path.read_bytes() == pdf for path in folder.glob("*.pdf"))
    assert {f"{name}.pdf" for name in drawn} <= set((folder / "FILES.txt").read_text().splitlines())
    assert main(command) == 0
    assert not list(folder.glob("*.pdf")), "those of the page before are removed"
