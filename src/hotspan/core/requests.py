"""One request of a trace, and the words that traces have for how its answer ended."""

from collections.abc import Mapping
from typing import Final, NamedTuple

BLOCK_TOKENS: Final = 512
"""Of a published trace's blocks."""

BLOCK_RANGE: Final = (16, 8192)
"""Of the tokens of a block."""

TOOL_CALLS, STOP, LENGTH, ABORT = "tool_calls", "stop", "length", "abort"

FINISH_REASONS: Final[Mapping[str, str]] = {
    **{each: each for each in (TOOL_CALLS, STOP, LENGTH, ABORT)},
    "tool_use": TOOL_CALLS,
    "function_call": TOOL_CALLS,
    "end_turn": STOP,
    "stop_sequence": STOP,
    "max_tokens": LENGTH,
}
"""OpenAI's and Anthropic's words, as the engine's. Any other is unknown."""


class Section(NamedTuple):
    """Tokens [start, stop) of a prompt, and their name, which does not depend on the text before them."""

    key: int
    start: int
    stop: int


class Request(NamedTuple):
    """One request.

    keys:    of its whole blocks, root first.
    partial: key of the tokens after them; None if there are none.
    session: the name of its conversation, as a router would derive it.
    ttft_s, cached_tokens, took_s: as recorded from a server, the last until the whole answer; None if they were not.
    sections: of its prompt, in order and without overlap, as far as they are known.
    finish_reason: how its answer ended, one of the values of FINISH_REASONS; "" if it is unknown.
    after:   places in the trace of requests that are answered before it comes. In a closed loop it comes `think_s`
             after the last of them, and `at_s` counts only where there is none.
    is_subagent: another agent of its session made it.
    """

    at_s: float
    tokens: int
    answer_tokens: int
    keys: tuple[int, ...]
    partial: int | None = None
    session: bytes = b""
    ttft_s: float | None = None
    cached_tokens: int | None = None
    sections: tuple[Section, ...] = ()
    finish_reason: str = ""
    after: tuple[int, ...] = ()
    think_s: float = 0.0
    is_subagent: bool = False
    took_s: float | None = None
