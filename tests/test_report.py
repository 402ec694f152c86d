"""The report: its numbers against hand calculation, its refusals, and what makes the page safe to pass around."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engram.core.errors import EngramError
from engram.core.metrics import Estimate
from engram.report.formatting import duration
from engram.report.groups import RunGroup, load_runs, make_groups
from engram.report.html_page import file_names, template
from engram.report.page import write_report
from engram.report.svg import Drawing
from engram.report.tables import csv_files
from engram.report.wording import headline, notes, title
from fake_runs import edit_json, fake_run
from helpers import not_text

SHAPE: dict[str, Any] = {"stage_sizes": (4, 2, 2), "images_per_class": 15, "epochs": 2}
LIGHT: dict[str, Any] = {**SHAPE, "predictors": ("cnn",), "importance": False}


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def result_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


class Page(HTMLParser):
    """What a page says and what it could fetch or run."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [
            v or "" for name, v in attrs if name in ("src", "href", "xlink:href", "srcset", "action", "data")
        ]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are planned and empty: drawing them is most of the work of a report, and the test looks at none."""
    monkeypatch.setattr("engram.report.figures.finish", lambda figure, name, alt: Drawing(name, "<svg></svg>", alt))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Three afc runs (orders and seeds differ), one naive run, and their report."""
    folder = tmp_path_factory.mktemp("compared")
    afc = [
        fake_run(folder / f"afc{i}", order=o, seed=s, shuffled=True, command=f"engram run --seed {s}", **SHAPE)
        for i, (o, s) in enumerate([(1, 1), (2, 1), (2, 2)])
    ]
    naive = fake_run(folder / "naive", method="naive", predictors=("cnn",), importance=False, keep=0.2, **SHAPE)
    return [*afc, naive], write_report([*afc, naive])


