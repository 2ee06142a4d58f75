"""The same long contexts in another order in each request: what only a cache that reuses more than prefixes helps.

Options and their defaults are those that users of `lmcache bench engine` know; texts and orders are our own:

    [system prompt][separator][context 3][separator][context 1] ... [separator][question]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from random import Random
from typing import ClassVar, Final

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

SEPARATOR: Final = " # # "
"""What users of LMCache's blending put between texts (`--blend-separator ' # # '`)."""

_QUESTION: Final = "Which points of the texts above matter most?"
_WARM_UP_ORDERS: Final = 2
"""A text is kept for reuse when it is seen a second time, so that the third time may find it."""


@dataclass(frozen=True, slots=True)
class LongDocPermutatorOptions(WorkloadOptions):
    """The flags `--ldp-*`."""

    NAME: ClassVar[str] = "long-doc-permutator"
    PREFIX: ClassVar[str] = "ldp"
    COUNTS: ClassVar[str] = "num_permutations"

    num_contexts: int = option(5, "Number of contexts, all of them in each request.", kind=COUNT)
    context_length: int = option(5000, "Tokens per context.", kind=COUNT)
    system_prompt_length: int = option(1000, "Tokens before the contexts, the same in all requests.", kind=NATURAL)
    num_permutations: int = option(10, "Number of requests, each with an order of its own.", kind=COUNT)
    num_inflight_requests: int = option(1, "Maximum number of concurrent requests in the query round.", kind=COUNT)
    max_output_length: int = option(128, "Maximum number of tokens per answer.", kind=COUNT)

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        orders = factorial(min(self.num_contexts, 20))
        if self.num_permutations + _WARM_UP_ORDERS > orders:
            raise ConfigError(
                f"--ldp-num-contexts {self.num_contexts} has {orders} orders, of which {_WARM_UP_ORDERS} warm up: "
                f"lower --ldp-num-permutations {self.num_permutations}, or raise the number of contexts"
            )

    @property
    def tokens_each(self) -> int:
        return self.system_prompt_length + self.num_contexts * self.context_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, two orders, the others, and these alone."""
        count = self.count(scale)
        head = []
        if self.system_prompt_length:
            head = [await fitted_prose("System: ", seed * 1_000_003 + 999, self.system_prompt_length, count_tokens)]
        contexts = [
            await fitted_prose(f"Context {number}: ", seed * 1_000_003 + number, self.context_length, count_tokens)
            for number in range(self.num_contexts)
        ]
        asked = tuple(
            Prompt(
                f"order{number}_{'-'.join(map(str, order))}",
                SEPARATOR.join([*head, *(contexts[place] for place in order), _QUESTION]),
                self.max_output_length,
            )
            for number, order in enumerate(orders(self.num_contexts, count + _WARM_UP_ORDERS, seed))
        )
        first = pre_warm_up(self.num_inflight_requests, self.tokens_each, self.max_output_length)
        queries = asked[_WARM_UP_ORDERS:]
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, self.num_inflight_requests),
            ClosedLoop(RoundName.WARM_UP, asked[:_WARM_UP_ORDERS]),
            ClosedLoop(RoundName.QUERY, queries, self.num_inflight_requests),
            ClosedLoop(RoundName.CHECK, queries),
        )


def orders(contexts: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """So many different orders; there are enough of them."""
    draw, found = Random(seed), dict[tuple[int, ...], None]()
    while len(found) < count:
        order = list(range(contexts))
        draw.shuffle(order)
        found[tuple(order)] = None
    return list(found)
