"""tools/compare_methods.py: ours beside the paper's and the times, what is missing, and the committed page."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engram.core.errors import EngramError
from engram.experiment.recipes import apply_changes, recipe
from engram.methods import METHODS
from engram.reproduce.records import Record
from engram.reproduce.results_files import write_file
from paper_helpers import make_record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # as it is when the tool is run
EMBEDDED = "## On the embedded set\n"
TOOL: Any = importlib.import_module("compare_methods")
PICTURE: Any = importlib.import_module("compare_picture")
BENCH: Any = importlib.import_module("compare_bench")
WORDS = r"<text[^>]*>([^<]*)</text>"  # other versions of matplotlib write other bytes


def write_times(folder: Path, name: str, methods: dict[str, tuple[float | None, float]], **changes: Any) -> Path:
    """A file as the benchmark writes it; methods: milliseconds a step and seconds a run."""
    found = {
        method: {"base_ms": 1.0, "stage_ms": step, "phases": {}, "seconds": {"training": 1.0, "after": 1.0, "all": run}}
        for method, (step, run) in methods.items()
    }
    data = {
        "command": f"python -m benchmarks --out {name}",
        "quick": False,
        "date": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.13.0", "commit": "c0ffee"},
        "hardware": {"device": "cuda", "name": "Example GPU", "cores": 16, "system": name},
        "parts": {"methods": {"epochs": 3, "methods": found, "n": 1, "seconds": 1.0}},
    }
    file = folder / name
    file.write_text(json.dumps(data | changes), encoding="utf-8")
    return file


def folder_of(tmp_path: Path, records: Sequence[Record]) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    write_file(folder / "cifar100.jsonl", records)
    return folder


def run(method: str, accuracy: float, **more: Any) -> Record:
    return make_record(f"{method}-cifar100-b50-s10", accuracy, **more)


def table(page: str, part: int = 0) -> dict[str, list[str]]:
    """The rows by their label, in their order; part 1 is the table of the embedded set."""
    lines = [line for line in page.split(EMBEDDED)[part].splitlines() if line.startswith("| ")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {re.sub(r"^\[(.*)\]\(\S*\)$", r"\1", row[0]): row[1:] for row in rows}


def test_ours_the_papers_and_the_times_stand_side_by_side(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [run("podnet", 63.0), run("afc", 65.0), run("afc-nme", 64.5), run("replay", 70.0)])
    write_times(folder, "methods-h200.json", {"afc": (1.741, 216.4), "podnet": (None, 300.0), "bic": (2.0, 400.0)})
    page, _ = TOOL.compare(folder)
    rows = table(page)
    # by, average, paper, difference, last, its parts, other, ms, seconds; made-up runs have nme one point lower
    afc = ["CNN", "65.00", "64.98 ± 0.87", "+0.02", "65.00", "65.0 and 65.0", "64.00 (NME)", "1.74", "216"]
    nme = ["NME", "63.50", "64.29 ± 0.92", "−0.79", "63.50", "63.5 and 63.5", "64.50 (CNN)", "1.74 †", "216 †"]
    assert (rows["AFC (CNN)"], rows["AFC (NME)"]) == (afc, nme), "the time is not of the NME recipe, which is marked"
    pod = ["CNN", "63.00", "63.19 ± 1.16", "−0.19", "63.00", "63.0 and 63.0", "62.00 (NME)", "–", "300"]
    assert rows["PODNet (CNN)"] == pod
    assert rows["PODNet (CNN)\\*"][1:4] == ["63.00", "62.78 ± 0.78", "+0.22"], "the same run beside another number"
    missing = ["not measured", "not measured"]
    fine = ["CNN", "70.00", "–", "–", "70.00", "70.0 and 70.0", "69.00 (NME)", *missing]
    assert rows["Fine-tuning (CNN)"] == fine, "the paper has no such number"
    assert rows["iCaRL"] == ["NME", "not run", "53.78 ± 1.16", "–", "not run", "not run", "not run", *missing]
    assert rows["BiC"][-2:] == ["2.00 †", "400 †"], "sigmoids are not what was timed"
    assert rows["BiC as its own paper distils"][-2:] == ["2.00", "400"]
    measured = ["Fine-tuning (CNN)", "AFC (CNN)", "AFC (NME)", "PODNet (CNN)", "PODNet (CNN)\\*"]
    assert list(rows)[:6] == [*measured, "iCaRL"], "the most accurate first, what was not run last"
    assert len(rows) == 35
    for words in ("Example GPU (bf16); torch 2.13.0; commit abc", "torch 2.13.0; commit c0ffee", "5 of 35 rows"):
        assert words in page


def test_what_was_kept_and_what_was_learned_stand_apart(tmp_path: Path) -> None:
    record = run("ewc", 80.0)
    page, _ = TOOL.compare(folder_of(tmp_path, [record, run("afc", 60.0)]))
    # 80 on 50 classes of 50, 55, ..., 100 that were seen.
    still = sum(80 * 50 / seen for seen in range(50, 101, 5)) / 11
    assert "the best base stage of these runs (80.00) and never learned another class" in page
    assert f"would have an average of {still:.2f}.\n" in page
    last = replace(record.result.stages[-1], accuracy_by_stage={"cnn": (70.0, *[5.0] * 9, 25.0)})
    record = replace(record, result=replace(record.result, stages=(*record.result.stages[:-1], last)))
    assert TOOL._base_and_later(record, "cnn") == (70.0, 7.0)


def test_every_method_stands_in_the_table_of_the_embedded_set(tmp_path: Path) -> None:
    records = [make_record("der-mini-b10-s5", value, order=str(order)) for order, value in ((1, 40.0), (2, 44.0))]
    page, _ = TOOL.compare(folder_of(tmp_path, [*records, make_record("icarl-mini-b10-s5", 60.0, order="3")]))
    rows = table(page, 1)
    assert len({row.method for row in TOOL.embedded_rows([])} & set(METHODS)) == len(rows) == 29
    assert list(rows)[:2] == ["iCaRL", "DER without pruning"]
    assert rows["DER without pruning"] == ["CNN", "42.00 ± 2.83 (n = 2)", "42.00", "42.0 and 42.0", "41.00 (NME)"]
    assert rows["iCaRL"] == ["NME", "59.00", "59.00", "59.0 and 59.0", "60.00 (CNN)"]
    assert rows["Joint training"] == ["CNN", *["not run"] * 4]
    assert "2 of 29 rows were run; `engram reproduce mini` runs the others." in page
    assert set(table(page)["AFC (CNN)"][1:2]) == {"not run"}, "another protocol"


def test_only_class_order_1_and_seed_1_count_and_other_orders_tell_how_far_it_is(tmp_path: Path) -> None:
    orders = [run("afc", value, order=str(order)) for order, value in enumerate((64.0, 66.0, 68.0), start=1)]
    page, _ = TOOL.compare(folder_of(tmp_path, [*orders, run("podnet", 60.0, order="2"), run("ucir", 60.0, seed=2)]))
    rows = table(page)
    assert rows["AFC (CNN)"][1] == "64.00"
    assert rows["PODNet (CNN)"][1] == rows["UCIR (CNN)"][1] == "not run"
    assert "AFC (CNN) has 64.00 on order 1 and 66.00 ± 2.00 over orders 1, 2, 3 (n = 3), so this order is −2.00" in page
    assert "How far AFC (NME) on order 1 is from its mean is unknown" in page


def test_rows_far_from_the_paper_lead_to_their_card(tmp_path: Path) -> None:
    sigmoid = apply_changes(recipe("bic-cifar100-b50-s10"), ["settings.distillation=sigmoid"])
    records = [make_record(sigmoid, 50.0), run("gdumb", 62.0), run("afc", 67.5), run("bic", 10.0)]
    page, _ = TOOL.compare(folder_of(tmp_path, records))
    far = page.split("from the paper\n\n")[1].split("\n\n")[0].splitlines()
    assert far == ["- +2.52: [AFC (CNN)](../afc.md), see its card", "- −3.21: [BiC](bic.md), see its card"]


def test_every_row_with_a_card_leads_to_it(tmp_path: Path) -> None:
    page, _ = TOOL.compare(folder_of(tmp_path, [run("afc", 60.0)]))
    links = re.findall(r"^\| \[.*?\]\((\S*?)\) \|", page, flags=re.MULTILINE)
    assert len(links) == 35 + 29
    assert all((ROOT / "docs" / "methods" / link).is_file() for link in links)
    assert "No row" not in page
    assert "## Further than 2 points from the paper" in page


def test_times_of_several_files_are_merged_and_the_latest_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [run("afc", 60.0)])
    assert TOOL.read_times(folder) == ({}, [])
    page, _ = TOOL.compare(folder)
    assert "**Times**: not measured" in page
    assert "†" not in page
    new = {"date": "2026-02-01T00:00:00+00:00", "versions": {"torch": "2.14.0"}}
    write_times(folder, "methods-a.json", {"afc": (1.0, 100.0)}, **new)
    write_times(folder, "methods-b.json", {"afc": (9.0, 900.0), "bic": (2.0, 200.0)})
    page, _ = TOOL.compare(folder)
    assert table(page)["AFC (CNN)"][-2:] == ["1.00", "100"]
    assert table(page)["BiC as its own paper distils"][-2:] == ["2.00", "200"]
    assert page.endswith(
        "    python -m benchmarks --out methods-b.json\n    python -m benchmarks --out methods-a.json\n"
    )
    assert "torch 2.13.0, 2.14.0; commit c0ffee, unknown" in page


def test_times_of_different_hardware_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [run("afc", 60.0)])
    write_times(folder, "methods-a.json", {"afc": (1.0, 100.0)})
    write_times(folder, "methods-b.json", {"bic": (1.0, 100.0)}, hardware={"device": "cuda", "name": "Another GPU"})
    with pytest.raises(EngramError, match=r"methods-a\.json and .*methods-b\.json were measured on different hardware"):
        TOOL.compare(folder)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"parts": {"methods": {"error": "RuntimeError: no"}}}',
        {"quick": True},
        {"parts": {"methods": {"epochs": 3, "methods": {"afc": {"stage_ms": 1.0, "seconds": {}}}}}},
        {"parts": {"methods": {"epochs": 3, "methods": {"afc": {"stage_ms": "1", "seconds": {"all": 9.0}}}}}},
        {"parts": {"methods": {"epochs": 3, "methods": {"afc": {"stage_ms": 1.0, "seconds": {"all": -9.0}}}}}},
        {"parts": {"methods": {"epochs": 3, "methods": {"afc": {"stage_ms": 1.0, "seconds": {"all": float("nan")}}}}}},
        {"hardware": "a GPU"},
        {"versions": {}},
        {"date": 7},
    ],
)
def test_a_file_that_holds_no_times_is_refused_with_its_name(tmp_path: Path, content: str | dict[str, Any]) -> None:
    folder = folder_of(tmp_path, [run("afc", 60.0)])
    if isinstance(content, str):
        (folder / "methods-x.json").write_text(content, encoding="utf-8")
    else:
        write_times(folder, "methods-x.json", {"afc": (1.0, 100.0)}, **content)
    with pytest.raises(EngramError, match=r"methods-x\.json"):
        TOOL.compare(folder)


def test_the_picture_has_each_run_once_and_is_not_there_without_points(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [run("afc", 65.0), run("podnet", 63.0), run("gdumb", 58.0)])
    assert TOOL.compare(folder)[1] is None, "accuracy without times"
    write_times(folder, "methods-a.json", {"bic": (1.0, 100.0)})
    page, drawing = TOOL.compare(folder)
    assert drawing is None, "no method has both"
    assert ".svg" not in page
    write_times(folder, "methods-a.json", {"afc": (1.0, 100.0), "podnet": (1.0, 250.0)})
    page, drawing = TOOL.compare(folder)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", drawing.svg)
    assert [words.count(name) for name in ("AFC", "PODNet", "GDumb")] == [1, 1, 0], "PODNet's two rows are one run"
    assert {"100", "200", "seconds of a whole run, alone", "by the head (CNN)"} <= set(words)
    assert f"![{drawing.alt}](../images/methods-compared.svg)" in page
    assert TOOL.compare(folder)[1].svg == drawing.svg, "the same bytes every time"


def test_names_of_near_points_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty points in a heap: no two names have room in common."""
    places: list[tuple[float, float, float, float]] = []
    original = PICTURE.Axes.annotate

    def annotate(axes: Any, text: str, point: Any, offset: Any, **style: Any) -> Any:
        x, y = axes.transData.transform(point) + offset
        width = len(text) * PICTURE.LETTER
        left = x if style["ha"] == "left" else x - width
        places.append((left, y - PICTURE.SIZE / 2, left + width, y + PICTURE.SIZE / 2))
        return original(axes, text, point, offset, **style)

    monkeypatch.setattr(PICTURE.Axes, "annotate", annotate)
    points = [PICTURE.Point(f"a method {i}", "CNN", 200.0 + 7 * (i % 5), 60.0 + 0.4 * i) for i in range(20)]
    PICTURE.scatter("x", [*points, PICTURE.Point("far off", "NME", 2000.0, 20.0)], TOOL.WORDS)
    assert len(places) == 21
    for i, one in enumerate(places):
        for two in places[:i]:
            assert one[0] >= two[2] or two[0] >= one[2] or one[1] >= two[3] or two[1] >= one[3]


