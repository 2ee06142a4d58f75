"""Several scopes at once: they take what each takes, whatever a log says of them, and however many there are."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.scopes import (
    Backlog,
    ScopeSet,
    scopes_from_json,
    scopes_to_json,
    understood_scopes,
    without_keys,
)
from hotspan.core.terms import WINDOW, Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import key_of

KEYS = [key_of(name) for name in "ab"]
NAMESPACE = bytes(32)
SCOPES = st.builds(
    Scope,
    tenant=st.sampled_from([None, 1, 2, 2**64 - 1]),
    adapter=st.sampled_from([None, 0, 3]),
    labels=st.frozensets(st.sampled_from([5, 6, 7])),
    keys=st.none() | st.frozensets(st.sampled_from(KEYS)),
    namespace=st.sampled_from([None, NAMESPACE]),
)
TERMS = st.builds(
    Terms,
    tenant=st.sampled_from([1, 2, 3]),
    adapter=st.sampled_from([0, 3]),
    labels=st.frozensets(st.sampled_from([5, 6, 7, WINDOW])),
    is_wild=st.booleans(),
)


@settings(derandomize=True)
@given(st.lists(SCOPES, max_size=6), st.sampled_from(KEYS), TERMS)
def test_a_set_takes_what_one_of_it_takes(scopes: list[Scope], key: ChunkKey, terms: Terms) -> None:
    """No more and no less; and a tenant of whose chunks some may go is concerned."""
    asked = ScopeSet(scopes)
    taken = any(scope.takes(key, NAMESPACE, terms) for scope in scopes)
    assert asked.takes(key, NAMESPACE, terms) == taken
    assert asked.concerns(terms.tenant) or not taken
    assert asked.is_everything == (Scope() in scopes)
    assert asked.keys == frozenset().union(*(scope.keys or frozenset() for scope in scopes))
    named = [without_keys(scope) for scope in scopes if scope.keys is not None]
    assert asked.may_name(NAMESPACE, terms) == any(scope.takes(key, NAMESPACE, terms) for scope in named)


@settings(derandomize=True)
@given(st.lists(SCOPES, max_size=8), st.sets(st.integers(0, 7)), st.sampled_from(KEYS), TERMS)
def test_a_set_knows_the_newest_that_takes_a_chunk(
    scopes: list[Scope], ended: set[int], key: ChunkKey, terms: Terms
) -> None:
    """Of those that were added and not discarded; a scope that was added twice counts as the later one."""
    asked = ScopeSet()
    for number, scope in enumerate(scopes):
        asked.add([scope], number)
    numbers = {scope: number for number, scope in enumerate(scopes)}
    for number in ended & set(range(len(scopes))):
        asked.discard([scopes[number]], number)
    left = {scope: number for scope, number in numbers.items() if number not in ended}
    taking = [number for scope, number in left.items() if scope.takes(key, NAMESPACE, terms)]
    assert asked.newest(key, NAMESPACE, terms) == max(taking, default=None)
    assert asked.concerns(terms.tenant) == any(scope.tenant in (None, terms.tenant) for scope in left)
    assert asked.keys == frozenset().union(*(scope.keys or frozenset() for scope in left))


def test_many_scopes_cost_what_they_may_concern() -> None:
    """A chunk is held against the scopes that name its tenant's whole, its key or a label of its own, of thousands."""
    held: list[Scope] = []

    class Counted(Scope):
        def takes(self, *chunk: object) -> bool:
            held.append(self)
            return super().takes(*chunk)  # type: ignore[arg-type]

    scopes = ScopeSet(
        [Counted(tenant=7, labels=frozenset([n])) for n in range(1, 10_000)]
        + [Counted(tenant=7, keys=frozenset([ChunkKey(n.to_bytes(32))])) for n in range(10_000)]
    )
    assert not scopes.takes(ChunkKey(b"x" * 32), bytes(32), Terms(tenant=7, labels=frozenset([20_000])))
    assert not scopes.takes(ChunkKey((5).to_bytes(32)), bytes(32), Terms(tenant=8, labels=frozenset([5])))
    assert not held
    assert scopes.takes(ChunkKey(b"x" * 32), bytes(32), Terms(tenant=7, labels=frozenset([5, 20_000])))
    assert scopes.takes(ChunkKey((5).to_bytes(32)), bytes(32), Terms(tenant=7))
    assert len(held) == 2


@settings(derandomize=True)
@given(st.lists(SCOPES, min_size=1, max_size=4))
def test_json_gives_back_the_scopes(scopes: list[Scope]) -> None:
    """One scope is an object, as it always was, and several are a list."""
    data = json.loads(json.dumps(scopes_to_json(scopes)))
    assert scopes_from_json(data) == tuple(scopes) and understood_scopes(data) == (tuple(scopes), True)
    assert isinstance(data, dict if len(scopes) == 1 else list)


