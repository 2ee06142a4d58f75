"""Sessions that live at one replica."""

from hypothesis import given
from hypothesis import strategies as st

from hotspan.router.session import NEW_SESSION
from hotspan.router.stateful import StatefulSessions
from hotspan.testing.clock import SimulatedClock


def test_a_session_lives_until_it_expires() -> None:
    """It is known from the answer that made it until the time that the answer named."""
    clock = SimulatedClock(unix_s=1_700_000_000)  # 2023-11-14T22:13:20Z
    sessions = StatefulSessions(clock)
    sessions.heard("r1", "abc; Expires=2023-11-14T22:14:20Z", "")
    assert sessions.home("abc") == "r1" and sessions.home("other") is None
    clock.advance(59)
    assert sessions.home("abc") == "r1"
    clock.advance(1)
    assert sessions.home("abc") is None and len(sessions) == 0


def test_closing_and_losing_forget_it() -> None:
    """A session that was closed is gone; one whose replica is gone is counted."""
    sessions = StatefulSessions(SimulatedClock())
    sessions.heard("r1", "a", "")
    sessions.heard("r1", "", "a")
    assert sessions.home("a") is None and sessions.lost == 0
    sessions.heard("r1", "b", "")
    sessions.lose("b")
    sessions.lose("b")
    assert sessions.home("b") is None and sessions.lost == 1


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=30)), max_size=50))
def test_the_table_has_an_end(heard: list[tuple[str, str]]) -> None:
    """Whatever replicas say, at most so many sessions are kept, and NEW_SESSION is never one of them."""
    sessions = StatefulSessions(SimulatedClock(), most=5)
    for name, attributes in [*heard, (NEW_SESSION, "")]:
        sessions.heard("r", f"{name};{attributes}", "")
        assert len(sessions) <= 5
    assert sessions.home(NEW_SESSION) is None and sessions.home("") is None and sessions.home(None) is None
