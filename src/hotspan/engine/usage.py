"""What was blended of a prompt, in an answer's `usage`, streamed or not, and for its head.

The engine says it with a request's last output. `prompt_tokens_details`, which vLLM makes in the same task behind that,
gets `blend_reused_tokens` and `blend_recomputed_tokens`, where the request has one prompt. `cached_tokens` stays the
exact prefix. For the head of an answer that is not streamed the tokens are added up over all of its prompts.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import wraps
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from hotspan.engine.entrypoints import PromptTokenUsageInfo
from hotspan.http.exchange import BLENDED

_BLENDED: ContextVar[dict[str, int] | None] = ContextVar("hotspan_blended", default=None)


def report_blends(client: AsyncLLM) -> None:
    """Put it into each answer's usage. Mutates: the client, and how vLLM makes the details. Call once a process."""
    generate, made = client.generate, PromptTokenUsageInfo.__init__

    @wraps(generate)
    def noting(*given: Any, **options: Any) -> AsyncGenerator[Any]:
        _BLENDED.set(None)
        return _noting(generate(*given, **options))

    @wraps(made)
    def detailed(self: PromptTokenUsageInfo, **given: Any) -> None:
        made(self, **given, **(_BLENDED.get() or {}))

    client.generate = noting
    PromptTokenUsageInfo.__init__ = detailed


async def _noting(outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            said = (getattr(output, "kv_transfer_params", None) or {}).get("blend")
            if said is not None:
                _BLENDED.set({f"blend_{what}_tokens": said[what] for what in ("reused", "recomputed")})
                _add(said)
            yield output


def _add(said: Mapping[str, Any]) -> None:
    """Add a prompt's tokens to those of its request, if its head can tell."""
    if (total := BLENDED.get()) is not None:
        for what in ("reused", "recomputed", "fresh"):
            total[what] = total.get(what, 0) + said[what]
