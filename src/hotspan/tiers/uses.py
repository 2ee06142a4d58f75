"""When chunks are used again, by what is known of their last use: learned from a sample, to compare leaves by.

A use is what one request does to a text. Its kind is what is known of it: how the request ended, whether a sub-agent
made it, and in which rhythm its text was used before. The rhythm is the mean of the logarithms of the text's gaps, the
latest of which counts 0.3. Of what is not known to have ended, the kind is whether a chunk was used more than once.

Time is the number of uses of any chunk, in units of the tier's capacity: a clock that stands still while nothing comes.

    uses of sampled keys -> table: key, when, kind -> used again: a hit of that kind at that age
                                                   -> out of the table: lost at that age

The value of a kind at an age is a Gittins index: the best ratio of the hits to the time in the tier that are to be
expected if the chunk is kept until some later age. With one kind whose value falls with age, the least recently used
leaf has the least value. The table has a multiple of the tier's chunks, so that ages are known at which it has lost
them.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from enum import IntEnum
from math import log2
from typing import Any, Final

from msgspec import Struct


class Ending(IntEnum):
    """How a request ended."""

    UNKNOWN = 0
    TOOL_CALLS = 1
    STOP = 2
    LENGTH = 3
    ABORT = 4


AGES: Final = 64
_PER_OCTAVE: Final = 3
_FINE: Final = 250
"""Parts of the capacity: an age of so small a part is the first."""

_RHYTHMS: Final = 12
_RHYTHM_STEP: Final = 1.0
_LATEST: Final = 0.3

KINDS: Final = 2 + len(Ending) * 2 * _RHYTHMS

_TABLE: Final = 8
"""Of the tier's chunks, as many are followed: that many of all, or a sample of them."""

_MAX_TABLE: Final = 16_384
_WINDOW: Final = 20
"""In uses of as many chunks as the tier has: after so many, what was learned counts `_DECAY` of its weight."""

_DECAY: Final = 0.9
_FIRST: Final = 32
"""Uses of sampled chunks until values are computed first; then a quarter more each time."""

_SHRINK: Final = 3.0
"""A kind's figures are mixed with as much of those of its ending as this number of requests has, and these with those
of all."""

_EVIDENCE: Final = 1.0
"""An age of which fewer requests' chunks are known has half the value of the age before it."""


class Use(Struct, eq=False):
    """A request's use of a text.

    ending:      of the request; until it has ended that of the use before it.
    rhythm:      mean logarithm of the text's gaps; below 0 if it was used only once.
    is_subagent: another agent of the session made it.
    known: the kind, if it has ended; 0 otherwise.
    """

    ending: int = 0
    rhythm: float = -1.0
    is_subagent: bool = False
    known: int = 0

    def __post_init__(self) -> None:
        self.end(self.ending, is_subagent=self.is_subagent)

    def end(self, ending: int, *, is_subagent: bool) -> None:
        """The request has ended."""
        self.ending, self.is_subagent = ending, is_subagent
        if not ending:
            self.known = 0
            return
        rhythm = 0 if self.rhythm < 0 else min(_RHYTHMS - 1, 1 + int(self.rhythm / _RHYTHM_STEP))
        self.known = 2 + (ending * 2 + is_subagent) * _RHYTHMS + rhythm

    def kind(self, *, is_often: bool) -> int:
        """Of a chunk of this use, from 0 to KINDS."""
        return self.known or int(is_often)


