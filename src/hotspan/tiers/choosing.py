"""Of which of a tenant's lines of leaves the next victims are: of what is worth least, or of the oldest leaf."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from hotspan.tiers.leaves import Choice, Held, Line
from hotspan.tiers.uses import Uses

_YOUNGER: Final = 0.8
"""The youngest leaf of a line goes if it is worth less than this part of the oldest."""

_NEVER: Final = 1 << 62

SLACK: Final = 64
"""A leaf goes in the place of the oldest if it is younger by less than this part of the capacity, in uses."""


class Order(IntEnum):
    """In which order a tenant's leaves go."""

    ARC = 0
    LRU = 1
    LEARNED = 2


class _Candidate(NamedTuple):
    value: float
    used: int
    line: Line
    is_young: bool


def of_least_value(held: Held, now: int, uses: Uses, left: int, slack: int) -> Choice | None:
    """The line of the leaf of the least value."""
    best = min(_candidates(held, now, uses), key=lambda each: each[:2], default=None)
    if best is None:
        return None
    return Choice(best.line, left, _NEVER if best.is_young else best.used + slack, is_young=best.is_young)


def of_the_oldest(held: Held, is_long: bool | None, left: int, slack: int) -> Choice | None:
    """The line of the oldest leaf.

    is_long: whether ARC's list of what came once exceeds its target, so that its leaves go first; None: it is all one.
    """
    ends: list[tuple[int, int, Line]] = []
    for kind, line in list(held.lines.items()):
        oldest = line.first()
        if oldest is not None:
            ends.append((oldest[0], kind, line))
        elif line.is_empty:
            del held.lines[kind]
    own = ends if is_long is None else [each for each in ends if each[1] & 1 != is_long]
    if not ends:
        return None
    first, *others = sorted(own or ends, key=lambda each: each[0])
    until = others[0][0] + slack if others else _NEVER
    # of the other list for once, where this one may have a leaf soon
    return Choice(first[2], left if own else 0, until, is_once_long=bool(is_long))


def _candidates(held: Held, now: int, uses: Uses) -> Iterable[_Candidate]:
    lines, value = held.lines, uses.value
    for kind, line in list(lines.items()):
        oldest = line.first()
        if oldest is None:
            if line.is_empty:
                del lines[kind]
            continue
        of_oldest = value(kind >> 1, now - oldest[0])
        yield _Candidate(of_oldest, oldest[0], line, False)
        youngest = line.last()
        if youngest is not None and (worth := value(kind >> 1, now - youngest[0])) < _YOUNGER * of_oldest:
            yield _Candidate(worth, youngest[0], line, True)
