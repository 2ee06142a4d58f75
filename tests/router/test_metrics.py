"""The router's metrics: every label from the start, the format of Prometheus' own client, little work per request."""

import random

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference
from prometheus_client.core import HistogramMetricFamily

from hotspan.router.metrics import Histogram, Metrics
from hotspan.router.policy import Decision
from hotspan.router.types import Strategy
from tests.operations import operations

BOUNDS = (0.0, 0.1, 1.0, 100.0)


def decision(**costs: float) -> Decision:
    """One whose costs these are."""
    return Decision("r", 0, costs, 100, 0.0, True, Strategy.AUTO)


def test_counters_are_there_before_their_first_count() -> None:
    """All labels whose values are known are 0 at the start; counting adds no line to the page."""
    metrics = Metrics(Strategy.AUTO, ["canary"])
    lines = metrics.page().decode().splitlines()
    for sample in (
        'requests_total{outcome="no_replica",route="work"}',
        'requests_total{outcome="incomplete",route="all"}',
        'decisions_total{group="",session_bound="no",strategy="auto"}',
        'decisions_total{group="canary",session_bound="yes",strategy="auto"}',
        'retries_total{why="unreached"}',
        'fan_outs_total{outcome="complete"}',
        'decision_cost_seconds_count{term="affinity"}',
    ):
        assert f"hotspan_router_{sample} 0.0" in lines
    metrics.decided(decision(queue=0.5, affinity=-1.0), "canary", 200)
    metrics.requests["work", "ok"] += 1
    after = metrics.page().decode().splitlines()
    assert [line.rpartition(" ")[0] for line in after] == [line.rpartition(" ")[0] for line in lines]
    changed = sorted(set(after) - set(lines))
    assert 'hotspan_router_decisions_total{group="canary",session_bound="yes",strategy="auto"} 1.0' in changed
    assert 'hotspan_router_decision_cost_seconds_sum{term="affinity"} 1.0' in changed
    assert "hotspan_router_prompt_tokens_total 200.0" in changed


def test_a_histogram_shows_what_prometheus_own_one_does() -> None:
    """Samples and their order, also for values at a bound and above the last one."""
    registry, ours = CollectorRegistry(), Histogram(BOUNDS)
    reference = Reference("x", "y", ["term"], buckets=BOUNDS, registry=registry).labels("a")
    rng = random.Random(1)
    for value in (*BOUNDS, 1e9, *(rng.expovariate(1.0) for _ in range(50))):
        ours.observe(value)
        reference.observe(value)
    family = HistogramMetricFamily("x", "y", labels=["term"])
    ours.add_to(family, "a")
    shown = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    expected = [(s.name, s.labels, s.value) for metric in registry.collect() for s in metric.samples]
    assert shown == [sample for sample in expected if not sample[0].endswith("_created")]
    assert b'x_bucket{le="+Inf",term="a"} 55.0' in generate_latest(registry)


def test_counting_a_request_takes_few_operations() -> None:
    """Neither labels are looked up nor locks taken: a request with all terms is some increments."""
    metrics = Metrics(Strategy.AUTO)
    made = decision(queue=0.1, prefill=0.2, load=0.3, decode=0.4, others=0.5, affinity=-0.6)

    def counted() -> None:
        metrics.decided(made, "", 100)
        metrics.first_byte_s.observe(0.1)
        metrics.requests["work", "ok"] += 1

    assert operations(counted) < 96
