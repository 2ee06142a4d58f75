"""Verdicts and figures out of answers, without a server."""

from collections import Counter

import pytest

from hotspan.ab.compare import Asked, agreements, collect, differences, figures, judge, scores
from hotspan.ab.result import Verdict
from hotspan.ab.schedule import Visit
from hotspan.ab.statistics import needed_items

from .answers import answer, item, simulated

MAX_DRIFT, DETECT = 0.005, 0.02
RUNS = 200


def verdicts(drift: float, noise: float, max_drift: float = MAX_DRIFT, detect: float = DETECT) -> Counter[Verdict]:
    """The verdicts of simulated runs, each with as many items as the command says that it needs."""
    count = needed_items(max_drift, detect, noise)
    assert count is not None
    asked = (simulated(count, seed, drift=drift, noise=noise) for seed in range(RUNS))
    return Counter(judge(each, max_drift, 0).verdict for each in asked)


def test_a_planted_drift_of_2_percent_is_found_and_identical_servers_pass() -> None:
    """At the stated number of items: at least 95 % of the runs find 2 %, and all runs of identical servers pass."""
    assert verdicts(DETECT, 0.0)[Verdict.DRIFT] >= 0.95 * RUNS
    assert verdicts(0.0, 0.0) == {Verdict.PASS: RUNS}


def test_noise_is_not_drift() -> None:
    """Servers that both differ from themselves at 5 %: identical ones pass, and a planted drift of 20 % is found."""
    limits = (0.08, 0.2)
    quiet = verdicts(0.0, 0.05, *limits)
    assert quiet[Verdict.DRIFT] == 0 and quiet[Verdict.PASS] >= 0.95 * RUNS
    assert verdicts(0.2, 0.05, *limits)[Verdict.DRIFT] >= 0.95 * RUNS


def test_what_noise_hides_does_not_pass() -> None:
    """A side that never answers alike passes nothing, and upper limits grow with the items at which nothing is seen."""
    lines = iter(range(10**6))

    def asked(loud: int) -> list[Asked]:
        texts = [[str(next(lines)) if at < loud else "x" for _ in range(4)] for at in range(2000)]
        return [Asked(item(), *map(answer, four)) for four in texts]

    found = judge(asked(2000), MAX_DRIFT, 0)
    assert found.verdict is Verdict.UNKNOWN and "--temperature" in found.why
    assert found.apart.high < MAX_DRIFT, "the limits alone would pass"
    most = judge(asked(1990), MAX_DRIFT, 0)
    assert most.verdict is Verdict.UNKNOWN and "may be up to" in most.why
    assert judge(asked(0), MAX_DRIFT, 0).verdict is Verdict.PASS


def test_few_items_can_not_tell() -> None:
    """Identical answers to few items leave the drift unknown; they never pass."""
    assert judge(simulated(100, 1), MAX_DRIFT, 0).verdict is Verdict.UNKNOWN
    assert judge([], MAX_DRIFT, 0).verdict is Verdict.UNKNOWN


def test_a_failed_request_is_no_pass() -> None:
    """With enough equal answers, a failure makes it "can't tell"; a drift stays a drift."""
    assert judge(simulated(1000, 1), MAX_DRIFT, 0).verdict is Verdict.PASS
    assert judge(simulated(1000, 1), MAX_DRIFT, 1).verdict is Verdict.UNKNOWN
    assert judge(simulated(1000, 1, drift=0.1), MAX_DRIFT, 1).verdict is Verdict.DRIFT


def test_a_candidate_that_does_not_repeat_itself_drifts() -> None:
    """B's first answers are A's, its second ones (cache hits, say) are not: that is a drift, too."""
    asked = [
        Asked(item(), answer("x"), answer("x"), answer("x"), answer("y" if at % 5 == 0 else "x")) for at in range(800)
    ]
    found = judge(asked, MAX_DRIFT, 0)
    assert found.verdict is Verdict.DRIFT and "B's own" in found.why
    assert found.apart.value == 0 and found.repeat.value == pytest.approx(0.2)


def test_pairs_are_compared_each_with_its_own() -> None:
    """The noise floor, B against itself, and A against B each count their own differences."""
    asked = [
        Asked(item("1"), answer("same text"), answer("same text"), answer("same text"), answer("same text")),
        Asked(item("2"), answer("same text"), answer("noise"), answer("same text"), answer("same text")),
        Asked(item("3"), answer("same text"), answer("same text"), answer("same time"), answer("same time")),
        Asked(item("4"), answer("same text"), answer("same text"), answer("other"), answer("thing")),
    ]
    noise, own, apart = agreements(asked, 1)
    assert [each.different.count for each in (noise, own, apart)] == [1, 1, 2]
    assert apart.tokens is not None and apart.tokens.value == pytest.approx((9 + 9 + 6 + 0) / 36)
    first, second = differences(asked)
    assert (first.item, first.at, first.is_kept) == ("3", 6, True), "what stays is shown first"
    assert (second.item, second.is_kept) == ("4", False)


def test_scores_are_paired() -> None:
    """Shares of right answers of both sides, over the items that have one, and the gain with its interval."""
    right, wrong = answer("Paris"), answer("Rome")
    asked = [
        Asked(item(str(at), expected="Paris"), right, right, wrong if at < 3 else right, right) for at in range(10)
    ]
    asked.append(Asked(item("free"), wrong, wrong, wrong, wrong))
    found = scores(asked)
    assert found is not None and (found.a.count, found.b.count, found.a.total) == (10, 7, 10)
    assert found.gain.value == pytest.approx(-0.3) and found.gain.low < -0.3 < found.gain.high
    assert scores(asked[-1:]) is None


def test_times_leave_out_what_was_not_asked_side_by_side() -> None:
    """TTFT is of the timed items alone: A's of first visits beside B's of first visits."""
    pilot = Asked(item("p"), *(answer("x", ttft=0.9) for _ in range(4)), is_timed=False)
    rest = [Asked(item(), answer("x", ttft=0.1), answer("x"), answer("x", ttft=0.2), answer("x")) for _ in range(5)]
    found = {each.name: each for each in figures([pilot, *rest], 1)}
    ttft = found["mean TTFT, first visit"]
    assert (ttft.a, ttft.b) == (pytest.approx(100), pytest.approx(200))
    assert ttft.ratio is not None and ttft.ratio.value == pytest.approx(2.0)
    assert found["output per request"].a == pytest.approx(10.0)
    assert figures([pilot], 1) == ()


def test_items_with_a_failed_answer_are_left_out_and_named() -> None:
    """An item counts only if all its four answers are whole; each failure is a line with item and side."""
    answers = {Visit(at, side, turn): answer("x") for at in (0, 1) for side in ("A", "B") for turn in (1, 2)}
    answers[Visit(1, "B", 2)] = answer("", error="HTTP 500")
    asked, failures = collect([item("one"), item("two")], answers)
    assert [each.item.name for each in asked] == ["one"]
    assert failures == ["two, B: HTTP 500"]
