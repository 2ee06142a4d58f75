"""Fair shares of the queue, by tokens."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.router.queue import FairQueue, Waiting

ANYWHERE: set[str] = {"r"}


def entry(tenant: str, cost: float, where: frozenset[str] | None = None) -> Waiting[object]:
    return Waiting(object(), tenant, where, cost)


def served(queue: FairQueue[object], number: int) -> list[str]:
    """The tenants of the next few."""
    found = [queue.pop(ANYWHERE, ANYWHERE) for _ in range(number)]
    return [each.tenant for each in found if each is not None]


def test_a_small_tenant_is_not_behind_a_large_one() -> None:
    """Of a hundred waiting, the one of another tenant is among the next two."""
    queue = FairQueue[object](1000)
    for _ in range(100):
        queue.push(entry("large", 500))
    queue.push(entry("small", 500))
    assert "small" in served(queue, 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 2000), min_size=30, max_size=60),
    st.lists(st.integers(1, 2000), min_size=30, max_size=60),
    st.integers(1, 40),
)
def test_shares_are_equal_while_both_wait(first: list[int], second: list[int], number: int) -> None:
    """As long as two tenants wait, the tokens that they got differ by one largest request of each at most."""
    queue = FairQueue[object](1000)
    for tenant, costs in (("a", first), ("b", second)):
        for cost in costs:
            queue.push(entry(tenant, cost))
    got, left = {"a": 0.0, "b": 0.0}, {"a": len(first), "b": len(second)}
    for _ in range(number):
        found = queue.pop(ANYWHERE, ANYWHERE)
        assert found is not None
        got[found.tenant] += found.cost
        left[found.tenant] -= 1
        if not all(left.values()):
            break
        assert abs(got["a"] - got["b"]) <= max(first) + max(second)
    queue.check()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 900)), max_size=120), st.integers(0, 9)
)
def test_nobody_is_lost_or_served_twice(steps: list[tuple[str, int, int]], seed: int) -> None:
    """Whatever comes, goes and gives up in whatever order: who was let in comes out once, tenants in their order."""
    queue, rng = FairQueue[object](20), random.Random(seed)
    inside: list[Waiting[object]] = []
    for tenant, what, cost in steps:
        if what == 0 and inside:
            gone = inside.pop(rng.randrange(len(inside)))
            queue.remove(gone)
        elif what == 1:
            found = queue.pop(ANYWHERE, ANYWHERE)
            assert (found is None) == (not inside)
            if found is not None:
                first = next(each for each in inside if each.tenant == found.tenant)
                assert found is first
                inside.remove(found)
        else:
            new = entry(tenant, cost)
            leaving = queue.push(new)
            if leaving is not new:
                inside.append(new)
            if leaving is not None and leaving is not new:
                inside.remove(leaving)
        queue.check()
        assert len(queue) == len(inside) <= 20
    while (found := queue.pop(ANYWHERE, ANYWHERE)) is not None:
        inside.remove(found)
    assert not inside


def test_a_full_queue_makes_room_for_who_has_little() -> None:
    """When it is full, who has most gives up its newest for a newcomer's first; the crowd itself is refused."""
    queue = FairQueue[object](10)
    crowd = [entry("crowd", 5) for _ in range(10)]
    for each in crowd:
        assert queue.push(each) is None
    more = entry("crowd", 5)
    assert queue.push(more) is more
    assert queue.push(entry("new", 5)) is crowd[-1]
    assert len(queue) == 10 and queue.refused == 2
    queue.check()


def test_who_is_bound_waits_alone() -> None:
    """A request for a full replica holds up neither other tenants nor its own tenant's requests for others."""
    queue = FairQueue[object](10)
    bound, free = entry("a", 5, frozenset("x")), entry("a", 5)
    queue.push(bound)
    queue.push(free)
    up = {"x", "y"}
    assert queue.pop({"y"}, up) is free
    assert queue.pop({"y"}, up) is None
    assert queue.pop({"x"}, up) is bound


def test_who_can_go_nowhere_is_let_out() -> None:
    """When none of its replicas is up, a request comes out at once: it has nothing to wait for."""
    queue = FairQueue[object](10)
    lost = entry("a", 5, frozenset("x"))
    queue.push(lost)
    assert queue.pop(set(), {"x"}) is None
    assert queue.pop({"y"}, {"y"}) is lost


def test_who_comes_back_goes_first() -> None:
    """A request that was served and came back is before all others of its tenant, and pays nothing more."""
    queue = FairQueue[object](10)
    for _ in range(3):
        queue.push(entry("a", 100))
    back = entry("a", 100)
    queue.push(back, is_first=True)
    assert queue.pop(ANYWHERE, ANYWHERE) is back


def test_memory_of_tenants_is_bounded() -> None:
    """Ten thousand tenants that come and go leave nothing behind, though somebody always waits."""
    queue = FairQueue[object](10)
    queue.push(entry("x", 1, frozenset("other")))
    for number in range(10_000):
        queue.push(entry(f"t{number}", 1))
        assert queue.pop({"r"}, {"r", "other"}) is not None
    assert len(queue._through) < 2000
