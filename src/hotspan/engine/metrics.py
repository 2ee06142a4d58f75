"""The cache's counts as Prometheus metrics, carried by vLLM from the engine's process to the server's /metrics."""

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from hotspan.cache.cost_report import CostReport
from hotspan.cache.rates import Accuracy
from hotspan.cache.refusals import Refused
from hotspan.cache.stats import CacheStats
from hotspan.cache.tiered import TieredCache
from hotspan.core.types import Tier
from hotspan.engine.net import LEFT_OUT
from hotspan.engine.series import COST_CHOICES
from hotspan.keyring.keyring import NO_KEYS, Keyring
from hotspan.l2.follower import LogFollower

_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TIER = ("tier",)
_WHAT = ("what",)
_REFUSED = ("reason", "engine_state")
_BY_TIER = (
    *("hit_tokens", "load_bytes", "store_bytes", "evictions"),
    *("stores_refused", "stores_late", "invalidated", "expired"),
)
"""The fields of `CacheStats` that count by tier; the metrics have their names."""

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    "hotspan_cache_lookup_tokens": OffloadingCounterMetadata(
        "Prompt tokens of requests that began to run and may read the cache."
    ),
    "hotspan_cache_hit_tokens": OffloadingCounterMetadata("Tokens loaded instead of computed, by tier.", _TIER),
    "hotspan_cache_computed_tokens": OffloadingCounterMetadata(
        "Prompt tokens that were computed, by reason (docs/reference/reasons.md).", ("reason",)
    ),
    "hotspan_cache_load_bytes": OffloadingCounterMetadata("KV bytes read up from a tier.", _TIER),
    "hotspan_cache_store_bytes": OffloadingCounterMetadata("KV bytes written down to a tier.", _TIER),
    "hotspan_cache_load_seconds": OffloadingHistogramMetadata(
        "Time to load: a request's chunks from RAM into the engine, one chunk from a lower tier.", _TIER, _BUCKETS
    ),
    "hotspan_cache_store_seconds": OffloadingHistogramMetadata("Time to write one chunk to a tier.", _TIER, _BUCKETS),
    "hotspan_cache_faults": OffloadingCounterMetadata(
        "Transfers that became misses, and chunks that a check found corrupt, by tier and fault.", ("tier", "fault")
    ),
    "hotspan_cache_evictions": OffloadingCounterMetadata(
        "Chunks evicted for room, by tier; of the L2 those that this server deleted from a directory (Redis and the "
        "node's daemon evict by themselves, and count).",
        _TIER,
    ),
    "hotspan_cache_stores_refused": OffloadingCounterMetadata("Chunks that a tier did not take.", _TIER),
    "hotspan_cache_stores_late": OffloadingCounterMetadata("Chunks that left RAM before a tier took them.", _TIER),
    "hotspan_cache_invalidated": OffloadingCounterMetadata("Chunks that their owner took back, by tier.", _TIER),
    "hotspan_cache_expired": OffloadingCounterMetadata(
        "Chunks whose time was over, or that of a chunk before them, by tier.", _TIER
    ),
    "hotspan_cache_tier_up": OffloadingGaugeMetadata("1 while a tier takes part, 0 while it is given up.", _TIER),
    "hotspan_compression_chunks": OffloadingCounterMetadata(
        "Chunks written to a tier, by what was chosen: compressed, left (it would not shrink by 5 %), plain (not "
        "tried: the tier is fast enough, or the configuration says so).",
        ("tier", "choice"),
    ),
    "hotspan_compression_bytes": OffloadingCounterMetadata(
        "Bytes of the chunks that were written compressed, as chunks and as stored; their quotient is the ratio.",
        ("tier", "what"),
    ),
    "hotspan_compression_seconds": OffloadingCounterMetadata(
        "Time that a tier's threads took to encode and decode.", ("tier", "what")
    ),
    "hotspan_cache_cuts": OffloadingCounterMetadata(
        "Requests whose prefix was cut: a promotion was late or found no room."
    ),
    "hotspan_prefetch_chunks": OffloadingCounterMetadata(
        "Chunks brought into RAM because they were announced (started), by what became of them: used by a request, "
        "unused when their time was over.",
        _WHAT,
    ),
    "hotspan_prefetch_turns": OffloadingCounterMetadata(
        "Next turns of sessions whose text was brought into RAM (--prefetch-sessions), by whether it was used before "
        "its time was over: used, unused; paused: how often this was paused because too few were used.",
        _WHAT,
    ),
    "hotspan_prefetch_held_bytes": OffloadingGaugeMetadata("Bytes in RAM that are held for announced requests."),
    "hotspan_cache_pins": OffloadingGaugeMetadata("Pins of tags that have not ended."),
    "hotspan_cache_pinned_bytes": OffloadingGaugeMetadata(
        "Bytes that pins have kept from being evicted, by tier, with those before them in their texts.", _TIER
    ),
    "hotspan_cache_store_queue_chunks": OffloadingGaugeMetadata(
        "Chunks that wait to be written to a tier, or are being written, as of the engine's last report.", _TIER
    ),
    "hotspan_l2_log_age_seconds": OffloadingGaugeMetadata(
        "Since the log of invalidations was last read; the L2 is not used while that is long ago."
    ),
    "hotspan_l2_log_malformed": OffloadingCounterMetadata(
        "Entries of the log of invalidations that could not be understood: all of their tenant was forgotten."
    ),
    "hotspan_l2_log_losses": OffloadingCounterMetadata(
        "Times that entries of the log of invalidations were lost before they were read: everything was forgotten."
    ),
    "hotspan_l2_log_faults": OffloadingCounterMetadata(
        "Times that reading the log of invalidations failed for another reason than its store."
    ),
    "hotspan_l2_clock_offset_seconds": OffloadingGaugeMetadata(
        "By which the store's clock is ahead of this host's: times to live in the L2 go by the store's."
    ),
    "hotspan_keys_failures": OffloadingCounterMetadata(
        "Failed attempts to read or unwrap a tenant's keys; while it has none, its requests are not cached."
    ),
    "hotspan_keys_tenants": OffloadingGaugeMetadata("Tenants whose keys are in memory."),
    "hotspan_keys_waiting": OffloadingGaugeMetadata("Tenants whose keys are wanted and not in memory."),
    "hotspan_cost_requests": OffloadingCounterMetadata(
        "Requests by what the cost model chose: asked in all, loaded from below RAM, refused to load some of what lies "
        "there, late when their patience was over before all was loaded.",
        ("choice",),
    ),
    "hotspan_cost_refusals": OffloadingCounterMetadata(
        "Requests that computed tokens that lay in a lower tier, by reason (slower: computing them was sooner; bound: "
        "loading would have been sooner, but might have kept the request longer than 1.05x of no cache + 50 ms; late: "
        "they did not come in time; room: RAM had no slot; unanswered: the store did not answer in time) and by "
        "whether the engine was busy or idle.",
        _REFUSED,
    ),
    "hotspan_cost_refused_tokens": OffloadingCounterMetadata("Tokens that these requests computed.", _REFUSED),
    "hotspan_cost_refused_saving_seconds": OffloadingCounterMetadata(
        "What loading them would have saved all requests, by the model's estimate.", _REFUSED
    ),
    "hotspan_cost_probes": OffloadingCounterMetadata("Chunks loaded only to see how fast a tier is."),
    "hotspan_cost_predicted_seconds": OffloadingCounterMetadata(
        "What was predicted of the engine's steps (prefill) and of requests' loads, by tier.", _WHAT
    ),
    "hotspan_cost_actual_seconds": OffloadingCounterMetadata("Measured seconds of the same.", _WHAT),
    "hotspan_cost_error": OffloadingGaugeMetadata("Mean relative error of the last 16 of these predictions.", _WHAT),
    "hotspan_cost_prefill_tokens_per_second": OffloadingGaugeMetadata(
        "Of the engine, as measured, with little context; 0 while unknown."
    ),
    "hotspan_cost_latency_seconds": OffloadingGaugeMetadata("To load one chunk, without its bytes, by tier.", _TIER),
    "hotspan_cost_bytes_per_second": OffloadingGaugeMetadata("A tier's bandwidth as measured; 0 while unknown.", _TIER),
    "hotspan_cost_queued_bytes": OffloadingGaugeMetadata("Queued to be loaded, by tier.", _TIER),
    "hotspan_cost_trust": OffloadingGaugeMetadata("Requests that may risk the bound of 1.05x + 50 ms at a time."),
    "hotspan_blend_requests": OffloadingCounterMetadata(
        "Requests with text that could be reused, by result: blended, failed, cancelled, or why they were computed in "
        "full (few_tokens, little_saved, no_windows).",
        _WHAT,
    ),
    "hotspan_blend_tokens": OffloadingCounterMetadata(
        "Tokens of blended prompts: reused, recomputed (of these), fresh (computed, of no window).", _WHAT
    ),
    "hotspan_blend_windows_stored": OffloadingCounterMetadata("Windows that were stored to be reused."),
    "hotspan_blend_seconds": OffloadingCounterMetadata("What workers took to load, compute and store for blending."),
    "hotspan_blend_up": OffloadingGaugeMetadata("1 while blending is on, 0 while it is off though it was asked for."),
    "hotspan_blend_checks": OffloadingCounterMetadata(
        "Blended prompts that were to be computed in full, too, by what came of it: agreed, differed, left_out (no "
        "room or no time).",
        _WHAT,
    ),
    "hotspan_blend_agreement_ratio": OffloadingGaugeMetadata(
        "Share of the last checks in which the same first token was the most likely one."
    ),
    "hotspan_blend_kl": OffloadingGaugeMetadata(
        "Mean loss of the first token's distribution in the last checks, in nats."
    ),
    "hotspan_encoder_hits": OffloadingCounterMetadata(
        "Encoder outputs of media loaded instead of computed, by tier.", _TIER
    ),
    "hotspan_encoder_misses": OffloadingCounterMetadata("Encoder outputs of media that were computed."),
    "hotspan_encoder_load_bytes": OffloadingCounterMetadata("Bytes of encoder outputs loaded into the engine."),
    "hotspan_encoder_store_bytes": OffloadingCounterMetadata("Bytes of encoder outputs stored in RAM."),
    "hotspan_cache_used_bytes": OffloadingGaugeMetadata("Bytes in use, by tier.", _TIER),
    "hotspan_cache_capacity_bytes": OffloadingGaugeMetadata("Capacity in bytes, by tier.", _TIER),
    "hotspan_cache_requests_left_out": OffloadingCounterMetadata(
        "Requests that are not cached, by reason: directives (refused, or not the client's to send), weights (they "
        "changed, and have no name yet), error (a mistake of hotspan's; the log has it).",
        ("reason",),
    ),
    "hotspan_cache_namespaces": OffloadingCounterMetadata(
        "Times that caching began anew because the engine's weights may have changed, by what names them: files (that "
        "they were read from), random (a name that no other engine has).",
        ("source",),
    ),
    "hotspan_cache_weights_known": OffloadingGaugeMetadata(
        "1 while requests are cached; 0 while weights change, or the digest of their files is taken."
    ),
    "hotspan_cache_bad_slots": OffloadingGaugeMetadata(
        "Slots that are set aside because reads or writes of them fail while the disk works elsewhere, by tier.", _TIER
    ),
    "hotspan_cache_token_bytes": OffloadingGaugeMetadata(
        "Bytes that tiers keep of one token, over all KV cache groups: what turns bytes into tokens."
    ),
}


