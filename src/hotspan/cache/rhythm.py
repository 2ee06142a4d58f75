"""When the next turn of a session is likely, and whether bringing its text into RAM before it pays.

    turn ends --the gap to the next is likely between these--> from ... to
                     announced (LEAD_S before) |<------- held ------->|  (GRACE_S after)

A session is predicted by its own last gaps, or, while it has few, by those of all sessions of its tenant. A wide
prediction is dropped, since text would be held in RAM for long. Half of what a tenant's predictions announce must be
used; if that is certainly not so, they pause, those by own gaps and those by the tenant's apart.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hotspan.cache.stats import CacheStats
from hotspan.core.clock import Clock
from hotspan.core.expiries import Expiries
from hotspan.core.statistics import at_most
from hotspan.core.types import Chunk

logger = logging.getLogger(__name__)

LEAD_S, GRACE_S = 2.0, 2.0
"""A text is announced so long before its turn may come, and held so long after it may."""

MAX_HOLD_S = 30.0
"""Predictions for which text would be held longer are none."""

OWN_GAPS, TENANT_GAPS = 3, 16
"""How many gaps a prediction needs, of a session and of a tenant."""

_OWN_MEMORY, _TENANT_MEMORY = 8, 64
"""So many of the last gaps count."""

_TRIMMED = 8
"""One in so many gaps, at each end, is left out as an exception."""

MAX_GAP_S = 3600.0
"""Longer gaps are ends of sessions."""

MIN_USED = 0.5
"""The share of announcements that must be used."""

LEAST = 10
"""Announcements before that is judged."""

_MEMORY = 50
"""So many of the last announcements count."""

PAUSE_S = 600.0
"""For how long nothing is announced if too few were used. Then it is tried anew."""

MAX_SESSIONS, MAX_TENANTS, MAX_CHUNKS = 4096, 256, 1 << 17
"""That are remembered, with the chunks of all sessions (about 20 MB). The tenant that has most forgets its least recent
session first: one that has no more than its part loses none to others."""


class SessionId(NamedTuple):
    """Labels of a tenant and of one of its sessions."""

    tenant: int
    session: int


class Source(NamedTuple):
    """What a prediction was made from: a tenant's sessions' own gaps, or those of all its sessions."""

    tenant: int
    is_own: bool


class Turn(NamedTuple):
    """A turn that is likely near. chunks: of the session's text, each behind its parent."""

    source: Source
    chunks: Sequence[Chunk]
    hold_s: float


