import pytest

from hotspan.bench.records import Quantiles, RequestRecord, Slo
from hotspan.bench.summary import summarize


def record(
    order: int, ttft: float, tpot: float, *, late: float | None = None, good: bool = True, tokens: int = 11
) -> RequestRecord:
    """A request that was sent at second `order`."""
    sent = float(order)
    finished = sent + ttft + tpot * (tokens - 1)
    due = None if late is None else sent - late
    return RequestRecord(
        f"r{order}", order, good, sent, sent + ttft, finished, 100, tokens if good else 0, due_time=due
    )


def test_tpot_is_the_time_of_the_tokens_after_the_first() -> None:
    """Decoding time over the tokens after the first, per request; a single token has none, and a failure neither."""
    assert record(0, 1.0, 0.02).tpot == pytest.approx(0.02)
    assert record(0, 1.0, 0.02, tokens=1).tpot is None
    assert record(0, 1.0, 0.02, good=False).tpot is None
    records = [record(i, 1.0, 0.01 * (i + 1)) for i in range(3)] + [record(3, 1.0, 9.0, tokens=1)]
    found = summarize(records, 10.0, None, None).tpot_s
    assert found is not None
    assert (found.mean, found.p50, found.p90) == pytest.approx((0.02, 0.02, 0.028))


def test_lateness_counts_in_ttft_from_due_and_not_in_ttft() -> None:
    """TTFT runs from the submission, TTFT from due from the schedule's time; without a schedule there is none."""
    summary = summarize([record(0, 0.5, 0.01, late=2.0), record(1, 0.5, 0.01, late=0.0)], 10.0, None, None)
    assert summary.ttft_s is not None and summary.late_s is not None and summary.ttft_from_due_s is not None
    assert (summary.ttft_s.mean, summary.late_s.mean, summary.ttft_from_due_s.mean) == pytest.approx((0.5, 1.0, 1.5))
    plain = summarize([record(0, 0.5, 0.01)], 10.0, None, None)
    assert plain.late_s is None and plain.ttft_from_due_s is None


def test_a_failed_request_is_late_but_has_no_ttft_from_due() -> None:
    """Lateness is of all requests that were sent, a TTFT only of those that were answered."""
    summary = summarize([record(0, 0.5, 0.01, late=2.0, good=False)], 10.0, None, None)
    assert summary.late_s == Quantiles(2.0, 2.0, 2.0, 2.0) and summary.ttft_from_due_s is None
    assert summary.success_rate == 0.0


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(ttft_s=0.5), 3),
        (Slo(itl_s=0.02), 3),
        (Slo(ttft_s=0.5, itl_s=0.02), 2),
        (Slo(ttft_s=0.1), 0),
    ],
)
def test_goodput_is_requests_a_second_within_every_bound(slo: Slo, kept: int) -> None:
    """A request is good if it was answered and keeps both bounds; one token keeps any bound between tokens."""
    records = [
        record(0, 0.4, 0.01),
        record(1, 0.4, 0.09),
        record(2, 0.9, 0.01),
        record(3, 0.4, 9.0, tokens=1),
        record(4, 0.4, 0.01, good=False),
    ]
    summary = summarize(records, 20.0, None, None, slo=slo)
    assert summary.within_slo == kept
    assert summary.goodput == kept / 20.0


def test_without_an_objective_there_is_no_goodput() -> None:
    """No bound was asked for, so that there is no figure, rather than one that counts all."""
    summary = summarize([record(0, 0.4, 0.01)], 20.0, None, None)
    assert summary.within_slo is None and summary.goodput is None
