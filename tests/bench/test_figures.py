"""Figures by name: intervals over repetitions, ratios of two runs, and conditions that fail a run."""

from dataclasses import replace

import pytest
from fabricated import fabricated_result

from hotspan.bench.figures import Condition, Interval, broken, comparison_table, figures_of, interval, over, ratios
from hotspan.bench.records import BenchResult
from hotspan.core.errors import ConfigError


def lasting(*elapsed_s: float) -> tuple[BenchResult, ...]:
    """Repetitions whose query rounds took so long."""
    base = fabricated_result(1.0, {"ram": 100.0})

    def result(seconds: float) -> BenchResult:
        query = replace(base.query, summary=replace(base.query.summary, elapsed_s=seconds))
        return replace(base, rounds=tuple(query if each is base.query else each for each in base.rounds))

    return tuple(map(result, elapsed_s))


def test_an_interval_is_students() -> None:
    """1, 2, 3: mean 2, and 4.303 x 1 / sqrt(3) to each side; one value has no bounds."""
    found = interval([1.0, 2.0, 3.0])
    assert (
        found.mean == 2
        and found.high == pytest.approx(2 + 4.303 / 3**0.5)
        and found.low == pytest.approx(4 - found.high)
    )
    assert interval([5.0]) == Interval(5.0, None, None) and str(interval([5.0])) == "5"
    assert str(found) == "2 ± 2.48" and str(Interval(5156.4, -2e4, 3e4)) == "5,156 ± 24,844"
    assert interval([1.0, 2.0] * 50).high == pytest.approx(1.6, abs=0.02)


def test_ratios_are_taken_within_each_repetition() -> None:
    """A machine that gets slower for both changes no ratio."""
    a, b = lasting(1.0, 10.0, 100.0), lasting(2.0, 20.0, 200.0)
    assert ratios(a, b)["elapsed_time"] == Interval(2.0, 2.0, 2.0)
    rows = dict(comparison_table(a, b).rows)
    assert [cell.text for cell in rows["elapsed_time"][2:]] == ["2 ± 0x", "higher"]
    assert dict(comparison_table(a, a).rows)["elapsed_time"][3].text == "none"
    assert "one repetition" in dict(comparison_table(a[:1], b[:1]).rows)["elapsed_time"][3].text


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("elapsed_time > 2.5", False),
        ("elapsed_time>=2", True),
        ("elapsed_time < 2e1", True),
        ("elapsed_time > 1.9x", True),
        ("elapsed_time > 2.1 x", False),
        ("hit_rate_disk < 0.5", True),
        ("goodput < 1", True),
    ],
)
def test_a_condition_holds_or_not(text: str, fails: bool) -> None:
    """Of the mean, or of the ratio to the other run; what was not measured fails, rather than pass unseen."""
    condition = Condition.parse(text, has_reference=True)
    assert bool(broken([condition], lasting(1.0, 3.0), lasting(0.5, 1.5))) is fails


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("elapsed_time", "give a figure"),
        ("elapsed_tim > 1", "elapsed_time"),
        ("elapsed_time > 1x", "hotspan bench compare"),
        ("elapsed_time > 1.2.3", "no number"),
    ],
)
def test_a_condition_that_means_nothing_is_refused(text: str, said: str) -> None:
    """Before anything is measured."""
    with pytest.raises(ConfigError, match=said):
        Condition.parse(text)


def test_hit_rates_are_figures_by_tier() -> None:
    """Under a name each; a tier that the server does not report has none."""
    figures = figures_of(lasting(1.0)[0])
    assert figures["hit_rate_ram"] and figures["hit_rate_l2"] is None
    assert "hit_rate_l2" not in over(lasting(1.0, 2.0))
