"""What several test files share: a toy data set that can be learned, tiny runs of it, stages by hand, and slow losses.

The slow losses are written from the formulas: explicit loops over samples, classes, channels and pixels, in float64.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import Phase, Step, Training
from engram.contract.exemplars import class_means
from engram.contract.image_state import fit_image_state
from engram.core.checkpoint import load_checkpoint
from engram.core.errors import EngramError
from engram.core.events import Checkpointed, Event, PhaseStarted, RunFinished, Stopped
from engram.data.augment import Augmentation
from engram.data.decode.image import try_decode
from engram.data.memory import MemoryConfig
from engram.data.stage import Samples, Stage
from engram.data.store import Images, ImageStore
from engram.engine import Engine
from engram.experiment.feature_pass import FeaturePass
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.experiment.stage_work import best_label, class_scores
from engram.methods import METHODS, find_method
from engram.nn.network import Network, Output

# Where tests on real images look for them; they skip where these are not.
SHARED = Path(os.environ.get("ENGRAM_TEST_DATA") or Path(__file__).parents[2] / "shared")
SAMPLE = SHARED / "data" / "sample" / "cifar100-sample.tar.gz"
MEMORY = {
    "needed": MemoryConfig(size=3),
    "none": MemoryConfig(budget="none", size=0),
    "all": MemoryConfig(budget="all", size=0),
    "optional": MemoryConfig(budget="none", size=0),
}
# Methods with a head, a backbone or a memory of their own kind: what is tested for each of them holds for the others,
# which `make test-all` tests too.
VARIED = ("afc", "bedrock", "bic", "der", "derpp", "foster", "gdumb", "lda", "memo", "mnemonics", "podnet-dde", "si")
NO_AUGMENTATION = Augmentation(pad=0, flip=False, brightness=0.0)


def varied_methods(*given: Any) -> list[Any]:
    """Every registered method, with these arguments, as a parameter; those that are like another one are slow tests."""
    return [
        pytest.param(
            name, *given, marks=[] if name in VARIED else [pytest.mark.slow], id="-".join(map(str, (name, *given)))
        )
        for name in sorted(METHODS)
    ]


def toy_store(
    num_classes: int = 6, per_class: int = 12, test_per_class: int = 4, size: int = 8, seed: int = 0
) -> ImageStore:
    """Classes that differ in colour and pattern under noise: a few epochs learn them."""
    random = np.random.default_rng(seed)
    patterns = random.integers(-40, 41, (num_classes, size, size, 3))
    colours = random.permuted(np.linspace(30, 225, num_classes)[:, None].repeat(3, 1), axis=0)[:, None, None]

    def images(count: int) -> np.ndarray:
        noise = random.normal(0, 12, (num_classes, count, size, size, 3))
        drawn = (patterns + colours)[:, None] + noise
        return drawn.clip(0, 255).astype(np.uint8).reshape(-1, size, size, 3)

    names = [f"class {i}" for i in range(num_classes)]
    train, test = np.repeat(range(num_classes), per_class), np.repeat(range(num_classes), test_per_class)
    return ImageStore.from_arrays(images(per_class), train, images(test_per_class), test, class_names=names, name="toy")


def tiny_config(
    method: str = "afc", *, epochs: int = 2, finetune: int = 1, batch_size: int = 8, **changes: Any
) -> RunConfig:
    """A run of the toy set that takes a fraction of a second: base 2, then 2 classes a stage."""
    info = find_method(method)
    train = Training(epochs=epochs, batch_size=batch_size, lr=0.05, remainder="keep")
    settings = {
        **dict.fromkeys(("train", "boost", "expand"), train),
        "finetune": replace(train, epochs=finetune, schedule="constant"),
        "compress": replace(train, epochs=finetune, weight_decay=0.0),
        "width": 32,
    }
    known = {field.name for field in fields(info.settings)}
    settings = {name: value for name, value in settings.items() if name in known}
    config = RunConfig(
        method=method,
        settings=info.settings(**settings),
        base=2,
        increment=2,
        order="natural",
        memory=MEMORY[info.memory],
        backbone="resnet10",
        augmentation=Augmentation(pad=1),
        device="cpu",
    )
    return replace(config, **changes)


def tiny_session(config: RunConfig | None = None, store: ImageStore | None = None) -> Session:
    """A session of a tiny run, nothing learned yet."""
    return Session(tiny_config() if config is None else config, toy_store() if store is None else store)


def train_phase(session: Session, stage: Stage, phase: Phase, number: int = 0) -> None:
    """Takes every step of a phase."""
    loop = session.engine.start(session.learner, stage, phase, number)
    for _ in loop:
        loop.terms()  # refuses a loss that is not finite


def begin_stage(session: Session, index: int) -> Stage:
    """A stage that is ready to train: its images have their tensors, and the head has grown."""
    stage = session.stage(index)
    fit_image_state(session.method.image_state, stage.pool, session.learner.network.head.capacity)
    session.method.grow(session.learner, stage, session.engine)
    return stage


def learn_stage(session: Session, index: int, before_finish: Callable[[Stage], None] | None = None) -> Stage:
    """One stage by hand, in the order: grow, phases, fit, finish, exemplars, class means, teacher."""
    learner, method, engine = session.learner, session.method, session.engine
    stage = begin_stage(session, index)
    for number, phase in enumerate(method.phases(learner, stage, engine)):
        train_phase(session, stage, phase, number)
    features = FeaturePass(method, learner, engine, stage)
    if features.views:
        list(features)
        method.fit(learner, stage, features.take(), features.labels)
    if before_finish is not None:
        before_finish(stage)
    method.finish(learner, stage, engine)
    learner.memory.update(stage.pool, method.exemplars(learner, stage, engine), stage.num_seen)
    if "nme" in method.predictors:
        learner.class_means = class_means(learner, engine)
    learner.snapshot_teacher()
    return stage


def predict(session: Session, images: Tensor) -> dict[str, np.ndarray]:
    """The label (N,) of each uint8 image, by each predictor of the method."""
    scores = class_scores(session.learner, session.engine, images, session.method.predictors)
    return {name: best_label(each) for name, each in scores.items()}


def drift(config: RunConfig) -> float:
    """How far the embeddings of the second stage's images turn in it, on average: 1 - their cosine."""
    session = tiny_session(config)
    learn_stage(session, 0)
    images = session.stage(1).pool.images
    before = session.engine.embed(session.learner.network, images)
    learn_stage(session, 1)
    after = session.engine.embed(session.learner.network, images)
    return float(1 - F.cosine_similarity(before, after, dim=1).mean())


