"""Updates: terms that hits add to objects which never change."""

import random

from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.terms import Terms
from hotspan.l2.base import updated, updates_of

LABELS = st.frozensets(st.integers(1, 6), max_size=4)
TERMS = st.builds(Terms, st.just(3), st.just(0), LABELS, st.integers(0, 9), st.sampled_from([0, 50, 70]), st.booleans())


@given(TERMS, st.lists(st.tuples(TERMS, st.integers(0, 20)), max_size=5), st.randoms(use_true_random=False))
def test_updates_commute(terms: Terms, hits: list[tuple[Terms, int]], rng: random.Random) -> None:
    """In whatever order and however often updates are there, the terms are those of the object and all its hits."""
    updates = [update for hit, generation in hits for update in updates_of(hit, generation)]
    found = updated(terms, updates)
    shuffled = updates + rng.choices(updates, k=3) if updates else []
    rng.shuffle(shuffled)
    assert updated(terms, shuffled) == found
    wanted = terms
    for hit, _ in hits:
        wanted = wanted.joined(hit)
    assert (found.labels, found.expires_s, found.is_wild) == (wanted.labels, wanted.expires_s, wanted.is_wild)
    assert found.generation >= terms.generation


def test_the_earliest_update_of_a_label_counts() -> None:
    """A label that was there before an invalidation of it is not made younger by a later hit under it."""
    updates = [
        update for generation in (256, 9, 511) for update in updates_of(Terms(labels=frozenset({7})), generation)
    ]
    assert updated(Terms(generation=1), updates).generation == 9


def test_what_is_no_update_makes_it_wild() -> None:
    """Bytes that are no update are taken for any label."""
    for update in (b"", b"x" * 17, b"L" * 16, b"L" * 18):
        assert updated(Terms(), [update]).is_wild
