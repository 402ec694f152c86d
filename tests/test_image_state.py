"""Tensors that a method keeps for each image: in the loss, the memory, checkpoints and recorded steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engram import EngramError, remove_class, run
from engram.contract import (
    METHODS,
    ImageStateRows,
    ImageTensor,
    Learner,
    Passes,
    Phase,
    Samples,
    Stage,
    Step,
    Terms,
    register,
)
from engram.core.events import BaseReused
from engram.data.memory import Memory, MemoryConfig
from engram.data.stage import content_ids
from engram.experiment.base_cache import StageCache
from engram.experiment.session import Session
from engram.experiment.stage_work import StageWork
from engram.methods.blocks.lsc import LSCMethod, LSCSettings, classification_loss, lsc_phases
from engram.models.edit import save_model
from helpers import assert_resumes_to, last_state, run_stopped, run_whole, starts, tiny_config, tiny_session, toy_store
from model_helpers import NAMES, make, opened, tiny
from model_helpers import learn as learn_lesson


class Consistent(LSCMethod[LSCSettings]):
    """Replay that counts how often it saw each image, and holds its logits near those it had then."""

    uses_teacher = False
    image_state: Mapping[str, ImageTensor] = {
        "seen": ImageTensor(),
        "logits": ImageTensor(per_class=True, fill=float("nan")),
    }
    watch: ClassVar[Callable[[Step], None]] = lambda step: None

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        phases = lsc_phases(self.settings, learner, stage, passes)
        return [replace(phase, loss=self.loss) for phase in phases]

    def loss(self, step: Step) -> Terms:
        type(self).watch(step)
        images, logits = step.images, step.student.logits
        before = images.read("logits")
        known = before.isfinite() & logits.isfinite()
        images.write("seen", images.read("seen") + 1)
        images.write("logits", logits)
        apart = torch.where(known, logits - torch.where(known, before, 0), 0).square().mean()
        return {"classification": classification_loss(self.settings, step).mean(), "consistency": 0.1 * apart}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register("consistent", settings=LSCSettings, title="Consistent")(Consistent)
    yield
    del METHODS["consistent"]


def learn(session: Session, index: int) -> Stage:
    """One stage as a run learns it."""
    work = StageWork(session.method, session.learner, session.engine, session.stage(index), 3)
    for _ in (*work.train(), *work.finish()):
        pass
    return work.stage


def session_of(**changes: Any) -> Session:
    return tiny_session(tiny_config("consistent", **changes))


class Record:
    """What the loss should read of each image, by its id: kept by hand in a dictionary."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        self.logits: dict[int, Tensor] = {}
        self.labels: dict[int, int] = {}

    def __call__(self, step: Step) -> None:
        """Check what a step reads, and note what it writes."""
        ids = step.images.ids.tolist()
        self.check(ids, step.images.read("seen"), step.images.read("logits"))
        for place, image in enumerate(ids):
            self.seen[image] += 1
            self.logits[image] = step.student.logits[place].detach().clone()
            assert self.labels.setdefault(image, int(step.labels[place])) == int(step.labels[place])

    def check(self, ids: Sequence[int], seen: Tensor, logits: Tensor) -> None:
        assert seen.tolist() == [self.seen[image] for image in ids]
        for image, ours in zip(ids, logits, strict=True):
            expected = self.logits.get(image, torch.full_like(ours, torch.nan))
            assert torch.equal(ours.nan_to_num(7), expected.nan_to_num(7)), image

    def check_samples(self, samples: Samples) -> None:
        self.check(samples.sources.tolist(), samples.state["seen"], samples.state["logits"])


