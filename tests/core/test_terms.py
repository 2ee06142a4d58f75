"""Terms and scopes: what a request's use of a chunk leaves on it, and what an invalidation takes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.terms import MAX_LABELS, WINDOW, Scope, Terms, adapter_label, label, tag_labels, tenant_label
from hotspan.core.types import ChunkKey

LABELS = st.frozensets(st.integers(1, 6), max_size=4)
EXPIRIES = st.sampled_from([0, 1, 5, 9])
TERMS = st.builds(
    Terms,
    tenant=st.integers(0, 2),
    adapter=st.integers(0, 2),
    labels=LABELS,
    generation=st.integers(0, 3),
    expires_s=EXPIRIES,
    is_wild=st.booleans(),
)
KEYS = st.binary(min_size=32, max_size=32).map(ChunkKey)
SCOPES = st.builds(
    Scope,
    tenant=st.none() | st.integers(0, 2**64 - 1),
    adapter=st.none() | st.integers(0, 2**64 - 1),
    labels=st.frozensets(st.integers(1, 2**64 - 1), max_size=4),
    keys=st.none() | st.frozensets(KEYS, max_size=3),
    namespace=st.none() | st.binary(min_size=32, max_size=32),
)


def test_labels_of_different_kinds_differ() -> None:
    """A tag, a session, a tenant and an adapter of one name are four labels, and none is 0."""
    labels = {tenant_label("x"), adapter_label("x"), *tag_labels(["x"], "x")}
    assert len(labels) == 4 and 0 not in labels
    assert tag_labels(["x"]) | tag_labels([], "x") == tag_labels(["x"], "x")
    assert tag_labels() == frozenset()


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_a_label_is_of_its_kind_and_name(kind: str, name: str, other_kind: str, other: str) -> None:
    """No two kinds and names spell the same label, wherever the border between them is; labels are 64 bits."""
    assert (label(kind, name) == label(other_kind, other)) == ((kind, name) == (other_kind, other))
    assert 0 < label(kind, name) < 1 << 64


def test_a_label_is_the_known_one() -> None:
    """A known answer: labels are on disk, and a change of the formula would make invalidations miss."""
    assert label("tag", "doc") == 406256742349516947


@given(TERMS, TERMS)
def test_joining_adds_up(one: Terms, other: Terms) -> None:
    """Whatever takes a chunk on either terms takes it on the joined ones; the tenant, adapter and generation stay."""
    joined = one.joined(other)
    assert (joined.tenant, joined.adapter, joined.generation) == (one.tenant, one.adapter, one.generation)
    assert joined.expires_s == min((at for at in (one.expires_s, other.expires_s) if at), default=0)
    for name in range(1, 8):
        takes = [Scope(labels=frozenset([name])).takes(ChunkKey(b""), b"", terms) for terms in (one, other, joined)]
        assert takes[2] == (takes[0] or takes[1])


@given(TERMS, TERMS)
def test_joining_again_changes_nothing(one: Terms, other: Terms) -> None:
    """The same request's second hit leaves the very same terms, so that nothing is written again."""
    joined = one.joined(other)
    assert joined.joined(other) is joined
    assert joined.joined(joined) is joined


@given(TERMS, LABELS)
def test_a_wild_chunk_takes_no_more_labels(terms: Terms, labels: frozenset[int]) -> None:
    """Joining tags to a chunk that every tag takes already changes nothing."""
    wild = Terms(terms.tenant, terms.adapter, terms.labels, terms.generation, terms.expires_s, is_wild=True)
    assert wild.joined(Terms(labels=labels)) is wild


def test_more_labels_than_a_chunk_carries_make_it_wild() -> None:
    """64 labels are carried one by one, and others don't take the chunk; from the 65th on any does, for good."""
    terms, names = Terms(1, 2, generation=3), range(1, MAX_LABELS + 1)
    for name in names:
        terms = terms.joined(Terms(labels=frozenset([name])))
    key, stranger = ChunkKey(bytes(32)), Scope(labels=frozenset([1000]))
    assert not terms.is_wild and terms.labels == frozenset(names) and not stranger.takes(key, b"", terms)
    wild = terms.joined(Terms(labels=frozenset([MAX_LABELS + 1])))
    assert wild.is_wild and not wild.labels and stranger.takes(key, b"", wild)
    assert all(Scope(labels=frozenset([name, 1])).takes(key, b"", wild) for name in [*names, MAX_LABELS + 1])
    assert (wild.tenant, wild.adapter, wild.generation, wild.expires_s) == (1, 2, 3, 0)
    assert wild.joined(terms) is wild and terms.joined(wild).is_wild
    assert not Scope(tenant=2, labels=frozenset([1])).takes(key, b"", wild)


def test_a_window_goes_with_any_text_of_its_tenant() -> None:
    """It has no name of a chunk, and may have a part of any text; however many labels it gets, it stays a window."""
    terms = Terms(1, labels=frozenset([WINDOW]))
    for name in range(2, 3 * MAX_LABELS):
        assert Scope(1, keys=frozenset([ChunkKey(b"x")])).takes(ChunkKey(b"y"), b"", terms)
        assert not Scope(2, keys=frozenset([ChunkKey(b"x")])).takes(ChunkKey(b"y"), b"", terms)
        terms = terms.joined(Terms(1, labels=frozenset([name])))
    assert terms.is_wild and terms.is_window


@given(SCOPES)
def test_a_scope_survives_json(scope: Scope) -> None:
    """What `to_json` gave, through a JSON text, is the same scope again."""
    assert Scope.from_json(json.loads(json.dumps(scope.to_json()))) == scope


@pytest.mark.parametrize(
    "change", [{"keys": 7}, {"keys": ["zz"]}, {"labels": ["x"]}, {"labels": None}, {"namespace": "x"}]
)
def test_another_json_is_no_scope(change: dict) -> None:
    """What is no scope raises one of the errors that are told."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        Scope.from_json(Scope().to_json() | change)
    with pytest.raises(KeyError):
        Scope.from_json({})


@given(SCOPES, KEYS, TERMS)
def test_everything_takes_everything(scope: Scope, key: ChunkKey, terms: Terms) -> None:
    """Only the empty scope is everything, and it takes any chunk; an empty set of keys takes none."""
    assert scope.is_everything == (scope == Scope())
    assert Scope().takes(key, bytes(32), terms)
    assert not Scope(keys=frozenset()).takes(key, bytes(32), terms)


@given(TERMS)
def test_every_part_of_a_scope_narrows_it(terms: Terms) -> None:
    """A chunk that one part of a scope does not match stays, whatever the others say; wildness is for labels only."""
    key, namespace = ChunkKey(bytes(32)), bytes(32)
    fits = Scope(terms.tenant, terms.adapter, terms.labels, frozenset([key]), namespace)
    assert fits.takes(key, namespace, terms)
    assert not Scope(tenant=terms.tenant + 1).takes(key, namespace, terms)
    assert not Scope(adapter=terms.adapter + 1).takes(key, namespace, terms)
    assert not fits.takes(ChunkKey(b"\1" * 32), namespace, terms)
    assert not fits.takes(key, b"\1" * 32, terms)
    assert Scope(labels=frozenset([7])).takes(key, namespace, terms) == terms.is_wild
