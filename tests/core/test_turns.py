"""The order of what several owners wait for, against a plain model."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.turns import AsyncTurns, InTurn

STEPS = st.tuples(
    st.sampled_from(["add", "add", "add", "take", "look", "discard"]), st.sampled_from("abc"), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_owners_are_next_in_turn(steps: list[tuple[str, str, bool]]) -> None:
    """However things come, are looked at, and go unserved: none is lost, and no owner is passed over."""
    queue: InTurn[tuple[str, int]] = InTurn()
    model: dict[bool, list[tuple[str, list[tuple[str, int]]]]] = {True: [], False: []}

    def waiting(is_urgent: bool) -> dict[str, list[tuple[str, int]]]:
        return dict(model[is_urgent])

    for number, (step, owner, is_urgent) in enumerate(steps):
        item = (owner, number)
        if step == "add":
            queue.add(owner, item, is_urgent=is_urgent)
            if owner in waiting(is_urgent):
                waiting(is_urgent)[owner].append(item)
            else:
                model[is_urgent].append((owner, [item]))
        elif step == "take":
            queues = model[True] or model[False]
            if not queues:
                with pytest.raises(KeyError):
                    queue.take()
                continue
            first, items = queues.pop(0)
            assert queue.take() == items.pop(0)
            if items:
                queues.append((first, items))
        elif step == "look":
            if not model[False]:
                with pytest.raises(KeyError):
                    queue.look()
                continue
            model[False].append(model[False].pop(0))
            assert queue.look() == model[False][-1][1][0] == queue.oldest(model[False][-1][0])
        else:
            items = waiting(is_urgent).get(owner, [])
            if items:
                gone = items.pop(number % len(items))
                model[is_urgent] = [each for each in model[is_urgent] if each[1]]
                queue.discard(owner, gone)
            queue.discard(owner, item)  # which does not wait
        assert (queue.has_urgent, queue.has_others) == (bool(model[True]), bool(model[False]))
        assert queue.owners == len(model[False])
        assert all(queue.count(each) == len(waiting(False).get(each, ())) for each in "abc")


@pytest.mark.parametrize("is_alone", [True, False])
async def test_who_is_cancelled_as_its_turn_comes_loses_none(is_alone: bool) -> None:
    """Its task learns of it a turn of the loop later; the turn is the next one's, or free."""
    turns = AsyncTurns(1)
    await turns.take("a")
    leaves = asyncio.create_task(turns.take("b"))
    stays = None if is_alone else asyncio.create_task(turns.take("b"))
    await asyncio.sleep(0)
    leaves.cancel()
    turns.give("a")
    with pytest.raises(asyncio.CancelledError):
        await leaves
    if stays is not None:
        await stays
    assert turns.taken == (not is_alone) and not turns._waiting


async def test_turns_go_from_owner_to_owner() -> None:
    """One owner has so many at most, all together so many; who waits is served in turn, who leaves takes none."""
    turns, order = AsyncTurns(3, of_one=2), list[str]()

    async def work(owner: str) -> None:
        await turns.take(owner)
        order.append(owner)

    tasks = [asyncio.create_task(work(owner)) for owner in "aaaaabbc"]
    await asyncio.sleep(0)
    assert order == ["a", "a", "b"] and turns.taken == 3
    tasks[2].cancel()  # of a, while it waits
    await asyncio.sleep(0)
    for ended in range(7):
        turns.give(order[ended])
        await asyncio.sleep(0)
        assert turns.taken == min(3, 6 - ended)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "".join(order) == "aababca" and not turns._waiting
