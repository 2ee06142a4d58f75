"""How long a store takes to say what it has, and which requests wait for it."""

from hotspan.cache.rates import Looks

_LATER = 1.25
"""An answer that has not come in time is expected to take so many times as long."""

_LONGEST_GAP = 64


class Answers:
    """A request that waits in vain loses its whole wait. So where answers take longer than requests may wait, only some
    do (`Looks`): they learn when answers come sooner again.

    expected_s: how long the next answer takes at least; it is seen when a step has ended, so that it may have come long
                before.
    """

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._looks = Looks(_LONGEST_GAP)

    def note(self, waited_s: float, *, answered: bool) -> None:
        """A request waited so long for an answer, and had it then or went on without."""
        if answered:
            self.expected_s = min(self.expected_s, waited_s)
        else:
            self.expected_s = max(self.expected_s, _LATER * waited_s)

    def is_worth_waiting(self, patience_s: float, now_s: float) -> bool:
        """Whether a request should wait that may for so long. now_s: monotonic."""
        if self.expected_s <= patience_s:
            self._looks.begin()
            return True
        return self._looks.leave_out(now_s) > 0
