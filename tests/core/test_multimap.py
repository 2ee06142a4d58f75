"""Multimap is a dict of sets, and keeps one value of a key without a set."""

from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.multimap import Multimap

CALLS = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=40)


@given(CALLS)
def test_it_is_a_dict_of_sets(calls: list[tuple[bool, int, int]]) -> None:
    """Whatever is added and discarded, in any order, also twice or when it is not there."""
    values, model = Multimap[int, int](), dict[int, set[int]]()
    for is_added, key, value in calls:
        if is_added:
            values.add(key, value)
            model.setdefault(key, set()).add(value)
        else:
            was_last = model.get(key) == {value}
            model.get(key, set()).discard(value)
            model = {key: there for key, there in model.items() if there}
            assert values.discard(key, value) == was_last
        assert {key: values.of(key) for key in values} == model and len(values) == len(model)
        assert all(values.count(key) == len(model.get(key, ())) for key in range(4))
        assert all((key in values) == (key in model) for key in range(4))
        assert values._others.keys() == {key for key, there in model.items() if len(there) > 1}
