"""The base stage that a run has in common with others: taken from the cache, waited for, or trained for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from engram.core.errors import EngramError
from engram.core.events import BaseAwaited, BaseReused, Event, Warned
from engram.data.sources.download import data_home
from engram.experiment.base_cache import Claim, StageCache
from engram.experiment.session import Session

WAIT_SECONDS = 0.1


def user_cache() -> StageCache:
    """The cache of trained base stages that a user's runs share, in the data folder."""
    return StageCache(data_home() / "stages")


def which_cache(cache: StageCache | bool | None) -> StageCache | None:
    """The cache that is meant: True is the user's, False and None are none."""
    if cache is True:
        return user_cache()
    if cache is None or cache is False:
        return None
    if isinstance(cache, StageCache):
        return cache
    raise EngramError(f"cache should be True, False or a StageCache, got {cache!r:.80}")


class SharedBase:
    """A run's part in a base stage that others have too; without a cache it shares nothing and waits for nobody.

    name: what runs that wait for this one are told. stop: asked while it waits.
    """

    def __init__(self, session: Session, cache: StageCache | None, name: str, stop: Callable[[], bool]) -> None:
        self._session = session
        self._cache = cache
        self._name = name
        self._stop = stop
        self._claim: Claim | None = None  # while it is trained here

    @cached_property
    def _key(self) -> str | None:
        return None if self._cache is None else self._session.base_key()

    def take(self) -> Generator[Event, None, Literal["reused", "train", "stopped"]]:
        """Loads the trained base stage, waiting where another run is training it; else it is claimed, to be trained."""
        if (yield from self._load(warn=True)):
            return "reused"
        awaited = False
        while not (yield from self.claim()):
            if not awaited:
                assert self._cache is not None
                assert self._key is not None
                awaited = True
                yield BaseAwaited(0, len(self._session.stream), self._cache.holder(self._key))
            if self._stop():
                return "stopped"
            time.sleep(WAIT_SECONDS)
        # Between looking and claiming another run may have finished it, and one that was waited for has.
        if (yield from self._load(warn=False)):
            self.release()
            return "reused"
        return "train"

    def _load(self, warn: bool) -> Generator[Event, None, bool]:
        """Loads it from the cache; returns whether it was there and whole."""
        if self._cache is None or self._key is None:
            return False
        try:
            tensors = self._cache.load(self._key)
        except EngramError as error:
            if warn:
                yield Warned(f"the base stage is trained although it was cached: {error}")
            return False
        if tensors is None:
            return False
        self._session.learner.network.load_state_dict(tensors)
        yield BaseReused(0, str(self._cache.folder))
        return True

    def claim(self) -> Generator[Event, None, bool]:
        """Has other runs wait for this one; returns False while another has the claim that it should wait for."""
        if self._cache is None or self._key is None:
            return True
        try:
            self._claim = self._cache.claim(self._key, self._name)
        except EngramError as error:
            yield Warned(f"the base stage is trained here, even if another run trains it too: {error}")
            return True
        return self._claim is not None or self._cache.is_held_here(self._key)

    def share(self) -> Iterator[Event]:
        """Puts the trained base stage into the cache; a cache that cannot be written to stops nothing."""
        if self._cache is None or self._key is None:
            return
        try:
            self._cache.save(self._key, self._session.learner.network.state_dict(), Path(self._name).name)
        except EngramError as error:
            yield Warned(f"the base stage could not be cached: {error}")
        self.release()

    def release(self) -> None:
        """Lets another run train it, where this one had the claim."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None
