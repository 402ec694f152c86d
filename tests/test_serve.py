"""`engram serve`: every route, batches, takeover of new generations, lessons, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engram.core.errors import EngramError
from engram.models.edit import rename_class
from engram.models.learning import has_learning
from engram.models.prediction import default_batch
from engram.models.store.generations import Pointer
from engram.serve.counters import Metrics
from engram.serve.guard import CSP, Access
from engram.serve.limits import Limits, Refused
from engram.serve.predicting import Batcher, Generation
from engram.serve.served_model import unique_names
from helpers import Engram
from model_helpers import NAMES, everything, learn, make, opened, pictures, png, tiny
from serve_helpers import CPU, add, client, ended, events, files, images_of, lesson_until, serving

ROOT = Path(__file__).parents[1]
TOKEN = "0123456789-0123456789"
SMALL = Limits(
    files=5,
    file_bytes=20_000,
    request_bytes=50_000,
    json_bytes=50_000,
    json_other=5_000,
    draft_images=4,
    header_seconds=1.0,
    idle_seconds=1.0,
    body_seconds=2.0,
    slowest=10**6,
)
sys.path.append(str(ROOT / "tools"))
attack_server = importlib.import_module("attack_server")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: `known`, which can tell unknown images, and `undoable` of two lessons."""
    place = tmp_path_factory.mktemp("served")
    learn(place / "known", NAMES[:3], count=32, config=tiny(validation=0.25))
    make(place / "undoable", NAMES[:2], NAMES[2:4])
    return place


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[httpx.Client]:
    """A server whose models no test changes for good."""
    with serving(folder / "known", folder / "undoable") as found:
        yield found


