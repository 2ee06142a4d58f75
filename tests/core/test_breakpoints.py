"""What clients of other APIs say of caching."""

from typing import Any

import pytest

from hotspan.core.breakpoints import holds_of, retention_s

FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def block(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": control} if control else {})


def test_a_breakpoint_holds_all_before_it() -> None:
    """Tools come first, then the system prompt, then the messages, as in Anthropic's API; types count a bit."""
    body = {
        "messages": [
            {"role": "user", "content": "x" * 96},
            {"role": "assistant", "content": [block("x" * 96, FIVE), block("x" * 96)]},
        ],
        "system": [block("x" * 96, HOUR)],
        "tools": [{"name": "x" * 100, "cache_control": FIVE}],
    }
    shares = holds_of(body)
    assert [hold_s for _, hold_s in shares] == [300.0, 3600.0, 300.0]
    assert [round(share, 2) for share, _ in shares] == [0.2, 0.4, 0.8]


def test_of_a_request_it_holds_the_whole_prompt() -> None:
    """So does one behind the last block, and of a message whose content is a text."""
    text = {"role": "user", "content": "text"}
    assert holds_of({"messages": [text], "cache_control": HOUR}) == ((1.0, 3600.0),)
    assert holds_of({"messages": [text, text | {"cache_control": FIVE}]}) == ((1.0, 300.0),)
    assert holds_of({"messages": [text], "system": "rules"}) == () == holds_of({})


@pytest.mark.parametrize("control", ["ephemeral", {}, {"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, 5])
def test_what_means_nothing_is_refused(control: Any) -> None:
    """As Anthropic's API does, with what would do."""
    with pytest.raises(ValueError, match='"1h"'):
        holds_of({"system": [{"type": "text", "text": "a", "cache_control": control}]})


def test_there_are_at_most_four() -> None:
    """As in Anthropic's API."""
    assert len(holds_of({"system": [block("a", FIVE)] * 4})) == 4
    with pytest.raises(ValueError, match="at most 4"):
        holds_of({"system": [block("a", FIVE)] * 5})


def test_retention_is_openais() -> None:
    """24h is a day; what is in memory stays as long as there is room; anything else is refused."""
    assert (retention_s("24h"), retention_s("in_memory"), retention_s("in-memory")) == (86400.0, 0.0, 0.0)
    for value in ("1h", 24, None, ["24h"]):
        with pytest.raises(ValueError, match="in_memory or 24h"):
            retention_s(value)
