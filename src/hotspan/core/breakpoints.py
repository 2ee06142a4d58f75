"""What clients of other APIs say of caching: Anthropic's `cache_control` and OpenAI's `prompt_cache_retention`.

A breakpoint stands behind a block of tools, system prompt or messages, and has the prefix up to there kept for a while.
Where it is in the prompt is estimated by characters: the prefix is pinned, not cut, so that a chunk more or less does
no harm.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

Holds = tuple[tuple[float, float], ...]
"""Prefixes by their share of the prompt, and how long each is held, in seconds."""

TTLS: Final = {"5m": 300.0, "1h": 3600.0}
RETENTIONS: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
MAX_BREAKPOINTS: Final = 4
_FIELD: Final = "cache_control"


def holds_of(body: Mapping[str, Any]) -> Holds:
    """The prefixes that a request's breakpoints name, the shortest first.

    Raises: ValueError that says what would do.
    """
    ends, at = list[tuple[int, float]](), 0
    for block in _blocks(body):
        at += _chars(block)
        if isinstance(block, Mapping) and block.get(_FIELD) is not None:
            ends.append((at, _ttl_s(block[_FIELD])))
    if body.get(_FIELD) is not None:  # of the request: behind its last block
        ends.append((at, _ttl_s(body[_FIELD])))
    if len(ends) > MAX_BREAKPOINTS:
        raise ValueError(f"a request has at most {MAX_BREAKPOINTS} blocks with {_FIELD}, and this one has {len(ends)}")
    return tuple((end / at, seconds) for end, seconds in ends if end)


def retention_s(value: object) -> float:
    """How long `prompt_cache_retention` has a prompt kept; 0 for as long as there is room.

    Raises: ValueError that says what would do.
    """
    if not isinstance(value, str) or value not in RETENTIONS:
        raise ValueError(f"prompt_cache_retention is {value!r:.80}: give in_memory or 24h")
    return RETENTIONS[value]


def _blocks(body: Mapping[str, Any]) -> Iterator[Any]:
    """The parts of a prompt that may end in a breakpoint, in the order in which a prompt has them."""
    yield from _listed(body.get("tools"))
    yield from _listed(body.get("system"))
    for message in _listed(body.get("messages")):
        if not isinstance(message, Mapping):
            continue
        if isinstance(content := message.get("content"), list):
            yield from content
        else:
            yield {"text": content, _FIELD: message.get(_FIELD)}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _chars(value: object) -> int:
    """Of all texts within a block."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(each) for name, each in value.items() if name != _FIELD)
    return sum(map(_chars, value)) if isinstance(value, list) else 0


def _ttl_s(control: object) -> float:
    ttl = control.get("ttl", "5m") if isinstance(control, Mapping) else None
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral" or ttl not in TTLS:
        what = '{"type": "ephemeral", "ttl": "5m"}, or "1h"'
        raise ValueError(f"{_FIELD} is {control!r:.80}: give {what}")
    return TTLS[str(ttl)]