@pytest.mark.usefixtures("undrawn")
def test_default_places(compared: tuple[list[Path], Path], tmp_path: Path) -> None:
    runs, page = compared
    assert page == runs[0].parent.resolve() / "report.html"
    single = fake_run(tmp_path / "run", **LIGHT)
    assert write_report([single]) == single / "report.html"
    assert write_report([single], tmp_path) == tmp_path / "report.html"
    assert write_report([single], tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    assert (tmp_path / "new" / "x_files" / "summary.csv").is_file()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("undrawn")
def test_the_name_of_the_page_need_not_be_text(tmp_path: Path) -> None:
    page = write_report([fake_run(tmp_path / "run")], not_text(tmp_path, ".html"))
    assert 'href="caf%E9_files/' in page.read_text(encoding="utf-8")


def test_summary_is_mean_and_sample_deviation_of_the_group(compared: tuple[list[Path], Path]) -> None:
    runs, page = compared
    rows = {(r["group"], r["predictor"]): r for r in read_csv(page.with_name("report_files") / "summary.csv")}
    assert set(rows) == {("afc", "cnn"), ("afc", "nme"), ("naive", "cnn")}
    text = Page(page).text
    for metric in ("average_incremental_accuracy", "final_accuracy", "forgetting", "backward_transfer"):
        for predictor in ("cnn", "nme"):
            values = [result_of(run)[metric][predictor] for run in runs[:3]]
            mean, std = sum(values) / 3, statistics.stdev(values)
            row = rows["afc", predictor]
            assert row["n"] == "3"
            assert float(row[f"{metric}_mean"]) == pytest.approx(mean, rel=1e-12)
            assert float(row[f"{metric}_std"]) == pytest.approx(std, rel=1e-9)
            shown = f"{mean:.2f} ± {std:.2f}".replace("-", "\N{MINUS SIGN}")
            assert shown in text
        assert rows["naive", "cnn"][f"{metric}_std"] == ""
    seconds = [result_of(run)["seconds"] for run in runs[:3]]
    assert float(rows["afc", "cnn"]["seconds_mean"]) == pytest.approx(sum(seconds) / 3)


def test_headline_is_computed(compared: tuple[list[Path], Path]) -> None:
    runs, page = compared
    finals = [result_of(run)["final_accuracy"]["cnn"] for run in runs]
    mean, std = statistics.mean(finals[:3]), statistics.stdev(finals[:3])
    lead = f"afc ends at {mean:.1f} ± {std:.1f} % over 8 classes, naive at {finals[3]:.1f} %."
    text = Page(page).text
    assert lead in text
    assert "4 base classes, then 2 stages of 2 classes; 4 runs on cpu, 2026-01-02." in text
    assert "the spread of these differences" not in text, "one pair has no spread"


def test_accuracy_per_stage(compared: tuple[list[Path], Path]) -> None:
    runs, page = compared
    rows = read_csv(page.with_name("report_files") / "accuracy_per_stage.csv")
    assert len(rows) == 3 * 3
    text = Page(page).text
    for row in rows:
        members = runs[:3] if row["group"] == "afc" else runs[3:]
        stage = int(row["stage"])
        values = [result_of(run)["stages"][stage]["accuracy"][row["predictor"]] for run in members]
        assert int(row["classes"]) == (4, 6, 8)[stage]
        assert float(row["accuracy_mean"]) == pytest.approx(statistics.mean(values), rel=1e-12)
        assert f"{statistics.mean(values):.2f}" in text


def test_matrix_csv_is_the_mean_and_leaves_the_future_empty(compared: tuple[list[Path], Path]) -> None:
    runs, page = compared
    rows = read_csv(page.with_name("report_files") / "accuracy_matrix_afc_nme.csv")
    for t, row in enumerate(rows):
        for i in range(3):
            cell = row[f"classes_of_stage_{i}"]
            if i > t:
                assert cell == ""
            else:
                values = [result_of(run)["stages"][t]["accuracy_by_stage"]["nme"][i] for run in runs[:3]]
                assert float(cell) == pytest.approx(statistics.mean(values), rel=1e-12)


def test_confusion_is_counted_by_class_name_across_orders(compared: tuple[list[Path], Path]) -> None:
    runs, page = compared
    expected: dict[tuple[str, str], int] = {}
    for run in runs[:3]:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        names = [info["data"]["class_names"][i] for i in info["order"]["class_ids"]]
        tensors = load_file(run / "stages" / "002.safetensors")
        for true, guess in zip(tensors["targets"], tensors["predictions.cnn"], strict=True):
            expected[names[true], names[guess]] = expected.get((names[true], names[guess]), 0) + 1
    found = {
        (row["true_class"], name): int(value)
        for row in read_csv(page.with_name("report_files") / "confusion_afc_cnn.csv")
        for name, value in row.items()
        if name != "true_class" and int(value)
    }
    assert found == expected
    (true, guess), worst = max(((k, v) for k, v in expected.items() if k[0] != k[1]), key=lambda item: item[1])
    assert f"{100 * worst / 45:.1f} %" in Page(page).text
    assert f"{true} → {guess}" in Page(page).text


def test_importance_csv_is_sorted_within_runs(compared: tuple[list[Path], Path]) -> None:
    runs, page = compared
    rows = [r for r in read_csv(page.with_name("report_files") / "importance_afc.csv") if r["map"] == "Z_2"]
    values = [np.sort(load_file(run / "stages" / "002.safetensors")["importance.1"])[::-1] for run in runs[:3]]
    np.testing.assert_allclose([float(r["importance_mean"]) for r in rows], np.mean(values, axis=0), rtol=1e-6)
    assert not (page.with_name("report_files") / "importance_naive.csv").exists()


def test_seconds_csv_adds_up(compared: tuple[list[Path], Path]) -> None:
    _, page = compared
    for row in read_csv(page.with_name("report_files") / "seconds.csv"):
        parts = sum(float(row[part]) for part in ("train", "importance", "exemplars", "evaluate", "other"))
        assert parts == pytest.approx(float(row["total"]))


def test_page_fetches_nothing_and_its_links_lead_somewhere(compared: tuple[list[Path], Path]) -> None:
    _, page = compared
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert not parsed.handlers
    assert not re.search("https?://", parsed.source)
    assert "@import" not in parsed.source
    assert all(found.startswith(("#", "data:")) for found in re.findall(r"url\(['\"]?([^)'\"]*)", parsed.source))
    for link in parsed.links:
        assert link.startswith(("#", "data:")) or (page.parent / link).is_file(), link
    ids = re.findall(r'\bid="([^"]+)"', parsed.source)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:xlink:href="|url\()#([\w-]+)', parsed.source)
    assert set(targets) <= set(ids)


def test_every_svg_stands_alone(compared: tuple[list[Path], Path]) -> None:
    _, page = compared
    files = sorted(page.with_name("report_files").glob("*.svg"))
    assert len(files) >= 10
    for file in files:
        ElementTree.parse(file)
        assert "var(--" not in file.read_text(encoding="utf-8")


def test_same_runs_give_the_same_bytes(compared: tuple[list[Path], Path], tmp_path: Path) -> None:
    runs, page = compared
    again = write_report(runs, tmp_path / "report.html")
    assert again.read_bytes() == page.read_bytes()
    for file in page.with_name("report_files").iterdir():
        assert (tmp_path / "report_files" / file.name).read_bytes() == file.read_bytes(), file.name


def test_protocol_and_command(compared: tuple[list[Path], Path]) -> None:
    text = Page(compared[1]).text
    for words in (
        "mini (8 classes, 16x16)",
        "Example CPU at 3 GHz",
        "2.13.0",
        "engram run --seed 2",
        "order 2, seed 2",
    ):
        assert words in text


@pytest.mark.usefixtures("undrawn")
def test_files_of_an_earlier_report_go_and_strangers_stay(tmp_path: Path) -> None:
    naive = fake_run(tmp_path / "naive", method="naive", **LIGHT)
    afc = fake_run(tmp_path / "afc", **LIGHT)
    folder = write_report([naive, afc], tmp_path / "r.html").with_name("r_files")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    assert (folder / "confusion_naive_cnn.csv").exists()
    write_report([afc], tmp_path / "r.html")
    assert not (folder / "confusion_naive_cnn.csv").exists()
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.usefixtures("undrawn")
def test_unfinished_run_says_so_and_stands_apart(tmp_path: Path) -> None:
    whole = fake_run(tmp_path / "whole", seed=1, **LIGHT)
    part = fake_run(tmp_path / "part", seed=2, finished=2, **LIGHT)
    page = write_report([whole, part])
    assert "stopped after stage 1 of 2" in Page(page).text
    assert 'class="best"' not in Page(page).source, "fewer classes are easier: no ranking"
    rows = read_csv(page.with_name("report_files") / "summary.csv")
    assert [(r["n"], r["classes"]) for r in rows if r["predictor"] == "cnn"] == [("1", "8"), ("1", "6")]


def test_run_of_one_stage_has_nothing_to_forget(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "joint", method="joint", stage_sizes=(5,), importance=False, predictors=("cnn",))
    page = write_report([run])
    assert "nothing to forget yet" in Page(page).text
    assert read_csv(page.with_name("report_files") / "summary.csv")[0]["forgetting_mean"] == ""


def test_reused_base_stage_is_admitted(compared: tuple[list[Path], Path], tmp_path: Path) -> None:
    text = Page(compared[1]).text
    assert "reused a base stage" not in text
    assert "does not include the base stage" not in text
    directories = [fake_run(tmp_path / method, method=method, **LIGHT) for method in ("replay", "afc")]
    events = tmp_path / "afc" / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if '"stage": 0' not in line]
    kept.insert(1, '{"event": "base_reused", "time": 1.0, "stage": 0, "path": "elsewhere"}')
    events.write_text("\n".join(kept))
    page = write_report(directories)
    text = Page(page).text
    assert "afc reused a base stage" in text
    assert "replay, afc reused" not in text
    assert "Not shown of afc: the base stage, which another run had trained." in text
    assert "If a run reused the base stage of another run, its time does not include the base stage" in text
    axis = {
        m: (page.with_name("report_files") / f"loss_{m}.svg").read_text(encoding="utf-8") for m in ("replay", "afc")
    }
    assert "epochs of the main phase, all stages" in axis["replay"]
    assert "epochs of the main phase, from stage 1 on" in axis["afc"]


