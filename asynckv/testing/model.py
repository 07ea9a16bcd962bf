"""Which value may a cache return? A dictionary that knows the promises, not the mechanism.

The promises: never wrong bytes, no phantoms, nothing older than the last flushed value. A cache may forget any block at
any time, so a miss is always allowed; `ModelCache.kept` says whether it has to be accounted for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

__all__ = ["MISS", "ModelCache", "ModelCall"]

MISS = None
_PUT, _REMOVE = "put", "remove"


class _Change:
    """One change of one key: a put, or its removal by delete, clear or a refused put."""

    __slots__ = ("begun", "durable", "ended", "kind", "sure", "version")

    def __init__(self, kind: str, version: Hashable, begun: float) -> None:
        self.kind = kind
        self.version = version
        self.begun = begun
        self.ended = math.inf
        self.sure = False  # ended with a known outcome
        self.durable = False  # survives a crash once ended, without a flush


class ModelCall:
    """A call that has begun. Exactly one of its methods says how it ended; none means that it never returned."""

    def __init__(self, model: ModelCache, changes: Iterable[_Change], flush: list[float] | None = None) -> None:
        self._model = model
        self._changes = list(changes)
        self._flush = flush

    def done(self, result: Any = True) -> None:
        """It returned. A put that returned False has removed its key."""
        now = self._model.position()
        for change in self._changes:
            change.ended, change.sure = now, True
            if change.kind == _REMOVE:
                change.durable = True
            elif result is False:
                change.kind, change.version = _REMOVE, MISS
        if self._flush is not None:
            self._flush[1] = now

    def failed(self) -> None:
        """It raised or was cancelled: it took effect or not."""
        now = self._model.position()
        for change in self._changes:
            change.ended = now

    def refused(self) -> None:
        """It raised an error that changes nothing, such as `TypeError`."""
        self._model._forget(self._changes)


class ModelCache:
    """The history of every key, and the values that the promises allow.

    A version is any hashable that identifies the bytes of one put, and never `MISS`. Calls on one key take effect in
    the order in which they begin.

    Parameters
    ----------
    position
        Where in time "now" is, for asking about crashes in the past; `RecordingBackend.position` fits. Left out, each
        call is one step.
    """

    def __init__(self, position: Callable[[], float] | None = None) -> None:
        steps = itertools.count(1)
        self.position: Callable[[], float] = (lambda: next(steps)) if position is None else position
        self._changes: dict[Hashable, list[_Change]] = {}
        self._initial: dict[Hashable, frozenset[Hashable]] = {}
        self._kept: set[Hashable] = set()  # of the initial ones, those that were flushed
        self._flushes: list[list[float]] = []

    def keys(self) -> list[Hashable]:
        """Every key that was ever put or may exist."""
        return list(dict.fromkeys([*self._initial, *self._changes]))

    # history

    def put(self, key: Hashable, version: Hashable) -> ModelCall:
        """A put begins."""
        if version is MISS:
            raise ValueError("a version is not MISS")
        return ModelCall(self, [self._change(key, _PUT, version)])

    def delete(self, key: Hashable) -> ModelCall:
        """A delete begins."""
        return ModelCall(self, [self._change(key, _REMOVE, MISS)])

    def clear(self) -> ModelCall:
        """A clear begins."""
        return ModelCall(self, [self._change(key, _REMOVE, MISS) for key in self.keys()])

    def flush(self) -> ModelCall:
        """A flush begins; an orderly close is one too."""
        flush = [self.position(), math.inf]
        self._flushes.append(flush)
        return ModelCall(self, [], flush)

    def _change(self, key: Hashable, kind: str, version: Hashable) -> _Change:
        change = _Change(kind, version, self.position())
        self._changes.setdefault(key, []).append(change)
        return change

    def _forget(self, changes: list[_Change]) -> None:
        for history in self._changes.values():
            history[:] = [change for change in history if change not in changes]

    # what may be seen

    def allowed(self, key: Hashable) -> set[Hashable]:
        """Versions that a get may return now, without a restart, `MISS` among them."""
        versions = {MISS, *self._initial.get(key, ())}
        for change in self._changes.get(key, ()):
            if change.sure:
                versions = {MISS, change.version}
            else:
                versions.add(change.version)
        return versions

    def allowed_after_crash(self, key: Hashable, at: float = math.inf) -> set[Hashable]:
        """Versions that a get may return after a crash at a position and recovery, `MISS` among them."""
        history, floor = self._history(key, at)
        versions = {MISS} if floor >= 0 else {MISS, *self._initial.get(key, ())}
        for change in history[max(floor, 0) :]:
            versions.add(change.version)
        return versions

    def _history(self, key: Hashable, at: float) -> tuple[list[_Change], int]:
        """The changes before a crash, and the index of the newest one that it must not undo, or -1."""
        history = [change for change in self._changes.get(key, ()) if change.begun <= at]
        flushed = max((begun for begun, ended in self._flushes if ended <= at and ended < math.inf), default=-math.inf)
        floor = -1
        for index, change in enumerate(history):
            if change.sure and (change.ended <= flushed or (change.durable and change.ended <= at)):
                floor = index
        return history, floor

    def kept(self, key: Hashable) -> bool:
        """Whether a miss now is a loss: some value was put for certain, and nothing may have removed it since.

        A cache may drop any block, but it has to count that: whoever asks compares with the counters.
        """
        kept = key in self._kept
        for change in self._changes.get(key, ()):
            if change.kind == _REMOVE:
                kept = False
            elif change.sure:
                kept = True
        return kept

    def kept_after_crash(self, key: Hashable, at: float = math.inf) -> bool:
        """As `kept`, after a crash at a position and recovery: only what was flushed counts."""
        history, floor = self._history(key, at)
        kept = key in self._kept if floor < 0 else history[floor].kind == _PUT
        return kept and all(change.kind == _PUT for change in history[max(floor, 0) :])

    def observe(self, key: Hashable, got: Hashable, *, final: bool = False) -> None:
        """A store that was just reopened has shown this value: no other one can come any more.

        A miss tells nothing, unless it is `final`: what was dropped for room may be there again after a power loss.
        """
        if key not in self._changes and (final or got is not MISS):
            self._initial[key] = frozenset({got})
            self._kept.discard(key)
            if got is not MISS:
                self._kept.add(key)

    def check(self, key: Hashable, got: Hashable) -> None:
        """Fail when a get without a restart must not have returned this."""
        allowed = self.allowed(key)
        assert got in allowed, f"{key!r}: got {got!r}, allowed {allowed!r}"

    def crash(self, at: float = math.inf, *, may_drop: bool = False) -> ModelCache:
        """The model of the next life, after a crash at a position: all that is allowed is possible.

        With `may_drop` the store had to give blocks up for room, so that no miss is a loss; see `kept`.
        """
        after = ModelCache(self.position)
        after._initial = {
            key: frozenset(versions) for key in self.keys() if (versions := self.allowed_after_crash(key, at)) != {MISS}
        }
        after._kept = set() if may_drop else {key for key in self.keys() if self.kept_after_crash(key, at)}
        return after
