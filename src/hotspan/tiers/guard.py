"""A circuit breaker around a tier: given up while it fails or stalls, opened anew in the background.

    working --faults, stall, late loads--> given up --its I/O has ended, a pause--> opening --> told --> working
                                              ^                                        |          |
                                              +-- could not be opened, fails again ----+----------+

Until it works every look-up is a miss, so that requests run as fast as without the tier. What was invalidated meanwhile
it is told some at a time: for each it may have to look at all that it has.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from hotspan.core.breaker import Breaker, BreakerState
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import HotspanError
from hotspan.core.scopes import Backlog
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.base import Durable, Fault, StorageTier, TierUsage, Transfer
from hotspan.tiers.check import FrameCheck

logger = logging.getLogger(__name__)

MAX_FAULTS = 3
"""I/O faults in a row, or requests in a row that gave up waiting, after which a tier is given up."""

STALL_S = 1.0
"""How long nothing of what is in flight may end, besides the time that the least rate takes for it."""

_LEAST_BYTES_PER_S, _AT_ONCE = 25_000_000, 4
"""Chunks that a tier begins together end together: none of four large ones for long, over a link that is only slow."""

_TIMELY_S = 0.050
_MAX_JOINS = 1 << 16
_MAX_UNTOLD = {Tier.DISK: 16, Tier.L2: 1 << 10}
"""Scopes of one tenant that are remembered while a tier is given up; with more, all of the tenant is invalidated. On a
disk each looks at all that the tenant has."""

_TOLD_AT_ONCE = 8
_STEADY_S = 30.0
"""After so long without trouble, the next pause is the first again."""


class OpenTier(StorageTier, Protocol):
    """A tier that can be given up: jobs that have not begun are reported as dropped."""

    def give_up(self) -> None: ...


@runtime_checkable
class VerifiableTier(Protocol):
    """A tier that can check all it has."""

    def verification(self) -> FrameCheck: ...


class GuardedTier:
    """A StorageTier that is never in the way.

    open_tier: makes the tier; called here with False, and with True on a thread of its own to open it again.
    Raises:    from the constructor only, what `open_tier` raises.
    """

    def __init__(self, open_tier: Callable[[bool], OpenTier], clock: Clock | None = None) -> None:
        self._open_tier = open_tier
        self._clock = clock or SystemClock()
        self._current: OpenTier = open_tier(False)
        self.tier: Tier = self._current.tier
        self.trips = 0
        self._is_up = True
        self._flying = 0
        self._moved_s = 0.0  # when something in flight last ended, or the first went off
        self._stall_s = STALL_S
        self._breaker = Breaker(self._clock, MAX_FAULTS, steady_s=_STEADY_S)
        self._lates = 0
        self._opening: threading.Thread | None = None
        self._opened: OpenTier | None = None
        self._missed = Backlog(_MAX_UNTOLD[self.tier])  # what was invalidated while it was given up
        self._untold: deque[Scope] | None = None  # of that, while it is told
        self._unlogged: dict[int, Sequence[Scope]] = {}  # what it was told, and is not durable yet
        self._logged_s = 0.0  # when one of those was last durable, or the first was told
        self._log_failed = False
        self._released: list[ChunkKey] = []  # by what was given up
        self._joins: dict[ChunkKey, Terms] = {}  # while it was given up
        self._told = 0
        self._closed = False

    @property
    def is_up(self) -> bool:
        """Whether the tier takes part."""
        return self._is_up

    def verification(self) -> FrameCheck | None:
        """A check of all that is stored (tiers/check.py); None while the tier is given up, or for one that has none."""
        return self._current.verification() if self._is_up and isinstance(self._current, VerifiableTier) else None

    @property
    def asking(self) -> int:
        return self._current.asking if self._is_up else 0

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        if self._is_up:
            self._current.ask(chunks, tenant)

    def is_asking(self, key: ChunkKey) -> bool:
        return self._is_up and self._current.is_asking(key)

    def lookup(self, key: ChunkKey) -> bool:
        return self._is_up and self._current.lookup(key)

    def terms(self, key: ChunkKey) -> Terms:
        return self._current.terms(key)

    def can_store(self) -> bool:
        return self._is_up and self._current.can_store()

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        return self._is_up and self._current.holds_back(key, terms)

    def released(self) -> list[ChunkKey]:
        released, self._released = self._released, []
        return released + ([] if self._opening is not None else self._current.released())

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        return self._is_up and self._took_off(self._current.submit_store(chunk, terms, payload), len(payload))

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        return self._is_up and self._took_off(self._current.submit_load(key, into), len(into))

    def finished(self) -> list[Transfer]:
        transfers = [] if self._opening is not None else self._current.finished()
        now = self._clock.monotonic()
        if transfers:
            self._flying -= len(transfers)
            self._moved_s = now
            for transfer in transfers:
                self._judge(transfer)
        if not self._is_up:
            self._heal(now)
        elif self._breaker.state is not BreakerState.CLOSED:
            self._trip("faults")
        elif self._lates >= MAX_FAULTS:
            self._trip("late")
        elif self._log_failed:
            self._trip("log")
        elif (self._flying and now - self._moved_s > self._stall_s) or self._is_log_late(now):
            self._trip("stall")
        return transfers

    def late(self) -> None:
        self._lates += 1

    def wait(self, timeout_s: float) -> bool:
        return self._current.wait(timeout_s)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        if self._is_up:
            self._current.touch(keys)

    def join(self, key: ChunkKey, terms: Terms) -> None:
        """As StorageTier says; while the tier is given up it may still hold the chunk, and is told when it is back."""
        if self._is_up:
            self._current.join(key, terms)
        elif not (terms.labels or terms.expires_s or terms.is_wild):
            return  # they add nothing to any other
        elif len(self._joins) < _MAX_JOINS or key in self._joins:
            self._joins[key] = self._joins[key].joined(terms) if key in self._joins else terms
        else:  # who hit what is too much to remember: nothing may stay of the tenant that has most of it
            ((tenant, _),) = Counter(each.tenant for each in [*self._joins.values(), terms]).most_common(1)
            self._missed.add([Scope(tenant=tenant)])
            self._joins = {name: each for name, each in self._joins.items() if each.tenant != tenant}
            if terms.tenant != tenant:
                self._joins[key] = terms

    def discard(self, key: ChunkKey) -> None:
        if self._is_up:
            self._current.discard(key)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        """As StorageTier says; what could not be made durable is done again when the tier comes back."""
        if self._is_up:
            return self._tell(scopes, durable)
        self._missed.add(scopes)
        durable(False)
        return 0

    def usage(self) -> TierUsage:
        if self._is_up:
            return self._current.usage()
        return TierUsage(0, 0, 0, 0, {}, is_up=False)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        if self._opening is not None:
            self._opening.join(timeout_s)
            if self._opened is not None:
                self._opened.close(max(0.0, deadline - time.monotonic()))
                return
        self._current.close(max(0.0, deadline - time.monotonic()))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _took_off(self, submitted: bool, size: int) -> bool:
        if submitted:
            self._stall_s = STALL_S + _AT_ONCE * size / _LEAST_BYTES_PER_S
            if not self._flying:
                self._moved_s = self._clock.monotonic()
            self._flying += 1
        return submitted

    def _judge(self, transfer: Transfer) -> None:
        if not self._is_up:
            return
        if transfer.fault is Fault.IO:
            self._breaker.failed()
        elif transfer.fault is None:
            self._breaker.succeeded()
            if transfer.is_load and transfer.seconds < _TIMELY_S:
                self._lates = 0

    def _trip(self, reason: str) -> None:
        if self._breaker.state is not BreakerState.OPEN:
            self._breaker.open()
        self._missed.add(self._untold or ())
        self._is_up, self._untold = False, None
        self.trips += 1
        logger.warning("tier_given_up tier=%s reason=%s pause_s=%g", self.tier.value, reason, self._breaker.pause_s)
        self._current.give_up()
        self._released += self._current.released()

    def _heal(self, now: float) -> None:
        """Open the tier anew once all its I/O has ended and the pause is over; tell it what it missed, and take it."""
        if self._opened is not None:
            self._current, self._opened, self._opening = self._opened, None, None
            self._flying = self._lates = 0
            self._log_failed = False
            for scopes in list(self._unlogged.values()):
                self._missed.add(scopes)  # what the former one still does is done anew
            self._unlogged.clear()
            self._untold = deque()
            self._catch_up(now, self._untold)
        elif self._untold is not None:
            self._catch_up(now, self._untold)
        elif self._opening is None and not self._flying and self._breaker.can_take and not self._closed:
            self._opening = threading.Thread(target=self._reopen, name=f"hotspan-{self.tier.value}-open", daemon=True)
            self._opening.start()
        elif self._opening is not None and not self._opening.is_alive() and self._opened is None:
            self._opening = None
            self._breaker.failed()

    def _catch_up(self, now: float, untold: deque[Scope]) -> None:
        """Tell it some of what it missed; it works when nothing of that is left."""
        if self._log_failed or self._is_log_late(now):
            self._trip("log" if self._log_failed else "stall")
            return
        for key, terms in self._joins.items():  # before what came after them: it takes what they joined
            self._current.join(key, terms)
        self._joins.clear()
        untold.extend(self._missed.take())
        if untold:
            some = [untold.popleft() for _ in range(min(_TOLD_AT_ONCE, len(untold)))]
            self._tell(some, lambda done: None)
        if untold or self._unlogged:
            return
        self._is_up, self._untold = True, None
        self._breaker.succeeded()
        logger.warning("tier_is_back tier=%s", self.tier.value)

    def _tell(self, scopes: Sequence[Scope], durable: Durable) -> int:
        """Let the tier invalidate; what it can't make durable, it is told again when it comes back."""
        self._told += 1
        number = self._told
        if not self._unlogged:
            self._logged_s = self._clock.monotonic()
        self._unlogged[number] = scopes

        def logged(done: bool) -> None:  # from any thread
            if done:
                self._logged_s = self._clock.monotonic()
                self._unlogged.pop(number, None)
            else:
                self._log_failed = True  # the tier's log takes no other
            durable(done)

        return self._current.invalidate(scopes, logged)

    def _is_log_late(self, now: float) -> bool:
        """Whether the log stands still: however long it has to do, it finishes one thing after the other."""
        return bool(self._unlogged) and now - self._logged_s > STALL_S

    def _reopen(self) -> None:
        """On its own thread: the old tier lets go of its files, a new one takes them."""
        try:
            self._current.close(1.0)
            self._opened = self._open_tier(True)
        except (HotspanError, OSError) as error:
            logger.warning("tier_not_back tier=%s error=%s", self.tier.value, error)
