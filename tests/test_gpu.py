"""What only a GPU can show: the captured step is the eager step, bf16 learns as float32 does, runs share the device."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import make_config, make_store
from engram import ImageStore, RunConfig, recipe, run_together, train
from engram.contract import AfterUpdate, Step, Terms
from engram.core.events import BaseReused, RunFinished, StageFinished, Warned
from engram.core.processes import ALONE, JoinedProcesses, Processes
from engram.data.augment import Augmentation
from engram.engine import Engine, PhaseLoop, runtime
from engram.engine.capture import CapturedStep
from engram.engine.compiled import CompiledForward, why_not_compiled
from engram.engine.forward import Forward
from engram.engine.planning import plan_sweep
from engram.experiment.base_cache import StageCache
from engram.experiment.execution import RunExecution
from engram.experiment.image_placement import ImagePlacement
from engram.experiment.session import Session
from engram.methods.dde import NeighbourLogits
from engram.methods.mnemonics import as_factored, convolution_weights
from engram.methods.penalty import MAS, MeasuredSettings
from engram.nn.network import Network
from helpers import (
    assert_resumes_to,
    learn_stage,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)

squared_length = MAS(MeasuredSettings()).measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def leave_to_modules(engine: Engine) -> None:
    """From here on torch's modules run the backbone, not our own kernels."""
    engine.why_not_fused = lambda backbone: "not now"
    engine._forward = None


def at_second_stage(
    precision: str,
    *,
    capture: bool = True,
    by_modules: bool = False,
    images: ImagePlacement = "resident",
    shares_memory: bool = True,
    processes: Processes = ALONE,
) -> tuple[Session, PhaseLoop]:
    """A session with a base stage behind it, the same bit for bit whatever is asked, before a stage with a teacher."""
    config = make_config(device="cuda", precision=precision, settings__train__epochs=12)
    session = Session(config, make_store(train=24), images, processes)
    session.engine.shares_memory = shares_memory
    learner, engine, method = session.learner, session.engine, session.method
    base = session.stage(0)
    method.grow(learner, base, engine)
    for phase in method.phases(learner, base, engine):
        for _ in engine.start(learner, base, phase, 0):
            pass
    method.finish(learner, base, engine)
    learner.snapshot_teacher()
    engine.capture, engine._forward = capture, None  # as is asked, from here on
    if by_modules:
        leave_to_modules(engine)
    stage = session.stage(1)
    method.grow(learner, stage, engine)
    return session, engine.start(learner, stage, method.phases(learner, stage, engine)[0], 0)


def first_steps(precision: str, steps: int = 50, **how: Any) -> tuple[list[dict[str, float]], torch.Tensor]:
    """The loss terms of the first steps of a stage with a teacher, and the parameters after them."""
    session, loop = at_second_stage(precision, **how)
    losses: list[dict[str, float]] = []
    for taken, _ in enumerate(loop, start=1):
        losses.append(loop.terms())
        if taken == steps:
            break
    assert len(losses) == steps
    return losses, torch.cat([parameter.detach().flatten() for parameter in session.learner.network.parameters()])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_recorded_and_eager_steps_agree(precision: str) -> None:
    eager, eager_values = first_steps(precision, capture=False)
    recorded, recorded_values = first_steps(precision, capture=True)
    assert recorded == eager
    assert torch.equal(recorded_values, eager_values)


@pytest.mark.parametrize("how", [{"images": "streamed"}, {"shares_memory": False}], ids=["streamed", "separate memory"])
def test_where_images_and_recordings_are_changes_no_bit(how: dict[str, Any]) -> None:
    losses, values = first_steps("bf16")
    others, other_values = first_steps("bf16", **how)
    assert others == losses
    assert torch.equal(other_values, values)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when it loads its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of its compiler
