"""A trace of requests (core/trace.py), replayed at its own times or faster: one's own, or a published one.

Where it tells which answers a request awaits, as agents' sessions do, it is replayed in a closed loop.

Each block of the trace becomes the same words wherever it occurs, so that a server finds again what the trace shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Final, overload

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import (
    AwaitingLoop,
    ClosedLoop,
    CountTokens,
    OpenLoop,
    Prompt,
    Round,
    Scale,
    WorkloadOptions,
)
from hotspan.bench.workloads.texts import plain_words, pre_warm_up, words_per_token
from hotspan.config.kinds import NATURAL, POSITIVE
from hotspan.config.options import option
from hotspan.core.errors import ConfigError
from hotspan.core.trace import BLOCK_TOKENS, Request, Trace, read

_CHECKED: Final = 100
_PRE_WARM_UP_REQUESTS: Final = 4


@dataclass(frozen=True, slots=True)
class TraceReplayOptions(WorkloadOptions):
    """The flags `--trace-*`."""

    NAME: ClassVar[str] = "trace-replay"
    PREFIX: ClassVar[str] = "trace"
    COUNTS: ClassVar[str] = "num_requests"

    file: str = option(
        "", "Trace in Mooncake's format, such as `hotspan trace record` writes, or agents' sessions. Required."
    )
    rate_scale: float = option(1.0, "Factor for the arrival rate.", kind=POSITIVE)
    length_scale: float = option(1.0, "Factor for the lengths of prompts and answers.", kind=POSITIVE)
    num_requests: int = option(0, "Number of requests. Default: the whole trace.", kind=NATURAL)

    @property
    def needs_scale(self) -> bool:
        """Never: the trace says how much text there is."""
        return False

    @property
    def tokens_each(self) -> int:
        """Of a block."""
        return max(1, round(BLOCK_TOKENS * self.length_scale))

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[Round]:
        """Pre-warm-up on texts of their own, the requests when they are due, and the first 100 alone."""
        if not self.file:
            raise ConfigError("the workload trace-replay needs --trace-file, a trace in Mooncake's format")
        trace = read(Path(self.file).expanduser(), self.num_requests or None).faster(self.rate_scale)
        requests = trace.requests
        prompts = _Prompts(trace, seed, self.length_scale, await words_per_token(count_tokens))
        begins_s = requests[0].at_s
        first = pre_warm_up(_PRE_WARM_UP_REQUESTS, self.tokens_each, 8)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, _PRE_WARM_UP_REQUESTS),
            _query(trace, prompts, begins_s),
            ClosedLoop(RoundName.CHECK, tuple(prompts[:_CHECKED])),
        )


def _query(trace: Trace, prompts: Sequence[Prompt], begins_s: float) -> Round:
    """In a closed loop if the trace tells what its requests await, else at its times."""
    due_s = [each.at_s - begins_s for each in trace.requests]
    if not trace.is_closed:
        return OpenLoop(RoundName.QUERY, prompts, due_s)
    pause_s = [each.think_s if each.after else at_s for each, at_s in zip(trace.requests, due_s, strict=True)]
    return AwaitingLoop(RoundName.QUERY, prompts, [each.after for each in trace.requests], pause_s)


class _Prompts(Sequence[Prompt]):
    """The prompts of a trace, each made when it is asked for."""

    def __init__(self, trace: Trace, seed: int, scale: float, words_per_token: float) -> None:
        self._requests: Sequence[Request] = trace.requests
        self._block_tokens = trace.block_tokens
        self._scale = scale

        def words(key: object, tokens: int) -> str:
            return plain_words(f"{seed} block {key}", max(1, round(tokens * words_per_token)))

        self._words = lru_cache(4096)(words)

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, at: int) -> Prompt: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, at: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        request = self._requests[at]
        block = max(1, round(self._block_tokens * self._scale))
        parts = [self._words(key, block) for key in request.keys]
        rest = round((request.tokens - len(request.keys) * self._block_tokens) * self._scale)
        if rest > 0 or not parts:
            # A trace may leave the last part without a key: it is nobody else's then.
            parts.append(self._words(f"{at} rest" if request.partial is None else request.partial, max(1, rest)))
        return Prompt(f"r{at}", " ".join(parts), max(1, round(request.answer_tokens * self._scale)))