def test_losses_of_every_phase_are_kept(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "afc", **{**LIGHT, "stage_sizes": (4, 2)})
    finetuned = {"event": "epoch_finished", "stage": 1, "phase": "balance", "epoch": 0, "terms": {"balanced": 0.5}}
    with (run / "events.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(finetuned)}\n")
    folder = write_report([run]).with_name("report_files")
    rows = read_csv(folder / "loss_afc.csv")
    places = [(int(row["stage"]), row["phase"], int(row["epoch"])) for row in rows]
    assert places == [(0, "main", 0), (0, "main", 1), (1, "main", 0), (1, "main", 1), (1, "balance", 0)]
    assert (rows[-1]["balanced"], rows[-1]["classification"]) == ("0.5", "")
    assert "balanced" not in (folder / "loss_afc.svg").read_text(encoding="utf-8"), "drawn is the main phase"


def test_naive_run_without_nme_importance_and_events(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "naive", method="naive", predictors=("cnn",), importance=False, **SHAPE)
    (run / "events.jsonl").unlink()
    parsed = Page(write_report([run]))
    assert "Importance of the feature maps" not in parsed.text
    assert "Training loss" not in parsed.text
    assert "NME" not in parsed.text


def test_groups_of_one_recipe_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / f"r{w}", settings={"weight": w, "epochs": 2}, **LIGHT) for w in (1.0, 4.0)]
    text = Page(write_report(runs)).text
    assert "weight=1.0" in text
    assert "weight=4.0" in text
    assert "epochs=2" not in text


def test_changed_recipes_stand_apart_under_their_own_names(tmp_path: Path) -> None:
    recipes = ["afc-mini-b4-s2", "afc-mini-b4-s2 (base=3, increment=1)"]
    many = "train.epochs=3, lr=0.2, backbone=resnet20, pad={pad}"
    recipes += [f"afc-cifar100-b50-s10 ({many.format(pad=pad)})" for pad in (1, 2)]
    runs = [fake_run(tmp_path / f"r{i}-{s}", recipe=r, seed=s, **LIGHT) for i, r in enumerate(recipes) for s in (1, 2)]
    page = write_report(runs)
    rows = read_csv(page.with_name("report_files") / "summary.csv")
    labels = [*recipes[:2], "afc-cifar100-b50-s10 (pad=1, …)", "afc-cifar100-b50-s10 (pad=2, …)"]
    assert [row["group"] for row in rows] == labels
    assert [(row["recipe"], row["n"]) for row in rows] == [(name, "2") for name in recipes]
    text = Page(page).text
    assert all(name in text for name in [*labels, *recipes])
    bars = (page.with_name("report_files") / "seconds.svg").read_text(encoding="utf-8")
    assert "s10 (pad=1, …), 1/1" in bars
    assert "s10 (pad=2, …), 1/1" in bars, "labels that are cut can still be told apart"


