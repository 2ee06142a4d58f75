"""Surveys: what is noted at the first sighting is known from the second on, at any offset; prefixes are neither."""

from itertools import islice, permutations
from random import Random

import pytest

from hotspan.core.namespace import ChunkKeyer
from hotspan.core.types import ChunkKey
from hotspan.engine.blend.index import WindowIndex
from hotspan.engine.blend.plan import Pace, Refusal, plan_spans
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.survey import Survey, survey
from hotspan.engine.blend.windows import Tokens, as_tokens, sections

KEYER = ChunkKeyer(bytes(32))
SEPARATOR = [1, 2, 1]
DOCUMENT = list(range(100, 140))


def named(tokens: Tokens) -> ChunkKey:
    return KEYER.window_key(tokens.tobytes(), 0)


def looked_at(index: WindowIndex, text: list[int], exact: int = 0, owner: bytes = KEYER.owner) -> Survey:
    tokens = as_tokens(text)
    return survey(index, owner, tokens, exact, sections(tokens, [SEPARATOR]), named)


def test_a_window_is_noted_and_then_known() -> None:
    """Each sighting stands behind another text, at another offset."""
    index = WindowIndex(16, secret=b"seed")
    first = looked_at(index, [7, *SEPARATOR, *DOCUMENT])
    assert first.known == () and [each.run for each in first.noted] == [Run(4, 20), Run(20, 36), Run(28, 44)]
    second = looked_at(index, [8, 8, *SEPARATOR, *DOCUMENT])
    assert [each.run for each in second.known] == [Run(5, 21), Run(21, 37), Run(29, 45)]
    assert second.noted == ()
    third = looked_at(index, [9, *DOCUMENT])
    assert [each.run for each in third.known] == [Run(1, 17), Run(17, 33), Run(25, 41)]
    assert [each.window.position for each in third.known] == [4, 20, 28]
    assert third.noted == ()


def test_what_a_prefix_has_is_not_noted() -> None:
    """What the prefix caches have was not computed; what reaches out of it is known, and the plan takes its rest."""
    index, text = WindowIndex(16, secret=b"seed"), [*DOCUMENT, 5]
    assert looked_at(index, text, exact=len(text)).noted == ()
    looked_at(index, text)
    assert looked_at(index, text, exact=len(text)).known == ()
    assert [each.run.start for each in looked_at(index, text, exact=20).known] == [16, 25]


def test_another_owner_learns_nothing() -> None:
    """A document that two tenants have in their prompts once each is a first sighting for both."""
    index = WindowIndex(16, secret=b"seed")
    looked_at(index, DOCUMENT)
    other = looked_at(index, DOCUMENT, owner=bytes(32))
    assert other.known == () and len(other.noted) == 3


@pytest.mark.parametrize(("separator", "least"), [(SEPARATOR, 0.95), ([], 0.90)], ids=["separators", "no separators"])
def test_permuted_documents_are_reused(separator: list[int], least: float) -> None:
    """Five documents of 5,000 tokens in any order: from the third prompt on, nearly all tokens, cuts or none.

    Cuts make each document's windows its own; without them only the windows over an edge are lost.
    """
    random, index = Random(0), WindowIndex(256, secret=b"seed")
    documents = [[random.randrange(10, 50_000) for _ in range(5000)] for _ in range(5)]
    claimed = reused = 0
    stored = set[ChunkKey]()
    for number, order in enumerate(islice(permutations(documents), 0, 120, 12)):
        prompt = [9, number, *(token for document in order for token in (*separator, *document)), 9, number]
        found = looked_at(index, prompt)
        there = [each for each in found.known if each.window.key in stored]
        plan = plan_spans(len(prompt), 0, there, Pace(0.01, 1e-4, 1e-9, 1e-6), 0.3)
        if number >= 2:
            assert not isinstance(plan, Refusal)
            claimed, reused = claimed + plan.claimed.tokens, reused + plan.reused_tokens
        else:
            assert plan is Refusal.NO_WINDOWS
        stored |= {each.window.key for each in found.known}
    assert reused / claimed >= least
    index.check()
