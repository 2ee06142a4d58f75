"""What was cached and blended of an answer's prompts, in its `usage`, streamed or not, and for its head.

vLLM's `cached_tokens` is that of one prompt, the last one or whichever it heard of first: here they are added up over
all prompts of a request, as `prompt_tokens` is. So are `blend_reused_tokens` and `blend_recomputed_tokens`, which the
engine tells with a prompt's last output. `cached_tokens` stays the exact prefix.

A task of vLLM's begins with the prompts of an answer; another one sends a stream, and makes its usage. Both work for
the same request of a client (`COUNTED`), which knows the answer that was begun last.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from hotspan.engine.entrypoints import PromptTokenUsageInfo
from hotspan.http.exchange import COUNTED, Counted


@dataclass(slots=True)
class _Answer:
    """The prompts of one answer.

    base:    what their names begin with; the rest is their number. within: the request of a client that it is for.
    cached:  by prompt, as its first output tells. blended: of all of them.
    """

    base: str
    within: Counted | None
    prompts: int = 1
    cached: dict[str, int] = field(default_factory=dict)
    blended: dict[str, int] = field(default_factory=dict)

    def fields(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of its usage, given those that vLLM has."""
        is_sum = self.prompts > 1 and told.get("cached_tokens") is not None
        return dict(told) | ({"cached_tokens": sum(self.cached.values())} if is_sum else {}) | self.blended


_BEGUN: ContextVar[_Answer | None] = ContextVar("hotspan_answer", default=None)


def report_counts(client: AsyncLLM) -> None:
    """Put them into each answer's usage. Mutates: the client, and how vLLM makes the details. Call once a process."""
    generate, made = client.generate, PromptTokenUsageInfo.__init__

    @wraps(generate)
    def noting(prompt: Any, sampling_params: Any, request_id: str, *given: Any, **options: Any) -> AsyncGenerator[Any]:
        outputs = generate(prompt, sampling_params, request_id, *given, **options)
        return _noting(_begun(request_id), request_id, outputs)

    @wraps(made)
    def detailed(self: PromptTokenUsageInfo, **given: Any) -> None:
        answer = _answer()
        made(self, **(given if answer is None else answer.fields(given)))

    client.generate = noting
    PromptTokenUsageInfo.__init__ = detailed


def _begun(request_id: str) -> _Answer:
    """The answer that a prompt is of: vLLM numbers the prompts of one, and begins with them in one task."""
    base, _, number = request_id.rpartition("-")
    known, within = _BEGUN.get(), COUNTED.get()
    if known is not None and known.within is within and (known.base, str(known.prompts)) == (base, number):
        known.prompts += 1
        return known
    answer = _Answer(base, within)
    _BEGUN.set(answer)
    if within is not None:
        within.answer = answer
    return answer


def _answer() -> _Answer | None:
    """The answer whose usage the current task makes: one that it began, or else the last one of its request.

    What the task has from before its request, such as what warmed the engine, is none of it.
    """
    answer, within = _BEGUN.get(), COUNTED.get()
    if answer is not None and answer.within is within:
        return answer
    return None if within is None else within.answer


async def _noting(answer: _Answer, request_id: str, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            answer.cached.setdefault(request_id, getattr(output, "num_cached_tokens", None) or 0)
            said = (getattr(output, "kv_transfer_params", None) or {}).get("blend")
            if said is not None:
                _add(said, answer.blended, {"reused": "blend_reused_tokens", "recomputed": "blend_recomputed_tokens"})
                if answer.within is not None:
                    _add(said, answer.within.blended, {what: what for what in ("reused", "recomputed", "fresh")})
            yield output


def _add(said: Mapping[str, Any], total: dict[str, int], names: Mapping[str, str]) -> None:
    """Add a prompt's tokens. Mutates: `total`."""
    for what, name in names.items():
        total[name] = total.get(name, 0) + said[what]
