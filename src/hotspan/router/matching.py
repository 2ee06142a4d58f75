"""Whether the prompts that this router reads are those that a replica computes, by what the replica's events report.

A prompt that was answered is looked for a moment later: its pieces should be among those that events reported. If they
are not, prompts are rendered otherwise there (another renderer, template or tokenizer), and events can't be used.
"""

from collections import deque
from collections.abc import Callable, Sequence

LEAST_PIECES = 3
"""Of a prompt that is looked for: the last piece is open, and a block more may be."""

CHECKS = 24
"""Prompts over which the share is taken."""

NOT_BELOW, GOOD_FROM = 0.1, 0.5
"""Share of pieces below which a replica's prompts do not match, and from which they do again."""

_AFTER_S = 1.0
"""From the end of an answer to the look: events come after each step of the engine."""


class Matching:
    """Of one replica.

    is_good: events may be used. share: of the pieces looked for last, those that were reported; 1 before any look.
    """

    def __init__(self) -> None:
        self.is_good = True
        self._due: deque[tuple[float, Sequence[int]]] = deque(maxlen=CHECKS)
        self._seen: deque[tuple[int, int]] = deque(maxlen=CHECKS)

    @property
    def share(self) -> float:
        asked = sum(count for _, count in self._seen)
        return sum(found for found, _ in self._seen) / asked if asked else 1.0

    def answered(self, keys: Sequence[int], now_s: float) -> None:
        """A prompt of these pieces was computed or loaded."""
        if len(keys) >= LEAST_PIECES:
            self._due.append((now_s + _AFTER_S, keys))

    def look(self, now_s: float, reported: Callable[[Sequence[int]], int]) -> bool:
        """Look for the prompts that are due; whether `is_good` has changed. reported: counts those of some pieces."""
        while self._due and self._due[0][0] <= now_s:
            keys = self._due.popleft()[1]
            self._seen.append((reported(keys), len(keys) - 1))
        was = self.is_good
        if len(self._seen) == CHECKS:
            self.is_good = self.share >= (NOT_BELOW if was else GOOD_FROM)
        return self.is_good != was

    def clear(self) -> None:
        """What was reported is forgotten: look anew, with the same opinion until then."""
        self._due.clear()
        self._seen.clear()