def run_whole(config: RunConfig, store: ImageStore, directory: Path) -> dict[str, Tensor]:
    """The tensors that a run ends with that was never stopped."""
    assert isinstance(list(run(config, store, directory))[-1], RunFinished)
    return last_state(directory)


def run_stopped(
    config: RunConfig,
    store: ImageStore,
    directory: Path,
    steps: int,
    begins: Callable[[Event], bool] | None = None,
    **options: Any,
) -> Checkpointed:
    """How a run was saved that is stopped after so many steps, counted from the event at which it `begins`."""
    taken, counting, events = 0, begins is None, []

    def stop() -> bool:
        nonlocal taken
        taken += counting
        return taken == steps

    for event in run(config, store, directory, stop=stop, **options):
        counting = counting or (begins is not None and begins(event))
        events.append(event)
    saved, last = events[-2:]
    assert isinstance(saved, Checkpointed)
    assert isinstance(last, Stopped)
    return saved


def starts(stage: int, phase: str | None = None) -> Callable[[Event], bool]:
    """Whether an event is the start of that phase, or of any, in that stage."""
    return lambda event: isinstance(event, PhaseStarted) and event.stage == stage and phase in (None, event.phase)


def assert_resumes_to(whole: dict[str, Tensor], directory: Path, store: ImageStore, **options: Any) -> None:
    """Goes on with a stopped run: it must end with the same tensors, bit for bit."""
    assert isinstance(list(resume(directory, store, **options))[-1], RunFinished)
    resumed = last_state(directory)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def last_state(directory: Path) -> dict[str, Tensor]:
    """The tensors of a run's last checkpoint."""
    return load_checkpoint(directory / "checkpoint" / "state.safetensors").tensors


