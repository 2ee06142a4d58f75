"""How long a tier takes to bring chunks up, learnt from its transfers, its queue and its silence included.

A tier moves `lanes` chunks at a time, and what bandwidth it has is theirs together. So one transfer takes
latency + bytes x chunks moving / bandwidth, which is learnt, and many behind a queue take

    latency x max(1, chunks / lanes) + bytes / bandwidth + what the tier is overdue

A stalled tier ends no transfer from which one could learn: that it is overdue counts, as if it stayed silent as long
again as it has been.
"""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from hotspan.cache.fit import Fit
from hotspan.core.types import MIB

Amount = int | npt.NDArray[np.int64]

_PRIOR = (1.0, 1 / (64 * MIB))
"""Before anything is known: a transfer's latency is as long as moving 64 MiB, so that a small one teaches latency."""

_DOUBTS = 2
_LONGEST_GAP = 8
_MOST_CAUTION = 64.0
_BOLDER = 0.9
_PROBE_S = 1.0


class TierSpeed:
    """One tier's. `now_s` is monotonic.

    lanes: chunks that it moves at a time, its I/O threads.
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 1:
            raise ValueError(f"a tier moves at least one chunk at a time, not {lanes}")
        self._lanes = lanes
        self.fit = Fit(_PRIOR, _DOUBTS)
        self.queued_bytes = 0
        self._depths: deque[int] = deque()  # chunks in the queue when each of them joined it, itself included
        self._moved_s = 0.0  # when a transfer last ended, or the first in the queue began
        self._caution = 1.0
        self._refused = 0
        self._gap = 1
        self._probed_s = 0.0

    @property
    def factor(self) -> float:
        """How many times longer than predicted a load is to be expected at worst."""
        return self.fit.factor * self._caution

    def begin(self, size: int, now_s: float) -> None:
        """A chunk of `size` bytes was queued."""
        if not self._depths:
            self._moved_s = now_s
        self._depths.append(len(self._depths) + 1)
        self.queued_bytes += size

    def end(self, size: int, seconds: float | None, now_s: float) -> None:
        """A queued chunk landed, `seconds` after its transfer left the queue; or it never will (None)."""
        if not self._depths:
            return
        moving = min(self._lanes, max(self._depths[0], self._depths[-1]))  # while it was on its way, about
        amounts = (1.0, float(size * moving))
        if seconds is not None:
            self.fit.observe(amounts, seconds)
        elif self._overdue_s(now_s) > 0:
            self.fit.observe(amounts, now_s - self._moved_s)  # it took at least that long
        self._depths.popleft()
        self.queued_bytes = max(0, self.queued_bytes - size) if self._depths else 0
        self._moved_s = now_s

    def load_s(self, chunks: Amount, size: Amount, now_s: float) -> Any:
        """Until `chunks` more, `size` bytes in all, are up if they are queued now. Numbers, or arrays of one shape."""
        latency_s, per_byte_s = self.fit.rates
        waves = np.maximum((len(self._depths) + np.asarray(chunks)) / self._lanes, 1.0)
        return latency_s * waves + per_byte_s * (self.queued_bytes + np.asarray(size)) + self._overdue_s(now_s)

    def judge(self, gained: bool) -> None:
        """A request that loaded from here, whole or in part, had its first token sooner for it, or later.

        Whatever it was that the predictions know nothing of: doubled caution makes such loads rare, if it goes on.
        """
        self._caution = max(1.0, self._caution / 2) if gained else min(2 * self._caution, _MOST_CAUTION)

    def take(self) -> None:
        """A request loads from here: the tier is found fast enough."""
        self._refused, self._gap = 0, 1

    def refuse(self, now_s: float) -> int:
        """A request had better not load from here; how many chunks should be, to see whether the tier is still slow.

        One at the first refusal, then 2, 4, 8, 8, .. after as many more, or as many seconds: together they show the
        bandwidth, too. None while the last are in flight.
        """
        self._refused += 1
        self._caution = max(1.0, _BOLDER * self._caution)
        rests = self._refused < self._gap and now_s - self._probed_s < self._gap * _PROBE_S
        if rests or self._depths:
            return 0
        self._refused, self._probed_s = 0, now_s
        probe, self._gap = self._gap, min(2 * self._gap, _LONGEST_GAP)
        return probe

    # -- inside ----------------------------------------------------------------------------------------------------

    def _overdue_s(self, now_s: float) -> float:
        """How long ago something should have landed."""
        if not self._depths:
            return 0.0
        size = self.queued_bytes / len(self._depths)
        expected_s = self.fit.predict((1.0, size * min(self._lanes, len(self._depths)))) * self.fit.factor
        return max(0.0, now_s - self._moved_s - expected_s)
