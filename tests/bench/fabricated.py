"""Results that no server gave, for the tests of what is done with results."""

from random import Random

from hotspan.bench.records import BenchResult, CacheUse, RequestRecord, RoundName, RoundResult
from hotspan.bench.summary import summarize

PROMPT_TOKENS = 4100
CHECK_TTFT_S = 77.7


def fabricated_round(
    name: RoundName, requests: int, ttft_s: float, hit_rates: dict[str, float], *, answers: str = "answer"
) -> RoundResult:
    """A round whose mean TTFT is near `ttft_s`."""
    rng = Random(1)
    records, now = [], 0.0
    for i in range(requests):
        first = ttft_s * rng.uniform(0.8, 1.2)
        records.append(
            RequestRecord(
                request_id=f"doc{i % 8}_q{i // 8}",
                order=i,
                successful=True,
                submit_time=now,
                first_token_time=now + first,
                finish_time=now + first + 1.5,
                num_input_tokens=PROMPT_TOKENS,
                num_output_tokens=16,
                cached_tokens=int(PROMPT_TOKENS * sum(hit_rates.values())),
                inter_token_s=(0.1,) * 15,
                answer=f"{answers} {i}",
                finish_reason="stop",
            )
        )
        now += first
    hits = {tier: rate * PROMPT_TOKENS * requests for tier, rate in hit_rates.items()}
    use = CacheUse(hits, float(PROMPT_TOKENS * requests))
    return RoundResult(name, summarize(records, now + 1.5, 20 * ttft_s, use), tuple(records))


def fabricated_result(
    ttft_s: float, hit_rates: dict[str, float], *, answers: str = "answer", warm_up_s: float = 4.0, check: str = ""
) -> BenchResult:
    """Three rounds, the last of which hits at `hit_rates`; a fourth if `check` says what it answers."""
    cold = dict.fromkeys(hit_rates, 0.0)
    rounds = [
        fabricated_round(RoundName.PRE_WARM_UP, 4, 0.2, cold),
        fabricated_round(RoundName.WARM_UP, 8, warm_up_s, cold),
        fabricated_round(RoundName.QUERY, 16, ttft_s, hit_rates, answers=answers),
    ]
    if check:
        rounds.append(fabricated_round(RoundName.CHECK, 16, CHECK_TTFT_S, hit_rates, answers=check))
    return BenchResult(
        config={"workload": "long-doc-qa", "model": "small", "seed": 42},
        rounds=tuple(rounds),
        started_at="2026-01-01T10:00:00+00:00",
        command="hotspan bench engine",
        machine={"CPU": "A processor", "Cores": "2 usable of 2"},
    )