@dataclass(frozen=True)
class Outcome:
    """What a command came to: its exit status, and what it wrote."""

    status: int
    out: str
    err: str

    def events(self) -> list[dict[str, Any]]:
        """The lines of JSON that it wrote."""
        return [json.loads(line) for line in self.out.splitlines()]


Engram = Callable[..., Outcome]


def timeless(directory: Path) -> dict[str, Any]:
    """A run's result without its times."""
    result = json.loads((directory / "result.json").read_text())
    del result["seconds"], result["seconds_by"]
    for stage in result["stages"]:
        del stage["seconds"]
    return result


def decode_image(file: str | Path, size: int | None = None, *, quick: bool = False) -> Images:
    """The pixels of an image file, which must be readable."""
    found = try_decode(file, size, quick)
    if isinstance(found, str):
        raise EngramError(f"the image {file} cannot be read ({found})")
    return found


def memory_grown(program: str, *arguments: object) -> tuple[str, float]:
    """What `work()` returns in another process, as text, and the MiB that the memory grew by; for Linux."""
    peak = "int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # of this program alone, in kB
    code = f"import sys\n{program}\nbefore = {peak}\nprint(work())\nprint(({peak} - before) / 1024)"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    path = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | path)
    *printed, grown = done.stdout.splitlines()
    return "\n".join(printed), float(grown)