@pytest.mark.usefixtures("undrawn")
def test_images_that_lay_elsewhere_make_no_other_group(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / f"r{s}", seed=s, path=f"/data/{s}", **LIGHT) for s in (1, 2)]
    page = write_report(runs)
    assert [row["n"] for row in read_csv(page.with_name("report_files") / "summary.csv")] == ["2"]
    edit_json(runs[1] / "run.json", data=json.loads((runs[1] / "run.json").read_text())["data"] | {"fingerprint": "x"})
    page = write_report(runs)
    assert [row["n"] for row in read_csv(page.with_name("report_files") / "summary.csv")] == ["1", "1"]
    assert "path=" not in Page(page).text


def test_reported_predictor_leads(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", reported="nme", **SHAPE)
    final = result_of(run)["final_accuracy"]["nme"]
    assert f"afc ends at {final:.1f} % over 8 classes." in Page(write_report([run])).text


def test_repeat_of_a_run_counts_once(tmp_path: Path) -> None:
    old, new, part = (fake_run(tmp_path / n, finished=f, **LIGHT) for n, f in (("old", 3), ("new", 3), ("part", 2)))
    other = fake_run(tmp_path / "other", seed=2, **LIGHT)
    edit_json(new / "run.json", created="2026-01-03T03:04:05+00:00")
    edit_json(part / "run.json", created="2026-01-04T03:04:05+00:00")
    told: list[str] = []
    page = write_report([old, new, part, other], tell=told.append)
    assert told == [f"left out {run}: {new} has the same configuration, class order and seed" for run in (old, part)], (
        "of the complete ones the newest counts"
    )
    (row,) = read_csv(page.with_name("report_files") / "summary.csv")
    finals = [result_of(run)["final_accuracy"]["cnn"] for run in (new, other)]
    assert row["n"] == "2"
    assert float(row["final_accuracy_std"]) == pytest.approx(statistics.stdev(finals))
    assert {row["run"] for row in read_csv(page.with_name("report_files") / "runs.csv")} == {"new", "other"}
    text = Page(page).text
    assert "2 runs repeat the configuration, class order and seed of another and are left out" in text
    assert "2 runs on cpu" in text


def in_words(groups: list[RunGroup]) -> str:
    """What the page says above its figures, which take long to draw."""
    return " ".join([title(groups), headline(groups), *notes(groups, 0)])


def test_configurations_of_a_method_stand_together_and_methods_are_compared(tmp_path: Path) -> None:
    kept = {"naive": 0.2, "afc": 0.95, "replay": 0.6}
    runs = [
        fake_run(tmp_path / f"{m}-{c}-{s}", method=m, recipe=f"{m}-mini-b4-s2{c}", seed=s, keep=k, **LIGHT)
        for c in ("", " (train.epochs=12)")
        for m, k in kept.items()
        for s in (1, 2)
    ]
    loaded = load_runs(runs)
    for i in (8, 9):  # afc at 12 epochs, a little worse than afc, is second of all
        result = loaded[i].result
        worse = {"cnn": result.final_accuracy["cnn"] - 0.1}
        loaded[i] = replace(loaded[i], result=replace(result, final_accuracy=worse))
    groups = make_groups(loaded)
    rows = list(csv.DictReader(io.StringIO(csv_files(groups)["summary.csv"])))
    assert [row["method"] for row in rows] == ["afc", "afc", "replay", "replay", "naive", "naive"]
    assert [row["group"] for row in rows][:2] == ["afc", "afc (train.epochs=12)"]
    finals = [float(row["final_accuracy_mean"]) for row in rows]
    text = in_words(groups)
    assert "6 configurations of 3 methods on mini" in text
    assert re.search(r"The best of each method: afc ends at .*, replay( \S+)? at .*, naive.*; 3 more are in the", text)
    gap = f"{finals[0] - max(finals[2:4]):.1f}"
    assert re.search(rf"afc ends {gap}\s±\s\S+ points above replay( \(train\S+)? \(mean", text)
    assert not re.search(r"(above|below) afc", text)


def test_configurations_of_one_method_have_no_winner(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / f"{w}-{s}", settings={"weight": w}, seed=s, **LIGHT) for w in range(6) for s in (1, 2)]
    text = in_words(make_groups(load_runs(runs)))
    assert "6 configurations of afc on mini" in text
    assert "the spread of these differences" not in text


