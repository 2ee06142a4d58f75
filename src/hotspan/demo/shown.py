"""One question about one document, asked at the server of each mode: the answer in words, and how soon it began."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from typing import Any, Final

from hotspan.bench.client import OpenAIClient
from hotspan.bench.compare import TIMES
from hotspan.bench.config import BenchConfig
from hotspan.bench.counters import CacheCounters
from hotspan.bench.page import section
from hotspan.bench.records import RoundName
from hotspan.bench.runner import new_salt, resolve
from hotspan.bench.workloads.base import Prompt
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.core.errors import EngineError
from hotspan.demo.plan import BOUND

QUESTION: Final = "In two sentences: what does this text explain?"
ANSWER_TOKENS: Final = 40
_ROUNDING: Final = (
    "After a cache hit vLLM computes the rest of the prompt alone, which rounds differently and may change the words: "
    "its own prefix cache gives these words, too."
)
_SEPARATOR: Final = "\n\nQuestion "
_COUNTED_AFTER_S: Final = 0.3
_FROM: Final = {"gpu": "the engine's pool", "ram": "RAM", "disk": "disk", "l2": "the L2"}


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer, and what it took.

    source: "computed", or the tier that most of the prompt came from.
    """

    mode: str
    title: str
    source: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    answer: str


def ask(
    config: BenchConfig, options: LongDocQaOptions, mode: str, title: str, *, is_computed: bool, tokens: int
) -> Shown:
    """Ask the server about a document that no measured question is about: what it has of that is pushed out by these.

    options:     the measured questions'. tokens: of the answer.
    is_computed: with a `cache_salt` of its own, so that no cache has anything of the document.
    Raises: EngineError if it does not answer.
    """
    return asyncio.run(_ask(config, replace(options, num_documents=1), mode, title, is_computed, tokens))


async def _ask(
    config: BenchConfig, options: LongDocQaOptions, mode: str, title: str, is_computed: bool, tokens: int
) -> Shown:
    async with OpenAIClient(config.base_url, config.api_key, config.request_timeout, time.monotonic) as client:
        config = await resolve(config, client, await client.models())
        count_tokens = partial(client.count_tokens, config.model)
        rounds = await options.rounds(config.scale, config.seed + 1, count_tokens)
        query = next(each.prompts[0] for each in rounds if each.name is RoundName.CHECK)
        prompt = about(query, tokens)
        salt = new_salt() if is_computed else config.salt
        before = CacheCounters.parse(await client.metrics() or "")
        record = await client.chat(prompt, 0, config.model, ignore_eos=False, salt=salt)
        await asyncio.sleep(_COUNTED_AFTER_S)
        after = CacheCounters.parse(await client.metrics() or "")
    if not record.successful:
        raise EngineError(f"the question that is to be shown failed in mode {mode!r}: {record.error}")
    cached = record.cached_tokens or 0
    return Shown(
        mode, title, _source(before, after, cached), record.ttft, record.num_input_tokens, cached, record.answer.strip()
    )


def about(query: Prompt, tokens: int) -> Prompt:
    """The question that is shown, about the document of another one."""
    return Prompt("shown", f"{query.content.rpartition(_SEPARATOR)[0]}{_SEPARATOR}0: {QUESTION}", tokens)


def _source(before: CacheCounters | None, after: CacheCounters | None, cached: int) -> str:
    """Where most of the prompt came from, as the server's counters say."""
    if not cached:
        return "computed"
    was, now = (each.hit_tokens if each else {} for each in (before, after))
    gained = {tier: now[tier] - was.get(tier, 0.0) for tier in now}
    most = max(gained, key=gained.__getitem__, default="")
    return _FROM.get(most, most) if most and gained[most] > 0 else "a cache"


def lines(shown: Sequence[Shown]) -> list[str]:
    """The answers as a terminal shows them; none without one that was computed."""
    if not shown or shown[0].source != "computed":
        return []
    first = shown[0]
    found = [
        f'"{QUESTION}", about {first.prompt_tokens:,} tokens of text',
        *(f"  {each.title} ({each.source}): first word after {_took(each, shown)}" for each in shown),
        f"  the answer: {' '.join(first.answer.split())}",
    ]
    others = [each for each in shown if each.answer != first.answer]
    if (own := _own(shown)) in others:
        found += [f"  vLLM's own prefix cache: {' '.join(own.answer.split())}", f"  {_ROUNDING}"]
        others = [each for each in others if each.answer != own.answer]
    return found + [f"  but {each.title}: {' '.join(each.answer.split())}" for each in others]


def page_section(shown: Sequence[Shown]) -> str:
    """The same as a part of the page."""
    if not lines(shown):
        return ""
    first = shown[0]
    rows = "".join(
        f"<dt>{escape(each.title)} ({escape(each.source)})</dt><dd>first word after {escape(_took(each, shown))}"
        f"{'' if each.answer == first.answer else ': ' + escape(each.answer)}</dd>"
        for each in shown
    )
    own = _own(shown)
    asked = f"{QUESTION} About a text of {first.prompt_tokens:,} tokens, one request at a time."
    asked += f" {_ROUNDING}" if own is not None and own.answer != first.answer else ""
    return section("One question, its answer in words", asked, f"<pre>{escape(first.answer)}</pre><dl>{rows}</dl>")


def to_json(shown: Sequence[Shown]) -> list[dict[str, Any]]:
    """All fields, the answers included."""
    return [asdict(each) for each in shown]


def _own(shown: Sequence[Shown]) -> Shown | None:
    """The answer from vLLM's own prefix cache, which a hit's has to be."""
    return next((each for each in shown if each.mode == BOUND), None)


def _took(each: Shown, shown: Sequence[Shown]) -> str:
    first, own = shown[0], _own(shown)
    if each is first:
        return f"{each.ttft_s:.2f} s"
    if each.answer == first.answer:
        words = "the same words"
    elif own is not None and each is not own and each.answer == own.answer:
        words = "the same words as from vLLM's own prefix cache"
    else:
        words = "other words"
    return f"{each.ttft_s:.2f} s, {first.ttft_s / each.ttft_s:.1f}{TIMES} sooner, {words}"
