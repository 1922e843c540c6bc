"""The time of a program's run, and what is on its way beside the core: copies, and rings over the links."""

import itertools
from collections.abc import Container
from dataclasses import dataclass, field


@dataclass
class Transfer:
    """On its way beside the core: `left` seconds of its engine."""

    engine: str
    left: float
    place: int
    """Among the operations."""
    steps: int = 0
    """Of a ring that the core passes on; 0 where nothing waits for the core."""

    def __post_init__(self) -> None:
        self._step = self._arriving = self.left / (self.steps or 1)

    def go_on(self, seconds: float, *, passed_on: bool) -> float:
        """What it takes of that time."""
        taken = min(seconds, self.left)
        if self.steps and passed_on:
            self._arriving = self._step - (self._step * self.steps - self.left + taken) % self._step
        elif self.steps:
            taken = min(taken, self._arriving)
            self._arriving -= taken
        self.left -= taken
        return taken


@dataclass
class Clock:
    """The time of one computation's run, and what is on its way. An engine takes one transfer after the other."""

    now: float = 0.0
    pending: dict[str, Transfer] = field(default_factory=dict)
    """By engine and name or channel, in the order of their starts."""
    outside: frozenset[str] = frozenset()
    """What the caller has under way."""

    def spend(self, seconds: float, *, memory_s: float = 0.0, passes_on: Container[str] = (), taken: str = "") -> None:
        """The core works or waits; copies lose the bandwidth it takes, transfers the engine that it has `taken`."""
        self.now += seconds
        room = {taken: 0.0, "copy": seconds - min(memory_s, self.queued("copy"))}
        for key, each in self.pending.items():
            left = room.get(each.engine, seconds)
            room[each.engine] = left - each.go_on(left, passed_on=key in passes_on)

    def queued(self, engine: str, until: Transfer | None = None) -> float:
        """What the engine has to do on its own, up to a transfer."""
        before = itertools.takewhile(lambda each: each is not until, self.pending.values())
        return sum(each.left for each in before if each.engine == engine and not each.steps)

    def finish(self, key: str) -> float:
        """Waits for what is on its way, and says how long."""
        each = self.pending[key]
        waited = each.left + (0.0 if each.steps else self.queued(each.engine, until=each))
        self.spend(waited, passes_on=(key,))
        del self.pending[key]
        return waited