@pytest.mark.parametrize(
    ("afc", "replay", "verdict"),
    [
        ((60.0, 30.0), (57.0, 28.0), "2.5 ± 0.7 points above replay|higher in 2): more than the spread"),
        ((33.0, 31.0), (27.15, 30.65), "3.1 ± 3.9 points above replay|higher in 2): within the spread"),
        ((40.0, 30.0, 80.0), (38.0, 33.0), "0.5 ± 3.5 points below replay|higher in 1): within the spread"),
        ((40.0, 30.0), (38.0, 32.0), "afc ends level with replay (0.0 ± 2.8 points, mean|higher in 1): within the"),
        ((40.0, 30.0, 80.0), (38.02, 32.0), "afc ends level with replay (0.0 ± 2.8 points, mean"),
        ((40.0, 30.0), (20.0,), None),
    ],
)
def test_a_lead_is_judged_by_pairs_of_runs(
    tmp_path: Path, afc: tuple[float, ...], replay: tuple[float, ...], verdict: str | None
) -> None:
    runs = []
    for method, finals in (("afc", afc), ("replay", replay)):
        for seed, final in enumerate(finals, start=1):
            place = tmp_path / f"{method}{seed}"
            shape = {**LIGHT, "images_per_class": 2500, "final": final}
            runs.append(fake_run(place, method=method, order=seed, seed=seed, **shape))
    said = " ".join(notes(make_groups(load_runs(runs)), 0)).replace("\N{NO-BREAK SPACE}", " ")
    assert all(part in said for part in verdict.split("|")) if verdict else "spread" not in said


@pytest.mark.usefixtures("undrawn")
def test_differences_are_of_runs_with_the_same_class_order_and_seed(tmp_path: Path) -> None:
    finals = {"afc": (60.0, 30.0, 80.0), "replay": (57.0, 31.0), "naive": (9.0,)}
    runs = []
    for method, values in finals.items():
        for seed, final in enumerate(values, start=1):
            shape = {**LIGHT, "images_per_class": 25, "final": final}
            runs.append(fake_run(tmp_path / f"{method}{seed}", method=method, seed=seed, **shape))
    runs.append(fake_run(tmp_path / "other", method="gap", **{**LIGHT, "stage_sizes": (4, 4)}))
    page = write_report(runs)
    rows = read_csv(page.with_name("report_files") / "differences.csv")
    found = {(r["group"], r["less"]): r for r in rows if r["metric"] == "final_accuracy"}
    assert set(found) == {("replay", "afc"), ("naive", "afc"), ("naive", "replay")}, "no other protocol"
    replay, naive = found["replay", "afc"], found["naive", "afc"]
    assert (replay["pairs"], replay["pairs_above_zero"], float(replay["mean"])) == ("2", "1", pytest.approx(-1.0))
    assert float(replay["std"]) == pytest.approx(statistics.stdev([-3.0, 1.0]))
    assert (naive["pairs"], naive["pairs_above_zero"], float(naive["mean"]), naive["std"]) == (
        "1",
        "0",
        pytest.approx(-51.0),
        "",
    )
    average = {m: [result_of(r)["average_incremental_accuracy"]["cnn"] for r in runs if m in r.name] for m in finals}
    expected = statistics.mean(b - a for a, b in zip(average["afc"], average["replay"], strict=False))
    (row,) = (r for r in rows if r["less"] == "afc" and r["group"] == "replay" and r["metric"].startswith("average"))
    assert float(row["mean"]) == pytest.approx(expected)
    text = Page(page).text
    assert "Difference from afc (CNN), run by run" in text
    assert "\N{MINUS SIGN}1.00 ± 2.83 1 of 2 1 of 2" in text, "beside the number, and below it on a phone"
    assert "\N{MINUS SIGN}51.00 0 of 1" in text
    alone = write_report([runs[0], runs[3]], tmp_path / "alone.html")
    assert "run by run" not in Page(alone).text, "one pair has no spread"


def test_given_class_orders_are_called_by_numbers(tmp_path: Path) -> None:
    """Whose names would be all their classes; a warning of the drawing, which has no room for that, is an error."""
    names = [f"class number {i}" for i in range(100)]
    orders = [list(range(100)), list(range(99, -1, -1))]
    runs = []
    for method in ("afc", "replay"):
        for number, ids in enumerate(orders):
            run = fake_run(
                tmp_path / f"{method}{number}", method=method, class_names=names, **{**LIGHT, "stage_sizes": (60, 40)}
            )
            given = ",".join(str(i) if method == "afc" else names[i] for i in ids)
            config = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"] | {"order": given}
            edit_json(run / "run.json", config=config, order={"name": given, "class_ids": ids})
            edit_json(run / "result.json", order=given)
            runs.append(run)
    runs.append(fake_run(tmp_path / "seeded", class_names=names, **{**LIGHT, "stage_sizes": (60, 40)}))
    page = write_report(runs)
    folder = page.with_name("report_files")
    labels = re.findall(r">((?:afc|replay)[^<]*)<", (folder / "seconds.svg").read_text(encoding="utf-8"))
    assert sorted(labels) == ["afc, 1/1", "afc, given 1/1", "afc, given 2/1", "replay, given 1/1", "replay, given 2/1"]
    for table in ("runs.csv", "seconds.csv"):
        found = {(row["run"], row["order"]) for row in read_csv(folder / table)}
        assert found == {(run.name, order) for run, order in zip(runs, ["given 1", "given 2"] * 2 + ["1"], strict=True)}
    text = Page(page).text
    assert "replay1 (order given 2, seed 1)" in text
    assert "Order given 2 class number 99, class number 98, " in text
    assert {row["pairs"] for row in read_csv(folder / "differences.csv")} == {"2"}, "by name or by id, it is the same"


