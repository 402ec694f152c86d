"""The report in a real browser: no console message, no request, no sideways scrolling on a phone or on a desk."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engram.report.evaluation_page import write_evaluation
from engram.report.page import write_report
from fake_runs import fake_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH to open the report in")

# The browser talks on descriptors 3 and 4; this puts our pipe's ends there and becomes the browser.
_LAUNCH = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])"""
OVERFLOWING = """(() => {
  const wide = document.documentElement.clientWidth;
  const boxed = e => e.closest('.scroll, pre, svg') && !e.matches('.scroll, pre');
  return [...document.querySelectorAll('body *')]
    .filter(e => !boxed(e) && e.getBoundingClientRect().right > wide + 1)
    .map(e => e.tagName + '.' + e.className);
})()"""

# How many cells of every row of a section's first table are whole in its box.
IN_SIGHT = """(box => Math.min(...[...box.querySelectorAll('tr')].map(row =>
  [...row.children].filter(cell => {{
    const seen = cell.getBoundingClientRect();
    return seen.width && seen.right <= box.getBoundingClientRect().right + 1;
  }}).length)))(document.querySelector('{} .scroll'))"""


class Browser:
    """A headless Chromium spoken to in its DevTools protocol over a pipe; no driver, no port."""

    def __init__(self, profile: Path, *options: str) -> None:
        assert BROWSER is not None
        our_read, their_write = os.pipe()
        their_read, our_write = os.pipe()
        # High numbers, so that neither end is overwritten by the other's move to 3 or 4.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (their_read, their_write)]
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += " --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
        command = [sys.executable, "-c", _LAUNCH, *map(str, theirs), BROWSER, *flags.split()]
        self.process = subprocess.Popen(
            [*command, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (their_read, their_write, *theirs):
            os.close(end)
        self.read_end, self.write_end = our_read, our_write
        self.buffer, self.number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.read_end, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser did not answer")
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; events that come first are kept."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while (answer := self._receive(deadline)).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Nothing; the page is then loaded at this width."""
        if self.session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(deadline))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        """Nothing; the browser is gone."""
        self.session = None
        with contextlib.suppress(OSError, TimeoutError, AssertionError):
            self.call("Browser.close")
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.read_end)
        os.close(self.write_end)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    names = [hostile, "W" * 90, *(f"name_{i}" for i in range(4))]
    shape = {"stage_sizes": (3, 1, 1, 1), "class_names": names}
    naive = fake_run(folder / "naive", method="naive", predictors=("cnn",), importance=False, **shape)
    command = "engram run afc-mini-b3-s3 " + "--note with-many-words " * 12
    afc = [fake_run(folder / f"afc{s}", seed=s, command=command, **shape) for s in (1, 2)]
    recipe = "afc-mini-b3-s3 (lambda_disc=0.5, importance_samples=1000, memory=per_class=10)"
    changed = [fake_run(folder / f"changed{s}", recipe=recipe, seed=s, **shape) for s in (1, 2)]
    return write_report([naive, *afc, *changed])


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_is_quiet_and_fits(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark)
    assert browser.evaluate("document.querySelectorAll('figure svg').length") >= 10
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOWING) == []
    assert "owned" not in browser.evaluate("document.title")
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    spoken = [
        e
        for e in browser.events
        if e.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert spoken == []
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", page.resolve().as_uri()))] == []


def test_numbers_that_matter_are_in_sight(browser: Browser, page: Path) -> None:
    for section in ("summary", "accuracy"):
        browser.open(page, 1280)
        wide = f"(b => b.scrollWidth - b.clientWidth)(document.querySelector('#{section} .scroll'))"
        assert browser.evaluate(wide) == 0, f"the table of {section} fits a desk"
    browser.open(page, 390)
    assert browser.evaluate(IN_SIGHT.format("#summary")) >= 3, "the method, its average and its final accuracy"
    heads = browser.evaluate("[...document.querySelectorAll('#summary thead th')].map(h => h.innerText).slice(2, 4)")
    assert [" ".join(head.split()) for head in heads] == ["Average incremental accuracy, %", "Final accuracy, %"]
    assert browser.evaluate("getComputedStyle(document.querySelector('#summary .hint')).display") == "block"
    lines = (
        "Math.max(...[...document.querySelector('#summary .scroll').querySelectorAll('tbody td')].map(cell => {"
        " const text = document.createRange(); text.selectNodeContents(cell); return text.getClientRects().length; }))"
    )
    assert browser.evaluate(lines) == 2, "lines of a number and its spread, which set the height of a row"
    differences = "(box => box.scrollWidth - box.clientWidth)(document.querySelector('#summary h3 + .card .scroll'))"
    assert browser.evaluate(differences) == 0, "the table of differences fits a phone"
    legend = (
        "[...document.querySelectorAll('#accuracy svg')].map(s => s.lastElementChild.getBoundingClientRect().right)"
    )
    assert max(browser.evaluate(legend)) <= 390
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('#accuracy svg')].map(s => {"
        " const t = [...s.querySelectorAll('text')].at(-1);"
        " const scale = s.getBoundingClientRect().width / s.viewBox.baseVal.width;"
        " return parseFloat(getComputedStyle(t).fontSize) * scale; }))"
    )
    assert smallest >= 9.5, "pixels of the text beside a line"


@pytest.mark.parametrize("classes", [8, 20])
def test_evaluation_fits_a_phone(browser: Browser, tmp_path: Path, classes: int) -> None:
    names = [f"kind_of_thing_{i}" for i in range(classes)]
    found = {
        "model": "model",
        "folder": "photos",
        "method": "afc",
        "by": "cnn",
        "unreadable": [],
        "images": 20 * classes,
        "learned_from": 3,
        "accuracy": 50.0,
        "accuracy_of_images": 50.0,
        "classes": [{"class": name, "images": 20, "right": 10, "accuracy": 50.0} for name in names],
        "confusion": [
            [10 if i == j else 10 * (j == (i + 1) % classes) for j in range(classes)] for i in range(classes)
        ],
        "left_out": [{"class": f"stranger {i}", "images": i} for i in range(1, 23)],
    }
    browser.open(write_evaluation(found, tmp_path / "page.html"), 390)
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(IN_SIGHT.format("#classes")) == 4
    assert "stranger 20 (20 images) and 2 more classes." in browser.evaluate(
        "document.querySelector('.notes').innerText"
    )
    scrolls = browser.evaluate("document.querySelectorAll('#confusion .wide').length")
    assert scrolls == (classes == 20), "the matrix scales where its names stay readable, else it says that it scrolls"


def test_figures_follow_the_colour_scheme(browser: Browser, page: Path) -> None:
    shades = []
    for dark in (False, True):
        browser.open(page, 1280, dark)
        shades.append(browser.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill"))
    assert shades[0] != shades[1]


def test_browser_check_sees_a_page_that_is_too_wide(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<body><div style='width: 2000px'>wide</div><script>console.error('loud')</script>", encoding="utf-8"
    )
    browser.open(page, 390)
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    assert browser.evaluate(OVERFLOWING) == ["DIV."]
    assert any(event.get("method") == "Runtime.consoleAPICalled" for event in browser.events)
