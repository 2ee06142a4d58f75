"""Vector clocks: whether two accesses to one piece of memory are ordered, whatever order they happened to come in."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

Clock = dict[int, int]
"""By actor, up to which of its accesses all have happened before."""

_numbers = count()


class Epoch(NamedTuple):
    """One access of an actor."""

    actor: int
    nth: int

    def is_before(self, clock: Clock) -> bool:
        """Whether what has seen `clock` comes after this access."""
        return clock.get(self.actor, 0) >= self.nth


class Actor:
    """Something that acts in an order of its own: a host's thread, a stream, a transfer of a tier.

    clock: what has happened before whatever it does next.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.number: Final = next(_numbers)
        self.clock: Clock = {}

    def act(self) -> Epoch:
        """Its next access."""
        nth = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = nth
        return Epoch(self.number, nth)

    def learn(self, clock: Clock) -> None:
        """What another actor has seen happens before whatever this one does next."""
        for actor, nth in clock.items():
            if self.clock.get(actor, 0) < nth:
                self.clock[actor] = nth


@dataclass(slots=True)
class _Cell:
    """The accesses to a piece of memory that a later one has to come after."""

    written: tuple[Epoch, str] | None = None
    read: dict[int, tuple[Epoch, str]] = field(default_factory=dict)


class Races:
    """Accesses by cell: a slot's part of one rank, or a block of a device.

    found: two accesses to one cell, one of them a write, that nothing orders; the first ones of each kind, in words.
    counts: all of them by kind.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()
        self._cells: dict[Hashable, _Cell] = {}

    def read(self, cells: Iterable[Hashable], seen: Clock, epoch: Epoch, what: str) -> None:
        """`epoch` reads these cells, at any time after what `seen` has."""
        for key in cells:
            cell = self._cells.setdefault(key, _Cell())
            if cell.written is not None and not cell.written[0].is_before(seen):
                self._note(key, what, cell.written[1])
            cell.read[epoch.actor] = (epoch, what)

    def write(self, cells: Iterable[Hashable], seen: Clock, epoch: Epoch, what: str) -> None:
        """`epoch` writes these cells, at any time after what `seen` has."""
        for key in cells:
            cell = self._cells.setdefault(key, _Cell())
            earlier = [*cell.read.values(), *([cell.written] if cell.written is not None else [])]
            for before, name in earlier:
                if not before.is_before(seen):
                    self._note(key, what, name)
            cell.written = (epoch, what)
            cell.read.clear()

    def _note(self, key: Hashable, what: str, earlier: str) -> None:
        kind = f"{what} beside {earlier}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self.found.append(f"{kind} at {key}")
