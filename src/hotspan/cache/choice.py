"""What the cost model is asked, what it answers and knows, and how far a request has come with what was chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotspan.cache.fit import Accuracy
from hotspan.core.types import Chunk, ChunkKey, Tier

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
    """

    total_tokens: int
    chunk_tokens: int
    gpu_tokens: int = 0
    step_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of a chain, one behind the other, on one tier."""

    tier: Tier
    chunks: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What one request is to load, what was predicted for it, and how long it should wait.

    chunks:      from the front of the chain, those in RAM included; the rest is to be computed.
    probe:       chunks behind them to promote although the request does not wait for them: they show the tier's speed.
    tier:        the one that it waits for longest; None if it waits for none.
    load_s:      until all its chunks are in RAM. rest_s: from then to the first token.
    recompute_s: to the first token if nothing is loaded from below RAM. Both are 0 while the engine's speed is unknown.
    is_risky:    it may wait longer than the first bound allows.
    saved_s:     what k landed chunks save. patiences_s: how long to wait with k landed.
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

    def _at(self, landed: int) -> int:
        return min(max(landed, 0), len(self.saved_s) - 1)


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """What is believed of a tier: a transfer's latency, the bandwidth of all together (0 while unknown), its queue.

    factor: how many times longer than predicted a load is to be expected at worst.
    """

    latency_s: float
    bytes_per_s: float
    factor: float
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class CostReport:
    """What the model knows and how well it predicts.

    asked:        requests. `loaded` of them were to load from below RAM, `refused` to compute some of what lies there.
    probed:       chunks promoted for a look at a tier's speed.
    late:         requests whose patience was over before all was loaded.
    prefill:      the engine's steps. loads: those of requests, by the tier that they waited for longest.
    tokens_per_s: of the engine, with little context; 0 while unknown.
    trust:        how many requests at a time may risk the first bound.
    """

    asked: int
    loaded: int
    refused: int
    probed: int
    late: int
    prefill: Accuracy
    loads: Mapping[Tier, Accuracy]
    tiers: Mapping[Tier, TierEstimate]
    tokens_per_s: float
    trust: float


@dataclass(slots=True, eq=False)
class Plan:
    """What was chosen for one request, and how far that has come.

    chain:    its chunks, from the first that the engine has not whole. refused: those that it does not wait for.
    began_s:  when it began to wait, for answers included. chosen_s: when all answers were there. Monotonic.
    risked:   it waited for answers longer than the bound allows. answered: all came.
    landed:   how many chunks from the front of the chain are in RAM. landed_s: since when.
    ended_s:  when its wait was over; None while it goes on.
    is_crowded: RAM had no room for some of it: nothing that a tier could be blamed for.
    """

    choice: Choice
    chain: Sequence[Chunk]
    refused: frozenset[ChunkKey]
    began_s: float
    chosen_s: float
    risked: bool
    answered: bool
    landed: int = 0
    landed_s: float = 0.0
    ended_s: float | None = None
    is_crowded: bool = False

    def is_late(self, now_s: float) -> bool:
        """Whether it has waited as long as it may."""
        since_s = self.chosen_s if self.risked else self.began_s
        return now_s - since_s > self.choice.patience_s(self.landed, max(0.0, self.landed_s - since_s))