@pytest.fixture(scope="module")
def strict(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with small limits."""
    place = tmp_path_factory.mktemp("strict") / "known"
    shutil.copytree(folder / "known", place)
    with serving(place, limits=SMALL) as found:
        yield found


def refused(answer: httpx.Response, status: int, words: str = "") -> str:
    """The sentence of an answer with that status."""
    assert answer.status_code == status, answer.text
    sentence = answer.json()["error"]
    assert re.search(words, sentence), sentence
    return sentence


# Routes


def test_models_and_their_classes_are_described(api: httpx.Client) -> None:
    assert api.get("/health").json()["status"] == "ok"
    known, undoable = api.get("/models").json()
    assert known == api.get("/models/known").json()
    assert known["exists"]
    assert known["num_classes"] == 3
    assert known["lessons"] == 1
    assert known["can_doubt"]
    assert not known["can_undo"]
    assert "nothing to undo" in known["why_no_undo"]
    assert known["method"] == "afc"
    assert known["backbone"] == "resnet10"
    assert known["image_size"] == [8, 8]
    assert undoable["can_undo"]
    assert undoable["undo"]["classes"] == 2
    assert not undoable["can_doubt"]
    classes = api.get("/models/known/classes").json()
    assert [each["name"] for each in classes] == list(NAMES[:3])
    assert all(each["heldout"] == 8 and each["kept"] == 11 and each["lesson"] == 1 for each in classes)
    lessons = api.get("/models/undoable/lessons").json()
    assert [each["classes"] for each in lessons] == [list(NAMES[:2]), list(NAMES[2:4])]
    assert lessons[1]["before"]
    assert lessons[1]["after"]
    assert lessons[1]["new"]
    assert lessons[1]["plain"]["new"]
    refused(api.get("/models/other"), 404, "no model 'other'")
    refused(api.get("/nothing"), 404)
    refused(api.put("/models/known"), 405)


def test_pictures_are_found_by_opaque_ids(api: httpx.Client) -> None:
    classes = api.get("/models/known/classes").json()
    picture = api.get(f"/models/known/examples/{classes[0]['examples'][0]}")
    assert picture.headers["content-type"] == "image/png"
    assert picture.content.startswith(b"\x89PNG")
    beginning = classes[0]["examples"][0].partition("-")[0]
    for wrong in (
        "00000000-0",
        f"{beginning}-999",
        f"{beginning}-",
        "x",
        f"{beginning}--1",
        "1/../2",
        "%2e%2e%2fcurrent",
    ):
        refused(api.get(f"/models/known/examples/{wrong}"), 404)


def test_confusion_counts_held_out_images_and_names_them(api: httpx.Client) -> None:
    found = api.get("/models/known/confusion").json()
    assert found["classes"] == list(NAMES[:3])
    assert [sum(row) for row in found["matrix"]] == [8, 8, 8]
    for cell, ids in found["cells"].items():
        row, column = map(int, cell.split(","))
        assert len(ids) == found["matrix"][row][column]
        assert set(ids) <= set(api.get("/models/known/classes").json()[row]["examples"])


def test_predictions_are_those_of_the_command(api: httpx.Client, folder: Path, tmp_path: Path, engram: Engram) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    contents = [content for name in NAMES[:4] for content in images_of(name, 6, seed=8)]
    for number, content in enumerate(contents):
        (photos / f"{number:02d}.png").write_bytes(content)
    lines = engram("predict", folder / "known", photos, "--top", "3", "--unknown", "0.05", "--json", "--device", "cpu")
    theirs = [json.loads(line) for line in lines.out.splitlines()]

    def ask(content: bytes) -> dict[str, Any]:
        answer = api.post("/models/known/predict", files=files(content), params={"top": 3})
        assert answer.status_code == 200, answer.text
        return answer.json()["predictions"][0]

    with ThreadPoolExecutor(12) as threads:  # one image in each request, many at once
        singles = list(threads.map(ask, contents))
    together = api.post("/models/known/predict", files=files(*contents), params={"top": 3}).json()["predictions"]
    encoded = [{"name": f"{number}", "data": base64.b64encode(each).decode()} for number, each in enumerate(contents)]
    as_json = api.post("/models/known/predict", json={"images": encoded, "top": 3, "unknown": 0.05}).json()
    assert any(each["unknown"] for each in together), "some of the fourth class should be unknown"
    for ours in (singles, together, as_json["predictions"]):
        assert [each["class"] for each in ours] == [each["class"] for each in theirs]
        assert [each["unknown"] for each in ours] == [each["unknown"] for each in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert [each["class"] for each in one["top"]] == [each["class"] for each in other["top"]]
            shares = [[each["probability"] for each in found["top"]] for found in (one, other)]
            assert np.allclose(*shares, atol=1e-6)


def test_prediction_has_neighbours_and_refuses_what_is_no_image(api: httpx.Client) -> None:
    good = images_of("boat", 1)[0]
    given = files(good, b"no image", good[:40])
    found = api.post("/models/known/predict", files=given, params={"neighbours": 3, "top": 2}).json()
    assert found["model"] == "known"
    assert re.fullmatch(r"\d{6}", found["generation"])
    first, *others = found["predictions"]
    assert first["name"] == "0.png"
    assert len(first["top"]) == 2
    assert len(first["neighbours"]) == 3
    similar = [each["similarity"] for each in first["neighbours"]]
    assert similar == sorted(similar, reverse=True)
    assert all(-1.001 <= each <= 1.001 for each in similar)
    for each in first["neighbours"]:
        assert api.get(f"/models/known/examples/{each['example']}").status_code == 200
    assert [sorted(each) for each in others] == [["error", "name"]] * 2
    refused(api.post("/models/known/predict"), 415)
    refused(api.post("/models/known/predict", files={"images": ("x", b"")}, params={"top": 0}), 422, "top")
    refused(api.post("/models/known/predict", json={"images": [], "top": 1}), 400, "no image")
    refused(api.post("/models/known/predict", json={"images": [{"data": "*"}]}), 422, "base64")
    refused(api.post("/models/known/predict", json={"pictures": []}), 422)
    refused(api.post("/models/known/predict", files=files(good), params={"unknown": 0.0001}), 409, "held-out images")
    refused(
        api.post("/models/undoable/predict", files=files(good), params={"unknown": 0.1}), 409, "cannot tell unknown"
    )


def test_downloads(api: httpx.Client) -> None:
    report = api.get("/models/known/report.html")
    assert report.status_code == 200
    assert "<html" in report.text
    assert NAMES[0] in report.text
    assert 'filename="known.html"' in report.headers["content-disposition"]
    pytest.importorskip("onnxruntime")
    network = api.get("/models/known/export.onnx")
    assert network.status_code == 200
    assert len(network.content) > 10_000


def test_description_names_every_route_and_answer(api: httpx.Client) -> None:
    found = api.get("/openapi.json").json()
    routes = {f"{method.upper()} {path}" for path, each in found["paths"].items() for method in each}
    at = "/api/v1/models/{name}"
    assert {
        *(f"GET {at}", f"GET {at}/classes", f"PATCH {at}/classes/{{label}}", f"DELETE {at}/classes/{{label}}"),
        *(f"GET {at}/lessons", f"POST {at}/predict", f"GET {at}/examples/{{example}}", f"GET {at}/confusion"),
        *(f"GET {at}/draft", f"POST {at}/draft/images", f"PATCH {at}/draft/images", f"DELETE {at}/draft/images"),
        *(f"GET {at}/draft/images/{{image}}", f"POST {at}/draft/check", f"POST {at}/lesson", f"GET {at}/lesson"),
        *(f"DELETE {at}/lesson", f"GET {at}/lesson/events", f"POST {at}/undo", f"GET {at}/export.onnx"),
        *(f"GET {at}/report.html", "GET /api/v1/models", "GET /api/v1/health", "GET /metrics"),
    } == routes
    predictions = found["components"]["schemas"]["Prediction"]["properties"]
    assert {"name", "class", "probability", "top", "unknown", "neighbours", "error"} == set(predictions)
    refs = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(found))
    assert len(refs) > 20
    assert set(refs) <= set(found["components"]["schemas"])
    for path in ("/docs", "/redoc"):
        assert httpx.get(str(api.base_url).removesuffix("/api/v1/") + path).status_code == 404


def test_metrics_count_what_was_done(api: httpx.Client) -> None:
    api.post("/models/known/predict", files=files(*images_of("apple", 3)))
    text = httpx.get(str(api.base_url.join("/metrics"))).text
    for line in text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r'[a-z_]+(\{([a-z]+="[^"]*",?)*\})? [0-9.e+-]+', line), line
    assert re.search(
        r'engram_http_requests_total\{method="POST",route="/api/v1/models/\{name\}/predict",status="200"\}', text
    )
    predicted = re.search(r'engram_images_predicted_total\{model="known"\} (\d+)', text)
    assert predicted
    assert int(predicted[1]) >= 3
    assert 'engram_batch_images_bucket{model="known",le="+Inf"}' in text
    assert 'engram_lesson_state{model="known",state="none"} 1' in text
    assert re.search(r"engram_resident_memory_bytes \d{7,}", text)
    assert 'engram_model_generation{model="known"} 1' in text


def test_page_is_served_with_a_policy_that_allows_no_other_host(api: httpx.Client) -> None:
    answer = httpx.get(str(api.base_url.join("/")))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == CSP
    assert "unsafe" not in CSP
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    assert "access-control-allow-origin" not in answer.headers
    assert not re.search(r'(src|href)="https?:', answer.text)


# Batches and takeover


def test_requests_that_wait_become_one_batch_and_too_many_are_refused(folder: Path) -> None:
    model = opened(folder / "known", images=False)
    generation = Generation("known", model, Pointer("000001", "0" * 32))
    read, gate, sizes = generation.read, threading.Event(), []

    def held(images: np.ndarray) -> Any:
        gate.wait(30)
        sizes.append(len(images))
        return read(images)

    generation.__dict__["read"] = held
    images = pictures(NAMES[:3], 2, seed=9)[0]
    batcher = Batcher(replace(Limits(), waiting_images=7), Metrics(), predictors=1)

    async def ask(start: int, end: int, doubt: bool, embed: bool) -> Any:
        with batcher.admit(end - start):
            return await batcher.predict(generation, images[start:end], doubt, embed)

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(ask(0, 1, True, False))]
        while not batcher.waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # it is being predicted
        tasks += [asyncio.create_task(ask(row, row + 2, row == 2, row == 4)) for row in (0, 2, 4)]
        await asyncio.sleep(0.05)
        with pytest.raises(Refused, match="wait for a prediction already") as refusal:
            await ask(0, 1, False, False)
        assert refusal.value.status_code == 503
        assert refusal.value.headers == {"Retry-After": "1"}
        gate.set()
        return await asyncio.gather(*tasks)

    found = asyncio.run(scenario())
    batcher.close()
    assert sizes == [1, 6]
    assert batcher.waiting == 0
    expected = model.probabilities(images)
    assert np.allclose(np.concatenate([each.shares for each in found[1:]]), expected, atol=1e-6)
    assert [each.familiarity is not None for each in found] == [True, False, True, False]
    assert [each.embedding is not None for each in found] == [False, False, False, True]


def test_batches_are_predicted_at_the_same_time_and_many_images_are_divided(folder: Path) -> None:
    model = opened(folder / "known", images=False)
    generation = Generation("known", model, Pointer("000001", "0" * 32))
    read, together, batch = generation.read, threading.Barrier(2, timeout=60), default_batch(model)

    def held(images: np.ndarray) -> Any:
        together.wait()  # until another thread predicts as well
        assert len(images) <= batch
        return read(images)

    generation.__dict__["read"] = held
    images = pictures(NAMES[:3], 2, seed=9)[0]
    many = np.concatenate([images] * (batch // len(images) + 1))
    threads, batcher = torch.get_num_threads(), Batcher(Limits(), Metrics(), predictors=2)
    found = asyncio.run(batcher.predict(generation, many, True, True))
    batcher.close()
    assert np.allclose(found.shares, model.probabilities(many), atol=1e-6)
    assert found.familiarity is not None
    assert found.embedding is not None
    assert len(found.familiarity) == len(found.embedding) == len(many)
    assert torch.get_num_threads() == threads


def test_a_model_that_cannot_predict_fails_its_requests_only(folder: Path) -> None:
    model = opened(folder / "known", images=False)
    generation = Generation("known", model, Pointer("000001", "0" * 32))
    broken = Generation("broken", model, Pointer("000002", "0" * 32))
    broken.__dict__["read"] = lambda images: 1 / 0
    batcher = Batcher(Limits(), Metrics())
    images = pictures(NAMES[:1], 2)[0]

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await batcher.predict(broken, images, False, False)
        assert (await batcher.predict(generation, images, False, False)).shares.shape == (2, 3)

    asyncio.run(scenario())
    batcher.close()


def test_a_new_generation_is_taken_over_without_a_failed_request(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    content = images_of("apple", 1)[0]
    with serving(path) as api:
        over, found = threading.Event(), []

        def ask() -> None:
            with client(str(api.base_url).removesuffix("api/v1/")) as own:
                while not over.is_set():
                    answer = own.post("/models/model/predict", files=files(content))
                    found.append((answer.status_code, answer.text))

        with ThreadPoolExecutor(6) as threads:
            asking = [threads.submit(ask) for _ in range(6)]
            for old, new in (("boat", "ship"), ("camel", "horse"), ("ship", "ferry")):
                rename_class(path, old, new)  # by another program
                end = time.monotonic() + 20
                while new not in [each["name"] for each in api.get("/models/model/classes").json()]:
                    assert time.monotonic() < end
                    time.sleep(0.02)
                time.sleep(0.2)
            over.set()
            for each in asking:
                each.result()
        assert {status for status, _ in found} == {200}
        generations = {json.loads(text)["generation"] for _, text in found}
        assert len(generations) >= 3, generations
        assert all(json.loads(text)["predictions"][0]["class"] == "apple" for _, text in found)
        (path / "current").write_text("damaged")
        end = time.monotonic() + 20
        while api.get("/models/model").json()["error"] is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert api.post("/models/model/predict", files=files(content)).status_code == 200  # the old one stays


# Teaching


def test_draft_takes_moves_and_discards_images(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    before = everything(path)
    with serving(path) as api:
        assert api.get("/models/model/draft").json() == {"images": [], "classes": [], "rejected": []}
        assert not (tmp_path / "model.draft").exists()
        good = images_of("dingo", 2)
        given = [*files(good[0], b"no image", good[0]), ("images", ("../../etc/x\u202e.png", good[1]))]
        added = api.post("/models/model/draft/images", data={"class": " dingo "}, files=given).json()
        assert [each["name"] for each in added["images"]] == ["0.png", "x�.png"]
        assert [each["name"] for each in added["rejected"]] == ["1.png", "2.png"]
        assert "cannot be read" in added["rejected"][0]["error"]
        assert "same file" in added["rejected"][1]["error"]
        assert added["classes"] == [{"name": "dingo", "known": False, "images": 2}]
        one, other = added["added"]
        thumbnail = api.get(f"/models/model/draft/images/{one}")
        assert thumbnail.content.startswith(b"\x89PNG")
        assert thumbnail.headers["content-type"] == "image/png"
        moved = api.patch("/models/model/draft/images", json={"ids": [one], "class": "apple"}).json()
        assert {each["name"]: each["known"] for each in moved["classes"]} == {"apple": True, "dingo": False}
        for body in ({"ids": ["0" * 16], "class": "x"}, {"ids": ["../draft.json"], "class": "x"}):
            refused(api.patch("/models/model/draft/images", json=body), 404)
        for name in ("", "  ", "x" * 300, "a\x00b", "a\nb"):
            refused(api.patch("/models/model/draft/images", json={"ids": [one], "class": name}), 422)
        names = sorted(file.name for file in (tmp_path / "model.draft" / "images").iterdir())
        assert names == sorted([one, other])
    with serving(path) as api:  # after a restart
        found = api.get("/models/model/draft").json()
        assert [each["class"] for each in found["images"]] == ["apple", "dingo"]
        with serving(path) as second:
            assert second.post("/models/model/predict", files=files(good[0])).status_code == 200
            for url in ("draft", "lesson"):
                refused(second.get(f"/models/model/{url}"), 409, "another server teaches")
            refused(second.post("/models/model/draft/images", data={"class": "x"}, files=files(good[0])), 409)
        left = api.request("DELETE", "/models/model/draft/images", json={"ids": [one]}).json()
        assert [each["id"] for each in left["images"]] == [other]
        assert api.delete("/models/model/draft/images").json() == {"images": [], "classes": [], "rejected": []}
    assert not (tmp_path / "model.draft").exists()
    assert everything(path) == before


def test_check_finds_duplicates_and_says_so(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    with serving(path) as api:
        refused(api.post("/models/model/draft/check"), 409, "empty")
        same = pictures(["dingo"], 2, 3, 40)[0]
        padded = png(same[0]) + b" "  # another file with the same pixels
        given = {"class": "dingo"}
        api.post("/models/model/draft/images", data=given, files=files(png(same[0]), png(same[1])))
        api.post("/models/model/draft/images", data={"class": "easel"}, files=files(padded))
        found = api.post("/models/model/draft/check").json()["images"]
        kinds = [[finding["kind"] for finding in each["findings"]] for each in found]
        assert ["exact" in each for each in kinds] == [True, False, True], kinds
        finding = next(each for each in found[0]["findings"] if each["kind"] == "exact")
        assert finding["like"] == [found[2]["id"]]
        assert "in another class" in finding["text"]


def test_a_lesson_is_followed_stopped_continued_and_undone(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    before = everything(path)
    with serving(path) as api:
        refused(api.post("/models/model/lesson"), 409, "empty")
        refused(api.delete("/models/model/lesson"), 409, "no lesson")
        for name in NAMES[3:5]:
            add(api, "model", name, 8)
        body = {"epochs": 30}
        refused(api.post("/models/model/lesson", json={**body, "minutes": 1}), 422, "exclude")
        refused(api.post("/models/model/lesson", json={"epochs": 0}), 422)
        with api.stream("GET", "/models/model/lesson/events") as stream:
            following = events(stream)
            assert next(following)[0] == "none"
            assert api.post("/models/model/lesson", json=body).status_code == 202
            refused(api.post("/models/model/lesson", json=body), 409, "already")
            refused(api.post("/models/model/undo"), 409, "learning")
            added = add(api, "model", NAMES[5], 4)  # for the next lesson
            taught = [each["id"] for each in added["images"] if each["class"] == NAMES[3]]
            refused(api.request("DELETE", "/models/model/draft/images", json={"ids": taught}), 409, "unfinished")
            told = next(data for event, data in following if event == "progress" and data["progress"]["terms"])
            assert 0 < told["progress"]["done"] < 1
            assert told["progress"]["epochs"] == 30
            assert told["state"] == "running"
            assert told["losses"]
            assert told["classes"] == list(NAMES[3:5])
            assert api.post("/models/model/predict", files=files(images_of("apple", 1)[0])).status_code == 200
            api.delete("/models/model/lesson")
            assert next(data for event, data in following if event != "progress")["state"] == "stopped"
            stopped = api.get("/models/model/lesson").json()
            assert stopped["state"] == "stopped"
            assert not stopped["interrupted"]
            assert has_learning(path)
            assert {name: each for name, each in everything(path).items() if not name.startswith("learning")} == before
            refused(api.patch("/models/model/classes/apple", json={"name": "pear"}), 409, "continue or discard")
            assert api.post("/models/model/lesson").status_code == 202
            last = next((event, data) for event, data in following if data["state"] != "running")
        assert last[0] == "finished"
        assert last[1]["result"]["new"] == list(NAMES[3:5])
        assert last[1]["result"]["before"]
        assert last[1]["result"]["path"] is None
        assert any("continues from its checkpoint" in note for note in last[1]["notes"])
        assert api.get("/models/model").json()["num_classes"] == 5  # taken over before the event
        assert [each["class"] for each in api.get("/models/model/draft").json()["images"]] == [NAMES[5]] * 4
        gone = api.post("/models/model/undo").json()
        assert gone["gone"] == list(NAMES[3:5])
        assert gone["classes"] == 3
        assert api.get("/models/model").json()["num_classes"] == 3
        assert api.get("/models/model/lesson").json()["state"] == "none"
        refused(api.post("/models/model/undo"), 409, "nothing to undo")
    assert opened(path).labels == list(NAMES[:3])


def test_the_first_lesson_makes_the_model(tmp_path: Path) -> None:
    config = {"method": "afc", "backbone": "resnet10", "image_size": 16, "validation": 0.2}
    with serving(tmp_path / "new", child=replace(CPU, new_model=config)) as api:
        assert not api.get("/models/new").json()["exists"]
        assert api.get("/models/new/classes").json() == []
        refused(api.post("/models/new/predict", files=files(images_of("apple", 1)[0])), 409, "not learned anything")
        for name in NAMES[:2]:
            add(api, "new", name, 6)
        api.post("/models/new/lesson", json={"epochs": 1})
        found = lesson_until(api, "new", ended)
        assert found["state"] == "finished", found
        about = api.get("/models/new").json()
        assert about["exists"]
        assert about["num_classes"] == 2
        assert about["image_size"] == [16, 16]
        # A known class is learned again only if that is asked for.
        add(api, "new", NAMES[0], 4, seed=9)
        api.post("/models/new/lesson", json={"epochs": 1})
        found = lesson_until(api, "new", ended)
        assert found["state"] == "failed", found
        assert "more_of_known" in found["error"]
        assert len(api.get("/models/new/draft").json()["images"]) == 4
        api.delete("/models/new/lesson", params={"discard": True})
        assert api.get("/models/new/lesson").json()["state"] == "none"


def test_rename_and_remove(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    with serving(path) as api:
        assert api.patch("/models/model/classes/apple", json={"name": "fruit/pear"}).json()["to"] == "fruit/pear"
        assert api.get("/models/model/classes").json()[0]["name"] == "fruit/pear"
        refused(api.patch("/models/model/classes/fruit%2Fpear", json={"name": "boat"}), 409, "already")
        refused(api.patch("/models/model/classes/apple", json={"name": "x"}), 404, "no class 'apple'")
        refused(api.patch("/models/model/classes/boat", json={"name": "x", "more": 1}), 422)
        assert api.delete("/models/model/classes/fruit%2Fpear").json() == {"removed": "fruit/pear", "classes": 2}
        assert [each["name"] for each in api.get("/models/model/classes").json()] == ["boat", "camel"]


def start_process(path: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """`engram serve` in a process of its own, and its address."""
    command = [sys.executable, "-m", "engram", "serve", str(path), "--no-browser", "--json", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command += ["--threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["address"]


def test_kill_of_the_server_in_a_lesson_leaves_the_old_model_and_the_lesson_can_be_continued(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    before = everything(path)
    process, address = start_process(path)
    assert process.stdout is not None
    try:
        with client(address) as api:
            add(api, "model", NAMES[3], 8)
            api.post("/models/model/lesson", json={"epochs": 40})
            lesson_until(api, "model", lambda found: found["progress"]["done"] > 0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with serving(path) as api:
        found = api.get("/models/model/lesson").json()
        assert found["state"] == "stopped"
        assert found["interrupted"]
        assert found["classes"] == [NAMES[3]]
        left = {name: each for name, each in everything(path).items() if not name.startswith("learning")}
        assert left == before
        assert len(api.get("/models/model/draft").json()["images"]) == 8
        assert api.post("/models/model/predict", files=files(images_of("apple", 1)[0])).status_code == 200
        end = time.monotonic() + 30
        while (answer := api.post("/models/model/lesson")).status_code != 202:
            refused(answer, 409, "another process")  # that of the lesson saves after its server was killed
            assert time.monotonic() < end
            time.sleep(0.1)
        found = lesson_until(api, "model", ended)
        assert found["state"] == "finished", found
        assert any("continues from its checkpoint" in note for note in found["notes"])
        assert api.get("/models/model").json()["num_classes"] == 4
        assert api.get("/models/model/draft").json()["images"] == []


def test_kill_of_the_lesson_is_reported_and_can_be_discarded(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:3])
    with serving(path) as api:
        add(api, "model", NAMES[3], 8)
        api.post("/models/model/lesson", json={"epochs": 40})
        lesson_until(api, "model", lambda found: found["progress"]["done"] > 0)
        children = Path(f"/proc/self/task/{os.getpid()}/children").parent.parent.glob("*/children")
        pids = [int(word) for each in children for word in each.read_text().split()]
        (lesson,) = [pid for pid in pids if b"lesson_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(lesson, signal.SIGKILL)
        found = lesson_until(api, "model", ended)
        assert found["state"] == "stopped"
        assert found["interrupted"]
        assert "signal 9" in found["error"]
        assert api.delete("/models/model/lesson", params={"discard": True}).json()["state"] == "none"
        assert not has_learning(path)
        assert len(api.get("/models/model/draft").json()["images"]) == 8
        assert api.patch("/models/model/classes/apple", json={"name": "pear"}).status_code == 200


# What is refused


def raw(api: httpx.Client, content: bytes, seconds: float = 20.0) -> bytes:
    """The answer to bytes on a connection, until the server closes it."""
    with socket.create_connection((api.base_url.host, api.base_url.port), timeout=seconds) as connection:
        connection.sendall(content)
        answer = b""
        with suppress(ConnectionResetError):  # it was closed before everything was read
            while chunk := connection.recv(65536):
                answer += chunk
        return answer


def test_only_requests_to_its_own_name_and_from_its_own_page_are_answered(api: httpx.Client) -> None:
    port, own = api.base_url.port, f"127.0.0.1:{api.base_url.port}"
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "localhost.evil", "[::1"):
        refused(api.get("/models", headers={"Host": host}), 421, "--allow-host")
    for host in (f"localhost:{port}", f"[::1]:{port}", "localhost"):
        assert api.get("/models", headers={"Host": host}).status_code == 200
    for origin in ("http://evil.example", "null", f"http://{own}.evil.example", f"http://localhost:{port}", "x"):
        for method, path in (("GET", "/models"), ("POST", "/models/known/undo"), ("OPTIONS", "/models")):
            refused(api.request(method, path, headers={"Origin": origin}), 403, "other pages")
    assert api.get("/models", headers={"Origin": f"http://{own}"}).status_code == 200
    refused(api.post("/models/known/undo", headers={"Sec-Fetch-Site": "cross-site"}), 403)
    refused(api.get("/models", headers={"Sec-Fetch-Site": "same-site"}), 403)
    page = httpx.get(str(api.base_url.join("/")), headers={"Sec-Fetch-Site": "cross-site"})  # a link to the page
    assert page.status_code == 200


def test_access_knows_the_names_of_its_address() -> None:
    assert not Access("127.0.0.1").knows_host("192.168.1.2:80")
    everywhere = Access("0.0.0.0", ("Models.example",))
    for host in ("192.168.1.2:80", "[fe80::1]:80", "models.example", "MODELS.example:443", socket.gethostname()):
        assert everywhere.knows_host(host), host
    for host in ("evil.example", "", ":80", "a:b", "1.2.3.4.evil", "models.example.evil", "[x]", "127.0.0.1:80:80"):
        assert not everywhere.knows_host(host), host
    assert unique_names([Path("a/model"), Path("b/model"), Path("model-2")]) == ["model", "model-2", "model-2-2"]


def test_another_address_than_loopback_needs_the_token(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "known"
    shutil.copytree(folder / "known", path)
    with serving(path, host="0.0.0.0", token=TOKEN) as api:
        assert api.get("/models").status_code == 200
        with client(str(api.base_url).removesuffix("api/v1/")) as stranger:
            assert stranger.get("/health").status_code == 200
            assert stranger.get(str(stranger.base_url.join("/"))).status_code == 200  # the page, which asks for it
            for given in ("", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xe9"):
                for url in (
                    "/models",
                    "/models/known/lesson/events",
                    "/openapi.json",
                    str(api.base_url.join("/metrics")),
                ):
                    answer = stranger.get(url, headers=[(b"Authorization", given.encode("latin-1"))] if given else [])
                    refused(answer, 401, "token")
            assert answer.headers["www-authenticate"] == "Bearer"
            post = stranger.post("/models/known/predict", files=files(images_of("apple", 1)[0]))
            refused(post, 401)
    with pytest.raises(EngramError, match="at least 16"), serving(path, token="short"):
        pass
    with serving(path, host="0.0.0.0") as api:
        assert len(api.headers["Authorization"]) > 30  # one was made


def test_uploads_are_bounded(strict: httpx.Client) -> None:
    good = images_of("apple", 1)[0]
    for path, data in (("predict", {}), ("draft/images", {"class": "x"})):
        url = f"/models/known/{path}"
        refused(strict.post(url, files=files(*[good] * 6), data=data), 413, "5 images")
        refused(strict.post(url, files=files(bytes(30_000)), data=data), 413, "an image may have")
        refused(strict.post(url, files=files(*[bytes(15_000)] * 4), data=data), 413, "larger than")
        refused(strict.post(url, files=files(good), data={f"{n}": "x" for n in range(20)}), 413, "16 fields")
        refused(strict.post(url, files=files(good), data={"class": "x" * 5000}), 413, "longer than")
        refused(strict.post(url, files=[("other", ("x", good))], data=data), 400, "'images'")
        for body in (b"", b"x", b"--b\r\n\r\n", b'--b\r\nContent-Disposition: form-data; name="images"\r\n\r\nx'):
            refused(strict.post(url, content=body, headers={"Content-Type": "multipart/form-data; boundary=b"}), 400)
        refused(strict.post(url, content=b"x", headers={"Content-Type": "multipart/form-data"}), 415)
    refused(strict.post("/models/known/predict", json={"images": [{"data": "A" * 60_000}]}), 413, "larger than")
    refused(strict.patch("/models/known/classes/apple", json={"name": "A" * 6000}), 413)
    refused(
        strict.post("/models/known/draft/images", data={"class": "x"}, files=files(*images_of("boat", 5))),
        413,
        "4 images",
    )
    assert strict.get("/models/known/draft").json()["images"] == []

    def endless() -> Iterator[bytes]:  # chunked: its length is not announced
        yield b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'
        for _ in range(1000):
            yield bytes(1000)

    answer = strict.post(
        "/models/known/predict", content=endless(), headers={"Content-Type": "multipart/form-data; boundary=b"}
    )
    refused(answer, 413)


def test_a_refused_body_is_answered_once_and_ends_its_connection(strict: httpx.Client) -> None:
    head = f"POST /api/v1/models/known/predict HTTP/1.1\r\nHost: 127.0.0.1:{strict.base_url.port}\r\n".encode()
    head += b"Content-Type: multipart/form-data; boundary=b\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n' + bytes(30_000)
    announced, chunked = b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n"
    for body in (
        announced % 10**10 + part,  # too large by what it says
        announced % 45_000 + part,  # by the file in it
        chunked % len(part) + part + b"\r\n",
        chunked % len(part) + part,  # and then what is not a chunk
    ):
        answer = raw(strict, head + body + 10 * b"more than was announced\r\n")
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))
        assert answer.count(b"HTTP/1.1") == 1
        assert b"connection: close" in answer
    waiting = head + announced % 10**10
    answer = raw(strict, waiting.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 413 ")  # before the client sends anything
    assert json.loads(raw(strict, b"what is this?\r\n\r\n").partition(b"\r\n\r\n")[2])["error"]


def test_headers_are_bounded_and_what_follows_a_request_is_answered_after_it(strict: httpx.Client) -> None:
    own = f"Host: 127.0.0.1:{strict.base_url.port}\r\n".encode()
    health = b"GET /api/v1/health HTTP/1.1\r\n" + own + b"\r\n"
    chunked = b"POST /api/v1/models/known/predict HTTP/1.1\r\n" + own + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    endless = bytes(600_000).replace(b"\0", b"x")
    for start in (health[:-2] + b"X: ", b"GET /", chunked + b"X: ", chunked.replace(b"\r\n0\r\n", b"\r\n1;x=")):
        answer = raw(strict, start + endless)  # perhaps lost, with what the server did not read
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 415 "))
        assert answer.count(b"HTTP/1.1") <= 1
    assert raw(strict, 3 * health + b"what is this?\r\n\r\n").count(b"HTTP/1.1 200 OK\r\n") == 3
    trailer = chunked + b"Origin: http://evil.example\r\nX: y\r\n\r\n"
    assert raw(strict, trailer).startswith(b"HTTP/1.1 4")


def test_bombs_and_garbage_are_named_and_harm_nothing(strict: httpx.Client) -> None:
    good = images_of("apple", 1)[0]
    for content in (
        attack_server.bomb(60_000, 60_000),
        attack_server.bomb(70_000, 1),
        b"<svg/>",
        os.urandom(99),
        good[:50],
    ):
        found = strict.post("/models/known/predict", files=files(content, good)).json()["predictions"]
        assert "error" in found[0]
        assert found[1]["class"] == "apple"
        added = strict.post("/models/known/draft/images", data={"class": "x"}, files=files(content)).json()
        assert added["added"] == []
        assert "cannot be read" in added["rejected"][0]["error"]
    deep = b'{"images":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    refused(strict.post("/models/known/predict", content=deep, headers={"Content-Type": "application/json"}), 422)


def test_slow_headers_and_bodies_are_ended(strict: httpx.Client) -> None:
    own = f"Host: 127.0.0.1:{strict.base_url.port}\r\n".encode()
    started = time.monotonic()
    assert raw(strict, b"") == b""
    assert raw(strict, b"GET /api/v1/health HTTP/1.1\r\n" + own) == b""
    answer = raw(strict, b"POST /api/v1/models/known/predict HTTP/1.1\r\n" + own + b"Content-Length: 100\r\n\r\nx")
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"connection: close" in answer
    head = b"POST /api/v1/models/known/predict HTTP/1.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", strict.base_url.port or 0), timeout=20) as drip:
        drip.sendall(head + own + b"Content-Length: 1000\r\n\r\n")
        for _ in range(10):  # never a long pause, and never done
            time.sleep(0.3)
            try:
                drip.sendall(b" ")
            except OSError:
                break
        assert b"too slowly" in drip.recv(65536)
    assert time.monotonic() - started < 15
    assert strict.get("/health").status_code == 200


def test_a_client_that_goes_away_leaves_nothing(strict: httpx.Client) -> None:
    own = f"Host: 127.0.0.1:{strict.base_url.port}\r\n".encode()
    head = b"POST /api/v1/models/known/predict HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\nabc'
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", strict.base_url.port or 0), timeout=20) as connection:
            connection.sendall(head + own + b"Content-Length: 5000\r\n\r\n" + part)
    assert strict.get("/health").status_code == 200


def test_attacks_leave_server_and_model_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    status = attack_server.main(["--quick", "--count", "60", "--upload", "70000000"])
    assert status == 0, capsys.readouterr().out[-3000:]


# The command


def test_command_explains_itself_and_refuses_mistakes(
    engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = engram("serve", "--help").out
    assert all(word in text for word in ("--host", "--port", "--token", "--allow-host", "--no-browser", "ENGRAM_TOKEN"))
    make(tmp_path / "model", NAMES[:3])
    (tmp_path / "file").write_text("x")
    for arguments, words in (
        (["model", "--port", "70000"], "--port must be 0 to 65535"),
        (["model", "./model"], "given twice"),
        (["file"], "is a file"),
        (["model", "--token", "short"], "--token must have at least 16"),
        (["model", "--host", "256.1.1.1"], "cannot be used"),
        (["model", "--image-size", "4"], "--image-size must be"),
    ):
        outcome = engram("serve", "--no-browser", *arguments)
        assert outcome.status == 2, arguments
        assert words in outcome.err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = engram("serve", "model", "--no-browser", "--port", str(taken.getsockname()[1]))
        assert outcome.status == 2
        assert "choose another --port" in outcome.err
    monkeypatch.setattr("engram.cli.commands.serve.find_spec", lambda name: None)
    outcome = engram("serve", "model")
    assert outcome.status == 2
    assert "pip install" in outcome.err
    assert outcome.err.count("\n") == 1