def test_what_is_far_below_the_others_stands_at_the_edge_with_its_number() -> None:
    points = [PICTURE.Point("best", "CNN", 100.0, 65.0), PICTURE.Point("low", "CNN", 80.0, 12.74)]
    words = re.findall(r"<text[^>]*>([^<]*)</text>", PICTURE.scatter("x", [*points], TOOL.WORDS).svg)
    assert "low (at 12.7)" in words
    assert "best" in words
    assert {"10", "20", "30"}.isdisjoint(words), "the axis ends where the others do"


def test_the_command_writes_the_page_and_the_picture(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [run("afc", 65.0)])
    out = tmp_path / "docs" / "methods" / "compared.md"
    TOOL.main([str(out), str(folder)])
    assert not (tmp_path / "docs" / "images").exists()
    write_times(folder, "methods-a.json", {"afc": (1.0, 100.0)})
    TOOL.main([str(out), str(folder)])
    page, drawing = TOOL.compare(folder)
    assert out.read_text(encoding="utf-8") == page
    assert (tmp_path / "docs" / "images" / "methods-compared.svg").read_text(encoding="utf-8") == drawing.svg
    (folder / "methods-b.json").write_text("{", encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "compare_methods.py"), str(out), str(folder)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert "methods-b.json" in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert out.read_text(encoding="utf-8") == page


