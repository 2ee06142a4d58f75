"""Marks of objects that are not there."""

from hotspan.core.terms import Terms
from hotspan.daemon.strays import StrayMarks
from hotspan.l2.base import marked, marks_of
from hotspan.testing.chunks import key_of

MARKS = marks_of(Terms(labels=frozenset([1])), 5)


def test_lost_marks_leave_a_trace() -> None:
    """Where marks had to go, the object comes back wild; one that never had any does not."""
    strays = StrayMarks(most=10)
    for n in range(30):
        strays.add(key_of(str(n)), MARKS)
    assert len(strays) == 10
    for n in range(20):
        assert marked(Terms(), strays.take(key_of(str(n)))).is_wild
    for n in range(20, 30):
        assert strays.take(key_of(str(n))) == set(MARKS)
    assert sum(bool(strays.take(key_of(f"never {n}"))) for n in range(1000)) <= 1


def test_marks_that_are_added_again_are_young() -> None:
    """The marks that go first are those to which nothing was added for longest."""
    strays = StrayMarks(most=2)
    for name in ("a", "b", "a", "c"):
        strays.add(key_of(name), MARKS)
    assert strays.take(key_of("a")) == set(MARKS) and marked(Terms(), strays.take(key_of("b"))).is_wild


def test_no_marks_take_no_room() -> None:
    """What has no marks is not kept."""
    strays = StrayMarks(most=1)
    strays.add(key_of("a"), [])
    assert len(strays) == 0
