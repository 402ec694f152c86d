"""A person at the page of `engram serve`: a headless Chromium that clicks, types, presses keys and drops files."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_report_browser import Browser

ROOT = Path(__file__).parents[1]
PATIENCE = 180.0  # seconds: a lesson or a check beside other work takes its time
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
# An element by its visible name, as a person or a screen reader finds it.
FIND = """(selector, name, among) =>
  [...(document.querySelector(among) ?? document).querySelectorAll(selector)].find(e => {
  if (!e.checkVisibility()) return false;
  const said = (e.getAttribute('aria-label') ?? e.textContent).trim().replace(/\\s+/g, ' ');
  return name === null || said === name || e.textContent.trim().replace(/\\s+/g, ' ') === name;
})"""

# The middle of an element if it is where it was at the last call, and is what a click there would meet.
STEADY = """e => {
  if (!e) return null;
  e.scrollIntoView({block: 'center', behavior: 'instant'});
  const box = e.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
  const before = window.steady;
  window.steady = {e, x, y};
  const met = document.elementFromPoint(x, y);
  return before?.e === e && before.x === x && before.y === y && e.contains(met) ? {x, y} : null;
}"""


class Visitor(Browser):
    """A browser with hands. Every wait ends with an error that says what was waited for."""

    def visit(self, url: str, width: int = 1280, height: int = 900, drawn: str = "main h1") -> None:
        """Load a page, and wait for an element of it."""
        if self.session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
                self.call(f"{domain}.enable")
            self.call("Page.setInterceptFileChooserDialog", enabled=True)
        self.resize(width, height)
        self.call("Page.navigate", url="about:blank")
        self.take_events()  # what the page before said when it lost its server
        self.call("Page.navigate", url=url)
        self.wait(f"document.querySelector('{drawn}') !== null", "the page to be drawn")

    def resize(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Give the page another size and colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def wait(self, expression: str, what: str, seconds: float = PATIENCE) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.02)
        text = self.evaluate("document.body.innerText")
        raise AssertionError(f"waited {seconds:.0f} s for {what}; the page says:\n{text}")

    def text(self, selector: str = "main") -> str:
        """Return the visible text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_text(self, pattern: str, selector: str = "main", seconds: float = PATIENCE) -> str:
        """Wait for a text in an element, and return all of it."""
        inside = f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"
        self.wait(f"/{pattern}/i.test({inside})", f"/{pattern}/", seconds)
        return self.text(selector)

    def point(self, selector: str, name: str | None = None, among: str = "dialog[open], body") -> tuple[float, float]:
        """Wait for an element that neither moves nor is covered, with the page scrolled to it; return its middle."""
        found = f"({FIND})({json.dumps(selector)}, {json.dumps(name)}, {json.dumps(among)})"
        place = self.wait(f"({STEADY})({found})", f"{selector} {name or ''}")
        return place["x"], place["y"]

    def click(self, name: str | None, selector: str = "button, a, summary, label", among: str | None = None) -> None:
        """Click the element with that name."""
        if among is None:
            among = "dialog[open]" if self.evaluate("Boolean(document.querySelector('dialog[open]'))") else "body"
        x, y = self.point(selector, name, among)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key of the keyboard."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {" ": "Space"}.get(key, key)
        common = {"key": key, "code": code, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def focus_by_tab(self, name: str, most: int = 80) -> None:
        """Press Tab until the focus is on an element with that name; it must be seen there."""
        said = (
            "(e => [e.getAttribute('aria-label'), e.labels?.[0]?.textContent, e.textContent]"
            ".map(t => (t ?? '').trim().replace(/\\s+/g, ' ')))(document.activeElement)"
        )
        for _ in range(most):
            self.press("Tab")
            if name in self.evaluate(said):
                ring = "(e => [e, e.closest('label')].some(x => x && getComputedStyle(x).outlineStyle !== 'none'))"
                assert self.evaluate(f"{ring}(document.activeElement)"), f"no focus ring on {name}"
                return
        raise AssertionError(f"Tab does not reach {name!r}")

    def choose_files(self, files: Sequence[Path]) -> None:
        """Answer the file chooser that the page has opened."""
        end = time.monotonic() + PATIENCE
        while not (asked := [e for e in self.events if e.get("method") == "Page.fileChooserOpened"]):
            assert time.monotonic() < end, "the page opens no file chooser"
            self.evaluate("1")
        self.events = [e for e in self.events if e.get("method") != "Page.fileChooserOpened"]
        node = asked[-1]["params"]["backendNodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file) for file in files], backendNodeId=node)

    def drop(self, paths: Sequence[Path], selector: str, name: str | None = None) -> None:
        """Drag files or folders from outside onto an element."""
        x, y = self.point(selector, name)
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def go(self, view: str) -> None:
        """Open a view by its tab."""
        self.click(None, f"nav a[data-view={view}]", "body")
        self.wait(f"location.hash.endsWith('/{view}') && document.querySelector('main h1') !== null", view)

    def screenshot(self, file: Path, full: bool = False) -> None:
        """Save what is seen, or the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        file.write_bytes(base64.b64decode(picture["data"]))

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        self.evaluate("1")
        events, self.events = self.events, []
        return events

    def complaints(self, events: Sequence[dict[str, Any]]) -> list[str]:
        """Return what the console says."""
        found: list[str] = []
        for event in events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:500])
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(json.dumps(params["args"])[:500])
        return found


def requested(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the addresses of all requests."""
    return [e["params"]["request"]["url"] for e in events if e.get("method") == "Network.requestWillBeSent"]


class Server:
    """`engram serve` in a process of its own."""

    def __init__(self, models: Sequence[Path], *options: str, port: int = 0) -> None:
        self.models, self.options = models, options
        words = ["serve", *map(str, models), "--no-browser", "--port", str(port), *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engram", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if found := re.search(r"http://\S+?:(\d+)", line):
                self.port = int(found.group(1))
                break
        else:
            raise AssertionError(f"the server ended: {said}")
        self.url = f"http://127.0.0.1:{self.port}/"

    def kill(self) -> None:
        """End the server at once, with the processes that it started."""
        assert self.process.stdout is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def close(self) -> None:
        """End the server as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
