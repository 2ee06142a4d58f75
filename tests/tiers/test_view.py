"""What a replica knows of a log of invalidations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import key_of
from hotspan.tiers import view as views
from hotspan.tiers.view import LogView
from tests.operations import operations

NAMESPACE = bytes(32)


def known_in(view: LogView) -> int:
    """How many invalidations it knows, counted anew."""
    count = 0
    for one in view._of.values():
        named = [*one._by_key.values(), *one._by_label.values()]
        count += sum(map(len, named)) + len(one._broad) + len(one._any_label)
    return count


def test_it_grows_no_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of endless invalidations it knows the newer ones by name; what is as old as those it forgot can't be judged."""
    monkeypatch.setattr(views, "_MOST", 64)
    view = LogView()
    for generation in range(1, 1001):
        by_label, by_key = Scope(labels=frozenset({generation})), Scope(keys=frozenset({key_of(str(generation))}))
        view.add(generation, by_key if generation % 3 else by_label)
        assert view.taken_at(key_of(str(generation)), NAMESPACE, Terms(labels=frozenset({generation}))) == generation
        assert known_in(view) == len(view) <= 64
    assert 1000 - 64 <= view.floor < 1000
    for generation in range(1, 1001):
        taken_at = view.taken_at(key_of(str(generation)), NAMESPACE, Terms(labels=frozenset({generation})))
        assert taken_at == max(generation, view.floor)
    assert view.taken_at(key_of("other"), NAMESPACE, Terms()) == view.floor


_TENANTS, _ADAPTERS, _LABELS = (1, 2), (0, 3), (5, 6, 7)
_KEYS = [key_of(name) for name in "ab"]
_MAYBE = st.one_of(st.none(), st.sampled_from(_TENANTS))
_SCOPES = st.builds(
    Scope,
    tenant=_MAYBE,
    adapter=st.one_of(st.none(), st.sampled_from(_ADAPTERS)),
    labels=st.frozensets(st.sampled_from(_LABELS)),
    keys=st.one_of(st.none(), st.frozensets(st.sampled_from(_KEYS), min_size=1)),
    namespace=st.sampled_from([None, NAMESPACE]),
)
_TERMS = st.builds(
    Terms,
    tenant=st.sampled_from(_TENANTS),
    adapter=st.sampled_from(_ADAPTERS),
    labels=st.frozensets(st.sampled_from(_LABELS)),
    is_wild=st.booleans(),
)


@given(st.lists(_SCOPES, max_size=20), st.sampled_from(_KEYS), _TERMS)
def test_it_agrees_with_the_whole_log(scopes: list[Scope], key: ChunkKey, terms: Terms) -> None:
    """What it says of a chunk, one that may have any label included, is the last entry that takes it."""
    view, wanted = LogView(), 0
    for generation, scope in enumerate(scopes, 1):
        view.add(generation, scope)
        if scope.takes(key, NAMESPACE, terms):
            wanted = generation
    assert view.taken_at(key, NAMESPACE, terms) == wanted


def test_what_may_have_any_label_costs_no_search() -> None:
    """A chunk that stands on many labels is judged in as many operations with 10,000 invalidations as with few."""

    def judging(count: int) -> int:
        view = LogView()
        for generation in range(1, count):
            view.add(generation, Scope(labels=frozenset([generation])))
        return operations(lambda: view.taken_at(_KEYS[0], NAMESPACE, Terms(is_wild=True)))

    assert judging(10_000) == judging(100)
