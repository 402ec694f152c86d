"""The registry of methods: `register` makes a method known by name, with recipes and a place in every list."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from engram.contract.method import Method
from engram.contract.predictors import PREDICTORS, need_means
from engram.contract.settings import Settings
from engram.core.errors import EngramError, UnknownNameError
from engram.core.provenance import user_code_versions
from engram.core.registry import origin_of
from engram.data.memory import SELECTIONS

MemoryUse = Literal["needed", "none", "all", "optional"]
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # recipes and directories begin with it
NME_ENDING = "-nme"
OWN_METHODS = "(a method of your own: import its module first; for a command, set ENGRAM_METHODS=FILE.py)"


@dataclass(frozen=True)
class RecipeHints:
    """How the recipes of a method differ from its default settings, as changes by dotted path.

    nme: for the recipes of the paper's NME rows; None: it has no such recipes. finetune: for small data sets, training
    of the balanced phase (some methods need a few hundred steps of it, however few the images). later_as_base: there,
    the main phase of later stages has the epochs and batches of the base stage. small: for small data sets, any
    settings (the embedded set, folders, models of one's own images). augmentation: of the CIFAR-100 and ImageNet
    recipes. imagenet: by data set; a method has ImageNet recipes only for the data sets named here. backbones: further
    CIFAR-100 recipes, one for each of these backbones.
    """

    nme: Mapping[str, Any] | None = None
    finetune: Mapping[str, int] = field(default_factory=dict)
    later_as_base: bool = False
    small: Mapping[str, Any] = field(default_factory=dict)
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    imagenet: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    backbones: tuple[str, ...] = ()


def both_imagenets(changes: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The same changes for ImageNet-100 and ImageNet-1000."""
    return {"imagenet100": changes, "imagenet1000": changes}


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """A registered method. versions: for a method outside the package, its file name and a digest of its code."""

    name: str
    title: str
    paper: str
    memory: MemoryUse
    predictors: tuple[str, ...]
    settings: type[Settings]
    kind: type[Method]
    selection: str = "herding"
    brightened: bool = True
    shares_base: bool = False
    recipes: RecipeHints = field(default_factory=RecipeHints)
    versions: Mapping[str, str] = field(default_factory=dict)

    def make(self, settings: Settings) -> Method:
        """The method with these settings; it cannot be changed."""
        method = self.kind(settings)
        method.seal()
        return method

    def base_key(self, method: Method) -> dict[str, Any] | None:
        """The method's base_key, with this name in it unless methods share it; None: the base stage is not shared.

        That of a method with tensors per image is not shared: only the network is, and training writes these tensors.
        """
        key = None if method.image_state else method.base_key()
        return key if key is None or self.shares_base else {**key, "method": self.name}


METHODS: dict[str, MethodInfo] = {}
MethodT = TypeVar("MethodT", bound=Method)


def register(
    name: str,
    *,
    settings: type[Settings],
    title: str,
    paper: str = "",
    memory: MemoryUse = "needed",
    selection: str = "herding",
    brightened: bool = True,
    shares_base: bool = False,
    recipes: RecipeHints | None = None,
) -> Callable[[type[MethodT]], type[MethodT]]:
    """A class decorator that registers a method under a name: lower-case letters, digits and single dashes.

    A new definition of the class, as in a notebook's cell that is run again, replaces the method.

    Parameters
    ----------
    memory: the memory that the method is defined for: a budget of exemplars ("needed"), none, every image ("all"), or a
        budget or none ("optional"; its recipes have none).
    selection: how its recipes choose exemplars.
    brightened: whether its recipes change the brightness of images.
    shares_base: head, growth and training of the base stage are those of its family, so methods share a base stage.
    recipes: how its recipes differ from the default settings.
    """

    def decorate(cls: type[MethodT]) -> type[MethodT]:
        _check_name(name)
        _check_class(name, cls)
        _check_free(name, cls)
        _check_settings(name, settings)
        _check_predictors(name, cls)
        named = (("memory", memory, get_args(MemoryUse)), ("selection", selection, SELECTIONS.names()))
        for what, value, valid in named:
            if value not in valid:
                raise EngramError(f"the {what} of {name} must be one of {', '.join(valid)}, got {value!r}")
        if memory in ("none", "optional") and (by_means := need_means(cls.predictors)):
            raise EngramError(
                f"{name} cannot predict by {by_means[0]}, which needs the means of exemplars, with memory={memory!r}; "
                f'write predictors = ("cnn",) in {cls.__name__}'
            )
        METHODS[name] = MethodInfo(
            name=name,
            title=title,
            paper=paper,
            memory=memory,
            predictors=cls.predictors,
            settings=settings,
            kind=cls,
            selection=selection,
            brightened=brightened,
            shares_base=shares_base,
            recipes=recipes or RecipeHints(),
            versions=user_code_versions(cls),  # now: later edits of the file do not change the class
        )
        return cls

    return decorate


def find_method(name: str) -> MethodInfo:
    """The registered method of that name."""
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS, hint=OWN_METHODS)
    return METHODS[name]


def import_all(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, which registers the methods in them."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise EngramError(
            f"a method cannot be called {name!r}: a name is lower-case letters and digits, with single dashes between, "
            "such as 'my-method2'"
        )
    if name.endswith(NME_ENDING):
        raise EngramError(
            f"a method cannot be called {name!r}: recipes of {name.removesuffix(NME_ENDING)} that predict by nme have "
            f"that name; choose a name that does not end in {NME_ENDING}"
        )


def _check_class(name: str, cls: type) -> None:
    if not isinstance(cls, type) or not issubclass(cls, Method):
        raise EngramError(f"{name} is registered with {cls!r}; register takes a subclass of Method")


def _check_free(name: str, cls: type) -> None:
    """Refuse the name of another method; a new definition of the same class replaces it."""
    held = METHODS.get(name)
    if held is not None and origin_of(held.kind) != origin_of(cls):
        raise EngramError(
            f"a method named {name!r} is registered already ({held.kind.__qualname__}); choose another name"
        )


def _check_predictors(name: str, cls: type[Method]) -> None:
    unknown = [each for each in cls.predictors if each not in PREDICTORS]
    if unknown or not cls.predictors or isinstance(cls.predictors, str):
        raise EngramError(
            f"{cls.__name__}.predictors of {name} must be a tuple of some of {', '.join(PREDICTORS.names())}, "
            f'got {cls.predictors!r}; write predictors = ("cnn",), for instance (your own are registered before it)'
        )


def _check_settings(name: str, settings: type[Settings]) -> None:
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        raise EngramError(
            f"the settings of {name} must be a subclass of engram.contract.Settings, as a frozen dataclass, "
            f"got {settings!r}"
        )
    try:
        settings()
    except Exception as error:  # whatever their own checks raise
        raise EngramError(
            f"the settings of {name} cannot be made without arguments ({error}); give every setting of "
            f"{settings.__name__} a valid default"
        ) from error
