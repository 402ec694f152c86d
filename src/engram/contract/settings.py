"""Settings of a method and of a training phase: frozen dataclasses that declare their limits and roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from engram.core.errors import EngramError
from engram.core.fields import check_fields, limits
from engram.core.registry import OWN, Registry
from engram.core.serialize import ADDED, to_plain

# What a setting is for, so that nothing outside a method has to know it by name.
#   main: training of a stage's main phase; of the base stage only, if another setting has the role later
#   later: training of the main phase of the stages after the base
#   finetune: training on a balanced set after the main phase
#   correction: training of a few numbers after that
#   variant: which reading, where a paper and its code differ
#   distillation: weight of the distillation
#   views: in which views an image is counted and predicted; without mirror images it is "centre" instead of
#       "mirror+centre", and else "one", which is only the image as it is
Role = Literal["main", "later", "finetune", "correction", "variant", "distillation", "views"]
MAIN_ROLES: tuple[Role, ...] = ("main", "later")
TRAINING_ROLES: tuple[Role, ...] = ("main", "finetune", "later", "correction")

# What the names in a Training stand for: contract/optimisers.py and contract/schedules.py fill and use them.
OPTIMISERS: Registry[Any] = Registry("optimiser", OWN)
SCHEDULES: Registry[Any] = Registry("schedule", OWN)

SettingsT = TypeVar("SettingsT", bound="Settings")


def setting(
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    after_base: bool = False,
    role: Role | None = None,
    added: bool = False,
) -> Any:
    """A dataclass field with limits, which `Settings` checks.

    Parameters
    ----------
    at_least, above, at_most, below: limits of a number; None, as a value, has none.
    after_base: it has no effect before the second stage, so runs that differ in it share a base stage.
    role: what it is for.
    added: it came later, so old files do not have it, and their digests are without it.
    """
    metadata = limits(at_least=at_least, above=above, at_most=at_most, below=below)
    metadata |= {"after_base": after_base, "role": role, ADDED: added}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Settings of a method: a frozen dataclass with a default for every field, checked when it is made."""

    def __post_init__(self) -> None:
        check_fields(self)


def base_settings(settings: Settings) -> dict[str, Any]:
    """The settings that have an effect in the base stage, as plain data."""
    later = {each.name for each in fields(settings) if each.metadata.get("after_base")}
    return {name: value for name, value in to_plain(settings).items() if name not in later}


def with_role(settings: Settings, *roles: Role) -> dict[str, Any]:
    """The settings that have one of these roles, by name, in the order of the roles.

    If no setting has the role main, the first `Training` has it.
    """
    by_role = {each.metadata.get("role"): each.name for each in fields(settings)}
    trainings = [each.name for each in fields(settings) if isinstance(getattr(settings, each.name), Training)]
    if "main" not in by_role and trainings:
        by_role["main"] = trainings[0]
    return {by_role[role]: getattr(settings, by_role[role]) for role in roles if role in by_role}


def change_training(settings: SettingsT, roles: tuple[Role, ...], **changes: Any) -> SettingsT:
    """A copy in which the `Training` of each of these roles is changed, as far as the settings have them."""
    trainings = with_role(settings, *roles)
    return replace(settings, **{name: replace(training, **changes) for name, training in trainings.items()})


def trainings(settings: Any) -> Iterator[Training]:
    """Every `Training` in settings, also in settings inside them."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, Training):
            yield value
        elif is_dataclass(value) and not isinstance(value, type):
            yield from trainings(value)


_PLANNED = ("epochs", "batch_size", "lr", "schedule", "milestones", "factor", "remainder", "warmup")


@dataclass(frozen=True)
class Training:
    """How one phase trains.

    Parameters
    ----------
    schedule: of the learning rate, by name (`register_schedule` adds others). "cosine" falls to 0 over the phase.
        "steps" multiplies it by `factor` at each milestone. "restarts" uses a tenth of the rate for one epoch, then
        cosines from the rate down to `factor` of it, over 1, 2, 4, 8 ... epochs. "rise" is a warm-up in equal steps,
        one per epoch, up to the rate. "constant".
    milestones: fractions of the phase (0.5: after half of the epochs).
    momentum: of the optimiser "sgd".
    weight_decay: added to the gradient by "sgd"; "adamw" shrinks the parameters by it, apart from the gradient.
    clip: clamps each gradient element-wise to [-clip, clip].
    clip_norm: limits the length of the gradient of all trained parameters together.
    remainder: the last, incomplete batch of an epoch is dropped or kept. (A single image is always dropped if the
        backbone reduces it to one value per channel: batch norm cannot train on it.) With fewer images than
        batch_size, all images are one batch.
    optimiser: by name: "sgd" with momentum, or "adamw" (`register_optimiser` adds others).
    betas: of "adamw": how much of the mean gradient and of the mean squared gradient a step keeps.
    warmup: share of the phase, from 0 to below 1, in which the learning rate rises in equal steps from 0 to where the
        schedule begins. The schedule then spans the rest of the phase.
    """

    epochs: int = setting(160, at_least=0)
    batch_size: int = setting(128, at_least=1)
    lr: float = setting(0.1, at_least=0)
    schedule: str = "cosine"
    milestones: tuple[float, ...] = ()
    factor: float = setting(0.1, above=0, at_most=1)
    momentum: float = setting(0.9, at_least=0)
    weight_decay: float = setting(5e-4, at_least=0)
    clip: float | None = setting(5.0, above=0)
    remainder: Literal["drop", "keep"] = "drop"
    clip_norm: float | None = setting(None, above=0)
    optimiser: str = setting("sgd", added=True)
    betas: tuple[float, ...] = setting((0.9, 0.999), added=True)
    warmup: float = setting(0.0, at_least=0, below=1, added=True)

    def __post_init__(self) -> None:
        check_fields(self)
        OPTIMISERS.find(self.optimiser)
        SCHEDULES.find(self.schedule)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise EngramError(f"betas must be two numbers, each at least 0 and below 1, got {self.betas}")
        if any(not 0 < share < 1 for share in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise EngramError(f"milestones must be fractions between 0 and 1 in ascending order, got {self.milestones}")

    def in_step(self) -> tuple[Any, ...]:
        """The settings that a recorded step depends on; the others only determine its plan."""
        return tuple(getattr(self, each.name) for each in fields(self) if each.name not in _PLANNED)

    def batches(self, images: int) -> tuple[int, int]:
        """The number of steps in an epoch of that many images, and the batch size (the last batch may be smaller)."""
        size = min(self.batch_size, images)
        steps = images // size if self.remainder == "drop" else -(-images // size)
        return steps, size
