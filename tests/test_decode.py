"""Image files from anywhere: decoded by threads in their order, and refused by name where they are no images."""

from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engram import EngramError
from engram.core import memory_limits as room
from engram.data.decode import image as decode
from engram.data.decode import prefetch as decoding
from engram.data.decode.image import choose_size
from engram.data.decode.prefetch import decode_files, decode_stream
from engram.data.store import Images
from helpers import decode_image, memory_grown

RED = np.full((20, 30, 3), (200, 10, 10), np.uint8)


def save(path: Path, image: np.ndarray = RED, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)  # pyright: ignore[reportArgumentType]
    return path


def bomb(path: Path, width: int, height: int) -> Path:
    """A PNG of a few bytes that claims so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def hostile(folder: Path) -> dict[str, Path]:
    """Files that are no images, each with its kind."""
    files = {
        "claims more pixels": bomb(folder / "bomb.png", 50_000, 50_000),
        "claims more pixels than": bomb(folder / "small bomb.png", 10_000, 10_000),
        "not a PNG, JPEG": folder / "text.png",
        "truncated": folder / "cut.jpg",
        "Too many levels": folder / "loop.png",
        "it is a folder": folder / "folder.png",
        "not a regular file": folder / "pipe.png",
        "No such file": folder / "nowhere.png",
        "MiB are more than": folder / "large.png",
    }
    files["not a PNG, JPEG"].write_text("dear reader")
    whole = save(folder / "whole.jpg", np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    files["truncated"].write_bytes(whole.read_bytes()[:900])
    whole.unlink()
    files["Too many levels"].symlink_to(files["Too many levels"])
    files["it is a folder"].mkdir()
    os.mkfifo(files["not a regular file"])
    with files["MiB are more than"].open("wb") as file:
        file.write(save(folder / "x.png").read_bytes())
        file.truncate(2 * 2**30)  # of nothing: it takes no space
    (folder / "x.png").unlink()
    return files


def test_each_hostile_file_is_refused_by_name_at_once(tmp_path: Path) -> None:
    for reason, file in hostile(tmp_path).items():
        started = time.monotonic()
        with pytest.raises(EngramError, match=reason) as caught:
            decode_image(file, 16, quick=True)
        assert str(file) in str(caught.value)
        assert time.monotonic() - started < 5, file


def test_bad_files_are_skipped_with_their_names_or_refused(tmp_path: Path) -> None:
    bad = list(hostile(tmp_path).values())
    good = [save(tmp_path / f"good{i}.png", np.full((9, 9, 3), i, np.uint8)) for i in range(5)]
    paths = [good[0], *bad[:4], good[1], good[2], *bad[4:], good[3], good[4]]
    images, kept, skipped = decode_files(paths, 8, skip_bad=True)
    assert [paths[position] for position in kept] == good
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert [path for path, _ in skipped] == [str(path) for path in bad]
    assert all(reason for _, reason in skipped)
    with pytest.raises(EngramError, match=r"bomb.png cannot be read .* repair or remove it, or skip such files"):
        decode_files(paths, 8)


def test_a_wrong_extension_is_no_matter(tmp_path: Path) -> None:
    save(tmp_path / "x.png")
    (tmp_path / "x.png").rename(tmp_path / "x.jpg")
    assert decode_image(tmp_path / "x.jpg").shape == (20, 30, 3)


def test_a_stream_keeps_order_and_needs_no_more_for_more_files(tmp_path: Path) -> None:
    files = [save(tmp_path / f"{i}.png", np.full((40, 40, 3), i, np.uint8)) for i in range(10)]
    asked = 0

    def endless(count: int) -> Iterator[Path]:
        nonlocal asked
        for i in range(count):
            asked += 1
            yield files[i % 10]

    def peak(count: int) -> int:
        tracemalloc.start()
        for number, part in enumerate(decode_stream(endless(count), 32, batch=50)):
            assert part.images[:, 0, 0, 0].tolist() == [i % 10 for i in range(50)]
            if number == 0:
                assert asked <= 150  # no more than a batch ahead
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(100)
    asked = 0
    few = peak(200)
    asked = 0
    assert peak(1000) < 1.3 * few


def test_a_stream_that_is_left_early_stops_its_threads(tmp_path: Path) -> None:
    file = save(tmp_path / "x.png")
    stream = decode_stream(iter(lambda: file, None), 16, batch=20)
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(thread.name.startswith("decode") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert not any(thread.name.startswith("decode") for thread in threading.enumerate())


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first few files are decoded by other processes."""
    monkeypatch.setattr(decoding, "IN_PROCESS_FILES", 3)