@pytest.mark.usefixtures("undrawn")
def test_different_class_orders_are_told_and_no_mean_is_called_the_best(tmp_path: Path) -> None:
    told = "Not every group has the same class orders and seeds"
    afc = [fake_run(tmp_path / f"afc{o}", order=o, **LIGHT) for o in (1, 2)]
    replay = [fake_run(tmp_path / f"replay{o}", method="replay", order=o, **LIGHT) for o in (1, 2)]
    apart = Page(write_report([afc[0], replay[1]]))
    assert told in apart.text
    assert 'class="best"' not in apart.source
    together = Page(write_report([afc[0], replay[0]]))
    assert told not in together.text
    assert 'class="best"' in together.source
    assert told in in_words(make_groups(load_runs([*afc, replay[0]])))
    seed = fake_run(tmp_path / "seed", method="replay", seed=2, **LIGHT)
    assert told in in_words(make_groups(load_runs([afc[0], seed])))
    assert told not in in_words(make_groups(load_runs([*afc, *replay])))


def test_different_protocols_are_called_incomparable(tmp_path: Path) -> None:
    first = fake_run(tmp_path / "a", **LIGHT)
    second = fake_run(tmp_path / "b", method="naive", **{**LIGHT, "stage_sizes": (4, 4)})
    assert "not comparable" in Page(write_report([first, second])).text


def test_fifty_stages(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "long", stage_sizes=(50, *[1] * 50), images_per_class=4, epochs=1)
    page = write_report([run])
    assert page.stat().st_size < 1_500_000
    matrix = read_csv(page.with_name("report_files") / "accuracy_matrix_afc_cnn.csv")
    assert [len(row) for row in matrix] == [52] * 51


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]></text></svg><script>alert(2)</script>",
    "$\\frac{1}$",
    "a & b",
    "line\nbreak\x00\x1b[31m",
    "{{ 7 * 7 }}",
    "日本語のクラス",
]


def test_hostile_names_stay_words(tmp_path: Path) -> None:
    folder = tmp_path / "<b onclick=x>&amp;"
    run = fake_run(folder, class_names=HOSTILE, method="<i>m", command="echo '<script>'", **SHAPE)
    page = write_report([run], tmp_path / "report.html")
    parsed = Page(page)
    assert not {"script", "img", "b", "i"} & set(parsed.tags)
    assert not parsed.handlers
    assert "<script>alert(1)</script>" in unescape(parsed.text)
    assert "{{ 7 * 7 }}" in parsed.text
    assert "<b onclick=x>&amp;" in parsed.text
    for file in page.with_name("report_files").glob("*.svg"):
        tree = ElementTree.parse(file)
        assert not [e for e in tree.iter() if e.tag.rsplit("}", 1)[-1] in ("script", "img")]


@pytest.mark.usefixtures("undrawn")
def test_names_of_runs_stay_inside_the_folder_of_the_report(tmp_path: Path) -> None:
    outside = "/../../../victim"
    names = ("cnn", outside, "..", "a/b", "a?b", "A_b", "x" * 300)
    run = fake_run(tmp_path / "in" / "run", method="../../m", predictors=names, importance=False, stage_sizes=(2, 1))
    (tmp_path / "victim.csv").write_text("mine", encoding="utf-8")
    page = write_report([run], tmp_path / "in" / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "victim.csv"]
    assert (tmp_path / "victim.csv").read_text(encoding="utf-8") == "mine"
    files = [path.name for path in page.with_name("report_files").iterdir()]
    assert all(re.fullmatch(r"\w[\w.-]*", name, re.ASCII) for name in files)
    assert len([name for name in files if name.startswith("confusion_") and name.endswith(".csv")]) == len(names)
    for link in Page(page).links:
        assert link.startswith(("#", "data:")) or (page.parent / link).is_file(), link


