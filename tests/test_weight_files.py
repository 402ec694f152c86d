"""Files of weights from anywhere: good ones are read, hostile and damaged ones are refused, and nothing is executed."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from engram import EngramError
from engram.core.state_file import parse_tensors, read_file
from engram.nn.backbone import Backbone
from engram.nn.backbones import BACKBONES, register_backbone
from engram.nn.pretrained import fitted, keep, load_weights, tensors_digest, tensors_of
from engram.nn.weights_catalogue import KNOWN

NAME = "tiny-for-weights"


class TinyNetwork(Backbone):
    """One convolution, a norm and the mean."""

    dim = 4

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.conv.weight.data.copy_(torch.randn(4, 3, 3, 3, generator=generator))
        nn.init.zeros_(self.conv.bias)  # pyright: ignore[reportArgumentType]

    def own_name(self, published: str) -> str | None:
        return None if published.startswith("fc.") else published

    def forward(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return (), self.bn(self.conv(x)).mean(dim=(2, 3))


@pytest.fixture(autouse=True)
def tiny() -> Any:
    register_backbone(NAME)(TinyNetwork)
    yield
    BACKBONES.remove(NAME)


def state() -> dict[str, torch.Tensor]:
    return dict(TinyNetwork(torch.Generator().manual_seed(1)).state_dict())


def test_the_same_tensors_from_every_format(tmp_path: Path) -> None:
    ours = state()
    published = {**ours, "fc.weight": torch.zeros(7, 4)}
    del published["bn.num_batches_tracked"]  # older files do not have it
    (tmp_path / "a.safetensors").write_bytes(save(published))
    torch.save(collections.OrderedDict(published), tmp_path / "b.pth")
    torch.save(published, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {name: nn.Parameter(value) for name, value in published.items()}}, tmp_path / "d.pt")
    torch.save({name: value.half() for name, value in published.items()}, tmp_path / "e.pt")
    digests = set()
    for name in ("a.safetensors", "b.pth", "c.pth", "d.pt"):
        record, found = load_weights(tmp_path / name, NAME)
        assert found.keys() == ours.keys()
        assert all(torch.equal(found[key], value) for key, value in ours.items())
        assert (record.backbone, record.licence, record.image_size) == (NAME, "unknown", 224)
        digests.add(record.digest)
    assert digests == {tensors_digest(ours)}
    assert load_weights(tmp_path / "e.pt", NAME)[1]["conv.weight"].dtype == torch.float32


def test_kept_weights_are_found_again_without_their_file(tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").write_bytes(save(state()))
    record, tensors = load_weights(tmp_path / "mine.safetensors", NAME)
    kept = keep(record, tensors)
    (tmp_path / "mine.safetensors").unlink()
    assert torch.equal(tensors_of(record)["conv.weight"], tensors["conv.weight"])
    assert load_weights(kept)[0] == record, "a converted file says which network it is for"
    content = bytearray(kept.read_bytes())
    content[-3] ^= 1
    kept.write_bytes(content)
    with pytest.raises(EngramError, match="is not that of file-mine"):
        tensors_of(record)
    kept.unlink()
    with pytest.raises(EngramError, match=r"file-mine .the file mine.safetensors. are not in"):
        tensors_of(record)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


def legacy(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def zipped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def with_pickle(content: bytes) -> bytes:
    """An archive like those that torch saves, with another pickle in it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(zipped(state()))) as plain, zipfile.ZipFile(packed, "w") as out:
        for name in plain.namelist():
            out.writestr(name, content if name.endswith("/data.pkl") else plain.read(name))
    return packed.getvalue()


