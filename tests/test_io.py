"""Files are written whole or not at all, with the permissions that the user's umask gives."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engram.core.io import write_bytes


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
