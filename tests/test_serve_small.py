"""Small images of many requests: held in memory, decoded together, and predicted in batches that are worth it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engram.data.decode.image import Images
from engram.data.decode.prefetch import Decoders, File
from engram.models.store.generations import Pointer
from engram.serve import predicting, uploads
from engram.serve.counters import Metrics
from engram.serve.decoder_pool import TOGETHER, DecoderPool
from engram.serve.limits import Limits, Refused
from engram.serve.predicting import Batcher, Generation
from engram.serve.uploads import Budget, Received, Spool, Upload, read_multipart
from model_helpers import NAMES, make, opened, pictures
from serve_helpers import files, images_of, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("small") / "model", NAMES[:3])


@pytest.fixture
def pool() -> Iterator[DecoderPool]:
    found = DecoderPool(Limits(), workers=1)
    yield found
    found.close()


def decoded(pool: DecoderPool, contents: Sequence[File], size: int = 8) -> list[list[Images | str]]:
    """What each of these files gives, asked for by a request of its own at the same time."""

    async def all_of_them() -> list[list[Images | str]]:
        return await asyncio.gather(*(pool.decode([content], size) for content in contents))

    return asyncio.run(all_of_them())


def test_small_files_of_many_requests_are_decoded_together(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, decode, gate = [], Decoders.decode, threading.Event()

    def counted(self: Decoders, given: Sequence[File], size: int | None = None) -> Any:
        gate.wait(30)
        calls.append(len(given))
        return decode(self, given, size)

    monkeypatch.setattr(Decoders, "decode", counted)
    threading.Timer(0.2, gate.set).start()  # all of them wait by then
    contents = images_of("apple", 40)
    contents[20] = b"not an image"
    found = decoded(pool, contents)
    assert max(calls) == TOGETHER
    assert len(calls) <= 5
    alone = DecoderPool(Limits(), workers=2)
    try:
        for number, ((image,), content) in enumerate(zip(found, contents, strict=True)):
            if number == 20:
                assert isinstance(image, str)
            elif number % 7 == 0:
                assert np.array_equal(image, decoded(alone, [content])[0][0])
    finally:
        alone.close()


def test_files_and_other_sizes_are_not_decoded_together(
    pool: DecoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, decode = [], Decoders.decode
    monkeypatch.setattr(Decoders, "decode", lambda self, given, size: calls.append(given) or decode(self, given, size))
    content = images_of("apple", 1)[0]
    (tmp_path / "large").write_bytes(content)

    async def mixed() -> Any:
        path = str(tmp_path / "large")
        return await asyncio.gather(
            *(pool.decode([file], size) for file, size in ((content, 8), (path, 8), (content, 8), (content, 6)))
        )

    found = asyncio.run(mixed())
    assert [image.shape[0] for (image,) in found] == [8, 8, 8, 6]
    assert [len(call) for call in calls] == [1, 1, 1, 1]


def test_a_small_file_that_kills_its_process_fails_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram.data.decode import prefetch

    deadly = "import engram.data.decode.prefetch as d, os; f = d.try_decode; d.try_decode = " + (
        "lambda file, *more: os.kill(os.getpid(), 11) if file == b'deadly' else f(file, *more); serve()"
    )
    monkeypatch.setattr(prefetch, "_PROGRAM", prefetch._PROGRAM.replace("serve()", deadly))
    pool = DecoderPool(Limits(), workers=1)
    try:
        good = images_of("apple", 3)
        found = decoded(pool, [good[0], good[1], b"deadly", good[2]])
    finally:
        pool.close()
    assert [isinstance(image, str) for (image,) in found] == [False, False, True, False]
    assert found[2] == ["the decoder crashes on it"]


def received(spool: Spool, *contents: bytes, whole: bool = True) -> Upload:
    """An upload that arrives in small parts."""
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="images"; filename="{number}"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for number, content in enumerate(contents)
    ]
    body = b"".join(parts) + (b"--b--\r\n" if whole else b"")

    async def stream() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    async def read() -> Upload:
        return await read_multipart(stream(), "multipart/form-data; boundary=b", spool, Limits())

    return asyncio.run(read())


def test_small_files_stay_in_memory_and_the_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "SMALL_BYTES", 5000)
    memory = Budget(12_000)
    spool = Spool(tmp_path, Limits(), memory)
    contents = [bytes([number]) * size for number, size in enumerate((0, 5000, 5001, 4000, 4500, 2000))]
    upload = received(spool, *contents)
    held = [file.content is not None for file in upload.files]
    assert held == [True, True, False, True, False, True]  # too large; no room beside 9,000 others
    for file, content in zip(upload.files, contents, strict=True):
        assert (Path(file.source).read_bytes() if isinstance(file.source, str) else file.source) == content
        assert file.size == len(content)
        assert file.digest == ""
    assert len(list(tmp_path.iterdir())) == 2
    assert not memory.try_reserve(1001)
    spool.release(upload.files)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Refused, match="ended before"):
        received(spool, *contents, whole=False)
    assert memory.try_reserve(12_000)  # all was given back, after the refusal too
    assert list(tmp_path.iterdir()) == []
    upload = received(Spool(tmp_path, Limits()), contents[1])  # a draft's: everything is a file
    assert upload.files[0].content is None
    assert len(upload.files[0].digest) == 32
    assert upload.files[0].path.read_bytes() == contents[1]


def test_a_few_images_wait_for_others_while_a_batch_is_predicted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "LINGER_SECONDS", 30.0)
    generation = Generation("model", opened(model, images=False), Pointer("000001", "0" * 32))
    read, gate, sizes = generation.read, threading.Event(), []

    def held(images: np.ndarray) -> Any:
        sizes.append(len(images))
        if len(sizes) == 1:
            gate.wait(30)
        return read(images)

    generation.__dict__["read"] = held
    images = pictures(NAMES[:1], 1, seed=9)[0]
    batcher = Batcher(Limits(), Metrics(), predictors=2)

    async def scenario() -> None:
        tasks = [asyncio.create_task(batcher.predict(generation, images, False, False))]
        await until(lambda: len(sizes) == 1)
        for count in (1, predicting.FEW - 1):
            assert len(sizes) == 1
            tasks += [asyncio.create_task(batcher.predict(generation, images, False, False)) for _ in range(count)]
            await asyncio.sleep(0.05)
        await until(lambda: len(sizes) == 2)  # enough of them, though the first still computes
        tasks.append(asyncio.create_task(batcher.predict(generation, images, False, False)))
        await asyncio.sleep(0.05)
        assert len(sizes) == 2
        gate.set()  # nothing else is being computed: the last one waits no longer
        await asyncio.wait_for(asyncio.gather(*tasks), 20)

    async def until(true: Any) -> None:
        end = time.monotonic() + 20
        while not true():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    batcher.close()
    assert sizes == [1, predicting.FEW, 1]


def test_parameters_of_the_address_are_checked(model: Path) -> None:
    image = images_of("apple", 1)[0]
    with serving(model) as api:

        def ask(query: str) -> httpx.Response:
            return api.post(f"/models/model/predict?{query}", files=files(image))

        assert len(ask("top=2").json()["predictions"][0]["top"]) == 2
        for query, words in (
            ("top=0", "top:"),
            ("top=x", "top:"),
            ("unknown=1", "unknown:"),
            ("neighbours=51", "neigh"),
        ):
            answer = ask(query)
            assert answer.status_code == 422
            assert words in answer.json()["error"]
        assert api.post("/models/other/predict", files=files(image)).status_code == 404


def test_what_is_held_for_a_request_is_given_back(model: Path) -> None:
    image = images_of("apple", 1)[0]
    limits = replace(Limits(), memory_bytes=200_000, spool_bytes=200_000, waiting_images=64, requests=8)
    with serving(model, limits=limits) as api:
        for number in range(60):  # of 5 to 8 KB each: many more than may be held at the same time
            content = image + bytes(5000 + 50 * number)
            assert api.post("/models/model/predict", files=files(content)).status_code == 200
            assert api.post("/models/model/predict", files=[("other", ("x", content))]).status_code == 400


def test_received_files_have_one_source() -> None:
    file = Received("x", Path("somewhere"))
    assert file.source == "somewhere"
    file.content = bytearray(b"abc")
    assert file.source == b"abc"


def test_batches_have_few_sizes() -> None:
    assert sorted({predicting.batch_size(most) for most in range(1, 65)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    images = np.full((7, 2, 2, 3), 9, dtype=np.uint8)
    assert (predicting.filled(images)[:7] == images).all()
    assert predicting.filled(images)[7:].tolist() == np.zeros((1, 2, 2, 3)).tolist()
    assert predicting.filled(images[:6]).shape == (6, 2, 2, 3)
