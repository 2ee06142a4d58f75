"""Policies, tiers and eviction side by side: every combination of them replays the same traces."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product

from hotspan.bench.records import Quantiles
from hotspan.bench.summary import quantiles
from hotspan.core.errors import ConfigError
from hotspan.core.trace import Trace, TraceFacts
from hotspan.router.types import Medium
from hotspan.simulate.costs import Setup, Sizes
from hotspan.simulate.routers import POLICIES
from hotspan.simulate.simulation import Load, Outcome, Simulation

_POINTS = 200
"""Of a distribution that is kept."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One replay.

    hit_rate:  tokens of prefixes not computed, of all. `hits`: of them by medium.
    windows:   tokens taken from windows, of all.
    imbalance: time that the busiest replica prefilled, by that of the average one; 1 is best.
    """

    seed: int
    requests: int
    hit_rate: float
    hits: dict[str, float]
    ttft_s: Quantiles
    tpot_s: Quantiles | None
    imbalance: float
    windows: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one replay, what plots show: TTFT at evenly spaced parts of the requests, and the load."""

    ttft_s: list[float]
    load: list[Load]


@dataclass(frozen=True, slots=True)
class Line:
    """The same combination over all seeds: means of the figures of each."""

    trace: str
    policy: str
    sizes: Sizes
    runs: list[Figures]
    curve: Curve

    @property
    def hit_rate(self) -> float:
        return statistics.mean(run.hit_rate for run in self.runs)

    @property
    def window_rate(self) -> float:
        return statistics.mean(run.windows for run in self.runs)

    @property
    def imbalance(self) -> float:
        return statistics.mean(run.imbalance for run in self.runs)

    def ttft_s(self, name: str) -> float:
        """`name`: mean, p50, p90 or p99."""
        return float(statistics.mean(getattr(run.ttft_s, name) for run in self.runs))

    @property
    def tpot_s(self) -> float | None:
        known = [run.tpot_s.mean for run in self.runs if run.tpot_s is not None]
        return statistics.mean(known) if known else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to replay.

    traces: by name, what gives the trace of a seed. A trace out of a file is the same for all seeds, of which the
            routers' own random choices differ then.
    sizes:  each of them is a row of its own.
    """

    traces: dict[str, Callable[[int], Trace]]
    setup: Setup = field(default_factory=Setup)
    policies: Sequence[str] = POLICIES
    sizes: Sequence[Sizes] = field(default_factory=lambda: (Sizes(),))
    seed: int = 1
    seeds: int = 1

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                raise ConfigError(f"there is no strategy {policy!r}; there are {', '.join(POLICIES)}")

    def run(self, tell: Callable[[str], None] = lambda step: None) -> tuple[list[Line], dict[str, list[TraceFacts]]]:
        """All lines, and what the traces are like; `tell` is given a word on each step."""
        facts: dict[str, list[TraceFacts]] = {}
        lines: list[Line] = []
        for name, make in self.traces.items():
            lines += self._lines(name, make, facts, tell)
        return lines, facts

    def _lines(
        self,
        name: str,
        make: Callable[[int], Trace],
        facts: dict[str, list[TraceFacts]],
        tell: Callable[[str], None],
    ) -> list[Line]:
        found: dict[tuple[str, Sizes], Line] = {}
        for seed in range(self.seed, self.seed + self.seeds):
            tell(f"{name}: making the trace of seed {seed}")
            made = make(seed)
            facts.setdefault(name, []).append(made.facts())
            for sizes, policy in product(self.sizes, self.policies):
                tell(f"{name}, seed {seed}: {policy}, {sizes.label()}")
                setup = replace(
                    self.setup,
                    sizes=sizes,
                    replicas=sizes.replicas or self.setup.replicas,
                    block_tokens=made.block_tokens,
                )
                outcome = Simulation(setup, policy, seed).run(made)
                line = found.setdefault((policy, sizes), Line(name, policy, sizes, [], _curve(outcome)))
                line.runs.append(_figures(seed, outcome))
        return list(found.values())

    def settings(self) -> dict[str, object]:
        """What a reader of the figures has to know."""
        costs = asdict(self.setup.costs)
        for name in ("load_gb_per_s", "load_s"):
            values = getattr(self.setup.costs, name)
            costs[name] = {medium.name.lower(): value for medium, value in values.items()}
        return {
            "replicas": self.setup.replicas,
            "event_delay_s": self.setup.events_s,
            "costs": costs,
            "blend": asdict(self.setup.blend) if self.setup.blend is not None else None,
            "seed": self.seed,
            "seeds": self.seeds,
        }


def _figures(seed: int, outcome: Outcome) -> Figures:
    busy_s = statistics.mean(outcome.busy_s)
    hits = {Medium.GPU: outcome.found, **outcome.loaded}
    ttft_s = quantiles(outcome.ttft_s)
    assert ttft_s is not None, "a trace has at least one request"
    return Figures(
        seed=seed,
        requests=len(outcome.ttft_s),
        hit_rate=outcome.hit_rate,
        hits={medium.name.lower(): tokens / outcome.tokens for medium, tokens in hits.items()},
        ttft_s=ttft_s,
        tpot_s=quantiles(outcome.tpot_s),
        imbalance=max(outcome.busy_s) / busy_s if busy_s else 1.0,
        windows=outcome.window_rate,
    )


def _curve(outcome: Outcome) -> Curve:
    ordered = sorted(outcome.ttft_s)
    last = len(ordered) - 1
    return Curve([ordered[round(n * last / _POINTS)] for n in range(_POINTS + 1)], outcome.load)
