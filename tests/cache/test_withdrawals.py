"""What was invalidated while a text was held: the same as asking about each chunk, at the cost of asking once."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.cache.withdrawals import _NO_KEY, Withdrawals, _at
from hotspan.core.terms import MAX_LABELS, Scope, Terms
from hotspan.core.types import Chunk
from hotspan.testing.chunks import chain
from tests.operations import operations

NAMESPACE, TENANT = bytes(32), 1


@dataclass
class Text:
    terms: Terms
    bare_terms: Terms = field(default_factory=lambda: Terms(tenant=TENANT))
    tags_from: int = 0


def noted(scopes: list[tuple[Scope, float]]) -> Withdrawals:
    withdrawals = Withdrawals()
    for scope, now_s in scopes:
        withdrawals.note([scope], now_s)
    return withdrawals


def plainly(known: Withdrawals, text: Text, chunks: list[Chunk] | None, since_s: float) -> int | None:
    """Each chunk by itself."""
    since, view = _at(since_s), known._view
    if view.latest(text.terms.tenant) < since:
        return None
    if chunks is None or view.matched_at(_NO_KEY, NAMESPACE, text.bare_terms) >= since:
        return 0
    first = [each.index for each in chunks if view.matched_at(each.key, NAMESPACE, text.bare_terms) >= since]
    if view.matched_at(_NO_KEY, NAMESPACE, text.terms) >= since:
        first.append(text.tags_from)
    return min(first, default=None)


CHAIN = chain("text", 5)
LABELS = st.frozensets(st.integers(1, 4), max_size=3)
SCOPES = st.builds(
    Scope,
    tenant=st.sampled_from([TENANT, 2, None]),
    labels=LABELS,
    keys=st.one_of(st.none(), st.frozensets(st.sampled_from([chunk.key for chunk in CHAIN]), max_size=2)),
    namespace=st.sampled_from([None, NAMESPACE, bytes([1]) * 32]),
)
TEXTS = st.builds(
    Text,
    terms=st.builds(Terms, tenant=st.just(TENANT), labels=LABELS, is_wild=st.booleans()),
    tags_from=st.integers(0, 6),
)


@settings(max_examples=300, deadline=None)
@given(
    scopes=st.lists(st.tuples(SCOPES, st.floats(1, 9)), max_size=5).map(
        lambda all: sorted(all, key=lambda one: one[1])
    ),
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    since_s=st.floats(0, 10),
    is_named=st.booleans(),
)
def test_it_is_what_asking_about_each_chunk_finds(
    scopes: list[tuple[Scope, float]], texts: list[Text], since_s: float, is_named: bool
) -> None:
    """Of one text the first chunk, of several whether there is one."""
    known, chunks = noted(scopes), CHAIN if is_named else None
    expected = [plainly(known, text, chunks, since_s) for text in texts]
    assert [known.first_of(text, chunks, NAMESPACE, since_s) for text in texts] == expected
    for count in (0, 2, len(CHAIN)):
        of_chain = [plainly(known, text, CHAIN[:count], since_s) for text in texts]
        is_taken = any(first is not None and first < count for first in of_chain)
        assert known.has_taken(texts, CHAIN[:count], NAMESPACE, since_s) is (is_taken and count > 0)


def test_chunks_that_nobody_named_cost_next_to_nothing() -> None:
    """Of a text of 4,096 chunks, whether by tags or by another text's chunks something was invalidated; and 64 earlier
    requests of it that have the same tags cost no more than one.
    """
    text = Text(Terms(tenant=TENANT, labels=frozenset(range(100, 100 + MAX_LABELS))))
    long = chain("long", 4096)
    by_tag = [(Scope(tenant=TENANT, labels=frozenset({n})), 10.0 + n) for n in range(1, 50)]
    by_name = [(Scope(tenant=TENANT, keys=frozenset(each.key for each in chain("other", 100))), 60.0)]
    for scopes, each in ((by_tag, 0), (by_tag + by_name, 10)):
        known = noted(scopes)
        few = operations(lambda known=known: known.first_of(text, long[:1], NAMESPACE, 5.0))  # type: ignore[misc]
        many = operations(lambda known=known: known.first_of(text, long, NAMESPACE, 5.0))  # type: ignore[misc]
        assert many <= few + each * len(long)
        one = operations(lambda known=known: known.has_taken([text], long, NAMESPACE, 5.0))  # type: ignore[misc]
        all_64 = operations(lambda known=known: known.has_taken([text] * 64, long, NAMESPACE, 5.0))  # type: ignore[misc]
        assert all_64 <= one + 64 * 20
