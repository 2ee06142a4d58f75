"""What explaining requests costs the scheduler's thread: CPU time of a request's names alone, and with explanations.

usage: python -m benchmarks.explain_cost [--output benchmarks/results/explain-cost.json]

Conversations of 64 turns grow to TOKENS tokens in chunks of 128; each request compares with the tenant's last 64, which
are as long. "names" is what each request costs anyway: its record, and the names of its chunks. It is the smaller part
of that: vLLM's hashes of the blocks, allocation and scheduling come on top. "explained" has the explainer's part of the
same request besides. Both are measured in turns, and the medians given.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.cache.history import History
from hotspan.cache.stats import CacheStats
from hotspan.cache.withdrawals import Withdrawals
from hotspan.config.settings import CacheOptions
from hotspan.core.clock import SystemClock
from hotspan.engine.explaining import Explainer
from hotspan.engine.requests import Admission, ChunkGroup, RequestRecord
from kit.measure import quantile

BLOCK, CHUNK, KEPT = 16, 128, 64


def request(name: str, tokens: list[int], conversation: int) -> Any:
    """What the explainer and the record look at of vLLM's request."""
    hashes = [conversation.to_bytes(16) + end.to_bytes(16) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=None,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_computed_tokens=len(tokens),
        block_hashes=hashes,
    )


def spent_s(work: Callable[[], None]) -> float:
    """CPU time of this thread."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def name(admission: Admission, asked: Any) -> None:
    """What a request costs anyway."""
    admission.admit(asked).all_chunks()


def explain(explainer: Explainer, record: RequestRecord) -> None:
    """What the explainer does of a request."""
    explainer.begin(record)
    explainer.end(record)


def figures_of(tokens: int, rounds: int) -> dict[str, float]:
    """Microseconds of a request of so many tokens."""
    clock = SystemClock()
    cache: Any = SimpleNamespace(stats=CacheStats(), where=lambda key: frozenset(), has_tier_down=False)  # of no chunk
    explainer = Explainer(History(KEPT), cache, Withdrawals(), clock)
    admission = Admission(
        CacheOptions(ram_gib=0.1).settings(), bytes(32), [ChunkGroup(0, CHUNK // BLOCK, CHUNK, True)], CHUNK
    )
    text = list(range(tokens))
    names, explained = list[float](), list[float]()
    for number in range(rounds):
        asked = request(f"request-{number}", text, number % 3)
        record = admission.admit(asked)
        names.append(spent_s(partial(name, admission, asked)))
        record.all_chunks()
        record.kept_tokens = tokens // 2
        explained.append(spent_s(partial(explain, explainer, record)))
    return {
        "tokens": tokens,
        "names_us": round(1e6 * quantile(names[KEPT:], 0.5), 1),
        "explain_us": round(1e6 * quantile(explained[KEPT:], 0.5), 1),
    }


def main() -> None:
    """Measure, and print or write."""
    options = arguments(__doc__, rounds=1000)
    figures = {"requests": [figures_of(tokens, options.rounds) for tokens in (1024, 8192, 32768, 131072)]}
    print(json.dumps(figures, indent=1))
    if options.output:
        write_results(options.output, "explain-cost", command="python -m benchmarks.explain_cost", **figures)


if __name__ == "__main__":
    main()
