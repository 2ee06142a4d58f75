"""Work of several owners is begun in fair turns, whoever asks for how much."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.fair import FairOrder


def test_who_asks_for_little_goes_before_what_another_has_piled_up() -> None:
    """One owner has 100 prompts of 1,000 tokens waiting: another's first goes before all that are not begun."""
    order = FairOrder()
    noisy = [order.place("noisy", 1000) for _ in range(100)]
    assert noisy == sorted(noisy)
    order.began(noisy[0])
    order.began(noisy[1])
    quiet = order.place("quiet", 10)
    assert noisy[1] <= quiet < noisy[2]


def test_nobody_saves_up() -> None:
    """An owner that asked for nothing for long has no more than its turn afterwards."""
    order = FairOrder()
    for _ in range(1000):
        order.began(order.place("busy", 1000))
    mine = [order.place("idle", 1000) for _ in range(5)]
    theirs = [order.place("busy", 1000) for _ in range(5)]
    assert abs(mine[4] - theirs[4]) <= 1000


@given(
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=1, max_size=80),
    late=st.integers(1, 100),
)
def test_between_two_of_an_owner_another_gets_as_much(costs: list[tuple[str, int]], late: int) -> None:
    """While two owners wait, what is begun of them differs by at most their largest costs, two each."""
    order, queue = FairOrder(), list[tuple[int, int, str, int]]()
    for number, (owner, cost) in enumerate(costs):
        heapq.heappush(queue, (order.place(owner, cost), number, owner, cost))
    left = {owner: sum(cost for name, cost in costs if name == owner) for owner in "abc"}
    begun = dict.fromkeys("abc", 0)
    while queue:
        waiting = [owner for owner in "abc" if left[owner]]
        largest = max(cost for _, cost in costs)
        for one in waiting:
            for other in waiting:
                assert abs(begun[one] - begun[other]) <= 2 * largest
        place, _, owner, cost = heapq.heappop(queue)
        order.began(place)
        begun[owner] += cost
        left[owner] -= cost
