"""MEMO: early groups that all stages share, a frozen tail for each stage, and a head over all tails."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engram import recipe
from engram.contract import Phase, Step
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.engine.fused import unsupported
from engram.experiment.session import Session
from engram.methods.blocks.expanding import WideningHead, residual
from engram.methods.der import ExpandingBackbone
from engram.methods.memo import MEMOSettings, TailedBackbone
from engram.nn.backbones import build_backbone, register_backbone
from engram.nn.network import Output
from engram.nn.resnet import resnet10, resnet32
from helpers import (
    begin_stage,
    buffers_of,
    learn_stage,
    parameters_of,
    tiny_config,
    tiny_session,
    train_phase,
)
from test_der import Foreign, slow_auxiliary


def session_of(**settings: Any) -> Session:
    return tiny_session(tiny_config("memo").with_settings(**settings))


def backbone_of(session: Session) -> TailedBackbone:
    backbone = session.learner.network.backbone
    assert isinstance(backbone, TailedBackbone)
    return backbone


def phase_of(session: Session, index: int) -> tuple[Any, Phase]:
    """The stage with its network grown, and its one phase."""
    stage = begin_stage(session, index)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    return stage, phase


def some_images(seed: int = 3) -> Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def shaken(seed: int, train_base: bool = True) -> TailedBackbone:
    """A backbone whose norms have learned something, so that modes and statistics matter."""
    backbone = TailedBackbone(resnet10(torch.Generator().manual_seed(seed)), train_base)
    draws = torch.Generator().manual_seed(seed)
    for value in backbone.parameters():
        value.data.add_(torch.randn(value.shape, generator=draws) * 0.1)
    backbone.train()(torch.rand(6, 3, 8, 8, generator=draws))
    return backbone.eval()


# The backbone


@pytest.mark.parametrize("name", ["resnet10", "resnet18"])
def test_before_it_grows_it_is_the_backbone_that_it_was_made_of(name: str) -> None:
    plain = residual("memo", build_backbone(name, torch.Generator().manual_seed(1))).eval()
    tailed = TailedBackbone(plain, train_base=True).eval()
    with torch.no_grad():
        (maps, embedding), (wanted, expected) = tailed(some_images()), plain(some_images())
    assert torch.equal(embedding, expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(maps, wanted, strict=True))


@pytest.mark.parametrize(("name", "split"), [("resnet32", 2), ("resnet10", 2), ("resnet18", 3), ("resnet18-small", 3)])
def test_the_tail_is_the_groups_of_the_last_width(name: str, split: int) -> None:
    backbone = TailedBackbone(residual("memo", build_backbone(name, torch.Generator())), train_base=True)
    assert backbone.split == split
    tail = [name for name, _ in backbone.named_parameters() if not backbone.is_shared(name)]
    assert {each.split(".")[1] for each in tail} == {str(group) for group in range(split, 4)}
    assert backbone.is_shared("conv.weight")
    assert backbone.is_shared("bn.bias")


def test_a_tail_of_resnet32_costs_as_many_bytes_as_457_images() -> None:
    backbone = TailedBackbone(resnet32(torch.Generator()), train_base=True)
    tail = sum(value.numel() for name, value in backbone.named_parameters() if not backbone.is_shared(name))
    assert tail == 351_488
    assert 4 * tail // (32 * 32 * 3) == 457
    parameters = sum(value.numel() for value in backbone.parameters())
    backbone.expand()
    assert sum(value.numel() for value in backbone.parameters()) == parameters
    running = sum(value.numel() for name, value in backbone.older.named_buffers() if "running" in name)
    counters = sum("tracked" in name for name, _ in backbone.older.named_buffers())
    assert sum(value.numel() for value in backbone.older.buffers()) == tail + running + counters


def test_every_tail_sees_what_the_shared_groups_say_now() -> None:
    backbone = shaken(1)
    lasts: list[list[torch.nn.Module]] = []
    for _ in range(2):
        lasts.append([deepcopy(backbone.groups[group]) for group in (2, 3)])
        backbone.expand()
        for value in backbone.parameters():
            value.data.mul_(0.9)
    lasts.append([backbone.groups[2], backbone.groups[3]])
    with torch.no_grad():
        maps, embedding = backbone(some_images())
        shared = F.relu(backbone.bn(backbone.conv(some_images())))
        shared = backbone.groups[1](backbone.groups[0](shared))
        wanted = [second(first(shared)) for first, second in lasts]
    assert backbone.dim == 192
    assert [each.shape[1] for each in maps] == [16, 32, 64, 192]
    torch.testing.assert_close(maps[1], shared)
    torch.testing.assert_close(maps[3], torch.cat(wanted, dim=1))
    torch.testing.assert_close(embedding, torch.cat([each.mean(dim=(2, 3)) for each in wanted], dim=1))


def test_an_older_tail_passes_gradients_on_to_the_shared_groups_and_takes_none() -> None:
    backbone = shaken(1)
    backbone.expand()
    before = buffers_of(backbone.older)
    names = [name for name, _ in backbone.named_parameters()]
    assert not any(name.startswith("older.") for name in names)
    backbone.train()
    assert not any(module.training for module in backbone.older.modules())
    _, embedding = backbone(some_images())
    embedding[:, :64].square().sum().backward()  # what the older tail says
    for name, value in backbone.named_parameters():
        if backbone.is_shared(name):
            assert value.grad is not None
            assert value.grad.any(), name
        else:
            assert value.grad is None or not value.grad.any(), name
    assert all(torch.equal(value, before[name]) for name, value in buffers_of(backbone.older).items())


def test_shared_groups_that_do_not_train_are_in_eval_mode_and_take_no_gradient() -> None:
    backbone = shaken(1, train_base=False).train()
    assert backbone.bn.training
    assert backbone.trains_shared
    backbone.expand()
    backbone.train()
    assert not backbone.bn.training
    assert not any(module.training for group in backbone.groups[:2] for module in group.modules())
    assert all(module.training for module in backbone.groups[2].modules())
    before = buffers_of(backbone)
    backbone(some_images())[1].square().sum().backward()
    for name, value in backbone.named_parameters():
        assert (value.grad is None) == backbone.is_shared(name), name
    changed = {name for name, value in buffers_of(backbone).items() if not torch.equal(value, before[name])}
    assert changed
    assert not any(backbone.is_shared(name) for name in changed)


def test_our_kernels_leave_it_to_the_modules() -> None:
    backbone = shaken(1)
    assert unsupported(backbone, (8, 8)) == "they are written for engram's residual backbones"
    assert unsupported(ExpandingBackbone(resnet10(torch.Generator())), (8, 8)) is None


# The loss


def test_the_terms_are_those_of_the_formulas_with_classes_not_seen() -> None:
    random = np.random.default_rng(5)
    raw, aside = random.normal(size=(4, 6)), random.normal(size=(4, 6))
    logits, labels = torch.tensor(raw), [0, 3, 2, 1]
    logits[:, 4:] = -torch.inf
    extras = {"auxiliary": torch.tensor(aside)}
    output = Output((), torch.zeros(4, 1), logits, logits, torch.ones(()), extras=extras)
    arrival, given = torch.tensor([0, 0, 1, 1, 2**31, 2**31]), torch.tensor(labels)
    step = Step(given, given < 2, output, None, {}, {}, arrival=arrival, stage=torch.tensor(1))
    method: Any = session_of(lambda_aux=0.5).method
    own = [math.log(np.exp(row[:4]).sum()) - row[label] for row, label in zip(raw, labels, strict=True)]
    apart = [slow_auxiliary(row, label, [2, 3]) for row, label in zip(aside.tolist(), labels, strict=True)]
    assert {name: term.item() for name, term in method.loss(step).items()} == pytest.approx(
        {"classification": np.mean(own), "auxiliary": 0.5 * np.mean(apart)}
    )


# What a stage does


def test_the_newest_tail_starts_as_a_copy_and_old_rows_of_the_head_are_kept() -> None:
    session = session_of()
    learn_stage(session, 0)
    backbone, head = backbone_of(session), session.learner.network.head
    assert isinstance(head, WideningHead)
    before = {name: value.clone() for name, value in session.learner.network.state_dict().items()}
    begin_stage(session, 1)
    for name, value in backbone.groups[2:].state_dict().items():
        number, _, rest = name.partition(".")
        assert torch.equal(value, before[f"backbone.groups.{int(number) + 2}.{rest}"])
        assert torch.equal(value, backbone.older[0].state_dict()[name])
    assert head.weight.shape == (6, 128)
    assert torch.equal(head.weight[:2, :64], before["head.weight"][:2])
    assert torch.equal(head.get_parameter("bias")[:2], before["head.bias"][:2])
    assert head.weight[:2, 64:].all()
    assert head.weight[2:4].all()


@pytest.mark.parametrize("train_base", [True, False])
def test_a_stage_trains_the_newest_tail_and_the_head_and_the_shared_groups_if_wanted(train_base: bool) -> None:
    session = session_of(train_base=train_base)
    fresh = parameters_of(backbone_of(session))
    learn_stage(session, 0)
    assert not torch.equal(backbone_of(session).conv.weight, fresh["conv.weight"])
    stage, phase = phase_of(session, 1)
    backbone = backbone_of(session)
    older, before = buffers_of(backbone.older), parameters_of(session.learner.network)
    statistics = buffers_of(backbone)["bn.running_mean"]
    train_phase(session, stage, phase)
    assert all(torch.equal(value, older[name]) for name, value in buffers_of(backbone.older).items())
    for name, value in session.learner.network.named_parameters():
        shared = name.startswith("backbone.") and backbone.is_shared(name.removeprefix("backbone."))
        assert torch.equal(value, before[name]) == (shared and not train_base), name
    assert torch.equal(buffers_of(backbone)["bn.running_mean"], statistics) == (not train_base)


def test_afterwards_new_weights_are_as_long_as_old_ones_and_the_rest_stays() -> None:
    session = session_of()
    learn_stage(session, 0)
    seen: list[dict[str, Tensor]] = []
    learn_stage(session, 1, before_finish=lambda _: seen.append(parameters_of(session.learner.network)))
    after = parameters_of(session.learner.network)
    lengths = after["head.weight"].norm(dim=1)
    assert float(lengths[2:4].mean()) == pytest.approx(float(lengths[:2].mean()), rel=1e-5)
    changed = {name for name, value in after.items() if not torch.equal(value, seen[0][name])}
    assert changed == {"head.weight"}
    assert torch.equal(after["head.weight"][:2], seen[0]["head.weight"][:2])


def test_it_learns_new_classes_and_keeps_the_old_ones() -> None:
    session = tiny_session(tiny_config("memo", epochs=8))
    for index in range(2):
        learn_stage(session, index)
    _, by_stage, _ = session.evaluate(1)
    assert min(by_stage["cnn"]) >= 50  # chance is one in four
    assert session.learner.class_means is not None
    assert session.learner.class_means.shape == (4, 128)


def test_a_state_of_any_size_is_taken_over_by_a_learner_of_any_size() -> None:
    session, states = session_of(), []
    for index in range(3):
        learn_stage(session, index)
        states.append({name: value.clone() for name, value in session.learner.state_dict().items()})
    learner = session_of().learner
    for index in (2, 0, 1):
        learner.load_state_dict(states[index])
        found = learner.state_dict()
        assert found.keys() == states[index].keys()
        assert all(torch.equal(found[name], value) for name, value in states[index].items())
        assert learner.network(some_images()).embedding.shape == (5, 64 * (index + 1))


# Settings and recipes


def test_settings_and_backbones_that_make_no_sense_are_refused(clean_registries: None) -> None:
    with pytest.raises(EngramError, match="lambda_aux must be at least 0"):
        tiny_config("memo").with_settings(lambda_aux=-1.0)
    register_backbone("foreign")(Foreign)
    with pytest.raises(EngramError, match=r"memo cannot use the backbone foreign: .*a copy of its last groups, which"):
        tiny_session(tiny_config("memo", backbone="foreign"))


def test_the_recipes_have_the_published_schedule() -> None:
    config = recipe("memo-cifar100-b50-s10")
    settings = config.settings
    assert isinstance(settings, MEMOSettings)
    assert (config.backbone, config.predictor, str(config.memory)) == ("resnet32", "cnn", "per_class=20")
    rates = learning_rates(settings.train, 1).tolist()
    assert rates == pytest.approx([0.1] * 60 + [0.01] * 60 + [0.001] * 50 + [1e-4] * 30)
    rates = learning_rates(settings.expand, 1).tolist()
    assert rates == pytest.approx([0.1] * 80 + [0.01] * 40 + [0.001] * 30 + [1e-4] * 20)
    assert (settings.train.weight_decay, settings.expand.weight_decay) == (5e-4, 2e-4)
    assert (settings.train_base, settings.lambda_aux) == (True, 1.0)
    small = recipe("memo-mini-b10-s5").settings
    assert isinstance(small, MEMOSettings)
    assert (small.train.epochs, small.expand.epochs, small.expand.batch_size) == (16, 16, 64)
    own = tiny_config("memo", epochs=3).with_settings(expand__epochs=2)
    assert tiny_session(own).card()["Epochs"] == "3 for the base, 2 for each stage after it"