def test_processes_decode_as_threads_do(tmp_path: Path, processes: None) -> None:
    random, bad = np.random.default_rng(0), list(hostile(tmp_path).values())
    good = [save(tmp_path / f"good {i}\n\udcff.png", random.integers(0, 256, (9, 9, 3), np.uint8)) for i in range(40)]
    paths = [*good[:30], *bad, *good[30:]]
    alone, several = (decode_files(paths, 8, skip_bad=True, workers=workers) for workers in (1, 3))
    assert np.array_equal(alone[0], several[0])
    assert alone[1:] == several[1:]
    assert len(several[1]) == 40
    with pytest.raises(EngramError, match=r"bomb.png cannot be read .* repair or remove it, or skip such files"):
        decode_files(paths, 8, workers=3)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_process_outlives_its_stream(tmp_path: Path, processes: None) -> None:
    file, others = save(tmp_path / "x.png"), set(_children())
    stream = decode_stream(iter(lambda: file, None), 16, batch=20, workers=3)
    next(stream)
    assert len(set(_children()) - others) == 3
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert set(_children()) <= others


def test_a_process_that_dies_is_replaced_and_its_file_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = "import engram.data.decode.prefetch as d, os; f = d.try_decode; d.try_decode = " + (
        "lambda path, *more: os.kill(os.getpid(), 11) if 'deadly' in path else f(path, *more); serve()"
    )
    monkeypatch.setattr(decoding, "_PROGRAM", decoding._PROGRAM.replace("serve()", deadly))
    paths = [str(save(tmp_path / f"{name}.png")) for name in ("a", "b", "deadly", "c")]
    pool = decoding.Decoders(1, 8)
    try:
        assert pool.decode(paths[:2])[1] == [None, None]
        images, reasons = pool.decode(paths)
        assert reasons == [None, None, "the decoder crashes on it", None]
        assert np.array_equal(
            images, np.stack([decode_image(path, 8, quick=True) for path in paths if path != paths[2]])
        )
        pool._all[-1].kill()  # by somebody else, while it waits
        assert pool.decode(paths[:1])[1] == [None]
    finally:
        pool.close()


