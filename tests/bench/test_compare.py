from dataclasses import replace

import pytest
from fabricated import fabricated_result

from hotspan.bench.compare import (
    AnswerMatch,
    NamedRun,
    Spread,
    answers_as,
    cpu_s,
    match_answers,
    over_repetitions,
    ratio,
    speed_up,
    ttft_s,
)
from hotspan.bench.records import BenchResult, RoundName


def run(name: str, *results: BenchResult) -> NamedRun:
    return NamedRun(name, name, results)


def test_answers_match_by_request() -> None:
    """Answers are compared request by request, only those that both runs answered, over all repetitions."""
    one, other = fabricated_result(1.0, {}), fabricated_result(8.0, {}, answers="cold")
    assert match_answers(run("a", one), run("b", one)) == AnswerMatch(16, 16)
    assert match_answers(run("a", one, one), run("b", one, other)) == AnswerMatch(16, 32)
    first = replace(one.query.records[0], successful=False)
    failed = replace(one.query, records=(first, *one.query.records[1:]))
    partly = replace(one, rounds=(*one.rounds[:2], failed))
    assert match_answers(run("a", partly), run("b", one)) == AnswerMatch(15, 15)
    assert str(AnswerMatch(0, 0)) == "-" and not AnswerMatch(0, 0).all_same


def test_check_rounds_are_compared_where_both_have_one() -> None:
    """Two runs with a check round are compared by it, others by their query rounds."""
    alone = run("alone", fabricated_result(1.0, {}, answers="x", check="same"))
    bound = run("bound", fabricated_result(1.0, {}, answers="y", check="same"))
    without = run("without", fabricated_result(1.0, {}, answers="y"))
    assert match_answers(alone, bound) == AnswerMatch(16, 16)
    assert match_answers(without, bound) == AnswerMatch(16, 16)
    assert match_answers(without, alone) == AnswerMatch(0, 16)


def test_a_comparison_that_says_nothing_is_none() -> None:
    """A run isn't compared with itself, nor concurrent answers with a reference that was asked one at a time."""
    checked, bound = (run(name, fabricated_result(1.0, {}, check="a")) for name in ("ram", "bound"))
    unchecked, plain = (run(name, fabricated_result(1.0, {})) for name in ("none", "plain"))
    assert answers_as(bound, bound) is None
    assert answers_as(unchecked, bound) is None
    assert answers_as(checked, bound) == AnswerMatch(16, 16)
    assert answers_as(unchecked, plain) == AnswerMatch(16, 16)


def test_a_spread_is_the_median_and_the_range() -> None:
    """A figure over repetitions is their median, least and greatest; None if no repetition has it."""
    repeated = run("a", *(fabricated_result(1.0, {}, warm_up_s=s) for s in (1.0, 9.0, 2.0)))
    assert over_repetitions(repeated, cpu_s(RoundName.WARM_UP)) == Spread(40.0, 20.0, 180.0)
    assert over_repetitions(repeated, ttft_s(RoundName.CHECK)) is None


def test_ratios_are_taken_within_a_repetition() -> None:
    """The median is that of the repetitions' ratios, which a machine that slows down for one of them doesn't bend."""
    speeds = (1.0, 10.0, 3.0)
    none = run("none", *(fabricated_result(8.0 * s, {}) for s in speeds))
    ram = run("ram", *(fabricated_result(f * s, {}) for f, s in zip((1.0, 2.0, 4.0), speeds, strict=True)))
    ttft = speed_up(ram, none).ttft
    assert ttft is not None
    assert (ttft.median, ttft.min, ttft.max) == pytest.approx((4.0, 2.0, 8.0))
    cpu = ratio(ram, none, cpu_s(RoundName.QUERY))
    assert cpu is not None and cpu.median == pytest.approx(0.25)


def test_a_ratio_without_both_figures_is_none() -> None:
    """A repetition that one of the runs lacks is left out, and so is a round that one of them didn't play."""
    whole = fabricated_result(2.0, {})
    cut = replace(whole, rounds=whole.rounds[2:])
    assert ratio(run("a", cut), run("b", whole), cpu_s(RoundName.WARM_UP)) is None
    assert ratio(run("a", whole, whole), run("b", whole), cpu_s(RoundName.QUERY)) == Spread(1.0, 1.0, 1.0)


def test_a_figure_of_zero_has_no_ratio() -> None:
    """CPU time comes in ticks: a round of less than one counts in no ratio, on either side."""
    some = fabricated_result(2.0, {})
    query = some.query
    none = replace(some, rounds=(*some.rounds[:-1], replace(query, summary=replace(query.summary, cpu_s=0.0))))
    assert ratio(run("a", none), run("b", some), cpu_s(RoundName.QUERY)) is None
    assert ratio(run("a", some), run("b", none), cpu_s(RoundName.QUERY)) is None
    assert ratio(run("a", none, some), run("b", some, some), cpu_s(RoundName.QUERY)) == Spread(1.0, 1.0, 1.0)


def test_a_run_has_a_result() -> None:
    """A run without any result can't be made."""
    with pytest.raises(ValueError, match="'a' has no result"):
        run("a")