def parameters_of(network: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def buffers_of(network: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in network.named_buffers()}


def without_batch_norm(network: Network) -> Network:
    """A copy in which every BatchNorm is an identity, so that an image's output does not depend on its batch."""
    network = copy.deepcopy(network)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return network


def cpu_engine(augmentation: Augmentation = NO_AUGMENTATION, size: int = 8) -> Engine:
    """An engine on the CPU."""
    return Engine(torch.device("cpu"), "float32", augmentation, (size, size))


def make_stage(index: int, num_old: int, labels: list[int], size: int = 8, seed: int = 0) -> Stage:
    """A stage of random images with these labels; those below num_old count as exemplars."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.integers(0, 256, (len(labels), size, size, 3), dtype=np.uint8))
    label = torch.tensor(labels)
    pool = Samples(images, label, torch.arange(len(labels)), label < num_old)
    return Stage(index, num_old, max(labels) + 1 - num_old, pool)


@dataclass(frozen=True)
class RandomStep:
    """Random numbers for one training step, as float64 arrays: what slow implementations read."""

    scores: np.ndarray  # (B, K)
    labels: np.ndarray  # (B,)
    exemplar: np.ndarray  # (B,)
    student: list[np.ndarray]  # (B, C, H, W) per map
    teacher: list[np.ndarray]
    importance: list[np.ndarray]  # (C,) per map
    scale: float
    weight: float

    def step(self) -> Step:
        """The same numbers as the loss of a method sees them; the student's tensors take gradients."""
        student_maps = tuple(torch.tensor(value, requires_grad=True) for value in self.student)
        teacher_maps = tuple(torch.tensor(value) for value in self.teacher)
        scores, scale = torch.tensor(self.scores, requires_grad=True), torch.tensor(self.scale, dtype=torch.float64)
        embedding = torch.zeros(len(self.labels), 1)
        student = Output(student_maps, embedding, scores, scale * scores, scale)
        teacher = Output(teacher_maps, embedding, scores.detach(), scores.detach(), scale)
        buffers = {f"importance.{i}": torch.tensor(value) for i, value in enumerate(self.importance)}
        weights = {"discrepancy": torch.tensor(self.weight, dtype=torch.float64)}
        labels, exemplar = torch.tensor(self.labels), torch.tensor(self.exemplar)
        return Step(labels, exemplar, student, teacher, weights, buffers)


def random_step(seed: int, batch: int = 5, classes: int = 6) -> RandomStep:
    """A random step with two maps of different shape, positive importances of mean 1, and a mix of exemplars."""
    random = np.random.default_rng(seed)
    shapes = [(batch, 3, 4, 4), (batch, 5, 2, 3)]
    importance = [random.gamma(1.0, size=shape[1]) for shape in shapes]
    exemplar = random.random(batch) < 0.5
    exemplar[0], exemplar[1] = True, False
    return RandomStep(
        scores=random.normal(size=(batch, classes)),
        labels=random.integers(classes, size=batch),
        exemplar=exemplar,
        student=[random.normal(size=shape) for shape in shapes],
        teacher=[random.normal(size=shape) for shape in shapes],
        importance=[value / value.mean() for value in importance],
        scale=float(random.uniform(0.5, 4)),
        weight=float(random.uniform(0.5, 9)),
    )


def numeric_gradient(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a function of one array."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


def slow_nca_released(scores: list[float], label: int) -> float:
    """s <- s - max(s); log(sum_{i != y} exp(s_i) + 1) - s_y."""
    top = max(scores)
    others = 0.0
    for i, score in enumerate(scores):
        if i != label:
            others += math.exp(score - top)
    return math.log(others + 1) - (scores[label] - top)


def slow_nca_paper(scores: list[float], label: int, scale: float, margin: float) -> float:
    """The hinge of log sum_{i != y} exp(eta y_i) - eta (y_y - delta), from scores that are not scaled yet."""
    others = 0.0
    for i, score in enumerate(scores):
        if i != label:
            others += math.exp(scale * score)
    return max(0.0, math.log(others) - scale * (scores[label] - margin))


def slow_channel_released(student: np.ndarray, teacher: np.ndarray) -> float:
    """The distance of two feature maps (H, W), each squared and then divided by its length."""
    height, width = student.shape

    def shape(values: np.ndarray) -> list[float]:
        squares = [float(values[y, x]) ** 2 for y in range(height) for x in range(width)]
        length = math.sqrt(sum(value**2 for value in squares))
        return [value / length for value in squares]

    return math.sqrt(sum((a - b) ** 2 for a, b in zip(shape(student), shape(teacher), strict=True)))


def slow_channel_paper(student: np.ndarray, teacher: np.ndarray) -> float:
    """The squared Frobenius distance of two feature maps (H, W), each divided by its Frobenius norm."""
    height, width = student.shape
    norm_student = math.sqrt(sum(student[y, x] ** 2 for y in range(height) for x in range(width)))
    norm_teacher = math.sqrt(sum(teacher[y, x] ** 2 for y in range(height) for x in range(width)))
    total = 0.0
    for y in range(height):
        for x in range(width):
            total += (student[y, x] / norm_student - teacher[y, x] / norm_teacher) ** 2
    return total


def slow_discrepancy_released(case: RandomStep, counted: np.ndarray) -> float:
    """Importance times distance, mean over the samples counted and the channels, mean over the maps."""
    of_map: list[float] = []
    for student, teacher, importance in zip(case.student, case.teacher, case.importance, strict=True):
        values: list[float] = []
        for b in np.flatnonzero(counted):
            for c, weight in enumerate(importance):
                values.append(float(weight) * slow_channel_released(student[b, c], teacher[b, c]))
        of_map.append(sum(values) / len(values))
    return sum(of_map) / len(of_map)


def slow_discrepancy_paper(case: RandomStep, counted: np.ndarray) -> float:
    """Importance times squared distance, summed over maps and channels, mean over the samples counted."""
    total = 0.0
    for b in np.flatnonzero(counted):
        for student, teacher, importance in zip(case.student, case.teacher, case.importance, strict=True):
            for c, weight in enumerate(importance):
                total += float(weight) * slow_channel_paper(student[b, c], teacher[b, c])
    return total / int(counted.sum())


def unpack_archive(archive: Path, place: Path) -> None:
    """Unpacks an archive of the tests' own."""
    # Python 3.11 knows the filter from 3.11.4 on, and 3.12 warns without it.
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as file:
        file.extractall(place, **safely)


def not_text(folder: Path, ending: str = "") -> Path:
    """A path in the folder whose name is not text; where the file system takes none such, the test is skipped."""
    path = folder / (os.fsdecode(b"caf\xe9") + ending)
    try:
        path.touch()
    except OSError:
        pytest.skip("this file system accepts only text as a name")
    path.unlink()
    return path


def assert_refused(outcome: Outcome, *words: str) -> None:
    """One sentence on stderr with these words, and the status of a mistake in what was asked."""
    assert outcome.status == 2, outcome
    assert outcome.err.startswith("engram: ")
    assert outcome.err.count("\n") == 1
    for word in words:
        assert word in outcome.err, outcome.err
