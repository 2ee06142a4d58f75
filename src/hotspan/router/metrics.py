"""The router's metrics, for Prometheus.

What happens per request is counted in plain numbers of the event loop; `collect` reads them when somebody scrapes.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hotspan.core.breaker import BreakerState
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.event_sync import REASONS
from hotspan.router.events import EventFeed
from hotspan.router.fleet import Fleet
from hotspan.router.health import HealthState, ReplicaHealth
from hotspan.router.policy import Decision
from hotspan.router.routes import Route
from hotspan.router.session import REST, StatefulSessions
from hotspan.router.text import Prompts
from hotspan.router.types import Strategy

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "hotspan_router"
_COST_BUCKETS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_TIME_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TERMS = ("queue", "prefill", "load", "decode", "others", "affinity")
_NO_EVENTS = "no_events"

_ANY = ("gone", "refused", "failed")
_PROXIED = ("ok", "client_error", "server_error", "broken", "no_replica", *_ANY)
_OUTCOMES = {
    **dict.fromkeys((Route.WORK, Route.ONE), _PROXIED),
    Route.ALL: ("complete", "incomplete", *_ANY),
    Route.PREFETCH: (*_PROXIED, "complete", "incomplete"),
    Route.WARM: _ANY,
    **dict.fromkeys((Route.HEALTH, Route.METRICS, Route.DASHBOARD, Route.ADMIN), ("answered", *_ANY)),
}
"""Outcomes of the requests of each route."""

_WHYS = ("404", "502", "503", "504", "unreached")
"""Reasons for a retry: a status, where 404 is that of a model which the replica does not have; or no answer."""

Family = CounterMetricFamily | GaugeMetricFamily
Labels = tuple[str, ...]


class Histogram:
    """How many values there were up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Add it to a metric, under these values of its labels."""
        bounds = (*map(str, self._bounds), "+Inf")
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class Metrics(Collector):
    """What is counted where it happens. One event loop's.

    A counter whose label values are known here is 0 from the start, so that `rate()` sees its first count, too.

    registry: of everything that `page` shows.
    """

    def __init__(self, strategy: Strategy, groups: Iterable[str] = ()) -> None:
        """strategy: of all decisions. groups: with a share of the sessions."""
        requests = [(route.value, outcome) for route, outcomes in _OUTCOMES.items() for outcome in outcomes]
        decisions = [(strategy.value, group, bound) for group in (REST, *groups) for bound in ("no", "yes")]
        self.requests = _zeros(requests)
        self.decisions = _zeros(decisions)
        self.retries = _zeros((why,) for why in _WHYS)
        self.fan_outs = _zeros((outcome,) for outcome in ("complete", "incomplete"))
        self.cached_tokens = self.prompt_tokens = 0
        self.retries_refused = self.split_fallbacks = self.broken = 0
        self.first_byte_s = Histogram(_TIME_BUCKETS)
        self._costs_s = {term: Histogram(_COST_BUCKETS) for term in _TERMS}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def decided(self, decision: Decision, group: str, prompt_tokens: int) -> None:
        """A replica was chosen."""
        self.decisions[decision.strategy.value, group, "yes" if decision.session_bound else "no"] += 1
        self.cached_tokens += decision.cached_tokens
        self.prompt_tokens += prompt_tokens
        for term, seconds in decision.costs.items():
            if seconds:
                self._costs_s[term].observe(abs(seconds))

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield _counted("requests", "Requests, by route and outcome.", ("route", "outcome"), self.requests)
        yield _counted("decisions", "Replicas chosen.", ("strategy", "group", "session_bound"), self.decisions)
        yield _counted("retries", "Requests sent again, by what had happened.", ("why",), self.retries)
        yield _counted("fan_outs", "Requests sent to all replicas.", ("outcome",), self.fan_outs)
        meaning = "Tokens of prompts expected in the chosen replica's caches."
        yield _counter("cached_tokens", meaning, self.cached_tokens)
        yield _counter("prompt_tokens", "Tokens of prompts, estimated.", self.prompt_tokens)
        yield _counter("retries_refused", "Retries that the budget did not allow.", self.retries_refused)
        yield _counter("split_fallbacks", "Requests of a group of which no replica was up.", self.split_fallbacks)
        yield _counter("broken_answers", "Answers that broke off after their first byte.", self.broken)
        first = HistogramMetricFamily(f"{_PREFIX}_first_byte_seconds", "To the answer's first byte, queue included.")
        self.first_byte_s.add_to(first)
        yield first
        meaning = "Cost of the chosen replica by term, where it had any; affinity counts against it."
        costs = HistogramMetricFamily(f"{_PREFIX}_decision_cost_seconds", meaning, labels=("term",))
        for term, histogram in self._costs_s.items():
            histogram.add_to(costs, term)
        yield costs


class State(Collector):
    """What is read when somebody scrapes. feeds: of the replicas that have KV events."""

    def __init__(
        self,
        fleet: Fleet,
        health: Mapping[str, ReplicaHealth],
        dispatcher: Dispatcher,
        sessions: StatefulSessions,
        prompts: Prompts,
        feeds: Mapping[str, EventFeed],
    ) -> None:
        self._fleet, self._health, self._dispatcher = fleet, health, dispatcher
        self._sessions, self._prompts, self._feeds = sessions, prompts, feeds

    def collect(self) -> Iterator[Family]:
        yield from self._of_router()
        yield from self._of_replicas()
        yield from self._of_feeds()

    def _of_router(self) -> Iterator[Family]:
        index, queue, dispatcher = self._fleet.index, self._dispatcher.queue, self._dispatcher
        yield _gauge("queue_requests", "Requests that wait.", len(queue))
        yield _gauge("queue_tenants", "Tenants that have some waiting.", queue.tenants)
        yield _counter("queue_refused", "Requests turned away because the queue was full.", queue.refused)
        yield _counter("queue_overdue", "Requests that waited for too long.", dispatcher.overdue)
        yield _counter("queue_wait_seconds", "Spent in the queue, by all requests together.", dispatcher.waited_s)
        yield _gauge("index_bytes", "Memory of what replicas are known or assumed to hold.", index.bytes)
        yield _gauge("index_pieces", "Pieces of prompts that are known.", len(index))
        yield _counter("index_evicted_pieces", "Pieces forgotten for want of memory.", index.evicted)
        yield _gauge(
            "moved_sessions",
            "Sessions moved to another replica.",
            len(self._fleet.moved),
        )
        yield _gauge("stateful_sessions", "Sessions bound to the replica that made them.", len(self._sessions))
        yield _counter("lost_sessions", "Such sessions whose replica was gone.", self._sessions.lost)
        yield _gauge("bytes_per_token", "Of prompts, as learnt from answers.", self._prompts.bytes_per_token)
        meaning = "Requests whose prompt could not be read: routed by load alone."
        yield _counter("unread_prompts", meaning, self._prompts.unread)
        yield _counter("templates_failed", "Chats that the template refused.", self._prompts.failed)
        yield _counter("cpu_seconds", "CPU time of the router's process.", time.process_time())

    def _of_replicas(self) -> Iterator[Family]:
        health = self._health.items()
        loads = {name: replica.load for name, replica in self._fleet.replicas.items()}
        found: dict[str, float] = {name: each.can_take for name, each in health}
        yield _gauge("replica_can_take", "1 if requests may go to a replica.", found)
        states = {name: each.health.value for name, each in health}
        meaning = "What a replica says of itself; 1 at the state."
        yield _states("replica_health", meaning, "state", states, (each.value for each in HealthState))
        states = {name: each.breaker.state.value for name, each in health}
        meaning = "Whether failures keep requests away; 1 at the state."
        yield _states("breaker_state", meaning, "state", states, (each.value for each in BreakerState))
        found = {name: each.breaker.opened for name, each in health}
        yield _counter("breaker_opened", "How often a breaker opened.", found)
        found = {name: each.failed_checks for name, each in health}
        yield _counter("health_checks_failed", "Questions that a replica did not answer well.", found)
        found = {name: load.in_flight for name, load in loads.items()}
        yield _gauge("in_flight_requests", "Requests in flight at a replica.", found)
        found = {name: load.tokens_per_s for name, load in loads.items()}
        yield _gauge("replica_tokens_per_second", "Assumed prefill rate of a replica, in tokens per second.", found)
        found = {name: load.waiting_tokens for name, load in loads.items()}
        yield _gauge("replica_waiting_tokens", "Sent to a replica, and not answered yet.", found)
        found = {name: replica.is_exact for name, replica in self._fleet.replicas.items()}
        yield _gauge("replica_is_exact", "1 if events tell what a replica holds, 0 if it is assumed.", found)
        found = {name: replica.matching.is_good for name, replica in self._fleet.replicas.items()}
        yield _gauge("replica_prompts_match", "0 if the prompts read here are not those in a replica's events.", found)
        found = {name: replica.matching.share for name, replica in self._fleet.replicas.items()}
        yield _gauge("replica_prompt_match_share", "Of the last prompts' pieces, those that events reported.", found)

    def _of_feeds(self) -> Iterator[Family]:
        feeds = self._feeds
        reasons = {name: feeds[name].sync.reason if name in feeds else _NO_EVENTS for name in self._health}
        meaning = "Why what a replica holds is assumed and not known; 1 at the reason, '' is known exactly."
        yield _states("events_state", meaning, "reason", reasons, ("", _NO_EVENTS, *REASONS))
        counts = {name: feed.counts() for name, feed in feeds.items()}
        for name, meaning in EventFeed.COUNTS.items():
            yield _counter(f"events_{name}", meaning, {url: count[name] for url, count in counts.items()})


def _zeros(labels: Iterable[Labels]) -> Counter[Labels]:
    """A counter that is 0 for these labels."""
    return Counter(dict.fromkeys(labels, 0))


def _counted(name: str, meaning: str, labels: Labels, counts: Mapping[Labels, int]) -> Family:
    made = CounterMetricFamily(f"{_PREFIX}_{name}", meaning, labels=labels)
    for by, count in counts.items():
        made.add_metric(by, count)
    return made


def _gauge(name: str, meaning: str, found: float | Mapping[str, float]) -> Family:
    return _filled(GaugeMetricFamily, name, meaning, found)


def _counter(name: str, meaning: str, found: float | Mapping[str, float]) -> Family:
    return _filled(CounterMetricFamily, name, meaning, found)


def _filled(kind: type[Family], name: str, meaning: str, found: float | Mapping[str, float]) -> Family:
    """A metric of one value, or of one for each replica."""
    if not isinstance(found, Mapping):
        return kind(f"{_PREFIX}_{name}", meaning, value=found)
    made = kind(f"{_PREFIX}_{name}", meaning, labels=("replica",))
    for url, value in found.items():
        made.add_metric((url,), value)
    return made


def _states(name: str, meaning: str, label: str, now: Mapping[str, str], states: Iterable[str]) -> Family:
    """1 at the state in which a replica is, 0 at the others."""
    made, every = GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, labels=("replica", label)), tuple(states)
    for url, state in now.items():
        for each in every:
            made.add_metric((url, each), float(each == state))
    return made
