"""The figures of a round, out of its records."""

from collections.abc import Iterable, Sequence

import numpy as np

from hotspan.bench.records import CacheUse, Quantiles, RequestRecord, RoundSummary, Slo


def quantiles(values: Iterable[float | None], *, small_is_bad: bool = False) -> Quantiles | None:
    """Mean, p50, p90 and p99 of the values that there are, or None if there are none.

    small_is_bad: of rates, p90 and p99 are the slow tail.
    """
    sample = np.fromiter((value for value in values if value is not None), dtype=np.float64)
    if sample.size == 0:
        return None
    p50, p90, p99 = np.percentile(sample, (50, 10, 1) if small_is_bad else (50, 90, 99))
    return Quantiles(mean=float(sample.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


def summarize(
    records: Sequence[RequestRecord],
    elapsed_s: float,
    cpu_s: float | None,
    cache: CacheUse | None,
    *,
    slo: Slo | None = None,
    unsent: int = 0,
) -> RoundSummary:
    """The summary of a round; latencies are those of the requests that succeeded, lateness that of all."""
    good = [r for r in records if r.successful]
    samples = [r for r in records if r.sample_id]
    parsed = [r for r in samples if r.is_parsed]
    per_request_itl = [q for r in good if (q := quantiles(r.inter_token_s)) is not None]
    prompt_tokens = sum(r.num_input_tokens for r in good)
    output_tokens = sum(r.num_output_tokens for r in good)
    reported = [r.cached_tokens for r in good if r.cached_tokens is not None]
    duration = max(elapsed_s, 1e-9)
    return RoundSummary(
        requests=len(records),
        failed=len(records) - len(good),
        elapsed_s=elapsed_s,
        ttft_s=quantiles(r.ttft for r in good),
        request_latency_s=quantiles(r.request_latency for r in good),
        inter_token_s=quantiles(gap for r in good for gap in r.inter_token_s),
        inter_token_p99_s=quantiles(q.p99 for q in per_request_itl),
        decode_speed=quantiles((r.decode_speed for r in good if r.decode_speed > 0), small_is_bad=True),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(reported) if reported else None,
        input_throughput=prompt_tokens / duration,
        output_throughput=output_tokens / duration,
        cpu_s=cpu_s,
        cache=cache,
        tpot_s=quantiles(r.tpot for r in good),
        late_s=quantiles(r.late_s for r in records),
        ttft_from_due_s=quantiles(r.ttft_from_due for r in good),
        unsent=unsent,
        scored=sum(r.is_right is not None for r in records),
        right=sum(r.is_right is True for r in records),
        f1=_mean(r.f1 for r in records),
        parsed=len(parsed) if samples else None,
        parsed_f1=_mean(r.f1 for r in parsed),
        within_slo=None if slo is None else sum(slo.is_kept_by(r) for r in records),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = quantiles(values)
    return None if found is None else found.mean
