"""One tier below RAM, with a circuit breaker: given up while it fails or stalls, opened again in the background.

    working --faults, stall, late loads--> given up --its I/O has ended, a pause--> opening --> catching up --> working
                                              ^                                        |             |
                                              +-- could not be opened, fails again ----+-------------+

Until the tier works again, every look-up is a miss, so that requests run as fast as without it. To catch up, it gets
the invalidations that it missed, a few at a time: each may have to look at all of its chunks.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hotspan.core.breaker import Breaker, BreakerState
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import HotspanError
from hotspan.core.scopes import Backlog
from hotspan.core.terms import Scope, Terms
from hotspan.core.threads import start
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.base import Durable, Fault, Losses, StorageTier, TierUsage, Transfer
from hotspan.tiers.places import SLOW_S, slow_s

logger = logging.getLogger(__name__)

MAX_FAULTS = 3
"""I/O faults in a row, or requests in a row that gave up waiting, after which a tier is given up."""

STALL_S = SLOW_S
"""How long nothing of what is in flight may end, besides the time that the least rate takes for it."""

LOG_STALL_S = 8.0
"""How long the log may take for one entry. Requests do not wait for it, but receipts do: a client gets its receipt
within 10 s (server/admin.py), and a disk that others write to syncs in seconds."""

_TIMELY_S = 0.050
_MAX_JOINS = 1 << 16
_MAX_MISSED = {Tier.DISK: 16, Tier.L2: 1 << 10}
"""Scopes of one tenant that are remembered while a tier is given up; with more, all of the tenant is invalidated. On a
disk each looks at all that the tenant has."""

_SCOPES_AT_ONCE = 8
_STEADY_S = 30.0
"""After so long without trouble, the next pause is the first again."""


class LowerTier:
    """One tier below RAM, and whether it works.

    open_tier: makes the tier; called here with False, and with True on a thread of its own to open it again.
    storage:   the tier as it was opened last. is_up: whether it takes part. trips: how often it was given up.
    Raises:    from the constructor only, what `open_tier` raises.
    """

    def __init__(self, open_tier: Callable[[bool], StorageTier], clock: Clock | None = None) -> None:
        self._open_tier = open_tier
        self._clock = clock or SystemClock()
        self.storage = open_tier(False)
        self.tier: Tier = self.storage.tier
        self.trips = 0
        self.is_up = True
        self._trusted: set[ChunkKey] | None = None  # what alone may be found; None for all
        self._in_flight = 0
        self._moved_s = 0.0  # when something in flight last ended, or the first went off
        self._stall_s = STALL_S
        self._breaker = Breaker(self._clock, MAX_FAULTS, steady_s=_STEADY_S)
        self._lates = 0
        self._opening: threading.Thread | None = None
        self._opened: StorageTier | None = None
        self._missed = Backlog(_MAX_MISSED[self.tier])  # what was invalidated while it was given up
        self._catching_up: deque[Scope] | None = None  # those of them that it has not got yet
        self._unlogged: dict[int, Sequence[Scope]] = {}  # invalidations that are not durable yet
        self._logged_s = 0.0  # when one of those became durable, or the first came
        self._log_failed = False
        self._released: list[ChunkKey] = []  # by what was given up
        self._joins: dict[ChunkKey, Terms] = {}  # while it was given up
        self._entries = 0
        self._losses, self._reported = Losses(), Losses()  # of the tiers before this one, and what was told of this one
        self._closed = False
        self._namespace: bytes | None = None  # another than that with which `open_tier` opens it

    @property
    def working(self) -> StorageTier | None:
        """The tier, or None while it is given up."""
        return self.storage if self.is_up else None

    def lookup(self, key: ChunkKey) -> bool:
        """Whether the tier works and has a chunk that may be found."""
        is_trusted = self._trusted is None or key in self._trusted
        return self.is_up and is_trusted and self.storage.lookup(key)

    def distrust(self) -> None:
        """Until `trust`, let nothing be found but what is stored from now on: of the rest some may be invalidated."""
        self._trusted = set()

    def trust(self) -> None:
        """It has been told of all invalidations: what it has may be found."""
        self._trusted = None

    def released(self) -> list[ChunkKey]:
        """As StorageTier says; a tier that is given up holds nothing back."""
        released, self._released = self._released, []
        if self._opening is None:
            released += self.storage.released()
        return released

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        """As StorageTier says."""
        taken = self.is_up and self._note_submitted(self.storage.submit_store(chunk, terms, payload), len(payload))
        if taken and self._trusted is not None:
            self._trusted.add(chunk.key)
        return taken

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        """As StorageTier says."""
        return self.is_up and self._note_submitted(self.storage.submit_load(key, into), len(into))

    def finished(self) -> list[Transfer]:
        """As StorageTier says; here the tier is given up, opened and taken again."""
        transfers = [] if self._opening is not None else self.storage.finished()
        now = self._clock.monotonic()
        if transfers:
            self._in_flight -= len(transfers)
            self._moved_s = now
            for transfer in transfers:
                self._judge(transfer)
        if not self.is_up:
            self._heal(now)
        elif self._breaker.state is not BreakerState.CLOSED:
            self._trip("faults")
        elif self._lates >= MAX_FAULTS:
            self._trip("late")
        elif self._log_failed:
            self._trip("log")
        elif (self._in_flight and now - self._moved_s > self._stall_s) or self._is_log_late(now):
            self._trip("stall")
        return transfers

    def take_losses(self) -> Losses:
        """What it gave up by itself since the last call, whether or not it was opened again meanwhile."""
        losses, self._losses = self._losses, Losses()
        losses.add(self.storage.losses.since(self._reported))
        self._reported = replace(self.storage.losses)
        return losses

    def wait(self, timeout_s: float) -> bool:
        """As StorageTier says."""
        return self.storage.wait(timeout_s)

    def late(self, since_s: float) -> None:
        """A request gave up waiting for this tier, for which it had waited since then (monotonic).

        It counts only if no transfer ended meanwhile: of a tier that is only slow, or busy, the cost model knows.
        """
        if self._moved_s <= since_s:
            self._lates += 1

    def join(self, key: ChunkKey, terms: Terms) -> None:
        """As StorageTier says; while the tier is given up it may still hold the chunk, and gets it when it is back."""
        if self.is_up:
            self.storage.join(key, terms)
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

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        """As StorageTier says; what could not be made durable is done again when the tier comes back."""
        if self.is_up:
            return self._invalidate(scopes, durable)
        self._missed.add(scopes)
        durable(False)
        return 0

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        """As StorageTier says; a tier that is being opened gets the name when it is back."""
        self._namespace = namespace
        if self._opening is None:
            self.storage.rename(namespace, forget=forget)

    def usage(self) -> TierUsage:
        """How full it is; empty while it is given up."""
        if self.is_up:
            return self.storage.usage()
        return TierUsage(0, 0, 0, 0, {}, is_up=False)

    def close(self, timeout_s: float) -> None:
        """As StorageTier says; also while it is given up or being opened."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        if self._opening is not None:
            self._opening.join(timeout_s)
            if self._opened is not None:
                self._opened.close(max(0.0, deadline - time.monotonic()))
                return
        self.storage.close(max(0.0, deadline - time.monotonic()))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _note_submitted(self, submitted: bool, size: int) -> bool:
        if submitted:
            self._stall_s = slow_s(size)
            if not self._in_flight:
                self._moved_s = self._clock.monotonic()
            self._in_flight += 1
        return submitted

    def _judge(self, transfer: Transfer) -> None:
        if not self.is_up:
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
        self._missed.add(self._catching_up or ())
        self.is_up, self._catching_up = False, None
        self.trips += 1
        logger.warning("tier_given_up tier=%s reason=%s pause_s=%g", self.tier.value, reason, self._breaker.pause_s)
        self.storage.give_up()
        self._released += self.storage.released()

    def _heal(self, now: float) -> None:
        """Open the tier anew once all its I/O has ended and the pause is over; tell it what it missed, and take it."""
        if self._opened is not None:
            self._losses, self._reported = self.take_losses(), Losses()
            self.storage, self._opened, self._opening = self._opened, None, None
            if self._namespace is not None:
                self.storage.rename(self._namespace, forget=False)
            self._in_flight = self._lates = 0
            self._log_failed = False
            for scopes in list(self._unlogged.values()):
                self._missed.add(scopes)  # what the former one still does is done anew
            self._unlogged.clear()
            self._catching_up = deque()
            self._catch_up(now, self._catching_up)
        elif self._catching_up is not None:
            self._catch_up(now, self._catching_up)
        elif self._opening is None and self._is_idle(now) and self._breaker.can_take and not self._closed:
            self._opening = start(f"{self.tier.value}-open", self._reopen)
        elif self._opening is not None and not self._opening.is_alive() and self._opened is None:
            self._opening = None
            self._breaker.failed()

    def _catch_up(self, now: float, scopes: deque[Scope]) -> None:
        """Tell it some of what it missed; it works when nothing of that is left."""
        if self._log_failed or self._is_log_late(now):
            self._trip("log" if self._log_failed else "stall")
            return
        for key, terms in self._joins.items():  # before what came after them: it takes what they joined
            self.storage.join(key, terms)
        self._joins.clear()
        scopes.extend(self._missed.take())
        if scopes:
            some = [scopes.popleft() for _ in range(min(_SCOPES_AT_ONCE, len(scopes)))]
            self._invalidate(some, lambda done: None)
        if scopes or self._unlogged:
            return
        self.is_up, self._catching_up = True, None
        self._breaker.succeeded()
        logger.warning("tier_is_back tier=%s", self.tier.value)

    def _invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        """Let the tier invalidate; what it can't make durable, it is told again when it comes back."""
        self._entries += 1
        number = self._entries
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

        return self.storage.invalidate(scopes, logged)

    def _is_log_late(self, now: float) -> bool:
        """Whether the log stands still: however long it has to do, it finishes one thing after the other."""
        return bool(self._unlogged) and now - self._logged_s > LOG_STALL_S

    def _is_idle(self, now: float) -> bool:
        """Whether nothing that was submitted is still to end: transfers, and entries of a log that goes on."""
        return not self._in_flight and (not self._unlogged or self._log_failed or self._is_log_late(now))

    def _reopen(self) -> None:
        """On its own thread: the old tier lets go of its files, a new one takes them."""
        try:
            self.storage.close(1.0)
            self._opened = self._open_tier(True)
        except (HotspanError, OSError) as error:
            logger.warning("tier_not_back tier=%s error=%s", self.tier.value, error)
