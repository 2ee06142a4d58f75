"""What the cost model is asked about a request, and what it chose for it.

A request's chunks are decided about first. Its encoder outputs and its windows (blending) may follow: they are `Part`s,
which stand alone, and wait within what the first decision left of the request's bound.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotspan.core.types import Chunk, Tier

Seconds = npt.NDArray[np.float64]
"""One figure for each number of chunks from 0."""

BOUND_SHARE, BOUND_S = 0.05, 0.050
"""What a request may lose by waiting: this share of the time it takes without loads, and this much besides."""

RESERVE = 0.8
"""How much of that is used: the scheduler sees late that a wait is over."""


@dataclass(frozen=True, slots=True)
class Text:
    """A request's prompt, and the engine when it comes to it.

    gpu_tokens: from the front that the engine has already.
    step_s:     what the step takes that would run without this request; a load ends no sooner. 0 if it idles.
    busy_s:     until the engine could begin with this request, were nothing to be loaded.
    others:     requests that run, or wait to be computed: computing this one delays each of them.
    waiting:    requests that wait for tiers: it delays those whose chunks land meanwhile.
    per_s:      requests that come per second. utilization: share of time for which the engine is busy.
    waited_s:   since the request came. queued_s: the part of it in which it waited for a place in the engine, and not
                for tiers: without them it would have waited as long.
    lost_s:     by how much an earlier decision about this request has delayed it; negative if it gained by that.
    plain_s:    from that decision to its first token, had it not loaded anything; 0 if there was none.
    """

    total_tokens: int
    chunk_tokens: int
    gpu_tokens: int = 0
    step_s: float = 0.0
    busy_s: float = 0.0
    others: int = 0
    waiting: int = 0
    per_s: float = 0.0
    utilization: float = 0.0
    waited_s: float = 0.0
    queued_s: float = 0.0
    lost_s: float = 0.0
    plain_s: float = 0.0

    @property
    def is_engine_busy(self) -> bool:
        """Whether the engine has other work now."""
        return self.step_s > 0 or self.busy_s > 0


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of a chain, one behind the other, on one tier."""

    tier: Tier
    chunks: int
    chunk_bytes: int


class Part(NamedTuple):
    """What a request needs besides the chunks of its prompt, and the engine could make instead: an encoder's output, a
    window.

    work_s: of the engine, to make it; 0 while unknown.
    """

    chunk: Chunk
    tokens: int
    work_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What one request is to load, what was predicted for it, and how long it should wait.

    chunks:      from the front of the chain, those in RAM included; the rest is to be computed.
    probe:       chunks behind them to promote although the request does not wait for them: they show the tier's speed.
    tier:        the one that it waits for longest; None if it waits for none.
    load_s:      until all its chunks are in RAM. rest_s: from then to the first token.
    recompute_s: to the first token if all is computed. Both are 0 while the engine's speed is unknown.
    queued_s:    what the request had waited for a place before, which it would have waited without tiers, too.
    is_risky:    it may wait longer than the first bound allows.
    saved_s:     what k landed chunks save this request. patiences_s: how long to wait with k landed.
    worth_s:     how long to wait for k landed chunks is worth it to all requests together.
    tokens:      of the first k chunks. is_busy: whether the engine had other work.
    """

    chunks: int
    probe: int
    tier: Tier | None
    load_s: float
    rest_s: float
    recompute_s: float
    is_risky: bool
    saved_s: Seconds
    patiences_s: Seconds
    worth_s: Seconds
    tokens: npt.NDArray[np.int64]
    is_busy: bool = False
    queued_s: float = 0.0

    def patience_s(self, landed: int, landed_s: float) -> float:
        """Seconds after the choice at which it is to be cut, with `landed` chunks from the front of the chain in RAM.

        landed_s: when the last of them landed, in seconds after the choice. It counts only while the engine's speed is
        unknown: then no request waits for more than 40 ms without progress.
        """
        patience_s = float(self.patiences_s[self._at(landed)])
        return patience_s if self.recompute_s else min(patience_s, landed_s + RESERVE * BOUND_S)

    def lost_s(self, waited_s: float, landed: int) -> float:
        """How much later its first token comes for having waited, negative if sooner."""
        return waited_s - float(self.saved_s[self._at(landed)])

    @property
    def bound_s(self) -> float:
        """How much later than without loads its first token may come without that being a broken promise."""
        return BOUND_SHARE * (self.queued_s + self.recompute_s) + BOUND_S

    def gained(self, waited_s: float, landed: int) -> bool:
        """Whether all requests together gained by its wait."""
        return waited_s < float(self.worth_s[self._at(landed)])

    def _at(self, landed: int) -> int:
        return min(max(landed, 0), len(self.saved_s) - 1)
