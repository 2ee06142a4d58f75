"""The same long contexts in another order in each request: what only a cache that reuses more than prefixes helps.

Options and their defaults are those that users of `lmcache bench engine` know. If the client has the model's tokenizer,
so are the requests (LMCache 0.5.6, Apache-2.0; benchmarks/peers/streams.py compares them). Its warm-up has none of the
contexts:

    [system prompt] [context 3][blank line][context 1] ...

Without a tokenizer, texts and orders are our own, and two orders warm up:

    [system prompt][separator][context 3][separator][context 1] ... [separator][question]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from math import factorial
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Message, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.single_tokens import SingleTokens
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.bench.tokenizer import ModelTokenizer

SEPARATOR: Final = " # # "
"""What users of LMCache's blending put between texts (`--blend-separator ' # # '`)."""

_QUESTION: Final = "Which points of the texts above matter most?"
_WARM_UP_ORDERS: Final = 2
"""A text is kept for reuse when it is seen a second time, so that the third time may find it."""

_VOCABULARY: Final = 8000
_WARM_UP: Final = Prompt(
    "warmup_0", " ".join(["warmup"] * 500), 1, history=(Message("system", "You are a helpful assistant."),)
)
_FEW: Final = 10
"""Orders are drawn if there are more than this many times as many as are asked for."""


@dataclass(frozen=True, slots=True)
class LongDocPermutatorOptions(WorkloadOptions):
    """The flags `--ldp-*`."""

    NAME: ClassVar[str] = "long-doc-permutator"
    PREFIX: ClassVar[str] = "ldp"
    COUNTS: ClassVar[str] = "num_permutations"
    LENGTHS: ClassVar[tuple[str, ...]] = ("num_contexts", "context_length", "system_prompt_length", "max_output_length")

    num_contexts: int = option(5, "Number of contexts, all of them in each request.", kind=COUNT)
    context_length: int = option(5000, "Tokens per context.", kind=COUNT)
    system_prompt_length: int = option(1000, "Tokens before the contexts, the same in all requests.", kind=NATURAL)
    num_permutations: int = option(10, "Number of requests, each with an order of its own.", kind=COUNT)
    num_inflight_requests: int = option(1, "Maximum number of concurrent requests in the query round.", kind=COUNT)
    max_output_length: int = option(128, "Maximum number of tokens per answer.", kind=COUNT)

    @property
    def tokens_each(self) -> int:
        return self.system_prompt_length + self.num_contexts * self.context_length

    @property
    def takes_tokenizer(self) -> bool:
        return True

    @property
    def tokens_answered(self) -> int:
        return self.max_output_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, two orders, the others, and these alone.

        Raises: ConfigError if there are too few orders.
        """
        count, possible = self.count(scale), factorial(min(self.num_contexts, 20))
        if count + _WARM_UP_ORDERS > possible:
            raise ConfigError(
                f"--ldp-num-contexts {self.num_contexts} has {possible} orders, of which {_WARM_UP_ORDERS} warm up: "
                f"lower --ldp-num-permutations {count}, or raise the number of contexts"
            )
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
        return self._rounds(asked[:_WARM_UP_ORDERS], asked[_WARM_UP_ORDERS:])

    def token_rounds(self, scale: Scale, seed: int, tokenizer: "ModelTokenizer") -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, a request that has nothing of the contexts, the orders, and these alone.

        Of fewer possible orders than are asked for, all.
        """
        pool = SingleTokens.draw(tokenizer, _VOCABULARY, seed)
        contexts = [pool.text(self.context_length, seed + 1 + number) for number in range(self.num_contexts)]
        head = (Message("system", pool.text(self.system_prompt_length, seed)),) if self.system_prompt_length else ()
        asked = tuple(
            Prompt(
                f"perm{number}_req{number}",
                "\n\n".join(contexts[place] for place in order),
                self.max_output_length,
                history=head,
            )
            for number, order in enumerate(sorted_orders(self.num_contexts, self.count(scale), seed))
        )
        return self._rounds((_WARM_UP,), asked)

    def _rounds(self, warm_up: tuple[Prompt, ...], queries: tuple[Prompt, ...]) -> Sequence[ClosedLoop]:
        first = pre_warm_up(self.num_inflight_requests, self.tokens_each, self.max_output_length)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, self.num_inflight_requests),
            ClosedLoop(RoundName.WARM_UP, warm_up),
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


def sorted_orders(contexts: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """At most so many different orders, as LMCache's bench has them: sorted, drawn only where there are many more."""
    numbers, possible = range(contexts), factorial(contexts)
    if possible <= count * _FEW:
        return list(islice(permutations(numbers), count))
    draw, found = Random(seed), set[tuple[int, ...]]()
    while len(found) < count:
        found.add(tuple(draw.sample(numbers, contexts)))
    return sorted(found)
