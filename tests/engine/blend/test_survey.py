"""Surveys: the second sighting is stored, the third reused, exact prefixes and approximate KV never are."""

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


def stored(found: Survey) -> None:
    """As the cache does when the KV of this prompt's windows was copied."""
    for each in found.worth_storing(None):
        each.window.is_stored, each.window.position = True, each.run.start


def test_a_window_is_noted_then_stored_then_reused() -> None:
    """Each sighting stands behind another text, at another offset."""
    index = WindowIndex(16, secret=b"seed")
    first = looked_at(index, [7, *SEPARATOR, *DOCUMENT])
    assert (first.reusable, first.seen, first.noted) == ((), (), 3)
    second = looked_at(index, [8, 8, *SEPARATOR, *DOCUMENT])
    assert [each.run for each in second.worth_storing(None)] == [Run(5, 21), Run(21, 37), Run(29, 45)]
    assert (second.reusable, second.noted) == ((), 0)
    stored(second)
    third = looked_at(index, [9, *DOCUMENT])
    assert [each.run for each in third.reusable] == [Run(1, 17), Run(17, 33), Run(25, 41)]
    assert [each.window.position for each in third.reusable] == [5, 21, 29]
    assert third.seen == () and third.noted == 0


def test_a_text_that_comes_with_its_prefix_is_never_stored() -> None:
    """What the prefix caches have was not computed: it is no second sighting, however often it comes."""
    index, text = WindowIndex(16, secret=b"seed"), [*DOCUMENT, 5]
    looked_at(index, text)
    for _ in range(3):
        assert looked_at(index, text, exact=len(DOCUMENT)).worth_storing(None) == []
    assert [each.run.start for each in looked_at(index, text, exact=20).seen] == [25]


def test_windows_that_reach_out_of_the_prefix_are_reusable() -> None:
    """A stored window of which the prefix has a part is offered; the plan takes its rest."""
    index = WindowIndex(16, secret=b"seed")
    looked_at(index, DOCUMENT)
    stored(looked_at(index, [3, *DOCUMENT]))
    assert [each.run for each in looked_at(index, DOCUMENT, exact=20).reusable] == [Run(16, 32), Run(24, 40)]


@pytest.mark.parametrize("first", [0, 20, 21, 37, 45])
def test_approximate_windows_are_not_stored(first: int) -> None:
    """From the first token that a blended request does not have exactly, nothing is kept."""
    index = WindowIndex(16, secret=b"seed")
    looked_at(index, [7, *SEPARATOR, *DOCUMENT])
    seen = looked_at(index, [8, 8, *SEPARATOR, *DOCUMENT])
    assert [each.run.stop for each in seen.worth_storing(first)] == [stop for stop in (21, 37, 45) if stop <= first]


def test_another_owner_learns_nothing() -> None:
    """A document that two tenants have in their prompts once each is a first sighting for both."""
    index = WindowIndex(16, secret=b"seed")
    looked_at(index, DOCUMENT)
    other = looked_at(index, DOCUMENT, owner=bytes(32))
    assert (other.reusable, other.seen, other.noted) == ((), (), 3)


@pytest.mark.parametrize(("separator", "least"), [(SEPARATOR, 0.95), ([], 0.90)], ids=["separators", "no separators"])
def test_permuted_documents_are_reused(separator: list[int], least: float) -> None:
    """Five documents of 5,000 tokens in any order: from the third prompt on, nearly all tokens, cuts or none.

    Cuts make each document's windows its own; without them only the windows over an edge are lost.
    """
    random, index = Random(0), WindowIndex(256, secret=b"seed")
    documents = [[random.randrange(10, 50_000) for _ in range(5000)] for _ in range(5)]
    claimed = reused = 0
    for number, order in enumerate(islice(permutations(documents), 0, 120, 12)):
        prompt = [9, number, *(token for document in order for token in (*separator, *document)), 9, number]
        found = looked_at(index, prompt)
        plan = plan_spans(len(prompt), 0, found.reusable, Pace(0.01, 1e-4, 1e-9, 1e-6), 0.3)
        if number >= 2:
            assert not isinstance(plan, Refusal)
            claimed, reused = claimed + plan.claimed.tokens, reused + plan.reused_tokens
        else:
            assert plan is Refusal.NO_WINDOWS
        stored(found)
    assert reused / claimed >= least
    index.check()
