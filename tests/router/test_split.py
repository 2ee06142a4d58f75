"""Groups get their share of the sessions, and sessions keep their group."""

from hypothesis import given
from hypothesis import strategies as st

from hotspan.router.split import REST, Split

NAMES = [f"session-{number}".encode() for number in range(4000)]


@given(st.floats(0.02, 0.9), st.floats(0.02, 0.9))
def test_only_sessions_move_that_have_to(before: float, after: float) -> None:
    """When a canary's share grows, nobody leaves it; when it shrinks, nobody joins."""
    first, second = Split({"canary": before}), Split({"canary": after})
    moved = {(first.group(name), second.group(name)) for name in NAMES[:400]}
    assert (REST, "canary") not in moved if after < before else ("canary", REST) not in moved


def test_shares_are_what_was_asked_for() -> None:
    """Of 4,000 sessions, 10 % and 30 % go to two groups, the others to the rest, within three deviations."""
    split = Split({"a": 0.1, "b": 0.3})
    groups = [split.group(name) for name in NAMES]
    for group, share in (("a", 0.1), ("b", 0.3), (REST, 0.6)):
        spread = (share * (1 - share) / len(NAMES)) ** 0.5
        assert abs(groups.count(group) / len(NAMES) - share) < 3.5 * spread


def test_another_router_agrees() -> None:
    """Two routers put every session into the same group, in whatever order they were told of them."""
    one, two = Split({"a": 0.5, "b": 0.2}), Split({"b": 0.2, "a": 0.5})
    assert [one.group(name) for name in NAMES[:500]] == [two.group(name) for name in NAMES[:500]]


def test_nothing_and_all_are_shares_too() -> None:
    """A share of 0 % gets nobody, one of 100 % everybody."""
    assert {Split({"a": 0.0}).group(name) for name in NAMES[:200]} == {REST}
    assert {Split({"a": 1.0}).group(name) for name in NAMES[:200]} == {"a"}