def check_pictures(drawings: Sequence[Any], command: str) -> None:
    for drawing in drawings:
        written = (ROOT / "docs" / "images" / f"{drawing.name}.svg").read_text(encoding="utf-8")
        assert re.findall(WORDS, written) == re.findall(WORDS, drawing.svg), command


def test_the_committed_page_is_what_its_command_gives() -> None:
    page, drawing = TOOL.compare(ROOT / "results")
    assert (ROOT / "docs" / "methods" / "compared.md").read_text(encoding="utf-8") == page, TOOL.COMMAND
    check_pictures([drawing], TOOL.COMMAND)


def test_the_bench_has_averages_what_is_kept_and_what_is_missing(tmp_path: Path) -> None:
    strong = {"augmentation.policy": "trivial", "augmentation.cutout": "8"}
    config = recipe("afc-cifar100-b50-s10")
    for path, value in strong.items():
        config = config.with_value(path, value)
    records = [run("afc", 65.0), run("afc", 67.0, order="2"), make_record(config, 70.0)]
    folder = folder_of(tmp_path, records)
    page, drawings = BENCH.compare(folder)
    lines = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| [")}
    assert list(lines) == ["[AFC (CNN), strong](afc.md)", "[AFC (CNN)](afc.md)"]
    assert "| 66.00 ± 1.41 (n = 2) |" in lines["[AFC (CNN)](afc.md)"]
    assert "| 70.00 (n = 1) |" in lines["[AFC (CNN), strong](afc.md)"]
    assert "Not run yet: Bedrock, plain; " in page
    assert drawings == []
    kept = {"AFC (CNN)": {"network": 2_000_000, "images": 6_000_000}, "AFC (CNN), strong": {"network": 9_000_000}}
    (folder / "kept-bytes.json").write_text(json.dumps({"rows": kept}), encoding="utf-8")
    page, (drawing,) = BENCH.compare(folder)
    assert "| 8.0 | – |" in page
    assert {"AFC (CNN)", "AFC (CNN), strong", "kept between stages, MB"} <= set(re.findall(WORDS, drawing.svg))


def test_the_committed_bench_is_what_its_command_gives() -> None:
    page, drawings = BENCH.compare(ROOT / "results")
    assert (ROOT / "docs" / "bench.md").read_text(encoding="utf-8") == page, BENCH.COMMAND
    assert len(drawings) == 2
    check_pictures(drawings, BENCH.COMMAND)
