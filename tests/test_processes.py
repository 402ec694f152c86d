"""One run by several processes: the same numbers as by one, within rounding, and the same bits in every process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import engram.engine.compiled
import engram.engine.runtime
import engram.experiment.runner
from engram.cli.main import main
from engram.contract import Step, mean_over_images
from engram.core.checkpoint import tensors_digest
from engram.core.errors import EngramError, SharedError
from engram.core.events import BaseReused, EpochFinished, Event, RunFinished, StageFinished, Stopped, Warned
from engram.core.processes import ALONE, Processes, join_processes
from engram.core.torchrun import was_restarted
from engram.data.memory import MemoryConfig
from engram.data.photographs import decoding_threads
from engram.data.stage import Stage
from engram.data.store import ImageStore
from engram.engine import Engine
from engram.engine.buffers import DevicePool
from engram.engine.compiled import BackbonePass
from engram.engine.image_feed import RING_BATCHES
from engram.experiment.base_cache import StageCache
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.methods import METHODS
from engram.methods.bic import BiC
from engram.nn.network import Network
from helpers import begin_stage, last_state, tiny_config, tiny_session, toy_store
from process_helpers import Group, values

CLOSE = 1e-9  # of the largest value; float64 leaves about 1e-14 after a few steps
SETTINGS: dict[str, dict[str, Any]] = {
    "afc": {"importance_samples": 13},
    "bic": {"correction__epochs": 1},
    "derpp": {"replay": 5},
    "er-ace": {"replay": 5},
    "gdumb": {"train__epochs": 1, "rehearse__epochs": 1},
    "ssil": {"replay": 5},
    "podnet-dde": {"dde__neighbours": 2},
    "ucir-dde": {"dde__neighbours": 2, "dde__removal": "learned", "dde__fit_epochs": 2},
}


def short_config(method: str, **changes: Any) -> RunConfig:
    """Two stages of two classes, one epoch: batches of 11, which are divided unevenly, and a smaller one at the end."""
    config = tiny_config(method, **{"epochs": 1, "batch_size": 11} | changes)
    return config.with_settings(**SETTINGS.get(method, {}))


def short_store(seed: int = 0) -> ImageStore:
    return toy_store(num_classes=4, per_class=8, test_per_class=3, seed=seed)


@contextmanager
def alone() -> Iterator[None]:
    """Inside this context, nobody started this process together with others."""
    count = os.environ.pop("WORLD_SIZE")
    try:
        yield
    finally:
        os.environ["WORLD_SIZE"] = count


class Played:
    """The events of a run, and the state of its learner."""

    def __init__(self, config: RunConfig, **given: Any) -> None:
        sessions: list[Session] = []

        class Watched(Session):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                sessions.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engram.experiment.runner, "Session", Watched)
            self.events = list(run(config, short_store(), **given))
        assert isinstance(self.events[-1], RunFinished)
        self.state = sessions[0].learner.state_dict()

    @property
    def numbers(self) -> dict[str, list[float]]:
        """The loss terms and accuracies."""
        epochs = [list(event.terms.values()) for event in self.events if isinstance(event, EpochFinished)]
        finished = [list(event.accuracy.values()) for event in self.events if isinstance(event, StageFinished)]
        return {"terms": list(chain(*epochs)), "accuracies": list(chain(*finished))}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two states, relative to the largest value of the tensor."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, one in ours.items():
        other = theirs[name]
        assert one.shape == other.shape, name
        assert torch.equal(one.isfinite(), other.isfinite()), name
        one, other = (each.double().nan_to_num(neginf=0, posinf=0) for each in (one, other))
        if one.numel():
            worst = max(worst, float((one - other).abs().max() / one.abs().max().clamp(min=1e-3)))
    return worst


def compare_methods(methods: list[str]) -> dict[str, tuple[str, float, float]]:
    """Of each method, the digest of this process's state, and how far it is from that of a process that is alone.

    Every process plays some of the runs alone; of the others it returns no distance.
    """
    found: dict[str, tuple[str, float, float]] = {}
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, method in enumerate(methods):
        shared, distance, terms = Played(short_config(method)), 0.0, 0.0
        if number % count == rank:
            with alone():
                single = Played(short_config(method))
            distance, terms = apart(single.state, shared.state), 0.0
            for name, expected in single.numbers.items():
                terms = max(terms, float(np.abs(np.subtract(expected, shared.numbers[name])).max(initial=0.0)))
        found[method] = (tensors_digest(shared.state), distance, terms)
    return found


@cache
def compared() -> list[dict[str, tuple[str, float, float]]]:
    return values(Group(2, compare_methods, sorted(METHODS)))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_learns_the_same_by_two_processes(method: str) -> None:
    (first, *ours), (second, *theirs) = (found[method] for found in compared())
    assert first == second  # the same bits in both processes
    assert max(*ours, *theirs) < CLOSE


correct = BiC.correct


def correct_without_mark(method: BiC, step: Step) -> dict[str, Tensor]:
    return correct(method, step)


def compare_four(folder: Path) -> dict[str, float]:
    """How far four processes are from one, in several cases of which each process plays one alone."""
    found: dict[str, float] = {}
    runs = {
        "uneven parts": short_config("afc"),
        "undivided batches": short_config("afc", batch_size=7),
        "a mean over exemplars": short_config("uniform").with_settings(exemplars_only=True),
        "mixed images": short_config("gdumb").with_settings(train__batch_size=9, cutmix__probability=1.0),
    }
    for number, (name, config) in enumerate(runs.items()):
        shared = Played(config)
        if os.environ["RANK"] == str(number):
            with alone():
                found[name] = apart(Played(config).state, shared.state)
    corrected = short_config("bic", memory=MemoryConfig(size=8)).with_settings(validation=0.5, correction__epochs=4)
    with alone():
        single = Played(corrected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BiC, "correct", correct_without_mark)
        found["parameters in a loss of the whole batch"] = apart(single.state, Played(corrected).state)
    # Norms of each process's own images: other numbers, which the engine compares after each stage.
    replica = short_config("afc", batch_size=16, norms="replica")
    found["norms of replicas"] = float(
        apart(Played(replica).state, Played(replace(replica, norms="synchronised")).state) < 1e-3
    )
    session = tiny_session(short_config("afc"), short_store())
    begin_stage(session, 0)
    engine, network, images = session.engine, session.learner.network, session.stage(0).pool.images
    divided = Engine(engine.device, engine.precision, engine.augmentation, engine.image_size, join_processes("cpu"))
    for count in (1, 7, 9, 16):
        for one, other in zip(
            engine.infer(network, images[:count]), divided.infer(network, images[:count]), strict=True
        ):
            found[f"{count} images"] = apart({"output": one}, {"output": other})
        assert len(divided.features(network, images[:count])) == count
    cache = StageCache(folder)
    first, second = (Played(short_config("replay"), cache=cache) for _ in range(2))
    found["trained base"] = float(any(isinstance(event, BaseReused) for event in first.events))
    found["cached base"] = float(not any(isinstance(event, BaseReused) for event in second.events))
    found["with a cached base"] = apart(first.state, second.state)
    return found


def test_four_processes_learn_what_one_does_also_of_uneven_and_of_small_batches(tmp_path: Path) -> None:
    for found in values(Group(4, compare_four, tmp_path)):
        assert max(found.values()) < CLOSE, found


def run_until(directory: Path, stage: int, steps: int, act: Callable[[], bool], minutes: float = 10.0) -> list[Event]:
    """Start or resume the run; from that step of that stage on, ask `act` whether to stop."""
    taken, events = [-1, 0], []

    def stop() -> bool:
        taken[1] += taken[0] == stage
        return taken[0] == stage and taken[1] >= steps and act()

    config, given = short_config("afc", epochs=2), {"stop": stop, "checkpoint_minutes": minutes}
    started = (directory / "run.json").exists() and "RESUME" in os.environ
    for event in (
        resume(directory, short_store(), **given) if started else run(config, short_store(), directory, **given)
    ):
        events.append(event)
        taken[0] += type(event).__name__ == "StageStarted"
    return events


def never() -> bool:
    return False


def continue_until(directory: Path, steps: int, act: Callable[[], bool]) -> list[Event]:
    os.environ["RESUME"] = "1"
    return run_until(directory, 0, steps, act)


def only_the_last_asks() -> bool:
    return os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)


@cache
def whole_state(folder: str) -> dict[str, Tensor]:
    """The state that one process ends with that was never stopped."""
    values(Group(1, run_until, Path(folder) / "whole", 9, 0, never))
    return last_state(Path(folder) / "whole")


def test_a_run_stopped_by_one_of_two_processes_continues_by_one_and_then_by_four(tmp_path: Path) -> None:
    place = tmp_path / "run"
    for events in values(Group(2, run_until, place, 1, 2, only_the_last_asks)):
        assert isinstance(events[-1], Stopped)
        assert events[-1].reason == "interrupted"
    (events,) = values(Group(1, continue_until, place, 2, only_the_last_asks))
    assert isinstance(events[-1], Stopped)
    assert any(
        isinstance(event, Warned) and "with 2 processes and continues with 1" in event.message for event in events
    )
    for events in values(Group(4, continue_until, place, 0, never)):
        assert isinstance(events[-1], RunFinished)
    assert apart(whole_state(str(tmp_path)), last_state(place)) < CLOSE


def die() -> bool:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return False


def test_after_the_death_of_a_process_the_others_end_and_the_last_checkpoint_is_intact(tmp_path: Path) -> None:
    place = tmp_path / "run"
    (is_fine, error), killed = Group(2, run_until, place, 1, 2, die, 0.0).results()
    assert killed == (False, None)
    assert not is_fine
    assert "ProcessLost: another process of this run has ended or does not answer" in error
    for events in values(Group(2, continue_until, place, 0, never)):
        assert isinstance(events[-1], RunFinished)
    assert apart(whole_state(str(tmp_path)), last_state(place)) < CLOSE


def start_different(place: Path, config: RunConfig, seed: int, directory: str) -> str:
    rank = os.environ["RANK"]
    try:
        list(run(config, short_store(seed), place / directory))
    except SharedError as error:
        return f"{rank}: {error}"
    except EngramError as error:
        return f"{rank} reports: {error}"
    return "started"


def start_all_different(place: Path, own: dict[str, Any]) -> list[str]:
    """Three starts, of which none may train."""
    config = short_config("replay")
    return [
        start_different(place, config.with_settings(train__lr=own["lr"]), 0, "settings"),
        start_different(place, config, own["seed"], "images"),
        start_different(place, config, 0, "used"),
    ]


def test_processes_that_were_started_differently_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    each = [{"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 1}]
    for rank, (settings, images, used) in enumerate(values(Group(2, start_all_different, tmp_path, each=each))):
        assert settings.startswith(f"{rank}: process 1 on ")
        assert "has another settings.train.lr than process 0" in settings
        assert "(0.2 instead of 0.1); start all of them with the same command" in settings
        assert "has another images (by their digest) than process 0" in images
        assert ("already exists and is not empty" in used) == (rank == 0)
        assert used.startswith("0 reports: " if rank == 0 else "1: process 0 has failed")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def make_images(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for label in range(4):
            (folder / split / f"class{label}").mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(60 * label, 60 * label + 60, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"class{label}" / f"{number}.png")
    return folder


def command(arguments: list[str], output: Path, restarts: int = 0) -> tuple[int, str]:
    """The exit status of a command, and what this process wrote."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    place = output / f"output{os.environ['RANK']}"
    handle = os.open(place, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    return main(arguments), place.read_text()


def test_the_first_process_owns_the_display_and_a_restart_continues(tmp_path: Path) -> None:
    images, out = make_images(tmp_path / "images"), tmp_path / "run"
    typed = ["run", "replay-folder", "--data", str(images), "--base", "2", "--increment", "2", "--epochs", "1"]
    typed += ["--backbone", "resnet10", "--device", "cpu", "--threads", "1", "--no-cache", "--out", str(out)]
    first, second = values(Group(2, command, [*typed, "--stop-after-stage", "0"], tmp_path))
    assert first[0] == second[0] == 0, first
    assert "stopped after base; to continue:" in first[1]
    assert second[1] == ""
    first, second = values(Group(2, command, typed, tmp_path))  # not a restart: the directory is refused, once
    assert (first[0], second) == (2, (2, ""))
    assert "engram resume" in first[1]
    first, second = values(Group(2, command, [*typed, "--seed", "2"], tmp_path, 1))
    assert (first[0], second) == (2, (2, ""))
    assert "holds a run with other settings (seed is 1 there and 2 here)" in first[1]
    first, second = values(Group(2, command, typed, tmp_path, 1))
    assert first[0] == second[0] == 0, first
    assert "average incremental accuracy" in first[1]
    assert second[1] == ""


def test_a_batch_is_divided_evenly_unless_it_is_small() -> None:
    processes = Processes()
    processes.count = 4
    for size in (8, 9, 10, 11, 128):
        shares = []
        for rank in range(4):
            processes.rank = rank
            shares.append(processes.share(size))
        assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
        assert (shares[0].start, shares[-1].stop) == (0, size)
        assert max(shares[0].counts) - min(shares[0].counts) <= 1
        assert [share.count for share in shares] == list(shares[0].counts)
    assert not processes.share(7).is_split
    assert not ALONE.share(128).is_split


class Doubled(Processes):
    """Two processes, of which the other one has zeros."""

    count = 2


def test_each_process_compiles_the_passes_of_its_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, compiled = list[int](), list[int]()

    def as_compiled(network: Network, own_stem: bool) -> BackbonePass:
        def run(images: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            compiled.append(len(images))
            return network.backbone(images)

        return run

    monkeypatch.setattr(engram.engine.compiled, "_compiled", as_compiled)
    monkeypatch.setattr(engram.engine.runtime, "why_not_compiled", lambda *_: None)
    config = replace(short_config("naive"), norms="replica")
    for processes, parts in ((ALONE, [11, 5]), (Doubled(), [5, 2])):
        session = Session(config, short_store(), processes=processes)
        stage = begin_stage(session, 0)
        (phase,) = session.method.phases(session.learner, stage, session.engine)
        loop = session.engine.start(session.learner, stage, phase, 0)
        student = loop._forward.student

        def seen(images: Tensor, train_backbone: bool, student: Callable[..., Any] = student) -> Any:
            passed.append(len(images))
            return student(images, train_backbone)

        monkeypatch.setattr(loop._forward, "student", seen)
        for _ in loop:
            pass
        assert passed == parts
        assert compiled == parts[:1]
        passed.clear()
        compiled.clear()


def test_the_memory_of_a_stage_counts_a_last_batch_that_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    processes.count = 4
    session = Session(short_config("naive", batch_size=9), short_store(), processes=processes)
    stage = begin_stage(session, 0)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    assert phase.batches(len(stage.pool))[1:] == (9, 7)
    held = list[int]()
    pool = session.engine.buffers.pool

    def counted(stage: Stage, batch_size: int = 0) -> DevicePool:
        held.append(batch_size)
        return pool(stage, batch_size)

    monkeypatch.setattr(session.engine.buffers, "pool", counted)
    session.engine.start(session.learner, stage, phase, 0)
    memory = session.memory_of(session.plan()[0])
    assert max(held) == 7
    assert memory.ring == RING_BATCHES["cpu"] * 7 * (memory.images // len(stage.pool))


def test_threads_decode_on_the_cores_that_the_processes_of_a_machine_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert decoding_threads() == 16
    launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 16, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, value in {**launched, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    assert decoding_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert decoding_threads() == 1


def test_a_loss_that_needs_the_whole_batch_but_says_otherwise_is_refused() -> None:
    session = Session(short_config("derpp"), short_store(), processes=Doubled())
    stage = begin_stage(session, 0)
    (main_phase,) = session.method.phases(session.learner, stage, session.engine)

    @mean_over_images
    def loss(step: Step) -> dict[str, Tensor]:
        logits = step.student.logits
        step.images.write("logits", logits)
        return {"classification": logits[:, :2].square().mean()}

    with pytest.raises(EngramError, match=r"keeps tensors per image, .*remove mean_over_images from it"):
        next(iter(session.engine.start(session.learner, stage, replace(main_phase, loss=loss), 0)))

    def reads_maps(step: Step) -> dict[str, Tensor]:
        return {"classification": step.student.maps[-1].mean()}

    loop = session.engine.start(session.learner, stage, replace(main_phase, loss=reads_maps), 0, reads_maps=False)
    with pytest.raises(EngramError, match="write needs_maps = True in the method"):
        next(iter(loop))


def test_a_command_of_one_process_or_of_several_runs_refuses_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["list", "methods"]) == 2
    assert "only 'engram run' and 'resume' share, not list" in capsys.readouterr().err
    assert main(["run", "replay-mini-b10-s5", "naive-mini-b10-s5"]) == 2
    assert (
        "torchrun starts several processes for one run, but this command names several runs" in capsys.readouterr().err
    )
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["run", "replay-mini-b10-s5", "--device", "cpu"]) == 2
    assert "WORLD_SIZE should be a whole number, got 'two'" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert not was_restarted()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert was_restarted()
    assert main(["run", "replay-mini-b10-s5", "--device", "cpu"]) == 2
    assert "give that run's directory with --out" in capsys.readouterr().err