WHOLE = Scope(tenant=7, labels=frozenset([5])).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "7"},
        {"tenant": [7]},
        {"tenant": True},
        {"tenant": -1},
        {"tenant": 2**64},
        {"adapter": 1.5},
        {"labels": None},
        {"labels": "57"},
        {"labels": ["5"]},
        {"labels": {"5": 1}},
        {"keys": [KEYS[0].hex(), 5]},
        {"keys": ["zz" * 32]},
        {"keys": ["00"]},
        {"namespace": 5},
        {"namespace": "00"},
        {"also": []},
    ],
)
def test_a_scope_of_another_form_is_refused_and_widened(change: dict[str, Any]) -> None:
    """What is no scope is refused; in a log it takes all of its tenant, or everything if that can't be read either."""
    data = WHOLE | change
    with pytest.raises((KeyError, TypeError, ValueError)):
        Scope.from_json(data)
    widened = Scope() if "tenant" in change else Scope(tenant=7)
    assert understood_scopes(data) == ((widened,), False)
    assert understood_scopes([WHOLE, data]) == ((Scope.from_json(WHOLE), widened), False)


@pytest.mark.parametrize("data", [None, 5, "x", [], {}, [[]], {"tenant": None}, [WHOLE, None]])
def test_what_is_no_scope_takes_everything(data: Any) -> None:
    """Whatever stands in the place of a scope."""
    understood = understood_scopes(data)
    assert Scope() in understood.scopes and not understood.is_whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(derandomize=True)
@given(st.sampled_from(sorted(WHOLE)), JSON)
def test_what_is_not_understood_is_never_narrowed(field: str, value: Any) -> None:
    """Whatever stands in a field, nothing is raised, and what is no scope takes all of its tenant, or everything."""
    understood = understood_scopes(WHOLE | {field: value})
    assert understood.is_whole or understood.scopes[0] in (Scope(), Scope(tenant=7))


# -- as many as can be remembered ----------------------------------------------------------------------------------


@settings(derandomize=True)
@given(st.lists(SCOPES, max_size=30), st.integers(1, 3), st.integers(1, 3), st.integers(2, 12))
def test_a_backlog_never_takes_less_and_is_bounded(scopes: list[Scope], each: int, keys: int, total: int) -> None:
    """Whatever is added is taken, by itself or by something wider; and it remembers no more than it may."""
    backlog = Backlog(each, keys, total)
    for scope in scopes:
        backlog.add([scope])
        assert len(backlog) <= total + 1 and all(len(of) <= max(1, each) for of in backlog._of.values())
    taken = backlog.take()
    assert len(backlog) == 0 and backlog.take() == []
    for scope in scopes:
        wider = {scope, Scope(tenant=scope.tenant), Scope()}
        assert wider & set(taken), f"{scope} is not among {taken}"
    if all(scope.tenant is not None for scope in scopes) and total >= 12:
        assert Scope() not in taken, "one tenant's many scopes take others' chunks"


def test_one_tenant_widens_alone() -> None:
    """A tenant with more scopes or keys than it may have is taken as a whole; the others keep theirs."""
    backlog = Backlog(16, keys=100)
    other = Scope(tenant=2, labels=frozenset([1]))
    backlog.add([other])
    backlog.add(Scope(tenant=1, labels=frozenset([number + 1])) for number in range(17))
    backlog.add([Scope(tenant=3, keys=frozenset(key_of(str(n)) for n in range(101)))])
    assert sorted(backlog.take(), key=lambda scope: scope.tenant or 0) == [Scope(tenant=1), other, Scope(tenant=3)]


def test_many_tenants_share_a_bound() -> None:
    """Beyond the bound over all the tenant that has most is taken as a whole, again and again."""
    backlog = Backlog(100, total=50)
    for number in range(200):
        backlog.add([Scope(tenant=number % 10, labels=frozenset([number + 1]))])
        assert len(backlog) <= 50
    taken = backlog.take()
    assert {scope.tenant for scope in taken} == set(range(10))


def test_scopes_of_nobody_take_everything_when_they_are_too_many() -> None:
    """Who names no tenant in too many scopes means everybody."""
    backlog = Backlog(2)
    backlog.add([Scope(tenant=1), Scope(adapter=1), Scope(adapter=2)])
    assert len(backlog) == 3
    backlog.add([Scope(adapter=3)])
    assert backlog.take() == [Scope()]
