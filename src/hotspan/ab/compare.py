"""Figures and verdict of a comparison, out of the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hotspan.ab.asking import Answer, Answers
from hotspan.ab.divergence import divergence
from hotspan.ab.items import Item
from hotspan.ab.result import Agreement, Difference, Figure, Scores, Verdict
from hotspan.ab.schedule import Name, Visit
from hotspan.ab.statistics import Interval, bootstrap, paired_difference, ratio, share

_SHOWN: Final = 200
"""Differences that a result has the answers of."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The four answers to an item. is_timed: they were asked while both sides were."""

    item: Item
    a: Answer
    a_again: Answer
    b: Answer
    b_again: Answer
    is_timed: bool = True


def collect(
    items: Sequence[Item], answers: Answers, untimed: frozenset[int] = frozenset()
) -> tuple[list[Asked], list[str]]:
    """The items whose four answers are all whole, in the order of the set, and a line for each answer that is not."""
    whole, failures = [], []
    for at, item in enumerate(items):
        visits: list[tuple[Name, int]] = [("A", 1), ("A", 2), ("B", 1), ("B", 2)]
        four = [answers[Visit(at, side, turn)] for side, turn in visits]
        failures += [
            f"{item.name}, {side}: {each.record.error}"
            for (side, _), each in zip(visits, four, strict=True)
            if not each.is_whole
        ]
        if all(each.is_whole for each in four):
            a, a_again, b, b_again = four
            whole.append(Asked(item, a, a_again, b, b_again, at not in untimed))
    return whole, failures


@dataclass(frozen=True, slots=True)
class Drift:
    """How much B drifts from A (`apart`) and from itself (`repeat`), above the noise floor, and what follows."""

    apart: Interval
    repeat: Interval
    verdict: Verdict
    why: str


def judge(asked: Sequence[Asked], max_drift: float, failed: int) -> Drift:
    """The verdict: DRIFT if the lower limit of either drift is above the maximum, PASS if both upper limits are not.

    Where A differs from itself no drift is seen, so the upper limits are for the other items: they are divided by their
    share. A failed request makes a PASS impossible.
    """
    noise = [not each.a.is_same(each.a_again) for each in asked]
    apart = paired_difference([not each.a.is_same(each.b) for each in asked], noise)
    repeat = paired_difference([not each.b.is_same(each.b_again) for each in asked], noise)
    limit = f"the maximum of {max_drift:.2%}"
    for drift, what in ((apart, "B's answers differ from A's"), (repeat, "B's answers differ from B's own")):
        if drift.low > max_drift:
            size = f"{drift.value:.2%} of the items above the noise floor, at least {drift.low:.2%}"
            why = f"{what} at {size}: above {limit}"
            return Drift(apart, repeat, Verdict.DRIFT, why)
    if not asked:
        return Drift(apart, repeat, Verdict.UNKNOWN, "no item was answered by both sides: see the failures")
    steady = 1 - sum(noise) / len(asked)
    if not steady:
        why = "A differs from itself at every item, so that no drift can be seen: does it honour --temperature?"
        return Drift(apart, repeat, Verdict.UNKNOWN, why)
    high = max(apart.high, repeat.high) / steady
    if high > max_drift:
        why = f"the drift may be up to {high:.2%}, which is above {limit}: ask more items, or lower --concurrency"
        return Drift(apart, repeat, Verdict.UNKNOWN, why)
    if failed:
        why = f"the drift is at most {high:.2%}, but {failed} requests failed: a comparison needs every answer"
        return Drift(apart, repeat, Verdict.UNKNOWN, why)
    return Drift(apart, repeat, Verdict.PASS, f"the drift is at most {high:.2%}, within {limit}")


def agreements(asked: Sequence[Asked], seed: int) -> tuple[Agreement, ...]:
    """A against itself, B against itself, and A against B."""
    return (
        _agreement("A against itself", [(each.a, each.a_again) for each in asked], seed),
        _agreement("B against itself", [(each.b, each.b_again) for each in asked], seed),
        _agreement("A against B", [(each.a, each.b) for each in asked], seed),
    )


def _agreement(pair: str, answers: Sequence[tuple[Answer, Answer]], seed: int) -> Agreement:
    found = [divergence(*each) for each in answers]
    return Agreement(
        pair,
        share([each.first is not None for each in found]),
        ratio([each.agreed for each in found], [each.length for each in found], seed),
        ratio([each.kl for each in found], [each.positions for each in found], seed),
    )


def differences(asked: Sequence[Asked]) -> tuple[Difference, ...]:
    """The items whose first answers differ; those whose difference stays come first."""
    found = [
        Difference(
            each.item.name,
            divergence(each.a, each.b).agreed,
            each.a.is_same(each.a_again) and each.b.is_same(each.b_again),
            each.a.record.answer,
            each.b.record.answer,
        )
        for each in asked
        if not each.a.is_same(each.b)
    ]
    return tuple(sorted(found, key=lambda each: not each.is_kept)[:_SHOWN])


def scores(asked: Sequence[Asked]) -> Scores | None:
    """How many answers are right; None if no item has an expected answer."""
    scored = [each for each in asked if each.item.expected is not None]
    if not scored:
        return None
    a = [each.item.is_right(each.a.record.answer) for each in scored]
    b = [each.item.is_right(each.b.record.answer) for each in scored]
    return Scores(share(a), share(b), paired_difference(b, a))


def figures(asked: Sequence[Asked], seed: int) -> tuple[Figure, ...]:
    """TTFT, ITL and tokens per second of both sides, over the items that were asked while both sides were."""
    timed = [each for each in asked if each.is_timed]
    found: list[Figure] = []

    def over(
        name: str, unit: str, factor: float, of: Callable[[Answer], float | None], *, second: bool = False
    ) -> None:
        pairs = [(of(each.a_again if second else each.a), of(each.b_again if second else each.b)) for each in timed]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if known:
            a, b = [a for a, _ in known], [b for _, b in known]
            means = (factor * sum(a) / len(a), factor * sum(b) / len(b))
            found.append(Figure(name, unit, *means, ratio(b, a, seed)))

    over("mean TTFT, first visit", "ms", 1e3, lambda each: each.record.ttft)
    over("mean TTFT, second visit", "ms", 1e3, lambda each: each.record.ttft, second=True)
    over("mean ITL", "ms", 1e3, lambda each: each.record.tpot)
    found += _throughput(timed, seed)
    return tuple(found)


def _throughput(timed: Sequence[Asked], seed: int) -> list[Figure]:
    """Output tokens per second of a request, over both visits."""
    columns = [
        [sum(of(each) for each in pair) for pair in pairs]
        for pairs in ([(each.a, each.a_again) for each in timed], [(each.b, each.b_again) for each in timed])
        for of in (_tokens, _seconds)
    ]
    sums = [sum(column) for column in columns]
    if not timed or not all(sums):
        return []
    compared = bootstrap(lambda a, a_s, b, b_s: (b / b_s) / (a / a_s), columns, seed)
    return [Figure("output per request", "tokens/s", sums[0] / sums[1], sums[2] / sums[3], compared)]


def _tokens(answer: Answer) -> float:
    return float(answer.record.num_output_tokens)


def _seconds(answer: Answer) -> float:
    return answer.record.request_latency
