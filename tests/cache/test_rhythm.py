"""Next turns of sessions are announced by their rhythm, within bounds, and not where that does not pay."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.cache import rhythm as module
from hotspan.cache.rhythm import (
    GRACE_S,
    LEAD_S,
    LEAST,
    MAX_GAP_S,
    MAX_HOLD_S,
    OWN_GAPS,
    PAUSE_S,
    TENANT_GAPS,
    Rhythm,
    SessionId,
    Source,
    Turn,
)
from hotspan.cache.stats import CacheStats
from hotspan.core.types import Chunk
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock

TEXT = chain("a", 3)
ONE = SessionId(1, 1)


class Sessions:
    """A rhythm, and sessions that take turns of two seconds."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.stats = CacheStats()
        self.rhythm = Rhythm(self.clock, self.stats)

    def turn(self, session: SessionId = ONE, chunks: list[Chunk] = TEXT) -> None:
        self.rhythm.arrive(session)
        self.clock.advance(2.0)
        self.rhythm.end(session, chunks)
        self.rhythm.check()

    def turns(self, *gaps_s: float, session: SessionId = ONE) -> None:
        """One turn, and one more after each gap; what falls due meanwhile is passed over."""
        self.turn(session)
        for gap_s in gaps_s:
            self.clock.advance(gap_s)
            list(self.rhythm.due())
            self.turn(session)

    def after(self, gap_s: float) -> list[Turn]:
        """What is due when so much time has passed."""
        self.clock.advance(gap_s)
        return list(self.rhythm.due())


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    made = Sessions()
    yield made
    made.rhythm.check()


def test_a_regular_session_is_announced_shortly_before_its_next_turn(sessions: Sessions) -> None:
    """Not earlier, once, with its text, until shortly after."""
    sessions.turns(*[20.0] * OWN_GAPS)
    assert not sessions.after(20.0 - LEAD_S - 0.1)
    (turn,) = sessions.after(0.2)
    assert list(turn.chunks) == TEXT and turn.source == (1, True)
    assert turn.hold_s == pytest.approx(LEAD_S + GRACE_S, abs=0.2)
    assert not sessions.after(1.0) and sessions.rhythm.next_s is None


def test_a_session_that_has_come_is_not_announced(sessions: Sessions) -> None:
    """Neither while its turn runs, nor for a turn that came early; the next gap begins with the end of all turns."""
    sessions.turns(*[20.0] * OWN_GAPS)
    sessions.clock.advance(5.0)
    sessions.rhythm.arrive(ONE)
    sessions.rhythm.arrive(ONE)
    sessions.rhythm.end(ONE, TEXT)
    assert not sessions.after(14.0)
    sessions.rhythm.end(ONE, TEXT)
    assert sessions.rhythm.next_s is not None


def test_an_end_without_a_begin_counts_nothing_twice(sessions: Sessions) -> None:
    """Of a session that was forgotten meanwhile an end may come twice: the newer text is to be announced then."""
    sessions.turns(*[20.0] * OWN_GAPS)
    sessions.rhythm.end(ONE, TEXT[:1])
    sessions.rhythm.check()
    (turn,) = sessions.after(20.0)
    assert list(turn.chunks) == TEXT[:1]
    sessions.rhythm.check()


def test_an_exception_among_the_gaps_changes_nothing(sessions: Sessions) -> None:
    """Of the last eight gaps one at each end is left out."""
    sessions.turns(*[20.0] * 6, 1.0, 300.0)
    assert not sessions.after(17.0)
    assert sessions.after(1.5)


def test_a_session_without_a_rhythm_is_not_announced(sessions: Sessions) -> None:
    """Gaps so far apart that text would be held for long predict nothing."""
    sessions.turns(2.0, 25.0, 4.0, 60.0)
    assert sessions.rhythm.next_s is None