class Uses:
    """What was learned of one tier's uses, and values by it. Bounded: 16,384 followed chunks, 122 kinds of 64 ages."""

    def __init__(self, capacity: int) -> None:
        self._unit = _FINE / max(1, capacity)
        self.mask = 0
        while capacity * _TABLE > _MAX_TABLE * (self.mask + 1):
            self.mask = 2 * self.mask + 1
        self._room = max(64, capacity * _TABLE // (self.mask + 1))
        self._window = (20_000 + _WINDOW * capacity) // (self.mask + 1)
        self._table: OrderedDict[Hashable, tuple[int, Use, bool]] = OrderedDict()
        self._figures: dict[int, _Figures] = {}
        self._values: dict[int, list[float]] = {}
        self._learned, self._next = 0, _FIRST
        self._requests, self._noted = 1, 0

    def began(self) -> None:
        """A request begins to use a text."""
        self._requests += 1

    def knows(self, key: Hashable) -> bool:
        """Whether a chunk is followed: it was used before."""
        return key in self._table

    def forget(self, key: Hashable) -> None:
        """Follow a chunk no more: somebody deleted it."""
        self._table.pop(key, None)

    def note(self, key: Hashable, now: int, use: Use, *, is_often: bool) -> None:
        """A chunk was used, at `now`."""
        if hash(key) & self.mask:
            return
        table = self._table
        before = table.pop(key, None)
        if before is not None:
            at, former, was_often = before
            self._of(former.kind(is_often=was_often)).hits[self.age(now - at)] += 1
        table[key] = (now, use, is_often)
        if len(table) > self._room:
            _, (at, former, was_often) = table.popitem(last=False)
            self._of(former.kind(is_often=was_often)).lost[self.age(now - at)] += 1
        self._noted += 1
        self._learned += 1
        if self._learned >= self._next:
            self._compute(now)

    def rhythm(self, before: Use | None, gap: int) -> float:
        """Of a text that is used again after `gap`."""
        latest = log2(1 + gap * self._unit / 4)
        if before is None or before.rhythm < 0:
            return latest
        return _LATEST * latest + (1 - _LATEST) * before.rhythm

    def age(self, uses: int) -> int:
        """The number of an age, from 0 to AGES."""
        return min(AGES - 1, int(_PER_OCTAVE * log2(1 + uses * self._unit)))

    def value(self, kind: int, uses: int) -> float:
        """What keeping a chunk is worth, in hits per time; uses: since it was used. Falls with time if unknown."""
        found = self._values.get(kind)
        return _unknown(uses * self._unit) if found is None else found[self.age(uses)]

    def check(self) -> None:
        """Raise AssertionError if it has grown beyond its bounds, or has a value that is none."""
        if len(self._table) > self._room or len(self._figures) > KINDS:
            raise AssertionError("more is followed than there is room for")
        if any(len(each) != AGES or min(each) <= 0 for each in self._values.values()):
            raise AssertionError("a value is not positive")

    def values(self) -> Mapping[int, Sequence[float]]:
        """By kind and age, as far as they are known."""
        return self._values

    # -- kept over a restart -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learned, for `restore`."""
        figures = {str(kind): [each.hits, each.lost] for kind, each in self._figures.items()}
        return {"version": 1, "requests": self._requests, "noted": self._noted, "figures": figures}

    def restore(self, state: Any) -> bool:
        """Go on from what was learned; False, and nothing changes, if it is not what `state` gives."""
        try:
            figures = {int(kind): _Figures(*map(_numbers, lists)) for kind, lists in state["figures"].items()}
            requests, noted = int(state["requests"]), int(state["noted"])
            if state["version"] != 1 or requests < 1 or noted < 0 or not all(0 <= kind < KINDS for kind in figures):
                return False
        except (TypeError, ValueError, KeyError, AttributeError):
            return False
        self._figures, self._requests, self._noted = figures, requests, noted
        self._next = self._window
        self._compute(0)
        return True

    # -- inside --------------------------------------------------------------------------------------------------------

    def _of(self, kind: int) -> "_Figures":
        found = self._figures.get(kind)
        if found is None:
            found = self._figures[kind] = _Figures([0.0] * AGES, [0.0] * AGES)
        return found

    def _compute(self, now: int) -> None:
        """New values of all kinds. Costs milliseconds at most, and comes rarely."""
        own = {kind: each.copy() for kind, each in self._figures.items()}
        for at, use, is_often in self._table.values():
            kind = use.kind(is_often=is_often)
            own.setdefault(kind, _Figures([0.0] * AGES, [0.0] * AGES)).lost[self.age(now - at)] += 1
        weight = self._noted / self._requests
        every = _Figures([0.0] * AGES, [0.0] * AGES)
        groups: dict[int, _Figures] = {}
        for kind, each in own.items():
            every.add(each)
            groups.setdefault(_group(kind), _Figures([0.0] * AGES, [0.0] * AGES)).add(each)
        widths = [self._width(age) for age in range(AGES)]
        known = every.known(_EVIDENCE * weight)
        of_all = every.hazards([0.0] * AGES, 0.0)
        of_groups = {group: each.hazards(of_all, _SHRINK * weight) for group, each in groups.items()}
        for kind, each in own.items():
            hazards = of_groups[_group(kind)]
            if kind > 1:
                hazards = each.hazards(hazards, _SHRINK * weight)
            self._values[kind] = _indices(hazards, widths, known)
        self._learned = 0
        if self._next < self._window:
            self._next = min(max(_FIRST, self._noted // 4), self._window)
        else:
            for each in self._figures.values():
                each.scale(_DECAY)

    def _width(self, age: int) -> float:
        return float(2 ** ((age + 1) / _PER_OCTAVE) - 2 ** (age / _PER_OCTAVE)) / 4


class KnownUses(Uses):
    """What another has learned, at the ages of a smaller tier."""

    def __init__(self, whole: Uses, capacity: int) -> None:
        super().__init__(capacity)
        self._whole = whole
        self._values = whole._values

    def began(self) -> None: ...

    def knows(self, key: Hashable) -> bool:
        return self._whole.knows(key)

    def forget(self, key: Hashable) -> None: ...

    def note(self, key: Hashable, now: int, use: Use, *, is_often: bool) -> None: ...


class _Figures:
    """Of a kind, by age: chunks that were used again, and chunks that were not as far as they were followed."""

    __slots__ = ("hits", "lost")

    def __init__(self, hits: list[float], lost: list[float]) -> None:
        self.hits, self.lost = hits, lost

    def at_risk(self) -> list[float]:
        """How many were followed at each age; one that was lost counts half at its last."""
        found, alive = [0.0] * AGES, 0.0
        for age in range(AGES - 1, -1, -1):
            alive += self.hits[age] + self.lost[age]
            found[age] = alive - self.lost[age] / 2
        return found

    def known(self, evidence: float) -> int:
        """The first age at which fewer than that were followed."""
        return next((age for age, count in enumerate(self.at_risk()) if count < evidence), AGES)

    def hazards(self, others: Sequence[float], weight: float) -> list[float]:
        """The part that was used again, of those that reached each age (Kaplan and Meier).

        others: of kinds that have something in common with this, which count as so many more chunks at each age.
        """
        return [
            (hits + weight * other) / (count + weight) if count + weight > 0 else 0.0
            for hits, count, other in zip(self.hits, self.at_risk(), others, strict=True)
        ]

    def copy(self) -> "_Figures":
        return _Figures(self.hits.copy(), self.lost.copy())

    def add(self, other: "_Figures", part: float = 1.0) -> None:
        self.hits = [own + part * each for own, each in zip(self.hits, other.hits, strict=True)]
        self.lost = [own + part * each for own, each in zip(self.lost, other.lost, strict=True)]

    def scale(self, factor: float) -> None:
        self.hits = [each * factor for each in self.hits]
        self.lost = [each * factor for each in self.lost]


def _group(kind: int) -> int:
    """What kinds of one ending have in common."""
    return kind if kind < 2 else 2 + (kind - 2) // _RHYTHMS


def _unknown(age: float) -> float:
    return 1 / (1 + age / 4)


def _numbers(given: Any) -> list[float]:
    found = [float(each) for each in given]
    if len(found) != AGES or not all(0 <= each < 1e15 for each in found):
        raise ValueError("not the figures of a kind")
    return found


def _indices(hazards: Sequence[float], widths: Sequence[float], known: int) -> list[float]:
    """The Gittins index at each age: the steepest line from there to a later point of hits over time.

    The points from an age on have an upper hull, whose first edge is that line; from the last age backwards it is
    found in one pass. known: ages from here on have half of the value of the one before.
    """
    times, hits, left = [0.0], [0.0], 1.0
    for age in range(known):
        used = left * min(1.0, hazards[age])
        times.append(times[-1] + widths[age] * (left - used / 2))
        hits.append(hits[-1] + used)
        left -= used

    def slope(first: int, second: int) -> float:
        passed = times[second] - times[first]
        return (hits[second] - hits[first]) / passed if passed > 1e-12 else 0.0

    found = [0.0] * AGES
    hull = [known]
    for age in range(known - 1, -1, -1):
        while len(hull) > 1 and slope(age, hull[-1]) <= slope(hull[-1], hull[-2]):
            hull.pop()
        found[age] = slope(age, hull[-1])
        hull.append(age)
    last = 0.0
    for age in range(AGES):
        last = found[age] if age < known and found[age] > 0 else last / 2
        found[age] = last = max(last, 1e-12 / (1 + age))
    return found
