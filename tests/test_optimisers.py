"""AdamW against torch's, what a checkpoint holds of an optimiser, and optimisers that cannot work."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engram.contract import Optimiser, Part, Training, register_optimiser
from engram.contract.optimisers import try_optimiser
from engram.contract.settings import OPTIMISERS
from engram.core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.core.errors import EngramError, UnknownNameError
from engram.core.serialize import to_plain
from engram.engine.flat_optimiser import FlatOptimiser
from engram.experiment.runner import resume, run
from helpers import (
    assert_resumes_to,
    begin_stage,
    parameters_of,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_adamw_is_that_of_torch_where_the_mask_lets_it(betas: tuple[float, float], clip: float | None) -> None:
    session = tiny_session()
    begin_stage(session, 0)
    ours = session.learner.network
    theirs, start = copy.deepcopy(ours), parameters_of(ours)
    masks = ours.trainable(Part.BACKBONE | Part.NEW_CLASSES, num_old=1)
    flat = FlatOptimiser(ours)
    flat.begin(masks, "adamw")
    training = Training(optimiser="adamw", betas=betas, weight_decay=0.2, clip=clip)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1.0, betas=betas, weight_decay=0.2)
    random = torch.Generator().manual_seed(0)
    for lr in (0.01, 0.01, 0.007, 0.003, 0.001):
        for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=random))
            other.grad = parameter.grad.clone() if clip is None else parameter.grad.clamp(-clip, clip)
        flat.step(torch.tensor([lr]), training)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                parameter.copy_(torch.where(masks[name] == 1, parameter, start[name]))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=2e-6, atol=1e-7, msg=name)
        frozen = masks[name] == 0
        assert torch.equal(parameter[frozen], start[name][frozen]), "no step and no decay where nothing is trained"
    assert float(flat.held["steps"]) == 5


def test_each_optimiser_keeps_its_own_tensors() -> None:
    session = tiny_session()
    begin_stage(session, 0)
    flat = FlatOptimiser(session.learner.network)
    masks = session.learner.network.trainable(Part.BACKBONE, num_old=0)
    flat.begin(masks, "adamw")
    flat.gradients.fill_(0.5)
    flat.step(torch.tensor([0.01]), Training(optimiser="adamw"))
    first, saved = flat.held["first"], flat.saved()
    flat.begin(masks, "sgd")
    assert flat.held.keys() == {"momentum"}
    flat.begin(masks, "adamw", saved)
    assert flat.held["first"] is first, "a recorded step reads it where it was"
    assert bool((first != 0).all())
    assert float(flat.held["steps"]) == 1
    assert {name.partition(".")[0] for name in saved} == {"first", "second", "steps"}


CHECKPOINT = Path("checkpoint") / "state.safetensors"


def edit(run_: Path, tensors: Mapping[str, Tensor], data: dict[str, Any]) -> None:
    save_checkpoint(run_ / CHECKPOINT, Checkpoint(dict(tensors), data))


def test_a_checkpoint_with_momentum_only_still_resumes(tmp_path: Path) -> None:
    config, store = tiny_config("replay"), toy_store(4)
    whole = run_whole(config, store, tmp_path / "whole")
    run_stopped(config, store, tmp_path / "run", 2, starts(1))
    saved = load_checkpoint(tmp_path / "run" / CHECKPOINT)
    old = {name.replace("phase.optimiser.momentum.", "phase.momentum."): each for name, each in saved.tensors.items()}
    assert old.keys() != saved.tensors.keys()
    assert not any(name.startswith("phase.optimiser.") for name in old)
    edit(tmp_path / "run", old, saved.data)
    assert_resumes_to(whole, tmp_path / "run", store)


@pytest.mark.parametrize("lost", ["phase.optimiser.steps", "phase.optimiser.first.head.weight"])
def test_a_checkpoint_without_what_the_optimiser_keeps_is_refused(lost: str, tmp_path: Path) -> None:
    config, store = tiny_config("afc").with_settings(train__optimiser="adamw"), toy_store(4)
    run_stopped(config, store, tmp_path / "run", 2)
    saved = load_checkpoint(tmp_path / "run" / CHECKPOINT)
    assert lost in saved.tensors, sorted(saved.tensors)
    edit(tmp_path / "run", {name: each for name, each in saved.tensors.items() if name != lost}, saved.data)
    with pytest.raises(EngramError, match="what it holds of the optimiser adamw does not fit the network"):
        list(resume(tmp_path / "run", store))


def test_an_optimiser_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no optimiser 'adam': did you mean 'adamw'\? \(one of your own: "):
        Training(optimiser="adam")
    with pytest.raises(EngramError, match="no optimiser 'lion'"):
        tiny_config().with_settings(train__optimiser="lion")


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.99, 0.999)])
def test_betas_are_two_shares(betas: tuple[float, ...]) -> None:
    with pytest.raises(EngramError, match="betas must be two numbers, each at least 0 and below 1"):
        Training(betas=betas)


@pytest.mark.parametrize("warmup", [-0.1, 1.0, 5, float("nan")])
def test_a_warm_up_is_a_share_of_the_phase(warmup: float) -> None:
    with pytest.raises(EngramError, match="warmup must be at least 0 and below 1"):
        Training(warmup=warmup)


def test_digests_of_old_files_are_without_what_came_later() -> None:
    whole, old = to_plain(Training()), to_plain(Training(), for_digest=True)
    assert whole.keys() - old.keys() == {"optimiser", "betas", "warmup"}
    assert to_plain(Training(optimiser="adamw"), for_digest=True) == {**old, "optimiser": "adamw"}


class Sign(Optimiser):
    """Steps of one size."""

    def direction(self, values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], training: Training) -> Tensor:
        return gradients.sign()


class Unfinished(Optimiser):
    """Has no direction."""


class Dotted(Sign):
    state = ("a.b",)


class Texted(Sign):
    state = "momentum"  # pyright: ignore[reportAssignmentType]


class Twice(Sign):
    state = ("mean",)
    scalars = ("mean",)


@pytest.mark.parametrize(
    ("name", "cls", "wanted"),
    [
        ("adamw", Sign, "an optimiser named 'adamw' is registered already"),
        ("My Sign", Sign, "an optimiser cannot be called 'My Sign'"),
        ("own", dict, "takes a subclass of engram.contract.Optimiser"),
        ("own", lambda: None, "takes a subclass of engram.contract.Optimiser"),
        ("own", Unfinished, r"has no direction; define direction\(...\) in Unfinished"),
        ("own", Dotted, "Dotted.state of the optimiser 'own' must be a tuple of names"),
        ("own", Texted, "Texted.state of the optimiser 'own' must be a tuple of names"),
        ("own", Twice, "two tensors of the optimiser 'own' have one name"),
    ],
)
def test_what_is_no_optimiser_is_not_registered(name: str, cls: Any, wanted: str) -> None:
    with pytest.raises(EngramError, match=wanted):
        register_optimiser(name)(cls)
    assert "own" not in OPTIMISERS


def wrong(direction: Any, *state: str) -> type[Optimiser]:
    return type("Wrong", (Sign,), {"direction": lambda self, *given: direction(*given), "state": state})


@pytest.mark.parametrize(
    ("cls", "wanted"),
    [
        (wrong(lambda values, gradients, state, training: state["mean"]), "fails in a trial step .KeyError: 'mean'"),
        (wrong(lambda values, gradients, state, training: None), "the direction of the optimiser 'own' is None"),
        (wrong(lambda values, gradients, state, training: gradients.sum()), r"is a torch.float32 tensor \(\) for five"),
        (wrong(lambda values, gradients, state, training: gradients.double()), "is a torch.float64 tensor"),
        (wrong(lambda values, gradients, state, training: gradients / 0), "is not finite in a trial step"),
        (wrong(lambda values, gradients, state, training: values.sub_(gradients)), "changes the values, or replaces"),
        (
            wrong(lambda values, gradients, state, training: state.update(m=gradients + 1) or gradients, "m"),
            "changes the values, or replaces",
        ),
    ],
)
def test_an_optimiser_that_cannot_work_is_refused_before_training(
    cls: type[Optimiser], wanted: str, clean_registries: None, tmp_path: Path
) -> None:
    register_optimiser("own")(cls)
    with pytest.raises(EngramError, match=wanted):
        try_optimiser(Training(optimiser="own"))
    config = tiny_config("afc").with_settings(finetune__optimiser="own")
    with pytest.raises(EngramError, match=wanted):
        next(run(config, toy_store(4), tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_an_optimiser_tunes_exemplars_too(clean_registries: None) -> None:
    """What Mnemonics does with pixels takes the optimiser that its settings name."""
    used: list[torch.Size] = []

    class Watched(Sign):
        def direction(
            self, values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], training: Training
        ) -> Tensor:
            used.append(values.shape)
            return super().direction(values, gradients, state, training)

    register_optimiser("watched")(Watched)
    session = tiny_session(tiny_config("replay"))
    stage = begin_stage(session, 0)
    training = Training(epochs=1, batch_size=12, lr=0.01, schedule="constant", optimiser="watched", clip=None)
    images = stage.pool.pixels[:2]

    def objective(step: Any) -> Tensor:
        return step.tuned.sum()

    engine, learner = session.engine, session.learner
    tuned = engine.tune(learner, stage, images, stage.all_rows, objective, training, "test")
    assert used == [torch.Size([2 * 3 * 8 * 8])] * 2
    moved = (tuned - images.float()) / (255 * learner.network.std.view(3))
    torch.testing.assert_close(moved, torch.full_like(moved, -0.02), rtol=1e-3, atol=1e-5)
