"""What a replica knows of a log of invalidations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.terms import WINDOW, Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.l2 import view as views
from hotspan.l2.view import LogView
from hotspan.testing.chunks import key_of
from tests.operations import operations

NAMESPACE = bytes(32)


def known_in(view: LogView) -> int:
    """How many invalidations it knows, counted anew."""
    count = 0
    for one in view._of.values():
        named = [*one._by_key.values(), *one._by_label.values()]
        count += sum(map(len, [*named, *one._latest()]))
    return count


def test_it_grows_no_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of endless invalidations it knows the newer ones by name; what is as old as those it forgot can't be judged."""
    monkeypatch.setattr(views, "_MAX_SCOPES", 64)
    view = LogView()
    for generation in range(1, 1001):
        by_label, by_key = Scope(labels=frozenset({generation})), Scope(keys=frozenset({key_of(str(generation))}))
        view.add(generation, by_key if generation % 3 else by_label)
        assert view.matched_at(key_of(str(generation)), NAMESPACE, Terms(labels=frozenset({generation}))) == generation
        assert known_in(view) == len(view) <= 64
    assert 1000 - 64 <= view.floor < 1000
    for generation in range(1, 1001):
        matched_at = view.matched_at(key_of(str(generation)), NAMESPACE, Terms(labels=frozenset({generation})))
        assert matched_at == max(generation, view.floor)
    assert view.matched_at(key_of("other"), NAMESPACE, Terms()) == view.floor


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
    labels=st.frozensets(st.sampled_from((*_LABELS, WINDOW))),
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
    assert view.matched_at(key, NAMESPACE, terms) == wanted


def test_one_tenants_many_invalidations_raise_nobody_elses_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has more than is remembered loses the older half of its own, and others are judged as before."""
    monkeypatch.setattr(views, "_MAX_SCOPES", 1000)
    view, other = LogView(), Scope(tenant=2, keys=frozenset([_KEYS[0]]))
    view.add(1, other)
    for generation in range(2, 200):
        view.add(generation, Scope(tenant=1, keys=frozenset(key_of(f"{generation}/{n}") for n in range(100))))
        assert known_in(view) == len(view) <= 1000
    assert view.floor == 0
    assert view.matched_at(_KEYS[0], NAMESPACE, Terms(tenant=2)) == 1 == view.latest(2)
    assert view.matched_at(_KEYS[1], NAMESPACE, Terms(tenant=2)) == 0
    assert view.matched_at(_KEYS[1], NAMESPACE, Terms(tenant=1)) > 150
    assert view.matched_at(key_of("199/5"), NAMESPACE, Terms(tenant=1)) == 199 == view.latest(1)
    assert view.latest(3) == 0


def test_the_adapters_and_labels_that_a_tenant_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What names neither keys nor labels counts, too; and of one label no chunk is held against more than a few."""
    monkeypatch.setattr(views, "_MAX_SCOPES", 1000)
    view, common = LogView(), 5
    for generation in range(1, 5000):
        view.add(generation, Scope(tenant=1, adapter=generation))
        view.add(generation, Scope(tenant=1, adapter=generation, labels=frozenset([common])))
        view.add(generation, Scope(tenant=1, labels=frozenset([common, 100 + generation])))
        assert known_in(view) == len(view) <= 1000
    assert len(view._of[1]._by_label[common]) <= views._MAX_OF_A_NAME
    assert view.matched_at(_KEYS[0], NAMESPACE, Terms(tenant=2, labels=frozenset([common]))) == 0
    assert view.matched_at(_KEYS[0], NAMESPACE, Terms(tenant=1, adapter=4999, labels=frozenset([common]))) == 4999
    assert view.matched_at(_KEYS[0], NAMESPACE, Terms(tenant=1, labels=frozenset([common, 5099]))) == 4999


def test_more_tenants_than_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenants that invalidated longest ago are known no more, and the floor is where they were."""
    monkeypatch.setattr(views, "_MAX_TENANTS", 100)
    view = LogView()
    for tenant in range(1, 1001):
        view.add(tenant, Scope(tenant=tenant))
        assert len(view._of) <= 101 and known_in(view) == len(view)
        assert view.matched_at(_KEYS[0], NAMESPACE, Terms(tenant=tenant)) == tenant
    assert 900 <= view.floor < 1000
    assert all(view.matched_at(_KEYS[0], NAMESPACE, Terms(tenant=n)) >= n for n in range(1, 1001))


@settings(derandomize=True)
@given(st.lists(_SCOPES, max_size=40), st.sampled_from(_KEYS), _TERMS, st.integers(1, 8), st.integers(1, 3))
def test_what_it_forgot_is_never_less(
    scopes: list[Scope], key: ChunkKey, terms: Terms, most: int, of_a_name: int
) -> None:
    """With however little room, a chunk that an entry takes is taken at that entry or later; `latest` covers it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "_MAX_SCOPES", most)
        patch.setattr(views, "_MAX_OF_A_NAME", of_a_name)
        view, wanted = LogView(), 0
        for generation, scope in enumerate(scopes, 1):
            view.add(generation, scope)
            if scope.takes(key, NAMESPACE, terms):
                wanted = generation
            assert known_in(view) == len(view) <= most
    matched_at = view.matched_at(key, NAMESPACE, terms)
    assert wanted <= matched_at <= view.latest(terms.tenant) <= len(scopes)


def test_what_may_have_any_label_costs_no_search() -> None:
    """A chunk that stands on many labels is judged in as many operations with 10,000 invalidations as with few."""

    def judging(count: int) -> int:
        view = LogView()
        for generation in range(1, count):
            view.add(generation, Scope(labels=frozenset([generation])))
        return operations(lambda: view.matched_at(_KEYS[0], NAMESPACE, Terms(is_wild=True)))

    assert judging(10_000) == judging(100)
