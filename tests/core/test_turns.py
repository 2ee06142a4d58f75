"""The order of what several owners wait for, against a plain model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.turns import InTurn

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