def test_a_new_session_is_announced_by_its_tenants_gaps(sessions: Sessions) -> None:
    """Only by those of its own tenant, and only if these are alike."""
    for number in range(TENANT_GAPS):
        sessions.turns(20.0, session=SessionId(1, 100 + number))
    sessions.turn(SessionId(2, 1))
    sessions.turn(SessionId(1, 1))
    turns = sessions.after(19.0)
    assert [turn.source for turn in turns] == [(1, False)]


def test_a_long_pause_is_no_gap(sessions: Sessions) -> None:
    """A session that goes on the next day is predicted by its gaps before."""
    sessions.turns(20.0, 20.0, 20.0, MAX_GAP_S + 1)
    assert sessions.after(19.0)


def test_what_is_late_is_not_announced(sessions: Sessions) -> None:
    """A turn whose time is over when the engine looks is passed over."""
    sessions.turns(*[20.0] * OWN_GAPS)
    assert not sessions.after(20.0 + GRACE_S + 0.1)


def announced(sessions: Sessions, used: int, unused: int, times: int) -> int:
    """How many turns of a regular session are announced, of so many, each with this result."""
    found = 0
    for _ in range(times):
        for turn in sessions.after(19.0):
            found += 1
            sessions.rhythm.note(turn.source, used, unused)
        sessions.clock.advance(1.0)
        sessions.turn()
    return found


