"""The page of `engram serve` in a real browser: a model is made, taught more, corrected and undone."""

from __future__ import annotations

import base64
import json
import re
import tarfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model_helpers import make, pictures
from page_visitor import PATIENCE, Server, Visitor, requested
from serve_helpers import serving
from test_report_browser import BROWSER, OVERFLOWING

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH to open the page in")
ROOT = Path(__file__).parents[1]
FIRST = ("bicycle", "cloud", "palm_tree", "rabbit", "road", "shrew")
SECOND = ("skyscraper", "snake")
TOKEN = "open-sesame-0123456789"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
SETTINGS = ("train.batch_size=16", "train.lr=0.05")
TINY = (
    "--method",
    "afc",
    "--backbone",
    "resnet10",
    "--image-size",
    "16",
    "--memory",
    "per_class=4",
    "--holdout",
    "0.3",
)
OPTIONS = (*TINY, *(word for text in SETTINGS for word in ("--set", text)), "--device", "cpu", "--threads", "1")
# Remembers what the progress bar of a lesson has shown.
WATCH = """window.seen = []; new MutationObserver(() => {
  const bar = document.querySelector('.running [role=progressbar]');
  if (bar) window.seen.push([Number(bar.getAttribute('aria-valuenow')), document.querySelector('.phase').textContent]);
}).observe(document.querySelector('main'), {subtree: true, childList: true, attributes: true, characterData: true})"""
FOUND = find_spec("axe_core_python")  # a package that only carries the script
AXE = None if FOUND is None or FOUND.origin is None else Path(FOUND.origin).with_name("axe.min.js")


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    camera = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    visitor = Visitor(tmp_path_factory.mktemp("profile"), *camera)
    yield visitor
    visitor.close()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight photographs of each class in `first` and `second`, some others in `test`, and what should be noticed."""
    with tarfile.open(ROOT / "tests" / "fixtures" / "ten-classes.tar.gz") as archive:
        archive.extractall(tmp_path / "all", filter="data")
    for part, names in (("first", FIRST), ("second", SECOND)):
        for name in names:
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for file in sorted((tmp_path / "all" / "train" / name).iterdir())[:8]:
                file.rename(place / file.name)
    (tmp_path / "all" / "test").rename(tmp_path / "test")
    copied = min((tmp_path / "first" / "cloud").iterdir())
    Image.open(copied).save(tmp_path / "first" / "cloud" / "zz-copy.png")
    (tmp_path / "first" / "rabbit" / "torn.jpg").write_bytes(b"\xff\xd8\xff not an image")
    return tmp_path


def test_a_model_is_taught_corrected_and_undone(visitor: Visitor, photos: Path) -> None:
    model = photos / "pets & plants"
    server = Server([model], *OPTIONS, "--token", TOKEN)
    try:
        give_the_token(visitor, server)
        make_six_classes(visitor, photos)
        see_the_images_of_a_cell(visitor)
        teach_two_more_by_keyboard(visitor, photos)
        predict_and_correct(visitor, photos)
        server = interrupt_a_lesson(visitor, server)
        undo_rename_and_remove(visitor)
        look_at_the_history(visitor)
    finally:
        server.close()


def give_the_token(page: Visitor, server: Server) -> None:
    """The page asks until the token is right; the tab remembers it."""
    page.visit(server.url, drawn="dialog[open]")
    page.evaluate("document.querySelector('dialog').first = true")
    page.type("wrong")
    page.press("Enter")
    page.wait("(d => d && !d.first)(document.querySelector('dialog[open]'))", "another question")
    page.wait_text("asks for a token", "dialog[open]")
    page.type(TOKEN)
    page.press("Enter")
    page.wait_text("This model is new")
    page.take_events()  # the browser logs the requests that were refused
    page.visit(server.url)
    assert page.evaluate("document.querySelector('dialog') === null")


def make_six_classes(page: Visitor, photos: Path) -> None:
    """The model does not exist yet: the page says what to do; a folder of class folders is dropped and learned."""
    page.wait_text("This model is new")
    page.go("recognise")
    assert "Go to Teach" in page.wait_text("Nothing has been learned yet")
    page.go("teach")
    page.drop([photos / "first"], ".zone")
    page.wait_text("49 images: 6 new classes")
    assert "torn.jpg: It cannot be read" in page.text()
    page.wait("[...document.querySelectorAll('.thumb img')].filter(i => i.naturalWidth).length >= 8", "thumbnails")
    choose_epochs(page, 12)
    page.click("Start learning")  # it looks at the images first
    page.click("Show me")
    assert "The same image more than once" in page.text(".findings")
    copies = page.evaluate("[...document.querySelectorAll('.findings button')].map(b => b.textContent)")
    page.click(next(text for text in copies if text.startswith("Keep one of each")))
    page.wait_text(r"4[0-8] images: 6 new classes")
    quiet(page)
    page.click("Start learning")
    text = page.wait_text("Class by class")
    assert "The model has learned bicycle, cloud, palm_tree, rabbit" in text
    assert len(rows(page)) == 6
    quiet(page)


def choose_epochs(page: Visitor, epochs: int) -> None:
    page.wait("Boolean(document.querySelector('.options'))", "the options")
    if not page.evaluate("document.querySelector('.options').open"):
        page.click("How long to learn")
    page.evaluate("document.querySelector('[aria-label=\"Number of epochs\"]').select()")
    page.click(None, "[aria-label='Number of epochs']")
    page.evaluate("document.activeElement.select()")
    page.type(str(epochs))


def rows(page: Visitor) -> dict[str, list[str]]:
    """The table of what was learned: the cells by class."""
    cells = "[...r.children].map(c => (c.tagName === 'TH' ? c.firstChild.textContent : c.innerText.trim()))"
    found = page.evaluate(f"[...document.querySelectorAll('.learned tbody tr')].map(r => {cells})")
    return {name: cells for name, *cells in found}


def see_the_images_of_a_cell(page: Visitor) -> None:
    page.click(None, ".matrix .cell")
    page.wait("Boolean(document.querySelector('dialog[open] .pictures img')?.naturalWidth)", "the images of a cell")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')", "the dialog to close")
    assert page.evaluate("document.activeElement.classList.contains('cell')"), "the focus goes back"


def teach_two_more_by_keyboard(page: Visitor, photos: Path) -> None:
    """No mouse: new classes, their files, the lesson; every stop has a focus ring."""
    page.evaluate("document.activeElement.blur()")
    page.focus_by_tab("Skip to the content")
    page.press("Enter")
    for name in SECOND:
        page.evaluate("document.querySelector('.name-form input').scrollIntoView()")
        page.focus_by_tab("Name of a class", most=200)
        page.type(name)
        page.press("Enter")
        page.wait(f"document.activeElement.getAttribute('aria-label') === 'Choose images for {name}'", "the focus")
        page.press("Enter")
        page.choose_files(sorted((photos / "second" / name).iterdir()))
        page.wait_text(rf"{name}\s+8 images")
        page.evaluate("document.querySelector('main').focus()")
    page.wait_text("16 images: 2 new classes")
    page.focus_by_tab("Start learning", most=200)
    page.press("Enter")
    page.wait("Boolean(document.querySelector('dialog[open], .running, .result[open]'))", "the lesson")
    if page.evaluate("Boolean(document.querySelector('dialog[open]'))"):  # findings: learn anyway
        page.focus_by_tab("Learn anyway")
        page.press("Enter")
    text = page.wait_text("The model has learned skyscraper and snake")
    assert "It knows 8 classes now" in text
    assert "Old classes" in text
    found = rows(page)
    assert len(found) == 8
    for name in SECOND:
        assert found[name][0] == "–"
    for name in FIRST:
        before, after, change = found[name][:3]
        assert before.endswith("%")
        lost = float(after.removesuffix(" %")) - float(before.removesuffix(" %"))
        shown = float(change.replace("±", "").replace("−", "-"))
        assert abs(lost - shown) < 0.11, found[name]
    quiet(page)


def predict_and_correct(page: Visitor, photos: Path) -> None:
    page.go("recognise")
    files = [min((photos / "test" / name).iterdir()) for name in ("snake", "road", "cloud")]
    page.drop([*files, photos / "first" / "rabbit" / "torn.jpg"], ".zone")
    page.wait_text("4 images.*1 failed", ".toolbar")
    page.wait("document.querySelectorAll('.shot .ranks').length === 3", "predictions")
    shares = page.evaluate("[...document.querySelectorAll('.shot .ranks')].map(r => r.querySelectorAll('li').length)")
    assert shares == [5, 5, 5]
    page.wait("[...document.querySelectorAll('.near img')].filter(i => i.naturalWidth).length >= 8", "near examples")
    assert "Cannot be recognised" in page.text(".shots")
    page.click(None, ".shot:first-child .correction button")
    page.type("snake")
    page.press("Enter")
    page.wait_text("In the draft as snake", ".shots")
    assert page.text("#draft-count").startswith("1")
    quiet(page)


def interrupt_a_lesson(page: Visitor, server: Server) -> Server:
    """Watch, stop and continue; kill the server: the page says so, comes back, and offers to go on or to discard."""
    page.go("teach")
    page.wait_text("1 image: more images of snake")
    choose_epochs(page, 9000)
    page.evaluate(WATCH)
    page.click("Start learning")
    page.wait_text("training · epoch [0-9]+ of 9000", ".running")
    page.wait(
        "document.querySelector('.running .curve').getAttribute('d')?.split('L').length >= 3", "the curve of the loss"
    )
    shown = [done for done, _ in page.evaluate("window.seen")]
    assert shown == sorted(shown)
    page.click("Stop")
    page.wait_text("The lesson is stopped")
    page.click("Continue")
    page.wait_text("training", ".running")
    quiet(page)
    server.kill()
    page.wait_text("connection to the server is lost", "#connection")
    again = Server(server.models, *server.options, port=server.port)
    page.wait_text("The server is back", "#notices")
    assert "The model is as it was before that lesson" in page.wait_text("A lesson was interrupted")
    assert page.text("#connection") == ""
    page.take_events()  # the browser logs the requests that failed meanwhile
    page.click("Discard the lesson")
    page.click("Discard")
    page.wait_text("1 image: more images of snake")
    return again


def undo_rename_and_remove(page: Visitor) -> None:
    page.go("history")
    page.wait_text("Learned skyscraper and snake")
    page.click("Undo the last change")
    page.click("Undo")
    page.wait_text("skyscraper and snake are gone", "#notices")
    page.go("classes")
    page.wait_text("6 classes")
    page.click("Rename bicycle")
    page.evaluate("document.activeElement.select()")
    page.type(HOSTILE)
    page.press("Enter")
    page.wait(f"document.querySelector('.classes').innerText.includes({json.dumps(HOSTILE)})", "the new name")
    page.click("Remove road")
    assert "Undo, in History, brings it back" in page.wait_text("Remove road", "dialog")
    page.click("Cancel")
    page.click("Remove road")
    page.click("Remove")
    page.wait_text("5 classes")
    page.wait("[...document.querySelectorAll('.class-card img')].filter(i => i.naturalWidth).length >= 6", "examples")
    quiet(page)


def look_at_the_history(page: Visitor) -> None:
    page.go("history")
    page.wait_text("Removed")
    page.wait("Boolean(document.querySelector('svg.lessons'))", "the chart")
    for width in (390, 1280):
        page.resize(width, dark=width == 390)
        for view in ("recognise", "teach", "classes", "history"):
            page.go(view)
            fits(page, view)
    assert "owned" not in page.evaluate("document.title")
    quiet(page)


def fits(page: Visitor, view: str) -> None:
    """Nothing is wider than the page, and nothing in a card is wider than the card."""
    boxed = OVERFLOWING.replace("'.scroll, pre, svg'", "'.scroll, svg, .hidden'").replace("'.scroll, pre'", "'.scroll'")
    assert page.evaluate(boxed) == [], view
    inside = "[...document.querySelectorAll('.card')].filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth)"
    assert page.evaluate(f"{inside}.map(e => e.outerHTML.slice(0, 200))") == [], view


def quiet(page: Visitor) -> None:
    """The console has said nothing, and no other host was asked."""
    events = page.take_events()
    assert page.complaints(events) == []
    origin = page.evaluate("location.origin")
    assert [url for url in requested(events) if not url.startswith((f"{origin}/", "blob:", "data:", "about:"))] == []


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server of two models, and a folder of photographs of two other classes."""
    place = tmp_path_factory.mktemp("two")
    models = [make(place / name, ("apple", "boat", "camel"), ("dingo",)) for name in ("one", "two")]
    images, labels = pictures(("easel", "falcon"), count=10, seed=3, size=40)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (place / "photos" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / "photos" / label / f"{number}.png")
    Image.fromarray(images[0]).save(place / "photos" / "easel" / "again.bmp")
    with serving(*models) as api:
        yield str(api.base_url.join("/")), place / "photos"


