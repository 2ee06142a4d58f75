"""What a store was asked about, and how long it takes to answer."""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from hotspan.core.clock import Clock
from hotspan.core.types import ChunkKey
from hotspan.l2.base import Found

_WEIGHT = 0.25
"""Of the last answer, in the mean."""


class Answer(NamedTuple):
    """Which of the chunks are there (None: it could not say), and how long that took."""

    found: Mapping[ChunkKey, Found] | None
    seconds: float


class Questions:
    """Chunks that a store was asked about and has not answered; how long answers took of late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: dict[ChunkKey, float] = {}  # the oldest first
        self._mean_s = 0.0

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, key: object) -> bool:
        return key in self._since_s

    @property
    def keys(self) -> Set[ChunkKey]:
        """Those that await an answer."""
        return self._since_s.keys()

    @property
    def answer_s(self) -> float:
        """How long an answer takes: the mean, or the age of the oldest question if that is more; 0 at first."""
        now_s = self._clock.monotonic()
        return max(self._mean_s, now_s - next(iter(self._since_s.values()), now_s))

    def begin(self, keys: Iterable[ChunkKey]) -> float:
        """The store is asked about these now. Returns: the time (monotonic)."""
        now_s = self._clock.monotonic()
        self._since_s |= dict.fromkeys(keys, now_s)
        return now_s

    def end(self, keys: Iterable[ChunkKey], seconds: float) -> None:
        """It has answered about these, or won't; that took so long."""
        for key in keys:
            del self._since_s[key]
        self._mean_s += (seconds - self._mean_s) * (_WEIGHT if self._mean_s else 1.0)
