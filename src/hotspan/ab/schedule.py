"""In which order both sides are asked.

Each item is asked four times: twice of each side. The two visits of A give the noise floor, their equality and that of
B's two tell a difference that stays from one that comes and goes, and first visits are compared with first visits, so
that no side is helped by a cache that the other did not have.

    pilot    A A              the noise floor, measured first, on a fifth of the items and at most 50
             B B
    blocks   AB BA BA AB ..   64 items: both sides' first visits, in an order that the seed draws for each item
             BA AB AB BA ..   and their second visits, in another order
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from hotspan.ab.items import shuffled

Name = Literal["A", "B"]

PILOT_ITEMS: Final = 50
_PILOT_SHARE: Final = 5
_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class Visit:
    """A question that one side is asked. item: its place in the set. turn: 1, or 2 for the second time."""

    item: int
    side: Name
    turn: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Visits that must all have ended before the next phase begins. title: what is measured."""

    title: str
    visits: tuple[Visit, ...]


def pilot_items(count: int) -> int:
    """How many items measure the noise floor first."""
    return max(1, min(PILOT_ITEMS, count // _PILOT_SHARE))


def interleaved(count: int, seed: int) -> Iterator[Phase]:
    """The phases for two sides that answer at the same time."""
    rng = Random(seed)
    order: list[int] = shuffled(range(count), rng)
    pilot, rest = order[: pilot_items(count)], order[pilot_items(count) :]
    yield Phase("A against itself", (*_all(pilot, "A", 1), *_all(pilot, "A", 2)))
    yield Phase("B", (*_all(pilot, "B", 1), *_all(pilot, "B", 2)))
    for start in range(0, len(rest), _BLOCK):
        block = rest[start : start + _BLOCK]
        visits = []
        for turn in (1, 2):
            for item in shuffled(block, rng):
                visits += [Visit(item, side, turn) for side in shuffled(("A", "B"), rng)]
        yield Phase("A against B", tuple(visits))


def in_turn(count: int, seed: int) -> tuple[Phase, Phase]:
    """One phase for each side, where only one can run at a time."""
    order = shuffled(range(count), Random(seed))
    first, second = (Phase(side, (*_all(order, side, 1), *_all(order, side, 2))) for side in _SIDES)
    return first, second


_SIDES: Final[tuple[Name, Name]] = ("A", "B")


def _all(items: Sequence[int], side: Name, turn: int) -> list[Visit]:
    return [Visit(item, side, turn) for item in items]
