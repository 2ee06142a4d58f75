"""What the router says of itself, for Prometheus. Counting costs a request well under ten microseconds."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from hotspan.router.policy import Decision

PREFIX = "hotspan_router_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COST_BUCKETS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_TIME_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Labels = tuple[str, ...]
Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class Histogram:
    """How often which size was seen."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = _TIME_BUCKETS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[Bucket], float]:
        """Cumulative counts by upper bound, and the sum."""
        total = 0
        found: list[Bucket] = []
        for bound, number in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += number
            found.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return found, self._sum


@dataclass(slots=True)
class Counts:
    """What only grows, counted where it happens.

    requests:        by route and outcome.
    decisions:       by strategy, group of the split and whether the session lived there.
    costs_s:         of decisions, by term; terms that cost nothing are left out.
    cached_tokens, prompt_tokens: expected in caches, and of all prompts.
    first_byte_s:    from a request's head to the first byte of its answer.
    retries:         by why. retries_refused: for which the budget was spent.
    """

    requests: dict[Labels, int] = field(default_factory=dict)
    decisions: dict[Labels, int] = field(default_factory=dict)
    costs_s: dict[str, Histogram] = field(default_factory=dict)
    first_byte_s: Histogram = field(default_factory=Histogram)
    retries: dict[Labels, int] = field(default_factory=dict)
    fan_outs: dict[Labels, int] = field(default_factory=dict)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    retries_refused: int = 0
    split_fallbacks: int = 0
    broken: int = 0
    learn_failures: int = 0

    def request(self, route: str, outcome: str) -> None:
        """One has ended."""
        self.requests[route, outcome] = self.requests.get((route, outcome), 0) + 1

    def retry(self, why: str) -> None:
        """One is sent again."""
        self.retries[why,] = self.retries.get((why,), 0) + 1

    def decided(self, decision: Decision, group: str, prompt_tokens: int) -> None:
        """A replica was chosen."""
        labels = (decision.strategy.value, group, "yes" if decision.session_bound else "no")
        self.decisions[labels] = self.decisions.get(labels, 0) + 1
        self.cached_tokens += decision.cached_tokens
        self.prompt_tokens += prompt_tokens
        costs_s = self.costs_s
        for term, seconds in decision.costs.items():
            if not seconds:
                continue
            histogram = costs_s.get(term)
            if histogram is None:
                histogram = costs_s[term] = Histogram(_COST_BUCKETS)
            histogram.add(seconds if seconds > 0 else -seconds)


@dataclass(frozen=True, slots=True)
class Sample:
    """A figure that is read when it is asked for. by: its labels' values, in the order of the metric's names."""

    by: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric whose values are read when they are asked for."""

    name: str
    meaning: str
    labels: Labels
    read: Callable[[], list[Sample]]
    is_counter: bool = False


class Exposition(Collector):
    """All figures in Prometheus' text format: `page` is the answer to a scrape."""

    def __init__(self, counts: Counts, figures: list[Figure]) -> None:
        self._counts = counts
        self._figures = figures
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        yield _counter("requests", "Requests, by route and outcome.", ("route", "outcome"), counts.requests)
        by = ("strategy", "group", "session_bound")
        yield _counter("decisions", "Replicas chosen.", by, counts.decisions)
        yield _counter("retries", "Requests sent again, by what had happened.", ("why",), counts.retries)
        yield _counter("fan_outs", "Requests sent to all replicas.", ("outcome",), counts.fan_outs)
        for name, meaning, value in (
            ("cached_tokens", "Tokens of prompts expected in the chosen replica's caches.", counts.cached_tokens),
            ("prompt_tokens", "Tokens of prompts, estimated.", counts.prompt_tokens),
            ("retries_refused", "Retries that the budget did not allow.", counts.retries_refused),
            ("split_fallbacks", "Requests of a group of which no replica was up.", counts.split_fallbacks),
            ("broken_answers", "Answers that broke off after their first byte.", counts.broken),
            ("unread_prompts", "Requests whose prompt could not be read: routed by load alone.", counts.learn_failures),
            ("cpu_seconds", "CPU time of the router's process.", time.process_time()),
        ):
            yield CounterMetricFamily(PREFIX + name, meaning, value=value)
        costs = HistogramMetricFamily(
            f"{PREFIX}decision_cost_seconds",
            "Cost of the chosen replica by term, where it had any; affinity counts against it.",
            labels=["term"],
        )
        _histograms(costs, {(term,): histogram for term, histogram in counts.costs_s.items()})
        yield costs
        first = HistogramMetricFamily(f"{PREFIX}first_byte_seconds", "To the answer's first byte, queue included.")
        _histograms(first, {(): counts.first_byte_s})
        yield first
        for figure in self._figures:
            yield _read(figure)


def _read(figure: Figure) -> Metric:
    made: CounterMetricFamily | GaugeMetricFamily
    kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
    made = kind(PREFIX + figure.name, figure.meaning, labels=figure.labels)
    for sample in figure.read():
        made.add_metric(sample.by, sample.value)
    return made


def _counter(name: str, meaning: str, labels: Labels, found: Mapping[Labels, int]) -> CounterMetricFamily:
    made = CounterMetricFamily(PREFIX + name, meaning, labels=labels)
    for by, number in list(found.items()):
        made.add_metric(by, number)
    return made


def _histograms(family: HistogramMetricFamily, found: Mapping[Labels, Histogram]) -> None:
    for by, histogram in found.items():
        buckets, total = histogram.buckets()
        family.add_metric(by, buckets, total)
