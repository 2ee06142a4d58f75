from hotspan.bench.metrics import CacheCounters
from hotspan.bench.records import CacheUse


def page(*lines: str) -> CacheCounters | None:
    return CacheCounters.parse("\n".join(lines) + "\n")


def test_counters_are_summed_over_labels() -> None:
    """Engines and workers of one server count together, tiers apart."""
    found = page(
        'vllm:prefix_cache_hits_total{engine="0"} 5',
        'vllm:prefix_cache_hits_total{engine="1"} 7',
        'hotspan_cache_hit_tokens_total{tier="ram",worker="0"} 1e+02',
        'hotspan_cache_hit_tokens_total{tier="ram",worker="1"} 1',
        'hotspan_cache_hit_tokens_total{tier="disk",worker="0"} 2',
        "hotspan_cache_lookup_tokens_total 300",
    )
    assert found == CacheCounters({"gpu": 12.0, "ram": 101.0, "disk": 2.0}, 300.0)


def test_deltas_start_from_zero_for_what_is_new_or_was_reset() -> None:
    """A counter that appears, or that a restart set back, counts from zero and is never negative."""
    before = CacheCounters({"gpu": 50.0, "ram": 10.0}, 100.0)
    now = CacheCounters({"gpu": 20.0, "ram": 25.0, "disk": 3.0}, 130.0)
    assert now.since(before) == CacheUse({"gpu": 20.0, "ram": 15.0, "disk": 3.0}, 30.0)
    assert now.since(None) == CacheUse(now.hit_tokens, 130.0)


def test_another_connectors_hits_are_external() -> None:
    """vLLM's count of a connector's hits is a tier only where hotspan doesn't say more."""
    external = "vllm:external_prefix_cache_hits_total 9"
    assert page("vllm:prefix_cache_hits_total 1", external) == CacheCounters({"gpu": 1.0, "external": 9.0}, None)
    both = page(external, 'hotspan_cache_hit_tokens_total{tier="ram"} 9')
    assert both == CacheCounters({"ram": 9.0}, 0.0)


def test_a_page_without_cache_counters_is_none() -> None:
    """A server that counts nothing about caches has no counters, rather than zeros."""
    assert page("# HELP up is it", "up 1") is None


def test_created_timestamps_are_not_counted() -> None:
    """The `_created` samples next to a counter are no tokens."""
    found = page("vllm:prefix_cache_hits_total 4", "vllm:prefix_cache_hits_created 1.7e9")
    assert found == CacheCounters({"gpu": 4.0}, None)
