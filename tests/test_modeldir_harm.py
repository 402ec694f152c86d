"""What must not harm a model: kills at random moments, and files that changed behind its back.

ENGRAM_KILLS and ENGRAM_MUTATIONS say how many of each; the numbers here are for every day.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engram import EngramError
from engram.core.safe_folder import digest
from engram.models.model import Model
from engram.models.store.codec import read_manifest
from engram.models.store.generations import NoModelYet
from model_helpers import NAMES, learn_in_child, make, opened, pictures, same, tiny
from process_helpers import fork_server

KILLS = int(os.environ.get("ENGRAM_KILLS", "8"))
MUTATIONS = int(os.environ.get("ENGRAM_MUTATIONS", "100"))
FIRST, SECOND = NAMES[:3], NAMES[3:5]


class Children:
    """Processes that learn, each forked from one that has imported everything."""

    def __init__(self) -> None:
        self.context = fork_server("model_helpers")

    def run(self, path: Path, names: tuple[str, ...], kill_after: float | None) -> tuple[float, int | None]:
        """Seconds it took and how it ended, killed after that time unless it had ended."""
        process = self.context.Process(target=learn_in_child, args=(str(path), names))
        process.start()
        started = time.monotonic()
        process.join(kill_after)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        return time.monotonic() - started, process.exitcode


@pytest.mark.parametrize("names", [SECOND, FIRST], ids=["a later lesson", "the first lesson"])
def test_a_kill_at_any_moment_leaves_the_model_before_or_after(names: tuple[str, ...], tmp_path: Path) -> None:
    children, draw = Children(), random.Random(1)
    before: Path | None = make(tmp_path / "before", FIRST, config=tiny()) if names == SECOND else None
    path, whole = tmp_path / "m", tmp_path / "whole"

    def begin(place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, place)

    begin(whole)
    seconds, code = children.run(whole, names, None)
    assert code == 0
    old, new = None if before is None else opened(before), opened(whole)
    begin(path)
    kills = finished = 0
    while kills < (KILLS + 1) // 2:
        _, code = children.run(path, names, draw.uniform(0, seconds))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if is_old_or_new(path, old, new):
            finished += 1
            begin(path)
    while not is_old_or_new(path, old, new):  # what was interrupted goes on to the same end
        assert children.run(path, names, None)[1] == 0
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "current", "generations"]
    assert len(list((path / "generations").iterdir())) == (1 if before is None else 2), "the model, and what it was"


def is_old_or_new(path: Path, old: Model | None, new: Model) -> bool:
    """Whether it is the new model; fails unless it is that or the old one."""
    found = opened_or_refused(path)
    if isinstance(found, EngramError):
        assert old is None, found
        assert isinstance(found, NoModelYet) or "there is no model" in str(found) or "not a model" in str(found), found
        return False
    if same(found, new):
        return True
    assert old is not None
    assert same(found, old)
    return False


def opened_or_refused(path: Path, **options: Any) -> Model | EngramError:
    try:
        return opened(path, **options)
    except EngramError as error:
        return error


# Mutations: what happens to files, and what people who mean harm would do to them


def file_in(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock"))


def flip(path: Path, draw: random.Random) -> None:
    file = file_in(path, draw)
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 3))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(path: Path, draw: random.Random) -> None:
    file = file_in(path, draw)
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def extend(path: Path, draw: random.Random) -> None:
    file = file_in(path, draw)
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 50)))


def delete(path: Path, draw: random.Random) -> None:
    file_in(path, draw).unlink()


def swap(path: Path, draw: random.Random) -> None:
    one, other = file_in(path, draw), file_in(path, draw)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])


def replace_by_folder(path: Path, draw: random.Random) -> None:
    file = file_in(path, draw)
    file.unlink()
    file.mkdir()


def replace_by_link(path: Path, draw: random.Random) -> None:
    file = file_in(path, draw)
    file.unlink()
    file.symlink_to(draw.choice(["/etc/passwd", str(file), "/dev/zero", "../../current"]))


def replace_by_pipe(path: Path, draw: random.Random) -> None:
    file = file_in(path, draw)
    file.unlink()
    os.mkfifo(file)


def generation_of(path: Path) -> Path:
    return path / "generations" / json.loads((path / "current").read_text())["generation"]


def sign(path: Path, manifest: Any) -> None:
    """Writes model.json and has `current` vouch for it."""
    generation = generation_of(path)
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (generation / "model.json").write_bytes(text)
    pointer = {"format": 1, "generation": generation.name, "digest": digest(text)}
    (path / "current").write_text(json.dumps(pointer))


JUNK: list[Any] = [None, True, -1, 0, 3, 2**63, 1e308, -0.5, "", "x", "../..", "nan", [], [[]], {}, {"a": 1}, ["x"] * 9]


def edit(data: Any, draw: random.Random) -> Any:
    """The data with one thing in it, anywhere, changed, removed, doubled or put elsewhere."""
    if isinstance(data, dict) and data and draw.random() < 0.9:
        key = draw.choice(sorted(data))
        how = draw.random()
        if how < 0.1:
            return {name: value for name, value in data.items() if name != key}
        if how < 0.15:
            return {**data, draw.choice(["x", "__class__", "../x", key.upper()]): draw.choice(JUNK)}
        return {**data, key: edit(data[key], draw)}
    if isinstance(data, list) and data and draw.random() < 0.9:
        place = draw.randrange(len(data))
        how = draw.random()
        if how < 0.1:
            return data[:place] + data[place + 1 :]
        if how < 0.2:
            return [*data, data[place]]
        return [*data[:place], edit(data[place], draw), *data[place + 1 :]]
    return draw.choice(JUNK)


def edit_signed(path: Path, draw: random.Random) -> None:
    manifest = json.loads((generation_of(path) / "model.json").read_text())
    sign(path, edit(manifest, draw))


def edit_pointer(path: Path, draw: random.Random) -> None:
    (path / "current").write_text(json.dumps(edit(json.loads((path / "current").read_text()), draw)))


def flip_signed(path: Path, draw: random.Random) -> None:
    """Changes any file but model.json and has model.json vouch for it: as somebody would who means harm."""
    generation = generation_of(path)
    manifest = json.loads((generation / "model.json").read_text())
    name = draw.choice(["weights.safetensors", draw.choice(sorted(manifest["files"]))])
    content = bytearray((generation / name).read_bytes())
    reach = 400 if draw.random() < 0.7 else len(content)  # the header, mostly
    for _ in range(draw.choice((1, 4))):
        content[draw.randrange(min(reach, len(content)))] = draw.randrange(256)
    if draw.random() < 0.2:
        del content[draw.randrange(len(content)) :]
    (generation / name).unlink()
    (generation / name).write_bytes(content)
    manifest["files"][name] = [len(content), digest(bytes(content))]
    sign(path, manifest)


def garbage_signed(path: Path, draw: random.Random) -> None:
    text = draw.choice(
        [b"", b"[", b"[" * 10_000, b"{}", b"[]", b"1", b'{"format": 1}', b'{"format": NaN}', b"\xff\xfe"]
    )
    sign(path, text)


DAMAGE = [flip, truncate, extend, delete, swap, replace_by_folder, replace_by_link, replace_by_pipe, edit_pointer]
HARM = [edit_signed, edit_signed, edit_signed, flip_signed, flip_signed, garbage_signed]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "whole", FIRST, SECOND)


def test_a_changed_directory_gives_an_error_or_the_right_answer(whole: Path, tmp_path: Path) -> None:
    draw, right, images = random.Random(2), opened(whole), pictures(NAMES[:5], 2, seed=4)[0]
    refused = 0
    for number in range(MUTATIONS):
        mutate: Callable[[Path, random.Random], None] = draw.choice(DAMAGE + HARM)
        path = tmp_path / str(number)
        shutil.copytree(whole, path)
        mutate(path, draw)
        started = time.monotonic()
        found = opened_or_refused(path)
        if isinstance(found, EngramError):
            refused += 1
            assert len(str(found)) < 600
            assert "\n" not in str(found)
        elif mutate in DAMAGE:
            assert same(found, right), (number, mutate.__name__)
        elif found.classes:  # somebody changed it on purpose: it is what they made of it
            assert found.probabilities(images).shape == (len(images), len(found.classes))
        opened_or_refused(path, images=False)
        with suppress(EngramError):
            read_manifest(path)
        assert time.monotonic() - started < 20, (number, mutate.__name__)
        shutil.rmtree(path)
    assert refused > 0.6 * MUTATIONS


def test_another_model_is_not_taken_for_this_one(whole: Path) -> None:
    """The comparison above can fail."""
    other = opened(whole)
    assert other.learner is not None
    other.learner.network.head.get_parameter("weight").data[0, 0, 0] += 1e-3
    assert not same(other, opened(whole))
