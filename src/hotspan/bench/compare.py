"""Runs of the same requests, side by side, each played once or several times.

Two runs are compared within one repetition, where they were played minutes apart; the median is taken after that.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from hotspan.bench.records import BenchResult, RoundName, RoundSummary

TIMES: Final = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run with its short name, the title it goes by, how its server was started, and what sets it apart.

    `results` has one result for each repetition, in their order, and at least one.
    """

    name: str
    title: str
    results: tuple[BenchResult, ...]
    command: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError(f"the run {self.name!r} has no result")

    @property
    def failed(self) -> int:
        return sum(result.failed for result in self.results)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repetitions."""

    median: float
    min: float
    max: float


Figure = Callable[[BenchResult], float | None]
"""One figure of a result; None where the result doesn't have it."""


def ttft_s(name: RoundName) -> Figure:
    """Mean TTFT of a round."""
    return _of_round(name, lambda summary: summary.ttft_s.mean if summary.ttft_s else None)


def total_s(name: RoundName) -> Figure:
    """Total latency of a round: the seconds that the whole of it took."""
    return _of_round(name, lambda summary: summary.elapsed_s)


def cpu_s(name: RoundName) -> Figure:
    """CPU-seconds of the server in a round."""
    return _of_round(name, lambda summary: summary.cpu_s)


def _of_round(name: RoundName, of: Callable[[RoundSummary], float | None]) -> Figure:
    def figure(result: BenchResult) -> float | None:
        found = result.round(name)
        return of(found.summary) if found else None

    return figure


def hit_rate(tier: str) -> Figure:
    """Hit rate of a tier in the query round."""
    return lambda result: result.query.summary.hit_rates.get(tier)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that there are, or None if there are none."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def over_repetitions(run: NamedRun, figure: Figure) -> Spread | None:
    """A figure over the repetitions of a run."""
    return spread(map(figure, run.results))


def ratio(run: NamedRun, reference: NamedRun, figure: Figure) -> Spread | None:
    """How many times the reference's figure a run's figure is, within each repetition that both have.

    A figure of 0 is less than its counter can tell (CPU time comes in ticks), and has no ratio.
    """
    pairs = [(figure(ours), figure(theirs)) for ours, theirs in zip(run.results, reference.results, strict=False)]
    return spread(ours / theirs if ours and theirs else None for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times faster the query round was than the reference's; None where either has no such figure."""

    ttft: Spread | None
    total: Spread | None


def speed_up(run: NamedRun, reference: NamedRun) -> SpeedUp:
    """Mean TTFT and total latency of the query rounds, reference over run."""
    return SpeedUp(
        ttft=ratio(reference, run, ttft_s(RoundName.QUERY)),
        total=ratio(reference, run, total_s(RoundName.QUERY)),
    )


@dataclass(frozen=True, slots=True)
class AnswerMatch:
    """How many of the requests that both runs answered have the same answer, byte for byte."""

    same: int
    compared: int

    @property
    def all_same(self) -> bool:
        return self.compared > 0 and self.same == self.compared

    def __str__(self) -> str:
        return f"{self.same} of {self.compared}" if self.compared else "-"


def has_check(run: NamedRun) -> bool:
    """Whether a run has answers to questions that were asked one at a time."""
    return any(result.round(RoundName.CHECK) for result in run.results)


def answers_as(run: NamedRun, reference: NamedRun) -> AnswerMatch | None:
    """`match_answers` where that says something about the cache, else None.

    It says nothing about the reference itself, nor about a run without the check round that the reference has.
    """
    if run.name == reference.name or (has_check(reference) and not has_check(run)):
        return None
    return match_answers(run, reference)


def match_answers(run: NamedRun, reference: NamedRun) -> AnswerMatch:
    """Compare answers request by request within each repetition; failures are compared with nothing.

    The answers are those of the check rounds where both have one, else those of the query rounds.
    """
    matches = [_match(*pair) for pair in zip(run.results, reference.results, strict=False)]
    return AnswerMatch(sum(match.same for match in matches), sum(match.compared for match in matches))


def _match(result: BenchResult, reference: BenchResult) -> AnswerMatch:
    ours, theirs = result.round(RoundName.CHECK), reference.round(RoundName.CHECK)
    if ours is None or theirs is None:
        ours, theirs = result.query, reference.query
    expected = {r.request_id: r.answer_sha256 for r in theirs.records if r.successful}
    found = {r.request_id: r.answer_sha256 for r in ours.records if r.successful and r.request_id in expected}
    return AnswerMatch(same=sum(found[name] == expected[name] for name in found), compared=len(found))
