"""Requests that share nothing, all at once, one token each: how fast a server prefills.

The request stream is that of `lmcache bench engine` (benchmarks/peers/streams.py compares them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.texts import pre_warm_up
from hotspan.config.kinds import COUNT
from hotspan.config.options import option

_RESERVED_TOKENS = 10
_PRE_WARM_UP_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class RandomPrefillOptions(WorkloadOptions):
    """The flags `--rp-*`."""

    NAME: ClassVar[str] = "random-prefill"
    PREFIX: ClassVar[str] = "rp"
    COUNTS: ClassVar[str] = "num_requests"
    LENGTHS: ClassVar[tuple[str, ...]] = ("request_length",)

    request_length: int = option(10_000, "Tokens per request.", kind=COUNT)
    num_requests: int = option(50, "Number of requests, sent at once.", kind=COUNT)

    @property
    def tokens_each(self) -> int:
        return self.request_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, all requests at once, and those alone. Nothing is warmed up."""
        words = " ".join(["hi"] * max(self.request_length - _RESERVED_TOKENS, 1))
        asked = tuple(Prompt(f"prefill_{i}", f"Request {i}: {words}", 1) for i in range(self.count(scale)))
        first = pre_warm_up(_PRE_WARM_UP_REQUESTS, self.request_length, 1)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, _PRE_WARM_UP_REQUESTS),
            ClosedLoop(RoundName.QUERY, asked, len(asked)),
            ClosedLoop(RoundName.CHECK, asked),
        )
