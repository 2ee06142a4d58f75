"""The first difference, and the KL over top-k log probabilities."""

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.ab.asking import Position
from hotspan.ab.divergence import divergence, top_k_kl

from .answers import answer

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6)


def positions(text: str, logprob: float = -0.1) -> list[Position]:
    return [Position(each, {each: logprob, "~": log(1 - exp(logprob))}) for each in text]


def test_the_first_difference_in_tokens() -> None:
    """Tokens up to it agree; log probabilities count up to it and with it, and no further."""
    found = divergence(answer("abcd", tokens=positions("abcd")), answer("abxd", tokens=positions("abxd", -0.5)))
    assert (found.first, found.agreed, found.length, found.positions) == (2, 2, 4, 3)
    assert found.kl > 0


def test_without_tokens_characters_are_compared() -> None:
    """A server without log probabilities is compared by its text; an answer that ends sooner differs at its end."""
    found = divergence(answer("same"), answer("same and more"))
    assert (found.first, found.agreed, found.length, found.positions) == (4, 4, 13, 0)
    assert divergence(answer("x"), answer("x")).first is None


def test_equal_text_of_other_tokens_is_a_difference() -> None:
    """Token identity is more than equal text."""
    one, two = answer("ab", tokens=positions("ab")), answer("ab", tokens=[Position("ab", {"ab": -0.1})])
    assert divergence(one, two).first == 0


@given(WEIGHTS, WEIGHTS, st.integers(1, 6))
def test_top_k_kl_is_a_lower_bound(ours: list[float], theirs: list[float], k: int) -> None:
    """It is never above the KL over the whole vocabulary, never negative, and equal to it if both lists are whole."""
    p, q = ([each / sum(weights) for each in weights] for weights in (ours, theirs))
    whole = sum(x * log(x / y) for x, y in zip(p, q, strict=True))

    def top(odds: list[float]) -> Position:
        ranked = sorted(enumerate(odds), key=lambda each: -each[1])[:k]
        return Position(str(ranked[0][0]), {str(at): log(each) for at, each in ranked})

    found = top_k_kl(top(p), top(q))
    assert 0 <= found <= whole + 1e-6
    if k == 6:
        assert found == pytest.approx(whole, abs=1e-6)


def test_equal_distributions_have_none() -> None:
    """Equal lists give 0, also where a probability is 0."""
    one = Position("a", {"a": 0.0, "b": -9999.0})
    assert top_k_kl(one, one) == 0.0
    assert top_k_kl(one, Position("z", {"z": -0.1})) == 0.0, "lists without a common token say nothing"