_OWN = tuple({f"hotspan_{name.split('_')[1]}_" for name in DEFINITIONS})


def unregister_metrics() -> None:
    """Drop the metrics of an engine that this process had before, as vLLM does with its own."""
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith(_OWN) for name in names):
            REGISTRY.unregister(collector)


class CacheMetrics:
    """What a cache counted, and which gauges changed, since it was last reported.

    follower: of its L2's log. keyring: of its tenants.
    """

    def __init__(self, cache: TieredCache, follower: LogFollower | None, keyring: Keyring | None = None) -> None:
        self._cache = cache
        self._follower = follower
        self._keyring = keyring
        self._keys = NO_KEYS
        self._left_out = LEFT_OUT.counts.copy()
        self._last = cache.cost.report() if cache.cost is not None else None
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._begun: set[tuple[str, tuple[str, ...]]] = set()
        self._out = OffloadingConnectorStats()

    def report(self, token_bytes: float) -> OffloadingConnectorStats | None:
        """The metrics since the last report, or None if nothing happened. token_bytes: of KV, over all groups."""
        keys = NO_KEYS if self._keyring is None else self._keyring.stats()
        if self._cache.stats.is_empty and keys == self._keys:
            return None
        counts = self._cache.take_stats()
        self._out = OffloadingConnectorStats()
        self._report_counts(counts)
        for tier, usage in self._cache.usage().items():
            self._set("hotspan_cache_used_bytes", usage.bytes, tier.value)
            self._set("hotspan_cache_capacity_bytes", usage.capacity_bytes, tier.value)
            if tier is not Tier.L2:  # which evicts without asking for pins
                pinned_bytes = usage.pinned_chunks * self._cache.ram.slab.slot_bytes
                self._set("hotspan_cache_pinned_bytes", pinned_bytes, tier.value)
            self._set("hotspan_cache_tier_up", float(usage.is_up), tier.value)
            if usage.is_up and usage.counts_evictions:
                self._begin("hotspan_cache_evictions", tier.value)
            if tier is Tier.DISK:
                self._set("hotspan_cache_bad_slots", usage.bad_slots, tier.value)
        self._set("hotspan_cache_token_bytes", token_bytes)
        for tier, chunks in self._cache.queued().items():
            self._set("hotspan_cache_store_queue_chunks", chunks, tier.value)
        self._set("hotspan_prefetch_held_bytes", self._cache.prefetches.all_held * self._cache.ram.slab.slot_bytes)
        self._set("hotspan_cache_pins", len(self._cache.pins.live()))
        if self._follower is not None:
            self._set("hotspan_l2_log_age_seconds", self._follower.age_s)
            self._set("hotspan_l2_clock_offset_seconds", self._follower.clock_offset_s)
            for what, count in self._follower.take_faults()._asdict().items():
                self._add(f"hotspan_l2_log_{what}", count)
        if self._keyring is not None:
            self._add("hotspan_keys_failures", keys.failures - self._keys.failures)
            self._set("hotspan_keys_tenants", keys.tenants)
            self._set("hotspan_keys_waiting", keys.waiting)
            self._keys = keys
        if self._cache.cost is not None and self._last is not None:
            now, last = self._cache.cost.report(), self._last
            self._last = now
            self._report_cost(now, last)
        return self._out

    def _report_counts(self, counts: CacheStats) -> None:
        self._add("hotspan_cache_lookup_tokens", counts.lookup_tokens)
        self._add("hotspan_cache_cuts", counts.cuts)
        for reason, count in (LEFT_OUT.counts - self._left_out).items():
            self._add("hotspan_cache_requests_left_out", count, reason)
        self._left_out = LEFT_OUT.counts.copy()
        for source, count in counts.namespaces.items():
            self._add("hotspan_cache_namespaces", count, source)
        if counts.weights_known is not None:
            self._set("hotspan_cache_weights_known", float(counts.weights_known))
        for why, tokens in counts.computed_tokens.items():
            self._add("hotspan_cache_computed_tokens", tokens, why)
        for name in _BY_TIER:
            for tier, value in getattr(counts, name).items():
                self._add(f"hotspan_cache_{name}", value, tier.value)
        for what, value in counts.prefetches.items():
            self._add("hotspan_prefetch_chunks", value, what)
        for turn, value in counts.turns.items():
            self._add("hotspan_prefetch_turns", value, turn)
        for (tier, fault), value in counts.faults.items():
            self._add("hotspan_cache_faults", value, tier.value, fault)
        for name in ("compression_chunks", "compression_bytes", "compression_seconds"):
            for (tier, what), value in getattr(counts, name).items():
                self._add(f"hotspan_{name}", value, tier.value, what)
        for result, count in counts.blends.items():
            self._add("hotspan_blend_requests", count, result)
        for kind, count in counts.blended_tokens.items():
            self._add("hotspan_blend_tokens", count, kind)
        self._add("hotspan_blend_windows_stored", counts.windows_stored)
        self._add("hotspan_blend_seconds", counts.blend_seconds)
        for check, count in counts.blend_checks.items():
            self._add("hotspan_blend_checks", count, check)
        if counts.blend_agreement is not None and counts.blend_kl is not None:
            self._set("hotspan_blend_agreement_ratio", counts.blend_agreement)
            self._set("hotspan_blend_kl", counts.blend_kl)
        if counts.is_blending is not None:
            self._set("hotspan_blend_up", float(counts.is_blending))
        for tier, count in counts.encoder_hits.items():
            self._add("hotspan_encoder_hits", count, tier.value)
        for name in ("encoder_misses", "encoder_load_bytes", "encoder_store_bytes"):
            self._add(f"hotspan_{name}", getattr(counts, name))
        for name in ("load_seconds", "store_seconds"):
            for tier, samples in getattr(counts, name).items():
                for sample in samples:
                    self._out.observe_histogram(f"hotspan_cache_{name}", sample, (tier.value,))

    def _report_cost(self, now: CostReport, last: CostReport) -> None:
        for choice in COST_CHOICES:
            self._add("hotspan_cost_requests", getattr(now, choice) - getattr(last, choice), choice)
        for (reason, is_busy), count in now.refusals.items():
            known = last.refusals.get((reason, is_busy), Refused())
            labels = (reason, "busy" if is_busy else "idle")
            self._add("hotspan_cost_refusals", count.requests - known.requests, *labels)
            self._add("hotspan_cost_refused_tokens", count.tokens - known.tokens, *labels)
            self._add("hotspan_cost_refused_saving_seconds", count.saved_s - known.saved_s, *labels)
        self._add("hotspan_cost_probes", now.probed - last.probed)
        for what, (accuracy, before) in _accuracies(now, last).items():
            if accuracy.count == before.count:
                continue
            self._add("hotspan_cost_predicted_seconds", accuracy.predicted_s - before.predicted_s, what)
            self._add("hotspan_cost_actual_seconds", accuracy.actual_s - before.actual_s, what)
            self._set("hotspan_cost_error", accuracy.error, what)
        self._set("hotspan_cost_prefill_tokens_per_second", now.tokens_per_s)
        self._set("hotspan_cost_trust", now.trust)
        for tier, estimate in now.tiers.items():
            self._set("hotspan_cost_latency_seconds", estimate.latency_s, tier.value)
            self._set("hotspan_cost_bytes_per_second", estimate.bytes_per_s, tier.value)
            self._set("hotspan_cost_queued_bytes", estimate.queued_bytes, tier.value)

    def _begin(self, name: str, *labels: str) -> None:
        """Have a counter that may never count begin with 0, so that it is told from one that nobody counts."""
        if (name, labels) not in self._begun:
            self._begun.add((name, labels))
            self._out.increase_counter(name, 0, labels)

    def _add(self, name: str, value: float, *labels: str) -> None:
        """Count; 0 is not passed on."""
        if value:
            self._out.increase_counter(name, value, labels)

    def _set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, if it has changed."""
        if self._gauges.get((name, labels)) != value:
            self._gauges[name, labels] = value
            self._out.set_gauge(name, value, labels)


def _accuracies(now: CostReport, last: CostReport) -> dict[str, tuple[Accuracy, Accuracy]]:
    """What was predicted, each as it is and as it was."""
    loads = {tier.value: (accuracy, last.loads[tier]) for tier, accuracy in now.loads.items()}
    return {"prefill": (now.prefill, last.prefill)} | loads