def hostile(kind: str, mark: Path) -> bytes:
    """The content of a hostile file, and what the refusal says of it."""
    good = state()
    header = json.dumps({"conv.weight": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]}}).encode()
    if kind == "safetensors with a 10 GB header":
        return struct.pack("<Q", 10 * 2**30) + b"{}"
    if kind == "safetensors with a tensor that is not there":
        return struct.pack("<Q", len(header)) + header + bytes(4)
    if kind == "compressed archive":
        packed = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(zipped(good))) as plain,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out,
        ):
            for name in plain.namelist():
                out.writestr(name, plain.read(name))
        return packed.getvalue()
    if kind == "endless stride":
        return zipped({"conv.weight": torch.zeros(1).expand(10**4, 10**4)})
    return {
        "a key of tuples in tuples": with_pickle(b"\x80\x02}(" + b")" + b"2\x86" * 60 + b"K\x01u."),
        "a key of remembered tuples": with_pickle(b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"K\x01s."),
        "a key of tuples as a list": with_pickle(b"\x80\x02}" + b"(" + b")" * 200 + b"tK\x01s."),
        "a deep key": with_pickle(b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."),
        "an empty stack": with_pickle(b"\x80\x02}\x86."),
        "code in a pickle": pickle.dumps(Hostile(mark)),
        "code in an archive": zipped({"conv.weight": Hostile(mark)}),
        "code in a legacy file": legacy({"conv.weight": Hostile(mark)}),
        "code in a newer pickle": pickle.dumps(Hostile(mark), protocol=4),
        "bytes instead of tensors": legacy({"conv.weight": bytearray(10)}),
        "no tensors": zipped([1, 2]),
        "text": b"not weights at all, but a page that says: log in first",
        "nothing": b"",
        "half of an archive": zipped(good)[:900],
        "half of a legacy file": legacy(good)[:-60],
        "half of a safetensors file": save(good)[:-60],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("code in a pickle", "a pickle of something else"),
        ("code in a newer pickle", "a pickle of something else"),
        ("code in an archive", "'posix.system', and weights are tensors only"),
        ("code in a legacy file", "'posix.system', and weights are tensors only"),
        ("bytes instead of tensors", "and weights are tensors only"),
        ("a key of tuples in tuples", "a tuple of more than 100 values"),
        ("a key of remembered tuples", "a tuple of more than 100 values"),
        ("a key of tuples as a list", "a tuple of more than 100 values"),
        ("a deep key", "a tuple of more than 100 values"),
        ("an empty stack", "damaged pickle"),
        ("safetensors with a 10 GB header", "cut short"),
        ("safetensors with a tensor that is not there", "damaged"),
        ("compressed archive", "compressed"),
        ("endless stride", "more than the file holds|more values than it has"),
        ("no tensors", "not a state dict"),
        ("text", "neither a safetensors file nor"),
        ("nothing", "cut short"),
        ("half of an archive", "damaged"),
        ("half of a legacy file", "damaged"),
        ("half of a safetensors file", "damaged"),
    ],
)
def test_a_hostile_file_is_refused_in_one_sentence(kind: str, said: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "executed", tmp_path / "weights.pth"
    file.write_bytes(hostile(kind, mark))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EngramError, match=said) as refusal:
        load_weights(file, NAME)
    assert "\n" not in str(refusal.value)
    assert not mark.exists(), "nothing was executed"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"


def misfit(change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    tensors = state()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("bn.weight"), "it lacks 'bn.weight'"),
        (lambda tensors: tensors.update(head=torch.zeros(3)), "it has 'head', which"),
        (lambda tensors: tensors.update({"conv.bias": torch.zeros(5)}), r"conv.bias is float32 of \(5,\), not of"),
        (lambda tensors: tensors.update({"conv.bias": torch.zeros(4).long()}), "conv.bias is int64"),
        (lambda tensors: tensors["conv.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors["bn.running_var"].fill_(float("inf")), "not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, said: str) -> None:
    with pytest.raises(EngramError, match=said):
        fitted(misfit(change), NAME, Path("x.safetensors"))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(EngramError, match="is not a regular file"):
            load_weights(tmp_path / name, NAME)
    with pytest.raises(EngramError, match="there is no file"):
        load_weights(tmp_path / "none.pth", NAME)
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(EngramError, match=r"has 10.7 GB"):
        read_file(tmp_path / "huge.safetensors")


def test_a_converted_file_with_another_record_is_refused(tmp_path: Path) -> None:
    tensors = state()
    for about, said in (
        ("[1]", "cannot be read"),
        (json.dumps({"name": "x"}), "cannot be read"),
        ("{" * 5000, "cannot be read"),
        (json.dumps("x" * 5000), "cannot be read"),
        (json.dumps({"x" * 5000: "x"}), "cannot be read"),
        (json.dumps({"image_size": "x" * 5000}), "cannot be read"),
    ):
        file = tmp_path / "x.safetensors"
        file.write_bytes(save(tensors, metadata={"engram": about}))
        with pytest.raises(EngramError, match=said) as refusal:
            load_weights(file)
        assert len(str(refusal.value)) < 600
    found, about = parse_tensors(save(tensors, metadata={"a": "b"}), Path("x"))
    assert about == {"a": "b"}
    assert found.keys() == tensors.keys()


def test_a_file_never_takes_the_place_of_known_weights(tmp_path: Path) -> None:
    known = next(iter(KNOWN))
    (tmp_path / f"{known}.safetensors").write_bytes(save(state()))
    record, tensors = load_weights(tmp_path / f"{known}.safetensors", NAME)
    assert record.name not in KNOWN
    assert known not in keep(record, tensors).name