def test_it_pauses_where_too_little_is_used(sessions: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    """After ten announcements of which none was used, for a while; counted, and logged once."""
    sessions.turns(*[20.0] * OWN_GAPS)
    assert announced(sessions, 1, 2, 20) == LEAST
    assert sessions.stats.turns == {"unused": LEAST, "paused": 1}
    assert [record.message.split()[0] for record in caplog.records] == ["session_prefetch_paused"]
    for _ in range(LEAST):  # that were under way
        sessions.rhythm.note(Source(1, True), 0, 1)
    assert sessions.stats.turns["paused"] == 1
    sessions.clock.advance(PAUSE_S)
    sessions.turns(20.0, 20.0, 20.0)
    assert announced(sessions, 2, 1, 20) == 20, "tried anew, and it pays now"


def test_what_most_turns_use_goes_on(sessions: Sessions) -> None:
    """One announcement in three for nothing does not end the others; those without any chunk are not counted."""
    sessions.turns(*[20.0] * OWN_GAPS)
    for number in range(60):
        announced(sessions, *((3, 0) if number % 3 else (0, 3)), 1)
        announced(sessions, 0, 0, 1)
    assert sessions.stats.turns == {"used": 40, "unused": 20}


def test_sessions_that_do_not_go_on_end_only_what_is_told_of_new_ones(sessions: Sessions) -> None:
    """Predictions by a tenant's gaps pause; those of its regular sessions, and other tenants', go on."""
    for number in range(TENANT_GAPS):
        sessions.turns(20.0, session=SessionId(1, 100 + number))
    list(sessions.after(100.0))
    for number in range(LEAST):
        sessions.turn(SessionId(1, 1000 + number))
        (turn,) = sessions.after(19.0)
        sessions.rhythm.note(turn.source, 0, 3)
    sessions.turn(SessionId(1, 5000))
    assert not sessions.after(19.0)
    for tenant in (1, 2):
        session = SessionId(tenant, 1)
        sessions.turns(*[20.0] * OWN_GAPS, session=session)
        assert [turn.source for turn in sessions.after(19.0)] == [(tenant, True)]


def test_who_waits_for_the_next_turn_is_woken(sessions: Sessions) -> None:
    """Whenever something falls due that may be earlier than what was due before."""
    woken: list[float | None] = []
    sessions.rhythm.on_due = lambda: woken.append(sessions.rhythm.next_s)
    sessions.turns(*[20.0] * OWN_GAPS)
    assert woken == [pytest.approx(sessions.clock.monotonic() + 20.0 - LEAD_S)]


@pytest.mark.parametrize("bound", [{"MAX_SESSIONS": 8}, {"MAX_TENANTS": 2}, {"MAX_CHUNKS": 20}])
def test_memory_is_bounded(bound: dict[str, int], sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sessions, tenants, chunks and what is due, whoever comes."""
    for name, value in (bound | {"MAX_HOLD_S": 10**9}).items():
        monkeypatch.setattr(module, name, value)
    random, most = Random(1), 0
    for number in range(400):
        tenant = 2 if number % 100 == 99 else number // 200
        sessions.turn(SessionId(tenant, random.randrange(10)), chain(str(number), random.randrange(8)))
        sessions.clock.advance(1.0)
        most = max(most, sessions.rhythm._all_chunks)
    assert most > 10, "nothing was predicted"
    assert len(sessions.rhythm._due) <= 2 * sessions.rhythm._count + 65


def test_the_least_recent_session_is_forgotten_first(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on is known still, however many have come once meanwhile."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 8)
    for number in range(OWN_GAPS):
        sessions.turns(20.0)
        for other in range(7):
            sessions.turn(SessionId(1, 100 * number + other + 2))
        sessions.clock.advance(4.0)
    sessions.turn()
    assert [turn.source.is_own for turn in sessions.after(19.0)] == [True]


@pytest.mark.parametrize("bound", [{"MAX_SESSIONS": 20}, {"MAX_CHUNKS": 60}])
def test_many_sessions_of_one_tenant_cost_another_none(
    bound: dict[str, int], sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant with few sessions and chunks is predicted still after another's thousand sessions have come."""
    for name, value in bound.items():
        monkeypatch.setattr(module, name, value)
    sessions.turns(*[20.0] * OWN_GAPS)
    started_s = sessions.clock.monotonic()
    for number in range(1000):
        known = SessionId(2, number)
        sessions.rhythm.arrive(known)
        sessions.rhythm.end(known, TEXT)
        sessions.rhythm.arrive(known)
        sessions.rhythm.end(known, TEXT)
    sessions.rhythm.check()
    assert sessions.clock.monotonic() == started_s
    turns = [turn for turn in sessions.after(19.0) if turn.source.tenant == ONE.tenant]
    assert [turn.source.is_own for turn in turns] == [True]


def test_sessions_are_known_still_when_their_chunks_are_too_many(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest that have any give them up, and their gaps are not forgotten."""
    monkeypatch.setattr(module, "MAX_CHUNKS", 2 * len(TEXT))
    for number in range(30):
        for _ in range(2):
            sessions.rhythm.arrive(SessionId(2, number))
            sessions.rhythm.end(SessionId(2, number), TEXT)
    sessions.rhythm.check()
    kept = sessions.rhythm._sessions[2]
    assert len(kept) == 30 and all(each.gaps for each in kept.values())
    assert [known.session for known, each in kept.items() if each.chunks] == [28, 29]


@given(st.lists(st.floats(0.0, 120.0), min_size=OWN_GAPS, max_size=20))
def test_nothing_is_held_for_long(gaps_s: list[float]) -> None:
    """Whatever the gaps: what is announced is held for at most the bound, and past the longest likely gap."""
    sessions = Sessions()
    sessions.turns(*gaps_s)
    ended_s, turns = sessions.clock.monotonic(), list[Turn]()
    while not turns and (next_s := sessions.rhythm.next_s) is not None:  # also of turns that came early
        turns = sessions.after(max(0.0, next_s - sessions.clock.monotonic()))
    if not turns:
        return
    due_s, (turn,) = sessions.clock.monotonic(), turns
    ordered = sorted(gaps_s[-8:])
    trimmed = len(ordered) // 8
    assert 0 < turn.hold_s <= MAX_HOLD_S + 1e-6
    assert due_s <= ended_s + max(0.0, ordered[trimmed] - LEAD_S) + 1e-6
    assert due_s + turn.hold_s >= ended_s + ordered[-1 - trimmed] + GRACE_S - 1e-6
