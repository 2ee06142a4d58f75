"""Prefixes that just do not fit a tier, twice in the same order: every second use misses that tier.

The request stream is that of `lmcache bench engine` (benchmarks/peers/streams.py compares them):

    [prefix i] [breaker, new in each request] [suffix, the same in all]

Without the model's tokenizer the text is filler. With it, the text is random tokens with IDs below 50,000; those that a
smaller vocabulary lacks are missing. Only what reuses text that is no prefix finds the suffix again. Both passes are
sent one request at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.texts import pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL, POSITIVE, between
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.bench.tokenizer import ModelTokenizer

_BREAKER_TOKENS: Final = 32
_NAME_TOKENS: Final = 4
_MIN_SUFFIX_TOKENS: Final = 100
_TOKEN_IDS: Final = (256, 50_000)
_OVERFLOW: Final = 1.05
"""The requests are this much larger than the tier: in this order an LRU evicts each of them before its second use."""


@dataclass(frozen=True, slots=True)
class PrefixSuffixTunerOptions(WorkloadOptions):
    """The flags `--psf-*`."""

    NAME: ClassVar[str] = "prefix-suffix-tuner"
    PREFIX: ClassVar[str] = "psf"
    COUNTS: ClassVar[str] = "num_prefixes"
    LENGTHS: ClassVar[tuple[str, ...]] = ("context_length",)

    context_length: int = option(8000, "Tokens per request.", kind=COUNT)
    prefix_ratio: float = option(0.8, "Share of a request that is its prefix.", kind=between(0, 1, float))
    thrash: float = option(20.0, "Size of the tier to overflow, in GiB.", kind=POSITIVE)
    num_prefixes: int = option(0, "Number of prefixes. Default: computed from --psf-thrash.", kind=NATURAL)

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        if self._suffix_tokens < _MIN_SUFFIX_TOKENS:
            raise ConfigError(
                f"--psf-prefix-ratio {self.prefix_ratio:g} leaves {self._suffix_tokens} tokens for the suffix, and "
                f"{_MIN_SUFFIX_TOKENS} are needed: lower it, or raise --psf-context-length"
            )

    @property
    def tokens_each(self) -> int:
        return self.context_length

    @property
    def takes_tokenizer(self) -> bool:
        return True

    @property
    def _prefix_tokens(self) -> int:
        return max(round(self.context_length * self.prefix_ratio), 1)

    @property
    def _suffix_tokens(self) -> int:
        return self.context_length - self._prefix_tokens - _BREAKER_TOKENS

    def count(self, scale: Scale) -> int:
        """As asked, or as many as overflow the tier."""
        return WorkloadOptions.count(self, Scale(self.thrash * _OVERFLOW, scale.tokens_per_gb))

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on a text of its own, the first pass, the second, and that again."""
        return self._rounds(scale, seed, lambda tokens, draw: " ".join(["hi"] * tokens))

    def token_rounds(self, scale: Scale, seed: int, tokenizer: "ModelTokenizer") -> Sequence[ClosedLoop]:
        """`rounds` with random tokens as the text."""
        return self._rounds(
            scale, seed, lambda tokens, draw: tokenizer.decode([draw.randrange(*_TOKEN_IDS) for _ in range(tokens)])
        )

    def _rounds(self, scale: Scale, seed: int, text: Callable[[int, Random], str]) -> Sequence[ClosedLoop]:
        """text: so many tokens from a source of random numbers."""
        breakers = Random(seed + 2)

        def part(name: str, tokens: int, draw: Random) -> str:
            return f"{name} {text(max(tokens, 1), draw)}"

        suffix = part("SUFFIX", self._suffix_tokens - 1, Random(seed + 1))
        prefixes = [
            part(f"PREFIX_{i:08x}", self._prefix_tokens - _NAME_TOKENS, Random(seed + 1000 + i))
            for i in range(self.count(scale))
        ]

        def once(number: int) -> tuple[Prompt, ...]:
            asked = []
            for i, prefix in enumerate(prefixes):
                name = f"BR_{breakers.randrange(2**32):08x}"
                breaker = part(name, _BREAKER_TOKENS - _NAME_TOKENS, breakers)
                asked.append(Prompt(f"pass{number}_p{i}", f"{prefix} {breaker} {suffix}", 1))
            return tuple(asked)

        warm_up, query = once(1), once(2)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, pre_warm_up(1, self.context_length, 1)),
            ClosedLoop(RoundName.WARM_UP, warm_up),
            ClosedLoop(RoundName.QUERY, query),
            ClosedLoop(RoundName.CHECK, query),
        )
