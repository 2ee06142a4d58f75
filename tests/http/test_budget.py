"""What several owners share: nobody takes another's part, and nothing is used twice or lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.http.bodies import Budget


def test_an_owner_finds_its_own_part_whatever_others_use() -> None:
    """One owner takes all that it can; each of the others still has its own part, and not a unit more."""
    budget = Budget(1000, owners=5)
    while budget.take("greedy", 1):
        pass
    assert budget.used == 600
    for owner in "abcd":
        assert budget.take(owner, 100)
        assert not budget.take(owner, 1)
    assert budget.used == 1000
    budget.give("greedy", 600)
    assert budget.take("a", 500) and not budget.take("b", 1)


def test_everybody_has_something_of_an_amount_that_is_too_small() -> None:
    """With more owners than units each still has one."""
    budget = Budget(2, owners=10)
    assert all(budget.take(owner, 1) for owner in range(10))


@pytest.mark.parametrize(("owners", "own"), [(0, 500), (1, 500), (2, 250), (500, 1), (5000, 1)])
def test_half_is_divided_equally(owners: int, own: int) -> None:
    """Whoever is the only one, or where there can be none, has all of that half."""
    assert Budget(1000, owners).own == own


@pytest.mark.parametrize("owners", [1, 10, 60, 1000, 5000])
def test_half_is_there_for_one_owner_however_many_there_could_be(owners: int) -> None:
    """Owners that use nothing take away no more than their half."""
    budget = Budget(1000, owners)
    taken = sum(budget.take("alone", 1) for _ in range(1100))
    assert 500 < taken <= 1000
    assert budget.take("another", 1) or owners == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-300, 300)), max_size=60))
def test_what_is_given_is_there_again(steps: list[tuple[int, int]]) -> None:
    """After any takes and gives the sums are right, within the amount, and in the end all of it is free."""
    budget = Budget(1000, owners=3)
    used = [0, 0, 0]
    for owner, amount in steps:
        if amount >= 0 and budget.take(owner, amount):
            used[owner] += amount
        elif amount < 0:
            given_back = min(-amount, used[owner])
            budget.give(owner, given_back)
            used[owner] -= given_back
        assert budget.used == sum(used) <= 1000
    for owner, amount in enumerate(used):
        budget.give(owner, amount)
    assert budget.used == 0 and budget.take(0, 666) and not budget.take(0, 3)
