"""Files are written whole or not at all, with the permissions that the user's umask gives."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engram.core.errors import EngramError
from engram.core.io import lock, parse_json, write_bytes
from engram.core.memory_limits import keep_freed_memory
from engram.core.safe_folder import Folder, MissingFile

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_of_the_current_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "file", b"content")
        write_bytes(tmp_path / "file", b"other content")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_bytes() == b"other content"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_importing_never_sets_the_umask() -> None:
    code = "import os\ndef refuse(mode): raise AssertionError\nos.umask = refuse\nimport engram.core.io"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("content", [b"[" * 10**5, b"[" * 60 + b"]" * 60, b"1" * 1001, b"\xff", b"", b'{"a": 1'])
def test_damaged_json_is_an_error_of_one_line(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_json(content)


def test_a_folder_reads_and_writes_only_inside_itself(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_text("theirs")
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "file").symlink_to(outside / "file")
    os.mkfifo(inside / "pipe")
    with Folder.open(inside) as folder:
        for name in ("file", "link/file", "pipe", "link"):
            with pytest.raises(EngramError):
                folder.read(name, 100)
            with pytest.raises(EngramError):
                folder.append(name, b"ours")
        with pytest.raises(EngramError, match="is a link"):
            folder.write("link/new", b"ours")
        with pytest.raises(MissingFile):
            folder.read("nothing", 100)
        folder.write("file", b"ours")  # replaces the link
        folder.write("new/file", b"ours")
        folder.append("new/file", b" too")
        assert folder.read("new/file", 100) == b"ours too"
        assert (folder.has("link"), folder.has("new/nothing")) == (True, False)
        with pytest.raises(EngramError, match="has 8 bytes and may have 7"):
            folder.read("new/file", 7)
    assert sorted(path.name for path in outside.iterdir()) == ["deep", "file"]
    assert (outside / "file").read_text() == "theirs"
    assert (inside / "file").read_text() == "ours"


def test_nothing_is_written_into_a_hard_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("theirs")
    (tmp_path / "inside").mkdir()
    os.link(tmp_path / "outside", tmp_path / "inside" / "file")
    with Folder.open(tmp_path / "inside") as folder:
        with pytest.raises(EngramError, match=r"inside/file is a hard link: .* replace it by a copy"):
            folder.append("file", b"ours")
        with pytest.raises(EngramError, match=r"inside/file is a hard link"):
            lock(tmp_path / "inside" / "file")
        assert folder.read("file", 100) == b"theirs"
        folder.write("file", b"ours")  # a new file
    assert (tmp_path / "outside").read_text() == "theirs"


def test_only_a_regular_file_is_locked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EngramError, match="not a regular file"):
        lock(tmp_path / "pipe")


@pytest.mark.parametrize(("largest", "threshold"), [(2**26, 2**26), (2**25, 2**25), (0, None)])
def test_a_c_library_that_allows_less_is_asked_for_less(
    largest: int, threshold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc's limit was 32 MiB. If only the trim threshold is set, its own adjustment ends, and blocks are returned."""
    settings: dict[int, int] = {}

    class Library:
        def mallopt(self, which: int, value: int) -> int:
            if which == MMAP_THRESHOLD and value > largest:
                return 0
            settings[which] = value
            return 1

    monkeypatch.setattr("ctypes.CDLL", lambda _: Library())
    keep_freed_memory()
    assert settings == ({} if threshold is None else {MMAP_THRESHOLD: threshold, TRIM_THRESHOLD: 2**27})


def test_freed_memory_is_used_again() -> None:
    """Blocks of 40 MB, one after the other: each of 10,000 pages and more; only the first ones come from the system."""
    code = (
        "import resource, sys\n"
        "from engram.core.memory_limits import keep_freed_memory\n"
        "if sys.argv[1] == 'keep':\n"
        "    keep_freed_memory()\n"
        "for _ in range(20):\n"
        "    b'x' * 40_000_000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
    )
    faults = {how: int(subprocess.check_output([sys.executable, "-c", code, how])) for how in ("keep", "as it is")}
    if faults["as it is"] < 100_000:
        pytest.skip("this C library, or these large pages, have no such cost")
    assert faults["keep"] < 50_000
