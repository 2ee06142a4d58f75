"""Why requests computed what lies in a lower tier, how many tokens that was, and what loading them would have saved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

Reason = Literal["slower", "bound", "late", "room", "unanswered"]
"""Why chunks of a lower tier are computed.

slower:     computing them is sooner, for this request and those that wait behind it.
bound:      loading would be sooner, but may keep the request longer than 1.05x of no cache + 50 ms.
late:       they did not land in the time that the request could wait.
room:       RAM had no slot for them.
unanswered: the store did not say in time whether it has them.
"""

REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Refused:
    """Counts of one reason.

    saved_s: seconds of all requests' waits that loading would have saved, by the model's estimate.
    """

    requests: int = 0
    tokens: int = 0
    saved_s: float = 0.0


class Refusals:
    """Counts by reason, and by whether the engine had other work then."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Reason, bool], Refused] = {}

    def note(self, reason: Reason, tokens: int, *, is_busy: bool, saved_s: float = 0.0) -> None:
        """A request computes so many tokens that lie in a lower tier."""
        before = self._counts.get((reason, is_busy), Refused())
        self._counts[reason, is_busy] = Refused(
            before.requests + 1, before.tokens + tokens, before.saved_s + max(saved_s, 0.0)
        )

    def counts(self) -> Mapping[tuple[Reason, bool], Refused]:
        """All counts so far, by reason and whether the engine was busy."""
        return dict(self._counts)
