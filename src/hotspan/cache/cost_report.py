"""What the cost model knows, as metrics and logs show it."""

from collections.abc import Mapping
from dataclasses import dataclass

from hotspan.cache.rates import Accuracy, TierSpeed
from hotspan.cache.refusals import Reason, Refused
from hotspan.core.types import Tier


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

    asked:        decisions: one per request, and one more for encoder outputs or windows of it below RAM.
                  `loaded`: had to load from lower tiers. `refused`: to compute some of what lies there.
    probed:       chunks promoted for a look at a tier's speed.
    late:         requests whose patience was over before all was loaded.
    prefill:      the engine's steps. loads: those of requests, by the tier that they waited for longest.
    tokens_per_s: of the engine, with little context; 0 while unknown.
    trust:        how many requests at a time may risk the first bound.
    refusals:     by reason, and whether the engine was busy.
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
    refusals: Mapping[tuple[Reason, bool], Refused]


def estimate(speed: TierSpeed) -> TierEstimate:
    """What is believed of a tier, from what was measured."""
    latency_s, per_byte_s = speed.fit.rates
    return TierEstimate(latency_s, 1 / per_byte_s if per_byte_s else 0.0, speed.factor, speed.queued_bytes)
