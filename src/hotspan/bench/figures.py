"""Figures of runs by name: over repetitions with confidence intervals, beside another run's, and conditions on them."""

import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from hotspan.bench.export import results_of
from hotspan.bench.records import BenchResult, RoundName, RoundResult
from hotspan.bench.summary import summarize
from hotspan.bench.tables import NO_VALUE, Cell, Group, Table
from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.types import Tier

# Student's t for 95 %, two-sided, by degrees of freedom from 1 on.
_T: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

_HIT_RATES: Final = tuple(f"hit_rate_{name}" for name in (*(tier.value for tier in Tier), "external"))
_SHOWN: Final = (
    *("mean_ttft_ms", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p99_ttft_from_due_ms", "mean_itl_ms", "p99_itl_ms"),
    *("mean_request_latency_ms", "elapsed_time", "input_throughput", "output_throughput", "goodput", "success_rate"),
    *("quality", "f1", "parse_rate", "parsed_f1", "cached_rate", *_HIT_RATES),
)
_EMPTY: Final = RoundResult(RoundName.QUERY, summarize((), 0.0, None, None), ())
_CONDITION: Final = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([0-9.]+(?:e-?[0-9]+)?)\s*(x?)\s*")
_COMPARES: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Interval(NamedTuple):
    """A mean and the bounds of its 95 % confidence interval; None for the bounds of a single value."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return _number(self.mean) if self.high is None else f"{_number(self.mean)} ± {_number(self.high - self.mean)}"


def _number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of at least one value."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(mean, None, None)
    t = _T[min(n - 2, len(_T) - 1)]  # beyond 16 values a little too wide
    half = t * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


_DRAWS: Final = 2000


def paired_ttft(ours: Sequence[BenchResult], theirs: Sequence[BenchResult]) -> Interval | None:
    """Mean TTFT of ours over that of theirs in the query round, with its 95 % interval over questions.

    The interval is a bootstrap over the questions that both answered: one that takes long in both takes long in both
    parts of a draw. None if there is no such question; without bounds for fewer than four.
    """
    pairs = [pair for both in zip(ours, theirs, strict=False) for pair in _pairs(*both)]
    times = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if not len(times) or not times[:, 1].sum():
        return None
    mean = float(times[:, 0].sum() / times[:, 1].sum())
    if len(times) < 4:
        return Interval(mean, None, None)
    drawn = times[np.random.default_rng(0).integers(0, len(times), (_DRAWS, len(times)))].sum(axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return Interval(mean, float(low), float(high))


def _pairs(ours: BenchResult, theirs: BenchResult) -> list[tuple[float, float]]:
    known = {record.request_id: record.ttft for record in theirs.query.records if record.successful}
    found = [record for record in ours.query.records if record.successful and record.request_id in known]
    return [(record.ttft, known[record.request_id]) for record in found]


def figures_of(result: BenchResult) -> dict[str, float | None]:
    """The figures of the query round under the names of the summary file; None where it has none."""
    return _figures(result.query)


def _figures(query: RoundResult) -> dict[str, float | None]:
    found: dict[str, Any] = results_of(query)
    rates = found.pop("hit_rates")
    numbers = {name: value for name, value in found.items() if value is None or isinstance(value, int | float)}
    return numbers | {name: rates.get(name.removeprefix("hit_rate_")) for name in _HIT_RATES}


def over(results: Sequence[BenchResult]) -> dict[str, Interval]:
    """Each figure that all repetitions have, with its interval."""
    runs = [figures_of(result) for result in results]
    known = {name: [figures[name] for figures in runs] for name in runs[0]}
    return {
        name: interval([v for v in values if v is not None]) for name, values in known.items() if None not in values
    }


def ratios(a: Sequence[BenchResult], b: Sequence[BenchResult]) -> dict[str, Interval]:
    """Each figure of b over that of a, within each repetition, with its interval."""
    pairs = [(figures_of(ours), figures_of(theirs)) for ours, theirs in zip(a, b, strict=False)]
    found = {}
    for name in pairs[0][0]:
        values = [theirs[name] / ours[name] for ours, theirs in pairs if ours[name] and theirs[name] is not None]  # type: ignore[operator]
        if len(values) == len(pairs):
            found[name] = interval(values)
    return found


def repetitions_table(results: Sequence[BenchResult]) -> Table:
    """The figures of the query round over repetitions."""
    found = over(results)
    rows = [(name, [Cell(str(found[name]))]) for name in _SHOWN if name in found]
    return Table(f"Query round: mean of {len(results)} repetitions, 95 % interval", [Group("", ["mean"])], rows)


def comparison_table(a: Sequence[BenchResult], b: Sequence[BenchResult]) -> Table:
    """Both runs side by side; a ratio whose interval leaves out 1 is a difference."""
    ours, theirs, both = over(a), over(b), ratios(a, b)
    rows = []
    for name in _SHOWN:
        if name in ours or name in theirs:
            cells = [Cell(str(side[name])) if name in side else NO_VALUE for side in (ours, theirs)]
            rows.append((name, [*cells, *_ratio_cells(both.get(name))]))
    return Table("Query round: B beside A", [Group("", ["A", "B", "B / A", "difference"])], rows)


def _ratio_cells(ratio: Interval | None) -> list[Cell]:
    if ratio is None:
        return [NO_VALUE, NO_VALUE]
    if ratio.low is None or ratio.high is None:
        return [Cell(f"{ratio}x"), Cell("unknown: one repetition", "soft")]
    word = "higher" if ratio.low > 1 else "lower" if ratio.high < 1 else "none"
    return [Cell(f"{ratio}x"), Cell(word, "soft" if word == "none" else "strong")]


@dataclass(frozen=True, slots=True)
class Condition:
    """What fails a run: a figure above or below a limit, or above or below a multiple of the other run's figure."""

    figure: str
    sign: str
    limit: float
    is_ratio: bool

    @classmethod
    def parse(cls, text: str, *, has_reference: bool = False) -> "Condition":
        """The condition in `p99_ttft_ms > 800`, or in `p99_ttft_ms > 1.1x` for a ratio.

        Raises: ConfigError for another text, an unknown figure, or a ratio where nothing is compared.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--fail-if {text!r}: give a figure, a comparison and a number, such as 'p99_ttft_ms > 800'"
            )
        name, sign, limit, ratio = found.groups()
        known = _figures(_EMPTY)
        if name not in known:
            hint = did_you_mean(name, known, "the results in bench_summary.json have all names")
            raise ConfigError(f"--fail-if {text!r}: there is no figure {name!r}: {hint}")
        if ratio and not has_reference:
            raise ConfigError(f"--fail-if {text!r}: a ratio needs two runs: use hotspan bench compare")
        try:
            return cls(name, sign, float(limit), bool(ratio))
        except ValueError as error:
            raise ConfigError(f"--fail-if {text!r}: {limit} is no number") from error

    def failure(self, results: Sequence[BenchResult], reference: Sequence[BenchResult] = ()) -> str | None:
        """What failed, in words; None if the condition does not hold. A figure that was not measured fails."""
        found = (ratios(reference, results) if self.is_ratio else over(results)).get(self.figure)
        limit = f"{self.limit:g}{'x' if self.is_ratio else ''}"
        if found is None:
            return f"failed: {self.figure} was not measured, so '{self.figure} {self.sign} {limit}' can't be judged"
        if not _COMPARES[self.sign](found.mean, self.limit):
            return None
        return f"failed: {self.figure} is {found.mean:.4g}{'x' if self.is_ratio else ''}, which is {self.sign} {limit}"


def broken(
    conditions: Iterable[Condition], results: Sequence[BenchResult], reference: Sequence[BenchResult] = ()
) -> list[str]:
    """A line for each condition that holds."""
    return [line for each in conditions if (line := each.failure(results, reference)) is not None]