@pytest.mark.slow
def test_camera_paste_compare_and_downloads(visitor: Visitor, two_models: tuple[str, Path], tmp_path: Path) -> None:
    url, photos = two_models
    visitor.visit(url)
    visitor.go("recognise")
    visitor.click("Camera")
    visitor.wait("document.querySelector('video')?.videoWidth > 0", "the picture of the camera")
    visitor.click("Take a photo")
    visitor.wait("document.querySelector('.strip img') !== null", "the photo")
    visitor.click("Use the photos")
    visitor.wait("document.querySelectorAll('.shot .ranks').length === 1", "the prediction of the photo")
    assert visitor.evaluate("document.querySelector('.shot img').naturalWidth") > 100
    paste(visitor, next((photos / "falcon").iterdir()))
    visitor.wait("document.querySelectorAll('.shot .ranks').length === 2", "the prediction of what was pasted")
    visitor.go("compare")
    paste(visitor, next((photos / "easel").iterdir()))
    visitor.wait("document.querySelectorAll('.compared .answer .ranks').length === 2", "the predictions of both models")
    assert re.search(r"one.*%.*two.*%", visitor.text(".compared"), re.DOTALL)
    visitor.go("history")
    visitor.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    visitor.click("Download the report")
    assert "apple" in downloaded(tmp_path / "one-report.html").decode()
    if find_spec("onnxruntime") is not None:
        visitor.click("Download ONNX")
        assert len(downloaded(tmp_path / "one.onnx")) > 10_000
    quiet(visitor)


