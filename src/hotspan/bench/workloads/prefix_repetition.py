"""Few prefixes, each with many suffixes, in random order: the workload `prefix_repetition` of `vllm bench serve`.

Its flags, defaults and numbers are vLLM's; the texts are words, since chat completions take no token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.texts import plain_words, pre_warm_up, words_per_token
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

_PRE_WARM_UP_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class PrefixRepetitionOptions(WorkloadOptions):
    """The flags `--prefix-repetition-*`."""

    NAME: ClassVar[str] = "prefix_repetition"
    PREFIX: ClassVar[str] = "prefix_repetition"
    COUNTS: ClassVar[str] = "num_prompts"
    LENGTHS: ClassVar[tuple[str, ...]] = ("prefix_len", "suffix_len", "output_len")

    prefix_len: int = option(256, "Tokens per prefix.", kind=COUNT)
    suffix_len: int = option(256, "Tokens per suffix.", kind=COUNT)
    num_prefixes: int = option(10, "Number of prefixes.", kind=COUNT)
    output_len: int = option(128, "Maximum number of tokens per answer.", kind=COUNT)
    num_prompts: int = option(1000, "Number of requests.", kind=COUNT)
    max_concurrency: int = option(0, "Maximum number of concurrent requests. Default: no limit.", kind=NATURAL)

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        if self.num_prompts < self.num_prefixes:
            raise ConfigError(
                f"--prefix-repetition-num-prompts {self.num_prompts} is less than the number of prefixes "
                f"({self.num_prefixes}): each needs at least one request"
            )

    @property
    def tokens_each(self) -> int:
        return self.prefix_len + self.suffix_len

    @property
    def tokens_answered(self) -> int:
        return self.output_len

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, the requests in random order, and those alone."""
        asked = []
        words = await words_per_token(count_tokens)
        for i in range(self.num_prefixes):
            prefix = plain_words(f"{seed} prefix {i}", max(1, round(self.prefix_len * words)))
            for j in range(self.num_prompts // self.num_prefixes):
                suffix = plain_words(f"{seed} suffix {i} {j}", max(1, round(self.suffix_len * words)))
                asked.append(Prompt(f"p{i}_s{j}", f"{prefix} {suffix}", self.output_len))
        Random(seed).shuffle(asked)
        first = pre_warm_up(_PRE_WARM_UP_REQUESTS, self.tokens_each, self.output_len)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, _PRE_WARM_UP_REQUESTS),
            ClosedLoop(RoundName.QUERY, tuple(asked), self.max_concurrency or len(asked)),
            ClosedLoop(RoundName.CHECK, tuple(asked)),
        )