@pytest.mark.parametrize("memory", [MemoryConfig(size=3), MemoryConfig("total", 13)])
def test_each_image_has_its_own_values_and_an_exemplar_takes_them_along(
    memory: MemoryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, session = Record(), session_of(memory=memory)
    monkeypatch.setattr(Consistent, "watch", record)
    for index in range(3):
        stage = learn(session, index)
        record.check_samples(stage.pool)
        new = stage.pool.state["seen"][~stage.pool.exemplar]
        assert set(new.tolist()) == ({2} if index == 0 else {2, 3}), "two epochs, and one of the balanced phase"
        kept = session.learner.memory.samples()
        assert kept is not None
        record.check_samples(kept)
        quota = memory.per_class(stage.num_seen)
        assert torch.bincount(kept.labels).tolist() == [quota] * stage.num_seen
        train = session.store.train
        assert [record.labels[image] for image in kept.sources.tolist()] == kept.labels.tolist()
        assert torch.equal(torch.from_numpy(train.images[kept.sources.numpy()]), kept.pixels), "ids are stable"
    assert max(record.seen.values()) == 3 * 2 + 2


@pytest.mark.parametrize("phase", ["main", "balance"])
def test_stopped_inside_the_second_stage_it_resumes_exactly(phase: str, tmp_path: Path) -> None:
    config = tiny_config("consistent", finetune=2, batch_size=4)
    whole = run_whole(config, toy_store(), tmp_path / "whole")
    assert {"memory.state.seen", "memory.state.logits"} <= whole.keys()
    run_stopped(config, toy_store(), tmp_path / "stopped", 2, starts(1, phase))
    saved = last_state(tmp_path / "stopped")
    assert saved["phase.images.seen"].max() > saved["memory.state.seen"].min() > 0, "of the pool, and of the memory"
    assert_resumes_to(whole, tmp_path / "stopped", toy_store())


def test_a_base_stage_that_writes_values_is_not_shared(tmp_path: Path) -> None:
    for _ in range(2):
        events = list(run(tiny_config("consistent", epochs=1), toy_store(), cache=StageCache(tmp_path)))
        assert not any(isinstance(event, BaseReused) for event in events)


class RestoringRecording:
    """Stands for a CUDA graph: warms up, restores the tensors it was given, and replays by taking the step."""

    def __init__(self, step: Callable[[], Any], state: Sequence[Tensor], memory: object = None) -> None:
        saved = [tensor.clone() for tensor in state]
        for _ in range(2):
            step()
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
        self.step, self.returned = step, None

    def __call__(self) -> Any:
        return self.step()


def learned(capture: bool, **changes: Any) -> dict[str, Tensor]:
    """The state after two stages, with recorded steps or without."""
    session = session_of(**changes)
    session.engine.capture = capture
    for index in range(2):
        learn(session, index)
    assert session.learner.notes == []
    return session.learner.state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_recording_a_step_leaves_the_values_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.engine.runtime.CapturedStep", RestoringRecording)
    monkeypatch.setattr("engram.engine.runtime.Runtime.shares_memory", False)  # there is no GPU
    assert_same(learned(capture=False), learned(capture=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_values_are_the_same_recorded_and_eager_on_a_gpu(precision: str) -> None:
    changes = {"device": "cuda", "precision": precision, "epochs": 4}
    assert_same(learned(capture=False, **changes), learned(capture=True, **changes))


def test_a_dropped_class_takes_its_rows_and_columns_along() -> None:
    session = session_of()
    for index in range(2):
        learn(session, index)
    memory, kinds = session.learner.memory, Consistent.image_state
    before = {label: memory.of(label) for label in memory.labels}
    session.learner.drop([1], Consistent.class_buffers, [name for name, kind in kinds.items() if kind.per_class])
    assert memory.labels == [0, 1, 2]
    for label, old in {0: 0, 1: 2, 2: 3}.items():
        ours, theirs = memory.of(label), before[old]
        assert torch.equal(ours.sources, theirs.sources)
        assert torch.equal(ours.state["seen"], theirs.state["seen"])
        assert torch.equal(ours.state["logits"], theirs.state["logits"][:, [0, 2, 3, 4, 5]])
        assert ours.state["logits"][:, :3].isfinite().all()


def samples_of(labels: list[int]) -> Samples:
    """Images with state: the image's number, and its number in two columns."""
    count = len(labels)
    number = torch.arange(count)
    state = {"seen": number.float(), "logits": number[:, None] + torch.tensor([0.0, 0.5])}
    images = number.to(torch.uint8).view(-1, 1, 1, 1).expand(count, 2, 2, 3).clone()
    return Samples(images, torch.tensor(labels), 10 * number, torch.zeros(count, dtype=torch.bool), state)


def assert_consistent(samples: Samples, numbers: list[int]) -> None:
    """These images, in this order, each with its own state."""
    assert samples.sources.tolist() == [10 * number for number in numbers]
    assert samples.pixels[:, 0, 0, 0].tolist() == numbers
    assert samples.state["seen"].tolist() == numbers
    assert samples.state["logits"].tolist() == [[number, number + 0.5] for number in numbers]


def test_a_memory_that_shrinks_keeps_the_rows_of_the_best_and_its_state_comes_back() -> None:
    memory = Memory(MemoryConfig("total", 8))
    memory.update(samples_of([0, 0, 0, 0, 0, 1, 1, 1, 1]), {0: torch.tensor([4, 1, 0, 3]), 1: torch.tensor([8, 5])}, 2)
    assert_consistent(memory.of(0), [4, 1, 0, 3])
    memory.update(samples_of([2, 3]), {2: torch.tensor([0]), 3: torch.tensor([1])}, 4)
    other = Memory(memory.config)
    other.load_state_dict(memory.state_dict())
    for each in (memory, other):
        for label, numbers in {0: [4, 1], 1: [8, 5], 2: [0], 3: [1]}.items():
            assert_consistent(each.of(label), numbers)
    other.keep(0, torch.tensor([1]))
    assert_consistent(other.of(0), [1])
    plain = samples_of([4])
    plain.state.clear()
    joined = Samples.concatenate([plain, other.of(1)])
    assert joined.state["seen"].tolist() == [0, 8, 5], "what has no state yet has zeros"


def test_values_are_widened_to_the_capacity_of_the_head() -> None:
    kept, nothing = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.full((2, 3), -1.0)
    kind = ImageTensor(per_class=True, fill=-1.0)
    assert kind.fitted(kept, 2, 3).tolist() == [[1, 2, -1], [3, 4, -1]]
    assert torch.equal(kind.fitted(None, 2, 3), nothing)
    assert ImageTensor((2, 5), fill=3.0).fitted(None, 4, 9).shape == (4, 2, 5)


def test_a_part_of_a_batch_can_be_written_and_a_name_must_be_declared() -> None:
    images = ImageStateRows({"seen": torch.arange(5.0)}, torch.tensor([3, 0, 4]), torch.arange(100, 105))
    assert images.read("seen").tolist() == [3, 0, 4]
    assert images.ids.tolist() == [103, 100, 104]
    images.write("seen", torch.tensor([7.0, 8.0], requires_grad=True), slice(1, None))
    rows, values = images.written["seen"]
    assert rows.tolist() == [0, 4]
    assert not values.requires_grad
    with pytest.raises(
        EngramError, match=r"'seen' keeps a tensor of the shape \(2,\) for these 2 .*of the shape \(3,\)"
    ):
        images.write("seen", torch.zeros(3), slice(1, None))
    for use in (lambda: images.read("sen"), lambda: images.write("sen", torch.zeros(3))):
        with pytest.raises(EngramError, match=r"no tensor 'sen' is kept per image; .* image_state = \{\"sen\": Image"):
            use()


# In a model directory


def test_a_model_keeps_the_tensors_of_its_exemplars(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:2], NAMES[2:4], config=tiny("derpp"))
    model = opened(path)
    assert model.learner is not None
    samples = model.learner.memory.samples()
    assert samples is not None
    logits = samples.state["logits"]
    assert logits.isfinite().sum(dim=1).tolist() == [2] * 6 + [4] * 6, "as wide as the head was in their own stage"
    assert torch.equal(samples.sources, content_ids(samples.pixels)), "ids do not depend on when a model is opened"
    learn_lesson(path, NAMES[4:5])
    again = opened(path).learner
    assert again is not None
    kept = again.memory.samples()
    assert kept is not None
    assert torch.equal(kept.state["logits"][:12, :4], logits[:, :4]), "a later lesson leaves them as they were"
    assert kept.sources[:12].tolist() == samples.sources.tolist()


def test_a_class_that_is_removed_takes_its_columns_along(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:2], NAMES[2:4], config=tiny("derpp"))
    before = opened(path).learner
    remove_class(path, NAMES[0])
    after = opened(path).learner
    assert before is not None
    assert after is not None
    old, new = before.memory.samples(), after.memory.samples()
    assert old is not None
    assert new is not None
    assert torch.equal(new.state["logits"][:, :3], old.state["logits"][3:, 1:4])
    learn_lesson(path, NAMES[4:6])
    assert len(opened(path).labels) == 5


def test_tensors_per_image_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:2], config=tiny("derpp"))
    model = opened(path)
    assert model.learner is not None
    for label in model.learner.memory.labels:
        model.learner.memory.of(label).state["logits"] = torch.zeros(3, 1)
    save_model(model, path, overwrite=True)
    with pytest.raises(EngramError, match="'logits' per image that does not fit; the model is damaged"):
        opened(path)
