"""Sections: a document has one name wherever it stands, and prompts go to where their documents were computed twice."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.router.fleet import Fleet
from hotspan.router.load import Speeds
from hotspan.router.measured import told_by
from hotspan.router.policy import BLEND_GAIN, View, decide
from hotspan.router.sections import (
    MIN_BYTES,
    NOTHING,
    Known,
    Section,
    SectionIndex,
    bytes_behind,
    sections_of,
    separator_pattern,
)
from hotspan.router.text import Prompts
from hotspan.router.types import Ask, Held, Strategy
from hotspan.testing.clock import SimulatedClock

CUT = "\n---\n"
BLENDING = replace(Speeds(tokens_per_s=1000.0), is_blending=True)
PATTERN = separator_pattern([CUT, "#"])


def document(number: int, size: int = 4000) -> str:
    return "".join(random.Random(number).choices("abcdefgh ", k=size))


def prompt(*numbers: int) -> str:
    return CUT.join(["Answer from these: " + "x" * 600, *map(document, numbers), "Which one is it?"])


def ask(*numbers: int) -> Ask:
    body = {"prompt": prompt(*numbers), "max_tokens": 8}
    return Prompts(separators=[CUT]).ask("/v1/completions", {}, body)


@given(st.permutations(range(4)), st.binary(max_size=2000).filter(lambda head: b"#" not in head))
def test_a_document_has_one_name_wherever_it_stands(order: list[int], head: bytes) -> None:
    """Its place is where it is; adapter and salt make other names; what is short has none."""
    assert PATTERN is not None
    texts = [document(number).encode() for number in order]
    whole = CUT.encode().join([head, *texts, b"short"])
    found = sections_of(whole, 5, PATTERN)
    expected = ([head] if len(head) >= MIN_BYTES else []) + texts
    assert [whole[section.start : section.stop] for section in found] == expected
    names = {section.key for section in found}
    assert {key for text in texts for key, *_ in sections_of(text, 5, PATTERN)} <= names
    assert not names & {key for text in texts for key, *_ in sections_of(text, 6, PATTERN)}


def test_without_separators_there_are_none() -> None:
    """And a pattern takes the longest separator first."""
    assert separator_pattern([]) is separator_pattern([""]) is None
    assert not Prompts().ask("/v1/completions", {}, {"prompt": prompt(1, 2)}).sections
    longest = separator_pattern(["--", "----"])
    assert longest is not None and [match.span() for match in longest.finditer(b"a----b")] == [(1, 5)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9) | st.none())))
def test_the_index_counts_to_two(steps: list[tuple[int, int | None]]) -> None:
    """Of each replica, until it has nothing any more; beyond its size what was sent last stays."""
    index, counts = SectionIndex(max_entries=6), dict[int, dict[int, int]]()
    for replica, key in steps:
        if key is None:
            index.clear(replica)
            counts = {each: {r: n for r, n in sent.items() if r != replica} for each, sent in counts.items()}
        else:
            index.add(replica, [Section(key, 0, 9)])
            sent = counts.pop(key, {})
            counts[key] = sent | {replica: sent.get(replica, 0) + 1}
        counts = dict([(each, sent) for each, sent in counts.items() if sent][-6:])
        assert len(index) == len(counts)
    for replica in range(4):
        found = index.known(replica, [Section(each, each, each + 1) for each in range(10)])
        times = {each: counts.get(each, {}).get(replica, 0) for each in range(10)}
        assert found.kept == [(each, each + 1) for each in range(10) if times[each] > 1]
        assert found.seen == [(each, each + 1) for each in range(10) if times[each] == 1]


def test_what_is_blended_costs_less() -> None:
    """By a fixed share, behind what is cached; nothing where the replica would not blend so little."""
    assert bytes_behind([(0, 10), (20, 30)], 5) == 15
    asked = Ask(keys=tuple(range(40)), tokens=4000, piece_tokens=128.0)  # 4 bytes a token
    bare = View("r0", 0, Held(), 0.0, 1000.0, 0, 0.0, 0.0, 0, False, BLENDING)

    def cost(known: Known, held: int = 0) -> tuple[float, int]:
        view = bare._replace(sections=known, held=Held(held, held, held, held))
        decision = decide(asked, [view], Strategy.AUTO, random.Random(0))
        return decision.costs["prefill"], decision.blended_tokens

    assert cost(NOTHING) == (4.0, 0)
    assert cost(Known(kept=[(0, 12_000)])) == pytest.approx((4.0 - 3.0 * BLEND_GAIN, 3000 * BLEND_GAIN))
    assert cost(Known(kept=[(0, 12_000)]), held=10) == pytest.approx((2.72 - 1.72 * BLEND_GAIN, 1720 * BLEND_GAIN))
    assert cost(Known(kept=[(0, 7_000)])) == (4.0, 0)
    seen = decide(asked, [bare._replace(sections=Known(seen=[(0, 8_000)]))], Strategy.AUTO, random.Random(0))
    assert seen.costs["prefill"] == 4.0 and seen.costs["affinity"] == pytest.approx(-0.2)


def test_permuted_prompts_go_where_their_documents_are() -> None:
    """Each set of documents gathers at one replica, from the second prompt on; without blending it is sent anywhere."""
    for is_blending in (True, False):
        clock, rng = SimulatedClock(), random.Random(3)
        fleet = Fleet(clock=clock, rng=rng)
        for name in ("a", "b", "c", "d"):
            fleet.add(name, speeds=replace(BLENDING, is_blending=is_blending))
        places: list[set[str]] = [set() for _ in range(6)]
        blended = 0
        for turn in range(8):
            for group, seen in enumerate(places):
                order = rng.sample(range(4 * group, 4 * group + 4), 4)
                ticket = fleet.dispatch(asked := ask(*order), decision := fleet.choose(asked))
                blended += decision.blended_tokens > 0
                if turn:
                    seen.add(decision.name)
                clock.advance(1.0)
                ticket.first_byte()
                ticket.end(answer_tokens=8)
                clock.advance(20.0)
        if is_blending:
            assert max(map(len, places)) == 1 and 5 * 6 <= blended <= 6 * 6  # some orders are known to their end
        else:
            assert max(map(len, places)) > 1 and blended == 0


def test_a_replica_that_is_gone_has_no_sections() -> None:
    """A restart forgets them, and so does removing it: its number in the index is another's then."""
    fleet = Fleet(clock=SimulatedClock(), rng=random.Random(0))
    for leave in (fleet.forget, fleet.remove):
        if "a" not in fleet.replicas:
            fleet.add("a", speeds=BLENDING)
        for _ in range(3):
            decision = fleet.choose(ask(1, 2))
            fleet.dispatch(ask(1, 2), decision).end()
        assert len(fleet.sections) == 2
        leave("a")
        assert not len(fleet.sections)


def test_replicas_say_whether_they_blend() -> None:
    """By a gauge of their metrics."""
    assert told_by(b'hotspan_blend_up{engine="0"} 1.0\n').is_blending
    assert not told_by(b'hotspan_blend_up{engine="0"} 0.0\n').is_blending and not told_by(b"").is_blending
