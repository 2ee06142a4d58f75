"""What a server's `/metrics` says about its caches."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from hotspan.bench.records import CacheUse

GPU_QUERIES: Final = "vllm:prefix_cache_queries_total"
GPU_HITS: Final = "vllm:prefix_cache_hits_total"
EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"
HOTSPAN_HITS: Final = "hotspan_cache_hit_tokens_total"
HOTSPAN_LOOKUPS: Final = "hotspan_cache_lookup_tokens_total"


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """The cache counters of one scrape, in tokens, summed over engines and workers."""

    hit_tokens: dict[str, float]
    lookup_tokens: float | None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The counters in a Prometheus exposition, or None if it has none.

        hotspan's own counters tell the tiers apart. A vLLM server with another connector only says how much came from
        outside the engine: that is the tier "external".
        """
        hits: defaultdict[str, float] = defaultdict(float)
        external = lookup = 0.0
        has_external = has_hotspan = False
        for name, labels, value in _samples(text):
            if name == GPU_HITS:
                hits["gpu"] += value
            elif name == GPU_QUERIES:
                hits["gpu"] += 0.0
            elif name == HOTSPAN_HITS:
                hits[labels.get("tier", "hotspan")] += value
                has_hotspan = True
            elif name == HOTSPAN_LOOKUPS:
                lookup += value
                has_hotspan = True
            elif name == EXTERNAL_HITS:
                external += value
                has_external = True
        if has_external and not has_hotspan:
            hits["external"] = external
        if not hits and not has_hotspan:
            return None
        return cls(dict(hits), lookup if has_hotspan else None)

    def since(self, before: "CacheCounters | None") -> CacheUse:
        """What was counted after `before`; a counter that was absent then (or reset since) counts from zero."""
        old = before or CacheCounters({}, None)
        hits = {tier: _grown(value, old.hit_tokens.get(tier, 0.0)) for tier, value in self.hit_tokens.items()}
        lookup = None if self.lookup_tokens is None else _grown(self.lookup_tokens, old.lookup_tokens or 0.0)
        return CacheUse(hits, lookup)


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    # vLLM's page has hundreds of histogram lines; only ours are parsed.
    wanted = (GPU_QUERIES, GPU_HITS, EXTERNAL_HITS, HOTSPAN_HITS, HOTSPAN_LOOKUPS)
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
