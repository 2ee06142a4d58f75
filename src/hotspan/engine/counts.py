"""How many tokens of a prompt were cached: counted here, for metrics, answers, traces and explanations alike.

    prompt   |-- in the engine's own pool --|-- loaded from tiers --|-- computed --|
                        kept                        loaded               at least one token

vLLM computes the last token of a prompt again if all of it is loaded, and everything if a load fails, and counts both
as cached. A request is counted once, when it begins to run: one that is preempted loads its text again.
"""

from collections import Counter
from collections.abc import Mapping

from vllm.v1.request import Request

from hotspan.cache.stats import CacheStats
from hotspan.core.types import Tier
from hotspan.engine.requests import RequestRecord


def reads_cache(request: Request) -> bool:
    """Whether a request may use what is cached: not if it needs what is computed of each token of its prompt."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def count(record: RequestRecord, tokens: int, stats: CacheStats) -> None:
    """A request begins to run, for which so many tokens are loaded or blended. Mutates: the record, and `stats`."""
    request = record.request
    record.loaded_tokens = loaded_tokens(request, record.kept_tokens, tokens)
    if not record.is_blended:
        correct(request, record.kept_tokens, record.loaded_tokens)
        stats.hit_tokens.update(by_tier(record.sources, record.loaded_tokens))
    record.kept_tokens += record.loaded_tokens
    if reads_cache(request):
        stats.lookup_tokens += request.num_prompt_tokens


def loaded_tokens(request: Request, kept_tokens: int, tokens: int) -> int:
    """How many of the tokens that are loaded for a prompt behind those that are kept are not computed again."""
    return max(min(tokens, request.num_tokens - 1 - kept_tokens), 0)


def correct(request: Request, kept_tokens: int, loaded: int) -> None:
    """Let vLLM count what is computed. Mutates: the request's statistics, of its first prefill only."""
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions <= 0 and stats.num_cached_tokens != kept_tokens + loaded:
        stats.set(request.num_prompt_tokens, min(kept_tokens, request.num_prompt_tokens), loaded)


def by_tier(sources: Mapping[Tier, int], loaded: int) -> Counter[Tier]:
    """`loaded` tokens by the tiers that they came from.

    sources: tokens of the chunks that were loaded, the tier of the text's end last. They are more where the first chunk
             is kept in part or the last token is computed again; fewer where only the end of a text is loaded (sliding
             windows, recurrent states). The difference is of the tier of the end.
    """
    found, left = Counter[Tier](), loaded
    for tier, tokens in sources.items():
        found[tier] = min(tokens, left)
        left -= found[tier]
    if left and sources:
        found[list(sources)[-1]] += left
    return +found
