"""What the crash tests share: the values a key may have after a crash.

`History` follows one store from outside, by what its user was told: which calls began, which returned, which flushes
were acknowledged. From that it knows, for each key, the floor (the newest state that must have survived) and everything
newer that may have. Anything else that a reopened store yields is a broken promise.
"""

from __future__ import annotations

from asynckv.testing.values import WrongBlockError, block_of, key_of, payload, version_of

__all__ = ["History", "WrongBlockError", "block_of", "key_of", "payload", "version_of"]


class KeyHistory:
    """The states of one key in call order, from the floor on. A state is a version, or None for absent."""

    __slots__ = ("ended", "floor", "next", "states")

    def __init__(self) -> None:
        self.states: list[int | None] = [None]
        self.floor = 0
        self.ended = 0  # index of the last state whose call returned
        self.next = 1

    def begin(self, state: int | None) -> None:
        self.states.append(state)

    def end(self) -> None:
        self.ended = len(self.states) - 1

    def keep(self, index: int) -> None:
        self.floor = max(self.floor, index)

    def allowed(self) -> list[int | None]:
        return self.states[self.floor :]

    def collapse(self, state: int | None) -> None:
        """A reopened store showed this state: what it did not show was never on disk and cannot come any more."""
        self.states, self.floor, self.ended = [state], 0, 0


class History:
    """The allowed values of every key of one store.

    Parameters
    ----------
    keys
        How many keys there are.
    may_drop
        Whether the store may have dropped blocks for room; a miss is then never wrong.
    """

    def __init__(self, keys: int, *, may_drop: bool = False) -> None:
        self.keys = [KeyHistory() for _ in range(keys)]
        self.may_drop = may_drop
        self.flushes: dict[int, list[int]] = {}
        self.clears: list[list[int]] = []  # under way: where in its states each key became absent
        self.acknowledged = 0
        self.observed = 0

    def begin_put(self, index: int, version: int) -> None:
        key = self.keys[index]
        key.next = max(key.next, version + 1)
        key.begin(version)

    def begin_delete(self, index: int) -> None:
        self.keys[index].begin(None)

    def begin_clear(self) -> None:
        for key in self.keys:
            key.begin(None)
        self.clears.append([len(key.states) - 1 for key in self.keys])

    def end_put(self, index: int) -> None:
        self.keys[index].end()

    def end_delete(self, index: int) -> None:
        """A delete that returned is durable."""
        key = self.keys[index]
        key.end()
        key.keep(key.ended)

    def end_clear(self) -> None:
        """A clear that returned is durable; what was put while it ran is not."""
        for key, index in zip(self.keys, self.clears.pop(0), strict=True):
            key.ended = max(key.ended, index)
            key.keep(index)

    def begin_flush(self, number: int) -> None:
        self.flushes[number] = [key.ended for key in self.keys]

    def end_flush(self, number: int) -> None:
        self.acknowledged += 1
        for key, index in zip(self.keys, self.flushes.pop(number), strict=True):
            key.keep(index)

    def crash(self) -> None:
        """The process died: calls under way will never return, and no later flush speaks of what was put before."""
        self.flushes.clear()
        self.clears.clear()
        for key in self.keys:
            key.ended = key.floor

    def problem(self, index: int, state: int | None) -> str | None:
        """Why this state of a key breaks a promise, or None when it is allowed."""
        key = self.keys[index]
        allowed = key.allowed()
        if state in allowed or (state is None and self.may_drop):
            return None
        if state is None:
            return f"key {index}: lost, version {allowed[0]} was flushed"
        if state >= key.next:
            return f"key {index}: version {state} was never put"
        return f"key {index}: version {state} is back, allowed are {allowed}"

    def observe(self, index: int, state: int | None) -> str | None:
        """A store that was reopened after a crash of the process showed this state; see `problem`."""
        self.observed += 1
        wrong = self.problem(index, state)
        if wrong is None and not (state is None and self.may_drop):
            self.keys[index].collapse(state)
        return wrong