@dataclass(slots=True, eq=False)
class _Session:
    """running: its requests that have not ended. due_s: when its next turn is to be announced; None if it is not."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_OWN_MEMORY))
    running: int = 0
    ended_s: float | None = None
    due_s: float | None = None
    until_s: float = 0.0
    source: Source | None = None
    chunks: Sequence[Chunk] = ()


@dataclass(slots=True, eq=False)
class _Payoff:
    """Whether what was announced from one source was used."""

    used: deque[bool] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    off_until_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Tenant:
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_TENANT_MEMORY))
    own: _Payoff = field(default_factory=_Payoff)
    pooled: _Payoff = field(default_factory=_Payoff)

    def payoff(self, source: Source) -> _Payoff:
        return self.own if source.is_own else self.pooled


class Rhythm:
    """The sessions of one engine. The cache's thread calls it; `next_s` may be read by others.

    on_due: called when `next_s` may be earlier than before.
    """

    def __init__(self, clock: Clock, stats: CacheStats) -> None:
        self.on_due: Callable[[], None] = _ignored
        self._clock = clock
        self._stats = stats
        self._sessions: dict[int, OrderedDict[SessionId, _Session]] = {}  # by tenant; the least recent first
        self._tenants: OrderedDict[int, _Tenant] = OrderedDict()
        self._due = Expiries(self._pending)
        self._count = 0  # of all sessions
        self._chunks: Counter[int] = Counter()  # by tenant
        self._all_chunks = 0

    # -- learnt --------------------------------------------------------------------------------------------------------

    def arrive(self, known: SessionId) -> None:
        """A request of a session comes."""
        session, tenant = self._session(known), self._tenant(known.tenant)
        if session.running == 0 and session.ended_s is not None:
            gap_s = self._clock.monotonic() - session.ended_s
            if gap_s <= MAX_GAP_S:
                session.gaps.append(gap_s)
                tenant.gaps.append(gap_s)
        session.running += 1
        self._cancel(known, session)

    def end(self, known: SessionId, chunks: Iterable[Chunk]) -> None:
        """A request of a session has ended. chunks: of all its text, each behind its parent."""
        session = self._found(known)
        if session is None:
            return
        session.running = max(0, session.running - 1)
        if session.running:
            return
        self._cancel(known, session)  # of a session that was forgotten, and came again, more requests end than began
        session.ended_s = now_s = self._clock.monotonic()
        tenant = self._tenant(known.tenant)
        source = Source(known.tenant, len(session.gaps) >= OWN_GAPS)
        span = _likely(session.gaps if source.is_own else tenant.gaps, OWN_GAPS if source.is_own else TENANT_GAPS)
        if span is None:
            return
        due_s, until_s = now_s + max(0.0, span[0] - LEAD_S), now_s + span[1] + GRACE_S
        if until_s - due_s <= MAX_HOLD_S:
            session.due_s, session.until_s, session.source = due_s, until_s, source
            session.chunks = tuple(chunks)
            self._count_chunks(known.tenant, len(session.chunks))
            self._due.note(due_s, known, self._count)
            self._forget_oldest()
            self.on_due()

    # -- predicted -----------------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float | None:
        """When `due` has something, at the earliest (monotonic); None if it has nothing."""
        return self._due.next_s

    def due(self) -> Iterator[Turn]:
        """The turns that are to be announced now; each once."""
        now_s = self._clock.monotonic()
        for known in self._due.due(now_s):
            session = self._found(known)
            if session is None or session.due_s is None or session.source is None or session.due_s > now_s:
                continue  # its turn has come, or is due later
            turn = Turn(session.source, session.chunks, session.until_s - now_s)
            self._cancel(known, session)
            if turn.hold_s > 0 and now_s >= self._tenant(known.tenant).payoff(turn.source).off_until_s:
                yield turn

    def note(self, source: Source, used: int, unused: int) -> None:
        """An announcement has ended: so many of its chunks were used, or not, by then. Without any, it says nothing."""
        if not used + unused:
            return
        is_used, now_s = used >= unused, self._clock.monotonic()
        self._stats.turns["used" if is_used else "unused"] += 1
        payoff = self._tenant(source.tenant).payoff(source)
        if now_s < payoff.off_until_s:
            return
        payoff.used.append(is_used)
        if len(payoff.used) >= LEAST and at_most(sum(payoff.used), len(payoff.used)) < MIN_USED:
            payoff.off_until_s = now_s + PAUSE_S
            self._stats.turns["paused"] += 1
            logger.warning(
                "session_prefetch_paused tenant=%016x own_gaps=%s used=%d announced=%d pause_s=%g",
                source.tenant,
                source.is_own,
                sum(payoff.used),
                len(payoff.used),
                PAUSE_S,
            )
            payoff.used.clear()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree, or are too long."""
        counts = {tenant: sum(len(each.chunks) for each in own.values()) for tenant, own in self._sessions.items()}
        if +Counter(counts) != +self._chunks or self._all_chunks != sum(counts.values()):
            raise AssertionError("chunks are counted that no session has")
        if self._count != sum(map(len, self._sessions.values())) or not all(self._sessions.values()):
            raise AssertionError("sessions are counted that there are not")
        if self._count > MAX_SESSIONS or len(self._tenants) > MAX_TENANTS or self._all_chunks > MAX_CHUNKS:
            raise AssertionError("more is remembered than may be")
        if len(self._due) > 2 * MAX_SESSIONS + 65:
            raise AssertionError("turns that are due no more are noted still")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _found(self, known: SessionId) -> _Session | None:
        own = self._sessions.get(known.tenant)
        return None if own is None else own.get(known)

    def _session(self, known: SessionId) -> _Session:
        own = self._sessions.setdefault(known.tenant, OrderedDict())
        if known not in own:
            self._count += 1
            own[known] = _Session()
        own.move_to_end(known)
        session = own[known]
        self._forget_oldest()
        return session

    def _tenant(self, label: int) -> _Tenant:
        tenant = self._tenants.setdefault(label, _Tenant())
        self._tenants.move_to_end(label)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return tenant

    def _forget_oldest(self) -> None:
        """Of the tenant that has most: of its sessions, or of their chunks, whichever are too many."""
        while self._count > MAX_SESSIONS:
            tenant = max(self._sessions, key=lambda each: len(self._sessions[each]))
            known, oldest = self._sessions[tenant].popitem(last=False)
            if not self._sessions[tenant]:
                del self._sessions[tenant]
            self._count -= 1
            self._cancel(known, oldest)
        while self._all_chunks > MAX_CHUNKS:
            tenant = max(self._chunks, key=self._chunks.__getitem__)
            known = next(each for each, session in self._sessions[tenant].items() if session.chunks)
            self._cancel(known, self._sessions[tenant][known])

    def _cancel(self, known: SessionId, session: _Session) -> None:
        """Its next turn is not announced."""
        self._count_chunks(known.tenant, -len(session.chunks))
        session.due_s, session.chunks = None, ()

    def _count_chunks(self, tenant: int, more: int) -> None:
        self._all_chunks += more
        self._chunks[tenant] += more
        if not self._chunks[tenant]:
            del self._chunks[tenant]

    def _pending(self) -> Iterable[tuple[float, SessionId]]:
        sessions = (each for own in self._sessions.values() for each in own.items())
        return [(session.due_s, known) for known, session in sessions if session.due_s is not None]


def _ignored() -> None:
    return


def _likely(gaps: Sequence[float], at_least: int) -> tuple[float, float] | None:
    """Between which times the next gap is likely to end, in seconds; None with fewer than `at_least`.

    The range of the gaps without exceptions, wider by half of it at each end: of three gaps, the next lies within the
    range itself in half of all cases.
    """
    if len(gaps) < at_least:
        return None
    ordered, trimmed = sorted(gaps), len(gaps) // _TRIMMED
    first, last = ordered[trimmed], ordered[-1 - trimmed]
    return first - (last - first) / 2, last + (last - first) / 2