def test_a_process_that_cannot_be_replaced_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(save(tmp_path / "a.png"))
    pool = decoding.Decoders(1, 8)

    def no_more(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no processes")

    try:
        pool._all[-1].kill()
        monkeypatch.setattr(decoding.subprocess, "Popen", no_more)
        with pytest.raises(EngramError, match=r"died, and no other could be started \(no processes\)"):
            pool.decode([path])
    finally:
        pool.close()


def test_where_no_process_can_be_started_it_says_so_and_goes_on(
    tmp_path: Path, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    files = [save(tmp_path / f"{i}.png") for i in range(300)]
    with pytest.warns(RuntimeWarning, match=r"in one process, which is slower: .*unavailable") as told:
        images, _, _ = decode_files(files, 8, workers=2)
    assert len(images) == 300
    assert len(told) == 1


def test_large_photos_are_decoded_at_a_fraction_of_their_size(tmp_path: Path) -> None:
    y, x = np.mgrid[0:1200, 0:1600]
    photo = np.stack([x * 255 // 1599, y * 255 // 1199, (x + y) % 256], axis=2).astype(np.uint8)
    path = save(tmp_path / "x.jpg", photo, quality=95)
    whole, quick = decode_image(path, 64), decode_image(path, 64, quick=True)
    assert quick.shape == (64, 64, 3)
    assert np.abs(whole.astype(int) - quick)[..., :2].mean() < 2
    small = save(tmp_path / "y.jpg", photo[:50, :50], quality=95)
    assert np.array_equal(decode_image(small, 32), decode_image(small, 32, quick=True))


def test_a_photograph_of_108_million_pixels_is_read_at_a_fraction_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.new("L", (12_000, 9_000), 90).save(path)
    assert choose_size([path]) == 64
    assert (decode_image(path, 64, quick=True) == 90).all()
    with pytest.raises(EngramError, match="claims more pixels than the 89478485 allowed"):
        decode_image(path, 64)


def test_only_a_jpeg_may_claim_more_pixels_than_are_allowed_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400_000)
    large = np.zeros((1_000, 700, 3), np.uint8)
    assert decode_image(save(tmp_path / "x.jpg", large), 32, quick=True).shape == (32, 32, 3)
    for name, image, limit in (
        ("x.png", large, "400000 allowed"),
        ("y.jpg", np.zeros((1_000, 810, 3), np.uint8), "800000 allowed in a JPEG and the 400000 in other files"),
        ("flat.jpg", np.zeros((10_000, 60, 3), np.uint8), "400000 allowed"),  # too narrow for a fraction of its size
    ):
        with pytest.raises(EngramError, match=f"claims more pixels than the {limit}"):
            decode_image(save(tmp_path / name, image), 32, quick=True)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_progressive_jpeg_is_as_large_as_it_is_in_memory(
    progressive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_LARGE_PIXELS", 100_000)
    path = save(tmp_path / "x.jpg", np.zeros((400, 500, 3), np.uint8), progressive=progressive)
    one_at_a_time: list[bool] = []

    def alone(load: Callable[[], Images | str]) -> Images | str:
        one_at_a_time.append(True)
        return load()

    assert np.array_equal(decode.try_decode(path, 16, True, alone), np.zeros((16, 16, 3)))
    assert bool(one_at_a_time) == progressive


def test_warnings_are_as_they_were_while_and_after_threads_decode(tmp_path: Path) -> None:
    files = [save(tmp_path / f"{i}.png", np.tile(RED, (30, 30, 1))) for i in range(40)]
    before = list(warnings.filters)
    for _ in decode_stream(files, 8, batch=10, workers=4):
        with warnings.catch_warnings():  # begun while others decode, and ended when they have
            time.sleep(0.2)
    with pytest.raises(UserWarning, match="of one's own"):
        warnings.warn("of one's own", stacklevel=1)
    assert [each for each in warnings.filters if each is not decode._IGNORED] == before


def test_what_stays_among_the_filters_can_be_copied_and_taken_for_a_pattern(tmp_path: Path) -> None:
    """As scikit-learn does with the filters, for each of its jobs."""
    decode_image(save(tmp_path / "x.png", np.tile(RED, (4, 4, 1))))
    assert decode._IGNORED in warnings.filters
    copied = pickle.loads(pickle.dumps(warnings.filters))
    assert [each[0] for each in copied] == [each[0] for each in warnings.filters]
    assert re.compile(decode._DECODING.pattern).match("anything") is None


@pytest.mark.parametrize("large", [0, 10**6], ids=["by the thread for large images", "where it is opened"])
def test_what_pillow_warns_of_refuses_no_image(tmp_path: Path, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_LARGE_PIXELS", large)
    damaged = save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0")
    with pytest.raises(UserWarning, match="Corrupt EXIF"), Image.open(damaged) as image:
        image.getexif()
    for _ in range(2):
        assert len(decode_files([damaged] * 3, 8, workers=2)[0]) == 3
        warnings.simplefilter("error")  # whoever has the last word of other warnings


def test_too_many_images_for_the_memory_that_is_free_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EngramError, match=r"need 6000\.0 GB of memory, and .* GB are free"):
        decode_files(["x.png"] * 2_000_000, 1000)
    monkeypatch.setattr(room, "free_memory", lambda: 10**9)
    with pytest.raises(EngramError, match=r"need 1\.2 GB of memory, and 1\.0 GB are free; use fewer or smaller images"):
        decode_files(["x.png"] * 400, 1000)


@pytest.mark.parametrize(("sides", "chosen"), [([28] * 5, 24), ([64] * 4 + [20], 64), ([500] * 3, 64), ([10] * 3, 16)])
def test_the_size_is_chosen_by_the_images(sides: list[int], chosen: int, tmp_path: Path) -> None:
    files = [save(tmp_path / f"{i}.png", np.zeros((side, side + 7, 3), np.uint8)) for i, side in enumerate(sides)]
    assert choose_size(files) == chosen
    assert choose_size([tmp_path / "nowhere.png"]) == 32


DECODE = """
from engram.data.decode.image import try_decode
def work():
    found = try_decode(sys.argv[1], None if sys.argv[2] == "None" else int(sys.argv[2]), True)
    return found if isinstance(found, str) else found.shape
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "mode", "options", "most"),
    [  # most: pixels allowed, which the page of one's own images names
        ("x.webp", "RGBA", {"lossless": True}, 67_108_864),
        ("x.webp", "RGB", {}, 67_108_864),
        ("x.png", "RGBA", {}, 89_478_485),
        ("x.png", "I;16", {}, 89_478_485),
        ("x.jpg", "CMYK", {"progressive": True}, 130_150_524),
    ],
)
def test_memory_grows_with_the_pixels_up_to_the_documented_limit(
    name: str, mode: str, options: dict[str, object], most: int, tmp_path: Path
) -> None:
    """A tenth of the pixels that are allowed take at most a tenth of the memory that is allowed, and a little more."""
    side = int((most / 10) ** 0.5)
    exif = Image.Exif()
    exif[0x0112] = 1 if name == "x.webp" else 6
    Image.new(mode, (side, side)).save(tmp_path / name, exif=exif, **options)  # pyright: ignore[reportArgumentType]
    said, grown = memory_grown(DECODE, tmp_path / name, 64)
    assert said == "(64, 64, 3)"
    assert grown < decode.DECODE_BYTES / 2**20 / 10 + 16


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_images_that_would_take_more_memory_than_allowed_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (8_200, 8_200)).save(tmp_path / "x.webp", method=0, quality=0)
    bomb(tmp_path / "tall.png", 1, 44_000_000)
    bomb(tmp_path / "wide.png", 70_000, 2)
    for name, size, reason in (
        ("x.webp", 64, "its 67240000 pixels would take 1026 MiB of memory, and 1024 are allowed"),
        ("tall.png", 64, "its side of 44000000 pixels is longer than the 65535 allowed"),
        ("wide.png", None, "its side of 70000 pixels is longer than the 65535 allowed"),
    ):
        said, grown = memory_grown(DECODE, tmp_path / name, size)
        assert said == reason
        assert grown < 20


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "I;16"])
def test_pixels_converted_a_few_rows_at_a_time_are_those_of_the_whole(
    mode: str, turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, shape = np.random.default_rng(turn), {"RGB": (37, 23, 3), "RGBA": (37, 23, 4), "I;16": (37, 23)}[mode]
    exif = Image.Exif()
    exif[0x0112] = turn
    stored = random.integers(0, 65536 if mode == "I;16" else 256, shape, np.uint16 if mode == "I;16" else np.uint8)
    path = save(tmp_path / "x.png", stored, exif=exif)
    whole = [decode_image(path, size) for size in (None, 9, 23)]
    monkeypatch.setattr(decode, "_STRIP_PIXELS", 100)
    for ours, size in zip(whole, (None, 9, 23), strict=True):
        assert np.array_equal(decode_image(path, size), ours)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in kilobytes on Linux")
def test_many_bombs_at_once_do_not_fill_the_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bombs = [bomb(tmp_path / f"{i}.png", 9_000, 9_000) for i in range(24)]  # allowed as such, but each of 243 MB
    _, kept, skipped = decode_files(bombs, 16, skip_bad=True, workers=8)
    assert not kept
    assert len(skipped) == 24
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 900_000  # one at a time, not eight


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_bombs_at_once_do_not_fill_the_memory_of_processes(tmp_path: Path, processes: None) -> None:
    bombs = [bomb(tmp_path / f"{i}.png", 9_000, 9_000) for i in range(24)]  # 243 MB each, in 30 MB of process
    done, most = threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            sizes = [_resident(int(line)) for line in _children()]
            most = max(most, sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, kept, skipped = decode_files(bombs, 16, skip_bad=True, workers=8)
    done.set()
    watcher.join()
    assert not kept
    assert {reason for _, reason in skipped} == {skipped[0][1]}
    assert 100 * 2**20 < most < 1000 * 2**20, most  # eight at a time would be 2 GB


def _children() -> list[str]:
    """This process's children; those of a thread are its own in /proc."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            found += (task / "children").read_text().split()
    return found


def _resident(process: int) -> int:
    """The bytes of memory of a process; none of one that is about to start, which has those of this one."""
    try:
        if Path(f"/proc/{process}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes():
            return 0
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
