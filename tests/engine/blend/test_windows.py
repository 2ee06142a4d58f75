"""Windows: they cover a section, never cross a separator, and are the same wherever the section stands."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.engine.blend.runs import Run, as_positions
from hotspan.engine.blend.windows import as_tokens, sections, windows

TEXTS = st.lists(st.integers(0, 3), max_size=60)
SEPARATORS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)


@given(TEXTS, SEPARATORS)
def test_sections_are_what_no_separator_covers(text: list[int], separators: list[list[int]]) -> None:
    """Each token is in one section, unless an occurrence of a separator has it; sections are maximal and not empty."""
    covered = {
        at + n
        for pattern in separators
        for at in range(len(text))
        if text[at : at + len(pattern)] == pattern
        for n in range(len(pattern))
    }
    found = sections(as_tokens(text), separators)
    assert as_positions(found).tolist() == [at for at in range(len(text)) if at not in covered]
    assert all(run.tokens > 0 for run in found)
    assert all(before.stop < after.start for before, after in pairwise(found))


@given(st.integers(0, 50), st.integers(0, 100), st.integers(1, 30))
def test_windows_cover_their_section(start: int, tokens: int, width: int) -> None:
    """All windows have the width and lie inside; together they have every token of a section that is long enough."""
    section = Run(start, start + tokens)
    found = list(windows(section, width))
    assert all(run.tokens == width and section.start <= run.start and run.stop <= section.stop for run in found)
    covered = set(as_positions(found).tolist())
    assert covered == (set(range(start, start + tokens)) if tokens >= width else set())
    assert len(found) == (-(-tokens // width) if tokens >= width else 0)


@given(TEXTS, TEXTS, st.lists(st.integers(4, 9), min_size=8, max_size=30))
@settings(max_examples=20)
def test_a_document_has_the_same_windows_in_every_prompt(before: list[int], other: list[int], text: list[int]) -> None:
    """Between separators, what a text is cut into depends on itself alone."""
    found = []
    for prefix in (before, other):
        tokens = as_tokens([*prefix, 99, *text, 99, *other])
        document = next(run for run in sections(tokens, [[99]]) if run.start == len(prefix) + 1)
        found.append([tokens[run.start : run.stop].tolist() for run in windows(document, 8)])
    assert found[0] == found[1] != []
