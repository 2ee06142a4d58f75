"""Marks: terms that hits add to objects which never change."""

import random

from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.terms import Terms
from hotspan.l2.base import marked, marks_of

LABELS = st.frozensets(st.integers(1, 6), max_size=4)
TERMS = st.builds(Terms, st.just(3), st.just(0), LABELS, st.integers(0, 9), st.sampled_from([0, 50, 70]), st.booleans())


@given(TERMS, st.lists(st.tuples(TERMS, st.integers(0, 20)), max_size=5), st.randoms(use_true_random=False))
def test_marks_commute(terms: Terms, hits: list[tuple[Terms, int]], rng: random.Random) -> None:
    """In whatever order and however often marks are there, the terms are those of the object and all its hits."""
    marks = [mark for hit, generation in hits for mark in marks_of(hit, generation)]
    found = marked(terms, marks)
    shuffled = marks + rng.choices(marks, k=3) if marks else []
    rng.shuffle(shuffled)
    assert marked(terms, shuffled) == found
    wanted = terms
    for hit, _ in hits:
        wanted = wanted.joined(hit)
    assert (found.labels, found.expires_s, found.is_wild) == (wanted.labels, wanted.expires_s, wanted.is_wild)
    assert found.generation >= terms.generation


def test_the_earliest_mark_of_a_label_counts() -> None:
    """A label that was there before an invalidation of it is not made younger by a later hit under it."""
    marks = [mark for generation in (256, 9, 511) for mark in marks_of(Terms(labels=frozenset({7})), generation)]
    assert marked(Terms(generation=1), marks).generation == 9


def test_what_is_no_mark_makes_it_wild() -> None:
    """Bytes that are no mark are taken for any label."""
    for mark in (b"", b"x" * 17, b"L" * 16, b"L" * 18):
        assert marked(Terms(), [mark]).is_wild
