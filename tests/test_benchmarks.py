"""The benchmark: that it measures what it says, in tiny form on a CPU."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import against, augmented, report
from benchmarks.after import summarise_after
from benchmarks.against import measure_plain
from benchmarks.ground import KINDS, Ground, Kind
from benchmarks.growth import fit_growth, summarise_growth
from benchmarks.kernels import ORDER, OTHER, TABLE, Kernel, breakdown, kind_of
from benchmarks.methods import config_of, whole_run
from benchmarks.plain import PlainImages, PlainSteps
from benchmarks.runs import AFTER, StageTimes
from benchmarks.scale import FULL, QUICK, afc_config, store_of
from benchmarks.timing import EngineSteps, per_step, time_together
from engram.core.errors import EngramError
from engram.data.augment import Augmentation, Draws, augment, pad_images
from engram.data.stage import Samples
from engram.experiment.session import Session
from engram.kernels import availability as kernels

CPU = replace(QUICK, device="cpu")
FORKING = "ignore:.*multi-threaded.*fork:DeprecationWarning"  # how a DataLoader starts its workers, from Python 3.12


def still_ground(kind: Kind) -> Ground:
    """Without augmentation, and with batches of the whole pool: every order of the images gives the same steps."""
    config = replace(afc_config(CPU), augmentation=Augmentation(pad=0, flip=False, brightness=0.0))
    store = store_of(CPU)
    images = CPU.base * CPU.per_class if kind == "base" else CPU.increment * CPU.per_class + CPU.base * CPU.exemplars
    # A clamp low enough and a decay strong enough to be missed.
    config = config.with_settings(train__clip=0.01, train__weight_decay=0.1)
    return Ground(CPU, store, config.with_settings(train__batch_size=images, train__epochs=5))


def weights_of(network: torch.nn.Module) -> dict[str, Tensor]:
    skipped = ("mean", "std")  # the plain loop normalises outside
    return {name: value.clone() for name, value in network.state_dict().items() if name not in skipped}


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_loop_does_engrams_training(kind: Kind) -> None:
    prepared = still_ground(kind).at(kind)
    plain = PlainSteps(prepared, workers=0, steps=5)
    before = weights_of(prepared.session.learner.network)
    engine = EngineSteps(prepared, steps=5)  # takes the first step
    ours = engine.loop.terms()

    (batch,) = plain.loader
    theirs = plain.model.losses(*batch)
    assert set(ours) == ({"classification"} if kind == "base" else {"classification", "discrepancy"})
    assert {name: value.item() for name, value in theirs.items()} == pytest.approx(ours, rel=1e-4)
    if kind == "teacher":
        assert ours["discrepancy"] >= 0
        assert prepared.stage.num_old == CPU.base

    fresh = PlainSteps(still_ground(kind).at(kind), workers=0, steps=5)
    fresh.take(5)
    engine.take(4)
    after = weights_of(prepared.session.learner.network)
    assert not torch.equal(after["backbone.conv.weight"], before["backbone.conv.weight"])
    for name, value in weights_of(fresh.model.network).items():
        torch.testing.assert_close(
            value, after[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    if kind == "teacher":
        old = slice(0, CPU.base)
        assert torch.equal(fresh.model.network.head.get_parameter("weight")[old], before["head.weight"][old])
        assert float(engine.loop.terms()["discrepancy"]) > 0  # the student has left the teacher by now


def test_plain_augmentation_draws_what_engrams_does() -> None:
    size, pad = 4, 1
    image = torch.randint(0, 256, (1, size, size, 3), dtype=torch.uint8)
    samples = Samples(image, torch.tensor([0]), torch.tensor([0]), torch.tensor([False]))
    still = PlainImages(samples, Augmentation(pad=pad, brightness=0.0), np.zeros(3), np.ones(3))
    possible: list[Tensor] = []
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            for mirror in (False, True):
                draws = Draws(torch.tensor([top]), torch.tensor([left]), torch.tensor([mirror]), torch.ones(1))
                possible.append(augment(pad_images(image, pad), torch.tensor([0]), draws, (size, size))[0])
    seen: set[int] = set()
    for _ in range(600):
        matches = [i for i, other in enumerate(possible) if torch.allclose(still[0][0], other, atol=1e-6)]
        seen.update(matches)
    assert seen == set(range(18))


def test_plain_brightness_and_normalisation() -> None:
    image = torch.full((1, 2, 2, 3), 102, dtype=torch.uint8)
    samples = Samples(image, torch.tensor([7]), torch.tensor([0]), torch.tensor([True]))
    augmentation = Augmentation(pad=0, flip=False, brightness=0.25)
    images = PlainImages(samples, augmentation, np.array([0.4, 0.0, 0.0]), np.array([0.1, 1.0, 1.0]))
    values = torch.stack([images[0][0][:, 0, 0] for _ in range(300)])
    assert images[0][1:] == (7, True)
    factors = values[:, 1] / 0.4
    assert 0.75 <= float(factors.min()) < 0.8
    assert 1.2 < float(factors.max()) <= 1.25
    torch.testing.assert_close(values[:, 0], (values[:, 1] - 0.4) / 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_steps_train_through_the_product(kind: Kind) -> None:
    prepared = Ground(CPU).at(kind)
    before = weights_of(prepared.session.learner.network)
    taker = EngineSteps(prepared, steps=9)
    taker.take(8)
    assert taker.loop.epoch * taker.loop.steps + taker.loop.step == 9
    assert taker.seconds_before > 0
    assert prepared.phase.teacher == (kind == "teacher")
    after = weights_of(prepared.session.learner.network)
    assert not torch.equal(after["backbone.conv.weight"], before["backbone.conv.weight"])


def test_a_phase_is_as_long_as_the_steps_need() -> None:
    prepared = Ground(CPU, config=afc_config(CPU, epochs=2)).at("base")
    taker = EngineSteps(prepared, steps=30)
    taker.take(29)
    assert taker.loop.epoch * taker.loop.steps + taker.loop.step == 30


class Sleeper:
    """Takes steps that last a while each, and fails at the one asked for."""

    def __init__(self, seconds: float, fails_at: int | None = None) -> None:
        self.seconds, self.fails_at, self.taken = seconds, fails_at, 0
        self.threads: set[int] = set()

    def take(self, count: int) -> None:
        for _ in range(count):
            self.taken += 1
            if self.taken == self.fails_at:
                raise RuntimeError("out of memory")
            time.sleep(self.seconds)
        self.threads.add(threading.get_ident())

    def wait(self) -> None:
        pass


def test_runs_are_timed_side_by_side_from_first_start_to_last_end() -> None:
    quick, slow = Sleeper(0.015), Sleeper(0.02)
    seconds = time_together([quick, slow], steps=3, repetitions=4)
    assert len(seconds) == 4
    assert min(seconds) >= 0.06  # the slower one's
    assert min(seconds) < 0.1  # not one after the other
    assert quick.taken == slow.taken == 12
    assert quick.threads.isdisjoint(slow.threads)


def test_a_run_that_fails_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        time_together([Sleeper(0.001), Sleeper(0.001, fails_at=4)], steps=3, repetitions=50)


def test_milliseconds_are_per_run_and_step() -> None:
    timed = per_step([6.0, 3.0, 12.0], runs=3, steps=100, batch_size=128)
    assert timed["ms"] == {"median": 20.0, "min": 10.0, "max": 40.0, "n": 3}
    assert timed["images_per_second"]["median"] == pytest.approx(6400)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("engram_conv_forward", "convolution, forward"),
        ("engram_conv_data_gradient_16", "convolution, data gradient"),
        ("engram_conv_weight_gradient", "convolution, weight gradient"),
        ("engram_batch_norm_statistics", "batch norm"),
        ("engram_discrepancy_backward", "distillation loss"),
        ("engram_nca_forward", "head and classification"),
        ("engram_sgd_update", "optimiser"),
        ("engram_augment_gather", "augmentation and gather"),
        ("engram_cast_weights", "copies and casts"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", "convolution, forward"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized>", "convolution, weight gradient"),
        ("cutlass_tensorop_bf16_s16816dgrad_analytic_bf16_256x64_32x4", "convolution, data gradient"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", "batch norm"),
        ("triton_red_fused__native_batch_norm_legit_functional_relu_4", "batch norm"),
        ("triton_per_fused_linalg_vector_norm_sub_7", "distillation loss"),
        ("triton_poi_fused__to_copy_1", "copies and casts"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwoOps<float>>>", "distillation loss"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>",
            "elementwise and reductions",
        ),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>", "optimiser"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<long>", "augmentation and gather"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "head and classification"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 4>", "head and classification"),
        ("aten::_softmax_backward_data", "head and classification"),
        ("engram_sum_splits", "convolution, weight gradient"),
        ("engram_distance_backward", "distillation loss"),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFun>>",
            "elementwise and reductions",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise and reductions"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("Memset (Device)", "copies and casts"),
        ("aten::convolution_backward", "convolution, both gradients"),
        ("some_kernel_nobody_knows", OTHER),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kind_has_a_place_in_the_order() -> None:
    assert {kind for kind, _ in TABLE} | {OTHER} == set(ORDER)


def test_breakdown_counts_kernels_and_gaps() -> None:
    kernels = [
        Kernel("engram_conv_forward", 0, 40, 40),
        Kernel("engram_conv_forward", 100, 140, 40),
        Kernel("engram_sgd_update", 120, 150, 30),  # beside the one before: 20 of its 30 are no gap's
        Kernel("nothing known", 190, 200, 10),
    ]
    found = breakdown(kernels, steps=2)
    assert found["kernels"] == 2
    assert found["wall_us"] == 100
    assert found["kernels_us"] == 60
    assert found["gaps_us"] == 50  # 60 before the second and 40 before the last, over two steps
    assert found["kinds"]["convolution, forward"] == {"count": 1, "us": 40, "share": pytest.approx(80 / 120)}
    assert list(found["kinds"]) == ["convolution, forward", "optimiser", OTHER]
    assert [entry["name"] for entry in found["top"]] == ["engram_conv_forward", "engram_sgd_update", "nothing known"]


@pytest.mark.parametrize(("name", "measured"), [("afc", 2), ("der", 2), ("der", 10)])
def test_a_whole_run_is_what_its_work_takes_at_the_pace_measured(name: str, measured: int) -> None:
    """Every phase at 2 ms an image's work, the base at 1 ms: then so is the whole, however many epochs there are.

    Of each phase the first epoch, in which the step is recorded, does not count, even if it has no other.
    """
    store, scale = store_of(CPU), replace(CPU, base=2, increment=2)
    short, full = (Session(config_of(name, scale, epochs), store) for epochs in (measured, None))
    stages = []
    for plan in short.plan()[:3]:
        stage = StageTimes(plan.stage, plan.num_seen, plan.images, plan.exemplars)
        stage.seconds_by = {"train": 9, "evaluate": 5}
        for phase in plan.phases:
            pace = phase.work / phase.epochs * (0.002 if plan.stage else 0.001)
            stage.epochs[phase.name] = [100.0, *[pace] * (phase.epochs - 1)]
        stages.append(stage)
    found = whole_run(stages, short, full)
    first, *others = (sum(phase.work for phase in plan.phases) for plan in full.plan())
    assert len(others) == 3
    assert found["training"] == pytest.approx(0.001 * first + 0.002 * sum(others))
    assert found["after"] == 20
    assert found["all"] == found["training"] + 20


def points(square: float, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stages from 40 to 200 classes, whose time is 2 s, 1 ms an image, and the square of the classes."""
    classes = np.arange(40, 201, 10)
    images = (2500 + 20 * classes) // 128 * 128
    jitter = 1 + noise * np.random.default_rng(0).standard_normal(len(classes))
    return images, classes, (2 + 0.001 * images + square * classes**2) * jitter


