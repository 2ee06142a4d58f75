"""A server's metrics and tiers as it shows them, with figures that grow: for the page that draws them."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hotspan.engine.metrics import DEFINITIONS

GIB, MIB = 2**30, 2**20


class Figures:
    """Metrics of the names and labels that hotspan declares. `step()` is two seconds of work."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        self._steps = 0
        for name, declared in DEFINITIONS.items():
            kind = {"Counter": Counter, "Gauge": Gauge, "Histogram": Histogram}[
                type(declared).__name__.removeprefix("Offloading").removesuffix("Metadata")
            ]
            more = {"buckets": declared.buckets} if kind is Histogram else {}  # type: ignore[attr-defined]
            labels = ["model_name", *declared.labelnames]
            self._made[name] = kind(name, "x", labels, registry=self._registry, **more)
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "x",
            registry=self._registry,
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        for name, value in (("running", 3), ("waiting", 1)):
            Gauge(f"vllm:num_requests_{name}", "x", registry=self._registry).set(value)
        gpus = Gauge("hotspan_gpu_utilization_ratio", "x", ["gpu"], registry=self._registry)
        for number, busy in (("0", 0.9), ("1", 0.7)):
            gpus.labels(number).set(busy)
        self._pool = Counter("vllm:prefix_cache_hits", "x", registry=self._registry)
        Gauge("vllm:kv_cache_usage_perc", "x", registry=self._registry).set(0.42)
        named = ["num_gpu_blocks", "block_size", "kv_cache_size_tokens"]
        info = Gauge("vllm:cache_config_info", "x", named, registry=self._registry)
        info.labels("31250", "16", "500000").set(1)
        self._ended = Counter("vllm:request_success", "x", registry=self._registry)
        for tier, used, size in (("ram", 46.5, 64), ("disk", 812, 1024), ("l2", 0, 0)):
            self._of("hotspan_cache_used_bytes", tier).set(used * GIB)
            self._of("hotspan_cache_capacity_bytes", tier).set(size * GIB)
            self._of("hotspan_cache_tier_up", tier).set(float(tier != "l2"))
            self._of("hotspan_cost_latency_seconds", tier).set(0.0003)
            self._of("hotspan_cost_bytes_per_second", tier).set(5.2e9)
        self._of("hotspan_cache_token_bytes").set(57344)
        self._of("hotspan_cost_prefill_tokens_per_second").set(5100)
        self._of("hotspan_cost_error", "disk").set(0.08)
        self._of("hotspan_cost_error", "prefill").set(0.05)

    def _of(self, name: str, *labels: str) -> Any:
        return self._made[name].labels("qwen", *labels)

    def step(self) -> None:
        """Two seconds of work."""
        self._steps += 1
        wave = self._steps % 5
        self._of("hotspan_cache_lookup_tokens").inc(20000)
        self._ended.inc(4)
        self._pool.inc(2000)
        for tier, tokens in (("ram", 9000 + 700 * wave), ("disk", 3000), ("l2", 400)):
            self._of("hotspan_cache_hit_tokens", tier).inc(tokens)
            self._of("hotspan_cache_load_bytes", tier).inc(tokens * 57344)
            self._of("hotspan_cache_store_bytes", tier).inc(4000 * 57344)
            if tier != "l2":  # which evicts by itself
                self._of("hotspan_cache_evictions", tier).inc(3 if tier == "ram" else 2)
            self._of("hotspan_cache_load_seconds", tier).observe(0.004)
            self._of("hotspan_cache_store_seconds", tier).observe(0.02)
        for what, seconds in (("prefill", 1.2), ("disk", 0.3)):
            self._of("hotspan_cost_predicted_seconds", what).inc(seconds)
            self._of("hotspan_cost_actual_seconds", what).inc(seconds * 1.07)
        self._of("hotspan_cache_computed_tokens", "differs_early").inc(4200)
        self._of("hotspan_cache_computed_tokens", "tail").inc(300)
        self._of("hotspan_cost_requests", "asked").inc(9)
        self._of("hotspan_cost_requests", "loaded").inc(4)
        for _ in range(9):
            self._ttft.observe(0.06 + 0.03 * wave)
        self._ttft.observe(0.9)

    def page(self) -> bytes:
        """What `/metrics` returns."""
        return generate_latest(self._registry)

    @property
    def hit_rate(self) -> float:
        """Of all tokens so far, the engine's own included."""
        hits = sum(self._of("hotspan_cache_hit_tokens", tier)._value.get() for tier in ("ram", "disk", "l2"))
        hits += self._pool._value.get()
        looked = self._of("hotspan_cache_lookup_tokens")._value.get()
        return float(hits / looked)


CACHE = {
    "replicas": [
        {
            "replica": "host-1/9f2c",
            "is_encrypted": False,
            "tiers": {
                "ram": {"chunks": 3317, "bytes": 3317 * 14 * MIB, "tenants": {"acme": 2100, "globex": 1217}},
                "disk": {"chunks": 57920, "bytes": 57920 * 14 * MIB, "tenants": {"acme": 41000, "globex": 16920}},
                "l2": {"chunks": 0, "bytes": 0, "tenants": {}, "store": None},
            },
            "hit_tokens": {"acme": 5_100_000, "globex": 9216},
            "texts": [
                {"tags": ["handbook@7"], "first_chunk": "00" * 8, "tenant": "acme", "hits": 412, "tokens": 5_062_656}
                | {"seconds": 1265.4},
                {"tags": [], "first_chunk": "5f3a9c0011d2e4b7", "tenant": "globex", "hits": 9, "tokens": 9216}
                | {"seconds": 2.2},
            ],
        }
    ]
}
ADAPTERS = {"adapters": [{"name": "law", "src": "s3://models/law", "tenant": "acme"}]}
