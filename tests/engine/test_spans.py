"""Texts in the engine's prefix cache are found by what an invalidation names, as a search through all finds them."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.engine.spans import Span, Spans

NAMESPACE = bytes(32)
OWN = Terms(tenant=1)


def key(n: int) -> ChunkKey:
    return ChunkKey(n.to_bytes(32))


LABELS = st.frozensets(st.integers(1, 4), max_size=3)
TERMS = st.builds(Terms, st.integers(1, 2), st.integers(0, 1), LABELS, is_wild=st.booleans())
KEYS = st.none() | st.frozensets(st.integers(0, 9).map(key), max_size=2)
USES = st.lists(st.tuples(st.integers(0, 9), TERMS, KEYS), max_size=25)
SCOPES = st.lists(
    st.builds(
        Scope,
        st.none() | st.integers(1, 3),
        st.none() | st.integers(0, 1),
        LABELS,
        st.none() | st.frozensets(st.integers(0, 9).map(key), max_size=3),
        st.sampled_from([None, NAMESPACE, bytes([1] * 32)]),
    ),
    max_size=4,
)


def parent_of(n: int) -> int | None:
    """A tree: 0 is a root, and so is every third."""
    return None if n % 3 == 0 else n - 1


def kept(uses: list[tuple[int, Terms, frozenset[ChunkKey] | None]]) -> Spans:
    spans = Spans()
    for n, terms, keys in uses:
        parent = parent_of(n)
        name = bytes([n])
        above = None if parent is None else bytes([parent])
        spans.keep(Span(name, (name,), above, terms, None if keys is None else tuple(keys)))
        spans.check()
    return spans


@given(USES, SCOPES)
def test_what_is_taken_is_what_a_search_finds(
    uses: list[tuple[int, Terms, frozenset[ChunkKey] | None]], scopes: list[Scope]
) -> None:
    """By tenant, adapter, labels, keys and model, in any mix; spans whose keys are not known go with any key of their
    tenant's; what stands on what is taken goes too; afterwards nothing of it is left in any book."""
    spans = kept(uses)
    before = dict(spans._spans)

    def is_taken(span: Span) -> bool:
        narrow = [Scope(s.tenant, s.adapter, s.labels, None, s.namespace) for s in scopes]
        return any(
            each.takes(key(99), NAMESPACE, span.terms)
            and (scope.keys is None or span.keys is None or not scope.keys.isdisjoint(span.keys))
            for scope, each in zip(scopes, narrow, strict=True)
        )

    expected = {name for name, span in before.items() if is_taken(span)}
    while more := {name for name, span in before.items() if span.parent in expected} - expected:
        expected |= more
    assert spans.matched(scopes, NAMESPACE) == expected
    for name in expected:
        spans.pop(name)
    spans.check()
    assert not spans.matched(scopes, NAMESPACE)


def test_what_is_looked_at_is_what_may_be_meant() -> None:
    """Of ten thousand spans an invalidation looks at those with its label, its key or its tenant only."""
    spans = Spans()
    for n in range(10_000):
        name = n.to_bytes(4)
        terms = Terms(tenant=n % 100, labels=frozenset([n]))
        spans.keep(Span(name, (name,), None, terms, (key(n),)))
    for scope, count in (
        (Scope(labels=frozenset([5])), 1),
        (Scope(tenant=5, keys=frozenset([key(5), key(7), key(20_000)])), 2),
        (Scope(tenant=5), 100),
        (Scope(tenant=500), 0),
    ):
        looked_at = spans.looked_at
        spans.matched([scope], NAMESPACE)
        assert spans.looked_at - looked_at == count


def test_spans_are_not_visited_by_the_garbage_collector() -> None:
    """What a full collection visits does not grow with the texts in the engine's prefix cache."""
    spans = Spans()

    def keep(first: int, last: int) -> int:
        for n in range(first, last):
            name = n.to_bytes(4)
            spans.keep(Span(name, (name,), (n - 1).to_bytes(4) if n % 16 else None, OWN, (key(n),)))
        for _ in range(2):
            gc.collect(0)
        return len(gc.get_objects())

    assert keep(100, 1100) - keep(0, 100) < 20


def test_what_expires_is_remembered_once() -> None:
    """A text that is used again and again takes no more memory for its expiry, and it expires when its first use
    said."""
    spans = Spans()
    for use in range(20_000):
        spans.keep(Span(b"one", (b"one",), None, Terms(tenant=1, expires_s=1_000_000 + use), ()))
    for n in range(5_000):
        name = n.to_bytes(4)
        spans.keep(Span(name, (name,), None, Terms(tenant=1, expires_s=2_000_000), ()))
        spans.pop(name)
    assert len(spans._expiries) < 2_000
    assert not spans.expired(999_999)
    assert spans.expired(1_000_000) == {b"one"}
