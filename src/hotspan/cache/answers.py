"""How long a store takes to say what it has, and which requests wait for it."""

_MEMORY = 16
"""Answers over which their time is averaged."""

_LATER = 1.25
"""An answer that has not come in time is expected to take so many times as long."""

_MOST_SKIPPED = 64


class Answers:
    """How long a store takes to say what it has, and which requests wait for it.

    A request that waits in vain loses its whole wait. So where answers take longer than requests may wait, only the
    second does, then every 4th, 8th, .. 64th: they learn when answers come sooner again.
    """

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._gap, self._skipped = 1, 0

    def note(self, waited_s: float, *, answered: bool) -> None:
        """A request waited so long for an answer, and had it then or went on without."""
        if not answered:
            self.expected_s = max(self.expected_s, _LATER * waited_s)
        elif waited_s < self.expected_s:
            self.expected_s = waited_s
        else:
            self.expected_s += (waited_s - self.expected_s) / _MEMORY

    def is_worth_waiting(self, patience_s: float) -> bool:
        """Whether the next request should wait, who may for so long."""
        if self.expected_s <= patience_s:
            self._gap = 1
            return True
        self._skipped += 1
        if self._skipped < self._gap:
            return False
        self._gap, self._skipped = min(2 * self._gap, _MOST_SKIPPED), 0
        return True