def test_file_names_are_safe_and_each_is_used_once() -> None:
    texts = [
        "a.svg",
        "A.svg",
        "a.csv",
        "..svg",
        "../x.svg",
        "é\0.svg",
        "-rf.svg",
        f"{'y' * 999}.svg",
        f"{'y' * 998}.svg",
    ]
    names = file_names(texts)
    assert list(names.values())[:4] == ["a.svg", "A-2.svg", "a.csv", "file.svg"]
    assert len({name.lower() for name in names.values()}) == len(texts)
    assert all(re.fullmatch(r"\w[\w.-]{0,130}", name, re.ASCII) for name in names.values())


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run, elsewhere = fake_run(tmp_path / "run", **LIGHT), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "report_files").symlink_to(elsewhere)
    with pytest.raises(EngramError, match=r"report_files: it is a symbolic link; remove it"):
        write_report([run], tmp_path / "report.html")
    assert not list(elsewhere.iterdir())
    assert not (tmp_path / "report.html").exists()
    folder = tmp_path / "other_files"
    folder.mkdir()
    (elsewhere / "mine").write_text("mine", encoding="utf-8")
    (folder / "summary.csv").symlink_to(elsewhere / "mine")
    (folder / "FILES.txt").write_bytes(b"../elsewhere/mine\n..\n\xff\n.\nsub\n")
    (folder / "sub").mkdir()
    write_report([run], tmp_path / "other.html")
    assert (elsewhere / "mine").read_text(encoding="utf-8") == "mine"
    assert (folder / "sub").is_dir()


def test_text_that_looks_like_code_stays_text_in_tables_and_figures(tmp_path: Path) -> None:
    names = ["=1+1", "+a", "-b", "@c", "\td", "fill: #1d2630", "plain", "stroke: #0b6bb3"]
    run = fake_run(tmp_path / "run", class_names=names, recipe="=2+2", **LIGHT)
    page = write_report([run], tmp_path / "report.html")
    with (page.with_name("report_files") / "confusion_afc_cnn.csv").open(encoding="utf-8", newline="") as stream:
        header, *rows = list(csv.reader(stream))
    shown = ["'=1+1", "'+a", "'-b", "'@c", "'\td", *names[5:]]
    assert (header, [row[0] for row in rows]) == (["true_class", *shown], shown)
    assert all(cell.isdecimal() for row in rows for cell in row[1:])
    summary = read_csv(page.with_name("report_files") / "summary.csv")[0]
    assert summary["recipe"] == "'=2+2"
    assert float(summary["backward_transfer_mean"]) < 0, "a number keeps its sign and has no apostrophe"
    source = page.read_text(encoding="utf-8")
    assert source.count(">fill: #1d2630<") == source.count(">stroke: #0b6bb3<") == 2, "on both axes"


def test_many_classes_are_numbered_and_named_below(tmp_path: Path) -> None:
    names = [f"sign {i}" for i in range(63)]
    runs = [fake_run(tmp_path / "some", class_names=names, **{**LIGHT, "stage_sizes": (60, 3)})]
    svg = (write_report(runs).with_name("report_files") / "confusion_afc_cnn.svg").read_text(encoding="utf-8")
    assert "predicted class, numbered as below" in svg
    assert all(f">{i} {name}<" in svg for i, name in enumerate(names))


def test_an_accuracy_says_what_it_is_over(compared: tuple[list[Path], Path]) -> None:
    text = Page(compared[1]).text
    assert "Top-1 accuracy of the CNN predictor on the test images of all classes seen." in text
    assert "average incremental accuracy is its mean over the stages, including the base stage" in text