def test_the_fit_finds_a_line_and_no_square() -> None:
    fit = fit_growth(*map(list, points(0.0)))
    assert fit.constant == pytest.approx(2)
    assert fit.per_image == pytest.approx(0.001)
    assert fit.residual < 1e-9
    assert abs(fit.square_share) < 1e-9
    assert not fit.grows_with_square
    assert not fit_growth(*map(list, points(0.0, noise=0.01))).grows_with_square


def test_the_fit_finds_a_planted_square() -> None:
    images, classes, seconds = points(5e-5, noise=0.002)
    fit = fit_growth(list(images), list(classes), list(seconds))
    assert fit.square == pytest.approx(5e-5, rel=0.15)
    assert fit.square_share == pytest.approx(5e-5 * 200**2 / seconds[-1], rel=0.15)
    assert fit.grows_with_square
    assert fit.residual > 0.01


def test_a_fit_needs_stages_that_differ() -> None:
    with pytest.raises(EngramError, match="needs 4 stages or more, got 3"):
        fit_growth([1, 2, 3], [1, 2, 3], [1, 2, 3])
    with pytest.raises(EngramError, match="differ too little"):
        fit_growth([5, 5, 5, 5], [1, 2, 3, 4], [1, 2, 3, 4])


def stage_times(stage: int, classes: int, epoch: float, evaluate: float) -> StageTimes:
    """A stage measured with three epochs, the first slow, and two of fine-tuning."""
    epochs = {"main": [9.0, epoch, epoch], "balance": [0.5, 0.25]}
    seconds = {"train": 20.0, "importance": 1.0, "exemplars": 2.0, "evaluate": evaluate}
    return StageTimes(stage, classes, 20 * classes + 100, 20 * classes, 128 * (classes // 4), seconds, epochs)


def test_a_short_stage_is_extrapolated_at_the_pace_of_its_later_epochs() -> None:
    stage = stage_times(1, 60, epoch=0.5, evaluate=3.0)
    full = stage.extrapolated()
    assert full == {"train": 20 + 157 * 0.5 + 18 * 0.25, "importance": 1.0, "exemplars": 2.0, "evaluate": 3.0}
    result = summarise_after([stage], FULL)
    assert result["run"]["shares"]["evaluate"] == pytest.approx(3 / 109)
    assert result["run"]["together"] == pytest.approx(6 / 109)
    assert result["run"]["measured_seconds"] == pytest.approx(26)
    assert result["within_target"] == {"importance": True, "exemplars": True, "evaluate": True}
    slow = summarise_after([stage, stage_times(2, 65, epoch=0.1, evaluate=30.0)], FULL)
    assert slow["within_target"] == {"importance": True, "exemplars": True, "evaluate": False}
    assert slow["largest_share"]["evaluate"] == pytest.approx(30 / (20 + 15.7 + 4.5 + 33))


def test_growth_sees_which_part_grows_with_the_square() -> None:
    stages = [stage_times(i, n, epoch=0.01 * n, evaluate=0.001 * n**2) for i, n in enumerate(range(20, 101, 10))]
    fits = summarise_growth(100, stages)["fits"]
    assert fits["evaluate"]["grows_with_square"]
    assert fits["evaluate"]["square"] == pytest.approx(0.001)
    assert not fits["importance"]["grows_with_square"]
    assert not fits["epoch"]["grows_with_square"]
    assert fits["epoch"]["points"] == 7  # neither the base stage nor the first with a teacher


@pytest.mark.filterwarnings(FORKING)
@pytest.mark.slow
def test_every_part_runs_and_says_where_its_numbers_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "benchmark.json"
    arguments = ["--quick", "--device", "cpu", "--commit", "abc123", "--out", str(out)]
    for changes in augmented.POLICIES.values():
        replace(Augmentation(), **changes)  # all are known; measuring one of them with all it can have is enough
    few = {name: augmented.POLICIES[name] for name in (augmented.PLAIN, "trivial, cutout")}
    monkeypatch.setattr(augmented, "POLICIES", few)
    assert command.main(arguments) == 0
    assert multiprocessing.active_children() == []  # the plain loop's workers have ended
    record = json.loads(out.read_text())
    assert record["versions"]["commit"] == "abc123"
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # a build's own name aside
    assert set(record["versions"]) >= {"engram", "python", "numpy", "cuda", "cudnn"}
    assert record["hardware"]["device"] == "cpu"
    assert record["hardware"]["name"]
    assert record["date"][:4].isdecimal()
    assert record["quick"] is True
    assert record["repetitions"] == 3
    assert record["command"].startswith("python -m benchmarks --quick")
    parts = record["parts"]
    assert set(parts) == set(command.PARTS)
    assert all(part["seconds"] > 0 for part in parts.values())
    check_steps(parts["step"], parts["plain"])
    check_runs(parts["after"], parts["growth"])
    assert list(parts["augmented"]) == [*few, "seconds"]
    assert list(parts["methods"]["methods"]) == ["afc", "bic"]
    assert all(found["stage_ms"] > 0 and found["seconds"]["all"] > 0 for found in parts["methods"]["methods"].values())
    assert "correct" in parts["methods"]["methods"]["bic"]["phases"]
    for kind in KINDS:
        assert sum(entry["share"] for entry in parts["kernels"][kind]["kinds"].values()) == pytest.approx(1)
        assert parts["kernels"][kind]["kinds"]["convolution, forward"]["count"] == (9 if kind == "base" else 18)
    printed = capsys.readouterr().out
    assert "torch " in printed
    assert "abc123" in printed
    assert "say nothing about speed" in printed
    for title in ("A step", "A plain PyTorch loop", "After training", "Growth", "Kernels of a step, with teacher"):
        assert f"### {title}\n" in printed


def check_steps(step: dict[str, Any], plain: dict[str, Any]) -> None:
    """One and two runs of each kind; the plain loop with and without a worker, against one run."""
    for kind in KINDS:
        assert [entry["runs"] for entry in step[kind]["at_once"]] == [1, 2]
        for entry in step[kind]["at_once"]:
            rate = 1000 * step[kind]["batch_size"] / entry["ms"]["median"]
            assert entry["images_per_second"]["median"] == pytest.approx(rate)
            assert entry["ms"]["n"] == 3
            assert entry["memory"] is None
        assert step[kind]["seconds_before_first_step"]["later"]["n"] == 1
    assert [(entry["kind"], entry["workers"]) for entry in plain["loops"]] == [
        ("base", 1),
        ("base", 0),
        ("teacher", 1),
        ("teacher", 0),
    ]
    for entry in plain["loops"]:
        one_run = step[entry["kind"]]["at_once"][0]["ms"]["median"]
        assert entry["ratio_to_engram"] == pytest.approx(entry["ms"]["median"] / one_run)


def check_runs(after: dict[str, Any], growth: dict[str, Any]) -> None:
    """The stages are those of the protocol, and every part of their time is there."""
    assert [stage["classes"] for stage in after["stages"]] == [4, 6, 8]
    for stage in after["stages"]:
        assert all(stage["seconds"][kind] > 0 for kind in ("train", *AFTER))
        assert stage["measured_seconds"] < sum(stage["seconds"].values())
    assert [run["classes"] for run in growth["runs"]] == [12, 14]
    for run in growth["runs"]:
        assert [stage["classes"] for stage in run["stages"]] == list(range(2, run["classes"] + 1, 2))
        for stage in run["stages"]:
            assert stage["exemplars"] == QUICK.exemplars * (stage["classes"] - 2)
            assert stage["images"] == stage["exemplars"] + 2 * QUICK.growth_per_class
            assert stage["images_trained"] == stage["images"] // QUICK.batch_size * QUICK.batch_size
        assert set(run["fits"]) == {"stage", "epoch", *AFTER}


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(command.PARTS, "step", (fail, command.PARTS["step"][1]))
    out = tmp_path / "benchmark.json"
    arguments = ["--quick", "--device", "cpu", "--parts", "plain,step", "--workers", "0", "--out", str(out)]
    assert command.main(arguments) == 1
    parts = json.loads(out.read_text())["parts"]
    assert parts["step"] == {"error": "RuntimeError: CUDA out of memory"}
    assert [entry["ratio_to_engram"] for entry in parts["plain"]["loops"]] == [None, None]
    assert "step failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--parts", "stepp"], "no part 'stepp'"),
        (["--parts", "methods", "--methods", "afcc"], "'afcc'"),
        (["--runs", "0"], "the runs at once must be 1 or more, got 0"),
        (["--runs", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--repetitions", "2"], "repetitions must be at least 3, got 2"),
        (["--workers", "-1"], "the workers of the plain loop must be 0 or more, got -1"),
        (["--epochs", "1"], "run_epochs must be at least 2, got 1"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--quick", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_the_plain_loop_has_none_of_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(kernels, "is_available_for", lambda tensor: True)
    monkeypatch.setattr(
        against, "_measure", lambda *_: seen.append(kernels.is_available_for(torch.ones(1))) or {"ms": {}}
    )
    measure_plain(Ground(replace(CPU, workers=0)), None)
    assert seen == [False, False]
    assert kernels.is_available_for(torch.ones(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_cuda_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--quick", "--device", "cuda"]) == 2
    assert "no CUDA device is available here" in capsys.readouterr().err


def test_a_copy_that_is_not_installed_is_told_so_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> dict[str, str]:
        raise PackageNotFoundError("engram")

    monkeypatch.setattr(report, "versions", missing)
    assert command.main(["--quick", "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert "engram is not installed here, and a measurement names its version" in shown.err
    assert not shown.out
