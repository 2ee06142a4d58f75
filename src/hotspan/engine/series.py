"""The values that the labels of each of the engine's metrics may have: all its series, beside vLLM's own labels."""

from typing import get_args

from hotspan.cache.reasons import REASONS as EXPLAINED
from hotspan.cache.refusals import REASONS
from hotspan.cache.stats import BlendCheck, Prefetched, TurnResult
from hotspan.core.types import Tier
from hotspan.engine.blend.plan import Refusal
from hotspan.tiers.base import Fault
from hotspan.tiers.compressing import Choice

Labels = tuple[str, ...]

COST_CHOICES = ("asked", "loaded", "refused", "late")
"""Fields of the cost model's report."""

_TIERS: list[Labels] = [(tier.value,) for tier in (Tier.RAM, Tier.DISK, Tier.L2)]
_LOWER: list[Labels] = [(tier.value,) for tier in (Tier.DISK, Tier.L2)]
_LOCAL: list[Labels] = [(tier.value,) for tier in (Tier.RAM, Tier.DISK)]
_ENGINE = ("busy", "idle")
_WHAT: list[Labels] = [("prefill",), *_LOWER]

_OF_METRIC: dict[str, list[Labels]] = {
    "hotspan_cache_hit_tokens": _TIERS,
    "hotspan_cache_computed_tokens": [(reason,) for reason in EXPLAINED],
    "hotspan_cache_load_bytes": _TIERS,
    "hotspan_cache_store_bytes": _TIERS,
    "hotspan_cache_load_seconds": _TIERS,
    "hotspan_cache_store_seconds": _LOWER,
    # A store that is full drops the transfer: only a disk tells FULL.
    "hotspan_cache_faults": [
        (tier, fault.value) for (tier,) in _LOWER for fault in Fault if (tier, fault) != (Tier.L2.value, Fault.FULL)
    ],
    "hotspan_cache_evictions": _TIERS,
    "hotspan_cache_stores_refused": _LOCAL,
    "hotspan_cache_stores_late": _LOWER,
    "hotspan_cache_invalidated": _TIERS,
    "hotspan_cache_expired": _TIERS,
    "hotspan_cache_tier_up": _TIERS,
    "hotspan_compression_chunks": [(tier, choice) for (tier,) in _LOWER for choice in get_args(Choice)],
    "hotspan_compression_bytes": [(tier, what) for (tier,) in _LOWER for what in ("chunks", "stored")],
    "hotspan_compression_seconds": [(tier, what) for (tier,) in _LOWER for what in ("encode", "decode")],
    "hotspan_prefetch_chunks": [(what,) for what in get_args(Prefetched)],
    "hotspan_prefetch_turns": [(what,) for what in get_args(TurnResult)],
    "hotspan_cache_pinned_bytes": _LOCAL,
    "hotspan_cache_store_queue_chunks": _LOWER,
    "hotspan_cost_requests": [(choice,) for choice in COST_CHOICES],
    "hotspan_cost_refusals": [(reason, engine) for reason in REASONS for engine in _ENGINE],
    "hotspan_cost_refused_tokens": [(reason, engine) for reason in REASONS for engine in _ENGINE],
    # What is slower to load, or not known to be there, would save nothing.
    "hotspan_cost_refused_saving_seconds": [
        (reason, engine) for reason in ("bound", "late", "room") for engine in _ENGINE
    ],
    "hotspan_cost_predicted_seconds": _WHAT,
    "hotspan_cost_actual_seconds": _WHAT,
    "hotspan_cost_error": _WHAT,
    "hotspan_cost_latency_seconds": _LOWER,
    "hotspan_cost_bytes_per_second": _LOWER,
    "hotspan_cost_queued_bytes": _LOWER,
    "hotspan_blend_requests": [
        *(("blended",), ("failed",), ("cancelled",)),
        *((refusal.value,) for refusal in Refusal),
    ],
    "hotspan_blend_tokens": [("reused",), ("recomputed",), ("fresh",)],
    "hotspan_blend_checks": [(what,) for what in get_args(BlendCheck)],
    "hotspan_encoder_hits": _TIERS,
    "hotspan_cache_requests_left_out": [("directives",), ("weights",), ("error",)],
    "hotspan_cache_namespaces": [("files",), ("random",)],
    "hotspan_cache_bad_slots": [(Tier.DISK.value,)],
    "hotspan_cache_used_bytes": _TIERS,
    "hotspan_cache_capacity_bytes": _TIERS,
}


def series_of(name: str) -> list[Labels]:
    """The values of a metric's labels, of all of them at a time; one empty tuple if it has no labels."""
    return _OF_METRIC.get(name, [()])