def paste(page: Visitor, file: Path) -> None:
    """Paste an image file, as from another window."""
    content = base64.b64encode(file.read_bytes()).decode()
    page.evaluate(
        f"""(() => {{
          const bytes = Uint8Array.from(atob({json.dumps(content)}), c => c.charCodeAt(0));
          const data = new DataTransfer();
          data.items.add(new File([bytes], 'pasted.png', {{type: 'image/png'}}));
          document.body.dispatchEvent(new ClipboardEvent('paste', {{clipboardData: data, bubbles: true}}));
        }})()"""
    )


def downloaded(file: Path) -> bytes:
    """The content of a file once the browser has it."""
    end = time.monotonic() + PATIENCE
    while not file.exists():  # it has another name before
        assert time.monotonic() < end, f"no {file.name}"
        time.sleep(0.05)
    return file.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(AXE is None, reason="no axe-core: pip install axe-core-python")
def test_axe_finds_no_serious_fault(visitor: Visitor, two_models: tuple[str, Path]) -> None:
    assert AXE is not None
    url, photos = two_models
    source = AXE.read_text()
    faults: list[Any] = []
    visitor.visit(url)
    for dark in (False, True):
        visitor.resize(390 if dark else 1280, dark=dark)
        visitor.go("recognise")
        visitor.drop(sorted((photos / "falcon").iterdir())[:3], ".zone")
        visitor.wait("document.querySelectorAll('.shot .ranks').length >= 3", "predictions")
        visitor.click(None, ".shot:first-child .correction button")
        faults += axe(visitor, source)
        visitor.go("teach")
        if not dark:
            visitor.drop([photos], ".zone")
            visitor.wait_text("21 images|20 images")
            visitor.click("Check the images")
            visitor.wait_text("before learning")
        visitor.click(None, ".thumb")
        faults += axe(visitor, source)
        visitor.click(None, ".thumb")
        for view in ("classes", "history", "compare"):
            visitor.go(view)
            visitor.wait("Boolean(document.querySelector('.classes h2, .matrix .cell, .compare'))", view)
            fits(visitor, view)
            faults += axe(visitor, source)
    visitor.go("classes")
    visitor.click("Remove apple")
    faults += axe(visitor, source)
    visitor.click("Cancel")
    visitor.resize(1280)
    visitor.go("teach")
    choose_epochs(visitor, 1)
    visitor.click("Start learning")
    visitor.wait_text("The model has learned")
    visitor.wait("Boolean(document.querySelector('.matrix .cell'))", "the matrix")
    faults += axe(visitor, source)
    assert faults == []
    quiet(visitor)


def axe(page: Visitor, source: str) -> list[Any]:
    """The faults that axe-core calls serious or critical."""
    page.evaluate(f"{source}; 0")
    done = "faults => { window.faults = faults.violations; }, error => { window.failure = String(error); }"
    page.evaluate(f"window.faults = window.failure = null; axe.run().then({done}); 0")
    page.wait("window.faults !== null || window.failure !== null", "axe")
    assert page.evaluate("window.failure") is None
    bad = "window.faults.filter(f => ['serious', 'critical'].includes(f.impact))"
    return page.evaluate(f"{bad}.map(f => [f.id, f.nodes.slice(0, 5).map(n => [n.html, n.failureSummary])])")
