"""The page on a paper in a real browser: no console message, no request, readable on a phone and on a desk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engram.experiment.recipes import apply_changes, named_after_changes, recipe
from engram.reproduce.cell_plan import make_plan
from engram.reproduce.paper import load_paper
from engram.reproduce.paper_page import write_page
from engram.reproduce.records import Record
from paper_helpers import make_record
from test_report_browser import BROWSER, OVERFLOWING, Browser, browser

__all__ = ["browser"]  # a fixture
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH to open the page in")
IMPORTANCE = [[4.0 - 0.05 * i for i in range(64)]]


def records() -> list[Record]:
    """Three class orders of every setting of Table 1's AFC and PODNet rows, and of Figure 2's."""
    names = [f"{m}-cifar100-b50-s{s}" for m in ("afc", "afc-nme", "podnet", "podnet-nme") for s in (50, 25, 10, 5)]
    configs = [recipe(name) for name in names]
    plain = recipe("afc-cifar100-b50-s50")
    sizes = [f"settings.importance_samples={samples}" for samples in (100, 500, 1000)]
    configs += [named_after_changes(plain, apply_changes(plain, [size])) for size in sizes]
    return [
        make_record(config, 60.0 + number / 3 + place, order=str(place), importance=IMPORTANCE)
        for number, config in enumerate(configs)
        for place in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    paper = load_paper()
    plan = make_plan(paper.find(["all", "effects"]), records())
    return write_page(tmp_path_factory.mktemp("page") / "reproduction.html", paper, plan)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_is_quiet_and_fits(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate("document.querySelectorAll('main section').length") == 15
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    spoken = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert [event for event in browser.events if event.get("method") in spoken] == []
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", page.resolve().as_uri()))] == []


def test_plots_have_units_and_n_and_cells_without_runs_say_so(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)

    def texts(section: str) -> str:
        return browser.evaluate(
            f"[...document.querySelectorAll('#{section} svg')].map(s => s.textContent.replace(/\\s+/g, ' ')).join('|')"
        )

    for figure in ("figure2", "figure4"):
        assert "top-1 accuracy, %" in texts(figure)
        assert "classes seen" in texts(figure)
        assert "n = 3" in texts(figure)
    assert texts("figure2").count("n = 3") == 4
    assert "importance (map mean = 1)" in texts("figure3")
    assert "n = 1" in texts("figure3")
    assert "points" in texts("table1")
    rows = browser.evaluate(
        "[...document.querySelectorAll('#table1 tbody tr')].map(r => [0, 1].map(i => r.children[i].innerText))"
    )
    cells = {label.strip(): text for label, text in rows}
    assert cells["iCaRL"].splitlines() == ["not run", "paper 44.20 ± 0.98"]
    assert cells["AFC (CNN)"].splitlines() == ["62.00 ± 1.00", "n = 3", "paper 62.18 ± 0.57", "−0.18"]
    shown = browser.evaluate(
        "getComputedStyle(document.querySelector('#table1 .mark.std'), '::before').backgroundColor"
    )
    assert shown not in ("rgba(0, 0, 0, 0)", "transparent"), "the mark is filled"
    narrow = browser.evaluate("Math.min(...[...document.querySelectorAll('td.cell')].map(c => c.clientWidth))")
    assert narrow > 60


def test_every_cell_is_in_sight_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, 390)
    hidden = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth + 1)"
        ".map(b => b.getAttribute('aria-label'))"
    )
    assert hidden == []
    cells = browser.evaluate(
        "[...document.querySelectorAll('#table1 tbody tr:first-child td')].map(c => ["
        " getComputedStyle(c, '::before').content, c.getBoundingClientRect().right, c.getBoundingClientRect().width])"
    )
    columns = browser.evaluate("[...document.querySelectorAll('#table1 thead th')].slice(1).map(h => h.textContent)")
    assert [json.loads(name) for name, _, _ in cells] == columns, "each cell has its column's name"
    assert all(right <= 390 and width > 100 for _, right, width in cells)