@pytest.mark.parametrize(("precision", "own_stem"), [("float32", False), ("bf16", False), ("bf16", True)])
def test_compiled_passes_agree_with_the_modules(
    precision: str, own_stem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and eager steps have the same bits; the modules round differently."""
    monkeypatch.setattr(CompiledForward, "own_stem", own_stem)

    def steps(
        *, is_compiled: bool, capture: bool = True, size: int = 128
    ) -> tuple[list[dict[str, float]], torch.Tensor]:
        monkeypatch.setattr(runtime, "why_not_compiled", why_not_compiled if is_compiled else lambda *_: "not now")
        config = replace(
            make_config(device="cuda", precision=precision, settings__train__epochs=2),
            backbone="resnet18",
            augmentation=Augmentation(pad=0, view=1.0),
        )
        session = Session(config, make_store(train=24, size=128))
        learner, engine, method = session.learner, session.engine, session.method
        engine.capture = capture
        losses = list[dict[str, float]]()
        for index in range(2):
            stage = session.stage(index)
            method.grow(learner, stage, engine)
            loop = engine.start(learner, stage, method.phases(learner, stage, engine)[0], 0)
            for taken, _ in enumerate(loop, start=1):
                losses.append(loop.terms())
                if taken == 4:
                    break
            assert isinstance(engine._forward, CompiledForward) == is_compiled
            if index == 0:
                method.finish(learner, stage, engine)
                learner.snapshot_teacher()
        return losses, torch.cat([parameter.detach().flatten() for parameter in learner.network.parameters()])

    recorded, values = steps(is_compiled=True)
    eager, eager_values = steps(is_compiled=True, capture=False)
    assert recorded == eager
    assert torch.equal(values, eager_values)
    plain, plain_values = steps(is_compiled=False)
    assert recorded[0] == pytest.approx(plain[0], rel=0.05 if precision == "bf16" else 1e-3)
    assert (values - plain_values).norm() / plain_values.norm() < (0.05 if precision == "bf16" else 1e-2)


class OneOfTwo(JoinedProcesses):
    """A process that takes half of every batch, and sums by NCCL over itself alone: the other is missing."""

    def __init__(self) -> None:
        super().__init__(0, 1, 0, "cuda")
        self.count = 2


def test_steps_of_a_process_among_several_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    processes = OneOfTwo()
    try:
        eager, eager_values = first_steps("bf16", steps=20, capture=False, processes=processes)
        recorded, recorded_values = first_steps("bf16", steps=20, processes=processes)
    finally:
        torch.distributed.destroy_process_group()
    assert recorded == eager
    assert torch.equal(recorded_values, eager_values)


@pytest.mark.parametrize(("precision", "loss", "weights"), [("bf16", 0.05, 0.02), ("float32", 1e-3, 1e-3)])
def test_our_kernels_train_as_the_modules_do(precision: str, loss: float, weights: float) -> None:
    # Over five steps: either rounds differently in each, and training amplifies it.
    fused, values = first_steps(precision, steps=5)
    plain, plain_values = first_steps(precision, steps=5, by_modules=True)
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=loss)
    assert (values - plain_values).norm() / plain_values.norm() < weights


DISTILLING = ["afc", "uniform", "podnet", "pod", "gap", "channel", "gram", "gradcam", "pixels", "ucir", "geodl", "lwm"]
DISTILLING += ["ssil", "mnemonics", "ucir-dde", "podnet-dde"]


@pytest.mark.parametrize("method", [*DISTILLING, "ewc", "si", "mas"])
def test_a_recording_serves_every_stage(method: str) -> None:
    config = make_config(method, device="cuda", increment=1, settings__train__remainder="drop")
    session = Session(config, make_store(train=24))
    recorded: list[set[int]] = []
    for event in RunExecution(session, None, None, None, 10, None).events(resumed=False):
        assert not (isinstance(event, Warned) and "cannot be recorded" in event.message)
        if isinstance(event, StageFinished) and event.stage > 0:
            recorded.append({id(step) for _, step in session.engine._recordings.values()})
    assert len(recorded) > 2
    # New room may be needed in the first stages; then nothing is recorded again.
    assert recorded[-1] == recorded[-2]


def test_a_loss_that_waits_for_the_device_is_trained_step_by_step() -> None:
    session, loop = at_second_stage("bf16")
    phase = loop.phase

    def waits(step: Step) -> Terms:
        terms = phase.loss(step)
        return {name: term * (1 + 0 * float(term.detach())) for name, term in terms.items()}

    stage = session.stage(1)
    slow = session.engine.start(session.learner, stage, replace(phase, loss=waits), 0)
    for _ in slow:
        break
    (note,) = session.learner.notes
    assert note.startswith("the steps of the main phase are taken one kernel at a time")
    # Detached: what held a graph of gradients from here on would bind the parameters to this stream.
    before = {name: value.detach().clone() for name, value in session.learner.network.named_parameters()}
    for _ in session.engine.start(session.learner, stage, phase, 0):  # another loss is recorded as ever
        break
    assert any(not torch.equal(before[name], value) for name, value in session.learner.network.named_parameters())
    assert len(session.learner.notes) == 1


def test_a_run_beside_others_is_the_run_alone() -> None:
    def result(seed: int) -> tuple[list[float], list[float]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            config = make_config(device="cuda", precision="bf16", seed=seed)
            stages = train(config, make_store(train=24))["stages"]
        return [stage["accuracy"]["cnn"] for stage in stages], [stage["accuracy"]["nme"] for stage in stages]

    alone = [result(seed) for seed in (1, 2, 3)]
    with ThreadPoolExecutor(3) as threads:
        beside = list(threads.map(result, (1, 2, 3)))
    assert beside == alone


def test_every_precision_learns_what_float32_on_the_modules_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def average(precision: str) -> float:
        config = recipe("afc-mini-b10-s5").with_value("device", "cuda").with_value("precision", precision)
        return train(config)["average_incremental_accuracy"]["cnn"]

    found = {precision: average(precision) for precision in ("bf16", "tf32", "float32")}
    monkeypatch.setattr(Engine, "why_not_fused", lambda engine, backbone: "not now")
    plain = average("float32")
    assert found == dict.fromkeys(found, pytest.approx(plain, abs=3))


def test_runs_side_by_side_learn_as_alone(tmp_path: Path) -> None:
    """Eight runs in as many threads and streams: two methods with the same base stage, four seeds."""
    configs = {
        f"{method}-{seed}": recipe(f"{method}-mini-b10-s5").with_value("device", "cuda").with_value("seed", seed)
        for method in ("afc", "replay")
        for seed in (1, 2, 3, 4)
    }
    events = list(run_together(configs, directory=tmp_path / "runs", cache=StageCache(tmp_path / "cache")))
    results = {name: event.result for name, event in events if isinstance(event, RunFinished)}
    assert set(results) == set(configs), [event for _, event in events if event.name == "run_failed"]
    assert sum(isinstance(event, BaseReused) for _, event in events) == 4
    for name in ("afc-1", "replay-4"):
        alone = train(configs[name])["average_incremental_accuracy"]["cnn"]
        assert results[name]["average_incremental_accuracy"]["cnn"] == pytest.approx(alone, abs=3)


def assert_recorded_as_it_is(config: RunConfig, store: ImageStore | None = None) -> None:
    """A run whose steps are recorded learns what it learns kernel by kernel, bit for bit."""

    def learned(capture: bool) -> dict[str, torch.Tensor]:
        session = tiny_session(config, store)
        session.engine.capture = capture
        for event in RunExecution(session, None, None, None, 10, None).events(resumed=False):
            assert not (isinstance(event, Warned) and "cannot be recorded" in event.message)
        return session.learner.state_dict()

    eager, recorded = learned(capture=False), learned(capture=True)
    for name, value in eager.items():
        assert torch.equal(value, recorded[name]), name


WHOLE = [
    *("icarl", "wa", "lwf", "bic", "eeil", "ssil", "gdumb", "ewc", "si", "mas", "der", "ucir-dde", "podnet-dde"),
    *("foster", "memo"),
]


@pytest.mark.parametrize("method", WHOLE)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_whole_runs_are_recorded_as_they_are(method: str, precision: str) -> None:
    assert_recorded_as_it_is(tiny_config(method, epochs=4, finetune=4, device="cuda", precision=precision))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_adamw_is_recorded_as_it_is(precision: str) -> None:
    """The main phases by AdamW, whose count of steps is on the device, the fine-tuning by SGD."""
    config = tiny_config("afc", epochs=4, finetune=4, device="cuda", precision=precision)
    assert_recorded_as_it_is(config.with_settings(train__optimiser="adamw", train__lr=0.003, train__warmup=0.25))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_adamw_resumes_exactly_on_a_gpu(precision: str, tmp_path: Path) -> None:
    config = tiny_config("afc", epochs=3, device="cuda", precision=precision)
    config, store = config.with_settings(train__optimiser="adamw", train__lr=0.003), toy_store(4)
    whole = run_whole(config, store, tmp_path / "whole")
    run_stopped(config, store, tmp_path / "run", 4, starts(1))
    assert_resumes_to(whole, tmp_path / "run", store)


def test_the_kernels_read_what_adamw_wrote() -> None:
    session, loop = at_second_stage("bf16")
    phase = replace(loop.phase, training=replace(loop.phase.training, optimiser="adamw", lr=0.003))
    weights = session.learner.network.get_parameter("backbone.conv.weight")
    before = weights.detach().clone()
    for taken, _ in enumerate(session.engine.start(session.learner, session.stage(1), phase, 0), start=1):
        if taken == 3:
            break
    forward = session.engine._forward
    assert forward is not None
    assert float(forward.optimiser.held["steps"]) == 3
    assert not torch.equal(weights, before)
    shadow = forward._backbone.shadow[: weights.numel()]  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(shadow, weights.detach().permute(0, 2, 3, 1).reshape(-1).bfloat16())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_a_parameter_matters_is_what_it_is_on_a_cpu(precision: str) -> None:
    there, here = tiny_session(tiny_config("mas", device="cuda", precision=precision)), tiny_session(tiny_config("mas"))
    stage = learn_stage(there, 0)
    here.learner.load_state_dict({name: value.cpu() for name, value in there.learner.state_dict().items()})
    ours, theirs = (
        session.engine.sensitivity(session.learner, stage, stage.all_rows, squared_length, power=1)
        for session in (there, here)
    )
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].cpu(), value, rtol=1e-2, atol=1e-3 * float(value.max()), msg=name)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.03), ("float32", 1e-5)])
def test_our_kernels_say_of_an_expanded_network_what_the_modules_say(precision: str, bound: float) -> None:
    session = tiny_session(tiny_config("der", epochs=4, finetune=4, device="cuda", precision=precision))
    for _ in RunExecution(session, None, None, None, 10, None).events(resumed=False):
        pass
    engine, network = session.engine, session.learner.network
    images = torch.from_numpy(session.store.test.images)
    assert engine.why_not_fused(network.backbone) is None
    fused = engine.infer(network, images)
    leave_to_modules(engine)
    for ours, theirs in zip(fused, engine.infer(network, images), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < bound
    # Every stage has a backbone more, so its steps are recorded anew.
    assert all(isinstance(step, CapturedStep) for _, step in engine._recordings.values())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resized_parts_and_resnet18_are_recorded_as_they_are(precision: str) -> None:
    view = recipe("afc-imagenet100-b50-s5").augmentation
    config = tiny_config(epochs=2, device="cuda", precision=precision, backbone="resnet18", augmentation=view)
    assert_recorded_as_it_is(config, toy_store(size=40))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("policy", ["trivial", "auto"])
def test_strong_augmentation_is_recorded_as_it_is(policy: str, precision: str) -> None:
    augmentation = Augmentation(pad=2, policy=policy, cutout=3)
    config = tiny_config(epochs=4, finetune=4, device="cuda", precision=precision, augmentation=augmentation)
    assert_recorded_as_it_is(config)


@pytest.mark.parametrize("policy", ["trivial", "rand", "auto"])
def test_our_kernels_see_strongly_augmented_images_as_the_modules_do(policy: str) -> None:
    augmentation = Augmentation(pad=4, policy=policy, cutout=8)
    config = tiny_config(device="cuda", precision="float32", augmentation=augmentation)
    session = tiny_session(config, toy_store(size=32))
    engine, stage = session.engine, session.stage(0)
    size = len(stage.pool)
    forward = engine.bind(session.learner, size)
    plan = engine.buffers.plan(1, size)
    plan.load(plan_sweep(augmentation, stage.all_rows, size, 0, 1, engine.image_size))
    engine.buffers.counter.zero_()
    pool, counter, network = engine.buffers.pool(stage), engine.buffers.counter, session.learner.network
    fused = forward.images(pool, plan, counter, size)[..., :3].permute(0, 3, 1, 2) * network.std + network.mean
    plain = Forward.images(forward, pool, plan, counter, size)
    # A level may be rounded to its neighbour before the policy sees it.
    assert ((fused - plain).abs() > 1.5 / 255).float().mean() < 0.01


def test_what_follows_an_update_reaches_the_kernels() -> None:
    session, loop = at_second_stage("bf16")

    def clamp(network: Network) -> None:
        network.get_parameter("backbone.conv.weight").clamp_(min=0)

    phase = replace(loop.phase, extensions=(AfterUpdate(clamp),))
    for taken, _ in enumerate(session.engine.start(session.learner, session.stage(1), phase, 0), start=1):
        if taken == 3:
            break
    weights = session.learner.network.get_parameter("backbone.conv.weight")
    shadow = session.engine._forward._backbone.shadow[: weights.numel()]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert float(shadow.min()) == 0
    assert torch.equal(shadow, weights.detach().permute(0, 2, 3, 1).reshape(-1).bfloat16())


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_learned_exemplars_and_factors_are_the_same_recorded_and_eager(precision: str, variant: str) -> None:
    def learned(capture: bool) -> Session:
        config = tiny_config("mnemonics", epochs=4, device="cuda", precision=precision)
        config = config.with_settings(variant=variant, tune__lr=20.0, tune__weight_decay=0)
        session = tiny_session(config)
        session.engine.capture = capture
        for event in RunExecution(session, None, None, None, 10, None).events(resumed=False):
            assert not (isinstance(event, Warned) and "cannot be recorded" in event.message)
        return session

    eager, recorded = learned(capture=False), learned(capture=True)
    for name, value in eager.learner.state_dict().items():
        assert torch.equal(value, recorded.learner.state_dict()[name]), name
    network = as_factored(recorded.learner.network)
    assert network.factors is not None
    for base, factor, weight in zip(
        network.factors.bases, network.factors.values, convolution_weights(network.backbone), strict=True
    ):
        assert torch.equal(weight, base * factor[:, :, None, None])
        assert not torch.equal(factor, torch.ones_like(factor))
    if precision == "bf16":
        shadow = recorded.engine._forward._backbone.shadow  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        weights = [weight.detach().permute(0, 2, 3, 1).reshape(-1) for weight in convolution_weights(network.backbone)]
        assert torch.equal(shadow, torch.cat(weights).bfloat16())
    assert float(recorded.learner.buffers["exemplars.changed"][0]) > 0


def test_our_kernels_see_neighbours_as_the_modules_do() -> None:
    """With running statistics and the weights of the step before, in a network that trains."""

    def looked_at(by_modules: bool) -> tuple[torch.Tensor, torch.Tensor]:
        session = tiny_session(tiny_config("ucir-dde", epochs=3, device="cuda", precision="bf16"))
        learn_stage(session, 0)
        stage = session.stage(1)
        session.method.grow(session.learner, stage, session.engine)
        session.engine.capture, session.engine._forward = False, None
        if by_modules:
            leave_to_modules(session.engine)
        (phase,) = session.method.phases(session.learner, stage, session.engine)
        seen: list[torch.Tensor] = []

        def spy(step: Step) -> Terms:
            neighbours = step.extra(NeighbourLogits)
            assert neighbours is not None
            seen.extend((neighbours.logits[..., :4].clone(), neighbours.shares.clone()))
            return phase.loss(step)

        for _ in session.engine.start(session.learner, stage, replace(phase, loss=spy), 0):
            break
        return seen[0], seen[1]

    (ours, our_shares), (theirs, their_shares) = looked_at(by_modules=False), looked_at(by_modules=True)
    assert torch.equal(our_shares, their_shares)
    # The teacher's embeddings are rounded otherwise, so that an image may have another neighbour.
    assert (ours - theirs).abs().median() < 0.02


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("backbone", ["wrn16-2", "vit-tiny"])
def test_backbones_without_kernels_are_recorded_and_repeat(backbone: str, precision: str) -> None:
    """By torch's modules: the recorded steps give the numbers of steps taken one by one, and those of another run."""
    states = []
    for capture in (True, True, False):
        config = make_config(device="cuda", precision=precision, backbone=backbone)
        session = Session(config, make_store(num_classes=4))
        assert session.engine.why_not_fused(session.learner.network.backbone) is not None
        session.engine.capture = capture
        for index in range(2):
            learn_stage(session, index)
        assert session.learner.notes == [], "every step can be recorded"
        states.append({name: value.clone() for name, value in session.learner.state_dict().items()})
    for name, value in states[0].items():
        assert bool(value.isfinite().all()), name
        assert torch.equal(value, states[1][name]), name
        assert torch.equal(value, states[2][name]), name


@pytest.mark.parametrize("backbone", ["wrn16-2", "vit-tiny"])
def test_sensitivity_of_other_backbones_is_that_of_the_cpu(backbone: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        session = tiny_session(tiny_config("mas", device=device, precision="float32", backbone=backbone, epochs=0))
        stage = learn_stage(session, 0)
        rows = stage.all_rows[:8]
        found.append(session.engine.sensitivity(session.learner, stage, rows, squared_length, power=1))
    for name, value in found[0].items():
        scale = float(value.max())
        torch.testing.assert_close(found[1][name].cpu(), value, rtol=1e-2, atol=1e-3 * scale, msg=name)