def test_report_needs_no_torch(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", **LIGHT)
    code = (
        "import sys, engram\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"engram.write_report({str(run)!r})\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _swap_predictions(run: Path) -> None:
    file = run / "stages" / "002.safetensors"
    tensors = load_file(file)
    tensors["predictions.cnn"] = np.zeros_like(tensors["predictions.cnn"])
    save_file(tensors, file)


def _edit_stage(run: Path, **changes: Any) -> None:
    stages = result_of(run)["stages"]
    stages[1].update(changes)
    edit_json(run / "result.json", stages=stages)


BROKEN = {
    "no run.json": (lambda run: (run / "run.json").unlink(), "is not a run directory"),
    "no result.json": (lambda run: (run / "result.json").unlink(), "no finished stage yet"),
    "no stage": (lambda run: edit_json(run / "result.json", stages=[]), "no finished stage yet"),
    "torn run.json": (lambda run: _truncate(run / "run.json"), "; run it again, or leave this run out"),
    "torn result.json": (
        lambda run: _truncate(run / "result.json"),
        "; resume the run, which writes it again, or",
    ),
    "binary result.json": (lambda run: (run / "result.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
    "list": (lambda run: (run / "result.json").write_text("[1]"), "should be a JSON object, got [1]"),
    "other format": (lambda run: edit_json(run / "run.json", format=2), "in format 2"),
    "missing key": (
        lambda run: edit_json(run / "run.json", stage_sizes=...),
        "stage_sizes is missing",
    ),
    "wrong type": (
        lambda run: edit_json(run / "result.json", seconds="long"),
        "seconds should be a finite number, got 'long'",
    ),
    "other recipe": (lambda run: edit_json(run / "result.json", recipe="other"), "of another run: recipe 'other'"),
    "no tensors": (
        lambda run: (run / "stages/002.safetensors").unlink(),
        "002.safetensors cannot be used: it is missing",
    ),
    "torn tensors": (
        lambda run: _truncate(run / "stages/002.safetensors"),
        "002.safetensors cannot be used: it cannot",
    ),
    "empty tensors": (lambda run: (run / "stages/002.safetensors").write_bytes(b""), "cannot be read"),
    "foreign tensors": (_swap_predictions, "right, result.json has"),
    "too many stages": (lambda run: edit_json(run / "run.json", stage_sizes=[4, 4]), "has 3 stages"),
    "not a percentage": (
        lambda run: _edit_stage(run, accuracy={"cnn": 140.0, "nme": 1.0}),
        "stages[1].accuracy.cnn is 140.0, not in the range 0 to 100",
    ),
    "not a number": (
        lambda run: _edit_stage(run, accuracy={"cnn": float("nan"), "nme": 1.0}),
        "stages[1].accuracy.cnn should be a finite number, got nan",
    ),
    "short row": (
        lambda run: _edit_stage(run, accuracy_by_stage={"cnn": [1.0], "nme": [1.0]}),
        "for each of 2 stages",
    ),
    "bad order": (
        lambda run: edit_json(run / "run.json", order={"name": "1", "class_ids": [0, 0]}),
        "not an order",
    ),
    "changed settings": (
        lambda run: edit_json(run / "run.json", config_hash="0" * 16),
        "its configuration was changed after the run began",
    ),
    "other metric": (
        lambda run: edit_json(run / "result.json", final_accuracy={"cnn": 99.0, "nme": 1.0}),
        "its final_accuracy (cnn) is 99.0 and its stages give",
    ),
    "other average": (
        lambda run: edit_json(run / "result.json", average_incremental_accuracy={"cnn": 99.0, "nme": 1.0}),
        "its average_incremental_accuracy (cnn) is 99.0 and its stages give",
    ),
    "other seed": (lambda run: edit_json(run / "result.json", seed=9), "of another run: seed 9, not 1"),
    "deep result.json": (lambda run: (run / "result.json").write_text("[" * 9999), "half-written or damaged"),
    "huge number": (lambda run: (run / "result.json").write_text("9" * 9999), "half-written or damaged"),
    "huge seconds": (
        lambda run: edit_json(run / "result.json", seconds=10**400),
        "seconds should be a finite number",
    ),
    "not a number in settings": (
        lambda run: edit_json(run / "run.json", config={"seed": float("nan")}),
        "config.seed should be a finite number, got nan",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_run_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    run = fake_run(tmp_path / "run", **SHAPE)
    damage, message = BROKEN[name]
    damage(run)
    with pytest.raises(EngramError, match=re.escape(message)) as caught:
        write_report([run])
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (run / "report.html").exists()


def test_wrong_requests(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", **SHAPE)
    with pytest.raises(EngramError, match="no run directory was given"):
        write_report([])
    with pytest.raises(EngramError, match="there is no run directory at"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(EngramError, match="was given twice"):
        write_report([run, tmp_path / "x" / ".." / "run"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngramError, match=r"empty is not a run directory: it has no run\.json"):
        write_report([run, tmp_path / "empty"])
    with pytest.raises(EngramError, match=r"ends in \.html"):
        write_report([run], run / "run.json")
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")
    with pytest.raises(EngramError, match="cannot write"):
        write_report([run], blocker / "report.html")


@pytest.mark.usefixtures("undrawn")
def test_one_path_or_a_folder_of_runs_may_be_given(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        fake_run(tmp_path / "runs" / str(seed), seed=seed, **SHAPE)
    assert write_report(str(tmp_path / "runs" / "1")) == tmp_path / "runs" / "1" / "report.html"
    (tmp_path / "runs" / "3" / "result.json").unlink()
    said: list[str] = []
    page = write_report(tmp_path / "runs", tell=said.append)
    assert page == tmp_path / "runs" / "report.html"
    assert said == [f"left out {tmp_path / 'runs' / '3'}: it has no finished stage yet"]
    both = write_report([tmp_path / "runs" / "1", str(tmp_path / "runs" / "2")], str(tmp_path / "both.html"))
    assert both.read_text(encoding="utf-8").replace("both_files", "report_files") == page.read_text(encoding="utf-8")
    with pytest.raises(EngramError, match="3 has no finished stage yet"):
        write_report(tmp_path / "runs" / "3")
    with pytest.raises(EngramError, match="was given twice"):
        write_report([tmp_path / "runs", tmp_path / "runs" / "1"])


def test_a_template_of_another_folder_may_include_the_reports_own(tmp_path: Path) -> None:
    (tmp_path / "page.jinja").write_text("{{ name }}\n{% include 'style.css' %}", encoding="utf-8")
    assert template("page.jinja", tmp_path).render(name="<b>").startswith("&lt;b&gt;\n:root")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(42.04, "42.0 s"), (99.4, "99.4 s"), (99.7, "1 min 40 s"), (3599.7, "1 h 00 min"), (7625.0, "2 h 07 min")],
)
def test_seconds_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(Estimate(seconds, None, 1)) == said
    assert duration(Estimate(seconds, 185.0, 2)).split("\N{NO-BREAK SPACE}") == [said, "±", "3 min 05 s"]
