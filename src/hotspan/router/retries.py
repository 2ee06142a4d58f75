"""How many requests may be sent again: a budget with a part for each owner.

request of an owner --share--> its own part --what is too much for it--> what is left for all
                                    |                                        |
retry <------------------------ first from there --------------------- then from there
"""

from collections import OrderedDict
from dataclasses import dataclass

from hotspan.core.clock import Clock

_FILLS_S = 60.0
"""Time in which the reserve fills up, and after which an owner without requests is forgotten: its part is full."""

_MAX_OWNERS = 1024


@dataclass(slots=True)
class _Part:
    """left: retries. at_s: when that was so."""

    left: float
    at_s: float


class RetryBudget:
    """Retries for a part of all requests, and a reserve for a replica that dies with many.

    Half of the reserve is divided between the owners of the last minute, the other half goes to whoever needs it first:
    one owner alone has all of it, and none can use what others may need. An owner that comes finds a part of its own
    even if others have used all; so in one minute up to half of the reserve more may be used, or somewhat more where
    many owners come one after the other.

    share:   retries for each request. reserve: at most so many at once; it fills up again by itself in a minute.
    """

    def __init__(self, share: float, reserve: float, clock: Clock) -> None:
        self._share = share
        self._half = max(reserve, 1.0) / 2
        self._clock = clock
        self._first = reserve / 2
        self._all = _Part(self._first, clock.monotonic())
        self._parts: OrderedDict[str, _Part] = OrderedDict()

    def left(self, owner: str = "") -> float:
        """Retries that an owner may make now."""
        return self._filled(owner).left + self._all.left

    def asked(self, owner: str = "") -> None:
        """A request of an owner came."""
        part = self._filled(owner)
        part.left += self._share
        if (excess := part.left - self._own) > 0:
            part.left -= excess
            self._all.left = min(self._half, self._all.left + excess)

    def spend(self, owner: str = "") -> bool:
        """Whether an owner may make a retry; if so, it is counted."""
        if self.left(owner) < 1:
            return False
        part = self._parts[owner]
        taken = min(part.left, 1.0)
        part.left -= taken
        self._all.left -= 1.0 - taken
        return True

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> float:
        """The size of one owner's part: enough for one retry, however many owners there are."""
        return max(1.0, self._half / max(1, len(self._parts)))

    def _filled(self, owner: str) -> _Part:
        """An owner's part, as full as it is now; so is what is left for all. Mutates: the order of owners."""
        now_s = self._clock.monotonic()
        self._all.left = min(self._half, self._all.left + (now_s - self._all.at_s) * self._half / _FILLS_S)
        self._all.at_s = now_s
        part = self._parts.get(owner)
        if part is None:
            self._forget(now_s)
            part = self._parts[owner] = _Part(self._first / (len(self._parts) + 1), now_s)
        rate = self._half / len(self._parts) / _FILLS_S
        part.left = min(self._own, part.left + (now_s - part.at_s) * rate)
        part.at_s = now_s
        self._parts.move_to_end(owner)
        return part

    def _forget(self, now_s: float) -> None:
        """Make room for an owner: those go that had no request for a minute, or the one whose last is longest ago."""
        while self._parts:
            oldest = next(iter(self._parts))
            if len(self._parts) < _MAX_OWNERS and now_s - self._parts[oldest].at_s < _FILLS_S:
                return
            del self._parts[oldest]
