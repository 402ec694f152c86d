"""Images as they come: tables of paths and labels, nested folders, and more file formats, with bounded memory."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from engram.cli.main import main
from engram.core.errors import EngramError
from engram.data.decode import formats
from engram.data.decode.image import try_decode
from engram.data.sources import table
from engram.data.sources.folder import list_nested
from engram.data.sources.table import is_table, read_table
from model_helpers import opened, pictures

FLAGS = ["--epochs", "1", "--device", "cpu", "--threads", "1", "--backbone", "resnet10", "--quiet"]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Pictures of two classes in one folder; their paths and labels."""
    monkeypatch.chdir(tmp_path)
    rows: list[tuple[str, str]] = []
    for number, (image, name) in enumerate(zip(*pictures(("apple", "boat"), 6), strict=True)):
        file = Path("photos") / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(file)
        rows.append((str(file), name))
    return rows


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_a_model_learns_from_a_table(photos: list[tuple[str, str]], kind: str, tmp_path: Path) -> None:
    if kind == "jsonl":
        lines = [json.dumps({"path": path, "label": label}) for path, label in photos]
    else:
        mark = "," if kind == "csv" else "\t"
        lines = [mark.join(row) for row in [("path", "label"), *photos, photos[0]]]
    Path(f"images.{kind}").write_text("\n".join(lines), encoding="utf-8-sig" if kind == "csv" else "utf-8")
    assert main(["learn", "model", f"images.{kind}", *FLAGS]) == 0
    assert opened(tmp_path / "model").labels == ["apple", "boat"]
    assert main(["evaluate", "model", f"images.{kind}", "--device", "cpu", "--quiet"]) == 0


def test_columns_have_other_names_and_paths_are_relative_to_the_table(photos: list[tuple[str, str]]) -> None:
    Path("tables").mkdir()
    Path("tables/t.csv").write_text("file,kind\n../photos/0.png,1\n")
    assert read_table("tables/t.csv", "file", "kind") == (["tables/../photos/0.png"], ["1"])
    Path("tables/t.csv").write_text('path;label\n"../photos/0.png";"1, or 2"\n')  # of a spreadsheet
    assert read_table("tables/t.csv") == (["tables/../photos/0.png"], ["1, or 2"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("file,label\na.png,x", "no column 'path' .path_column.: did you mean|no column 'path'"),
        ("path,label\na.png,", "row 1 of .* has no path or no label"),
        ("path,label\n", "has no row"),
        ("path,label\na.png,x\na.png,y", "the labels 'x' and 'y'"),
        ('path,label\n"a.png,x', "cannot be read"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(EngramError, match=why):
        read_table(tmp_path / "t.csv")


def test_other_bad_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jsonl").write_text("[1]\n")
    with pytest.raises(EngramError, match=r"line 1 of .* is not a JSON object"):
        read_table(tmp_path / "t.jsonl")
    (tmp_path / "t.csv").write_bytes(b"path,label\n\xff\xfe,x")
    with pytest.raises(EngramError, match="save it as UTF-8"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(EngramError, match="pip install pyarrow"):
        read_table(tmp_path / "t.parquet")
    monkeypatch.setattr(table, "LARGEST_BYTES", 3)
    with pytest.raises(EngramError, match="MiB allowed for a table"):
        read_table(tmp_path / "t.parquet")
    assert not is_table(tmp_path)
    assert main(["learn", "m", str(tmp_path / "t.csv"), "--nested"]) == 2


def test_parquet_is_read_by_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class File:
        def __init__(self, place: Path) -> None:
            del place

        def iter_batches(self) -> Any:
            return iter([SimpleNamespace(to_pylist=lambda: [{"path": "a.png", "label": 3}])])

    module: Any = ModuleType("pyarrow.parquet")
    module.ParquetFile = File
    monkeypatch.setattr(table, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    assert read_table(tmp_path / "t.parquet") == ([str(tmp_path / "a.png")], ["3"])


def test_nested_folders_are_classes_by_flag(photos: list[tuple[str, str]], tmp_path: Path) -> None:
    for path, label in photos:
        place = Path("deep") / "things" / label / Path(path).name
        place.parent.mkdir(parents=True, exist_ok=True)
        Path(path).rename(place)
    assert main(["learn", "model", "deep", "--nested", *FLAGS]) == 0
    assert opened(tmp_path / "model").labels == ["things/apple", "things/boat"]
    assert main(["evaluate", "model", "deep", "--nested", "--device", "cpu", "--quiet"]) == 0
    with pytest.raises(EngramError, match="has no folder with images"):
        list_nested("deep/things/apple")


RED = np.full((20, 30, 3), (200, 10, 10), np.uint8)


@pytest.mark.parametrize("kind", ["tiff", "gif", "avif"])
def test_more_formats_are_read(tmp_path: Path, kind: str) -> None:
    if kind == "avif" and not features.check("avif"):
        pytest.skip("Pillow was built without AVIF")
    file = tmp_path / f"a.{kind}"
    more = {"save_all": True, "append_images": [Image.fromarray(255 - RED)]} if kind != "avif" else {}
    Image.fromarray(RED).save(file, **more)
    found = try_decode(file, 16, quick=True)
    assert not isinstance(found, str), found
    assert np.abs(found.astype(int) - RED[0, 0]).max() < 12  # the first frame
    assert f".{kind}" in formats.EXTENSIONS


def test_a_deep_tiff_is_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(tmp_path / "a.tif")
    found = try_decode(tmp_path / "a.tif", 16, quick=True)
    assert not isinstance(found, str), found
    assert (found == 156).all()


def test_a_tiff_that_claims_large_tiles_is_refused(tmp_path: Path) -> None:
    tags = {256: 20, 257: 20, 258: 8, 259: 5, 262: 1, 277: 1, 322: 60_000, 323: 60_000, 324: 8, 325: 10}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(
        struct.pack("<2sHI", b"II", 42, 18) + bytes(10) + struct.pack("<H", len(tags)) + entries + bytes(4)
    )
    found = try_decode(tmp_path / "a.tif", 16, quick=True)
    assert isinstance(found, str)
    assert "MiB of memory" in found


def test_heic_is_read_where_its_plugin_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    plugin: Any = ModuleType("pillow_heif")
    plugin.register_heif_opener = lambda: called.append("registered")
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    monkeypatch.setattr(formats, "READS_HEIC", True)
    formats.readable_formats.cache_clear()
    try:
        assert formats.readable_formats()[-1] == "HEIF"
        assert called == ["registered"]
    finally:
        monkeypatch.undo()
        formats.readable_formats.cache_clear()
