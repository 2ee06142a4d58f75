"""Lines of system prompts that change: dropped or moved, with bounded work whatever a pattern and a client's text."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core import system_lines
from hotspan.core.system_lines import MAX_LINE, MAX_PATTERNS, MAX_STEPS, MAX_WAYS, SystemLines

PROMPT = "You are an agent.\nx-session-id: 81f2\nToday's date is 2026-11-28.\nBe brief.\n"


def test_lines_are_dropped_and_moved() -> None:
    """What is left begins alike in all requests; what moved is behind all else, in its order."""
    lines = SystemLines(["x-session-id: "], ["Today", "You"])
    assert lines.applied([PROMPT]) == ["Be brief.\nYou are an agent.\nToday's date is 2026-11-28."]
    assert (lines.dropped, lines.moved) == (1, 2)
    assert lines.applied(["Today\nA", "B"]) == ["A", "B\nToday"]
    assert lines.applied(["Today"]) == ["Today"] and lines.applied([]) == []


def test_a_pattern_matches_where_a_line_begins() -> None:
    """Not within it, and no longer line than MAX_LINE."""
    lines = SystemLines(["id"])
    assert lines.applied(["an id\nid 5\nid" + "x" * MAX_LINE]) == ["an id\nid" + "x" * MAX_LINE]


def test_without_a_match_a_text_is_itself() -> None:
    """White space, empty lines and other line ends included; and without patterns nothing is on."""
    text = "a\r\n\n\n  b\x0bc\u2028d\n "
    assert SystemLines(["zzz"], ["yyy"]).applied([text]) == [text]
    assert not SystemLines() and SystemLines(["a"]) and SystemLines((), ["a"])


@given(st.lists(st.text(st.sampled_from("abid:\n\r "), max_size=40), max_size=4))
def test_nothing_but_matching_lines_goes(texts: list[str]) -> None:
    """Dropping keeps all other lines in order; moving keeps all lines."""
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    assert "".join(SystemLines(["id"]).applied(texts)) == "".join(x for x in lines if not x.startswith("id"))
    moved = "\n".join(SystemLines((), ["id"]).applied(texts)).splitlines()
    assert sorted(filter(None, moved)) == sorted(filter(None, (line.rstrip("\r\n") for line in lines)))


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a?){50}a{50}", "(a|a)*b", "a.*b.*c.*", "(.)\\1", "(?=x)y", "(a|ab)(c|d)?" * 12, "(", "", "a" * 201],
)
def test_patterns_that_could_take_long_are_refused(pattern: str) -> None:
    """As is what is no pattern; the error says what would do."""
    with pytest.raises(ValueError, match=r"pattern|regular expression"):
        SystemLines([pattern])


@pytest.mark.parametrize(
    "pattern",
    ["Today's date", "x-id: .*$", ".*id=[0-9a-f]{8}-.*", "(?:date|time): \\d{4}", "(?i)today", "[a-z]+ \\d+$"],
)
def test_patterns_that_one_writes_are_taken(pattern: str) -> None:
    """Up to MAX_PATTERNS of them."""
    assert SystemLines([pattern] * MAX_PATTERNS)
    with pytest.raises(ValueError, match="at most"):
        SystemLines([pattern] * (MAX_PATTERNS + 1))


def test_the_work_for_one_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lines are tried as MAX_STEPS allows for the patterns' ways; the others are left as they are."""
    tried: list[str] = []
    matches = system_lines._matches

    def counted(patterns: Any, line: str) -> bool:
        tried.append(line)
        return matches(patterns, line)

    monkeypatch.setattr(system_lines, "_matches", counted)
    lines = SystemLines([".*a.*b"])
    text = "aaaa\n" * 100_000 + "ab\n"
    assert lines.applied([text]) == [text]
    assert len(tried) <= 2 * MAX_STEPS // MAX_WAYS + 2
    assert re.match(".*a.*b", "ab\n")
