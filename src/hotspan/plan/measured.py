"""What a running server measured of itself, out of its metrics page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hotspan.core.errors import ConfigError
from hotspan.core.metrics_page import CAPACITY, HITS, LOOKUPS, POOL, POOL_HITS, TOKEN_BYTES, figures, samples
from hotspan.core.types import Tier

_RATE: Final = "hotspan_cost_prefill_tokens_per_second"
_BANDWIDTH: Final = "hotspan_cost_bytes_per_second"
_LATENCY: Final = "hotspan_cost_latency_seconds"
_COPIED, _COPYING = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_time_total"
"""vLLM's: bytes that were copied from RAM to the engine, and the seconds of these copies."""

_COPIED_BEFORE: Final = ("vllm:kv_offload_total_bytes_total", "vllm:kv_offload_total_time_total")
"""The same where vLLM is older, with a label that tells loads from stores."""

_LOAD: Final = "CPU_to_GPU"

_WANTED: Final = (_RATE, _BANDWIDTH, _LATENCY, CAPACITY, TOKEN_BYTES, LOOKUPS, HITS, POOL_HITS, POOL)


@dataclass(frozen=True, slots=True)
class Measured:
    """One server. A figure that it does not have yet is None, or not in its mapping.

    gb_s, latency_s: of loads, by tier. capacity_tokens: by tier, the engine's pool (gpu) included.
    hits:            by tier, share of all prompt tokens so far that were found there; None before the first request.
    """

    prefill_tokens_per_s: float | None = None
    gb_s: Mapping[Tier, float] = field(default_factory=dict)
    latency_s: Mapping[Tier, float] = field(default_factory=dict)
    capacity_tokens: Mapping[Tier, int] = field(default_factory=dict)
    hits: Mapping[Tier, float] | None = None


def measured(page: str) -> Measured:
    """The figures of a metrics page, summed over engines. Raises: ConfigError if it is no page of `hotspan serve`."""
    sums, largest = figures(page, _WANTED)
    if (TOKEN_BYTES, "") not in sums:
        raise ConfigError(f"the metrics page has no {TOKEN_BYTES}: give the address of a `hotspan serve` with tiers")

    def by_tier(name: str, divisor: float = 1.0, of: Mapping[tuple[str, str], float] = sums) -> dict[Tier, float]:
        found = {tier: of.get((name, tier.value), 0.0) / divisor for tier in Tier}
        return {tier: value for tier, value in found.items() if value}

    capacity = by_tier(CAPACITY, largest[TOKEN_BYTES, ""])
    if pool := sums.get((POOL, ""), 0.0):
        capacity[Tier.GPU] = pool
    asked = sums.get((LOOKUPS, ""), 0.0)
    hits = None
    if asked:
        of_pool = min(1.0, sums.get((POOL_HITS, ""), 0.0) / asked)
        hits = {**dict.fromkeys(capacity, 0.0), **by_tier(HITS, asked), Tier.GPU: of_pool}
    copied = _copied_gb_s(page)
    return Measured(
        sums.get((_RATE, "")) or None,
        by_tier(_BANDWIDTH, 1e9) | ({} if copied is None else {Tier.RAM: copied}),
        by_tier(_LATENCY, of=largest),
        {tier: int(tokens) for tier, tokens in capacity.items()},
        hits,
    )


def _copied_gb_s(page: str) -> float | None:
    """The rate of copies from RAM to the engine, over all of them; None before the first."""
    sums = dict.fromkeys((_COPIED, _COPYING, *_COPIED_BEFORE), 0.0)
    for sample in samples(page, tuple(sums)):
        is_load = sample.labels.get("transfer_type", _LOAD) == _LOAD
        if sample.name in sums and is_load and math.isfinite(sample.value):
            sums[sample.name] += max(0.0, sample.value)
    for size, seconds in ((_COPIED, _COPYING), _COPIED_BEFORE):
        if sums[size] and sums[seconds]:
            return sums[size] / sums[seconds] / 1e9
    return None
